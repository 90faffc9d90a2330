"""Entropy, distinct-n and repetition: by hand, and against scipy's entropy of the counts."""

import collections
import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm.metrics.diversity import (
    distinct,
    entropy,
    longest_repeat,
    ngram_entropy,
    overlap,
    pooled_entropy,
    repetition,
)

Texts = list[list[int]]

TEXT = st.lists(st.integers(0, 6), min_size=1, max_size=30)
TEXTS = st.lists(TEXT, min_size=1, max_size=5)


def of(text: list[int]) -> float:
    return float(entropy(torch.tensor([text]))[0])


def oracle(tokens: list[int]) -> float:
    stats = pytest.importorskip("scipy.stats")
    return float(stats.entropy(list(collections.Counter(tokens).values())))


def windows(text: list[int], n: int) -> list[tuple[int, ...]]:
    """Every n-gram of a text, by its start."""
    return [tuple(text[k : k + n]) for k in range(len(text)) if k + n <= len(text)]


def test_entropy_by_hand() -> None:
    """Half, a quarter, a quarter: 1.5 log 2. Rows do not touch each other; ids are names, not numbers."""
    x = torch.tensor([[5, 5, 9, 1], [3, 3, 3, 3], [4, 2, 1, 0]])
    assert entropy(x).tolist() == pytest.approx([1.5 * math.log(2), 0.0, 2 * math.log(2)], abs=1e-12)
    assert torch.equal(entropy(x * 7919 + 13), entropy(x))
    assert of(list(range(1024))) == pytest.approx(math.log(1024))  # 6.93, the most that a block can have


def test_pooled_by_hand() -> None:
    """Two texts of one token each: none has entropy, both together have one bit."""
    assert pooled_entropy([[1, 1, 1], [2, 2, 2]]) == pytest.approx(math.log(2))
    assert float(entropy(torch.tensor([[1, 1, 1], [2, 2, 2]])).mean()) == 0
    assert pooled_entropy([[1], [2, 2, 2]]) == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))


@settings(deadline=None, derandomize=True)
@given(TEXT)
def test_entropy_is_scipys(text: list[int]) -> None:
    assert of(text) == pytest.approx(oracle(text), abs=1e-9)


@settings(deadline=None, derandomize=True)
@given(TEXTS)
def test_pooled_entropy_is_scipys(texts: Texts) -> None:
    assert pooled_entropy(texts) == pytest.approx(oracle(list(itertools.chain(*texts))), abs=1e-9)


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 12).flatmap(lambda n: st.lists(st.lists(st.integers(0, 5), min_size=n, max_size=n), min_size=1)))
def test_pooling_never_lowers_the_mean(texts: Texts) -> None:
    """Entropy is concave: texts of one length together have at least their mean."""
    assert pooled_entropy(texts) >= float(entropy(torch.tensor(texts)).mean()) - 1e-9


@settings(deadline=None, derandomize=True)
@given(TEXT, st.randoms(use_true_random=False))
def test_order_does_not_matter(text: list[int], draw: random.Random) -> None:
    mixed = text.copy()
    draw.shuffle(mixed)
    assert of(mixed) == pytest.approx(of(text), abs=1e-12)
    assert 0 <= of(text) <= math.log(len(set(text))) + 1e-12


def test_distinct_by_hand() -> None:
    """the cat the cat | the dog: 3 of 6 words, 3 of 4 pairs (the cat, cat the, the dog), and no pair across texts."""
    texts = [[1, 2, 1, 2], [1, 3]]
    assert distinct(texts, 1) == pytest.approx(3 / 6)
    assert distinct(texts, 2) == pytest.approx(3 / 4)
    assert distinct(texts, 3) == 1.0  # 121, 212
    assert distinct([[1], [2]], 2) == 1.0  # too short for any
    assert distinct([[1, 2, 3], [1, 2, 3]], 2) == 0.5


def test_repetition_by_hand() -> None:
    """Of the n-grams of one text, how many it has held before; texts too short for any are left out of the mean."""
    assert repetition([[1, 2, 3, 4, 1, 2, 3, 4]]) == pytest.approx(1 / 5)  # the fifth is the first again
    assert repetition([[7] * 10]) == pytest.approx(6 / 7)
    assert repetition([list(range(50))]) == 0
    assert repetition([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0  # other texts do not count
    assert repetition([[7] * 10, [1, 2]]) == pytest.approx(6 / 7)
    assert repetition([[1, 2]]) == 0
    assert repetition([[7] * 5, list(range(5))]) == pytest.approx(0.25)
    assert repetition([[1, 1, 1]], n=1) == pytest.approx(2 / 3)


@settings(deadline=None, derandomize=True)
@given(TEXTS, st.integers(1, 4))
def test_distinct_and_repetition_count_windows(texts: Texts, n: int) -> None:
    grams = [gram for text in texts for gram in windows(text, n)]
    assert distinct(texts, n) == pytest.approx(len(set(grams)) / len(grams) if grams else 1.0)
    shares = []
    for text in texts:
        found, seen, again = windows(text, n), set(), 0
        for gram in found:
            again += gram in seen
            seen.add(gram)
        shares += [again / len(found)] if found else []
    assert repetition(texts, n) == pytest.approx(sum(shares) / len(shares) if shares else 0.0)


@settings(deadline=None, derandomize=True)
@given(TEXTS, st.integers(1, 4))
def test_doubling_a_set_halves_its_share_of_distinct(texts: Texts, n: int) -> None:
    if any(len(text) >= n for text in texts):
        assert distinct(texts + texts, n) == pytest.approx(distinct(texts, n) / 2)


def test_ngram_entropy_by_hand() -> None:
    """a b a b a: three of a and two of b; the pairs ab ba ab ba."""
    text = [1, 2, 1, 2, 1]
    assert ngram_entropy(text) == pytest.approx(-(0.6 * math.log(0.6) + 0.4 * math.log(0.4)))
    assert ngram_entropy(text, 2) == pytest.approx(math.log(2))
    assert ngram_entropy(text, 5) == 0
    assert ngram_entropy([], 1) == ngram_entropy([1], 2) == 0


@settings(deadline=None, derandomize=True)
@given(TEXT)
def test_ngram_entropy_is_the_entropy_of_a_sequence(text: list[int]) -> None:
    assert ngram_entropy(text) == pytest.approx(of(text), abs=1e-9)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2), max_size=20))
def test_longest_repeat_against_every_span(text: list[int]) -> None:
    spans = [tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, len(text) + 1)]
    repeated = [len(span) for span, count in collections.Counter(spans).items() if count > 1]
    assert longest_repeat(text) == max(repeated, default=0)


def test_overlap_by_hand() -> None:
    """Of 3-grams {123, 234} and {123}: half of the first and all of the second are in the other."""
    assert overlap([[1, 2, 3, 4], [1, 2, 3]]) == pytest.approx((1 / 2 + 1) / 2)
    assert overlap([[1, 2, 3, 4], [1, 2, 3], [7, 8, 9]]) == pytest.approx((1 / 2 + 1) / 6)
    assert overlap([[1, 2, 3], [4, 5, 6]]) == overlap([[1, 2, 3]]) == overlap([[1], [2]]) == 0
    assert overlap([[1, 2, 3]] * 5) == 1


@settings(deadline=None, derandomize=True)
@given(TEXTS, st.integers(1, 3))
def test_overlap_is_a_mean_over_pairs(texts: Texts, n: int) -> None:
    sets = [set(windows(text, n)) for text in texts]
    shares = [len(a & b) / len(a) for i, a in enumerate(sets) for j, b in enumerate(sets) if i != j and a]
    assert overlap(texts, n) == pytest.approx(sum(shares) / len(shares) if shares else 0.0)
