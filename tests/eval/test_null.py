"""The null distribution: z-scores of human text are standard normal, for metrics of one set and of two."""

import math

import numpy as np
import pytest

from cdlm.eval.null import jackknife_error, null_of_one_set, null_of_two_sets
from cdlm.metrics.energy import energy_distance, pairwise_distances

N = 16


def z_scores(pool_size: int, trials: int) -> np.ndarray:
    """z of the mean of n new texts, each trial with a pool of its own."""
    generator, found = np.random.default_rng(0), []
    for trial in range(trials):
        values = generator.gamma(4, size=pool_size + N)
        null = null_of_one_set(lambda rows, v=values: float(v[rows].mean()), pool_size, N, seed=trial)
        found.append(null.z(float(values[pool_size:].mean())))
    return np.array(found)


@pytest.mark.parametrize("pool_size", [2 * N, 6 * N])
def test_z_of_human_text_is_standard_normal(pool_size: int) -> None:
    """Whatever the size of the pool: a small one makes the target uncertain, and the scale says so."""
    z = z_scores(pool_size, 300)
    assert z.mean() == pytest.approx(0, abs=3 / math.sqrt(len(z)))
    assert z.std() == pytest.approx(1, abs=0.15)
    assert (abs(z) > 1.96).mean() == pytest.approx(0.05, abs=0.04)


def test_z_of_two_sets() -> None:
    """The energy distance of new texts beside a reference set has the distribution of the splits."""
    generator, found, pool = np.random.default_rng(1), [], 4 * N
    for trial in range(60):
        distances = pairwise_distances(generator.normal(size=(pool + N, 3)))
        null = null_of_two_sets(lambda x, y, d=distances: energy_distance(d, x, y), pool, N, seed=trial)
        found.append(null.z(energy_distance(distances, np.arange(pool, pool + N), np.arange(pool - N))))
    z = np.array(found)
    assert z.mean() == pytest.approx(0, abs=3 / math.sqrt(len(z)))
    assert z.std() == pytest.approx(1, abs=0.3)


def test_a_shift_shows() -> None:
    values = np.random.default_rng(2).normal(size=4 * N)
    null = null_of_one_set(lambda rows: float(values[rows].mean()), len(values), N)
    assert null.target == pytest.approx(values.mean(), abs=0.05)
    assert null.scale == pytest.approx(values.std() / math.sqrt(N) * math.sqrt(1 + 1 / 4), rel=0.15)
    assert null.z(null.target + 3 * null.scale) == pytest.approx(3)


def test_a_metric_that_does_not_vary() -> None:
    null = null_of_one_set(lambda rows: 1.0, 2 * N, N)
    assert null.z(1.0) == 0
    assert null.z(0.5) == -math.inf


def test_too_few_human_texts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"needs 32 human texts \(got 31\)"):
        null_of_one_set(lambda rows: 1.0, 2 * N - 1, N)


def test_the_jackknife_gives_the_error_of_a_mean() -> None:
    values = np.random.default_rng(3).normal(size=N)
    error = jackknife_error(lambda rows: float(values[rows].mean()), np.arange(N))
    assert error == pytest.approx(values.std(ddof=1) / math.sqrt(N))
