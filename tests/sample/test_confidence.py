"""Orders that ask the network: which positions are kept, and the law that follows, by listing every draw."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from cdlm.process import masked
from cdlm.rng import seeded
from cdlm.sample.draw import State
from cdlm.sample.generate import generate
from cdlm.sample.settings import resolve
from cdlm.sample.timesteps import cosine_times, uniform_times

from .truth import Table, V, agrees, along, index, level, point, sequences, text

MASK = V
BY = ["probability", "margin", "entropy-bound"]
every_kind = pytest.mark.parametrize("by", BY)


def confident(
    predict, x: Tensor, grid: Tensor, by: str, seed: int = 0, bound: float | None = None, **more
) -> list[State]:
    """All states of the sampler that the settings choose."""
    settings = resolve({"order": by, "entropy_bound": bound, **more}, masked(V))
    assert settings.sampler == ("entropy-bound" if by == "entropy-bound" else "confidence")
    with along(grid):
        return list(generate(predict, masked(V), x, settings, seeded(seed, batch=len(x))))


def bound_of(by: str, bound: float) -> float | None:
    """The bound, for the order that has one."""
    return bound if by == "entropy-bound" else None


def certainty(by: str, law: list[float], token: int) -> float:
    if by == "probability":
        return law[token]
    if by == "margin":
        first, second = sorted(law, reverse=True)[:2]
        return first - second
    return sum(p * math.log(p) for p in law if p > 0)


def kept(by: str, laws: list[list[float]], tokens: dict[int, int], share: int, bound: float) -> list[int]:
    """Of the masked positions (with a token drawn for each) those that a hop keeps."""
    ranked = sorted(tokens, key=lambda place: -certainty(by, laws[place], tokens[place]))
    count = share
    if by == "entropy-bound":
        entropies = [-certainty(by, laws[place], tokens[place]) for place in ranked]
        for more in range(1, len(ranked) + 1):
            if sum(entropies[:more]) - max(entropies[:more]) <= bound:
                count = max(count, more)
    return ranked[:count]


def shares(start: int, grid: Tensor) -> list[int]:
    """How many masks the grid leaves after each hop: the whole number below start (1 - alpha_t) / (1 - alpha_1)."""
    process = masked(V)
    left = [start * (1 - level(process, float(t))) / (1 - level(process, float(grid[0]))) for t in grid[1:]]
    return [math.floor(masks + 1e-9) for masks in left]


def listed(net: Table, x: Tensor, grid: Tensor, by: str, bound: float) -> Tensor:
    """The law over all states: every state, every hop, every combination of draws."""
    every, law = sequences(V + 1, len(x)), point(x, V + 1)
    for t, left in zip(grid.tolist(), shares(int((x == MASK).sum()), grid), strict=False):
        after = torch.zeros_like(law)
        for state in law.nonzero()[:, 0].tolist():
            masks = (every[state] == MASK).nonzero()[:, 0].tolist()
            laws = net.law(every[state][None], t)[0].tolist()
            for tokens in itertools.product(range(V), repeat=len(masks)):
                drawn = dict(zip(masks, tokens, strict=True))
                y = every[state].clone()
                for place in kept(by, laws, drawn, max(0, len(masks) - left), bound):
                    y[place] = drawn[place]
                chance = math.prod(laws[place][token] for place, token in drawn.items())
                after[index(y, V + 1)] += law[state] * chance
        law = after
    return law


def revealed(states: list[State]) -> list[list[list[int]]]:
    """For each sequence, the positions that each hop revealed."""
    changes = [before.x != after.x for before, after in itertools.pairwise(states)]
    return [[change[row].nonzero()[:, 0].tolist() for change in changes] for row in range(len(states[0].x))]


def constant(logits: Tensor):
    """A predictor that says the same whatever it sees."""
    return lambda x, t: logits.expand(len(x), -1, -1)


@pytest.mark.parametrize("grid", [uniform_times(3), uniform_times(2), cosine_times(4)], ids=["3", "2", "cosine"])
@every_kind
def test_samples_follow_the_law_of_every_draw_listed(by: str, grid: Tensor) -> None:
    process, n, x = masked(V), 30_000, torch.full((3,), MASK)
    net = Table(process, 3, seed=4)
    law = listed(net, x, grid, by, bound=0.6)
    drawn = text(confident(net, x.expand(n, -1), grid, by, bound=bound_of(by, 0.6)))
    assert agrees(drawn, law, V + 1)


@every_kind
def test_what_is_visible_stays_and_only_masks_count(by: str) -> None:
    process, n, x = masked(V), 30_000, torch.tensor([MASK, 1, MASK, MASK])
    net, grid = Table(process, 4), uniform_times(2)
    law = listed(net, x, grid, by, bound=0.3)
    drawn = text(confident(net, x.expand(n, -1), grid, by, 1, bound_of(by, 0.3)))
    assert bool((drawn[:, 1] == 1).all())
    assert agrees(drawn, law, V + 1)


def test_the_kinds_are_told_apart() -> None:
    """The law of one kind does not pass for another's."""
    process, n, x = masked(V), 30_000, torch.full((3,), MASK)
    net, grid = Table(process, 3, seed=4), uniform_times(3)
    for by, other in itertools.permutations(BY, 2):
        drawn = text(confident(net, x.expand(n, -1), grid, by, bound=bound_of(by, 0.6)))
        assert not agrees(drawn, listed(net, x, grid, other, bound=0.6), V + 1)


@pytest.mark.parametrize("by", ["probability", "margin"])
def test_the_most_certain_positions_come_first(by: str) -> None:
    """Drawn without chance (top-k 1): the order is that of the network's certainty, two positions a hop."""
    length = 8
    logits = 2 * torch.randn(length, V, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    laws = logits.softmax(-1).tolist()
    modes = dict(enumerate(logits.argmax(-1).tolist()))
    order = sorted(range(length), key=lambda place: -certainty(by, laws[place], modes[place]))
    assert order != list(range(length))
    x = torch.full((3, length), MASK)
    states = confident(constant(logits), x, uniform_times(4), by, top_k=1)
    for row in revealed(states):
        assert row == [sorted(order[first : first + 2]) for first in range(0, length, 2)]
    assert states[-1].x.tolist() == [list(modes.values())] * 3


@pytest.mark.parametrize("by", ["probability", "margin"])
@pytest.mark.parametrize(("length", "steps"), [(8, 8), (8, 4), (22, 22), (44, 22), (128, 32), (10, 4), (3, 7)])
def test_every_hop_keeps_the_share_that_the_grid_says(by: str, length: int, steps: int) -> None:
    """On a uniform grid the masks left after hop k are l (1 - k / steps), rounded down; empty hops do not run."""
    x = torch.full((2, length), MASK)
    logits = torch.randn(length, V, dtype=torch.float64)
    states = confident(constant(logits), x, uniform_times(steps), by)
    left = [length * (steps - hop) // steps for hop in range(len(states))]
    assert [int((state.x[0] == MASK).sum()) for state in states] == left
    assert states[-1].nfe == [len(set(left)) - 1] * 2


def test_without_a_bound_one_position_at_a_time() -> None:
    """Bound 0 and as many hops as masks."""
    x, logits = torch.full((2, 8), MASK), torch.randn(8, V, dtype=torch.float64)
    states = confident(constant(logits), x, uniform_times(8), "entropy-bound", bound=0.0)
    law = logits.softmax(-1)
    order = (law * law.log()).sum(-1).argsort(descending=True).tolist()
    assert revealed(states) == [[[place] for place in order]] * 2
    assert states[-1].nfe == [8, 8]


def test_certain_positions_cost_nothing() -> None:
    """Bound 0: all positions of zero entropy at once, and the next one, whose entropy is the largest kept."""
    logits = torch.randn(8, V, dtype=torch.float64)
    certain = [1, 4, 6]
    logits[certain] = torch.tensor([-torch.inf, 0.0, -torch.inf], dtype=torch.float64)
    law = logits.softmax(-1)
    order = torch.special.xlogy(law, law).sum(-1).argsort(descending=True, stable=True).tolist()
    x = torch.full((1, 8), MASK)
    states = confident(constant(logits), x, uniform_times(8), "entropy-bound", bound=0.0)
    assert revealed(states) == [[sorted([*certain, order[3]]), *[[place] for place in order[4:]]]]
    assert states[-1].nfe == [5]


def test_a_large_bound_reveals_everything_at_once() -> None:
    x, logits = torch.full((2, 8), MASK), torch.randn(8, V, dtype=torch.float64)
    states = confident(constant(logits), x, uniform_times(8), "entropy-bound", bound=100.0)
    assert len(states) == 2
    assert states[-1].nfe == [1, 1]
    assert not bool((states[-1].x == MASK).any())


@pytest.mark.parametrize("bound", [0.0, 0.4, 1.5])
@pytest.mark.parametrize("steps", [2, 4, 16])
def test_each_hop_of_the_entropy_bound_is_as_large_as_it_may_be(bound: float, steps: int) -> None:
    """Entropies but the largest add up to the bound at most, unless the grid's share asks for more; one more would
    exceed it. Never more evaluations than hops."""
    length, n = 16, 8
    tables = torch.randn(V + 1, length, V, dtype=torch.float64)

    def predict(x: Tensor, t: float) -> Tensor:
        return (2 - t) * tables[x.roll(1, -1), torch.arange(length)]

    x = torch.full((n, length), MASK)
    states = confident(predict, x, uniform_times(steps), "entropy-bound", 2, bound)
    nfe = [0] * n
    for hop, (before, after) in enumerate(itertools.pairwise(states)):
        law = predict(before.x, 1 - hop / steps).softmax(-1)
        entropy = -(law * law.log()).sum(-1)
        for row in range(n):
            masks = (before.x[row] == MASK).nonzero()[:, 0].tolist()
            nfe[row] += bool(masks)
            now = [place for place in masks if int(after.x[row, place]) != MASK]
            ranked = sorted(masks, key=lambda place: float(entropy[row, place]))
            assert now == sorted(ranked[: len(now)])
            least = max(0, len(masks) - length * (steps - hop - 1) // steps)
            assert len(now) >= min(least, len(masks))
            if len(now) > least:
                assert sum(float(entropy[row, place]) for place in ranked[: len(now) - 1]) <= bound
            if len(now) < len(masks):
                assert sum(float(entropy[row, place]) for place in ranked[: len(now)]) > bound
    assert states[-1].nfe == nfe
    assert max(nfe) <= steps


def test_a_text_without_masks_is_left_alone() -> None:
    for by in BY:
        x = torch.tensor([[0, 1, 2]])
        states = confident(constant(torch.zeros(3, V)), x, uniform_times(3), by)
        assert torch.equal(states[-1].x, x)
        assert states[-1].nfe == [0]
