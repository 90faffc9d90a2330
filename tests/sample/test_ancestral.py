"""Ancestral sampling draws from the composition of posterior bridges, whatever the predictor says."""

import importlib

import pytest
import scipy.stats
import torch

from cdlm.process import Cosine, Process, bridge_law, masked, transition, uniform
from cdlm.process.process import Posterior
from cdlm.rng import seeded
from cdlm.sample.ancestral import ancestral, plain_ancestral
from cdlm.sample.exact import ancestral_law
from cdlm.sample.logits import Shape
from cdlm.sample.plan import Drawing
from cdlm.sample.settings import Tail
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
SHAPES = [
    Shape(temperature=0.6),
    Shape(temperature=1.7),
    Shape(top_k=2),
    Shape(top_p=0.8),
    Shape(0.8, 2, 0.7),
    Shape(top_k=1, without=(0,)),
]
every_prior = pytest.mark.parametrize("process", PRIORS.values(), ids=PRIORS)


def draw(predict, process: Process, grid, *, n: int = N, length: int = L, x=None, **settings) -> torch.Tensor:
    rng = seeded(5, batch=n)
    x = process.start(length, rng("start")) if x is None else x.expand(n, -1)
    return text(ancestral(predict, process, x, grid, rng, **settings))


def sharpened(law: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Without some tokens: temperature, the k likeliest, the smallest set that reaches p; one row after the other."""
    rows = []
    for row in law.flatten(0, -2).tolist():
        row = [p ** (1 / shape.temperature) for p in row]
        order = sorted(set(range(len(row))) - set(shape.without), key=lambda token: -row[token])
        order = order[: shape.top_k or None]
        kept, mass, total = [], 0.0, sum(row[token] for token in order)
        for token in order:
            if mass < shape.top_p * total:
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


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("how", ["plug-in", "mixture"])
@every_prior
def test_samples_follow_the_composed_bridges(process: Process, how: Posterior, grid: torch.Tensor) -> None:
    net = Table(process)
    law = composed(noise(process), process, L, ancestor(process, net.law, how), grid)
    assert agrees(draw(net, process, grid, drawing=Drawing(posterior=how)), law, process.states)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("how", ["plug-in", "mixture"])
@every_prior
def test_the_plain_sampler_follows_the_composed_bridges(process: Process, how: Posterior, grid: torch.Tensor) -> None:
    net, rng = Table(process), seeded(6, batch=N)
    law = composed(noise(process), process, L, ancestor(process, net.law, how), grid)
    drawn = text(plain_ancestral(net.plain, process, process.start(L, rng("start")), grid, rng, how))
    assert agrees(drawn, law, process.states)


@every_prior
def test_the_plain_sampler_keeps_given_positions(process: Process) -> None:
    net, rng, grid = Table(process), seeded(6, batch=N), GRIDS["uniform"]
    x = torch.tensor([1, V if process.has_mask else 0])
    given = torch.tensor([True, False])
    law = composed(point(x, process.states), process, L, clamped(ancestor(process, net.law), given), grid)
    states = plain_ancestral(net.plain, process, x.expand(N, -1), grid, rng, given=given.expand(N, -1))
    assert agrees(text(states), law, process.states)


@pytest.mark.parametrize("process", [masked(7), uniform(7)], ids=["masked", "uniform"])
def test_plain_and_planned_agree_on_a_larger_space(process: Process) -> None:
    """Six positions of a real network: every pair of neighbours has the same joint distribution under both."""
    net, n, length = tiny(process), 6000, 6
    rng, grid = seeded(7, batch=n), uniform_times(4)
    x = process.start(length, rng("start"))
    one = text(plain_ancestral(net, process, x, grid, rng("plain")))
    other = text(ancestral(net, process, x, grid, rng("planned")))
    for place in range(length - 1):
        counts = [torch.bincount(drawn[:, place] * 7 + drawn[:, place + 1], minlength=49) for drawn in (one, other)]
        both = torch.stack(counts)[:, sum(counts) > 0]
        assert scipy.stats.chi2_contingency(both.numpy()).pvalue > ALPHA


@every_prior
def test_plug_in_and_mixture_are_told_apart_unless_tokens_are_masked(process: Process) -> None:
    """The test above can fail: samples of one posterior do not pass for the other's."""
    net, grid = Table(process), GRIDS["uniform"]
    law = composed(noise(process), process, L, ancestor(process, net.law, "mixture"), grid)
    drawn = draw(net, process, grid, drawing=Drawing(posterior="plug-in"))
    assert agrees(drawn, law, process.states) == (process.name == "masked")


@pytest.mark.parametrize("process", [masked(V), uniform(V), masked(V, Cosine()), uniform(V, Cosine())])
def test_three_positions_and_either_schedule(process: Process) -> None:
    net, grid = Table(process, 3), cosine_times(5)
    law = composed(noise(process, 3), process, 3, ancestor(process, net.law), grid)
    assert agrees(draw(net, process, grid, length=3), law, process.states)


@every_prior
def test_a_plain_function_is_a_predictor(process: Process) -> None:
    """A function of tokens and one time is called with the time of each sequence."""
    net, grid = Table(process), GRIDS["uniform"]
    law = composed(noise(process), process, L, ancestor(process, net.law), grid)
    assert agrees(draw(net.plain, process, grid, n=10_000), law, process.states)
    assert torch.equal(draw(net.plain, process, grid, n=500), draw(net, process, grid, n=500))


@pytest.mark.parametrize("how", ["plug-in", "mixture"])
@every_prior
def test_a_tail_that_samples_is_one_more_hop(process: Process, how: Posterior) -> None:
    net, grid = Table(process), uniform_times(2, end=0.4)
    law = composed(noise(process), process, L, ancestor(process, net.law, how), [*grid, 0.0])
    drawn = draw(net, process, grid, tail="sample", drawing=Drawing(posterior=how))
    assert agrees(drawn, law, process.states)


@every_prior
def test_a_greedy_tail_takes_the_likeliest_token_wherever_it_is_noisy(process: Process) -> None:
    """Composition down to the end of the grid, then the mode; a token that the prior cannot produce is clean."""
    net, grid = Table(process), uniform_times(3, end=0.4)
    law = composed(noise(process), process, L, ancestor(process, net.law), grid)
    law = push(law, process, L, greedy(process, net.law), float(grid[-1]), 0.0)
    assert agrees(draw(net, process, grid, tail="argmax"), law, process.states)


@pytest.mark.parametrize("tail", ["none", "sample", "argmax"])
@pytest.mark.parametrize("kind", ["masked", "uniform", "mask and unigram"])
def test_single_precision_draws_from_the_same_law(kind: str, tail: Tail) -> None:
    process, grid = PRIORS[kind], uniform_times(3, end=0.0 if tail == "none" else 0.3)
    net = Table(process)
    law = composed(noise(process), process, L, ancestor(process, net.law), [*grid, *([0.0] * (tail == "sample"))])
    if tail == "argmax":
        law = push(law, process, L, greedy(process, net.law), float(grid[-1]), 0.0)
    assert agrees(draw(net, process, grid, tail=tail, drawing=Drawing(precision="fp32")), law, process.states)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_a_shape_sharpens_the_predictor_and_nothing_else(kind: str, shape: Shape) -> None:
    process, grid = PRIORS[kind], GRIDS["uniform"]
    net = Table(process)
    sharp = ancestor(process, lambda x, t: sharpened(net.law(x, t), shape))
    law = composed(noise(process), process, L, sharp, grid)
    drawn = draw(net, process, grid, drawing=Drawing(shape))
    assert agrees(drawn, law, process.states)
    plain = composed(noise(process), process, L, ancestor(process, net.law), grid)
    assert not agrees(drawn, plain, process.states)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sharpened_law_by_hand(shape: Shape) -> None:
    """The same as loops over sorted tokens; what is left out has probability zero, not little."""
    law = torch.rand(50, 9, dtype=torch.float64).softmax(-1)
    assert torch.allclose(shape(law.log() + 2).softmax(-1), sharpened(law, shape), atol=1e-12)
    assert torch.equal(shape(law.log()).exp() == 0, sharpened(law, shape) == 0)


@pytest.mark.parametrize("tail", ["none", "sample", "argmax"])
@every_prior
def test_given_positions_never_change(process: Process, tail: Tail) -> None:
    """The rest follows the composition with these positions held fixed."""
    net, given = Table(process, 3), torch.tensor([False, True, False])
    mask = process.states - 1  # or a token like any other, where there is no mask
    x, grid = torch.tensor([mask, 0, mask]), uniform_times(3, end=0.0 if tail == "none" else 0.3)
    kernel = clamped(ancestor(process, net.law), given)
    law = composed(point(x, process.states), process, 3, kernel, [*grid, *([0.0] * (tail == "sample"))])
    if tail == "argmax":
        law = push(law, process, 3, clamped(greedy(process, net.law), given), float(grid[-1]), 0.0)
    drawn = draw(net, process, grid, x=x, tail=tail, given=given.expand(N, -1))
    assert bool((drawn[:, 1] == 0).all())
    assert agrees(drawn, law, process.states)


def test_what_is_visible_under_masking_is_given() -> None:
    process = masked(V)
    net, x = Table(process, 3), torch.tensor([3, 1, 3])
    law = composed(point(x, 4), process, 3, ancestor(process, net.law), GRIDS["cosine"])
    assert agrees(draw(net, process, GRIDS["cosine"], x=x), law, 4)


def test_a_mask_that_is_given_stays_a_mask() -> None:
    """`given` positions never change, whatever is there."""
    process, x = masked(V), torch.tensor([3, 1, 3])
    given = torch.tensor([True, True, False])
    drawn = draw(Table(process, 3), process, GRIDS["uniform"], n=50, x=x, given=given.expand(50, -1))
    assert bool((drawn[:, :2] == x[:2]).all())


@every_prior
def test_a_grid_may_start_below_one(process: Process) -> None:
    """From a text noised to t = 0.6 and not from the prior; a clean token may be among it."""
    net, x, grid = Table(process), torch.tensor([process.states - 1, 1]), uniform_times(3, start=0.6)
    law = composed(point(x, process.states), process, L, ancestor(process, net.law), grid)
    assert agrees(draw(net, process, grid, x=x), law, process.states)


@pytest.mark.parametrize("kind", ["uniform", "mask and unigram", "unigram with a zero"])
def test_every_state_on_the_way_has_its_own_law(kind: str) -> None:
    process, grid = PRIORS[kind], uniform_times(4)
    net, rng = Table(process), seeded(2, batch=20_000)
    start = process.start(L, rng("start"))
    for hops, state in enumerate(ancestral(net, process, start, grid, rng)):
        assert (state.step, state.num_steps) == (hops, 4)
        law = composed(noise(process), process, L, ancestor(process, net.law), grid[: hops + 1])
        assert agrees(state.x, law, process.states)


@pytest.mark.parametrize("kind", ["uniform", "unigram"])
def test_texts_do_not_depend_on_how_many_hops_fit_in_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process = PRIORS[kind]
    at_once = draw(Table(process), process, uniform_times(7), n=100)
    monkeypatch.setattr(importlib.import_module("cdlm.sample.ancestral"), "_AT_ONCE", 700)
    assert torch.equal(draw(Table(process), process, uniform_times(7), n=100), at_once)


@pytest.mark.parametrize("how", ["plug-in", "mixture"])
def test_a_token_outside_the_prior_stays_whatever_the_predictor_says(how: Posterior) -> None:
    """pi[x_t] = 0 means that x_t is clean."""
    process = PRIORS["unigram with a zero"]
    drawn = draw(
        Table(process), process, uniform_times(5), n=500, x=torch.tensor([1, 0]), drawing=Drawing(posterior=how)
    )
    assert bool((drawn[:, 0] == 1).all())
    assert len(drawn[:, 1].unique()) == V


def test_a_text_without_noise_is_left_alone() -> None:
    """No mask, no evaluation."""
    process, x = masked(V), torch.tensor([[0, 2, 1], [1, 1, 0]])
    for tail, end in (("none", 0.0), ("sample", 0.1), ("argmax", 0.1)):
        net = Table(process, 3)
        states = list(ancestral(net, process, x, uniform_times(4, end=end), seeded(0, batch=2), tail=tail))
        assert torch.equal(states[-1].x, x)
        assert states[-1].evaluations == [0, 0]
        assert net.rows == 0


def test_tails_and_grids_must_fit() -> None:
    process, rng = masked(V), seeded(0, batch=1)
    x = process.start(L, rng)
    for tail in ("sample", "argmax"):
        with pytest.raises(ValueError, match="end the grid above 0"):
            ancestral(Table(process), process, x, uniform_times(2), rng, tail=tail)
    with pytest.raises(ValueError, match="leaves masks behind: end it at 0, or give a tail"):
        ancestral(Table(process), process, x, uniform_times(2, end=0.1), rng)
    ancestral(Table(uniform(V)), uniform(V), x.clamp(max=V - 1), uniform_times(2, end=0.1), rng)


def test_the_kernel_of_these_tests_is_a_law() -> None:
    for process in PRIORS.values():
        every = sequences(process.states, L)
        for how in ("plug-in", "mixture"):
            kernel = bridge(process, Table(process).law(every, 0.7), every, 0.7, 0.2, how)
            assert torch.allclose(kernel.sum(-1), torch.ones(1, dtype=torch.float64), atol=1e-12)
