"""Lemma C.1 and Remark C.2: local consistency bounds global consistency; the loss is path variance plus excess risk."""

import dataclasses
import math

import pytest
import torch

from cdlm.objective.divergence import kl, tv

from .enumeration import KINDS, VOCAB, World, apply, bridged, predictor, world

GRID = (0.0, 0.25, 0.5, 0.75, 1.0)
K = len(GRID) - 1


def error(w: World, f: list[torch.Tensor], k: int, m: int) -> float:
    """E over x_k of the mean over positions of TV(f_k, E_{m|k} f_m), through the package's bridge."""
    image = apply(bridged(w, GRID[m], GRID[k]), f[m])
    rows = tv(target=image.flatten(0, 1).log(), student=f[k].flatten(0, 1).log())
    return float((w.marginal(GRID[k]) * rows.view(-1, w.l).mean(1)).sum())


def perturbed(w: World, size: float, seed: int) -> list[torch.Tensor]:
    """f* with an error of its own at every time but 0."""
    return [w.tokens] + [(1 - size) * w.bayes(t) + size * predictor(w, seed + k) for k, t in enumerate(GRID[1:])]


@pytest.mark.parametrize("kind", KINDS)
def test_global_error_is_bounded(kind):
    """The bound (K - m) eps holds for every m, is below 1, and is within a factor 15 of the error it bounds."""
    w = world(kind)
    for seed in range(0, 30, 10):
        f = perturbed(w, 0.2, seed)
        local = max(error(w, f, k, k - 1) for k in range(1, K + 1))
        for m in range(K):
            found = error(w, f, K, m)
            assert 0.01 < found <= (K - m) * local < 1
            assert (K - m) * local < 15 * found


def test_bound_is_attained():
    """Errors that all point one way add up: the bound holds with equality, so it cannot be improved."""
    w = world("uniform")
    present = (w.states < VOCAB - 1).all(1)
    law = torch.where(present, w.law, 0.0)
    w = dataclasses.replace(w, law=law / law.sum())
    never = torch.eye(VOCAB, dtype=torch.float64)[VOCAB - 1].expand(*w.states.shape, VOCAB)
    f = [(1 - 0.1 * k) * (w.bayes(t) if t else w.tokens) + 0.1 * k * never for k, t in enumerate(GRID)]
    for k in range(1, K + 1):
        assert error(w, f, k, k - 1) == pytest.approx(0.1, abs=1e-9)
    for m in range(K):
        assert error(w, f, K, m) == pytest.approx(0.1 * (K - m), abs=1e-9)


def split_risk(w: World, f: torch.Tensor, q: torch.Tensor, s: float, t: float) -> tuple[torch.Tensor, ...]:
    """E[KL(P || Q)], E[KL(P || mean)] and KL(mean || Q) at every x_t and position, targets P = f(x_s, s) drawn."""
    reverse = bridged(w, s, t)
    mean = apply(reverse, f)
    n, l, v = f.shape

    def drawn(student: torch.Tensor) -> torch.Tensor:
        target, student = f.expand(n, n, l, v), student[:, None].expand(n, n, l, v)
        values = kl(target=target.reshape(-1, v).log(), student=student.reshape(-1, v).log()).view(n, n, l)
        return torch.einsum("xy,xyi->xi", reverse, values)

    excess = kl(target=mean.view(-1, v).log(), student=q.view(-1, v).log()).view(n, l)
    return drawn(q), drawn(mean), excess


@pytest.mark.parametrize("kind", KINDS)
def test_expected_kl_is_path_variance_plus_excess_risk(kind):
    """Remark C.2, at every x_t; the path variance is positive although the excess risk of the mean is zero."""
    w, s, t = world(kind), 0.3, 0.8
    f, q = predictor(w, 1), predictor(w, 2)
    loss, variance, excess = split_risk(w, f, q, s, t)
    torch.testing.assert_close(loss, variance + excess, rtol=0, atol=1e-10)
    assert variance.max() > 0.1
    assert (variance > -1e-12).all()
    best, irreducible, none = split_risk(w, f, apply(bridged(w, s, t), f), s, t)
    assert none.abs().max() < 1e-10
    torch.testing.assert_close(best, irreducible, rtol=0, atol=1e-10)
    assert (w.marginal(t)[:, None] * best).sum() > 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_pinsker_bound(kind):
    """TV is at most sqrt(excess / 2), in expectation too, and K sqrt(max excess / 2) bounds the global error below 1.

    The same bound from the whole loss does not vanish with the error: it stays above the path variance.
    """
    w = world(kind)
    for size in (0.2, 0.02):
        f = perturbed(w, size, 3)
        f[0] = (1 - 1e-12) * f[0] + 1e-12 / VOCAB
        risks, losses = [], []
        for k in range(1, K + 1):
            loss, _, excess = split_risk(w, f[k - 1], f[k], GRID[k - 1], GRID[k])
            mean = apply(bridged(w, GRID[k - 1], GRID[k]), f[k - 1])
            distance = tv(target=mean.view(-1, VOCAB).log(), student=f[k].view(-1, VOCAB).log()).view(-1, w.l)
            assert (distance <= (excess.clamp(min=0) / 2).sqrt() + 1e-9).all()
            weight = w.marginal(GRID[k])[:, None] / w.l
            assert (weight * distance).sum() <= ((weight * excess).sum() / 2).sqrt()
            risks.append(float((weight * excess).sum()))
            losses.append(float((weight * loss).sum()))
        assert error(w, f, K, 0) <= K * math.sqrt(max(risks) / 2) < 1
        assert K * math.sqrt(max(losses) / 2) > 1
