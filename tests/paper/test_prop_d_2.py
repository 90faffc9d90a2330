"""Proposition D.2: in the limit of small hops the consistency operator is the reverse generator of the jump process."""

import itertools

import pytest
import torch

from cdlm.objective.divergence import jsd, kl

from .enumeration import KINDS, VOCAB, World, apply, bridged, predictor, world

STEPS = (4e-3, 2e-3, 1e-3)


def reverse_generator(w: World, t: float) -> torch.Tensor:
    """R(x -> y) = Q_t(y, x) p_t(y) / p_t(x) off the diagonal, rows adding up to zero: the chain in reverse."""
    p = w.marginal(t)
    rates = (w.rate(t) * w.generator * p[:, None] / p).T
    rates = rates - torch.diag(rates.diagonal())
    return rates - torch.diag(rates.sum(1))


def halves(errors: list[float]) -> bool:
    """Errors of first order: each half as large as the one before."""
    return all(b / a == pytest.approx(0.5, abs=0.03) for a, b in itertools.pairwise(errors))


@pytest.mark.parametrize("noise", ["log-linear", "cosine"])
@pytest.mark.parametrize("kind", KINDS)
def test_operator_tends_to_the_generator(kind, noise):
    """(C_{t-d<-t} g - g) / d -> R g for g without time, with an error that halves with d."""
    w, t = world(kind, noise=noise), 0.55
    g = predictor(w, 1)
    limit = apply(reverse_generator(w, t), g)
    assert limit.abs().max() > 0.1
    errors = [float(((apply(bridged(w, t - d, t), g) - g) / d - limit).abs().max()) for d in STEPS]
    assert errors[-1] < 0.02 * float(limit.abs().max())
    assert halves(errors)


@pytest.mark.parametrize("kind", KINDS)
def test_operator_on_a_moving_predictor(kind):
    """(C_{t-d<-t} g - g) / d -> R g - dg/dt for g(x, t) = (1 - t) a(x) + t b(x)."""
    w, t = world(kind), 0.55
    a, b = predictor(w, 1), predictor(w, 2)
    limit = apply(reverse_generator(w, t), (1 - t) * a + t * b) - (b - a)
    errors = []
    for d in STEPS:
        earlier, now = (1 - t + d) * a + (t - d) * b, (1 - t) * a + t * b
        errors.append(float(((apply(bridged(w, t - d, t), earlier) - now) / d - limit).abs().max()))
    assert errors[-1] < 0.02 * float(limit.abs().max())
    assert halves(errors)


@pytest.mark.parametrize("kind", KINDS)
def test_bayes_solves_the_backward_equation(kind):
    """df*/dt = R f*: local consistency in the limit; a random predictor, frozen in time, does not solve it."""
    w, t, d = world(kind), 0.55, 1e-4
    slope = (w.bayes(t + d) - w.bayes(t - d)) / (2 * d)
    generator = reverse_generator(w, t)
    torch.testing.assert_close(slope, apply(generator, w.bayes(t)), rtol=0, atol=1e-5)
    assert apply(generator, predictor(w, 1)).abs().max() > 0.1


@pytest.mark.parametrize("divergence", [kl, jsd])
@pytest.mark.parametrize("kind", KINDS)
def test_weighted_loss_tends_to_a_sum_over_jumps(kind, divergence):
    """E[D(f(x_s), f(x_t))] / d -> sum_y R(x -> y) D(f(y), f(x)): with w = 1/d short hops neither vanish nor blow up."""
    w, t = world(kind), 0.55
    f, n = predictor(w, 1), len(w.states)
    target, student = f.expand(n, n, w.l, VOCAB), f[:, None].expand(n, n, w.l, VOCAB)
    d_xy = divergence(target=target.reshape(-1, VOCAB).log(), student=student.reshape(-1, VOCAB).log()).view(n, n, w.l)
    limit = torch.einsum("xy,xyi->xi", reverse_generator(w, t), d_xy)
    errors = [float((torch.einsum("xy,xyi->xi", bridged(w, t - d, t), d_xy) / d - limit).abs().max()) for d in STEPS]
    assert limit.max() > 0.1
    assert errors[-1] < 0.02 * float(limit.max())
    assert halves(errors)
