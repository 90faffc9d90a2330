"""Entropy by hand, and the NELBO of a tiny model against quadrature over time and enumeration over corruptions."""

import dataclasses
import math

import pytest
import torch

from cdlm.metrics.diversity import entropy
from cdlm.metrics.likelihood import nelbo
from cdlm.model.config import SIZES
from cdlm.model.denoiser import Denoiser
from cdlm.process import masked
from cdlm.process.exact import listed


def test_entropy_of_known_sequences() -> None:
    assert float(entropy(torch.arange(1024)[None])) == pytest.approx(6.931, abs=1e-3)  # log 1024
    assert float(entropy(torch.zeros(1, 50, dtype=torch.long))) == 0
    two = entropy(torch.tensor([[1, 1, 2, 2, 2, 2], [7, 8, 9, 7, 8, 9]]))
    assert two.tolist() == pytest.approx([-(1 / 3 * math.log(1 / 3) + 2 / 3 * math.log(2 / 3)), math.log(3)])


def random_net(**changes: object) -> Denoiser:
    shape = dataclasses.replace(SIZES["tiny"], hidden_size=16, num_layers=1, cond_dim=8, **changes)
    net = Denoiser(shape, None if shape.causal else masked(3), vocab=3).double().eval()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return net


def test_nelbo_is_the_integral_over_times_of_the_expected_loss() -> None:
    """Every mask pattern of a sequence of 3, weighted by its probability at each time, integrated over t."""
    net, x0 = random_net(), torch.tensor([[0, 2, 1]])
    with torch.no_grad():
        law = net(torch.where(listed(2, 3).bool(), 3, x0), 0.5)  # all eight patterns; the network is not told the time
    masks = listed(2, 3).double()
    surprise = -(law.gather(-1, x0.expand(8, 3)[..., None])[..., 0] * masks).sum(-1)
    t = torch.linspace(1e-3, 1, 20_001, dtype=torch.float64)[:, None]
    keep = 1 - (1 - 1e-3) * t
    weight = ((1 - keep) ** masks.sum(-1) * keep ** (3 - masks.sum(-1))) / t
    truth = float(torch.trapezoid((weight * surprise).sum(-1), t[:, 0]) / 3)
    found = nelbo(net, [(number, x0.expand(4096, 3)) for number in range(8)], seed=1)
    assert found == pytest.approx(truth, rel=0.02)


def test_nelbo_of_an_autoregressive_model_is_exact() -> None:
    net, x0 = random_net(causal=True), torch.tensor([[0, 2, 1, 1], [2, 0, 0, 1]])
    with torch.no_grad():
        law = net(x0[:, :-1])
    truth = float(-law.gather(-1, x0[:, 1:, None]).mean())
    assert nelbo(net, [(0, x0)]) == pytest.approx(truth)


def test_nelbo_does_not_depend_on_how_a_batch_is_cut() -> None:
    net, x0 = random_net(), torch.randint(3, (24, 6), generator=torch.Generator().manual_seed(0))
    assert nelbo(net, [(0, x0)], rows=24) == pytest.approx(nelbo(net, [(0, x0)], rows=5), abs=1e-12)
