"""Definitions 3.2 and 3.3: the consistency operator, Eq. (3), and global consistency, Eq. (4), with its boundary."""

import pytest
import torch

from cdlm.objective import Bridge, Network
from cdlm.objective.target import Prediction
from cdlm.rng import seeded

from .enumeration import KINDS, VOCAB, apply, bridged, index, p_value, predictor, tiny, tv, world

GRID = (0.1, 0.35, 0.6, 0.8, 1.0)


@pytest.mark.parametrize("noise", ["log-linear", "cosine"])
@pytest.mark.parametrize("kind", KINDS)
def test_operator_through_bridges(kind, noise):
    """E over x_0 | x_t and the bridge equals E over p(x_s | x_t) read off the joint law of (x_s, x_t)."""
    w = world(kind, noise=noise)
    for seed, (s, t) in enumerate([(0.0, 0.35), (0.1, 0.6), (0.35, 0.8), (0.6, 1.0)]):
        torch.testing.assert_close(bridged(w, s, t), w.reverse(s, t), rtol=0, atol=1e-10)
        g = predictor(w, seed)
        image = apply(bridged(w, s, t), g)
        torch.testing.assert_close(image, apply(w.reverse(s, t), g), rtol=0, atol=1e-10)
        torch.testing.assert_close(image.sum(-1), torch.ones(w.states.shape).double(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_coupling_draws_the_operator(kind):
    """Bridge(x_0, s, t) draws (x_s, x_t) of whole sequences from q(x_s, x_t | x_0), positions independent."""
    w, s, t, b = world(kind), 0.3, 0.7, 100_000
    k, n = len(w.pi), len(w.states)
    rng = seeded(7, kind, batch=b)
    for x0 in ([0, 2], [1, 1]):
        time = torch.ones(b, dtype=torch.float64)
        pair = Bridge(w.process)(torch.tensor([x0]).expand(b, 2), s * time, t * time, rng(*x0))
        counts = (index(pair.x_s, k) * n + index(pair.x_t, k)).bincount(minlength=n * n)
        law = torch.kron(*(w.paths(s, t)[token].reshape(-1) for token in x0))
        law = law.view(k, k, k, k).transpose(1, 2).reshape(-1)
        assert p_value(counts, law) > 1e-6
        shifted = torch.kron(*(w.paths(s + 0.05, t)[token].reshape(-1) for token in x0))
        assert p_value(counts, shifted.view(k, k, k, k).transpose(1, 2).reshape(-1)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_boundary_is_exact(kind):
    """f(x_0, 0) = x_0 to the last bit, whatever the weights; just above 0 only where the prior cannot have been."""
    w = world(kind)
    clean = w.states[(w.states < VOCAB).all(1)]
    one_hot = torch.eye(VOCAB, dtype=torch.float64)[clean]
    for seed in range(3):
        net = tiny(w.process, seed, time_conditioning=kind != "masked")
        assert torch.equal(net(clean, 0.0).exp(), one_hot)
        assert torch.equal(net(clean, 1e-9).exp(), one_hot) == (kind == "masked")


def test_carry_over():
    """On the masked process f is a point mass at every visible token, at every time, and a full law at every mask."""
    w = world("masked")
    net = tiny(w.process)
    for t in GRID:
        f = net(w.states, t).exp()
        assert torch.equal(f[w.known], w.tokens[w.known])
        assert (f[~w.known] > 1e-4).all()


@pytest.mark.parametrize("kind", KINDS)
def test_target_is_the_bounded_denoiser(kind):
    """The target rows of Eq. (8) are f(x_s, s) with carry-over and boundary: s = 0 in some rows, s > 0 in others."""
    w, l = world(kind), 5
    net = tiny(w.process, time_conditioning=kind != "masked")
    s, t = torch.tensor([[0.0, 0.2, 0.5, 0.0, 0.4], [0.3, 0.6, 0.9, 0.7, 1.0]], dtype=torch.float64)
    x0 = seeded(3, "data", batch=5).integers(l, VOCAB)
    pair = Bridge(w.process)(x0, s, t, seeded(3, kind, batch=5))
    truth = net(pair.x_s, s).exp().flatten(0, 1)
    seen = []
    for at, law in Network()(pair, net):
        dense = isinstance(law, Prediction)
        rows = law.log_probs().exp() if dense else torch.eye(VOCAB, dtype=torch.float64)[law]
        torch.testing.assert_close(rows, truth[at], rtol=0, atol=1e-12)
        seen.append(at)
    wanted = (w.pi[pair.x_t] > 0).flatten().nonzero()[:, 0]
    assert torch.equal(torch.cat(seen).sort().values, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_boundary_edge_lands_on_the_posterior(kind):
    """C_{0<-t} f = p(x_0^i | x_t) for every network, because f(x_0, 0) = x_0."""
    w = world(kind)
    net = tiny(w.process, 4, time_conditioning=True)
    clean = (w.states < VOCAB).all(1)
    f = torch.zeros(*w.states.shape, VOCAB, dtype=torch.float64)
    f[clean] = net(w.states[clean], 0.0).exp().detach()
    for t in GRID:
        torch.testing.assert_close(apply(bridged(w, 0.0, t), f), w.bayes(t), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_global_consistency(kind):
    """Posterior marginals meet the boundary and Eq. (4) on every pair of a grid; a random predictor does not."""
    w = world(kind)
    clean = (w.states < VOCAB).all(1)
    assert tv(w.bayes(1e-9)[clean], w.tokens[clean]).max() < 1e-6
    for i, t in enumerate(GRID):
        for s in GRID[:i]:
            torch.testing.assert_close(apply(bridged(w, s, t), w.bayes(s)), w.bayes(t), rtol=0, atol=1e-10)
            g = predictor(w, 11, carry=True)
            gap = tv(apply(bridged(w, s, t), g), g)[~w.known]
            assert gap.max() > 0.05
