"""Naive samplers: text without any model of language. A metric that one of them wins measures something else.

Each is fitted to a part of the human text that shares no document with the reference. A sample has the number of tokens
of a human text.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

Text = list[int]
Sampler = Callable[[Sequence[Text], int, np.random.Generator], Text]
"""Human texts, the number of tokens, and a generator in; a sample out."""

TOP_K = 1024
"""Tokens of the top-k sampler: with so many its samples have about the unigram entropy of human text."""
PERIOD = 128
"""Tokens of human text that the periodic sampler repeats."""
PHRASE = 5
"""Tokens of a phrase, at most."""


@dataclasses.dataclass(frozen=True)
class NaiveSampler:
    """A row of the table of naive samplers."""

    about: str
    draw: Sampler


def unigrams(texts: Sequence[Text], length: int, generator: np.random.Generator) -> Text:
    tokens = np.concatenate([np.asarray(text) for text in texts])
    return generator.choice(tokens, length).tolist()


def top_unigrams(texts: Sequence[Text], length: int, generator: np.random.Generator) -> Text:
    tokens, counts = np.unique(np.concatenate([np.asarray(text) for text in texts]), return_counts=True)
    top = np.argsort(-counts, kind="stable")[:TOP_K]
    return generator.choice(tokens[top], length, p=counts[top] / counts[top].sum()).tolist()


def periodic(texts: Sequence[Text], length: int, generator: np.random.Generator) -> Text:
    text = texts[int(generator.integers(len(texts)))]
    return np.resize(np.asarray(text[:PERIOD]), length).tolist()


def shuffled(texts: Sequence[Text], length: int, generator: np.random.Generator) -> Text:
    text = texts[int(generator.integers(len(texts)))]
    return generator.permutation(np.asarray(text)).tolist()


def phrases(texts: Sequence[Text], length: int, generator: np.random.Generator) -> Text:
    sample: Text = []
    while len(sample) < length:
        text = texts[int(generator.integers(len(texts)))]
        start = int(generator.integers(max(1, len(text) - PHRASE + 1)))
        sample += text[start : start + PHRASE]
    return sample[:length]


NAIVE_SAMPLERS: dict[str, NaiveSampler] = {
    "unigrams": NaiveSampler("independent tokens with the frequencies of human text", unigrams),
    "top unigrams": NaiveSampler(f"the same, from the {TOP_K} most frequent tokens", top_unigrams),
    "periodic": NaiveSampler(f"the first {PERIOD} tokens of a human text, repeated", periodic),
    "shuffled": NaiveSampler("the tokens of a human text in random order", shuffled),
    "phrases": NaiveSampler(f"phrases of {PHRASE} tokens from human texts, one after another", phrases),
}
"""A new naive sampler is a row."""


def draw_naive(name: str, texts: Sequence[Text], num_samples: int, seed: int) -> list[Text]:
    """Samples of a naive sampler. Sample k depends on the seed and on k alone."""
    drawn = []
    for index in range(num_samples):
        generator = np.random.default_rng([seed, index, *name.encode()])
        length = len(texts[int(generator.integers(len(texts)))])
        drawn.append(NAIVE_SAMPLERS[name].draw(texts, length, generator))
    return drawn
