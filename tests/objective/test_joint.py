"""The loss of the joint head against the probability of everything that a hop reveals, by enumeration."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from cdlm.methods import METHODS
from cdlm.model.denoiser import Denoiser
from cdlm.objective.loss import student_hidden, weighted_divergence
from cdlm.process import masked
from cdlm.rng import seeded

from ..sample.truth import tiny

V, L = 3, 3
PROCESS = masked(V)


def network(layers: int = 1) -> Denoiser:
    """Random, and far from certain of anything."""
    net = tiny(PROCESS, V, joint_layers=layers).requires_grad_(False)
    for weight in (net.dit.output_layer.linear.weight, net.dit.output_layer.linear.bias):
        weight.mul_(0.1)
    return net


def chain_rule(net: Denoiser, x_t: Tensor, x_s: Tensor, alpha: float) -> float:
    """log p(x_R | x_t), one token after the other, each by a pass of its own over a sequence that ends there."""
    hidden = net.features(x_t[None], torch.tensor([alpha], dtype=torch.float64))
    revealed = [i for i in range(len(x_t)) if x_t[i] == V and x_s[i] < V]
    total = 0.0
    for count, place in enumerate(revealed, 1):
        shown = torch.zeros(1, len(x_t), dtype=torch.bool)
        shown[0, revealed[:count]] = True
        rows = net.condition(hidden, x_s[None].clamp(max=V - 1), shown)
        total += float(net.head(rows[0, place])[x_s[place]])
    return total


@pytest.mark.parametrize("layers", [1, 2])
def test_the_conditionals_make_one_distribution(layers: int) -> None:
    """Over all tokens that a hop may reveal, whatever else is visible."""
    net = network(layers)
    for x_t in (torch.tensor([V, V, V]), torch.tensor([V, 1, V])):
        masks = (x_t == V).nonzero()[:, 0]
        total = 0.0
        for tokens in itertools.product(range(V), repeat=len(masks)):
            x_s = x_t.clone()
            x_s[masks] = torch.tensor(tokens)
            total += math.exp(chain_rule(net, x_t, x_s, 0.4))
        assert total == pytest.approx(1, abs=1e-9)


def test_the_loss_is_minus_the_log_likelihood_of_what_hops_reveal() -> None:
    net = network()
    x0 = seeded(0, "x0", batch=24).integers(L, V)
    for term in METHODS["joint"](PROCESS, 10, most=4).terms:
        pair = term.draw(x0, 0.0, torch.arange(24), 24, seeded(1, batch=24), None)
        truth = [
            -chain_rule(net, pair.x_t[row], pair.x_s[row], float(pair.alpha_t[row])) / float(pair.t[row] - pair.s[row])
            for row in range(24)
        ]
        hidden = student_hidden(term, pair, net, net.features(pair.student_input, pair.alpha_t))
        found = torch.zeros(24, dtype=torch.float64)
        for part in term.summands(pair, chunk=7):
            found.index_add_(0, part.index // L, weighted_divergence(part, net, hidden).double())
        assert found.tolist() == pytest.approx(truth, rel=1e-9)


def test_networks_without_a_head_are_refused_by_name() -> None:
    net = tiny(PROCESS, V)
    with pytest.raises(ValueError, match="no joint head; set joint_layers"):
        METHODS["joint"](PROCESS, 10).loss(net, None, torch.zeros(2, L, dtype=torch.long), 0, seeded(0, batch=2))
    with pytest.raises(ValueError, match="most=1"):
        METHODS["joint"](PROCESS, 10, most=1)
    assert [term.name for term in METHODS["joint"](PROCESS, 10, most=1, dilated=0.0).terms] == ["1 steps"]
