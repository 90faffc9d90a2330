"""Proposition D.1: MDLM is the max-step boundary of CDLM under forward KL."""

import math

import numpy as np
import pytest
import torch

from cdlm.methods import METHODS
from cdlm.objective import MAX_STEP, Bridge, Data, Network, Objective, Term, inverse_noise, unit
from cdlm.objective.divergence import kl, rate_kl
from cdlm.objective.loss import split
from cdlm.process import SCHEDULES, masked, uniform
from cdlm.rng import seeded
from cdlm.schedules import constant

from .enumeration import KINDS, VOCAB, apply, entropy, predictor, rows, tiny, world

NOISES = ["log-linear", "cosine"]


def mdlm_weight(noise: str, t: torch.Tensor) -> torch.Tensor:
    """-alpha' / (1 - alpha) by hand: 1/t, or (pi/2) cot(pi t / 2); eps cancels."""
    return 1 / t if noise == "log-linear" else math.pi / 2 / torch.tan(math.pi * t / 2)


@pytest.mark.parametrize("eps", [1e-3, 0.0, 0.2])
@pytest.mark.parametrize("noise", NOISES)
def test_weighted_cross_entropy_is_the_rate_kl(noise, eps):
    """max step + KL + weight -a'/(1-a), rate_kl, and -(a'/(1-a)) log<f, x_0> by hand: three equal numbers a row."""
    schedule = SCHEDULES[noise](eps=eps)
    t = torch.linspace(0.01, 0.99, 60, dtype=torch.float64)
    x0, x_t = torch.arange(60) % VOCAB, torch.full((60,), VOCAB)
    f = torch.randn(60, VOCAB, dtype=torch.float64).mul(2).softmax(-1)
    pair = rows(x0, x_t, schedule.alpha(t), schedule.derivative(t), masked(VOCAB).prior)
    by_hand = -mdlm_weight(noise, t) * torch.log(f[torch.arange(60), x0])
    weighted = inverse_noise(pair) * kl(target=x0, student=f.log(), pair=pair)
    torch.testing.assert_close(weighted, by_hand, rtol=1e-10, atol=0)
    torch.testing.assert_close(rate_kl(target=x0, student=f.log(), pair=pair), by_hand, rtol=1e-10, atol=0)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("kind", KINDS)
def test_rate_kl_is_the_limit_of_the_discrete_bound(kind, noise):
    """KL(q(x_s | x_t, x_0) || p(x_s | x_t)) / (t - s), by conditioning, tends to rate_kl at rate O(t - s).

    p is the bridge with x_0 replaced by a prediction: the T-step NELBO, term by term, for every x_t that can occur.
    """
    w, t = world(kind, l=1, noise=noise), 0.6
    schedule = SCHEDULES[noise](eps=w.eps)
    x_t, x0 = ((w.kernel(0, t)[:VOCAB] > 1e-12).T & (w.pi > 0)[:, None]).nonzero().T
    f = torch.randn(len(x0), VOCAB, dtype=torch.float64).softmax(-1)
    soft = torch.randn(len(x0), VOCAB, dtype=torch.float64).softmax(-1)
    time = torch.full((len(x0),), t, dtype=torch.float64)
    pair = rows(x0, x_t, schedule.alpha(time), schedule.derivative(time), w.process.prior)
    hard = torch.eye(VOCAB, dtype=torch.float64)[x0]
    for target, law in ((x0, hard), (soft.log(), soft)):
        found = rate_kl(target=target, student=f.log(), pair=pair)
        gaps = []
        for step in (2e-3, 1e-3):
            paths = w.paths(t - step, t)
            p, q = (torch.einsum("na,asn->ns", mix, paths[:, :, x_t]) for mix in (law, f))
            p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
            divergence = (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1)
            gaps.append((divergence / step - found).abs())
        assert gaps[1].max() < 0.02
        assert gaps[1].max() < 0.55 * gaps[0].max()


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("l", [1, 2, 3])
def test_bound_at_the_posterior_is_the_entropy(l, noise):
    """Integrated over t, E[rate_kl] at f* is H(x_0): the masked NELBO is tight for the true marginals."""
    w = world("masked", l, noise, eps=0.0)
    schedule = SCHEDULES[noise](eps=0.0)
    nodes, weights = np.polynomial.legendre.leggauss(12)
    clean = (w.states < VOCAB).all(1)
    x0, x_t, i = (~w.known).expand(int(clean.sum()), *w.states.shape).nonzero().T
    ids, state = w.states[clean][x0, i], w.states[x_t, i]
    other = predictor(w, 1)
    bound = excess = 0.0
    for node, weight in zip(nodes, weights, strict=True):
        t = (node + 1) / 2
        time = torch.full((len(ids),), t, dtype=torch.float64)
        pair = rows(ids, state, schedule.alpha(time), schedule.derivative(time), w.process.prior)
        joint = weight / 2 * w.joint(0, t)[clean][x0, x_t]
        bound += float((joint * rate_kl(target=ids, student=w.bayes(t)[x_t, i].log(), pair=pair)).sum())
        excess += float((joint * rate_kl(target=ids, student=other[x_t, i].log(), pair=pair)).sum())
    assert bound == pytest.approx(float(entropy(w.law)), abs=1e-8)
    assert excess > bound + 0.1


def test_bridge_at_zero_is_the_identity():
    """The first step of the proof: with s = 0 the coupling returns x_0, and the network target is the data target."""
    process = masked(VOCAB)
    x0 = seeded(2, "data", batch=6).integers(7, VOCAB)
    t = torch.linspace(0.2, 1, 6, dtype=torch.float64)
    pair = Bridge(process)(x0, torch.zeros_like(t), t, seeded(2, batch=6))
    assert torch.equal(pair.x_s, x0)
    (rows_d, ids_d), (rows_n, ids_n) = *Data()(pair), *Network()(pair, tiny(process))
    assert torch.equal(rows_d, rows_n)
    assert torch.equal(ids_d, ids_n)


@pytest.mark.parametrize("noise", NOISES)
def test_the_row_mdlm(noise):
    """METHODS["mdlm"]: max step, exact bridge, data target, rate KL, w = 1; its loss is MDLM's, written by hand."""
    process, b, l = masked(VOCAB, SCHEDULES[noise]()), 8, 6
    method = METHODS["mdlm"]
    objective = method(process, 100)
    (term,) = objective.terms
    assert method.process == "masked"
    assert not method.time_conditioning
    assert term.times == MAX_STEP
    assert term.coupling == Bridge(process)
    assert term.target == Data()
    assert term.divergence is rate_kl
    assert term.weight is unit
    assert term.share == constant(1.0)
    with pytest.raises(ValueError, match="masked"):
        method(uniform(VOCAB))

    student, rng = tiny(process), seeded(9, noise, batch=b)
    x0 = seeded(9, "data", batch=b).integers(l, VOCAB)
    ((everyone, stratum, strata),) = split([1.0], rng)
    assert torch.equal(everyone, torch.arange(b))
    own = rng[everyone](term.name)
    s, t = MAX_STEP(0.0, stratum, strata, own)
    assert torch.equal(s, torch.zeros(b).double())
    x_t = Bridge(process)(x0, s, t, own).x_t
    hidden = x_t == VOCAB
    assert 5 < hidden.sum() < b * l - 5
    log_f = student(x_t, t).gather(-1, x0[..., None])[..., 0]
    by_hand = -(mdlm_weight(noise, t)[:, None] * log_f)[hidden].sum() / (b * l)

    found = objective.loss(student, None, x0, 0, rng)
    torch.testing.assert_close(found.total, by_hand, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.terms["nelbo"], by_hand.detach(), rtol=1e-9, atol=0)
    again = Objective((Term(term.name, MAX_STEP, Bridge(process), Data(), kl, inverse_noise),), 100)
    torch.testing.assert_close(again.loss(student, None, x0, 0, rng).total, by_hand, rtol=1e-9, atol=0)


def test_the_proposition_by_enumeration():
    """E over x_0 and x_t of max-step CDLM equals E of the NELBO integrand, with both expectations written out."""
    w, t = world("masked"), 0.7
    clean = (w.states < VOCAB).all(1)
    f = predictor(w, 3, carry=True)
    total = 0.0
    for p, x0 in zip(w.law[clean].tolist(), w.states[clean].tolist(), strict=True):
        for z, x_t in enumerate(w.states.tolist()):
            chance = p
            for clean_token, token in zip(x0, x_t, strict=True):
                chance *= w.alpha(t) if token == clean_token else (1 - w.alpha(t)) * (token == VOCAB)
            for i, token in enumerate(x_t):
                if token == VOCAB and chance:
                    total -= chance / t * math.log(float(f[z, i, x0[i]]))
    place = (~w.known).nonzero()
    posterior = apply(w.reverse(0, t), w.tokens)[~w.known]
    weight = w.marginal(t)[place[:, 0]] / t
    cross = torch.stack(
        [kl(target=torch.full((len(place),), y), student=f[~w.known].log()) * posterior[:, y] for y in range(VOCAB)]
    )
    assert float((weight * cross.sum(0)).sum()) == pytest.approx(total, rel=1e-9)
