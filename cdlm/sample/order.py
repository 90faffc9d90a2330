"""Reveal orders under masking: which positions are drawn in which hop, settled before the network runs.

Give every masked position a level u in (0, 1). A position is still masked at time t while u lies below the share of
masks left, (1 - alpha_t) / (1 - alpha_start). Independent uniform levels are the ancestral sampler of the paper; levels
far apart at neighbouring positions spread the tokens of one hop, which are drawn independently of each other, over the
text; and hops at the levels themselves are first-hitting sampling, one token at a time: the limit of infinitely many
steps.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cdlm.process.process import Process
from cdlm.rng import Rng
from cdlm.sample.grid import Grid, Tail
from cdlm.sample.passes import Drawing, Pass, Predictor, State, follow
from cdlm.types import Tokens, wide

Order = Literal["random", "dilated", "bit-reversed"]
Level = Float[Tensor, "b l"]

_BITS = 30


def ordered(
    predict: Predictor,
    process: Process,
    x: Tokens,
    grid: Grid,
    rng: Rng,
    order: Order = "dilated",
    drawing: Drawing | None = None,
    tail: Tail = "none",
) -> Iterator[State]:
    """Reveal the masks of x along the grid, in an order of choice."""
    passes = reveal(process, x, levels(order, process.positions(x), len(grid) - 1, rng), grid, rng, tail)
    return follow(predict, process, x, passes, drawing, len(passes))


def first_hitting(
    predict: Predictor,
    process: Process,
    x: Tokens,
    rng: Rng,
    start: float = 1.0,
    drawing: Drawing | None = None,
) -> Iterator[State]:
    """One token at each evaluation, in random order and at its exact time: ancestral sampling with a perfect grid."""
    is_mask = process.positions(x)
    level = rng("reveal").uniform(x.shape[1], x.device).masked_fill(~is_mask, -1.0)
    hop = level.argsort(-1, descending=True).argsort(-1)
    noise = process.noise
    alpha = float(noise.alpha(torch.tensor(start, dtype=torch.float64)))
    t = noise.inverse(1 - level.clamp(min=0) * (1 - alpha))
    passes = _compressed(hop, t, is_mask, rng)
    return follow(predict, process, x, passes, drawing, len(passes))


def levels(order: Order, is_mask: Bool[Tensor, "b l"], steps: int, rng: Rng) -> Level:
    """The level of each position; high ones are revealed first.

    dilated: the positions of a hop are exactly `steps` apart, hops in random order. bit-reversed: coarse to fine, each
    hop halfway between what is there already. Both count masked positions only, so that a blank is spread over itself.
    """
    length, device = is_mask.shape[1], is_mask.device
    if order == "random":
        return rng("reveal").uniform(length, device)
    place = is_mask.cumsum(-1) - 1 + rng("offset").integers(1, 2**20, device)
    if order == "bit-reversed":
        return _bit_reversed(place)
    turn = rng("reveal").uniform(steps, device).argsort(-1).argsort(-1)
    within = _bit_reversed(place // steps) * (1 - 2e-6) + 1e-6
    return (turn.gather(-1, place % steps) + within) / steps


def reveal(process: Process, x: Tokens, level: Level, grid: Grid, rng: Rng, tail: Tail = "none") -> list[Pass]:
    """The passes that reveal the masks of x at their levels; what the grid leaves over falls to the tail.

    Hops in which a sequence reveals nothing are left out, for each sequence by itself: its next hop moves up.
    """
    masks = 1 - process.noise.alpha(grid)
    share = (masks[1:] / masks[0]).to(level.dtype).to(x.device)
    grid, hops = grid.to(level.dtype).to(x.device), len(grid) - 1
    hop = hops - torch.searchsorted(share.flip(0).contiguous(), level, right=True)
    is_mask = process.positions(x)
    now = is_mask if tail == "sample" else is_mask & (hop < hops)
    passes = _compressed(hop, grid[hop], now, rng)
    over = is_mask & (hop == hops)
    if tail == "argmax" and bool(over.any()):
        counts = over.sum(-1).tolist()
        index = over.flatten().nonzero()[:, 0]
        passes.append(Pass(grid[-1].expand(len(x)), counts, index, None))
    return passes


def _compressed(hop: Int[Tensor, "b l"], t: Float[Tensor, "b l"], where: Bool[Tensor, "b l"], rng: Rng) -> list[Pass]:
    """Passes in which every sequence goes through its own non-empty hops, one after the other."""
    b, l = hop.shape
    busy = torch.zeros(b, int(hop.max()) + 1, dtype=torch.bool, device=hop.device)
    flat = where.flatten().nonzero()[:, 0]
    busy[flat // l, hop.flatten()[flat]] = True
    number = (busy.cumsum(-1) - 1).gather(-1, hop).flatten()[flat]
    total = int(busy.sum(-1).max())
    counts = torch.bincount(number * b + flat // l, minlength=total * b).view(total, b).tolist()
    times = torch.ones(total, b, dtype=t.dtype, device=hop.device)
    times[number, flat // l] = t.flatten()[flat]
    index = flat[number.argsort(stable=True)]
    u = rng("data").uniform(l, hop.device).flatten()[index]
    sizes = [sum(row) for row in counts]
    split = zip(times, counts, index.split(sizes), u.split(sizes), strict=True)
    return [Pass(*columns) for columns in split]


def _bit_reversed(place: Int[Tensor, "b l"]) -> Level:
    """The radical inverse in base 2: the binary digits of a number, mirrored behind the point."""
    value = torch.zeros(place.shape, dtype=wide(place.device), device=place.device)
    for bit in range(_BITS):
        value += (place >> bit & 1) * 2.0 ** -(bit + 1)
    return value
