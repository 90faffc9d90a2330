"""Ancestral sampling draws from the composition of posterior bridges, whatever the predictor says."""

import importlib

import pytest
import scipy.stats
import torch

from cdlm.process import Cosine, Process, bridge_law, masked, transition, uniform
from cdlm.process.process import Posterior
from cdlm.rng import seeded
from cdlm.sample.ancestral import ancestral, plain_ancestral
from cdlm.sample.draw import make_draw
from cdlm.sample.exact import ancestral_law
from cdlm.sample.settings import resolve
from cdlm.sample.timesteps import cosine_times, custom_times, uniform_times

from .truth import (
    ALPHA,
    PRIORS,
    L,
    Table,
    V,
    agrees,
    ancestor,
    bridge,
    clamped,
    composed,
    greedy,
    noise,
    point,
    push,
    sequences,
    text,
    tiny,
)

N = 16_000
GRIDS = {"uniform": uniform_times(3), "cosine": cosine_times(4), "custom": custom_times([1.0, 0.7, 0.6, 0.1, 0.0])}
STEPS = {
    "uniform": {"steps": 3},
    "cosine": {"steps": 4, "timesteps": "cosine"},
    "custom": {"timesteps": "1,0.7,0.6,0.1,0"},
}
"""Settings, and the times that they stand for."""
SHAPES = [
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 2},
    {"top_p": 0.8},
    {"temperature": 0.8, "top_k": 2, "top_p": 0.7},
    {"top_k": 1, "banned": (0,)},
]
every_prior = pytest.mark.parametrize("process", PRIORS.values(), ids=PRIORS)


def draw(
    predict, process: Process, *, n: int = N, length: int = L, x=None, start=1.0, given=None, banned=(),
    how: Posterior = "plug-in", **settings,
) -> torch.Tensor:  # fmt: skip
    rng = seeded(5, batch=n)
    x = process.start(length, rng("start")) if x is None else x.expand(n, -1)
    resolved = resolve(settings, process, how)
    drawing = make_draw(predict, process, x, resolved, banned=banned)
    return text(ancestral(predict, process, x, resolved, rng, given=given, start=start, draw=drawing))


def ends_early(monkeypatch: pytest.MonkeyPatch, end: float) -> None:
    """Let the steps before a final step end at a time where it still has work to do."""
    monkeypatch.setattr("cdlm.sample.timesteps.NEAR_ZERO", end)


def sharpened(law: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, banned=()) -> torch.Tensor:
    """Without some tokens: temperature, the k likeliest, the smallest set that reaches p; one row after the other."""
    rows = []
    for row in law.flatten(0, -2).tolist():
        row = [p ** (1 / temperature) for p in row]
        order = sorted(set(range(len(row))) - set(banned), key=lambda token: -row[token])
        order = order[: top_k or None]
        kept, mass, total = [], 0.0, sum(row[token] for token in order)
        for token in order:
            if mass < top_p * total:
                kept.append(token)
            mass += row[token]
        rows.append([row[token] if token in kept else 0.0 for token in range(len(row))])
    sharp = torch.tensor(rows, dtype=torch.float64).view_as(law)
    return sharp / sharp.sum(-1, keepdim=True)


@pytest.mark.parametrize("how", ["plug-in", "mixture"])
@every_prior
def test_the_oracles_of_these_tests_agree(process: Process, how: Posterior) -> None:
    """The composition written here, one with `bridge_law`, and `ancestral_law` are one law; carry-over included."""
    net = Table(process)

    def law(x: torch.Tensor, t: float) -> torch.Tensor:
        known = torch.eye(process.states, V, dtype=torch.float64)[x]
        return torch.where((process.prior[x] > 0)[..., None], net.law(x, t), known)

    def dense(x: torch.Tensor, t: float, s: float) -> torch.Tensor:
        q_s, q_ts = transition(process, 0.0, s), transition(process, s, t)
        if how == "plug-in":
            return bridge_law(torch.nn.functional.pad(law(x, t), (0, process.states - V)), x, q_s, q_ts)
        kernel = torch.zeros(*x.shape, process.states, dtype=torch.float64)
        for token in range(V):
            data = torch.eye(process.states, dtype=torch.float64)[token].expand(*x.shape, -1)
            kernel += law(x, t)[..., token, None] * bridge_law(data, x, q_s, q_ts).nan_to_num(0.0)
        return kernel

    clean = (sequences(process.states, L) < V).all(-1)
    for grid in GRIDS.values():
        truth = composed(noise(process), process, L, ancestor(process, law, how), grid)
        assert float(truth[~clean].sum()) < 1e-12
        assert torch.allclose(truth, composed(noise(process), process, L, dense, grid), atol=1e-12)
        assert torch.allclose(
            truth[clean], ancestral_law(lambda x, t: law(x, t).log(), process, L, grid, how), atol=1e-12
        )


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("how", ["plug-in", "mixture"])
@every_prior
def test_samples_follow_the_composed_bridges(process: Process, how: Posterior, grid: str) -> None:
    net = Table(process)
    law = composed(noise(process), process, L, ancestor(process, net.law, how), GRIDS[grid])
    assert agrees(draw(net, process, how=how, **STEPS[grid]), law, process.states)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("how", ["plug-in", "mixture"])
@every_prior
def test_the_plain_sampler_follows_the_composed_bridges(process: Process, how: Posterior, grid: str) -> None:
    net, rng = Table(process), seeded(6, batch=N)
    law = composed(noise(process), process, L, ancestor(process, net.law, how), GRIDS[grid])
    settings = resolve({"sampler": "plain", **STEPS[grid]}, process, how)
    drawn = text(plain_ancestral(net.plain, process, process.start(L, rng("start")), settings, rng))
    assert agrees(drawn, law, process.states)


@every_prior
def test_the_plain_sampler_keeps_given_positions(process: Process) -> None:
    net, rng, settings = Table(process), seeded(6, batch=N), resolve({"sampler": "plain", "steps": 3}, process)
    x = torch.tensor([1, V if process.has_mask else 0])
    given = torch.tensor([True, False])
    kernel = clamped(ancestor(process, net.law), given)
    law = composed(point(x, process.states), process, L, kernel, uniform_times(3))
    states = plain_ancestral(net.plain, process, x.expand(N, -1), settings, rng, given=given.expand(N, -1))
    assert agrees(text(states), law, process.states)


@pytest.mark.parametrize(
    ("process", "how"),
    [(masked(7), "plug-in"), (uniform(7), "plug-in"), (uniform(7), "mixture")],
    ids=["masked", "uniform, plug-in", "uniform, mixture"],
)
def test_plain_and_planned_agree_on_a_larger_space(process: Process, how: Posterior) -> None:
    """Six positions of a real network: every pair of neighbours has the same joint distribution under both."""
    net, n, length = tiny(process), 4000, 6
    rng, settings = seeded(7, batch=n), resolve({"steps": 4}, process, how)
    x = process.start(length, rng("start"))
    plain = text(plain_ancestral(net, process, x, settings, rng("plain")))
    planned = text(ancestral(net, process, x, settings, rng("planned")))
    for place in range(length - 1):
        counts = [torch.bincount(drawn[:, place] * 7 + drawn[:, place + 1], minlength=49) for drawn in (plain, planned)]
        both = torch.stack(counts)[:, sum(counts) > 0]
        assert scipy.stats.chi2_contingency(both.numpy()).pvalue > ALPHA


@every_prior
def test_plug_in_and_mixture_are_told_apart_unless_tokens_are_masked(process: Process) -> None:
    """The test above can fail: samples of one posterior do not pass for the other's."""
    net = Table(process)
    law = composed(noise(process), process, L, ancestor(process, net.law, "mixture"), uniform_times(3))
    drawn = draw(net, process, steps=3)
    assert agrees(drawn, law, process.states) == (process.name == "masked")


@pytest.mark.parametrize("process", [masked(V), uniform(V), masked(V, Cosine()), uniform(V, Cosine())])
def test_three_positions_and_either_schedule(process: Process) -> None:
    net = Table(process, 3)
    law = composed(noise(process, 3), process, 3, ancestor(process, net.law), cosine_times(5))
    assert agrees(draw(net, process, length=3, steps=5, timesteps="cosine"), law, process.states)


@every_prior
def test_a_plain_function_is_a_predictor(process: Process) -> None:
    """A function of tokens and one time is called with the time of each sequence."""
    net = Table(process)
    law = composed(noise(process), process, L, ancestor(process, net.law), uniform_times(3))
    assert agrees(draw(net.plain, process, n=10_000, steps=3), law, process.states)
    assert torch.equal(draw(net.plain, process, n=500, steps=3), draw(net, process, n=500, steps=3))


@pytest.mark.parametrize("how", ["plug-in", "mixture"])
@every_prior
def test_a_sampled_final_step_is_one_more_hop(
    process: Process, how: Posterior, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_early(monkeypatch, 0.4)
    net, grid = Table(process), uniform_times(2, end=0.4)
    law = composed(noise(process), process, L, ancestor(process, net.law, how), [*grid, 0.0])
    assert agrees(draw(net, process, how=how, steps=2, final_step="sample"), law, process.states)


@every_prior
def test_a_greedy_final_step_takes_the_likeliest_token_wherever_it_is_noisy(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Composition down to the last time, then the mode; a token that the prior cannot produce is clean."""
    ends_early(monkeypatch, 0.4)
    net, grid = Table(process), uniform_times(3, end=0.4)
    law = composed(noise(process), process, L, ancestor(process, net.law), grid)
    law = push(law, process, L, greedy(process, net.law), float(grid[-1]), 0.0)
    assert agrees(draw(net, process, steps=3, final_step="argmax"), law, process.states)


@pytest.mark.parametrize("final_step", ["none", "sample", "argmax"])
@pytest.mark.parametrize("kind", ["masked", "uniform", "mask and unigram"])
def test_single_precision_draws_from_the_same_law(kind: str, final_step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends_early(monkeypatch, 0.3)
    process, grid = PRIORS[kind], uniform_times(3, end=0.0 if final_step == "none" else 0.3)
    net = Table(process)
    law = composed(noise(process), process, L, ancestor(process, net.law), hops(grid, final_step))
    if final_step == "argmax":
        law = push(law, process, L, greedy(process, net.law), float(grid[-1]), 0.0)
    assert agrees(draw(net, process, steps=3, final_step=final_step, precision="fp32"), law, process.states)


def hops(grid: torch.Tensor, final_step: str) -> list[float]:
    """The times of all hops; a sampled final step is one more, to 0."""
    return [*grid.tolist(), *([0.0] if final_step == "sample" else [])]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_a_shape_sharpens_the_predictor_and_nothing_else(kind: str, shape: dict) -> None:
    process, grid = PRIORS[kind], GRIDS["uniform"]
    net = Table(process)
    sharp = ancestor(process, lambda x, t: sharpened(net.law(x, t), **shape))
    law = composed(noise(process), process, L, sharp, grid)
    drawn = draw(net, process, steps=3, **shape)
    assert agrees(drawn, law, process.states)
    plain = composed(noise(process), process, L, ancestor(process, net.law), grid)
    assert not agrees(drawn, plain, process.states)


@pytest.mark.parametrize("final_step", ["none", "sample", "argmax"])
@every_prior
def test_given_positions_never_change(process: Process, final_step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest follows the composition with these positions held fixed."""
    ends_early(monkeypatch, 0.3)
    net, given = Table(process, 3), torch.tensor([False, True, False])
    mask = process.states - 1  # or a token like any other, where there is no mask
    x, grid = torch.tensor([mask, 0, mask]), uniform_times(3, end=0.0 if final_step == "none" else 0.3)
    kernel = clamped(ancestor(process, net.law), given)
    law = composed(point(x, process.states), process, 3, kernel, hops(grid, final_step))
    if final_step == "argmax":
        law = push(law, process, 3, clamped(greedy(process, net.law), given), float(grid[-1]), 0.0)
    drawn = draw(net, process, x=x, given=given.expand(N, -1), steps=3, final_step=final_step)
    assert bool((drawn[:, 1] == 0).all())
    assert agrees(drawn, law, process.states)


def test_what_is_visible_under_masking_is_given() -> None:
    process = masked(V)
    net, x = Table(process, 3), torch.tensor([3, 1, 3])
    law = composed(point(x, 4), process, 3, ancestor(process, net.law), GRIDS["cosine"])
    assert agrees(draw(net, process, x=x, **STEPS["cosine"]), law, 4)


def test_a_mask_that_is_given_stays_a_mask() -> None:
    """`given` positions never change, whatever is there."""
    process, x = masked(V), torch.tensor([3, 1, 3])
    given = torch.tensor([True, True, False])
    drawn = draw(Table(process, 3), process, n=50, x=x, given=given.expand(50, -1), steps=3)
    assert bool((drawn[:, :2] == x[:2]).all())


@every_prior
def test_the_steps_may_start_below_one(process: Process) -> None:
    """From a text noised to t = 0.6 and not from the prior; a clean token may be among it."""
    net, x, grid = Table(process), torch.tensor([process.states - 1, 1]), uniform_times(3, start=0.6)
    law = composed(point(x, process.states), process, L, ancestor(process, net.law), grid)
    assert agrees(draw(net, process, x=x, start=0.6, steps=3), law, process.states)


@pytest.mark.parametrize("kind", ["uniform", "mask and unigram", "unigram with a zero"])
def test_every_state_on_the_way_has_its_own_law(kind: str) -> None:
    process, grid = PRIORS[kind], uniform_times(4)
    net, rng = Table(process), seeded(2, batch=20_000)
    start = process.start(L, rng("start"))
    for step, state in enumerate(ancestral(net, process, start, resolve({"steps": 4}), rng)):
        assert (state.step, state.num_steps) == (step, 4)
        law = composed(noise(process), process, L, ancestor(process, net.law), grid[: step + 1])
        assert agrees(state.x, law, process.states)


@pytest.mark.parametrize("kind", ["uniform", "unigram"])
def test_texts_do_not_depend_on_how_many_hops_fit_in_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process = PRIORS[kind]
    at_once = draw(Table(process), process, n=100, steps=7)
    monkeypatch.setattr(importlib.import_module("cdlm.sample.ancestral"), "_AT_ONCE", 700)
    assert torch.equal(draw(Table(process), process, n=100, steps=7), at_once)


@pytest.mark.parametrize("how", ["plug-in", "mixture"])
def test_a_token_outside_the_prior_stays_whatever_the_predictor_says(how: Posterior) -> None:
    """pi[x_t] = 0 means that x_t is clean."""
    process = PRIORS["unigram with a zero"]
    drawn = draw(Table(process), process, n=500, x=torch.tensor([1, 0]), how=how, steps=5)
    assert bool((drawn[:, 0] == 1).all())
    assert len(drawn[:, 1].unique()) == V


def test_a_text_without_noise_is_left_alone() -> None:
    """No mask, no evaluation."""
    process, x = masked(V), torch.tensor([[0, 2, 1], [1, 1, 0]])
    for final_step in ("none", "sample", "argmax"):
        net, settings = Table(process, 3), resolve({"steps": 4, "final_step": final_step})
        states = list(ancestral(net, process, x, settings, seeded(0, batch=2)))
        assert torch.equal(states[-1].x, x)
        assert states[-1].nfe == [0, 0]
        assert net.rows == 0


def test_the_kernel_of_these_tests_is_a_law() -> None:
    for process in PRIORS.values():
        every = sequences(process.states, L)
        for how in ("plug-in", "mixture"):
            kernel = bridge(process, Table(process).law(every, 0.7), every, 0.7, 0.2, how)
            assert torch.allclose(kernel.sum(-1), torch.ones(1, dtype=torch.float64), atol=1e-12)
