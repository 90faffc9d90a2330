"""Time grids: the descending times that a sampler hops along."""

import itertools
import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from cdlm.sample.settings import LOOP_STEPS

Grid = Float[Tensor, "n"]

NEAR_ZERO = 1e-5
"""Where a grid ends that a tail follows, as in MDLM and DUO; without a tail a grid ends at 0."""


def uniform_grid(steps: int, start: float = 1.0, end: float = 0.0) -> Grid:
    """Times start = t_0 > t_1 > ... > t_steps = end, equally far apart: `steps` hops."""
    return _between(start, end, torch.linspace(1.0, 0.0, _at_least_one(steps) + 1, dtype=torch.float64))


def cosine_grid(steps: int, start: float = 1.0, end: float = 0.0) -> Grid:
    """Small hops first and large ones later: the first tokens, on which all others rest, are drawn a few at a time."""
    return _between(start, end, torch.linspace(0.0, math.pi / 2, _at_least_one(steps) + 1, dtype=torch.float64).cos())


def loop_grid(steps: int, start: float = 1.0, end: float = 0.0, level: float = 0.1) -> Grid:
    """ReMDM's loop: 45 % of the hops go down to `level`, 50 % stay there to correct, 5 % finish.

    Hops of a plateau have s = t; they do something only together with a corrector.
    """
    if steps < LOOP_STEPS:
        raise ValueError(f"a loop goes down, stays and finishes, and needs at least {LOOP_STEPS} steps; got {steps}")
    down, last = max(1, round(0.45 * steps)), max(1, round(0.05 * steps))
    share = torch.cat([_line(1.0, level, down), _line(level, level, steps - down - last), _line(level, 0.0, last)])
    return _between(start, end, torch.cat([share, torch.zeros(1, dtype=torch.float64)]))


def custom_grid(times: Sequence[float], start: float = 1.0, end: float = 0.0) -> Grid:
    """Times of your own, from 1 down to 0, each smaller than the one before; stretched between start and end."""
    if len(times) < 2 or times[0] != 1 or times[-1] != 0 or any(not t > s for t, s in itertools.pairwise(times)):
        raise ValueError(f"a grid of your own falls from 1 to 0, such as 1,0.6,0.3,0; got {','.join(map(str, times))}")
    return _between(start, end, torch.tensor(times, dtype=torch.float64))


def _line(start: float, end: float, hops: int) -> Grid:
    return torch.linspace(start, end, hops + 1, dtype=torch.float64)[:-1]


def _between(start: float, end: float, share: Grid) -> Grid:
    if not 0 <= end < start <= 1:
        raise ValueError(f"a grid falls from start to end within [0, 1]; got {start} to {end}")
    grid = end + (start - end) * share
    grid[0], grid[-1] = start, end
    return grid


def _at_least_one(steps: int) -> int:
    if steps < 1:
        raise ValueError(f"sampling needs at least one step; got {steps}")
    return steps
