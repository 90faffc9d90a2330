"""Generative perplexity by hand, and its bootstrap interval on data whose truth is known."""

import math

import pytest
import torch

from cdlm.metrics.gen_ppl import (
    NUM_RESAMPLES,
    Interval,
    bootstrap_indices,
    bootstrap_mean,
    percentile_interval,
    perplexity,
)


def texts(n: int, seed: int, spread: float = 0.3) -> tuple[list[float], list[int]]:
    """Texts of 20 to 200 tokens whose surprise a token is normal around 4, whatever their length."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(20, 200, (n,), generator=generator)
    rate = 4 + spread * torch.randn(n, generator=generator, dtype=torch.float64)
    return (rate * tokens).tolist(), tokens.tolist()


def test_perplexity_by_hand() -> None:
    """Total surprise over total tokens: (10 log 2 + 30 log 8) / 40 = 2.5 log 2."""
    found = perplexity([10 * math.log(2), 30 * math.log(8)], [10, 30])
    assert found.value == pytest.approx(2**2.5)
    assert perplexity([0.0], [3]).value == 1
    assert perplexity([7 * math.log(50)] * 4, [7] * 4) == Interval(*[pytest.approx(50)] * 3)


def test_long_texts_weigh_more() -> None:
    assert perplexity([100 * 1.0, 1 * 9.0], [100, 1]).value < perplexity([1 * 1.0, 1 * 9.0], [1, 1]).value


def test_a_mean_of_perplexities_is_larger() -> None:
    """SEDD's and FM's number is another one (ANCHORS 1.13): at a spread of 0.3 nats exp(0.3^2 / 2) times ours."""
    rate = [nats / tokens for nats, tokens in zip(*texts(2000, seed=0), strict=True)]
    of_exp = sum(map(math.exp, rate)) / len(rate)
    ours = perplexity([100 * x for x in rate], [100] * len(rate)).value
    assert of_exp > ours
    assert of_exp / ours == pytest.approx(math.exp(0.3**2 / 2), rel=0.01)


def test_texts_without_tokens_count_for_nothing() -> None:
    assert perplexity([10.0, 0.0], [5, 0]).value == pytest.approx(math.exp(2))
    assert perplexity([10.0, 0.0, 0.0], [5, 0, 0]).low >= 1  # a resample of empty texts alone is no division by zero
    with pytest.raises(ValueError, match="they are empty"):
        perplexity([0.0, 0.0], [0, 0])


def test_mean_by_hand() -> None:
    found = bootstrap_mean([1.0, 2.0, 6.0])
    assert found.value == 3
    assert 1 <= found.low < 3 < found.high <= 6
    assert bootstrap_mean([5.5]) == Interval(5.5, 5.5, 5.5)


def test_the_interval_holds_the_middle_of_the_draws() -> None:
    found = percentile_interval(7.0, torch.arange(1001, dtype=torch.float64))
    assert (found.value, found.low, found.high) == pytest.approx((7.0, 25.0, 975.0))


def test_what_is_no_number_is_left_out_and_what_is_infinite_counts() -> None:
    draws = torch.arange(1001, dtype=torch.float64)
    found = percentile_interval(0.0, torch.cat([draws, torch.full((9,), math.nan)]))
    assert (found.low, found.high) == pytest.approx((25.0, 975.0))
    few = percentile_interval(0.0, torch.cat([draws, torch.full((9,), math.inf)]))
    assert (few.low, few.high) == pytest.approx((25.0, 985.0), abs=1)
    many = percentile_interval(0.0, torch.cat([draws, torch.full((100,), math.inf)]))
    assert many.low == pytest.approx(27.5, abs=1)
    assert many.high == math.inf
    none = percentile_interval(1.0, torch.full((3,), math.nan, dtype=torch.float64))
    assert none.value == 1
    assert math.isnan(none.low)
    assert math.isnan(none.high)


def test_resamples_are_drawn_with_replacement_and_evenly() -> None:
    draws = bootstrap_indices(20)
    assert draws.shape == (NUM_RESAMPLES, 20)
    counts = torch.bincount(draws.flatten(), minlength=20)
    assert len(counts) == 20
    assert (counts - NUM_RESAMPLES).abs().max() < 5 * math.sqrt(NUM_RESAMPLES)
    assert all(len(row.unique()) < 20 for row in draws[:20])


def test_the_same_numbers_every_time() -> None:
    nats, tokens = texts(40, seed=1)
    assert perplexity(nats, tokens) == perplexity(nats, tokens)
    assert perplexity(nats, tokens, seed=1).low != perplexity(nats, tokens).low
    assert torch.equal(bootstrap_indices(40), bootstrap_indices(40))


def test_measures_of_one_cell_are_paired() -> None:
    """The same texts are drawn for every measure: the interval of a difference can be had from the two."""
    values = [float(k) for k in range(30)]
    one, other = bootstrap_mean(values), bootstrap_mean([x + 5 for x in values])
    assert (other.low - one.low, other.high - one.high) == pytest.approx((5, 5))
    rate = [x / 10 for x in values]
    assert math.log(perplexity(rate, [1] * 30).low) == pytest.approx(bootstrap_mean(rate).low, abs=0.02)


def test_the_interval_covers_the_truth_nineteen_times_in_twenty() -> None:
    """300 sets of 60 texts, whose true perplexity is exp(4). A bootstrap of 60 covers slightly less than it says."""
    runs, hits = 300, 0
    for seed in range(runs):
        found = perplexity(*texts(60, seed))
        hits += found.low <= math.exp(4) <= found.high
    share, error = hits / runs, math.sqrt(0.95 * 0.05 / runs)
    assert 0.93 - 3 * error < share < 0.95 + 3 * error


def test_the_interval_of_a_mean_is_the_normal_one() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(400, generator=generator, dtype=torch.float64)
    found, error = bootstrap_mean(x.tolist()), float(x.std() / 20)
    assert found.low == pytest.approx(float(x.mean()) - 1.96 * error, abs=0.25 * error)
    assert found.high == pytest.approx(float(x.mean()) + 1.96 * error, abs=0.25 * error)


def test_the_interval_shrinks_with_the_root_of_the_number() -> None:
    """16 times the texts, a quarter of the width; averaged over 30 sets."""

    def width(n: int) -> float:
        found = [perplexity(*texts(n, seed)) for seed in range(30)]
        return sum(math.log(one.high / one.low) for one in found) / len(found)

    assert width(32) / width(512) == pytest.approx(4, rel=0.12)


def test_thirty_two_texts_are_few() -> None:
    """ANCHORS 1.13: a spread of 0.3 nats over texts leaves about 10 % either way at the paper's 32 texts."""
    found = [perplexity(*texts(32, seed)) for seed in range(30)]
    half = sum(math.log(one.high / one.low) for one in found) / len(found) / 2
    assert half == pytest.approx(1.96 * 0.3 / math.sqrt(32), rel=0.25)
