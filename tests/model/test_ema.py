"""Averages of weights."""

import pytest
import torch

from cdlm.model.ema import frozen_copy, update
from cdlm.process import masked


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.999, 1.0])
def test_update_is_a_convex_combination(lam, tiny):
    online, average = tiny(masked(7), seed=1), tiny(masked(7), seed=2)
    old = [[weight.detach().clone() for weight in net.parameters()] for net in (average, online)]
    update(average, online, lam)
    for a, w, now, source in zip(*old, average.parameters(), online.parameters(), strict=True):
        assert torch.allclose(now, lam * a + (1 - lam) * w, atol=1e-6)
        assert torch.equal(source, w)


def test_the_ends_are_exact(tiny):
    online, average = tiny(masked(7), seed=1), tiny(masked(7), seed=2)
    before = [a.detach().clone() for a in average.parameters()]
    update(average, online, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, average.parameters(), strict=True))
    update(average, online, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(online.parameters(), average.parameters(), strict=True))


def test_a_copy_stays_a_copy_when_the_student_moves(tiny):
    online = tiny(masked(7))
    average = frozen_copy(online)
    update(average, online, 0.0)
    with torch.no_grad():
        online.backbone.vocab_embed.embedding.add_(1)
    assert not torch.equal(online.backbone.vocab_embed.embedding, average.backbone.vocab_embed.embedding)


def test_repeated_updates_forget_geometrically(tiny):
    online, average = tiny(masked(7), seed=1).double(), tiny(masked(7), seed=2).double()
    start = average.backbone.vocab_embed.embedding.detach().clone()
    for _ in range(5):
        update(average, online, 0.9)
    end = online.backbone.vocab_embed.embedding
    assert torch.allclose(average.backbone.vocab_embed.embedding, end + 0.9**5 * (start - end), atol=1e-12)


def test_a_frozen_copy_neither_trains_nor_drops(tiny):
    online = tiny(masked(7), dropout=0.5).train()
    copy = frozen_copy(online)
    assert not copy.training
    assert not any(weight.requires_grad for weight in copy.parameters())
    assert online.training
    assert all(weight.requires_grad for weight in online.parameters())
    x = torch.full((1, 5), 7)
    assert torch.equal(copy(x, 0.5), copy(x, 0.5))
    assert torch.equal(copy(x, 0.5), online.eval()(x, 0.5))


def test_updating_leaves_no_graph(tiny):
    online = tiny(masked(7))
    average = frozen_copy(online)
    update(average, online, 0.5)
    assert not any(weight.requires_grad or weight.grad_fn for weight in average.parameters())
