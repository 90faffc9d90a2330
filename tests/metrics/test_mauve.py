"""MAUVE against the authors' own package: the area exactly, the whole score on Gaussian features."""

import importlib
import math
import sys
import warnings
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from cdlm.metrics.mauve import MIN_UNBIASED, cluster_histograms, mauve, mauve_of_histograms

Array = NDArray[np.float64]

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    """The module of the score, whose name its own package hides behind the function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("mauve")
        importlib.import_module("mauve.compute_mauve")
    return sys.modules["mauve.compute_mauve"]


def random_histograms(k: int, seed: int, zeros: float) -> tuple[Array, Array]:
    """Two laws over k bins; each bin of each is empty with that probability, but never all."""
    draw = np.random.default_rng(seed)
    pair = []
    for _ in range(2):
        counts = draw.exponential(size=k) * (draw.random(k) >= zeros)
        counts[draw.integers(k)] += 0.1
        pair.append(counts / counts.sum())
    return pair[0], pair[1]


@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("k", [2, 3, 30])
def test_area_is_theirs(k: int, zeros: float, theirs: ModuleType) -> None:
    """Unsorted, as the curve runs; and as their score sorts it, which for equal laws ties and loses a part."""
    weights, auc = np.linspace(1e-6, 1 - 1e-6, 25), theirs.compute_area_under_curve
    for seed in range(5):
        p, q = random_histograms(k, seed, zeros)
        x, y = theirs.get_divergence_curve_for_multinomials(p, q, weights, 5).T
        assert mauve_of_histograms(p, q) == pytest.approx(auc(x, y), abs=1e-9)
        if not np.allclose(p, q):
            by_x, by_y = np.argsort(x), np.argsort(y)
            assert mauve_of_histograms(p, q) == pytest.approx(
                (auc(x[by_x], y[by_x]) + auc(y[by_y], x[by_y])) / 2, abs=1e-9
            )


def test_area_by_hand() -> None:
    """Equal laws: the curve is the corner (1, 1), and the area all of it. Disjoint ones: KL(p, w p) = -log w."""
    p, q = np.array([0.3, 0.7]), np.array([0.6, 0.4])
    assert mauve_of_histograms(p, p) == pytest.approx(1)
    w = np.linspace(0, 1, 20_001)
    truth = np.trapezoid((w**5)[:], 1 - (1 - w) ** 5)  # x = (1 - w)^5 falls from 1 to 0 as y = w^5 rises
    found = mauve_of_histograms(np.array([1.0, 0.0]), np.array([0.0, 1.0]), points=4001)
    assert found == pytest.approx(truth, abs=1e-4)
    assert found == pytest.approx(math.gamma(6) ** 2 / math.gamma(11), abs=1e-4)
    assert mauve_of_histograms(p, q) == pytest.approx(mauve_of_histograms(q, p), abs=1e-12)
    assert mauve_of_histograms(p, q, scaling=1.0) > mauve_of_histograms(p, q, scaling=5.0)


def gaussian(n: int, shift: float, seed: int, d: int = 24) -> Array:
    """Features with a few strong directions, as those of a language model have."""
    draw = np.random.default_rng(seed)
    scale = 3.0 * 0.8 ** np.arange(d)
    x = draw.normal(size=(n, d)) * scale
    x[:, :4] += shift
    return x


@pytest.mark.parametrize(("shift", "low", "high"), [(0.0, 0.9, 1.0), (1.5, 0.3, 0.95), (12.0, 0.0, 0.05)])
def test_the_whole_score_is_theirs(shift: float, low: float, high: float, theirs: ModuleType) -> None:
    """Their k-means is another one, so the clusters differ: within 0.05, averaged over three seeds of it."""
    p, q = gaussian(300, shift, 1), gaussian(300, 0.0, 2)
    ours = np.mean([mauve(p, q, seed) for seed in range(3)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = np.mean([theirs.compute_mauve(p, q, seed=seed, verbose=False).mauve for seed in range(3)])
    assert ours == pytest.approx(wanted, abs=0.05)
    assert low <= ours <= high


def test_order_of_shifts() -> None:
    q = gaussian(300, 0.0, 2)
    scores = [mauve(gaussian(300, shift, 1), q) for shift in (0.0, 1.0, 2.0, 4.0, 12.0)]
    assert scores == sorted(scores, reverse=True)


def test_it_hardly_matters_which_set_comes_first() -> None:
    p, q = gaussian(200, 1.5, 1), gaussian(200, 0.0, 2)
    assert mauve(p, q) == pytest.approx(mauve(q, p), abs=0.05)


def test_identical_sets_look_alike() -> None:
    p = gaussian(100, 0.0, 1)
    assert mauve(p, p) == pytest.approx(1)
    assert mauve(p.astype(np.float32), p.astype(np.float32)) == pytest.approx(1)


def test_the_length_of_a_feature_does_not_matter() -> None:
    p, q = gaussian(100, 1.5, 1), gaussian(100, 0.0, 2)
    lengths = np.random.default_rng(0).uniform(0.1, 10, (100, 1))
    assert mauve(p * lengths, q) == pytest.approx(mauve(p, q), abs=1e-6)


def test_the_same_seed_gives_the_same_score() -> None:
    p, q = gaussian(60, 1.5, 1), gaussian(60, 0.0, 2)
    assert mauve(p, q, seed=3) == mauve(p, q, seed=3)


@pytest.mark.parametrize(("n", "m", "clusters"), [(32, 32, 3), (10, 10, 2), (256, 40, 4), (300, 300, 30), (2, 2, 2)])
def test_a_tenth_as_many_clusters_as_texts(n: int, m: int, clusters: int) -> None:
    """At the paper's 32 texts only 3: ANCHORS 1.20. That biases it upwards, and below FEW we say so."""
    p, q = cluster_histograms(gaussian(n, 0.0, 1), gaussian(m, 0.0, 2))
    assert len(p) == len(q) == clusters
    assert p.sum() == pytest.approx(1)
    assert q.sum() == pytest.approx(1)
    assert MIN_UNBIASED == 1000


def test_few_texts_are_biased_upwards() -> None:
    """The same two laws, 32 texts against 300: the few hide a difference that the many show."""
    few = np.mean([mauve(gaussian(32, 1.5, 10 + k), gaussian(32, 0.0, 50 + k)) for k in range(8)])
    assert few > mauve(gaussian(300, 1.5, 1), gaussian(300, 0.0, 2))


def test_texts_that_are_all_the_same() -> None:
    """A model that collapsed: one text over and over, against varied ones, and against itself."""
    one = np.tile(gaussian(1, 0.0, 1), (40, 1))
    assert mauve(one, one) == 1
    assert mauve(one, gaussian(40, 0.0, 2)) < 0.5
    assert math.isfinite(mauve(np.vstack([one, one * 2]), gaussian(40, 0.0, 2)))


def test_too_few() -> None:
    with pytest.raises(ValueError, match="two sets of texts; got 1 and 5"):
        mauve(gaussian(1, 0.0, 1), gaussian(5, 0.0, 2))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(
        ValueError, match=r'MAUVE needs scikit-learn; run in the checkout: pip install .* -e "\.\[eval\]"'
    ):
        mauve(gaussian(5, 0.0, 1), gaussian(5, 0.0, 2))
