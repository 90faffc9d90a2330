"""What a watched sampler tells: the probability of every token when it was drawn, against the network asked again."""

import dataclasses
import itertools

import pytest
import torch

from cdlm.model.config import SIZES
from cdlm.model.denoiser import Denoiser
from cdlm.process import Process, masked, uniform
from cdlm.rng import seeded
from cdlm.sample.generate import generate
from cdlm.sample.settings import resolve
from cdlm.sample.timesteps import timesteps

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
    states = list(generate(net, process, x, resolve(how, process), rng, watch=True))
    return net, list(itertools.pairwise(states))


@pytest.mark.parametrize(
    "how", [{}, {"order": "dilated"}, {"order": "margin"}, {"temperature": 0.5}, {"final_step": "argmax"}]
)
def test_masked_tokens_have_the_chance_the_network_gave_them(how: dict[str, object]) -> None:
    net, pairs = followed(masked(V), steps=4, **how)
    grid = timesteps(resolve({"steps": 4, **how}))
    assert pairs[0][0].token_probs.isnan().all()
    for (before, after), t in zip(pairs, grid, strict=False):
        law = net(before.x, float(t)).exp()
        drawn = (before.x == V) & (after.x != V)
        truth = law.gather(-1, after.x.clamp(max=V - 1)[..., None])[..., 0]
        assert torch.allclose(after.token_probs[drawn], truth[drawn].float(), atol=1e-5)
        assert torch.equal(
            after.token_probs[before.x != V], before.token_probs[before.x != V]
        )  # settled tokens keep theirs
    assert not pairs[-1][1].token_probs.isnan().any()


def test_uniform_tokens_from_the_prior_have_no_chance() -> None:
    net, pairs = followed(uniform(V), steps=6)
    seen = 0
    for (before, after), t in zip(pairs, timesteps(resolve({"steps": 6})), strict=False):
        law = net(before.x, float(t)).exp()
        moved = (before.x != after.x) & ~after.token_probs.isnan()
        truth = law.gather(-1, after.x[..., None])[..., 0]
        assert torch.allclose(after.token_probs[moved], truth[moved].float(), atol=1e-5)
        seen += int(moved.sum())
    assert seen > L


def test_a_mask_that_comes_back_has_none() -> None:
    _, pairs = followed(masked(V), steps=8, corrector="rescale", eta=0.9)
    assert any(bool(((before.x != V) & (after.x == V)).any()) for before, after in pairs)
    for _, after in pairs:
        assert torch.equal(after.token_probs.isnan(), after.x == V)


def test_next_tokens() -> None:
    net, start = lively(None), torch.tensor([[1, 2], [3, 4]])
    x = torch.nn.functional.pad(start, (0, L - 2))
    *_, last = generate(
        net, None, x, resolve({}, None), seeded(2, batch=2), given=(torch.arange(L) < 2).expand(2, -1), watch=True
    )
    law = net(last.x).exp()
    truth = law[:, 1:-1].gather(-1, last.x[:, 2:, None])[..., 0]
    assert torch.allclose(last.token_probs[:, 2:], truth.float(), atol=1e-5)
    assert last.token_probs[:, :2].isnan().all()


def test_nothing_is_kept_unless_asked_for() -> None:
    process, rng = masked(V), seeded(1, batch=B)
    x = process.start(L, rng("start"))
    assert all(state.token_probs is None for state in generate(lively(process), process, x, resolve({"steps": 2}), rng))
