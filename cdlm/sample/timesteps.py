"""Timesteps: the falling times of a sampler's steps."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from cdlm.sample.settings import LOOP_STEPS, Settings, custom_timesteps

Times = Float[Tensor, "n"]

NEAR_ZERO = 1e-5
"""Where the steps end before a final step, as in MDLM and DUO; without one they end at 0."""


def timesteps(settings: Settings, start: float = 1.0) -> Times:
    """The times of the steps, from `start` to 0 or, before a final step, to just above it."""
    end, steps = 0.0 if settings.final_step == "none" else NEAR_ZERO, settings.steps
    assert steps is not None, "this sampler has no steps"
    if own := custom_timesteps(settings.timesteps):
        return custom_times(own, start, end)
    if settings.corrector == "loop":
        return loop_times(steps, start, end)
    return (cosine_times if settings.timesteps == "cosine" else uniform_times)(steps, start, end)


def uniform_times(steps: int, start: float = 1.0, end: float = 0.0) -> Times:
    """start = t_0 > t_1 > ... > t_steps = end, equally far apart."""
    return _between(start, end, torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64))


def cosine_times(steps: int, start: float = 1.0, end: float = 0.0) -> Times:
    """Small steps first and large ones later: the first tokens, on which all others rest, are drawn a few at a time."""
    return _between(start, end, torch.linspace(0.0, math.pi / 2, steps + 1, dtype=torch.float64).cos())


def loop_times(steps: int, start: float = 1.0, end: float = 0.0, level: float = 0.1) -> Times:
    """ReMDM's loop: 45 % of the steps go down to `level`, 50 % stay there to correct, 5 % finish.

    Steps of the plateau have s = t; they do something only together with a corrector.
    """
    if steps < LOOP_STEPS:
        raise ValueError(f"the loop corrector needs at least {LOOP_STEPS} steps (got {steps}).")
    down, last = max(1, round(0.45 * steps)), max(1, round(0.05 * steps))
    share = torch.cat([_line(1.0, level, down), _line(level, level, steps - down - last), _line(level, 0.0, last)])
    return _between(start, end, torch.cat([share, torch.zeros(1, dtype=torch.float64)]))


def custom_times(times: Sequence[float], start: float = 1.0, end: float = 0.0) -> Times:
    """Times from 1 down to 0, stretched between start and end."""
    return _between(start, end, torch.tensor(times, dtype=torch.float64))


def _line(start: float, end: float, steps: int) -> Times:
    return torch.linspace(start, end, steps + 1, dtype=torch.float64)[:-1]


def _between(start: float, end: float, share: Times) -> Times:
    if not 0 <= end < start <= 1:
        raise ValueError(f"timesteps must fall from a start to an end within [0, 1] (got {start} to {end}).")
    times = end + (start - end) * share
    times[0], times[-1] = start, end
    return times
