"""The task `sudoku`: measures against definitions and simulations, exact denoisers, and a run of `cdlm eval`."""

import collections
import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from rich.console import Console

from cdlm.data.config import PrepareConfig
from cdlm.data.prepare import prepare
from cdlm.data.sudoku import ExactSudoku, all_grids, sample_grids
from cdlm.eval import sudoku
from cdlm.eval.config import EvalConfig
from cdlm.eval.results import read_rows
from cdlm.eval.sudoku import (
    coverage,
    expected_total_variation,
    measure_grids,
    pair_total_variation,
    share_interval,
    total_variation,
)
from cdlm.eval.sweep import evaluate
from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.process import masked, uniform
from cdlm.sample.settings import resolve
from cdlm.train.loop import train
from cdlm.train.recipes import RECIPES

QUIET = Console(quiet=True)


def test_intervals_are_wilsons() -> None:
    for count, total in ((0, 50), (7, 50), (50, 50), (400, 1000)):
        share, interval = share_interval(count, total)
        wanted = scipy.stats.binomtest(count, total).proportion_ci(method="wilson")
        assert share == count / total
        assert interval == pytest.approx([wanted.low, wanted.high], abs=1e-12)


def test_total_variation_by_definition() -> None:
    samples = torch.cat([sample_grids(4, 300, seed=0), torch.randint(5, (100, 16))])
    share = {row: n / 400 for row, n in collections.Counter(map(tuple, samples.tolist())).items()}
    grids = set(map(tuple, all_grids(4).tolist()))
    wanted = sum(abs(share.get(row, 0) - (row in grids) / 288) for row in grids | share.keys()) / 2
    assert total_variation(samples) == pytest.approx(wanted, abs=1e-12)
    assert total_variation(all_grids(4)) == pytest.approx(0, abs=1e-12)
    assert total_variation(all_grids(4)[:1].expand(50, -1)) == pytest.approx(1 - 1 / 288)


@pytest.mark.parametrize("n", [10, 1000])
def test_the_null_value_of_total_variation(n: int) -> None:
    counts = scipy.stats.binom(n, 1 / 288)
    wanted = 288 * counts.expect(lambda k: abs(k / n - 1 / 288)) / 2
    assert expected_total_variation(n) == pytest.approx(wanted, rel=1e-6)
    found = [total_variation(sample_grids(4, n, seed)) for seed in range(20)]
    assert sum(found) / 20 == pytest.approx(wanted, rel=0.02)


def test_pairs_of_cells_by_definition() -> None:
    """Against the joint distributions of all 288 grids; samples of side 6 come close to the uniform distribution."""
    samples = sample_grids(4, 50, seed=0)
    grids, wanted = all_grids(4), []
    for first, second in itertools.combinations(range(16), 2):
        ours = collections.Counter(map(tuple, samples[:, [first, second]].tolist()))
        law = collections.Counter(map(tuple, grids[:, [first, second]].tolist()))
        wanted.append(sum(abs(ours[pair] / 50 - law[pair] / 288) for pair in ours | law) / 2)
    assert pair_total_variation(samples) == pytest.approx(sum(wanted) / len(wanted), abs=1e-6)
    assert pair_total_variation(grids) == pytest.approx(0, abs=1e-6)
    assert pair_total_variation(sample_grids(6, 20_000, seed=0)) < 0.02


def test_coverage_sees_one_grid_by_heart() -> None:
    same = coverage(sample_grids(6, 1, seed=0).expand(400, -1))
    fair = coverage(sample_grids(6, 400, seed=0))
    assert (same["distinct"], fair["distinct"]) == (1 / 400, 1)
    assert same["pair_tv"] > 5 * same["pair_tv_null"]
    assert fair["pair_tv"] == pytest.approx(fair["pair_tv_null"], rel=0.1)
    assert "tv" not in fair
    assert coverage(torch.zeros(10, 36, dtype=torch.long))["distinct"] is None
    four = coverage(sample_grids(4, 2000, seed=0))
    assert four["distinct"] == pytest.approx(four["distinct_null"], abs=0.001)


def test_the_exact_denoiser_is_measured_as_the_theory_says() -> None:
    """It solves every puzzle; its bound falls to the entropy log 288, which no sampler can beat."""
    denoiser = Denoiser(ExactSudoku(4), masked(5))

    def measure(**given: Any) -> dict[str, Any]:
        settings = resolve(given, denoiser.process)
        return measure_grids(denoiser, 4, settings, num_samples=500, likelihood_samples=8)

    blind, few, many = measure(steps=1), measure(steps=4), measure(steps=64)
    assert [row["solved"] for row in (blind, few, many)] == [1, 1, 1]
    assert blind["nats"] == pytest.approx(16 * math.log(4), abs=0.1)
    assert blind["nats"] > few["nats"] > many["nats"] > math.log(288) - 0.3
    assert few["nats_steps"] == 4
    assert blind["valid"] <= few["valid"] < many["valid"]
    assert many["tv"] < 0.2 + many["tv_null"]
    sharp, cut = measure(steps=4, temperature=0.5), measure(steps=4, top_p=0.5)
    assert sharp["nats"] > few["nats"]  # the bound is that of the sampler with its controls, and the exact one is best
    assert cut["nats"] is None  # grids that it never generates
    assert measure(steps=16, step_size="equal")["nats"] == pytest.approx(math.log(288), abs=0.3)  # one cell at a time
    assert measure(steps=8, order="probability")["nats"] is None  # there is no bound for this order


def test_likelihood_of_untrained_networks() -> None:
    """A fresh head is uniform over four digits and the end of a text; the first cell of AR is uniform over digits."""
    shape = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "cond_dim": 4, "dropout": 0.0}
    ar = Denoiser(NetworkConfig(**shape, causal=True, grid_embeddings=4), vocab=5)
    row = measure_grids(ar, 4, resolve({}, None), num_samples=100)
    assert row["nats"] == pytest.approx(math.log(4) + 15 * math.log(5), abs=1e-5)
    assert (row["nfe"], row["solved"], row["nats_steps"]) == (15, None, None)
    hybrid = Denoiser(NetworkConfig(**shape, time_conditioning=True, grid_embeddings=4), uniform(5))
    row = measure_grids(hybrid, 4, resolve({"steps": 4}, hybrid.process), num_samples=100)
    assert row["nats"] == pytest.approx(16 * math.log(5), rel=0.05)
    assert row["nats_steps"] is None


def test_a_run_is_evaluated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    prepare(PrepareConfig((), tmp_path / "data", source="sudoku-4"), QUIET)
    recipe = RECIPES["sudoku-4-mdlm"].config
    run = dataclasses.replace(recipe, data=tmp_path / "data", out=tmp_path / "run", steps=2, batch_size=8, device="cpu")
    train(run)
    config = EvalConfig(
        models=(f"ours={tmp_path / 'run'}",), tasks=("sudoku",), steps=(2,), order=("random", "grid", "probability"),
        num_samples=64, batch_size=50, likelihood_samples=1, out=tmp_path / "results", device="cpu",
    )  # fmt: skip
    rows = evaluate(config, Console(width=200))
    assert [row["sampling"]["order"] for row in rows] == ["random", "grid", "probability"]
    assert [row["nats"] is None for row in rows] == [False, False, True]
    assert all(0 <= row["valid"] <= 1 and row["tv"] > row["tv_null"] for row in rows)
    assert "valid [" in capsys.readouterr().out
    assert [json.loads(json.dumps(row)) for row in rows] == read_rows(tmp_path / "results")
    monkeypatch.delattr(sudoku, "measure_grids")
    assert len(evaluate(config, QUIET)) == 3  # finished cells are not computed again

    wrong = dataclasses.replace(config, max_length=8, out=tmp_path / "other")
    with pytest.raises(ValueError, match="needs a model of Sudoku grids, and ours has a vocabulary of 5 tokens"):
        evaluate(wrong, QUIET)


def test_samples_do_not_depend_on_the_batch_size() -> None:
    denoiser = Denoiser(ExactSudoku(4), masked(5))
    settings = resolve({"steps": 4}, denoiser.process)
    rows = [
        measure_grids(denoiser, 4, settings, num_samples=300, batch_size=size, likelihood_samples=1)
        for size in (150, 300)
    ]
    for name in ("valid", "tv", "pair_tv", "nfe", "solved"):
        assert rows[0][name] == rows[1][name]
