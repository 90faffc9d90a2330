"""The energy distance: by brute force over pairs, against scipy, and without bias."""

import itertools

import numpy as np
import pytest

from cdlm.metrics.energy import energy_distance, pairwise_distances


def test_against_brute_force() -> None:
    points = np.random.default_rng(0).normal(size=(9, 3))
    x, y = np.arange(4), np.arange(4, 9)

    def mean(pairs: object) -> float:
        return float(np.mean([np.linalg.norm(points[a] - points[b]) for a, b in pairs]))  # type: ignore[attr-defined]

    truth = 2 * mean(itertools.product(x, y))
    truth -= mean(itertools.permutations(x, 2)) + mean(itertools.permutations(y, 2))
    assert energy_distance(pairwise_distances(points), x, y) == pytest.approx(truth, abs=1e-12)


def test_against_scipy() -> None:
    """In one dimension; scipy takes the root of the biased estimate, in which each text is paired with itself, too."""
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(1)
    first, second = generator.normal(size=30), generator.normal(0.7, 2, size=50)
    distances = pairwise_distances(np.concatenate([first, second])[:, None])
    x, y = np.arange(30), np.arange(30, 80)
    within = [distances[np.ix_(rows, rows)].mean() / (len(rows) - 1) for rows in (x, y)]
    assert energy_distance(distances, x, y) + sum(within) == pytest.approx(
        stats.energy_distance(first, second) ** 2, abs=1e-9
    )


def test_it_is_unbiased() -> None:
    """The mean over all ways to split one set in two is zero, exactly."""
    distances = pairwise_distances(np.random.default_rng(2).normal(size=(6, 2)))
    rows = set(range(6))
    found = [
        energy_distance(distances, np.array(part), np.array(sorted(rows - set(part))))
        for part in itertools.combinations(range(6), 3)
    ]
    assert np.mean(found) == pytest.approx(0, abs=1e-12)
    assert min(found) < 0 < max(found)
