"""What naive samplers can fake: flags of columns, and claims that rest on them.

All numbers are in units of the null distribution: z is the difference from the human value, and its absolute value the
distance from it. Being on the far side of the human value is no better than being as far on the near one.
"""

import dataclasses
import math
from collections.abc import Sequence

CONFIDENCE = 1.96


@dataclasses.dataclass(frozen=True)
class Score:
    """A value of one column."""

    z: float
    error: float
    """The standard error of z over the samples."""

    @property
    def distance(self) -> float:
        return abs(self.z)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row of the table: a model with its settings, or a naive sampler."""

    name: str
    scores: dict[str, Score]


def is_closer(one: Score, other: Score) -> bool:
    """Whether one value is closer to the human one than another, beyond the interval of the difference."""
    return other.distance - one.distance > CONFIDENCE * math.hypot(one.error, other.error)


def faked_columns(models: Sequence[Entry], naive: Sequence[Entry]) -> dict[str, list[str]]:
    """The columns in which a naive sampler is closer to human text than the best model, with these samplers."""
    found: dict[str, list[str]] = {}
    for column in dict.fromkeys(column for entry in models for column in entry.scores):
        best = min((entry.scores[column] for entry in models if column in entry.scores), key=lambda s: s.distance)
        closer = [e.name for e in naive if column in e.scores and is_closer(e.scores[column], best)]
        if closer:
            found[column] = closer
    return found


def refuting_samplers(model: Entry, columns: Sequence[str], naive: Sequence[Entry]) -> list[str]:
    """The naive samplers that match a model on all columns that a claim rests on: one of them rejects the claim.

    To match is not to be farther from human text than the model is, beyond the interval.
    """
    return [
        entry.name
        for entry in naive
        if all(not is_closer(model.scores[column], entry.scores[column]) for column in columns)
    ]
