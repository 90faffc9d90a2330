"""Algorithm 2 (M-CDLM), stepped by hand beside the row `mcdlm` at kappa = 0."""

import copy

import pytest
import torch

from cdlm.methods import METHODS
from cdlm.model.ema import frozen_copy, update
from cdlm.objective import Bridge, inverse_step
from cdlm.objective.divergence import jsd
from cdlm.objective.loss import split
from cdlm.process import LogLinear, bridge_law, masked, transition
from cdlm.rng import seeded

from .enumeration import VOCAB, p_value, tiny

MASK = VOCAB
B, L, RATE, LAM = 6, 5, 0.05, 0.9


def test_cases_of_the_forward_process():
    """q(x_t | x_0): 1 - t stays, t is masked, nothing else."""
    process = masked(VOCAB, LogLinear(eps=0.0))
    for t in (0.1, 0.5, 1.0):
        law = transition(process, 0.0, t)
        for x0 in range(VOCAB):
            for k in range(VOCAB + 1):
                expected = 1 - t if k == x0 else t if k == MASK else 0
                assert float(law[x0, k]) == pytest.approx(expected, abs=1e-12)


def test_cases_of_the_bridge():
    """q(x_s | x_t, x_0): visible tokens stay; a mask becomes x_0 with (t - s)/t and stays with s/t."""
    process = masked(VOCAB, LogLinear(eps=0.0))
    for s, t in ((0.0, 0.3), (0.2, 0.7), (0.5, 0.9)):
        for x0 in range(VOCAB):
            for x_t in (x0, MASK):
                one = torch.eye(VOCAB + 1, dtype=torch.float64)[x0]
                law = bridge_law(one, torch.tensor(x_t), transition(process, 0.0, s), transition(process, s, t))
                for k in range(VOCAB + 1):
                    revealed = (t - s) / t if k == x0 else s / t if k == MASK else 0
                    expected = revealed if x_t == MASK else float(k == x_t)
                    assert float(law[k]) == pytest.approx(expected, abs=1e-12)


def test_drawn_cases():
    """Bridge draws those cases: 200,000 tokens over (x_t, x_s) for each x_0, t = .7, s = .2."""
    process, b, l = masked(VOCAB, LogLinear(eps=0.0)), 1000, 200
    x0 = torch.arange(l).remainder(VOCAB).expand(b, l)
    time = torch.ones(b, dtype=torch.float64)
    pair = Bridge(process)(x0, 0.2 * time, 0.7 * time, seeded(8, batch=b))
    k = VOCAB + 1
    counts = (x0 * k * k + pair.x_t * k + pair.x_s).flatten().bincount(minlength=VOCAB * k * k).view(VOCAB, k, k)
    law = torch.zeros(VOCAB, k, k, dtype=torch.float64)
    for token in range(VOCAB):
        law[token, token, token], law[token, MASK, token], law[token, MASK, MASK] = 0.3, 0.5, 0.2
    assert p_value(counts.flatten(1), law.flatten(1)) > 1e-6


def test_steps_by_hand():
    """Three steps of the row mcdlm at kappa = 0: b l times our loss is the sum over masks of JSD / delta; SGD; EMA."""
    process = masked(VOCAB, LogLinear(eps=0.0))
    objective = METHODS["mcdlm"](process, 100, kappa=0.0)
    term, anchor = objective.terms
    assert term.divergence is jsd
    assert term.weight is inverse_step
    assert term.coupling == Bridge(process)
    assert term.target is objective.network
    assert (term.share(0.0), anchor.share(0.0)) == (1.0, 0.0)

    student = tiny(process, 1)
    average = frozen_copy(student)
    theta, theta_bar = copy.deepcopy(student), copy.deepcopy(student)
    optimiser = torch.optim.SGD(student.parameters(), lr=RATE)
    kinds = set()
    for step in range(3):
        rng = seeded(6, step, batch=B)
        x0 = seeded(6, "data", step, batch=B).integers(L, VOCAB)
        loss = objective.loss(student, average, x0, step, rng).total
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        update(average, student, LAM)

        rows, stratum, strata = split([1.0, 0.0], rng)[0]
        own = rng[rows](term.name)
        s, t = term.times(step / 100, stratum, strata, own)
        pair = term.coupling(x0, s, t, own)
        by_hand = torch.zeros((), dtype=torch.float64)
        for b in range(B):
            q = theta(pair.x_t[b : b + 1], t[b : b + 1])[0].exp()
            p = theta_bar(pair.x_s[b : b + 1], s[b : b + 1])[0].exp().detach()
            for i in range(L):
                if pair.x_t[b, i] == MASK:
                    m = (p[i] + q[i]) / 2
                    divergence = (
                        torch.xlogy(p[i], p[i]) + torch.xlogy(q[i], q[i]) - torch.xlogy(p[i] + q[i], m)
                    ).sum() / 2
                    by_hand = by_hand + divergence / (t[b] - s[b])
                    kinds.add("boundary" if s[b] == 0 else "mask" if pair.x_s[b, i] == MASK else "revealed")
        torch.testing.assert_close(B * L * loss.detach(), by_hand.detach(), rtol=1e-8, atol=0)

        gradients = torch.autograd.grad(by_hand / (B * L), list(theta.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(theta.parameters(), gradients, strict=True):
                weight -= RATE * gradient
            for slow, fast in zip(theta_bar.parameters(), theta.parameters(), strict=True):
                slow.copy_(LAM * slow + (1 - LAM) * fast)
        for ours, hand in ((student, theta), (average, theta_bar)):
            for a, c in zip(ours.parameters(), hand.parameters(), strict=True):
                torch.testing.assert_close(a.detach(), c.detach(), rtol=1e-7, atol=1e-10)
    assert kinds == {"boundary", "mask", "revealed"}


def test_anchor_enters_in_proportion():
    """Eq. (7): over many draws the loss at kappa = .4 is .6 of the consistency loss plus .4 of the max-step loss."""
    process = masked(VOCAB, LogLinear(eps=0.0))
    student, target, b = tiny(process, 1), tiny(process, 2), 3000
    x0 = seeded(5, "data", batch=b).integers(L, VOCAB)

    def loss(kappa: float) -> float:
        objective = METHODS["mcdlm"](process, 100, kappa=kappa)
        with torch.no_grad():
            return float(objective.loss(student, target, x0, 0, seeded(5, "draw", batch=b)).total)

    assert loss(0.4) == pytest.approx(0.6 * loss(0.0) + 0.4 * loss(1.0), rel=0.05)
    assert loss(1.0) > 1.2 * loss(0.0)
