"""`cdlm eval` and `cdlm report` on two tiny models, through the command line alone."""

import json
import random
from pathlib import Path

import pytest

from cdlm.eval.scorer import open_judge
from cdlm.metrics.gen_ppl import perplexity

from .test_main import cdlm
from .test_pipeline import succeed


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny models and a tiny judge, trained on sentences of a small grammar."""
    folder = tmp_path_factory.mktemp("eval")
    draw = random.Random(1)
    things, deeds = ["cat", "dog", "old man", "sea", "rain", "bird"], ["sees", "likes", "hears", "follows"]
    sentences = [f"the {draw.choice(things)} {draw.choice(deeds)} the {draw.choice(things)}." for _ in range(4000)]
    documents = [" ".join(sentences[k : k + 20]) for k in range(0, 4000, 20)]
    (folder / "corpus.txt").write_text("\n<|endoftext|>\n".join(documents))
    succeed(
        cdlm(
            "prepare",
            f"{folder}/corpus.txt",
            "--seq-length",
            "64",
            "--train-vocab-size",
            "300",
            "--out",
            f"{folder}/data",
        )
    )
    quick = [
        "--steps",
        "150",
        "--save-every",
        "150",
        "--log-every",
        "150",
        "--valid-samples",
        "0",
        "--valid-every",
        "150",
    ]
    for method in ("mdlm", "mcdlm", "ar"):
        succeed(cdlm("train", f"tiny-{method}", "--data", f"{folder}/data", "--out", f"{folder}/{method}", *quick))
    return folder


def models(work: Path) -> list[str]:
    return [f"MDLM={work}/mdlm", f"MCDLM={work}/mcdlm", f"AR={work}/ar"]


def rows(out: Path) -> list[dict]:  # type: ignore[type-arg]
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def grid(work: Path, *judge: str) -> list[str]:
    settings = ["--steps", "4", "16", "--temperature", "1", "0.9", "0.8", "0.7", "0.6", "--num-samples", "64"]
    return [*models(work), "--judge", *judge, *settings, "--reference", f"{work}/corpus.txt"]


@pytest.fixture(scope="module")
def first(work: Path) -> str:
    """What the first evaluation said; its rows are in results/, its report in report/."""
    text = succeed(cdlm("eval", *grid(work, f"{work}/ar"), "--out", f"{work}/results"))
    succeed(cdlm("report", f"{work}/results", "--out", f"{work}/report", "--compare", "paper"))
    return text


def test_from_models_to_a_report(work: Path, first: str) -> None:
    out, report = work / "results", work / "report"
    assert "25 cells, 0 of them finished before" in first
    assert "left" in first
    assert "(in-domain)" in first
    found = [row for row in rows(out) if row["protocol"] == "robust"]
    assert len(found) == 25  # 2 models x 2 steps x 5 temperatures, and 5 of AR
    again = succeed(cdlm("eval", *grid(work, f"{work}/ar"), "--out", str(out)))
    assert "25 of them finished before" in again
    assert [row for row in rows(out) if row["protocol"] == "robust"] == found
    assert len(list((out / "samples").iterdir())) == 25
    page = (report / "report.md").read_text()
    for part in ("Table 1.", "MCDLM", "*paper*", "At matched entropy", "Frontier against frontier", "Steps needed"):
        assert part in page
    assert "| 150 | 0 |" in page  # how long it was trained, read off its folder


@pytest.mark.usefixtures("first")
def test_sharpening_is_detected(work: Path) -> None:
    """A lower temperature lowers the perplexity, and lies on the model's own line: nothing is gained."""
    data = json.loads((work / "report" / "report.json").read_text())
    plain = next(r["ppl"] for r in rows(work / "results") if _is(r, 1.0))
    sharp = next(r["ppl"] for r in rows(work / "results") if _is(r, 0.8))
    assert sharp < 0.9 * plain
    (match,) = (m for m in data["matched"] if (m["name"], m["steps"], m["control"]) == ("MDLM", 4, "T 0.8"))
    assert match["ratio"]["value"] == pytest.approx(1, abs=0.15)  # a tiny model, which another CPU trains otherwise
    assert match["ratio"]["low"] - 0.03 < 1 < match["ratio"]["high"] + 0.03


def _is(row: dict, temperature: float) -> bool:  # type: ignore[type-arg]
    how = row["sampling"]
    return row["model"] == "MDLM" and (how["steps"], how["temperature"], how["top_p"]) == (4, temperature, 1)


def test_recovery_likelihood_and_consistency(work: Path) -> None:
    out = work / "more"
    texts = ["--texts", f"mine={work}/corpus.txt", "--num-samples", "24", "--steps", "8", "--out", str(out)]
    tasks = ["--tasks", "conditional", "likelihood", "consistency"]
    succeed(cdlm("eval", *models(work), "--judge", f"{work}/ar", *tasks, *texts))
    found = {(row["task"], row["model"]): row for row in rows(out)}
    assert len(found) == 2 + 3 + 2
    assert 30 < found["conditional", "MDLM"]["bleu2"] < 100
    assert found["conditional", "MDLM"]["reference_ppl"] < found["conditional", "MDLM"]["ppl"]
    assert "biased" in found["conditional", "MDLM"]["mauve_warning"]
    assert found["likelihood", "AR"]["exact"]
    assert found["likelihood", "MDLM"]["nelbo"] < 4  # log 300 is 5.7
    assert found["likelihood", "MDLM"]["nelbo_std_over_times"] > 0
    page = Path(succeed(cdlm("report", str(out), "--out", str(work / "second"))).split()[1].rstrip(":")).read_text()
    for part in (
        "Table 3.",
        "Table 8.",
        "the originals themselves",
        "Likelihood",
        "Path invariance",
        "reliability.png",
    ):
        assert part in page


@pytest.mark.usefixtures("first")
def test_texts_are_judged_again_without_their_models(work: Path) -> None:
    out = work / "results"
    before = len(rows(out))
    succeed(cdlm("eval", "--judge", f"{work}/ar", "--protocol", "paper", "--out", str(out)))
    fresh = rows(out)[before:]
    assert len(fresh) == 25
    assert {(row["protocol"], row["num_samples"]) for row in fresh} == {("paper", 32)}


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["eval", "{}/mdlm"], "name a judge: --judge gpt2-large"),
        (["eval", "{}/nowhere", "--judge", "{}/ar"], "does not exist"),
        (["eval", "{}/mdlm", "--judge", "{}/mdlm"], "a judge is autoregressive"),
        (["eval", "{}/mdlm", "--judge", "{}"], "has no config.json"),
        (["eval", "{}/mdlm", "--judge", "{}/ar", "--tasks", "conditional"], "--texts NAME=FILE"),
        (["eval", "{}/mdlm", "--judge", "{}/ar", "--texts", "x=nowhere.txt"], "nowhere.txt"),
        (["eval", "{}/mdlm", "--judge", "{}/ar", "--protocol", "paper", "--num-samples", "64"], "--protocol robust"),
        (["eval", "{}/ar", "--tasks", "consistency", "--texts", "x={}/corpus.txt"], "no cell of this sweep"),
        (
            [
                "eval",
                "{}/mdlm",
                "--tasks",
                "likelihood",
                "--texts",
                "x={}/corpus.txt",
                "--num-samples",
                "99999",
            ],
            "blocks of 64 of the 99999",
        ),
        (
            ["eval", "{}/mdlm", "--judge", "{}/ar", "--max-length", "1024"],
            "at most the 64 tokens that mdlm was trained on",
        ),
        (["eval", "a=x", "a=y", "--judge", "z"], "two models are called a"),
        (["eval", "--judge", "{}/ar", "--out", "{}/empty"], "has no samples to score"),
        (["report", "{}/nowhere"], "cdlm eval MODEL"),
        (["report"], "name the results"),
    ],
)
def test_mistakes_are_explained(work: Path, arguments: list[str], advice: str) -> None:
    out = [] if arguments[0] == "report" or "--out" in arguments else ["--out", f"{work}/unused"]
    done = cdlm(*(argument.replace("{}", str(work)) for argument in arguments), *out, COLUMNS="200")
    assert done.returncode in (1, 2)
    assert advice in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_a_model_without_tokenizer_is_named(work: Path, tmp_path: Path) -> None:
    checkpoint = next((work / "mdlm").glob("step-*"))
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((checkpoint / name).read_bytes())
    done = cdlm("eval", str(bare), "--judge", f"{work}/ar", "--out", str(tmp_path / "out"))
    assert "has no tokenizer.json" in done.stderr
    assert done.returncode == 1


def test_a_judge_tells_shuffled_words(work: Path) -> None:
    """People's text scores well under a judge that has learnt the language, and far worse with its words shuffled."""
    judge = open_judge(str(work / "ar"), "cpu")
    documents = [text.strip()[:150] for text in (work / "corpus.txt").read_text().split("<|endoftext|>")[:20]]
    shuffled = [" ".join(random.Random(0).sample(text.split(), len(text.split()))) for text in documents]

    def score(texts: list[str]) -> float:
        scores = judge.score(texts)
        return perplexity([score.nats for score in scores], [score.num_tokens for score in scores]).value

    assert score(shuffled) > 3 * score(documents)
