"""Algorithm 1 (CD3T), stepped by hand beside Objective.loss, an optimiser and cdlm.model.ema.update."""

import copy

import pytest
import torch

from cdlm.model.denoiser import Denoiser
from cdlm.model.ema import frozen_copy, update
from cdlm.objective import Bridge, Network, Objective, Term, Times, inverse_step
from cdlm.objective.divergence import divergence
from cdlm.objective.loss import split
from cdlm.process import masked, uniform, unigram
from cdlm.rng import Rng, seeded
from cdlm.schedules import constant
from cdlm.types import Pair

from .enumeration import PRIORS, VOCAB, tiny

B, L, RATE, LAM = 6, 5, 0.05, 0.9
PROCESSES = {
    "masked": masked(VOCAB),
    "uniform": uniform(VOCAB),
    "unigram": unigram(torch.tensor(PRIORS["unigram"], dtype=torch.float64)),
}


def draw(objective: Objective, x0: torch.Tensor, rng: Rng) -> Pair:
    """delta, t, s, x_t and x_s of the step: the same numbers that the objective uses."""
    term = objective.terms[0]
    shares = [term.share(0.0) for term in objective.terms]
    rows, stratum, strata = split(shares, rng)[0]
    assert torch.equal(rows, torch.arange(len(x0)))
    own = rng[rows](term.name)
    s, t = term.times(0.0, stratum, strata, own)
    return term.coupling(x0, s, t, own)


def distance(name: str, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """D(target p, student q) with 0 log 0 = 0."""
    if name == "kl":
        return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)
    if name == "tv":
        return (p - q).abs().sum(-1) / 2
    m = (p + q) / 2
    return (torch.xlogy(p, p) + torch.xlogy(q, q) - torch.xlogy(p + q, m)).sum(-1) / 2


def loss_by_hand(name: str, student: Denoiser, average: Denoiser, pair: Pair, prior: torch.Tensor) -> torch.Tensor:
    """w(t, delta) D(f(x_t, t), sg f_bar(x_s, s)), summed over M(x_t), averaged over sequences and positions."""
    with torch.no_grad():
        p = average(pair.x_s, pair.s).exp()
    q = student(pair.x_t, pair.t).exp()
    counts = prior[pair.x_t] > 0
    weight = (1 / (pair.t - pair.s))[:, None].expand(B, L)
    return (weight[counts] * distance(name, p[counts], q[counts])).sum() / (B * L)


def close(net: Denoiser, other: Denoiser) -> None:
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", ["kl", "jsd", "tv"])
@pytest.mark.parametrize("kind", PROCESSES)
def test_steps_by_hand(kind, name):
    """Three steps: the same loss, the same weights after SGD, the same average after the EMA update."""
    process = PROCESSES[kind]
    times = Times(constant(1 / 8), constant(5 / 8))
    term = Term("consistency", times, Bridge(process), Network(constant(LAM)), divergence(name), inverse_step)
    objective = Objective((term,), 100)
    student = tiny(process, 1, time_conditioning=kind != "masked")
    average = frozen_copy(student)
    theta, theta_bar = copy.deepcopy(student), copy.deepcopy(student)
    optimiser = torch.optim.SGD(student.parameters(), lr=RATE)

    for step in range(3):
        rng = seeded(1, "train", step, batch=B)
        x0 = seeded(1, "data", step, batch=B).integers(L, VOCAB)
        found = objective.loss(student, average, x0, 0, rng).total
        optimiser.zero_grad()
        found.backward()
        optimiser.step()
        update(average, student, LAM)

        pair = draw(objective, x0, rng)
        assert ((pair.s == 0) | (pair.t - pair.s >= 1 / 8)).all()
        by_hand = loss_by_hand(name, theta, theta_bar, pair, process.prior)
        gradients = torch.autograd.grad(by_hand, list(theta.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(theta.parameters(), gradients, strict=True):
                weight -= RATE * gradient
            for slow, fast in zip(theta_bar.parameters(), theta.parameters(), strict=True):
                slow.copy_(LAM * slow + (1 - LAM) * fast)

        assert found > 1e-3
        torch.testing.assert_close(found.detach(), by_hand.detach(), rtol=1e-8, atol=0)
        close(student, theta)
        close(average, theta_bar)
    moved = [(a - b).abs().max() for a, b in zip(student.parameters(), average.parameters(), strict=True)]
    assert max(moved) > 1e-3


def test_target_is_stopped():
    """sg[.]: no gradient reaches the target network, even one whose weights could take it."""
    process = PROCESSES["uniform"]
    times = Times(constant(1 / 4), constant(1 / 4))
    term = Term("consistency", times, Bridge(process), Network(), divergence("jsd"), inverse_step)
    student, target = tiny(process, 1, True), tiny(process, 2, True)
    x0 = seeded(2, "data", batch=B).integers(L, VOCAB)
    Objective((term,), 10).loss(student, target, x0, 0, seeded(2, batch=B)).total.backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    assert any(parameter.grad.abs().max() > 1e-6 for parameter in student.parameters())


def test_times_follow_the_step_sizes():
    """delta ~ U[1/8, 5/8] and s = max(t - delta, 0), t stratified: one t in each of the b equal parts of [0, 1]."""
    times, b = Times(constant(1 / 8), constant(5 / 8)), 4000
    s, t = times(0.0, torch.arange(b), b, seeded(3, batch=b))
    inside = s > 0
    delta = (t - s)[inside]
    assert ((delta >= 1 / 8) & (delta <= 5 / 8)).all()
    assert (t[~inside] <= 5 / 8).all()
    assert float(delta[t[inside] > 5 / 8].mean()) == pytest.approx(3 / 8, abs=0.02)
    assert torch.equal(((t - 1e-3) / 0.999 * b).floor().clamp(0, b - 1).long(), torch.arange(b))


def test_lambda_of_a_long_run_is_the_rate():
    """After its warm-up the average of the paper's run decays at lambda = .999; a frozen teacher never moves."""
    assert Network(constant(0.999)).lam(149_998, 150_000) == pytest.approx(0.999, abs=1e-12)
    assert Network(constant(0.999)).lam(0, 150_000) == pytest.approx(2 / 11, abs=1e-12)
    assert Network(constant(1.0)).lam(10, 100) == 1
