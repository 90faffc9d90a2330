"""(s, t) ~ Delta: which pairs of times are practised. One rule holds every scheduler of the paper.

    t ~ U[floor, 1], stratified over the rows of the global batch;   delta ~ U[low(step), high(step)];   s = t - delta

The max-step scheduler is delta = 1: s = max(t - 1, 0) = 0 for every t.
"""

import dataclasses
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from cdlm.rng import Rng
from cdlm.schedules import Schedule, constant, linear, stairs
from cdlm.types import Time

Overshoot = Literal["clip", "conditional", "shift"]
Steps = Literal["random", "increasing", "decreasing", "staged"]


@runtime_checkable
class TimePairs(Protocol):
    """(s, t) ~ Delta: draws the times of some rows, and tells between which schedules the step sizes lie (for logs)."""

    @property
    def low(self) -> Schedule: ...

    @property
    def high(self) -> Schedule: ...

    def __call__(self, progress: float, stratum: Int[Tensor, "b"], strata: int, rng: Rng) -> tuple[Time, Time]: ...


@dataclasses.dataclass(frozen=True)
class Times:
    """Step sizes between two schedules, and what happens where t < delta.

    `clip`: s = 0, and the weight uses the realised t - s. `conditional`: t ~ U[delta, 1] instead.
    `shift`: t is moved up by delta, up to 1 (as in DCD).
    """

    low: Schedule
    high: Schedule
    overshoot: Overshoot = "clip"
    floor: float = 1e-3
    """Smallest t: bounds the weights 1/t and 1/delta (MDLM and DUO use 1e-3 too)."""
    whole: bool = False
    """1 is a whole number of hops, and so is t: the times of a sampler whose hops are this long."""

    def __post_init__(self) -> None:
        places = [place for schedule in (self.low, self.high) for place, _ in (*schedule.knots, (1.0, 0.0))]
        if not all(0 < self.low(place) <= self.high(place) <= 1 for place in places):
            raise ValueError(f"step sizes must satisfy 0 < low <= high <= 1; got low {self.low} and high {self.high}")
        if self.overshoot not in get_args(Overshoot):
            raise ValueError(f"unknown overshoot {self.overshoot!r}; choose from {', '.join(get_args(Overshoot))}")

    def __call__(self, progress: float, stratum: Int[Tensor, "b"], strata: int, rng: Rng) -> tuple[Time, Time]:
        """Times of the rows that own these strata out of `strata`, on the host."""
        u, v = rng("times").uniform(2).unbind(1)
        u = (stratum + u) / strata
        low, high = self.low(progress), self.high(progress)
        delta = low + (high - low) * v
        delta = 1 / (1 / delta).round() if self.whole else delta
        t = self.floor + (1 - self.floor) * u
        if self.overshoot == "conditional":
            t = torch.maximum(delta + (1 - delta) * u, t.new_tensor(self.floor))
        elif self.overshoot == "shift":
            t = (t + delta).clamp(max=1)
        if self.whole:
            t = ((t / delta - 1e-9).ceil() * delta).clamp(max=1)
        return (t - delta).clamp(min=0), t

    def __str__(self) -> str:
        if self == MAX_STEP:
            return "max step"
        steps = f"d = {self.low}" if self.low == self.high else f"d in [{self.low}, {self.high}]"
        steps += ", whole" if self.whole else ""
        return steps if self.overshoot == "clip" else f"{steps}, {self.overshoot}"


MAX_STEP = Times(constant(1.0), constant(1.0))


def step_scheduler(kind: Steps, low: float, high: float, overshoot: Overshoot = "clip") -> Times:
    """The four schedulers of the paper's Table 4, over one range of step sizes."""
    match kind:
        case "random":
            return Times(constant(low), constant(high), overshoot)
        case "increasing":
            schedule = linear((0.0, low), (1.0, high))
        case "decreasing":
            schedule = linear((0.0, high), (1.0, low))
        case "staged":
            schedule = stairs(low, (low + high) / 2, high)
        case _:
            raise ValueError(f"unknown step scheduler {kind!r}; choose from {', '.join(get_args(Steps))}")
    return Times(schedule, schedule, overshoot)
