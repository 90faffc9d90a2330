"""Sampling along an unmasking order: which positions are drawn in which hop, settled before the network runs.

`process/order.py` gives every masked position a level u in (0, 1); it is still masked at time t while u lies below the
share of masks left, (1 - alpha_t) / (1 - alpha_start). Independent uniform levels are the ancestral sampler of the
paper; levels far apart at neighbouring positions spread the tokens of one hop, which are drawn independently of each
other, over the text; and hops at the levels themselves are first-hitting sampling, one token at a time: the limit of
infinitely many steps.
"""

import dataclasses
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cdlm.process.order import Level, Order, levels
from cdlm.process.process import Process
from cdlm.rng import Rng
from cdlm.sample.plan import Drawing, Pass, State, follow, moving
from cdlm.sample.settings import Tail
from cdlm.sample.timesteps import Grid
from cdlm.types import Predictor, Tokens, wide


def ordered(
    predict: Predictor,
    process: Process,
    x: Tokens,
    grid: Grid,
    rng: Rng,
    order: Order = "dilated",
    drawing: Drawing | None = None,
    tail: Tail = "none",
    given: Bool[Tensor, "b l"] | None = None,
) -> Iterator[State]:
    """Reveal the masks of x along the grid, in an order of choice."""
    check_tail(process, grid, tail)
    is_mask = moving(process, x, given).cpu()
    level = levels(order, is_mask, len(grid) - 1, rng)
    passes = reveal(process, is_mask, level, grid, rng, tail, x.device)
    return follow(predict, process, x, passes, drawing, len(passes))


def first_hitting(
    predict: Predictor,
    process: Process,
    x: Tokens,
    rng: Rng,
    start: float = 1.0,
    drawing: Drawing | None = None,
    given: Bool[Tensor, "b l"] | None = None,
) -> Iterator[State]:
    """One token at each evaluation, in random order and at its exact time: ancestral sampling with a perfect grid."""
    is_mask = moving(process, x, given).cpu()
    level = rng("reveal").uniform(x.shape[1]).masked_fill(~is_mask, -1.0)
    hop = level.argsort(-1, descending=True).argsort(-1)
    noise = process.noise
    alpha = float(noise.alpha(torch.tensor(start, dtype=torch.float64)))
    t = noise.inverse(1 - level.clamp(min=0) * (1 - alpha))
    passes = _compressed(hop, t, is_mask, rng, x.device)
    return follow(predict, process, x, passes, drawing, len(passes))


def check_tail(process: Process, grid: Grid, tail: Tail) -> None:
    """A tail takes the place of the last hop to 0."""
    ends = float(grid[-1])
    if tail != "none" and ends == 0:
        raise ValueError("a tail is one more evaluation after the hops: end the grid above 0, at NEAR_ZERO")
    if tail == "none" and ends > 0 and process.absorbing:
        raise ValueError(f"a grid that ends at {ends:g} leaves masks behind: end it at 0, or give a tail")


def reveal(
    process: Process,
    is_mask: Bool[Tensor, "b l"],
    level: Level,
    grid: Grid,
    rng: Rng,
    tail: Tail = "none",
    device: torch.device | str = "cpu",
) -> list[Pass]:
    """The passes that reveal masks at their levels; what the grid leaves over falls to the tail.

    Hops in which a sequence reveals nothing are left out, for each sequence by itself: its next hop moves up.
    """
    masks = 1 - process.noise.alpha(grid)
    share, hops = masks[1:] / masks[0], len(grid) - 1
    hop = hops - torch.searchsorted(share.flip(0).contiguous(), level, right=True)
    now = is_mask if tail == "sample" else is_mask & (hop < hops)
    passes = _compressed(hop, grid[hop], now, rng, device)
    over = is_mask & (hop == hops)
    if tail == "argmax" and bool(over.any()):
        greedy = _compressed(torch.zeros_like(hop), grid[hop], over, rng, device)
        passes += [dataclasses.replace(one, u=None) for one in greedy]
    return passes


def _compressed(
    hop: Int[Tensor, "b l"],
    t: Float[Tensor, "b l"],
    where: Bool[Tensor, "b l"],
    rng: Rng,
    device: torch.device | str,
) -> list[Pass]:
    """Passes in which every sequence goes through its own non-empty hops, one after the other.

    Drawn up on the host, in one piece: the device then never waits to learn how many positions come next.
    """
    b, l = hop.shape
    busy = torch.zeros(b, int(hop.max()) + 1, dtype=torch.bool)
    flat = where.flatten().nonzero()[:, 0]
    busy[flat // l, hop.flatten()[flat]] = True
    number = (busy.cumsum(-1) - 1).gather(-1, hop).flatten()[flat]
    total = int(busy.sum(-1).max())
    counts = torch.bincount(number * b + flat // l, minlength=total * b).view(total, b).tolist()
    times = torch.ones(total, b, dtype=t.dtype)
    times[number, flat // l] = t.flatten()[flat]
    index = flat[number.argsort(stable=True)]
    u = rng("data").uniform(l).flatten()[index]
    sizes = [sum(row) for row in counts]
    times, u = (column.to(wide(device)).to(device) for column in (times, u))
    split = zip(times, counts, index.to(device).split(sizes), u.split(sizes), strict=True)
    most = max((max(row) for row in counts), default=0)
    return [Pass(*columns, most=most) for columns in split]
