"""Guidance and a temperature that changes with t change the law as they say, at every time, and nothing else."""

import pytest
import torch

from cdlm.process import Process, masked, uniform
from cdlm.rng import seeded
from cdlm.sample.draw import unconditional_log_probs
from cdlm.sample.generate import generate
from cdlm.sample.settings import resolve

from .truth import L, Table, V, agrees, ancestor, composed, noise, sequences, text, tiny

N, STEPS = 16_000, 3


def by_hand(net: Table, process: Process, guidance: float, hot: float, cold: float):
    """f^((1 + g) / T) / b^(g / T), normalised, where T = cold + (hot - cold) t."""
    blank = net.law(torch.full((1, L), process.vocab), 1.0)[0].mean(0) if guidance else torch.ones(V)

    def law(x: torch.Tensor, t: float) -> torch.Tensor:
        heat = cold + (hot - cold) * t
        found = (net.law(x, t) ** (1 + guidance) / blank**guidance) ** (1 / heat)
        return found / found.sum(-1, keepdim=True)

    return law


def draw(net: Table, process: Process, **settings) -> torch.Tensor:
    rng = seeded(5, batch=N)
    x = process.start(L, rng("start"))
    return text(generate(net, process, x, resolve({"steps": STEPS, **settings}, process), rng))


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({"guidance": 0.7}, (0.7, 1.0, 1.0)),
        ({"guidance": 0.7, "temperature": 0.8}, (0.7, 0.8, 0.8)),
        ({"temperature_end": 0.3}, (0.0, 1.0, 0.3)),
        ({"temperature_end": 1.5, "temperature": 0.5}, (0.0, 0.5, 1.5)),
        ({"guidance": 0.4, "temperature_end": 0.5, "temperature": 1.2}, (0.4, 1.2, 0.5)),
    ],
)
def test_texts_follow_the_law_written_out(settings: dict[str, float], numbers: tuple[float, float, float]) -> None:
    process = masked(V)
    net, grid = Table(process), torch.linspace(1, 0, STEPS + 1, dtype=torch.float64)
    drawn = draw(net, process, **settings)
    sharp = composed(noise(process), process, L, ancestor(process, by_hand(net, process, *numbers)), grid)
    assert agrees(drawn, sharp, process.states)
    plain = composed(noise(process), process, L, ancestor(process, net.law), grid)
    assert not agrees(drawn, plain, process.states)


def test_cooling_without_masks() -> None:
    process = uniform(V)
    net, grid = Table(process), torch.linspace(1, 0, STEPS + 1, dtype=torch.float64)
    sharp = composed(noise(process), process, L, ancestor(process, by_hand(net, process, 0.0, 1.0, 0.4)), grid)
    assert agrees(draw(net, process, temperature_end=0.4), sharp, process.states)


def test_a_reveal_by_confidence_draws_from_the_same_law() -> None:
    """In one hop there is no order: every position is drawn at t = 1 from its own law."""
    process = masked(V)
    net = Table(process)
    rng = seeded(5, batch=N)
    asked = resolve(
        {"steps": 1, "order": "probability", "guidance": 0.7, "temperature_end": 0.5, "temperature": 0.8}, process
    )
    drawn = text(generate(net, process, process.start(L, rng), asked, rng))
    law = by_hand(net, process, 0.7, 0.8, 0.5)(torch.full((1, L), V), 1.0)[0]
    every = sequences(process.states, L)
    joint = torch.nn.functional.pad(law, (0, 1)).gather(-1, every.T).prod(0)
    assert agrees(drawn, joint, process.states)


def test_the_unconditional_prediction() -> None:
    """One position stands for all in a network without absolute positions, and it is the same law."""
    process = masked(7)
    net = tiny(process)
    assert net.position_invariant
    x = torch.full((3, 5), 7)
    every = net(x, 1.0)[0].exp().mean(0)
    assert torch.allclose(unconditional_log_probs(net, process, x).exp(), every)
    assert torch.allclose(unconditional_log_probs(net, process, torch.zeros_like(x)).exp(), every)
