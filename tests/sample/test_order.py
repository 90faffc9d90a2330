"""Reveal orders: what is drawn in which hop, and the law that follows from it."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from cdlm.process import masked
from cdlm.rng import seeded
from cdlm.sample.draw import State
from cdlm.sample.exact import ancestral_law
from cdlm.sample.order import first_hitting, plan_by_level, unmask_in_order
from cdlm.sample.plan import execute
from cdlm.sample.samplers import ORDERS, load_function
from cdlm.sample.settings import resolve
from cdlm.sample.timesteps import uniform_times

from .truth import Table, V, agrees, clamped, composed, index, onehot, point, sequences, text

MASK, L3 = V, 3
Plan = list[tuple[list[int], float]]
"""Positions and time of each hop."""
SPREAD = ["dilated", "bit-reversed"]
FIRST_HITTING = resolve({"order": "first-hitting"})


def planned(net: Table, plan: Plan, x: Tensor) -> Tensor:
    """The law over all states after a plan: each hop draws its positions from the product of the predictions."""
    every, law = sequences(V + 1, len(x)), point(x, V + 1)
    for places, t in plan:
        after = torch.zeros_like(law)
        for state in law.nonzero()[:, 0].tolist():
            prediction = net.law(every[state][None], t)[0]
            for tokens in itertools.product(range(V), repeat=len(places)):
                y = every[state].clone()
                y[places] = torch.tensor(tokens)
                chance = math.prod(float(prediction[place, token]) for place, token in zip(places, tokens, strict=True))
                after[index(y, V + 1)] += law[state] * chance
        law = after
    return law


def blank(n: int, length: int) -> Tensor:
    return torch.full((n, length), MASK)


def flat(x: Tensor, t: float) -> Tensor:
    return torch.zeros(*x.shape, V, dtype=torch.float64)


def hops(states: list[State]) -> Tensor:
    """In which pass each position was revealed, [b, l]; -1 if it was visible from the start.

    Checks on the way that what is visible never changes.
    """
    when = torch.full_like(states[0].x, -1)
    for number, (before, after) in enumerate(itertools.pairwise(states)):
        changed = before.x != after.x
        assert bool((before.x[changed] == MASK).all())
        when[changed] = number
    assert not bool((states[-1].x == MASK).any())
    return when


def spread(order: str, length: int, steps: int, n: int = 64, x: Tensor | None = None, seed: int = 0) -> Tensor:
    x = blank(n, length) if x is None else x
    settings = resolve({"steps": steps, "order": order}, masked(V))
    return hops(list(unmask_in_order(flat, masked(V), x, settings, seeded(seed, batch=len(x)))))


def test_first_hitting_is_the_chain_rule_averaged_over_all_orders() -> None:
    """A predictor that is not told the time: one token at a time, every order as likely as any other."""
    process = masked(V)
    net, rng = Table(process, L3, timed=False), seeded(0, batch=60_000)
    orders = list(itertools.permutations(range(L3)))
    start = torch.full((L3,), MASK)
    law = sum(planned(net, [([place], 1.0) for place in order], start) for order in orders) / len(orders)
    state = list(first_hitting(net, process, blank(60_000, L3), FIRST_HITTING, rng))[-1]
    assert agrees(state.x, law, V + 1)
    assert state.nfe == [L3] * 60_000


@pytest.mark.parametrize("visible", [False, True])
def test_first_hitting_is_ancestral_sampling_on_a_perfect_grid(visible: bool) -> None:
    """A predictor that is told the time, from t = 1 and from t = 0.7 on, against 2,000 hops."""
    process, n = masked(V), 30_000
    net = Table(process, L3)
    if visible:
        x, start = torch.tensor([MASK, 1, MASK]), 0.7
        given = torch.tensor([False, True, False])

        def kernel(y: Tensor, t: float, s: float) -> Tensor:
            drawn = torch.nn.functional.pad(net.law(y, t), (0, 1)) * (1 - s / t) + s / t * onehot(y, V + 1)
            return torch.where((y == MASK)[..., None], drawn, onehot(y, V + 1))

        law = composed(point(x, V + 1), process, L3, clamped(kernel, given), uniform_times(2000, start))
    else:
        x, start = torch.full((L3,), MASK), 1.0
        clean = (sequences(V + 1, L3) < V).all(-1)
        law = torch.zeros(len(clean), dtype=torch.float64)
        law[clean] = ancestral_law(net.plain, process, L3, uniform_times(2000))

    def hit(net: Table) -> Tensor:
        return text(first_hitting(net, process, x.expand(n, -1), FIRST_HITTING, seeded(4, batch=n), start=start))

    assert agrees(hit(net), law, V + 1)
    untimed = Table(process, L3, timed=False)
    assert not agrees(hit(untimed), law, V + 1)


def test_first_hitting_asks_at_falling_times() -> None:
    """Each sequence at its own: (1 - alpha) / (1 - eps) of l masks are l uniforms in falling order."""
    seen: list[Tensor] = []

    class Watched(Table):
        def features(self, x: Tensor, alpha: Tensor, rows: Tensor | None = None) -> Tensor:
            seen.append((1 - alpha) / (1 - 1e-3))
            return super().features(x, alpha, rows)

    process, n = masked(V), 20_000
    text(first_hitting(Watched(process, L3), process, blank(n, L3), FIRST_HITTING, seeded(0, batch=n)))
    times = torch.stack(seen)
    assert times.shape == (L3, n)
    assert bool((times[:-1] > times[1:]).all())
    means = torch.tensor([3, 2, 1]) / 4  # order statistics of three uniforms
    assert torch.allclose(times.mean(1), means.double(), atol=6 * 0.2 / math.sqrt(n))


@pytest.mark.parametrize("steps", [1, 3, 4, 7, 24])
def test_dilated_positions_of_a_hop_are_exactly_steps_apart(steps: int) -> None:
    when = spread("dilated", 24, steps)
    for row in when:
        for hop in range(steps):
            places = (row == hop).nonzero()[:, 0]
            assert len(places) >= 24 // steps
            assert bool((places[1:] - places[:-1] == steps).all())


def test_dilated_hops_come_in_every_order() -> None:
    firsts = {int((row == 0).nonzero()[0, 0]) for row in spread("dilated", 24, 4)}
    orders = {tuple(row[:4].tolist()) for row in spread("dilated", 24, 4, n=500)}
    assert firsts == {0, 1, 2, 3}
    assert len(orders) == math.factorial(4)


@pytest.mark.parametrize("order", SPREAD)
@pytest.mark.parametrize(("length", "steps"), [(24, 8), (25, 8), (7, 3), (5, 16)])
def test_every_mask_is_revealed_once_and_hops_share_them_equally(order: str, length: int, steps: int) -> None:
    for row in spread(order, length, steps):
        counts = torch.bincount(row, minlength=1)
        assert int(counts.sum()) == length
        least, most = length // steps, -(-length // steps)
        if order == "dilated" or steps & (steps - 1) == 0:
            assert int(counts.min()) >= max(1, least)
            assert int(counts.max()) <= most
        assert len(counts) <= min(length, steps)


@pytest.mark.parametrize("steps", [2, 4, 8, 16])
def test_bit_reversed_hops_of_a_power_of_two_are_evenly_spaced(steps: int) -> None:
    """And coarse to fine: after 1, 2, 4, ... hops what is visible forms a lattice, each twice as dense."""
    for row in spread("bit-reversed", 64, steps):
        for hop in range(steps):
            places = (row == hop).nonzero()[:, 0]
            assert bool((places[1:] - places[:-1] == steps).all())
        for done in [2**power for power in range(steps.bit_length())]:
            places = (row < done).nonzero()[:, 0]
            assert bool((places[1:] - places[:-1] == steps // done).all())


@pytest.mark.parametrize(("steps", "gap"), [(5, 2), (6, 2), (9, 3), (11, 3), (13, 3), (31, 3)])
def test_bit_reversed_hops_of_any_number_keep_a_distance(steps: int, gap: int) -> None:
    """Of any 2^k <= steps neighbours at most two share a hop, and these are at least `gap` apart.

    The gap is the least d for which mirrored digits of i and i + d can be closer than one hop, by listing.
    """
    mirrored = torch.tensor([int(f"{i:012b}"[::-1], 2) / 2**12 for i in range(2**12)])
    near = [d for d in range(1, steps) if float((mirrored[d:] - mirrored[:-d]).abs().min()) < 1 / steps]
    assert near[0] == gap
    for row in spread("bit-reversed", 200, steps):
        windows = row.unfold(0, 2 ** (steps.bit_length() - 1), 1)
        assert int(torch.nn.functional.one_hot(windows, steps).sum(1).max()) <= 2
        assert all(bool((row[d:] != row[:-d]).all()) for d in range(1, gap))


def test_a_random_order_does_not_keep_its_distance() -> None:
    """The tests above can fail."""
    row = spread("random", 200, 16, n=8)
    assert bool((row[:, 1:] == row[:, :-1]).any())


@pytest.mark.parametrize("order", [*SPREAD, "random"])
def test_a_blank_in_the_middle_is_filled_and_nothing_else(order: str) -> None:
    """Only masks count, so that scattered ones are spread over themselves."""
    x = torch.arange(40).remainder(V).expand(32, -1).clone()
    x[:, 8:24] = MASK
    x[:, 12] = 1
    x[:, 30] = MASK
    where = (x == MASK)[0]
    when = spread(order, 40, 4, x=x)
    assert bool((when[:, ~where] == -1).all())
    assert bool((when[:, where] >= 0).all())
    if order != "random":
        for row in when[:, where]:
            for hop in range(4):
                places = (row == hop).nonzero()[:, 0]
                assert bool((places[1:] - places[:-1] == 4).all())


def test_levels_lie_in_the_unit_interval_and_differ() -> None:
    for row in ORDERS.values():
        level = load_function(row.levels)(torch.ones(16, 100, dtype=torch.bool), 7, seeded(0, batch=16))
        assert bool(((level >= 0) & (level < 1)).all())
        assert all(len(row.unique()) == 100 for row in level)


@pytest.mark.parametrize("final_step", ["none", "sample", "argmax"])
def test_a_fixed_plan_draws_each_hop_from_the_product_of_predictions(final_step: str) -> None:
    """Levels of 0.9, 0.2 and 0.75 on times down to 0.4 (or 0): two at t = 1, one later or left to the final step."""
    process, n, end = masked(V), 40_000, 0.0 if final_step == "none" else 0.4
    net, start = Table(process, L3), torch.full((L3,), MASK)
    grid, level = uniform_times(2, end=end), torch.tensor([0.9, 0.2, 0.75], dtype=torch.float64).repeat(n, 1)
    hops: Plan = [([0, 2], 1.0)]
    if final_step != "argmax":
        hops.append(([1], 0.5 if final_step == "none" else 0.4))
    law = planned(net, hops, start)
    if final_step == "argmax":
        every = sequences(V + 1, L3)
        modes = every.clone()
        modes[:, 1] = net.law(every, 0.4)[:, 1].argmax(-1)
        law = torch.zeros_like(law).index_add_(0, index(modes, V + 1), law)
    plan = plan_by_level(process, process.positions(blank(n, L3)), level, grid, seeded(6, batch=n), final_step)
    assert agrees(text(execute(net, process, blank(n, L3), plan)), law, V + 1)


@pytest.mark.parametrize(
    ("order", "steps", "plans"),
    [
        ("dilated", 2, [[[0, 2], [1]], [[1], [0, 2]]]),
        ("dilated", 3, [[[a], [b], [c]] for a, b, c in itertools.permutations(range(3))]),
        ("dilated", 1, [[[0, 1, 2]]]),
        ("bit-reversed", 2, [[[0, 2], [1]], [[1], [0, 2]]]),
        ("bit-reversed", 4, [[[i for i in range(3) if (i + j) % 4 == k] for k in (3, 1, 2, 0)] for j in range(4)]),
    ],
)
def test_samples_follow_the_average_over_the_plans_of_an_order(
    order: str, steps: int, plans: list[list[list[int]]]
) -> None:
    """The plans of three masks, equally likely: by parity, by turns, or by the two lowest digits of a random offset."""
    process, n = masked(V), 40_000
    net, start = Table(process, L3), torch.full((L3,), MASK)
    laws = []
    for plan in plans:
        timed = [(places, 1 - hop / steps) for hop, places in enumerate(plan)]
        laws.append(planned(net, [hop for hop in timed if hop[0]], start))
    settings = resolve({"steps": steps, "order": order}, process)
    drawn = text(unmask_in_order(net, process, blank(n, L3), settings, seeded(8, batch=n)))
    assert agrees(drawn, sum(laws) / len(laws), V + 1)


def test_nothing_to_reveal() -> None:
    x = torch.tensor([[0, 1, 2]])
    for states in (
        unmask_in_order(flat, masked(V), x, resolve({"steps": 3}), seeded(0, batch=1)),
        first_hitting(flat, masked(V), x, FIRST_HITTING, seeded(0, batch=1)),
    ):
        assert [state.x.tolist() for state in states] == [x.tolist()]
