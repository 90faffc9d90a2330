"""MAUVE (Pillutla et al. 2021) of two sets of features: 1 if they look alike, towards 0 as they part.

Both sets are quantised by one k-means; the score is the area under the curve of the two KL divergences from the
mixtures of the two histograms. The settings are those that published numbers use: features of unit length, the
principal components that hold 90 % of their variance, a tenth as many clusters as texts, scaling 5.
"""

import math
import warnings

import numpy as np
from numpy.typing import NDArray

from cdlm.extras import require

MIN_UNBIASED = 1000
"""Below so many texts the score is biased upwards, and has few clusters to tell anything apart."""

Features = NDArray[np.floating]
Histogram = NDArray[np.float64]


def mauve(p: Features, q: Features, seed: int = 0) -> float:
    """The score of features p (what was written) against q (what people wrote), one row a text."""
    if len(p) < 2 or len(q) < 2:
        raise ValueError(f"MAUVE compares two sets of texts; got {len(p)} and {len(q)}")
    return mauve_of_histograms(*cluster_histograms(p, q, seed))


def cluster_histograms(p: Features, q: Features, seed: int = 0) -> tuple[Histogram, Histogram]:
    """How often each set falls into each cluster of both together."""
    cluster = require("sklearn.cluster", "eval", "MAUVE", "scikit-learn")
    decomposition = require("sklearn.decomposition", "eval", "MAUVE", "scikit-learn")
    both = np.concatenate([p, q]).astype(np.float64)
    both /= np.linalg.norm(both, axis=1, keepdims=True)
    if np.allclose(both, both[0]):  # one text over and over: nothing to cluster
        return np.ones(1), np.ones(1)
    both = decomposition.PCA(0.9, svd_solver="full").fit_transform(both)
    clusters = max(2, round(min(len(p), len(q)) / 10))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fewer distinct texts than clusters
        label = cluster.KMeans(clusters, n_init=5, max_iter=500, random_state=seed).fit_predict(both)
    counts = [np.bincount(part, minlength=clusters) for part in (label[: len(p)], label[len(p) :])]
    first, second = (count / count.sum() for count in counts)
    return first, second


def mauve_of_histograms(p: Histogram, q: Histogram, scaling: float = 5.0, points: int = 25) -> float:
    """The area under { exp(-c KL(q, r)), exp(-c KL(p, r)) : r = w p + (1 - w) q }, by trapezia from axis to axis."""
    curve = [(1.0, 0.0)]
    for weight in np.linspace(1e-6, 1 - 1e-6, points):
        r = weight * p + (1 - weight) * q
        curve.append((math.exp(-scaling * _kl(q, r)), math.exp(-scaling * _kl(p, r))))
    x, y = np.array([*curve, (0.0, 1.0)]).T
    return float(np.sum((x[:-1] - x[1:]) * (y[:-1] + y[1:])) / 2)


def _kl(p: Histogram, r: Histogram) -> float:
    seen = p > 0
    return float(np.sum(p[seen] * np.log(p[seen] / r[seen])))
