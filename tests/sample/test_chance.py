"""What a watched sampler tells: the probability of every token when it was drawn, against the network asked again."""

import dataclasses
import itertools

import pytest
import torch

from cdlm.model.config import SIZES
from cdlm.model.denoiser import Denoiser
from cdlm.process import Process, masked, uniform
from cdlm.rng import seeded
from cdlm.sample.autoregressive import autoregressive
from cdlm.sample.generate import generate, timesteps
from cdlm.sample.plan import Drawing
from cdlm.sample.settings import Sampling

V, L, B = 13, 12, 3


def lively(process: Process | None) -> Denoiser:
    torch.manual_seed(0)
    shape = dataclasses.replace(SIZES["tiny"], causal=process is None, time_conditioning=process is not None)
    net = Denoiser(shape, process, V).eval().requires_grad_(False)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return net


def followed(process: Process, **how: object):
    """Each state with the one before it."""
    net, rng = lively(process), seeded(1, batch=B)
    x = process.start(L, rng("start"))
    states = list(generate(net, process, x, Sampling(**how), rng, watched=True))
    return net, list(itertools.pairwise(states))


@pytest.mark.parametrize(
    "how", [{}, {"order": "dilated"}, {"order": "margin"}, {"temperature": 0.5}, {"tail": "argmax"}]
)
def test_masked_tokens_have_the_chance_the_network_gave_them(how: dict[str, object]) -> None:
    net, pairs = followed(masked(V), steps=4, **how)
    grid = timesteps(Sampling(steps=4, **how))
    assert pairs[0][0].chance.isnan().all()
    for (before, after), t in zip(pairs, grid, strict=False):
        law = net(before.x, float(t)).exp()
        drawn = (before.x == V) & (after.x != V)
        truth = law.gather(-1, after.x.clamp(max=V - 1)[..., None])[..., 0]
        assert torch.allclose(after.chance[drawn], truth[drawn].float(), atol=1e-5)
        assert torch.equal(after.chance[before.x != V], before.chance[before.x != V])  # settled tokens keep theirs
    assert not pairs[-1][1].chance.isnan().any()


def test_uniform_tokens_from_the_prior_have_no_chance() -> None:
    net, pairs = followed(uniform(V), steps=6)
    seen = 0
    for (before, after), t in zip(pairs, timesteps(Sampling(steps=6)), strict=False):
        law = net(before.x, float(t)).exp()
        moved = (before.x != after.x) & ~after.chance.isnan()
        truth = law.gather(-1, after.x[..., None])[..., 0]
        assert torch.allclose(after.chance[moved], truth[moved].float(), atol=1e-5)
        seen += int(moved.sum())
    assert seen > L


def test_a_mask_that_comes_back_has_none() -> None:
    _, pairs = followed(masked(V), steps=8, corrector="rescale", eta=0.9)
    assert any(bool(((before.x != V) & (after.x == V)).any()) for before, after in pairs)
    for _, after in pairs:
        assert torch.equal(after.chance.isnan(), after.x == V)


def test_next_tokens() -> None:
    net, start = lively(None), torch.tensor([[1, 2], [3, 4]])
    *_, last = autoregressive(net, start, L, seeded(2, batch=2), Drawing(watched=True))
    law = net(last.x).exp()
    truth = law[:, 1:-1].gather(-1, last.x[:, 2:, None])[..., 0]
    assert torch.allclose(last.chance[:, 2:], truth.float(), atol=1e-5)
    assert last.chance[:, :2].isnan().all()


def test_nothing_is_kept_unless_asked_for() -> None:
    process, rng = masked(V), seeded(1, batch=B)
    x = process.start(L, rng("start"))
    assert all(state.token_probs is None for state in generate(lively(process), process, x, Sampling(steps=2), rng))
