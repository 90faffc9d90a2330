"""Schedules: every quantity that changes during training is a pure function of the progress of the run.

Progress is step / total, in [0, 1], so that a run of 2,000 steps has the shape of the paper's 150,000, and a resumed
run needs no schedule state.
"""

import dataclasses
import math
from fractions import Fraction

PAPER_STEPS = 150_000


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A piecewise function through knots (progress, value): straight lines between them, or jumps at them."""

    knots: tuple[tuple[float, float], ...]
    jumps: bool = False

    def __post_init__(self) -> None:
        places = [place for place, _ in self.knots]
        if not places or places[0] != 0 or sorted(set(places)) != places or places[-1] > 1:
            raise ValueError(f"knots must start at progress 0 and increase up to at most 1; got {places}")

    def __call__(self, progress: float) -> float:
        before = [knot for knot in self.knots if knot[0] <= progress]
        after = [knot for knot in self.knots if knot[0] > progress]
        if not before:
            raise ValueError(f"progress is step / total and starts at 0; got {progress}")
        (x0, y0), (x1, y1) = before[-1], (after or before[-1:])[0]
        return y0 if self.jumps or x1 == x0 else y0 + (y1 - y0) * (progress - x0) / (x1 - x0)

    def __str__(self) -> str:
        values = [number(value) for _, value in self.knots]
        if len(set(values)) == 1:
            return values[0]
        if self.jumps:
            return ", ".join([values[0], *(f"{number(y)} from {number(x)}" for x, y in self.knots[1:])])
        flat = len(values) == 3 and values[0] == values[1]
        return " -> ".join(values[1:] if flat else values) + (f" after {number(self.knots[1][0])}" if flat else "")


def constant(value: float) -> Schedule:
    return Schedule(((0.0, value),))


def linear(*knots: tuple[float, float]) -> Schedule:
    return Schedule(knots)


def stairs(*values: float) -> Schedule:
    """Equal stages, one value each: staged curricula and the doubling rounds of SDTT and DCD."""
    return Schedule(tuple((stage / len(values), value) for stage, value in enumerate(values)), jumps=True)


def scaled_decay(decay: float, total: int, reference: int = PAPER_STEPS) -> float:
    """A weight average's decay for a run of `total` steps, its horizon kept at the same share of the run.

    A decay of .999 remembers 1,000 steps: 1/150 of the paper's run, hence 13 steps of a run of 2,000.
    """
    return 1.0 - min(1.0, (1.0 - decay) * reference / total)


def ema_decay(decay: float, step: int, total: int, reference: int = PAPER_STEPS) -> float:
    """The decay of an exponential moving average in the update after step number `step` of `total`.

    It warms up as (1 + n) / (10 + n) in the n-th update, so that the average does not remember the initial weights.
    """
    return min(scaled_decay(decay, total, reference), (2 + step) / (11 + step))


def number(value: float) -> str:
    """A short name for a number: 5/8 rather than 0.625, 2/3 rather than 0.667."""
    if not math.isfinite(value):
        return str(value)
    fraction = Fraction(value).limit_denominator(2048)
    power_of_two = fraction.denominator & (fraction.denominator - 1) == 0
    short = abs(float(fraction) - value) < 1e-12 and (power_of_two or fraction.denominator <= 30)
    return f"{value:g}" if not short or len(f"{value:g}") <= 3 else str(fraction)
