"""Proposition D.5: DUO-DCD's coupling has the marginals of the uniform process, and another joint law."""

import math

import numpy as np
import pytest
import torch

from cdlm.objective import SharedNoise
from cdlm.process import Gaussian, uniform
from cdlm.rng import seeded

from .enumeration import p_value, tv

SIZE = 4
GAMMAS = (-2.0, 3.0)
S, T = 0.4, 0.9


def win(vocab: int, t: float) -> float:
    """P(the clean coordinate of a x_0 + s e is the largest), by Gauss-Hermite quadrature."""
    gamma = GAMMAS[0] + (GAMMAS[1] - GAMMAS[0]) * t
    ratio = math.sqrt(1 / (1 + math.exp(gamma)) / (1 / (1 + math.exp(-gamma))))
    nodes, weights = np.polynomial.hermite_e.hermegauss(100)
    below = np.array([0.5 * math.erfc(-(ratio + z) / math.sqrt(2)) for z in nodes]) ** (vocab - 1)
    return float((weights * below).sum() / math.sqrt(2 * math.pi))


def alpha(vocab: int, t: float) -> float:
    return (vocab * win(vocab, t) - 1) / (vocab - 1)


def shared(vocab: int, s: float, t: float) -> torch.Tensor:
    """Pi_DCD(x_s, x_t | x_0 = 0): the clean token wins at t, or only at s, or the same other token wins twice."""
    law = torch.zeros(vocab, vocab, dtype=torch.float64)
    law[0, 0] = win(vocab, t)
    law[0, 1:] = (win(vocab, s) - win(vocab, t)) / (vocab - 1)
    law[range(1, vocab), range(1, vocab)] = (1 - win(vocab, s)) / (vocab - 1)
    return law


def bridge(vocab: int, s: float, t: float) -> torch.Tensor:
    """Pi_CDLM(x_s, x_t | x_0 = 0) of the uniform process at the same signal levels."""
    a_s, a_ts = alpha(vocab, s), alpha(vocab, t) / alpha(vocab, s)
    first = a_s * torch.eye(vocab, dtype=torch.float64)[0] + (1 - a_s) / vocab
    return first[:, None] * (a_ts * torch.eye(vocab, dtype=torch.float64) + (1 - a_ts) / vocab)


def draw(b: int = 2000, l: int = 100, key: str = "") -> tuple[torch.Tensor, object]:
    """Counts of (x_s - x_0, x_t - x_0) mod v, for all clean tokens, and the pair."""
    x0 = torch.arange(b * l).view(b, l) % SIZE
    time = torch.ones(b, dtype=torch.float64)
    pair = SharedNoise(uniform(SIZE), Gaussian(SIZE, *GAMMAS))(x0, S * time, T * time, seeded(13, key, batch=b))
    cells = (pair.x_s - x0) % SIZE * SIZE + (pair.x_t - x0) % SIZE
    return cells.flatten().bincount(minlength=SIZE**2), pair


@pytest.mark.parametrize("vocab", [2, 3, 4])
def test_signal_level(vocab):
    """alpha(gamma) = (v P - 1) / (v - 1) by an independent quadrature, and in closed form for two tokens."""
    times = torch.linspace(0, 1, 9, dtype=torch.float64)
    found = Gaussian(vocab, *GAMMAS).alpha(times)
    truth = torch.tensor([alpha(vocab, t) for t in times.tolist()], dtype=torch.float64)
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-9)
    assert (found.diff() < 0).all()
    if vocab == 2:
        ratio = torch.exp(-(GAMMAS[0] + (GAMMAS[1] - GAMMAS[0]) * times) / 2)
        torch.testing.assert_close(found, torch.special.erf(ratio / 2), rtol=0, atol=1e-12)


def test_marginals_are_those_of_the_uniform_process():
    """x_s and x_t given x_0, each alone: Cat(alpha x_0 + (1 - alpha) / v), analytically and in 200,000 draws."""
    joint = shared(SIZE, S, T)
    counts, pair = draw()
    counts = counts.view(SIZE, SIZE)
    for axis, t, level in ((1, S, pair.alpha_s), (0, T, pair.alpha_t)):
        law = alpha(SIZE, t) * torch.eye(SIZE, dtype=torch.float64)[0] + (1 - alpha(SIZE, t)) / SIZE
        torch.testing.assert_close(joint.sum(axis), law, rtol=0, atol=1e-12)
        torch.testing.assert_close(level, torch.full_like(level, alpha(SIZE, t)), rtol=0, atol=1e-9)
        assert p_value(counts.sum(axis), law) > 1e-6
        assert p_value(counts.sum(axis), 0.9 * law + 0.1 / SIZE) < 1e-6


def test_joint_is_that_of_one_noise_vector():
    """The O(1) draw has the joint law of two argmaxes of one v-dimensional Gaussian, drawn here in full."""
    counts, _ = draw(key="joint")
    assert p_value(counts, shared(SIZE, S, T).flatten()) > 1e-6
    noise = torch.randn(200_000, SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ends = []
    for t in (S, T):
        gamma = torch.tensor(GAMMAS[0] + (GAMMAS[1] - GAMMAS[0]) * t, dtype=torch.float64)
        clean = torch.sigmoid(-gamma).sqrt() * torch.eye(SIZE, dtype=torch.float64)[0]
        ends.append((clean + torch.sigmoid(gamma).sqrt() * noise).argmax(-1))
    full = (ends[0] * SIZE + ends[1]).bincount(minlength=SIZE**2)
    assert p_value(full, shared(SIZE, S, T).flatten()) > 1e-6


def test_joint_is_not_the_bridge():
    """Same marginals, but TV(Pi_DCD, Pi_CDLM) > .3: a token that is wrong at s is the same wrong token at t, always."""
    dcd, cdlm = shared(SIZE, S, T), bridge(SIZE, S, T)
    for axis in (0, 1):
        torch.testing.assert_close(dcd.sum(axis), cdlm.sum(axis), rtol=0, atol=1e-12)
    assert tv(dcd.flatten(), cdlm.flatten()) > 0.3
    counts, _ = draw(key="gap")
    assert p_value(counts, cdlm.flatten()) < 1e-6
    noisy = counts.view(SIZE, SIZE)[1:]
    assert noisy.sum() > 1000
    assert noisy.sum() == noisy[:, 1:].diagonal().sum()
    assert (cdlm[1:, 0] > 0.01).all()


def test_given_the_middle_state_the_future_depends_on_the_data():
    """Not Markov: q(x_t | x_s, x_0) differs by whether x_s = x_0, where every chain of the process has one kernel."""
    dcd, cdlm = shared(SIZE, S, T), bridge(SIZE, S, T)
    kept = {name: joint[[0, 1], [0, 1]] / joint[:2].sum(1) for name, joint in (("dcd", dcd), ("cdlm", cdlm))}
    assert float(kept["cdlm"][0]) == pytest.approx(float(kept["cdlm"][1]), abs=1e-12)
    assert float(kept["dcd"][1]) == pytest.approx(1, abs=1e-12)
    assert kept["dcd"][0] < 0.95
