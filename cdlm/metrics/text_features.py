"""Simple features of an English text, counted without a language model: what the energy distance compares.

All of them are means, shares or rates within one text, so that they do not grow with its length. They were written down
once and fitted to nothing.
"""

import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# fmt: off
FUNCTION_WORDS = frozenset((
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "from", "had", "has", "have", "he", "her",
    "his", "i", "in", "is", "it", "its", "not", "of", "on", "or", "she", "that", "the", "their", "they", "this",
    "to", "was", "were", "which", "who", "with", "you",
))
# fmt: on
_TOKEN = re.compile(r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*|\d+|[^\w\s]|_")
_RECENT = 10


class _Counted:
    """A text in words and marks."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = _TOKEN.findall(text)
        self.words = [token for token in self.tokens if token[0].isalpha()]
        self.lower = [word.lower() for word in self.words]
        self.is_function = [word in FUNCTION_WORDS for word in self.lower]
        self.sentences = [len(part.split()) for part in re.split(r"[.!?]+(?:\s|$)", text) if part.strip()]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _std(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(_mean([(value - mean) ** 2 for value in values]))


def _rate(characters: str) -> Callable[[_Counted], float]:
    return lambda counted: _mean([token in characters for token in counted.tokens])


def _gaps(counted: _Counted) -> list[int]:
    """Words from one function word to the next."""
    places = [place for place, found in enumerate(counted.is_function) if found]
    return [second - first for first, second in pairwise(places)]


def _recently(counted: _Counted) -> float:
    """The share of longer words that were among the last few longer words."""
    longer = [word for word in counted.lower if len(word) > 4]
    return _mean([word in longer[max(0, place - _RECENT) : place] for place, word in enumerate(longer)])


def _doubled(counted: _Counted) -> float:
    """The share of function words that directly follow another one that is the same or an article."""
    pairs = [(a, b) for a, b in pairwise(counted.lower) if b in FUNCTION_WORDS]
    return _mean([a == b or a in ("a", "an", "the") for a, b in pairs])


FEATURES: dict[str, Callable[[_Counted], float]] = {
    "mean length of words": lambda c: _mean([len(word) for word in c.words]),
    "standard deviation of the length of words": lambda c: _std([len(word) for word in c.words]),
    "mean length of sentences, in words": lambda c: _mean(c.sentences),
    "standard deviation of the length of sentences": lambda c: _std(c.sentences),
    "share of different words": lambda c: len(set(c.lower)) / max(1, len(c.lower)),
    "share of longer words among the last ten longer words": _recently,
    "share of function words": lambda c: _mean(c.is_function),
    "share of 'the' among words": lambda c: _mean([word == "the" for word in c.lower]),
    "share of 'of' among words": lambda c: _mean([word == "of" for word in c.lower]),
    "share of 'and' among words": lambda c: _mean([word == "and" for word in c.lower]),
    "share of function words after a function word": lambda c: _mean([b for a, b in pairwise(c.is_function) if a]),
    "share of function words after an article or themselves": _doubled,
    "standard deviation of the gap between function words": lambda c: _std(_gaps(c)),
    "share of capitalised words": lambda c: _mean([word[0].isupper() for word in c.words]),
    "share of capitalised function words": lambda c: _mean(
        [word[0].isupper() for word, found in zip(c.words, c.is_function, strict=True) if found]
    ),
    "share of words with a capital inside": lambda c: _mean([not word[1:].islower() for word in c.words if word[1:]]),
    "share of single letters among words": lambda c: _mean([len(word) == 1 for word in c.words]),
    "rate of commas": _rate(","),
    "rate of full stops": _rate("."),
    "rate of question and exclamation marks": _rate("?!"),
    "rate of quotation marks": _rate('"\u201c\u201d'),
    "rate of numbers": lambda c: _mean([token[0].isdigit() for token in c.tokens]),
    "rate of brackets, colons and dashes": _rate("()[]:;-\u2013\u2014"),
    "share of marks after a mark": lambda c: _mean(
        [not b[0].isalnum() for a, b in pairwise(c.tokens) if not a[0].isalnum()]
    ),
    "share of white space among characters": lambda c: _mean([mark.isspace() for mark in c.text]),
}
"""Each feature of a text by its name."""


def text_features(texts: Sequence[str]) -> NDArray[np.float64]:
    """One row for each text, one column for each feature."""
    counted = [_Counted(text) for text in texts]
    return np.array([[float(feature(each)) for feature in FEATURES.values()] for each in counted])
