"""Generative perplexity: what a judge makes of texts, with its uncertainty."""

import dataclasses
import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cdlm.rng import seeded

NUM_RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Interval:
    """A number, and where it lies with 95 % confidence; the texts are what varies."""

    value: float
    low: float
    high: float


def perplexity(nats: Sequence[float], tokens: Sequence[int], seed: int = 0) -> Interval:
    """exp(total surprise / total tokens) over all texts: never a mean of perplexities, which is always larger."""
    if not sum(tokens):
        raise ValueError("no token of these texts counts for a perplexity: they are empty")
    n, k = torch.tensor(nats, dtype=torch.float64), torch.tensor(tokens, dtype=torch.float64)
    draws = bootstrap_indices(len(n), seed)
    return percentile_interval(
        float((n.sum() / k.sum()).exp()), (n[draws].sum(-1) / k[draws].sum(-1).clamp(min=1)).exp()
    )


def bootstrap_mean(values: Sequence[float], seed: int = 0) -> Interval:
    """The mean over texts."""
    x = torch.tensor(values, dtype=torch.float64)
    return percentile_interval(float(x.mean()), x[bootstrap_indices(len(x), seed)].mean(-1))


def bootstrap_ratio(parts: Sequence[float], totals: Sequence[float], seed: int = 0) -> Interval:
    """The sum of the parts over the sum of the totals, of all texts."""
    n, k = torch.tensor(parts, dtype=torch.float64), torch.tensor(totals, dtype=torch.float64)
    draws = bootstrap_indices(len(n), seed)
    return percentile_interval(float(n.sum() / k.sum()), n[draws].sum(-1) / k[draws].sum(-1))


def bootstrap_indices(n: int, seed: int = 0, times: int = NUM_RESAMPLES) -> Int[Tensor, "times n"]:
    """Texts drawn with replacement, the same for every measure of one cell, so that they can be paired."""
    return seeded(seed, "bootstrap", n, batch=times).integers(n, n)


def percentile_interval(value: float, draws: Float[Tensor, "times"]) -> Interval:
    """The percentiles of the resamples. A draw that is NaN is left out; one may be infinite (a curve that is never
    crossed), and then so may be an end of the interval."""
    draws = draws[~draws.isnan()]
    if not len(draws):
        return Interval(value, math.nan, math.nan)
    edges = torch.tensor([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], dtype=draws.dtype)
    between = "linear" if bool(draws.isfinite().all()) else "nearest"
    low, high = draws.quantile(edges, interpolation=between).tolist()
    return Interval(value, low, high)
