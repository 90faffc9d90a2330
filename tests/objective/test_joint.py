"""The loss of the joint head against the probability of everything that a hop reveals, by enumeration."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from cdlm.methods import METHODS
from cdlm.metrics.likelihood import few_step_term, nelbo_estimates, repeated_nelbo
from cdlm.model.denoiser import Denoiser
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
        found = nelbo_estimates(net, x0, torch.arange(24), seeded(1, batch=24), 7, term)
        # the same draws, since the noise of a term is that of its name
        assert (found * L).tolist() == pytest.approx(truth, rel=1e-9)


def test_one_step_is_the_exact_likelihood() -> None:
    """With a single step nothing is random: the bound is the log-likelihood of the text."""
    net = network()
    every = torch.tensor(list(itertools.product(range(V), repeat=L)))
    found = repeated_nelbo(net, every, 2, 0, 64, few_step_term(net, 1, reduction="sequence"))
    alpha = float(PROCESS.noise.alpha(torch.ones(1, dtype=torch.float64)))
    truth = [-chain_rule(net, torch.full((L,), V), x, alpha) / L for x in every]
    assert found[:, 0].tolist() == pytest.approx(truth, rel=1e-9)
    assert torch.allclose(found[:, 0], found[:, 1], rtol=1e-12)
    assert float((-L * found[:, 0]).exp().sum()) == pytest.approx(1, abs=1e-9)
    factorised = repeated_nelbo(net, every, 1, 0, 64, few_step_term(net, 1))
    assert float((factorised - found[:, :1]).abs().max()) > 0.01


def test_one_token_per_step_is_the_trunk() -> None:
    net = network()
    x0 = seeded(0, "x0", batch=8).integers(L, V)
    one, other = (
        repeated_nelbo(net, x0, 4, 0, 8, few_step_term(net, L, "dilated", r)) for r in ("positions", "sequence")
    )
    assert torch.equal(one, other)


def test_a_head_that_has_not_learned_changes_nothing() -> None:
    net = network()
    torch.nn.init.zeros_(net.joint_head.output.weight)
    x0 = seeded(0, "x0", batch=8).integers(L, V)
    one, other = (
        repeated_nelbo(net, x0, 4, 0, 8, few_step_term(net, 1, "dilated", r)) for r in ("positions", "sequence")
    )
    assert torch.allclose(one, other, rtol=1e-12)


def test_networks_without_a_head_are_refused_by_name() -> None:
    net = tiny(PROCESS, V)
    with pytest.raises(ValueError, match="no joint head; set joint_layers"):
        METHODS["joint"](PROCESS, 10).loss(net, None, torch.zeros(2, L, dtype=torch.long), 0, seeded(0, batch=2))
    with pytest.raises(ValueError, match="most=1"):
        METHODS["joint"](PROCESS, 10, most=1)
    assert [term.name for term in METHODS["joint"](PROCESS, 10, most=1, dilated=0.0).terms] == ["1 steps"]
