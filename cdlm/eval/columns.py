"""The columns of the distributional protocol: every metric that has a human value."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdlm.eval.null import Null, Rows, jackknife_error, null_of_one_set, null_of_two_sets, standardize
from cdlm.metrics.copying import SPAN
from cdlm.metrics.diversity import distinct, longest_repeat, ngram_entropy, overlap, repetition
from cdlm.metrics.energy import energy_distance, pairwise_distances
from cdlm.metrics.mauve import mauve
from cdlm.metrics.text_features import FEATURES, text_features

CUT_OFF = 4.0
"""Standard deviations from the mean at which a feature of the energy distance is cut off."""

Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Texts:
    """Texts, with what was measured of each."""

    token_ids: list[list[int]]
    """Without special tokens."""
    strings: list[str]
    nats: Floats | None = None
    """The surprisal of each under the judge."""
    num_tokens: Floats | None = None
    """The tokens of the judge that count."""
    features: NDArray[np.float32] | None = None
    """The last hidden state of the judge; None where it has none that are of use."""
    copied: Floats | None = None
    """The share of the spans of each that the training corpus holds."""

    def __len__(self) -> int:
        return len(self.strings)

    def __add__(self, other: "Texts") -> "Texts":
        """Both, with the measurements that both have."""

        def joined(one: Any, two: Any) -> Any:
            return None if one is None or two is None else np.concatenate([one, two])

        return Texts(
            self.token_ids + other.token_ids,
            self.strings + other.strings,
            joined(self.nats, other.nats),
            joined(self.num_tokens, other.num_tokens),
            joined(self.features, other.features),
            joined(self.copied, other.copied),
        )

    def __getitem__(self, part: slice) -> "Texts":
        def cut(values: Any) -> Any:
            return None if values is None else values[part]

        measured = map(cut, (self.nats, self.num_tokens, self.features, self.copied))
        return Texts(self.token_ids[part], self.strings[part], *measured)


Metric = Callable[[Rows, Rows], float]
"""The value of a set of texts, by their rows, beside a reference set."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A metric of a set of texts. What is measured of each text is measured once; sets are then sets of rows."""

    title: str
    about: str
    prepare: Callable[[Texts], Metric | None]
    """None where something is missing: a judge, a corpus."""
    digits: int = 2
    two_sets: bool = False
    """Whether it compares a set with a reference set."""
    smooth: bool = True
    """Whether leaving out a few texts changes it a little, so that the jackknife gives its error."""
    logarithm: bool = False
    """Whether it is shown as the exponential of what is measured."""


def _mean_of(measure: Callable[[list[int]], float]) -> Callable[[Texts], Metric]:
    """The mean over texts of a measure of the tokens of each."""

    def prepare(texts: Texts) -> Metric:
        values = np.array([measure(ids) for ids in texts.token_ids], dtype=np.float64)
        return lambda rows, _: float(values[rows].mean())

    return prepare


def _set_of(measure: Callable[[Sequence[list[int]]], float]) -> Callable[[Texts], Metric]:
    """A measure of the tokens of all texts of a set."""

    def prepare(texts: Texts) -> Metric:
        return lambda rows, _: measure([texts.token_ids[row] for row in rows])

    return prepare


def _log_perplexity(texts: Texts) -> Metric | None:
    nats, num_tokens = texts.nats, texts.num_tokens
    if nats is None or num_tokens is None:
        return None
    return lambda rows, _: float(nats[rows].sum() / num_tokens[rows].sum())


def _copied(texts: Texts) -> Metric | None:
    copied = texts.copied
    return None if copied is None else lambda rows, _: float(copied[rows].mean())


def _energy(texts: Texts) -> Metric:
    """Each feature counts in units of its standard deviation over the reference, and is cut off where it is rare."""
    features = text_features(texts.strings)

    def metric(rows: Rows, reference: Rows) -> float:
        mean, scale = features[reference].mean(0), features[reference].std(0)
        scaled = (features[np.concatenate([rows, reference])] - mean) / np.where(scale > 0, scale, 1)
        places = np.arange(len(scaled))
        distances = pairwise_distances(scaled.clip(-CUT_OFF, CUT_OFF))
        return energy_distance(distances, places[: len(rows)], places[len(rows) :])

    return metric


def _mauve(texts: Texts) -> Metric | None:
    features = texts.features
    return None if features is None else lambda rows, reference: mauve(features[rows], features[reference])


COLUMNS: dict[str, Column] = {
    "ppl": Column(
        "PPL",
        "generative perplexity: exp(total surprisal / total tokens) under the judge; z of its logarithm",
        _log_perplexity,
        digits=1,
        logarithm=True,
    ),
    "h1": Column("H1", "entropy of the tokens within a sample, in nats", _mean_of(ngram_entropy)),
    "h2": Column(
        "H2", "entropy of the pairs of tokens within a sample, in nats", _mean_of(partial(ngram_entropy, n=2))
    ),
    "rep_2": Column(
        "rep-2", "share of pairs that their own sample has held before", _mean_of(lambda x: repetition([x], 2)), 3
    ),
    "rep_3": Column("rep-3", "the same for 3-grams", _mean_of(lambda x: repetition([x], 3)), 4),
    "rep_4": Column("rep-4", "the same for 4-grams", _mean_of(lambda x: repetition([x], 4)), 4),
    "longest": Column("longest", "longest span, in tokens, that a sample holds twice", _mean_of(longest_repeat)),
    "distinct_2": Column(
        "distinct-2",
        "different pairs of all samples together, as a share of all pairs",
        _set_of(partial(distinct, n=2)),
        3,
    ),
    "overlap_3": Column(
        "overlap-3",
        "share of a sample's different 3-grams that another sample holds: what the samples have in common",
        _set_of(partial(overlap, n=3)),
        4,
    ),
    "copied": Column(
        "copied", f"share of spans of {SPAN} tokens that the training corpus holds (`--corpus`)", _copied, 4
    ),
    "energy": Column(
        "energy",
        f"energy distance to human text on {len(FEATURES)} simple features of the text, without a language model",
        _energy,
        two_sets=True,
    ),
    "mauve": Column(
        "MAUVE",
        "MAUVE against human text, on the last hidden state of the judge",
        _mauve,
        two_sets=True,
        smooth=False,
    ),
}
"""The columns by their names in results.jsonl. A new metric is a row."""


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Human text, with the null distribution of every column for sets of n."""

    pool: Texts
    n: int
    nulls: dict[str, Null]


def human_baseline(pool: Texts, n: int) -> Baseline:
    """The null distributions of the columns that can be computed for a pool of human texts."""
    nulls = {}
    for name, column in COLUMNS.items():
        metric = column.prepare(pool)
        if metric is None:
            continue
        if column.two_sets:
            nulls[name] = null_of_two_sets(metric, len(pool), n)
        else:
            nulls[name] = null_of_one_set(lambda rows, m=metric: m(rows, rows), len(pool), n)
    return Baseline(pool, n, nulls)


def measure_columns(samples: Texts, baseline: Baseline) -> dict[str, dict[str, float]]:
    """Each column of some samples: value, human value, and z with its error.

    A metric of two sets compares the samples with as many human texts as each split does.
    """
    if len(samples) != baseline.n:
        raise ValueError(f"the null distribution is for {baseline.n} samples (got {len(samples)}).")
    texts, pool = baseline.pool + samples, len(baseline.pool)
    own = np.arange(pool, pool + len(samples))
    reference = np.arange(pool - baseline.n)
    found = {}
    for name, null in baseline.nulls.items():
        column = COLUMNS[name]
        metric = column.prepare(texts)
        if metric is None:
            continue
        value = metric(own, reference)
        error = jackknife_error(lambda rows, m=metric: m(rows, reference), own) if column.smooth else null.scale
        shown = math.exp if column.logarithm else float
        found[name] = {
            "value": shown(value),
            "human": shown(null.target),
            "z": null.z(value),
            "error": abs(standardize(error, null.scale)),
        }
    return found
