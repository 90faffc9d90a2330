"""The bound of the joint sampler, against the product of its conditionals over every order and text of a tiny space."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cdlm.metrics.sampler_likelihood import sampler_nats
from cdlm.model.denoiser import Denoiser
from cdlm.rng import seeded
from cdlm.sample.settings import Settings

from ..sample.test_joint import MASK, PROCESS, L, V, blank, choose, hop, network
from ..sample.truth import index, tiny

EVERY = torch.tensor(list(itertools.product(range(V), repeat=L)))
SHAPING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "temperature_end": 1.5},
    {"guidance": 0.5},
    {"presence_penalty": 1.5, "log_frequency_penalty": 1.0},
]


def pattern_nats(
    net: Denoiser, x0: Tensor, pattern: tuple[int, ...], steps: int, settings: Settings, given: int | None = None
) -> float:
    """-log of the probability that the sampler draws x0 with these positions in these steps."""
    x, nats = blank(1)[0], 0.0
    if given is not None:
        x[given] = x0[given]
    prompt = x != MASK
    for number in range(steps):
        places = [i for i in range(L) if pattern[i] == number and i != given]
        after = x.clone()
        after[places] = x0[places]
        law = hop(net, x, places, 1 - number / steps, settings, prompt)
        nats -= math.log(law[index(after[None], V + 1)])
        x = after
    assert not bool((x == MASK).any())
    return nats


@pytest.mark.parametrize("given", SHAPING, ids=str)
@pytest.mark.parametrize("layers", [1, 2])
def test_one_step_is_the_likelihood(layers: int, given: dict[str, Any]) -> None:
    """With a single step nothing is random, and the likelihoods of all texts add up to one."""
    net, settings = network(layers), choose(steps=1, **given)
    found = sampler_nats(net, PROCESS, EVERY, settings, seeded(0, batch=len(EVERY)))
    assert found.tolist() == pytest.approx([pattern_nats(net, x0, (0,) * L, 1, settings) for x0 in EVERY], rel=1e-9)
    assert float((-found).exp().sum()) == pytest.approx(1, abs=1e-9)
    factorised = choose(steps=1, sampler="ancestral", **given)
    other = sampler_nats(net, PROCESS, EVERY, factorised, seeded(0, batch=len(EVERY)))
    assert float((other - found).abs().max()) > 0.01


@pytest.mark.parametrize("given", SHAPING, ids=str)
def test_two_steps_are_the_mean_over_orders(given: dict[str, Any]) -> None:
    net, n, settings = network(), 600, choose(steps=2, **given)
    x0, patterns = EVERY[5], list(itertools.product(range(2), repeat=L))
    found = sampler_nats(net, PROCESS, x0.expand(n, -1), settings, seeded(1, batch=n), rows=250)
    nats = torch.tensor([pattern_nats(net, x0, pattern, 2, settings) for pattern in patterns], dtype=torch.float64)
    assert float((found[:, None] - nats).abs().min(-1).values.max()) < 1e-9
    assert abs(float(found.mean() - nats.mean())) < 5 * float(found.std()) / n**0.5
    assert float(nats.mean()) >= -float((-nats).logsumexp(0)) + math.log(len(nats))


def test_given_positions_are_context() -> None:
    net, settings = network(), choose(steps=1, presence_penalty=1.5)
    given = torch.tensor([False, True, False]).expand_as(EVERY)
    found = sampler_nats(net, PROCESS, EVERY, settings, seeded(0, batch=len(EVERY)), given=given)
    truth = [pattern_nats(net, x0, (0,) * L, 1, settings, given=1) for x0 in EVERY]
    assert found.tolist() == pytest.approx(truth, rel=1e-9)


def test_one_token_per_step_is_the_factorised_sampler() -> None:
    net, x0 = network(), EVERY
    one, other = (
        sampler_nats(net, PROCESS, x0, choose(steps=L, order="dilated", sampler=sampler), seeded(0, batch=len(x0)))
        for sampler in ("joint", "ancestral")
    )
    assert one.tolist() == pytest.approx(other.tolist(), rel=1e-12)


def test_a_head_that_has_not_learned_changes_nothing() -> None:
    net = network()
    torch.nn.init.zeros_(net.joint_head.output.weight)
    one, other = (
        sampler_nats(net, PROCESS, EVERY, choose(steps=2, sampler=sampler), seeded(0, batch=len(EVERY)))
        for sampler in ("joint", "ancestral")
    )
    assert one.tolist() == pytest.approx(other.tolist(), rel=1e-12)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a model with a joint head"):
        sampler_nats(tiny(PROCESS, V), PROCESS, EVERY, choose(steps=1), seeded(0, batch=len(EVERY)))
