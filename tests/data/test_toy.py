"""Two moons: the exact law against a simulation of the noisy curve, and both encodings against each other."""

import math

import pytest
import torch

from cdlm.data.toy import Moons
from cdlm.process.exact import listed
from cdlm.rng import seeded


def test_histogram_is_the_law_of_noisy_points_on_the_curve() -> None:
    moons, n = Moons(bins=8, noise=0.1), 400_000
    generator = torch.Generator().manual_seed(0)
    angle = math.pi * torch.rand(n, generator=generator, dtype=torch.float64)
    upper = torch.rand(n, generator=generator) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    points = torch.stack([x, y]) + 0.1 * torch.randn(2, n, generator=generator, dtype=torch.float64)
    column, row = (torch.searchsorted(moons.edges[i].contiguous(), points[i].contiguous()) - 1 for i in (0, 1))
    inside = (column >= 0) & (column < 8) & (row >= 0) & (row < 8)
    count = torch.bincount((column * 8 + row)[inside], minlength=64).double().view(8, 8)
    expected = moons.histogram * inside.sum()
    seen = expected > 5
    statistic = ((count - expected)[seen] ** 2 / expected[seen]).sum()
    assert statistic < 63 + 6 * math.sqrt(2 * 63)


@pytest.mark.parametrize("encoding", ["pair", "digits"])
def test_encodings_round_trip_and_carry_the_same_law(encoding: str) -> None:
    moons = Moons(bins=16, encoding=encoding)
    cells = listed(16, 2)
    tokens = moons.encode(cells)
    assert tokens.shape == (256, moons.length)
    assert tokens.max() < moons.vocab
    assert torch.equal(moons.decode(tokens), cells)
    assert torch.isclose(moons.law.sum(), torch.tensor(1.0, dtype=torch.float64))
    column, row = moons.decode(listed(moons.vocab, moons.length)).unbind(-1)
    assert torch.equal(moons.law, moons.histogram[column, row])


def test_digits_go_from_coarse_to_fine() -> None:
    moons = Moons(bins=16, encoding="digits")
    assert moons.encode(torch.tensor([[4 * 3 + 2, 4 * 1 + 0]])).tolist() == [[3, 1, 2, 0]]


def test_data_lie_on_the_manifold_and_their_shuffle_does_not() -> None:
    moons = Moons()
    assert moons.histogram[moons.manifold].sum() > 0.99
    product = torch.outer(moons.histogram.sum(1), moons.histogram.sum(0))
    assert product[moons.manifold].sum() < 0.5


def test_sample_follows_the_histogram() -> None:
    moons, n = Moons(bins=4), 100_000
    tokens = moons.sample(seeded(0, batch=n))
    count = torch.bincount(tokens[:, 0] * 4 + tokens[:, 1], minlength=16).double()
    expected = moons.histogram.flatten() * n
    assert ((count - expected) ** 2 / expected).sum() < 62  # 15 degrees of freedom, p = 1e-7


@pytest.mark.parametrize("bad", [{"bins": 60, "encoding": "digits"}, {"bins": 1}, {"noise": 0.0}])
def test_bad_moons_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="need"):
        Moons(**bad)
