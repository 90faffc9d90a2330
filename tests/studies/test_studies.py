"""The studies run from end to end, at a size too small to say anything, and go on where they were stopped."""

import dataclasses
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from rich.console import Console

import cdlm
from cdlm.data.config import PrepareConfig
from cdlm.data.prepare import prepare
from cdlm.data.tokens import open_tokens
from cdlm.eval.config import EvalConfig, ReportConfig
from cdlm.eval.report.write import write_report
from cdlm.eval.results import read_rows
from cdlm.train.recipes import RECIPES
from studies import ablations, anchor, bigram, main_table, page, search, words, zoo
from studies.rows import FULL, StudyOptions, StudyRow, train_config

from ..writers import BPE, write_model
from ..zygote import run as command

ROOT = Path(__file__).parents[2]
WORDS = "the cat sees the sea and the sea sees the cat; no one else is there to see it. "


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "eval").mkdir()
    for name in ("train.txt", "valid.txt", *(f"eval/{file}" for file in main_table.SETS.values())):
        (folder / name).write_text((WORDS * 10 + "\n") * 20)
    text, valid = str(folder / "train.txt"), str(folder / "valid.txt")
    prepare(PrepareConfig((text,), folder / "tokens", packing="plain", seq_length=32, valid=(valid,)))
    return folder


def run(study: str, *flags: object) -> subprocess.CompletedProcess[str]:
    return command("python", "-m", f"studies.{study}", *map(str, flags), cwd=ROOT)


def test_a_study_from_training_to_report(corpus: Path, tmp_path: Path) -> None:
    where = ["--data", corpus / "tokens", "--texts", corpus, "--out", tmp_path / "out", "--scratch", tmp_path / "w"]
    small = ["--small", "--steps", 6, "--num-samples", 4, "--device", "cpu"]
    early = run("main_table", *where, *small, "--rows", "duo")
    assert early.returncode != 0
    assert "run --rows judge first" in early.stderr
    done = run("main_table", *where, *small, "--rows", "judge", "duo-dcd")
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "out" / "duo-dcd")
    assert [row["task"] for row in rows] == ["likelihood"] + ["unconditional"] * 18
    assert {row["sampling"]["final_step"] for row in rows[1:]} == {"none", "argmax"}
    assert rows[0]["training"]["method"] == "duo-dcd"
    assert (rows[0]["training"]["steps"], rows[0]["training"]["from"]["steps"]) == (2, 4)  # a third, two thirds
    assert not (tmp_path / "w" / "duo-dcd").exists()  # the weights are gone, the numbers stay
    assert {path.name for path in (tmp_path / "out" / "duo-dcd").iterdir()} == {
        *("done.json", "metrics.jsonl", "results.jsonl", "run.json", "samples")
    }
    again = run("main_table", *where, *small, "--rows", "duo-dcd")
    assert "done before" in again.stdout
    flags = ["--judge", tmp_path / "w" / "judge", "--task", "conditional", "--steps", 8, "--num-samples", 3]
    for expected in (4, 0):  # four sets; and nothing is read twice
        other = run("second_opinion", tmp_path / "out", *flags)
        assert other.returncode == 0, other.stderr
        assert other.stdout.count("BLEU-2") == expected
    page = write_report(ReportConfig((tmp_path / "out" / "duo-dcd",), out=tmp_path / "report")).read_text()
    assert "DUO+DCD (greedy)" in page
    assert "lambada" in page


SLOW = ("search.md", "ablations.md")
"""Pages whose tables take long to make again: their test is for soak."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.soak] if path.name in SLOW else []) for path in page.PAGES],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_the_pages_of_the_studies_say_what_their_results_say(path: Path, tmp_path: Path) -> None:
    """Every table is what `cdlm report` and the studies make of the rows that are kept."""
    text = path.read_text()
    for part in sorted(set(re.findall(r"<!-- (?:table|figure) (\w+)/", text))):
        folders = tuple(sorted((ROOT / "studies" / "results" / part).iterdir()))
        known = part in ("main", "ablations")
        write_report(ReportConfig(folders, tmp_path / part, compare="paper" if known else "none"))
    blocks = {"study": 25, "study-samples": 1, "ablations": 5, "search": 6, "zoo": 5, "README": 1}
    assert len(page.BLOCK.findall(text)) == blocks[path.stem]
    assert page.fill_page(text, tmp_path, tmp_path / "pictures") == text


def test_there_is_a_text_to_read_of_every_model_and_step_count() -> None:
    samples = (ROOT / "docs" / "study-samples.md").read_text()
    assert samples.count("> ") == len(page.SAMPLED_MODELS) * len(page.STEPS)


def test_the_words_of_texts() -> None:
    people = ["The cat sat in the sun.", "Cats of the sea, cats of the sea"]
    common, most, twice = words.measure_words(people)
    assert common == (3 + 4) / (6 + 8)
    assert most == (0 + 2 / 8) / 2  # "cats"; and no word of four letters in the first
    assert twice == 0
    assert words.measure_words(["of the of the of"])[2] == 2 / 5


def test_words_that_people_use_and_words_said_again() -> None:
    assert len(words.known_words()) == 85_223
    assert words.english_share(["The cat's tail, 1914.", "A mornado don\u2019t.<|endoftext|> xyzzy"]) == 5 / 6
    lake = "The water of a lake was called water, by the people who drink water."  # called, water; people, drink, water
    assert words.repeated_share([lake]) == 2 / 6
    assert words.repeated_share(["houses one two three stones rivers fields forest garden houses"]) == 0  # too long ago


def test_the_zoo_in_the_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained, exported, made to write, and read beside people."""
    text = "\n<|endoftext|>\n".join(" ".join(f"The cat sees {n} dogs." for n in range(k, k + 60)) for k in range(40))
    (tmp_path / "text.txt").write_text(text)
    tokens = PrepareConfig(
        (str(tmp_path / "text.txt"),), tmp_path / "tokens", train_vocab_size=300, packing="sentences", seq_length=256
    )
    prepare(tokens, Console(quiet=True))
    where = ["--data", tmp_path / "tokens", "--runs", tmp_path / "runs", "--models", tmp_path / "models"]
    where += ["--out", tmp_path / "out", "--device", "cpu", "--num-samples", 2]
    for stage in ("train", "export", "human-text"):
        done = run("zoo", stage, *where, "--small")
        assert done.returncode == 0, done.stderr
    assert cdlm.load(tmp_path / "models" / "mdlm", "cpu").eos_padded
    monkeypatch.setattr(zoo, "sweeps", lambda: [{"steps": (2,), "order": ("dilated",), "guidance": (0.5,)}])
    zoo.sample_all(tmp_path / "models", tmp_path / "out", 2, "cpu", list(zoo.MODELS))
    config = tmp_path / "models" / "mdlm" / "generation_config.json"
    presets = [{"max_denoising_steps": steps, "order": "dilated", "temperature": 0.8} for steps in (2, 3)]
    config.write_text(json.dumps({**presets[0], "step_presets": presets}))
    done = run("zoo", "sample-fresh", *where)
    assert done.returncode == 0, done.stderr
    zoo.measure_words(tmp_path / "out")
    found = json.loads((tmp_path / "out" / "words.json").read_text())
    counts = {"people": 1, "mdlm": 1, "mcdlm-guided": 1, "mdlm-fresh": 2, "mcdlm-guided-fresh": 0}
    assert {name: len(files) for name, files in found.items()} == counts
    (people,) = found["people"].values()
    assert people["english"] == 1.0
    judge = write_model(tmp_path / "judge", "causal", BPE, length=64)
    for row, count in (("people", 1), ("mdlm", 1), ("mdlm-fresh", 2)):
        flags = ["--judge", judge, "--steps", 2, 3, "--controls", "--num-samples", 2, "--match", f"^{row}/"]
        done = run("second_opinion", tmp_path / "out", *flags)
        assert done.returncode == 0, done.stderr
        assert [line["seed"] for line in read_rows(tmp_path / "out" / row)] == [int("fresh" in row)] * count


def test_second_opinion_needs_texts(tmp_path: Path) -> None:
    done = run("second_opinion", tmp_path, "--judge", "smollm2", "--steps", 8)
    assert done.returncode == 2
    assert "holds no such texts" in done.stderr
    for study in (("second_opinion", tmp_path, "--judge", "smollm2", "--steps", 8), ("words", tmp_path)):
        done = run(*study, "--match", "(")
        assert done.returncode == 2
        assert "'(' is no pattern" in done.stderr


def test_a_search_shares_its_base_and_trains_on_what_the_base_writes(corpus: Path, tmp_path: Path) -> None:
    where = ["--data", corpus / "tokens", "--texts", corpus, "--out", tmp_path / "out", "--scratch", tmp_path / "w"]
    small = ["--small", "--steps", 8, "--num-samples", 4, "--device", "cpu"]
    early = run("search", *where, *small, "--rows", "rollouts")
    assert "run --rows base first" in early.stderr
    done = run("search", *where, *small, "--rows", "judge", "base", "few-step-spread", "rollouts")
    assert done.returncode == 0, done.stderr
    for name, method in (("few-step-spread", "few-step:most=32,order=bit-reversed"), ("rollouts", "mdlm")):
        rows = read_rows(tmp_path / "out" / name)
        assert rows[0]["training"]["method"] == method
        assert (rows[0]["training"]["steps"], rows[0]["training"]["from"]["steps"]) == (2, 8)
    (bound, *_) = read_rows(tmp_path / "out" / "few-step-spread")
    assert [(one["steps"], one["order"]) for one in bound["few_step"]] == [
        (steps, order) for order in ("random", "dilated", "bit-reversed") for steps in (8, 32)
    ]
    tokens = open_tokens(tmp_path / "w" / "written-rollouts")
    assert tokens.blocks() == 32
    page = write_report(ReportConfig(tuple((tmp_path / "out").iterdir()), out=tmp_path / "report")).read_text()
    assert "Likelihood in few steps" in page
    assert "few-step-spread (dilated)" in page


def test_the_denoiser_of_a_chain_is_exact(corpus: Path, tmp_path: Path) -> None:
    """Against a sum over all texts; and the study runs."""
    chain, v, l = bigram.Chain(torch.rand(3, 3, dtype=torch.float64) * 5), 3, 5
    every = torch.cartesian_prod(*[torch.arange(v)] * l)
    joint = chain.law[every[:, 0]] * chain.step[every[:, :-1], every[:, 1:]].prod(-1)
    for x in ([v] * l, [v, 2, v, v, 0], [1, v, v, v, v], [v, v, 0, v, v]):
        fits = joint * ((torch.tensor(x) == v) | (torch.tensor(x) == every)).all(-1)
        found = chain(torch.tensor([x]), 0.5)[0].softmax(-1)
        for i in range(l):
            if x[i] == v:
                law = torch.stack([fits[every[:, i] == token].sum() for token in range(v)])
                assert torch.allclose(found[i].double(), law / law.sum(), atol=1e-5)
    flags = ["--vocab", 12, "--steps", 3, "--num-samples", 4, "--max-length", 24, "--out", tmp_path / "b.json"]
    done = run("bigram", "--data", corpus / "tokens", *flags)
    assert done.returncode == 0, done.stderr
    first, *rows = [json.loads(line) for line in (tmp_path / "b.json").read_text().splitlines()]
    assert first["what"] == "the language itself"
    assert len(rows) == len(bigram.SAMPLER_TRIALS)


def test_labels_methods_and_tasks_of_all_rows(corpus: Path) -> None:
    """A label stands before an equals sign on the command line; methods and tasks must parse."""
    options = StudyOptions(Path("d"), Path("t"), Path("o"), Path("s"), Path("j"), 600, 4, "cpu", small=False)
    for table in (main_table, anchor, ablations, search):
        rows = table.study_rows(corpus)
        for row in rows.values():
            assert "=" not in row.label
            assert row.start is None or rows[row.start].kept
            train_config(row, options, Path("x"), row.share)
            for task in row.tasks:
                judge = () if task.get("tasks") == ("likelihood",) else ("judge",)
                EvalConfig(models=("model",), **{"judge": judge, **task})


@pytest.mark.parametrize(
    "rows", [main_table.study_rows(Path()), anchor.study_rows(Path())], ids=["main table", "anchor"]
)
def test_every_row_is_a_run_of_the_same_tokens(rows: dict[str, StudyRow]) -> None:
    options = StudyOptions(Path("d"), Path("t"), Path("o"), Path("s"), Path("j"), 600, 4, "cpu", small=False)
    for name, row in rows.items():
        config = train_config(row, options, Path("x")) if not row.base else None
        if config:
            share = 0.5 if row.recipe == "small-ar" else 1.0
            assert config.steps == share * 600, name
            assert config.reference_steps == round(share * 150_000)
            assert (config.batch_size * config.seq_length, config.seed) == (65_536, row.seed)
        else:
            first = train_config(StudyRow("", row.base or ""), options, Path("x"), share=2 / 3)
            assert (first.steps, first.reference_steps) == (400, 100_000)
    assert FULL == 2000
    labels = [row.label for row in rows.values()]
    assert len(set(labels)) == len(labels)


def test_the_recipe_of_the_best_trial_is_what_was_run() -> None:
    options = StudyOptions(Path("d"), Path("t"), Path("o"), Path("s"), Path("j"), FULL, 4, "auto", small=False)
    row, recipe = search.study_rows(Path())[search.BEST], RECIPES["small-mcdlm-guided"].config
    tried = train_config(row, options, Path("x"), row.share)
    own = {"data", "out", "init_from", "log_every", "valid_every", "valid_samples", "save_every", "keep_checkpoints"}
    for field in dataclasses.fields(tried):
        if field.name not in own:
            assert getattr(recipe, field.name) == getattr(tried, field.name), field.name
    assert recipe.init_from == Path("runs/small-mdlm")


def test_the_tables_rows_are_the_papers() -> None:
    found = {row.label for row in main_table.study_rows(Path()).values()}
    assert found >= {
        *("AR", "MDLM", "MCDLM", "MCDLM-PPLOptimized", "UDLM", "DUO", "UCDLM"),
        *("MDLM+SDTT", "MCDLM+SDTT", "DUO+DCD"),
    }
