"""The distributional protocol from end to end, with tiny models and judges: rows, resuming, report, refusals."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cdlm.data.config import PrepareConfig
from cdlm.data.prepare import prepare
from cdlm.eval import distributional
from cdlm.eval.config import EvalConfig, ReportConfig
from cdlm.eval.naive import NAIVE_SAMPLERS
from cdlm.eval.report.distributional import comparisons, distributional_table, row_label, z_text
from cdlm.eval.report.rows import read_sections
from cdlm.eval.report.write import write_report
from cdlm.eval.results import append_row, read_rows
from cdlm.eval.sweep import evaluate

from ..writers import write_model
from .suites import QUIET, nothing

NUM = 8


@pytest.fixture(scope="module")
def human(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of different words."""
    generator = np.random.default_rng(0)
    words = np.array(
        ["the", "a", "of", "cat", "dog", "house", "old", "saw", "went", ",", ".", "he", "she", "it", "was"]
    )
    documents = (" ".join(generator.choice(words, 60)) for _ in range(40))
    path = tmp_path_factory.mktemp("human") / "human.txt"
    path.write_text("\n<|endoftext|>\n".join(documents))
    return path


def asked(work: Path, human: Path, out: Path, **changes: Any) -> EvalConfig:
    options: dict[str, Any] = {
        "models": (f"M={work / 'masked'}",),
        "judge": ("none",),
        "protocol": "distributional",
        "num_samples": NUM,
        "steps": (2,),
        "order": ("random",),
        "reference": human,
        "device": "cpu",
        "out": out,
    }
    return EvalConfig(**{**options, **changes})


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take longer than all else here."""
    monkeypatch.setattr("cdlm.eval.sweep.write_report", lambda *_: None)


@pytest.fixture(scope="module")
def done(work: Path, human: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished evaluation under a judge."""
    pytest.importorskip("sklearn")
    out = tmp_path_factory.mktemp("distributional") / "out"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("cdlm.eval.sweep.write_report", lambda *_: None)
        evaluate(asked(work, human, out, judge=(str(work / "judge"),)), QUIET)
    return out


def test_every_row_stands_beside_human_text_and_naive_samplers(done: Path) -> None:
    rows = read_rows(done)
    kinds = [row["kind"] for row in rows]
    assert kinds == ["human", *["naive"] * len(NAIVE_SAMPLERS), *["model"] * 4]  # two temperatures, two penalties
    for row in rows:
        assert row["num_samples"] == NUM
        assert row["splits"] >= 200
        assert row["pool"] >= 2 * NUM
        assert set(row["columns"]["ppl"]) == {"value", "human", "z", "error"}
        assert {"h1", "h2", "rep_4", "overlap_3", "energy", "mauve"} <= row["columns"].keys()
    assert all(row["nfe"] == 2 and row["tokens_per_pass"] > 1 and row["seconds_per_sample"] for row in rows[-4:])
    assert "M, 2 steps, T 0.8, penalty 1.0" in [row_label(row) for row in rows]


@pytest.mark.usefixtures("no_report")
def test_a_finished_row_is_not_computed_again(
    work: Path, human: Path, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributional, "_measured_row", nothing)
    monkeypatch.setattr(distributional, "_reference", nothing)
    again = evaluate(asked(work, human, done, judge=(str(work / "judge"),)), QUIET)
    assert [row["key"] for row in again] == [row["key"] for row in read_rows(done)]


@pytest.mark.usefixtures("no_report")
def test_it_goes_on_after_a_crash(work: Path, human: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rows that an evaluation without one has."""
    whole = evaluate(asked(work, human, tmp_path / "whole"), QUIET)
    kept = 0

    def crash(out: Path, row: dict[str, Any]) -> None:
        nonlocal kept
        kept += 1
        if kept == 8:
            raise OSError("no space left")
        append_row(out, row)

    with monkeypatch.context() as broken:
        broken.setattr(distributional, "append_row", crash)
        with pytest.raises(OSError, match="no space left"):
            evaluate(asked(work, human, tmp_path / "out"), QUIET)
    assert len(read_rows(tmp_path / "out")) == 7
    rows = evaluate(asked(work, human, tmp_path / "out"), QUIET)
    assert [row["columns"] for row in rows] == [row["columns"] for row in whole]
    assert len(read_rows(tmp_path / "out")) == len(whole) == 10


def test_without_a_judge_it_says_what_is_missing(
    work: Path, human: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributional, "is_installed", lambda name: False)
    console = Console(record=True, width=80, quiet=False, file=io.StringIO())
    rows = evaluate(asked(work, human, tmp_path / "out", judge=(), temperature=(1.0,)), console)
    text = console.export_text()
    assert "no judge is installed: perplexity and MAUVE are left out; to install two: make" in text
    assert all("ppl" not in row["columns"] and row["judge"] == "none" for row in rows)
    assert (tmp_path / "out" / "report" / "figures").is_dir()
    assert "PPL" not in distributional_table(rows).columns[1].header


def test_the_report(done: Path, tmp_path: Path) -> None:
    page = write_report(ReportConfig((done,), tmp_path, claims=("ppl,h1", "energy")), QUIET).read_text()
    assert "## Against human text: judge" in page
    for part in ("human value", "naive: periodic", "M, 2 steps, T 0.8", "PPL + H1", "Tokens per forward pass"):
        assert part in page, part
    assert page.count("![") == 2
    assert {path.suffix for path in (tmp_path / "tables").iterdir()} == {".md", ".tex", ".png"}
    assert read_sections([done]) == ([], [])  # nothing that tables of perplexity at matched entropy may mix in
    with pytest.raises(ValueError, match="there is no column 'beauty' to claim something of; there are: ppl, h1"):
        write_report(ReportConfig((done,), tmp_path, claims=("beauty",)), QUIET)


def test_the_table_fits_into_a_terminal(done: Path) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(distributional_table(read_rows(done)))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert [z_text(z) for z in (0.04, -9.94, 12.3, -1234, float("inf"))] == ["+0.0", "-9.9", "+12", "->999", "+>999"]


def test_rows_measured_twice_are_shown_once(done: Path, tmp_path: Path) -> None:
    rows = read_rows(done)
    for row in [*rows, {**rows[-1], "time": "later"}]:
        tmp_path.mkdir(exist_ok=True)
        append_row(tmp_path, row)
    (comparison,) = comparisons([tmp_path])
    assert len(comparison.rows) == len(rows)
    assert comparison.rows[-1]["time"] == "later"


@pytest.mark.usefixtures("no_report")
def test_copies_of_the_corpus(work: Path, human: Path, tmp_path: Path) -> None:
    """Human text that is the corpus is copied, shuffled text is not."""
    prepare(PrepareConfig((str(human),), tmp_path / "tokens", tokenizer=str(work / "masked"), packing="plain"), QUIET)
    config = asked(work, human, tmp_path / "out", corpus=tmp_path / "tokens", temperature=(1.0,))
    rows = {row["model"]: row for row in evaluate(config, QUIET)}
    assert rows["human text"]["columns"]["copied"]["value"] > 0.5
    assert rows["shuffled"]["columns"]["copied"]["value"] < 0.2
    assert rows["human text"]["corpus_hash"]
    without = asked(work, human, tmp_path / "out", temperature=(1.0,))
    keys = {row["key"] for row in evaluate(without, QUIET)}
    assert keys.isdisjoint(row["key"] for row in rows.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ("likelihood",), "texts": ()}, "has the task unconditional alone"),
        ({"num_samples": 4}, r"--num-samples must be at least 8 .*got 4"),
    ],
)
def test_what_makes_no_sense_is_refused(
    changes: dict[str, Any], message: str, work: Path, human: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        asked(work, human, tmp_path, **changes)
    with pytest.raises(ValueError, match="--corpus is for --protocol distributional"):
        EvalConfig(models=("mdlm",), judge=("smollm2",), corpus=tmp_path)


def test_what_cannot_be_compared_is_refused(work: Path, human: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"enough for --num-samples \d+ \(got 500\)"):
        evaluate(asked(work, human, tmp_path / "out", num_samples=500), QUIET)
    write_model(tmp_path / "other", "masked", length=8)
    models = (f"M={work / 'masked'}", f"O={tmp_path / 'other'}")
    with pytest.raises(ValueError, match="M and O differ in the length or packing"):
        evaluate(asked(work, human, tmp_path / "out", models=models, max_length=8), QUIET)


def test_the_models_that_come_with_it_are_the_default() -> None:
    config = EvalConfig(protocol="distributional")
    assert [label for label, _ in config.sources()] == ["mcdlm-guided", "mdlm"]
    assert config.axis("log_frequency_penalty") == (0.0, 1.0)
    assert dataclasses.replace(config, steps=(8, 32)).axis("steps") == (8, 32)
    assert json.dumps(EvalConfig(models=("mdlm",), judge=("x",)).axis("steps")) == "[8, 32, 128]"
