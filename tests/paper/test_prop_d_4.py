"""Proposition D.4: SDTT is CDLM with the teacher's prediction in place of x_0."""

import functools

import pytest
import torch

from cdlm.objective import Network, Rollout
from cdlm.process import masked
from cdlm.rng import seeded

from .enumeration import KINDS, VOCAB, World, bridges, index, p_value, sequences, tiny, tv, world

S, T = 0.3, 0.8


def coupling(w: World, teacher: torch.Tensor) -> torch.Tensor:
    """Pi_SDTT(x_t, x_s): a clean sequence from the teacher's law p(x_0 | x_t), [x_t, x_0], then the bridge."""
    return w.marginal(T)[:, None] * torch.einsum("ba,abc->bc", teacher, bridges(w, S, T))


def factorised(w: World) -> torch.Tensor:
    """The exact marginals as a teacher: prod_i p(x_0^i | x_t), [x_t, x_0]."""
    f = torch.cat([w.bayes(T), torch.zeros(len(w.states), w.l, len(w.pi) - VOCAB, dtype=torch.float64)], -1)
    return functools.reduce(lambda joint, row: (joint[..., None] * row[:, None]).flatten(1), f.unbind(1))


@pytest.mark.parametrize("l", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_oracle_teacher_gives_the_exact_coupling(kind, l):
    """A teacher that knows the joint posterior p(x_0 | x_t): Pi_SDTT = Pi_CDLM = p(x_s, x_t)."""
    w = world(kind, l)
    torch.testing.assert_close(coupling(w, w.reverse(0, T)), w.joint(S, T).T, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_marginals_are_not_enough(kind):
    """A factorised teacher with exact marginals: no gap at l = 1, a TV gap above .04 at l = 2, above .1 at l = 3."""
    gaps = []
    for l in (1, 2, 3):
        w = world(kind, l)
        gaps.append(float(tv(coupling(w, factorised(w)).flatten(), w.joint(S, T).T.flatten())))
    assert gaps[0] < 1e-10
    assert gaps[1] > 0.04
    assert gaps[2] > 0.1


def test_imperfect_teacher_shows_at_every_length():
    """Only the oracle matches: a teacher whose marginals are off has a gap at l = 1 too."""
    w = world("masked", 1)
    teacher = 0.8 * w.reverse(0, T) + 0.2 * w.law
    assert tv(coupling(w, teacher).flatten(), w.joint(S, T).T.flatten()) > 0.005


def test_rollout_follows_the_teacher():
    """Rollout: (x_t, x_s) given x_0 has q(x_t | x_0) prod_i (reveal: teacher's marginal; keep: mask), by chi-square."""
    process, b, x0 = masked(VOCAB), 200_000, [2, 0]
    teacher = tiny(process, 1)
    time = torch.ones(b, dtype=torch.float64)
    pair = Rollout(process)(torch.tensor([x0]).expand(b, 2), S * time, T * time, seeded(21, batch=b), teacher)

    a_s, a_t = 1 - 0.999 * S, 1 - 0.999 * T
    reveal = (a_s - a_t) / (1 - a_t)
    k, states = VOCAB + 1, sequences(VOCAB + 1, 2)
    f = teacher(states, T).exp().detach()
    law = torch.zeros(k * k, k * k, dtype=torch.float64)
    for z, x_t in enumerate(states.tolist()):
        for y, x_s in enumerate(states.tolist()):
            chance = 1.0
            for i in range(2):
                if x_t[i] == VOCAB:
                    moved = 1 - reveal if x_s[i] == VOCAB else reveal * float(f[z, i, x_s[i]])
                    chance *= (1 - a_t) * moved
                else:
                    chance *= a_t * (x_t[i] == x0[i]) * (x_s[i] == x_t[i])
            law[z, y] = chance
    assert law.sum() == pytest.approx(1)
    counts = (index(pair.x_t, k) * k * k + index(pair.x_s, k)).bincount(minlength=k**4)
    assert p_value(counts, law.flatten()) > 1e-6
    exact = torch.kron(*(world("masked", 1).paths(S, T)[token].T.reshape(-1) for token in x0))
    exact = exact.view(k, k, k, k).transpose(1, 2).reshape(-1)
    assert p_value(counts, exact) < 1e-6


def test_rollout_keeps_the_law_of_what_it_reveals():
    """`law` is the teacher's hidden rows at x_t: a revealed token's target is f(x_t, t), a mask's is f(x_s, s)."""
    process, b, l = masked(VOCAB), 6, 8
    teacher = tiny(process, 2)
    s, t = torch.linspace(0.1, 0.5, b, dtype=torch.float64), torch.linspace(0.6, 1, b, dtype=torch.float64)
    x0 = seeded(4, "data", batch=b).integers(l, VOCAB)
    pair = Rollout(process)(x0, s, t, seeded(4, batch=b), teacher)
    torch.testing.assert_close(
        pair.drawn_from, teacher.features(pair.x_t, process.noise.alpha(t)).detach(), rtol=0, atol=0
    )

    hidden_t, hidden_s = pair.x_t == VOCAB, pair.x_s == VOCAB
    assert not (hidden_s & ~hidden_t).any()
    assert torch.equal(pair.x_s[~hidden_t], pair.x_t[~hidden_t])
    at_t, at_s = teacher(pair.x_t, t).detach().flatten(0, 1), teacher(pair.x_s, s).detach().flatten(0, 1)
    (revealed, law), (masks, other) = Network()(pair, teacher)
    assert torch.equal(revealed, (hidden_t & ~hidden_s).flatten().nonzero()[:, 0])
    assert torch.equal(masks, hidden_s.flatten().nonzero()[:, 0])
    assert len(revealed) > 5
    assert len(masks) > 5
    torch.testing.assert_close(law.log_probs(), at_t[revealed], rtol=0, atol=1e-12)
    torch.testing.assert_close(other.log_probs(), at_s[masks], rtol=0, atol=1e-12)
    assert tv(at_t[masks].exp(), at_s[masks].exp()).max() > 1e-3


def test_rollout_needs_a_teacher():
    """Without a teacher there is nothing to roll out."""
    x0, time = torch.zeros(1, 2, dtype=torch.long), torch.ones(1, dtype=torch.float64)
    with pytest.raises(ValueError, match="teacher"):
        Rollout(masked(VOCAB))(x0, 0 * time, time, seeded(0, batch=1))
