"""The cost model against steps that were measured, against arithmetic by hand, and its refusals."""

import dataclasses

import pytest

from benchmarks.cost import GPUS, CostConfig, estimate
from cdlm.methods import METHODS
from cdlm.train.recipes import RECIPES

MEASURED = {
    "mdlm": (0.1407, 24.3),
    "mcdlm": (0.1574, 25.6),
    "udlm": (0.2030, None),
    "sdtt": (0.2378, None),
    "duo": (0.2110, 25.1),
    "duo-dcd": (0.2172, None),
}
"""Seconds and GiB of a step of 64 x 1024 tokens on one H200 (docs/benchmarks.md)."""


def step(name: str, **changes: object):
    return dataclasses.replace(RECIPES[name].config, batch_size=64, **changes)


@pytest.mark.parametrize("name", MEASURED)
def test_measured_steps_come_out(name: str) -> None:
    seconds, gib = MEASURED[name]
    found = estimate(step(name), micro=64)
    assert found.seconds == pytest.approx(seconds, rel=0.15)
    assert gib is None or found.gib == pytest.approx(gib, rel=0.05)


@pytest.mark.parametrize(("length", "seconds"), [(256, 0.1481), (2048, 0.1803)])
def test_measured_lengths_come_out(length: int, seconds: float) -> None:
    run = dataclasses.replace(step("mcdlm"), batch_size=65_536 // length, seq_length=length)
    found = estimate(run, micro=run.batch_size, vocab=50_257)
    assert found.seconds == pytest.approx(seconds, rel=0.1)
    assert found.gib == pytest.approx(25.6, rel=0.05)
    assert estimate(run, vocab=1000).seconds < found.seconds


def test_arithmetic_by_hand() -> None:
    """MDLM: six for each weight of the blocks and each token, attention, and the head at half of the tokens."""
    found = estimate(step("mdlm", steps=1))
    blocks, attention = 12 * 12 * 768**2, 12 * 2 * 1024 * 768
    head = 768 * 50_257 * (1 - 1e-3) / 2
    assert found.flops == pytest.approx(64 * 1024 * 6 * (blocks + attention + head), rel=2e-3)
    assert found.parameters == 169_626_449
    assert found.tokens == 64 * 1024


def test_the_order_of_methods() -> None:
    costs = {name: estimate(step(name)).seconds for name in ("ar", "mdlm", "mcdlm", "udlm", "sdtt")}
    assert 1.0 < costs["mcdlm"] / costs["mdlm"] < 1.4
    assert costs["udlm"] > costs["mdlm"]
    assert costs["sdtt"] > costs["mcdlm"]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("gpu", GPUS)
def test_every_method_has_a_cost(name: str, gpu: str) -> None:
    assert name in RECIPES, (
        f"RECIPES in cdlm/train/recipes.py has no run of {name} at the paper's size: paper({name!r}, ...)"
    )
    assert 0 < estimate(RECIPES[name].config, 8, gpu).seconds < 100


def test_more_gpus_are_faster_until_they_wait() -> None:
    days = [estimate(RECIPES["mcdlm"].config, n).days for n in (1, 8, 64, 256)]
    assert days == sorted(days, reverse=True)
    assert days[0] / days[1] == pytest.approx(8, rel=0.05)
    most = estimate(RECIPES["mcdlm"].config, 2048)
    assert most.waiting > 0
    assert most.days > 0.9 * days[-1]  # eight times the GPUs, and nothing gained


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2048 sequences need .* GiB, and a h100 has 79; use --micro-batch-size 128"):
        estimate(RECIPES["mcdlm"].config, 1, "h100", 2048)
    with pytest.raises(ValueError, match="does not divide among 3 GPUs"):
        estimate(RECIPES["mcdlm"].config, 3)
    with pytest.raises(ValueError, match="do not divide into micro-batches of 3"):
        estimate(RECIPES["mcdlm"].config, 1, "h200", 3)
    huge = dataclasses.replace(RECIPES["mdlm"].config.network, hidden_size=12_288, num_layers=96, num_heads=96)
    with pytest.raises(ValueError, match="not even one sequence fits"):
        estimate(dataclasses.replace(RECIPES["mdlm"].config, network=huge))
    with pytest.raises(ValueError, match="at least 1"):
        CostConfig("mdlm", gpus=0)
