"""How varied texts are: numbers that fall when a model repeats itself or sharpens."""

import collections
import functools
import math
from collections.abc import Callable, Sequence

from jaxtyping import Float
from torch import Tensor

from cdlm.types import Tokens


def entropy(x: Tokens) -> Float[Tensor, "b"]:
    """The unigram entropy of each sequence's own tokens, in nats: log l if all differ, 0 if all are the same."""
    same = (x[:, :, None] == x[:, None, :]).sum(-1).double()
    return (x.shape[1] / same).log().mean(-1)


def pooled_entropy(texts: Sequence[Sequence[int]]) -> float:
    """The unigram entropy of all texts together, in nats: larger than that of each text, never to be mixed with it."""
    counts = collections.Counter(token for text in texts for token in text)
    total = counts.total()
    return math.log(total) - sum(n * math.log(n) for n in counts.values()) / total


def distinct(texts: Sequence[Sequence[int]], n: int) -> float:
    """Distinct-n: different n-grams of all texts together, as a share of all n-grams."""
    grams = [gram for text in texts for gram in _grams(text, n)]
    return len(set(grams)) / len(grams) if grams else 1.0


def repetition(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """The share of n-grams that their own text has held before; the mean over texts."""
    shares = [1 - len(set(grams)) / len(grams) for text in texts if (grams := _grams(text, n))]
    return sum(shares) / len(shares) if shares else 0.0


SAMPLE_METRICS: dict[str, Callable[[Sequence[Sequence[int]]], float]] = {
    "entropy_pooled": pooled_entropy,
    "distinct_1": functools.partial(distinct, n=1),
    "distinct_2": functools.partial(distinct, n=2),
    "distinct_3": functools.partial(distinct, n=3),
    "repetition_4": functools.partial(repetition, n=4),
}
"""Metrics of the token ids of all samples of a cell, by their names in results.jsonl. A new metric is a row."""


def ngram_entropy(text: Sequence[int], n: int = 1) -> float:
    """The entropy of a text's own n-grams, in nats."""
    counts = collections.Counter(_grams(text, n))
    total = counts.total()
    return math.log(total) - sum(c * math.log(c) for c in counts.values()) / total if total else 0.0


def longest_repeat(text: Sequence[int]) -> int:
    """The length of the longest span that occurs at two places of a text, which may overlap."""
    low, high = 0, max(0, len(text) - 1)
    while low < high:  # a repeated span holds shorter ones, so the lengths can be bisected
        middle = (low + high + 1) // 2
        grams = _grams(text, middle)
        low, high = (middle, high) if len(set(grams)) < len(grams) else (low, middle - 1)
    return low


def overlap(texts: Sequence[Sequence[int]], n: int = 3) -> float:
    """The share of a text's different n-grams that another text of the set holds, averaged over ordered pairs."""
    sets = [set(_grams(text, n)) for text in texts]
    holders = collections.Counter(gram for grams in sets for gram in grams)
    shares = [sum(holders[gram] - 1 for gram in grams) / len(grams) for grams in sets if grams]
    return sum(shares) / (len(shares) * (len(sets) - 1)) if shares and len(sets) > 1 else 0.0


def _grams(text: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return list(zip(*(text[k:] for k in range(n)), strict=False))
