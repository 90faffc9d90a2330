"""One token after another: the cache of keys and values changes nothing, and the law is the chain rule."""

import itertools

import pytest
import torch
from torch import Tensor

from cdlm.rng import Rng, seeded
from cdlm.sample.draw import State
from cdlm.sample.generate import generate
from cdlm.sample.settings import resolve

from .truth import V, agrees, index, point, sequences, text, tiny

VOCAB = 7


def autoregressive(net, prompts: Tensor, length: int, rng: Rng, **settings) -> list[State]:
    """All states of a continuation of the prompts to `length` tokens."""
    x = torch.nn.functional.pad(prompts, (0, length - prompts.shape[1]))
    given = (torch.arange(length) < prompts.shape[1]).expand(len(x), -1)
    return list(generate(net, None, x, resolve(settings, None), rng, given=given))


def looped(net, x: Tensor, length: int, rng: Rng, temperature: float = 1.0) -> Tensor:
    """The whole network over the whole text for every token; draws by a cumulative sum, one text after the other."""
    u = rng("next").uniform(length)
    for position in range(x.shape[1], length):
        law = (net(x)[:, -1].detach() / temperature).softmax(-1)
        tokens = [int((row.cumsum(0) <= u[i, position]).sum()) for i, row in enumerate(law)]
        x = torch.cat([x, torch.tensor(tokens)[:, None]], 1)
    return x


def chained(net, prompt: Tensor, length: int, temperature: float = 1.0) -> Tensor:
    """The law over all texts of a length that begin with a prompt."""
    law = point(prompt, V)
    for done in range(len(prompt), length):
        with torch.no_grad():
            step = (net(sequences(V, done))[:, -1] / temperature).softmax(-1)
        law = (law[:, None] * step).flatten()
    return law


@pytest.mark.parametrize("absolute", [0, 16])
@pytest.mark.parametrize(("prompt", "length"), [(1, 4), (1, 16), (2, 12), (5, 16), (7, 8)])
def test_the_cache_changes_nothing(prompt: int, length: int, absolute: int) -> None:
    net, rng = tiny(None, VOCAB, position_embeddings=absolute), seeded(2, batch=12)
    x = rng("prompt").integers(prompt, VOCAB)
    states = autoregressive(net, x, length, rng)
    truth = looped(net, x, length, rng)
    assert torch.equal(states[-1].x, truth)
    for done, state in enumerate(states):
        assert torch.equal(state.x, truth[:, : prompt + done])
        assert (state.step, state.num_steps, state.nfe) == (done, length - prompt, [done] * 12)
    assert len(truth.unique(dim=0)) > 6


def test_a_shape_and_single_precision() -> None:
    net, rng = tiny(None, VOCAB), seeded(2, batch=12)
    x = rng("prompt").integers(2, VOCAB)
    assert torch.equal(text(autoregressive(net, x, 9, rng, temperature=0.7)), looped(net, x, 9, rng, 0.7))
    assert torch.equal(text(autoregressive(net, x, 9, rng, precision="fp32")), looped(net, x, 9, rng))
    greedy = text(autoregressive(net, x, 9, rng, top_k=1))
    for position in range(2, 9):
        assert torch.equal(greedy[:, position], net(greedy[:, :position])[:, -1].argmax(-1))


@pytest.mark.parametrize("precision", ["fp64", "naive-fp32"])
def test_texts_follow_the_chain_rule(precision: str) -> None:
    """Three tokens after one; the race over the vocabulary draws from the same law where tokens are few."""
    net, n, prompt = tiny(None, V), 10_000, torch.tensor([2])
    drawn = text(autoregressive(net, prompt.expand(n, 1), 4, seeded(0, batch=n), precision=precision))
    assert agrees(drawn, chained(net, prompt, 4), V)
    other = torch.tensor([1])
    shifted = drawn.clone()
    shifted[:, 0] = 1
    assert not agrees(shifted, chained(net, other, 4), V)


def test_a_longer_prompt_follows_the_chain_rule_with_a_temperature() -> None:
    net, n, prompt = tiny(None, V), 10_000, torch.tensor([0, 1])
    drawn = text(autoregressive(net, prompt.expand(n, 2), 4, seeded(0, batch=n), temperature=1.8))
    law = chained(net, prompt, 4, 1.8)
    assert agrees(drawn, law, V)
    assert not agrees(drawn, chained(net, prompt, 4), V)
    assert int(index(prompt, V)) == int((law.view(9, 9).sum(1) > 0).nonzero()[0, 0])


def test_naive_draws_by_the_race() -> None:
    """Other uniforms, other texts; again and again the same."""
    net, rng = tiny(None, VOCAB), seeded(2, batch=12)
    x = rng("prompt").integers(1, VOCAB)
    first, second = (text(autoregressive(net, x, 14, rng, precision="naive-fp32")) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, text(autoregressive(net, x, 14, rng)))


def test_a_text_that_is_long_enough_is_left_alone() -> None:
    x = torch.tensor([[1, 2, 3]])
    states = autoregressive(tiny(None, VOCAB), x, 3, seeded(0, batch=1))
    assert [state.x.tolist() for state in states] == [x.tolist()]


def test_only_the_past_is_seen() -> None:
    """Texts that share a prefix share the law of what follows it, whatever comes later."""
    net, n = tiny(None, V), 4
    for a, b in itertools.pairwise(sequences(V, 3)[:n]):
        same = int((a == b).long().cumprod(0).sum())
        with torch.no_grad():
            first, second = net(a[None])[0], net(b[None])[0]
        assert torch.allclose(first[:same], second[:same], atol=1e-12)
        assert not torch.allclose(first[same:], second[same:], atol=1e-3)


def test_without_a_prompt_the_first_token_is_given() -> None:
    net, x = tiny(None, VOCAB), torch.tensor([[3, 0, 0, 0]])
    given = torch.arange(4)[None] == 0
    truth = text(generate(net, None, x, resolve({}, None), seeded(0, batch=1), given=given))
    assert torch.equal(text(generate(net, None, x, resolve({}, None), seeded(0, batch=1))), truth)
