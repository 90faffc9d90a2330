"""Lemma 3.1: the posterior bridge, its three-way draw, and the semigroup of bridges."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm.process import bridge_law, transition
from cdlm.rng import seeded

from .enumeration import KINDS, PRIORS, VOCAB, World, p_value, world

TIMES = st.lists(st.integers(0, 1000), min_size=3, max_size=3, unique=True).map(
    lambda grid: [place / 1000 for place in sorted(grid)]
)
NOISES = st.sampled_from(["log-linear", "cosine"])
EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def bayes(w: World, s: float, t: float) -> tuple[torch.Tensor, torch.Tensor]:
    """q(x_s | x_t, x_0) by conditioning the joint, [x_0, x_t, x_s], and which (x_0, x_t) can occur."""
    paths = w.paths(s, t).transpose(1, 2)
    evidence = paths.sum(-1, keepdim=True)
    return paths / evidence, evidence[..., 0] > 1e-15


def dense(w: World, s: float, t: float) -> torch.Tensor:
    k = len(w.pi)
    x0 = torch.eye(VOCAB, k, dtype=torch.float64)[:, None].expand(VOCAB, k, k)
    x_t = torch.arange(k).expand(VOCAB, k)
    return bridge_law(x0, x_t, transition(w.process, 0.0, s), transition(w.process, s, t))


def routes(w: World, s: float, t: float) -> torch.Tensor:
    """The documented three-way draw as a law, [x_0, x_t, x_s]."""
    k, a_s, a_ts = len(w.pi), w.alpha(s), w.alpha(t) / w.alpha(s)
    law = torch.zeros(VOCAB, k, k, dtype=torch.float64)
    for x0 in range(VOCAB):
        for x_t in range(k):
            mass = PRIORS[w.kind][x_t]
            law[x0, x_t, x0] += a_s * (1 - a_ts) * mass
            law[x0, x_t, x_t] += a_ts * (a_s * (x0 == x_t) + (1 - a_s) * mass)
            law[x0, x_t] += (1 - a_s) * (1 - a_ts) * mass * w.pi
    return law / law.sum(-1, keepdim=True)


@pytest.mark.parametrize("kind", KINDS)
@EXAMPLES
@given(times=TIMES, noise=NOISES)
def test_dense_bridge_is_bayes_rule(kind, times, noise):
    """Eq. (2) is the joint law of (x_0, x_s, x_t), conditioned."""
    w = world(kind, l=1, noise=noise)
    truth, possible = bayes(w, *times[1:])
    torch.testing.assert_close(dense(w, *times[1:])[possible], truth[possible], rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@EXAMPLES
@given(times=TIMES, noise=NOISES)
def test_three_routes_are_the_bridge(kind, times, noise):
    """data / stay / prior, with the documented weights, add up to Eq. (2)."""
    w = world(kind, l=1, noise=noise)
    truth, possible = bayes(w, *times[1:])
    torch.testing.assert_close(routes(w, *times[1:])[possible], truth[possible], rtol=0, atol=1e-8)


@pytest.mark.parametrize("noise", ["log-linear", "cosine"])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_bridge_follows_the_law(kind, noise):
    """Process.bridge on every possible (x_0, x_t), 200,000 draws; and the law of another s is told apart."""
    w, s, t, b = world(kind, l=1, noise=noise), 0.35, 0.8, 500
    truth, possible = bayes(w, s, t)
    pairs = possible.nonzero()
    each = 400 // len(pairs)
    x0, x_t = pairs.repeat_interleave(each, 0).T[:, None].expand(2, b, -1)
    x_s = w.process.bridge(x0, x_t, s, t, seeded(31, kind, noise, batch=b))
    cells = torch.arange(len(pairs)).repeat_interleave(each).expand(b, -1) * len(w.pi) + x_s
    counts = cells.flatten().bincount(minlength=len(pairs) * len(w.pi)).view(len(pairs), -1)
    assert p_value(counts, truth[possible]) > 1e-6
    assert p_value(counts, bayes(w, s + 0.05, t)[0][possible]) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_bridge_of_a_predicted_law(kind):
    """With a law in place of x_0, the draw follows Eq. (2) for the mixture of its point masses; visible tokens stay."""
    w, s, t, b, l = world(kind, l=1), 0.35, 0.8, 500, 100
    k = len(w.pi)
    laws = [[0.0, 0.7, 0.3], [0.2, 0.2, 0.6], [0.05, 0.9, 0.05], [0.45, 0.1, 0.45]]
    law = torch.tensor(laws[:k], dtype=torch.float64)
    x_t = torch.arange(k)[:, None].expand(k, l).repeat(1, b).view(k * b, l)
    log_law = law.log()[:, None].expand(k, b, VOCAB).reshape(k * b, 1, VOCAB).expand(k * b, l, VOCAB)
    x_s = w.process.bridge(log_law, x_t, s, t, seeded(5, kind, batch=k * b))
    counts = (x_t * k + x_s).flatten().bincount(minlength=k * k).view(k, k)
    joint = torch.einsum("xa,asx->xs", law, w.paths(s, t))
    certain = w.pi == 0
    joint[certain] = torch.eye(k, dtype=torch.float64)[certain]
    assert p_value(counts, joint) > 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_bridge_to_zero_returns_the_data(kind):
    """At s = 0 the bridge is the identity on x_0."""
    w, b = world(kind, l=1), 64
    x0 = seeded(1, "data", batch=b).integers(32, VOCAB)
    x_t = w.process.corrupt(x0, 0.9, seeded(1, "noise", batch=b))
    assert not torch.equal(x_t, x0)
    assert torch.equal(w.process.bridge(x0, x_t, 0.0, 0.9, seeded(1, "bridge", batch=b)), x0)


@pytest.mark.parametrize("kind", KINDS)
@EXAMPLES
@given(times=TIMES, noise=NOISES)
def test_semigroup(kind, times, noise):
    """Chapman-Kolmogorov: Q_{u->s} Q_{s->t} = Q_{u->t}, and bridges t -> s -> u compose to t -> u."""
    w, (u, s, t) = world(kind, l=1, noise=noise), times
    legs = transition(w.process, u, s) @ transition(w.process, s, t)
    torch.testing.assert_close(legs, transition(w.process, u, t), rtol=0, atol=1e-12)
    torch.testing.assert_close(transition(w.process, u, t), w.kernel(u, t), rtol=0, atol=1e-10)
    possible = bayes(w, s, t)[1]
    two = torch.einsum("ats,asu->atu", dense(w, s, t), dense(w, u, s).nan_to_num(0.0))
    torch.testing.assert_close(two[possible], bayes(w, u, t)[0][possible], rtol=0, atol=1e-8)


@EXAMPLES
@given(seed=st.integers(0, 10_000), k=st.integers(2, 4), sparse=st.booleans())
def test_any_chain(seed, k, sparse):
    """Random row-stochastic steps, some entries zero: the bridge is Bayes' rule and composes."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.rand(3, k, k, generator=generator, dtype=torch.float64) + 1e-3
    if sparse:
        steps = steps * (torch.rand(3, k, k, generator=generator) < 0.6) + 1e-2 * torch.eye(k)
    first, second, third = steps / steps.sum(-1, keepdim=True)
    paths = torch.einsum("au,us,st->aust", first, second, third)
    possible = paths.sum((1, 2)) > 0
    x0 = torch.eye(k, dtype=torch.float64)[:, None].expand(k, k, k)
    end = torch.arange(k).expand(k, k)

    direct = bridge_law(x0, end, first, second @ third)
    late = bridge_law(x0, end, first @ second, third)
    early = bridge_law(x0, end, first, second)
    evidence = paths.sum((1, 2))[..., None]
    truth_u, truth_s = paths.sum(2).transpose(1, 2) / evidence, paths.sum(1).transpose(1, 2) / evidence
    torch.testing.assert_close(direct[possible], truth_u[possible], rtol=0, atol=1e-12)
    torch.testing.assert_close(late[possible], truth_s[possible], rtol=0, atol=1e-12)
    two = torch.einsum("ats,asu->atu", late, early.nan_to_num(0.0))
    torch.testing.assert_close(two[possible], truth_u[possible], rtol=0, atol=1e-12)
