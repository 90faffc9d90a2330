"""`evaluate` on tiny models: what a row says, what is kept, and what a crash, a second run or a new judge costs."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import cdlm
from cdlm.eval.results import append_row, read_rows, read_samples
from cdlm.eval.scorer import Judge, JudgeScore, fingerprint, open_judge
from cdlm.eval.sweep import evaluate
from cdlm.files import alone_in
from cdlm.metrics.gen_ppl import perplexity
from cdlm.sample.settings import Settings, explicit
from cdlm.text.pipeline import Pipeline

from .suites import NUM, QUIET, again, config, nothing, timeless


def texts(out: Path) -> list[list[str]]:
    return [[line["text"] for line in read_samples(path).lines] for path in sorted((out / "samples").iterdir())]


def test_a_row_has_everything_to_repeat_it(work: Path, tmp_path: Path) -> None:
    rows = evaluate(config(work, tmp_path, seed=3), QUIET)
    assert [(row["model"], row["sampling"]["steps"]) for row in rows] == [
        ("masked", 2),
        ("masked", 4),
        ("U", 2),
        ("U", 4),
    ]
    judge = open_judge(str(work / "judge"), "cpu")
    for row in rows:
        folder = work / ("masked" if row["model"] == "masked" else "uniform")
        assert row["model_hash"] == fingerprint(folder)
        assert (row["task"], row["protocol"], row["judge"]) == ("unconditional", "robust", "judge (in-domain)")
        assert (row["judge_hash"], row["window"], row["dtype"]) == (judge.fingerprint, 256, "float32")
        assert {"time", "device", "torch", "cdlm", "commit", "process", "vocab_size", "key", "format"} <= row.keys()
        model = cdlm.load(folder, "cpu")
        found = model.sample(
            row["num_samples"], row["max_length"], seed=row["seed"], **explicit(Settings(**row["sampling"]))
        )
        kept = read_samples(tmp_path / "samples" / row["file"])
        assert [one.text for one in found] == [line["text"] for line in kept.lines]
        assert [one.token_ids for one in found] == [line["token_ids"] for line in kept.lines]
        assert row["nfe"] == sum(one.nfe for one in found) / NUM
        readings = judge.score([one.text for one in found])
        nats, tokens = [r.nats for r in readings], [r.num_tokens for r in readings]
        value = perplexity(nats, tokens)
        assert row["ppl"] == pytest.approx(value.value)
        assert row["ppl_interval"] == pytest.approx([value.low, value.high])
        assert row["per_sample"]["nats"] == pytest.approx(nats, abs=1e-3)
        assert row["per_sample"]["tokens"] == tokens
    assert read_rows(tmp_path) == json.loads(json.dumps(rows))


def test_the_second_call_computes_nothing(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = evaluate(config(work, tmp_path), QUIET)
    before = (tmp_path / "results.jsonl").read_bytes()
    monkeypatch.setattr(Pipeline, "complete", nothing)
    monkeypatch.setattr(Judge, "score", nothing)
    assert evaluate(config(work, tmp_path), QUIET) == json.loads(json.dumps(first))
    assert (tmp_path / "results.jsonl").read_bytes() == before


def test_another_judge_reads_the_kept_texts(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = evaluate(config(work, tmp_path), QUIET)
    monkeypatch.setattr(Pipeline, "complete", nothing)
    both = evaluate(config(work, tmp_path, judge=(str(work / "judge"), str(work / "other"))), QUIET)
    assert [timeless(row) for row in both[::2]] == [timeless(row) for row in json.loads(json.dumps(first))]
    assert {row["judge"] for row in both[1::2]} == {"other (in-domain)"}
    assert len(read_rows(tmp_path)) == 8
    assert [row["entropy"] for row in both[1::2]] == [row["entropy"] for row in first]
    assert all(a["ppl"] != b["ppl"] for a, b in zip(both[::2], both[1::2], strict=True))
    with pytest.raises(ValueError, match="has 6 samples, and --protocol paper needs 32"):
        evaluate(config(work, tmp_path, **again(work, protocol="paper")), QUIET)


def test_an_interrupt_keeps_what_is_finished(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while the second cell is judged: one row, two sets of texts; the rest is computed by the same command."""
    real, calls = Judge.score, []

    def stop(self: Judge, *arguments: Any, **more: Any) -> list[JudgeScore]:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, *arguments, **more)

    said = io.StringIO()
    monkeypatch.setattr(Judge, "score", stop)
    with pytest.raises(SystemExit) as error:
        evaluate(config(work, tmp_path), Console(file=said, width=200))
    monkeypatch.setattr(Judge, "score", real)
    assert error.value.code == 130
    assert "keeps 1 finished rows" in said.getvalue()
    assert len(read_rows(tmp_path)) == 1
    written: list[int] = []
    whole = Pipeline.complete
    monkeypatch.setattr(Pipeline, "complete", lambda self, *a, **k: written.append(1) or whole(self, *a, **k))
    rows = evaluate(config(work, tmp_path), QUIET)
    assert len(written) == 2
    fresh = evaluate(config(work, tmp_path / "fresh"), QUIET)
    assert [timeless(row) for row in rows] == [timeless(row) for row in fresh]


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_torn_last_line_is_computed_again(cut: int, work: Path, tmp_path: Path) -> None:
    rows = evaluate(config(work, tmp_path), QUIET)
    path = tmp_path / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])  # 1: the line is whole, but for its end
    assert len(read_rows(tmp_path)) == (4 if cut == 1 else 3)
    assert [timeless(row) for row in evaluate(config(work, tmp_path), QUIET)] == [timeless(row) for row in rows]
    evaluate(config(work, tmp_path, steps=(2, 4, 8), models=(str(work / "masked"),)), QUIET)
    assert len(read_rows(tmp_path)) == 5
    assert len(path.read_text().splitlines()) == 5


def test_damage_elsewhere_is_named(tmp_path: Path) -> None:
    append_row(tmp_path, {"key": "a"})
    append_row(tmp_path, {"key": "b"})
    path = tmp_path / "results.jsonl"
    path.write_text(path.read_text().replace("{", "", 1))
    with pytest.raises(ValueError, match=r"line 1 of .*results\.jsonl is damaged; remove that line"):
        read_rows(tmp_path)


@pytest.mark.parametrize("lost", [False, True])
def test_judging_again_without_models(lost: bool, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, from the rows or, where they are gone, from the texts alone."""
    first = {row["key"]: timeless(row) for row in json.loads(json.dumps(evaluate(config(work, tmp_path), QUIET)))}
    if lost:
        (tmp_path / "results.jsonl").unlink()
    monkeypatch.setattr(Pipeline, "complete", nothing)
    found = evaluate(config(work, tmp_path, **again(work)), QUIET)
    assert {row["key"]: timeless(row) for row in json.loads(json.dumps(found))} == first
    assert len(read_rows(tmp_path)) == 4


def test_nothing_to_judge(work: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no samples to score; name models"):
        evaluate(config(work, tmp_path, **again(work)), QUIET)


def test_one_seed_one_result(work: Path, tmp_path: Path) -> None:
    one, same, other = (
        evaluate(config(work, tmp_path / name, seed=seed, batch_size=batch), QUIET)
        for name, seed, batch in (("a", 1, 32), ("b", 1, 4), ("c", 2, 32))
    )
    for a, b, c in zip(one, same, other, strict=True):
        assert a["ppl"] == pytest.approx(b["ppl"], rel=1e-5)
        assert a["key"] == b["key"] != c["key"]
        assert a["ppl"] != pytest.approx(c["ppl"], rel=1e-5)


def test_the_first_of_more_texts_are_the_same(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate(config(work, tmp_path / "few", num_samples=3), QUIET)
    many = evaluate(config(work, tmp_path / "many"), QUIET)
    for few, more in zip(texts(tmp_path / "few"), texts(tmp_path / "many"), strict=True):
        assert few == more[:3]
    monkeypatch.setattr(Pipeline, "complete", nothing)  # fewer are there already
    part = evaluate(config(work, tmp_path / "many", num_samples=3), QUIET)
    assert [row["num_samples"] for row in part] == [3] * 4
    assert [row["per_sample"]["nats"] for row in part] == [row["per_sample"]["nats"][:3] for row in many]


def test_more_texts_than_are_kept_are_written(work: Path, tmp_path: Path) -> None:
    evaluate(config(work, tmp_path, num_samples=3), QUIET)
    rows = evaluate(config(work, tmp_path), QUIET)
    assert [row["num_samples"] for row in rows] == [NUM] * 4
    assert [len(found) for found in texts(tmp_path)] == [NUM] * 4
    assert len(read_rows(tmp_path)) == 8


def test_two_at_a_time_are_refused(work: Path, tmp_path: Path) -> None:
    with alone_in(tmp_path), pytest.raises(ValueError, match="another run is writing"):
        evaluate(config(work, tmp_path), QUIET)


def test_damaged_texts_are_named(work: Path, tmp_path: Path) -> None:
    evaluate(config(work, tmp_path, models=(str(work / "masked"),), steps=(2,)), QUIET)
    (path,) = (tmp_path / "samples").iterdir()
    path.write_text(path.read_text()[:-30])
    with pytest.raises(ValueError, match=r"is damaged .*; remove it and run the same command again"):
        evaluate(
            config(work, tmp_path, models=(str(work / "masked"),), steps=(2,), judge=(str(work / "other"),)), QUIET
        )


def test_texts_alone_are_judged_later(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write where there is no judge, judge where there is no model: the same rows as both at once."""
    at_once = evaluate(config(work, tmp_path / "both"), QUIET)
    console = Console(file=io.StringIO(), width=200)
    assert evaluate(config(work, tmp_path / "apart", judge=("none",)), console) == []
    assert "next: cdlm eval" in console.file.getvalue()
    assert not (tmp_path / "apart" / "results.jsonl").exists()
    monkeypatch.setattr(Pipeline, "complete", nothing)
    assert evaluate(config(work, tmp_path / "apart", judge=("none",)), QUIET) == []  # nothing is written twice
    later = evaluate(config(work, tmp_path / "apart", **again(work)), QUIET)
    assert sorted(row["ppl"] for row in later) == pytest.approx(sorted(row["ppl"] for row in at_once))
    with pytest.raises(ValueError, match="and no other judge"):
        config(work, tmp_path, judge=("none", str(work / "judge")))


def test_originals_are_read_once(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, read = [], Judge.score

    def counting(self: Judge, texts: Any, *rest: Any, **more: Any) -> list[JudgeScore]:
        seen.append(tuple(texts))
        return read(self, texts, *rest, **more)

    monkeypatch.setattr(Judge, "score", counting)
    (tmp_path / "people.txt").write_text("the cat sees the sea and the sea sees the cat. " * 200)
    rows = evaluate(config(work, tmp_path / "out", reference=tmp_path / "people.txt"), QUIET)
    originals = {texts for texts in seen if seen.count(texts) > 1}
    assert len(rows) == 4
    assert not originals
