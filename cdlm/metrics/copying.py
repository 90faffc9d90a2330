"""The copy rate: how much of a text stands in the training corpus as it is."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPAN = 12
"""Tokens of a span; about eight words at a vocabulary of 8,192."""
_CHUNK = 1 << 22
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_BITS = 22

Ids = NDArray[np.integer[Any]]


def copy_rates(texts: Sequence[Sequence[int]], corpus: Ids, span: int = SPAN) -> list[float]:
    """For each text the share of its spans of that many tokens that the corpus holds; 0 for a shorter text.

    Spans are compared by hashes of 64 bits; the corpus is read once, in chunks.
    """
    hashes = [span_hashes(np.asarray(text), span) for text in texts]
    wanted = np.unique(np.concatenate([*hashes, np.empty(0, np.uint64)]))
    maybe = np.zeros(1 << _BITS, bool)  # most spans of the corpus are ruled out by a look at this table
    maybe[wanted >> np.uint64(64 - _BITS)] = True
    found = np.zeros(len(wanted), bool)
    for start in range(0, len(corpus), _CHUNK):
        own = span_hashes(np.asarray(corpus[start : start + _CHUNK + span - 1]), span)
        own = own[maybe[own >> np.uint64(64 - _BITS)]]
        found |= np.isin(wanted, own)
    held = wanted[found]
    return [float(np.isin(own, held).mean()) if len(own) else 0.0 for own in hashes]


def span_hashes(ids: Ids, span: int) -> NDArray[np.uint64]:
    """A hash of each span of consecutive ids."""
    count = max(0, len(ids) - span + 1)
    total = np.zeros(count, np.uint64)
    for place in range(span):
        total = (total + ids[place : place + count].astype(np.uint64) + np.uint64(1)) * _FACTOR
        total ^= total >> np.uint64(29)
    return total
