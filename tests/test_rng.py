"""The noise is a pure function of (seed, keys, row, column), uniform, and the same whatever batch it is drawn in."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm import rng as module
from cdlm.rng import Rng, categorical, seeded

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
WORD = 2**64
ALPHA = 1e-6


def signed(word: int) -> int:
    return word - WORD if word >= WORD // 2 else word


def finalise(z: int) -> int:
    """SplitMix64's finaliser on unsigned Python integers."""
    z = (z ^ (z >> 30)) * MIX_1 % WORD
    z = (z ^ (z >> 27)) * MIX_2 % WORD
    return z ^ (z >> 31)


def unshift(z: int, bits: int) -> int:
    """Solve y ^ (y >> bits) = z."""
    y = z
    for _ in range(64 // bits + 1):
        y = z ^ (y >> bits)
    return y


def unfinalise(z: int) -> int:
    z = unshift(z, 31) * pow(MIX_2, -1, WORD) % WORD
    z = unshift(z, 27) * pow(MIX_1, -1, WORD) % WORD
    return unshift(z, 30)


def key_for(word: int) -> int:
    """The key whose first row and column hash to `word`."""
    return signed((unfinalise((unfinalise(word) - GOLDEN) % WORD) - GOLDEN) % WORD)


def chi_square(counts: torch.Tensor, law: torch.Tensor) -> float:
    """p-value of counts under a law; tokens of probability zero must not have been counted."""
    assert int(counts[law == 0].sum()) == 0
    counts, law = counts[law > 0].double(), law[law > 0].double()
    expected = law / law.sum() * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(law) - 1) / 2).double(), statistic / 2))


def correlation_p(x: torch.Tensor, y: torch.Tensor) -> float:
    """p-value of no correlation between two samples of uniforms."""
    z = ((x - 0.5) * (y - 0.5)).sum() * 12 / math.sqrt(x.numel())
    return math.erfc(abs(float(z)) / math.sqrt(2))


def test_finaliser_reproduces_the_published_stream_of_splitmix64():
    stream = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    states = torch.tensor([signed((1234567 + (n + 1) * GOLDEN) % WORD) for n in range(5)])
    assert [h % WORD for h in module._mix(states).tolist()] == stream
    assert [finalise((1234567 + (n + 1) * GOLDEN) % WORD) for n in range(5)] == stream


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(0, 63))
def test_uniform_is_the_top_bits_of_two_nested_hashes(key, row, column):
    u = Rng(key, torch.tensor([row]), 2**41).uniform(column + 1)[0, column]
    word = finalise((finalise((key + (row + 1) * GOLDEN) % WORD) + (column + 1) * GOLDEN) % WORD)
    assert abs(float(u) - word / WORD) < 2**-51


@pytest.mark.parametrize("word", [0, 1, WORD - 1, WORD - 2**11, WORD - 2**40])
def test_never_zero_or_one_even_for_extreme_hashes(word):
    u = Rng(key_for(word), torch.zeros(1, dtype=torch.long), 1).uniform(1)
    assert 0 < float(u) < 1
    assert float(u) == pytest.approx(word / WORD, abs=1e-15)


@pytest.mark.parametrize("word", [0, WORD - 1, WORD - 2**40])
def test_never_zero_or_one_in_single_precision(word, monkeypatch):
    monkeypatch.setattr(module, "wide", lambda device: torch.float32)
    u = Rng(key_for(word), torch.zeros(1, dtype=torch.long), 1).uniform(1)
    assert u.dtype == torch.float32
    assert 0 < float(u) < 1


def test_same_key_same_noise_and_any_other_key_other_noise():
    base = seeded(7, "step", 3, batch=4)
    assert torch.equal(base("a").uniform(9), seeded(7, "step", 3, batch=4)("a").uniform(9))
    others = [
        seeded(8, "step", 3, batch=4)("a"),
        seeded(7, "step", 4, batch=4)("a"),
        seeded(7, "step", "3", batch=4)("a"),
        base("b"),
        base("a", 0),
        base("a")("a"),
        base,
    ]
    keys = {rng.key for rng in [base("a"), *others]}
    assert len(keys) == len(others) + 1
    for other in others:
        assert not (other.uniform(9) == base("a").uniform(9)).any()


def test_the_global_generator_is_neither_used_nor_changed():
    torch.manual_seed(1)
    first = seeded(0, batch=2).uniform(5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(first, seeded(0, batch=2).uniform(5))
    assert torch.equal(state, torch.get_rng_state())


def test_rows_do_not_depend_on_their_company():
    whole = seeded(5, "x", batch=16)("p").uniform(31)
    for row in (0, 3, 15):
        alone = seeded(5, "x", batch=16, rows=torch.tensor([row]))("p").uniform(31)
        assert torch.equal(alone[0], whole[row])
    order = torch.tensor([9, 2, 2, 14])
    assert torch.equal(seeded(5, "x", batch=16, rows=order)("p").uniform(31), whole[order])
    assert torch.equal(seeded(5, "x", batch=16)[order]("p").uniform(31), whole[order])
    assert torch.equal(seeded(5, "x", batch=999)("p").uniform(31)[:16], whole)


def test_columns_do_not_depend_on_how_many_are_drawn():
    assert torch.equal(seeded(1, batch=3).uniform(100)[:, :7], seeded(1, batch=3).uniform(7))


def test_uniform_over_bins_in_every_row_and_column_direction():
    u = seeded(0, "bins", batch=500).uniform(500)
    assert u.dtype == torch.float64
    assert bool(((u > 0) & (u < 1)).all())
    flat = torch.full((100,), 0.01, dtype=torch.float64)
    assert chi_square(torch.bincount((u * 100).long().flatten(), minlength=100), flat) > ALPHA
    # Below the top bits too: the second 7 bits are uniform as well.
    assert chi_square(torch.bincount((u * 12800 % 100).long().flatten(), minlength=100), flat) > ALPHA
    assert chi_square(torch.bincount((u[:, 0] * 10).long(), minlength=10), flat[:10]) > ALPHA
    assert chi_square(torch.bincount((u[0] * 10).long(), minlength=10), flat[:10]) > ALPHA


@pytest.mark.parametrize("lag", [1, 2, 7, 64])
def test_no_serial_correlation_across_rows_or_columns(lag):
    u = seeded(3, "serial", batch=400).uniform(400)
    assert correlation_p(u[lag:], u[:-lag]) > ALPHA
    assert correlation_p(u[:, lag:], u[:, :-lag]) > ALPHA
    cells = (u[lag:] * 8).long() * 8 + (u[:-lag] * 8).long()
    assert chi_square(torch.bincount(cells.flatten(), minlength=64), torch.full((64,), 1 / 64)) > ALPHA


def test_purposes_and_neighbouring_seeds_are_independent():
    a = seeded(0, batch=300)("route").uniform(300)
    for other in (
        seeded(0, batch=300)("prior"),
        seeded(0, batch=300)("routf"),
        seeded(1, batch=300)("route"),
        seeded(0, "route", batch=300),
    ):
        assert correlation_p(a, other.uniform(300)) > ALPHA


@pytest.mark.parametrize("high", [1, 2, 7, 1000])
def test_integers_are_uniform_below_high(high):
    drawn = seeded(2, "int", batch=200).integers(200, high)
    counts = torch.bincount(drawn.flatten(), minlength=high)
    assert len(counts) == high
    if high > 1:
        assert chi_square(counts, torch.full((high,), 1 / high, dtype=torch.float64)) > ALPHA


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_categorical_follows_the_law_and_never_draws_the_impossible(dtype):
    law = torch.tensor([0.0, 0.3, 0.0, 0.05, 0.45, 1e-4, 0.1999, 0.0], dtype=torch.float64)
    u = seeded(4, "draw", batch=300).uniform(300)
    drawn = categorical(law.log().to(dtype).expand(300, 300, 8), u)
    assert chi_square(torch.bincount(drawn.flatten(), minlength=8), law) > ALPHA


@pytest.mark.parametrize("law", [[0, 0, 1.0, 0, 0], [0, 0.5, 0.5, 0], [1.0, 0], [0, 1.0], [0, 0.1, 0.2, 0.3, 0, 0]])
def test_categorical_at_the_very_ends_of_the_unit_interval(law):
    law = torch.tensor(law, dtype=torch.float64)
    ends = torch.tensor([1e-300, 2.0**-54, 1 - 2.0**-53], dtype=torch.float64)
    drawn = categorical((law / law.sum()).log().expand(3, -1), ends)
    possible = (law > 0).nonzero()[:, 0]
    assert drawn.tolist() == [possible[0], possible[0], possible[-1]]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any), st.floats(1e-9, 1 - 1e-9))
def test_categorical_inverts_the_distribution_function(weights, u):
    total = sum(weights)
    edges = [sum(weights[: i + 1]) for i in range(len(weights))]
    truth = next(i for i, edge in enumerate(edges) if u * total < edge)
    if min(abs(u * total - edge) for edge in range(total + 1)) < 1e-9:
        return  # on an edge, rounding decides
    law = torch.tensor(weights, dtype=torch.float64) / total
    assert int(categorical(law.log()[None], torch.tensor([u], dtype=torch.float64))) == truth


def test_categorical_does_not_need_a_normalised_law():
    scores = torch.tensor([1.0, -0.5, 2.0, 0.0], dtype=torch.float64)
    u = seeded(0, batch=50).uniform(50)
    normalised = categorical(scores.log_softmax(0).expand(50, 50, 4), u)
    assert torch.equal(categorical((scores + 3).expand(50, 50, 4), u), normalised)
