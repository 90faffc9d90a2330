"""The null distribution of a metric: its values for human text beside human text.

A pool of human texts is split at random, many times. For a metric of one set of n texts the difference of two disjoint
sets of n gives the scale, and the mean over sets the human value; for a metric of two sets a set of n is compared with
the rest of the pool. A z-score of human text from outside the pool has mean 0 and variance 1, as far as the pool tells
the scale.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

NUM_SPLITS = 200
MAX_GROUPS = 16
Rows = NDArray[np.intp]


@dataclasses.dataclass(frozen=True)
class Null:
    """What human text scores."""

    target: float
    scale: float
    """The standard deviation that n human texts from outside the pool would show around the target."""

    def z(self, value: float) -> float:
        return standardize(value - self.target, self.scale)


def standardize(difference: float, scale: float) -> float:
    """A difference in units of the scale; one from a metric that does not vary at all is infinite."""
    if scale > 0:
        return difference / scale
    return 0.0 if difference == 0 else math.copysign(math.inf, difference)


def null_of_one_set(
    metric: Callable[[Rows], float], pool: int, n: int, splits: int = NUM_SPLITS, seed: int = 0
) -> Null:
    """Of a metric of one set, from pairs of disjoint sets of n of the `pool` texts.

    The difference of two sets has twice the variance of one, whatever the size of the pool; the target, a mean over the
    whole pool, adds n / pool of it.
    """
    values = []
    for rows in random_splits(pool, 2 * n, splits, seed):
        values.append((metric(rows[:n]), metric(rows[n:])))
    pairs = np.array(values)
    scale = math.sqrt(float((np.diff(pairs) ** 2).mean()) / 2 * (1 + n / pool))
    return Null(float(pairs.mean()), scale)


def null_of_two_sets(
    metric: Callable[[Rows, Rows], float], pool: int, n: int, splits: int = NUM_SPLITS, seed: int = 0
) -> Null:
    """Of a metric of two sets, from n of the `pool` texts beside the others."""
    values = np.array([metric(rows[:n], rows[n:]) for rows in random_splits(pool, pool, splits, seed)])
    return Null(float(values.mean()), float(values.std(ddof=1)))


def random_splits(pool: int, size: int, splits: int, seed: int) -> list[Rows]:
    """Random orders of a pool, cut to a size; a pool of fewer than that is refused."""
    if pool < size:
        raise ValueError(f"the null distribution needs {size} human texts (got {pool}).")
    generator = np.random.default_rng(seed)
    return [generator.permutation(pool)[:size] for _ in range(splits)]


def jackknife_error(metric: Callable[[Rows], float], rows: Rows) -> float:
    """The standard error of a metric of a set, by leaving out one of at most 16 groups of its texts at a time."""
    groups = min(MAX_GROUPS, len(rows))
    values = np.array([metric(np.delete(rows, np.s_[group::groups])) for group in range(groups)])
    return math.sqrt((groups - 1) / groups * float(((values - values.mean()) ** 2).sum()))
