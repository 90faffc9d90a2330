"""Proposition D.3: hops compose, C_{t-2d<-t} = C_{t-d<-t} o C_{t-2d<-t-d}."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm.rng import seeded

from .enumeration import KINDS, VOCAB, apply, bridged, p_value, predictor, tv, world


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(end=st.integers(20, 200), step=st.integers(1, 100), noise=st.sampled_from(["log-linear", "cosine"]))
def test_operators_compose(kind, end, step, noise):
    """One hop of 2d is two hops of d, on the operators and on what they do to a predictor."""
    w, t = world(kind, noise=noise), end / 200
    d = t * step / 201
    first, second = bridged(w, t - d, t), bridged(w, t - 2 * d, t - d)
    torch.testing.assert_close(first @ second, w.reverse(t - 2 * d, t), rtol=0, atol=1e-8)
    torch.testing.assert_close(first @ second, bridged(w, t - 2 * d, t), rtol=0, atol=1e-8)
    g = predictor(w, step)
    direct = apply(bridged(w, t - 2 * d, t), g)
    torch.testing.assert_close(apply(first, apply(second, g)), direct, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", ["uniform", "unigram", "mixture"])
def test_order_of_composition(kind):
    """The later hop acts outside: the other order is another operator."""
    w = world(kind)
    first, second = bridged(w, 0.4, 0.8), bridged(w, 0.1, 0.4)
    direct = w.reverse(0.1, 0.8)
    assert tv(second @ first, direct).max() > 1e-2 > tv(first @ second, direct).max()


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_hops_compose(kind):
    """Process.bridge twice, t -> s -> u, has the law of one hop t -> u, and not that of t -> s."""
    w, b, l = world(kind, l=1), 1000, 200
    u, s, t = 0.2, 0.5, 0.9
    x0 = torch.arange(l).remainder(VOCAB).expand(b, l)
    rng = seeded(17, kind, batch=b)
    x_t = w.process.corrupt(x0, t, rng("x_t"))
    x_s = w.process.bridge(x0, x_t, s, t, rng("x_s"))
    x_u = w.process.bridge(x0, x_s, u, s, rng("x_u"))
    k = len(w.pi)
    counts = (x0 * k * k + x_u * k + x_t).flatten().bincount(minlength=VOCAB * k * k).view(VOCAB, -1)
    assert p_value(counts, w.paths(u, t).flatten(1)) > 1e-6
    assert p_value(counts, w.paths(s, t).flatten(1)) < 1e-6
