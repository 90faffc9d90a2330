"""The tasks that need texts, and the histories of models: what their rows say and what they are refused for."""

import dataclasses
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import cdlm
from cdlm.data.config import PrepareConfig
from cdlm.data.prepare import prepare
from cdlm.eval.config import ReportConfig
from cdlm.eval.datasets import Dataset
from cdlm.eval.report.write import write_report
from cdlm.eval.results import ResultRow
from cdlm.eval.scorer import open_judge, scored_positions
from cdlm.eval.sweep import evaluate
from cdlm.metrics.bleu import bleu2, token_bleu2
from cdlm.metrics.diversity import distinct, entropy, pooled_entropy, repetition
from cdlm.metrics.infilling import infilling_accuracy
from cdlm.metrics.mauve import mauve
from cdlm.metrics.sampler_likelihood import repeated_sampler_nats
from cdlm.rng import seeded
from cdlm.sample.settings import Settings
from cdlm.text.pipeline import Pipeline
from cdlm.train.loop import train
from cdlm.train.recipes import RECIPES

from ..writers import BYTES, write_model
from .suites import LENGTH, NUM, QUIET, again, columns, config, nothing, samples, timeless


def recover(work: Path, out: Path, **changes: Any) -> list[ResultRow]:
    return evaluate(config(work, out, tasks=("conditional",), texts=(f"one={work / 'one.txt'}",), **changes), QUIET)


def left_alone(work: Path, kind: str, before: Tensor) -> Tensor:
    """The words that the noise leaves alone, drawn as the model draws them."""
    process = cdlm.load(work / kind, "cpu").denoiser.process
    words, t = before != BYTES.eos, process.noise.inverse(torch.tensor(0.5, dtype=torch.float64))
    kept = process.kept_evenly(before, float(t), seeded(0, "sample", batch=NUM)("noise"), words)
    assert (((~kept).sum(-1) - words.sum(-1) / 2).abs() <= 0.5).all()
    assert kept[~words].all()
    return kept


@pytest.mark.usefixtures("compared")
def test_recovered_texts(work: Path, tmp_path: Path) -> None:
    """Half of the words are noise: a masked model keeps every visible token, a uniform one may change them all."""
    rows = recover(work, tmp_path)
    assert [row["model"] for row in rows] == ["masked", "masked", "U", "U"]
    blocks = Dataset("one", work / "one.txt").blocks(BYTES, LENGTH, False, NUM)
    for row in rows:
        found = samples(tmp_path, row)
        before, after = columns(found, "reference_token_ids"), columns(found, "token_ids")
        assert torch.equal(before, blocks)
        assert (row["dataset"], row["dataset_hash"]) == ("one", Dataset("one", work / "one.txt").fingerprint)
        kept = left_alone(work, "masked" if row["model"] == "masked" else "uniform", before)
        assert torch.equal(after[kept], before[kept]) == (row["model"] == "masked")
        assert not torch.equal(after[~kept], before[~kept])
        assert (after < BYTES.vocab_size).all()
        texts, references = ([line[name] for line in found.lines] for name in ("text", "reference"))
        assert references == [BYTES.decode(block) for block in blocks.tolist()]
        assert row["bleu2"] == pytest.approx(bleu2(texts, references))
        assert row["bleu2_tokens"] == pytest.approx(token_bleu2(after.tolist(), before.tolist()))
        judge = open_judge(str(work / "judge"), "cpu")
        theirs, ours = judge.score(references, features=True), judge.score(texts, features=True)
        assert row["reference_ppl"] == pytest.approx(
            math.exp(sum(r.nats for r in theirs) / sum(r.num_tokens for r in theirs))
        )
        features = [torch.tensor([r.feature.tolist() for r in side]).numpy() for side in (ours, theirs)]
        assert row["mauve"] == pytest.approx(mauve(*features), abs=1e-6)
        assert "below 1000 it is biased upwards" in row["mauve_warning"]


@pytest.mark.usefixtures("compared")
def test_a_clamped_uniform_model_keeps_what_the_noise_left_alone(work: Path, tmp_path: Path) -> None:
    rows = recover(work, tmp_path, models=(str(work / "uniform"),), clamp=True)
    free = recover(work, tmp_path, models=(str(work / "uniform"),))
    for row, other in zip(rows, free, strict=True):
        found = samples(tmp_path, row)
        before, after = columns(found, "reference_token_ids"), columns(found, "token_ids")
        kept = left_alone(work, "uniform", before)
        assert torch.equal(after[kept], before[kept])
        assert not torch.equal(after[~kept], before[~kept])
        assert (row["clamp"], other["clamp"]) == (True, False)
        assert row["bleu2_tokens"] > other["bleu2_tokens"]


@pytest.mark.usefixtures("compared")
def test_clamping_does_not_concern_masked_models(work: Path, tmp_path: Path) -> None:
    """--clamp is for the uniform models of a grid; masked ones keep their tokens anyway."""
    assert len(recover(work, tmp_path, clamp=True)) == 4


@pytest.mark.usefixtures("compared")
def test_recovered_texts_are_kept_and_judged_again(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [timeless(row) for row in json.loads(json.dumps(recover(work, tmp_path)))]
    monkeypatch.setattr(Pipeline, "complete", nothing)
    assert [timeless(row) for row in recover(work, tmp_path)] == rows
    (tmp_path / "results.jsonl").unlink()
    found = evaluate(config(work, tmp_path, **again(work)), QUIET)
    assert {row["key"]: timeless(row) for row in json.loads(json.dumps(found))} == {row["key"]: row for row in rows}


def test_the_measures_of_a_row(work: Path, tmp_path: Path) -> None:
    """Entropy and the rest are of the model's own tokens; a perplexity for each of those, beside the judge's own."""
    for row in evaluate(config(work, tmp_path), QUIET):
        found = samples(tmp_path, row)
        tokens = columns(found, "token_ids")
        each = entropy(tokens)
        assert row["entropy"] == pytest.approx(float(each.mean()))
        assert row["entropy_interval"][0] <= row["entropy"] <= row["entropy_interval"][1]
        assert row["per_sample"]["entropy"] == pytest.approx(each.tolist(), abs=1e-4)
        assert row["entropy_pooled"] == pytest.approx(pooled_entropy(tokens.tolist()))
        assert row["distinct_2"] == pytest.approx(distinct(tokens.tolist(), 2))
        assert row["repetition_4"] == pytest.approx(repetition(tokens.tolist()))
        own = sum(len(scored_positions(ids, BYTES.eos)) for ids in tokens.tolist())
        assert row["judged_fraction"] == 1
        assert row["ppl_model_token"] == pytest.approx(math.exp(sum(row["per_sample"]["nats"]) / own), rel=1e-4)


def test_likelihood_and_consistency(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = (str(work / "masked"), str(work / "uniform"), f"AR={work / 'judge'}")
    asked: dict[str, Any] = {"models": models, "tasks": ("likelihood", "consistency"), "judge": (), "num_samples": 2}
    asked |= {"texts": (f"one={work / 'one.txt'}",), "likelihood_samples": 4, "max_length": LENGTH}
    said = io.StringIO()
    rows = evaluate(config(work, tmp_path, **asked), Console(file=said, width=250))
    assert [(row["model"], row["task"]) for row in rows] == [
        *[(name, task) for name in ("masked", "uniform") for task in ("likelihood", "consistency")],
        ("AR", "likelihood"),
    ]
    assert "left out: AR: an autoregressive model has no consistency task" in said.getvalue()
    assert "NLL (exact)" in said.getvalue()
    assert "TV from its own chain" in said.getvalue()
    for row in rows:
        if row["task"] == "consistency":
            assert [(pair["t"], pair["s"]) for pair in row["pairs"]] == [(0.5, 0), (0.5, 0.25), (1, 0.5), (1, 0.75)]
            assert all(0 <= pair["own_chain_tv"] <= 1 for pair in row["pairs"] if pair["s"])
            assert all(pair["reliability_error"] >= 0 for pair in row["pairs"])
    monkeypatch.setattr("cdlm.eval.measure.repeated_nelbo", nothing)
    monkeypatch.setattr("cdlm.eval.measure.reliability_curve", nothing)
    assert evaluate(config(work, tmp_path, **asked), QUIET) == json.loads(json.dumps(rows))


def test_bounds_of_samplers(work: Path, tmp_path: Path) -> None:
    """One for each sampler of the sweep that has one, with its gap to the NELBO and its Monte Carlo error."""
    said = io.StringIO()
    asked: dict[str, Any] = {"models": (str(work / "masked"), str(work / "uniform")), "tasks": ("likelihood",)}
    asked |= {"judge": (), "texts": (f"one={work / 'one.txt'}",), "likelihood_samples": 4, "max_length": LENGTH}
    asked |= {"steps": (1, 2, 8), "order": ("random", "margin", "probability"), "top_k": (0, 1)}
    rows = evaluate(config(work, tmp_path, **asked), Console(file=said, width=250))
    bounds = rows[0]["few_step"]
    samplers = [(bound["order"], bound["sampling"]["top_k"], bound["steps"]) for bound in bounds]
    assert samplers == [
        (order, k, n) for order, k in (("random", 0), ("random", 1), ("margin", 0), ("margin", 1)) for n in (1, 2, 8)
    ]
    assert rows[1]["few_step"] == []
    assert "no likelihood bound for --order probability" in said.getvalue()
    model = cdlm.load(work / "masked", "cpu")
    x0 = Dataset("one", work / "one.txt").blocks(BYTES, LENGTH, False, NUM)
    for bound in bounds:
        if bound["sampling"]["top_k"]:
            assert [bound[name] for name in ("nelbo", "interval", "gap", "monte_carlo_error")] == [None] * 4
            continue
        settings = Settings(**bound["sampling"])
        found = repeated_sampler_nats(
            model.denoiser, model.denoiser.process, x0, settings, 4, special=(BYTES.eos, BYTES.bos)
        )
        assert bound["nelbo"] == pytest.approx(float(found.mean()) / LENGTH)
        assert bound["gap"] == pytest.approx(bound["nelbo"] - rows[0]["nelbo"])
        assert bound["interval"][0] < bound["nelbo"] < bound["interval"][1]
        assert (bound["monte_carlo_error"] == 0) == (bound["steps"] == 1)
    assert "gap to the NELBO" in said.getvalue()
    assert said.getvalue().count("infinite") == 6
    assert "Infinity" not in (tmp_path / "results.jsonl").read_text()


def test_infilling(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context is kept, whatever the process, and the numbers are those of the samples."""
    models = (str(work / "masked"), str(work / "uniform"), f"AR={work / 'judge'}")
    asked: dict[str, Any] = {
        "models": models,
        "tasks": ("infilling",),
        "judge": (),
        "texts": (f"one={work / 'one.txt'}",),
    }
    x0, seen = Dataset("one", work / "one.txt").blocks(BYTES, LENGTH, False, NUM), []

    def kept(found: Tensor, x0: Tensor, masked: Tensor) -> Any:
        assert torch.equal(found[~masked], x0[~masked])
        assert not bool(masked[(x0 == BYTES.eos) | (x0 == BYTES.bos)].any())
        seen.append(float((found == x0)[masked].float().mean()))
        return infilling_accuracy(found, x0, masked)

    monkeypatch.setattr("cdlm.eval.measure.infilling_accuracy", kept)
    said = io.StringIO()
    rows = evaluate(config(work, tmp_path, **asked), Console(file=said, width=250))
    assert [(row["model"], row["sampling"]["steps"]) for row in rows] == [
        (name, steps) for name in ("masked", "uniform") for steps in (2, 4)
    ]
    assert "an autoregressive model has no infilling task" in said.getvalue()
    parts = [part for row in rows for part in row["infilling"]]
    assert [part["mask_rate"] for part in parts] == [0.15, 0.5, 0.85] * 4
    assert [part["token_match"] for part in parts] == pytest.approx(seen)
    assert all(1 <= part["nfe"] <= row["sampling"]["steps"] for row in rows for part in row["infilling"])
    assert len(x0) == NUM
    monkeypatch.setattr(Pipeline, "complete", nothing)
    assert evaluate(config(work, tmp_path, **asked), QUIET) == json.loads(json.dumps(rows))
    page = write_report(ReportConfig((tmp_path,), out=tmp_path / "report")).read_text()
    assert "Infilling accuracy" in page
    assert "85% masked" in page


def test_an_autoregressive_model_in_the_grid(work: Path, tmp_path: Path) -> None:
    said = io.StringIO()
    models = (f"AR={work / 'judge'}", str(work / "masked"))
    rows = evaluate(config(work, tmp_path, models=models, max_length=LENGTH), Console(file=said, width=250))
    assert [(row["model"], row["sampling"]["steps"]) for row in rows] == [("AR", None), ("masked", 2), ("masked", 4)]
    assert rows[0]["process"] == "none"
    for word in (
        "3 cells, 0 of them finished before",
        "perplexity [95 %]",
        "samples per cell are few",
    ):
        assert word in said.getvalue()
    with pytest.raises(
        ValueError, match="no cell of this sweep can be computed: AR: an autoregressive model has no cond"
    ):
        recover(work, tmp_path, models=models[:1], max_length=LENGTH)


def test_what_cannot_be_done_is_refused_before_a_judge_is_opened(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdlm.eval.sweep.open_judge", nothing)
    with pytest.raises(ValueError, match=r"one\.txt has .* tokens, which make .* blocks of 16 of the 5000"):
        recover(work, tmp_path, num_samples=5000)
    with pytest.raises(ValueError, match=r"one\.txt has"):
        evaluate(config(work, tmp_path, reference=work / "one.txt", num_samples=5000), QUIET)
    with pytest.raises(ValueError, match="--max-length must be at most the 16 tokens that masked was trained on"):
        evaluate(config(work, tmp_path, max_length=32), QUIET)
    nameless = write_model(tmp_path / "nameless", "masked")
    with pytest.raises(ValueError, match="does not say how long its sequences are; give --max-length"):
        evaluate(config(work, tmp_path, models=(str(nameless),)), QUIET)


@pytest.mark.parametrize(
    ("changes", "advice"), [({"max_length": 2 * LENGTH}, "was trained on"), ({"num_samples": 1}, "num-samples")]
)
def test_a_recovery_that_cannot_be_done_is_refused_before_a_judge_is_opened(
    changes: dict[str, Any], advice: str, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer texts than the model's own; and one text, which MAUVE cannot compare."""
    monkeypatch.setattr("cdlm.eval.sweep.open_judge", nothing)
    with pytest.raises(ValueError, match=advice):
        recover(work, tmp_path, **changes)


@pytest.mark.filterwarnings("ignore:std\\(\\)")
def test_one_time_has_no_spread(work: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "tasks": ("likelihood",),
        "texts": (str(work / "one.txt"),),
        "judge": (),
        "likelihood_samples": 1,
    }
    evaluate(config(work, tmp_path, **asked), QUIET)
    assert "NaN" not in (tmp_path / "results.jsonl").read_text()


def test_a_model_that_was_trained_on_is_another(tmp_path: Path, work: Path) -> None:
    """In one process: evaluate, write other weights to the same folder, evaluate."""
    shutil.copytree(work / "masked", tmp_path / "model")
    first = evaluate(config(work, tmp_path / "out", models=(str(tmp_path / "model"),)), QUIET)
    write_model(tmp_path / "model", "masked", favour=4.0, length=LENGTH)
    second = evaluate(config(work, tmp_path / "out", models=(str(tmp_path / "model"),)), QUIET)
    assert first[0]["ppl"] != second[0]["ppl"]


def test_a_row_says_how_its_model_was_trained(work: Path, tmp_path: Path) -> None:
    """By which method, how long, on what batches, and from which model, back to the first."""
    prepare(PrepareConfig((str(work / "one.txt"),), tmp_path / "data", seq_length=LENGTH, valid_documents=4), QUIET)
    quick = {
        "data": tmp_path / "data",
        "batch_size": 4,
        "seq_length": LENGTH,
        "valid_samples": 0,
        "device": "cpu",
        "valid_every": 0,
    }
    base = dataclasses.replace(RECIPES["tiny-mdlm"].config, out=tmp_path / "base", steps=3, **quick)
    train(base)
    then = dataclasses.replace(
        RECIPES["tiny-mcdlm"].config, out=tmp_path / "then", steps=2, init_from=tmp_path / "base", **quick
    )
    train(then)
    first = {"method": base.method, "steps": 3, "batch_size": 4, "seq_length": LENGTH, "from": None}
    second = {"method": then.method, "steps": 2, "batch_size": 4, "seq_length": LENGTH, "from": first}
    assert cdlm.load(tmp_path / "then", "cpu").training == second
    rows = evaluate(config(work, tmp_path, models=(str(tmp_path / "base"), str(tmp_path / "then")), steps=(2,)), QUIET)
    assert [row["training"] for row in rows] == [first, second]
    shutil.rmtree(tmp_path / "base")
    train(dataclasses.replace(then, steps=4, save_every=1), resume="force")  # a resumed run knows its origin
    assert cdlm.load(tmp_path / "then" / "step-00000003", "cpu").training["steps"] == 3
    assert cdlm.load(tmp_path / "then", "cpu").training == {**second, "steps": 4}
