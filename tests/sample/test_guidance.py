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


def by_hand(net: Table, process: Process, guidance: float, hot: float, cold: float, weak: float | None = None):
    """f^((1 + g) / T) / b^(g / T), normalised, where T = cold + (hot - cold) t, and g = weak + (guidance - weak) t."""
    guided = guidance or weak
    blank = net.law(torch.full((1, L), process.vocab), 1.0)[0].mean(0) if guided else torch.ones(V)

    def law(x: torch.Tensor, t: float) -> torch.Tensor:
        heat = cold + (hot - cold) * t
        g = guidance if weak is None else weak + (guidance - weak) * t
        found = (net.law(x, t) ** (1 + g) / blank**g) ** (1 / heat)
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
        ({"guidance": 1.5, "guidance_end": 0.0}, (1.5, 1.0, 1.0, 0.0)),
        ({"guidance_end": 1.2, "temperature": 0.8}, (0.0, 0.8, 0.8, 1.2)),
    ],
)
def test_texts_follow_the_law_written_out(settings: dict[str, float], numbers: tuple[float, ...]) -> None:
    process = masked(V)
    net, grid = Table(process), torch.linspace(1, 0, STEPS + 1, dtype=torch.float64)
    drawn = draw(net, process, **settings)
    sharp = composed(noise(process), process, L, ancestor(process, by_hand(net, process, *numbers)), grid)
    assert agrees(drawn, sharp, process.states)
    plain = composed(noise(process), process, L, ancestor(process, net.law), grid)
    assert not agrees(drawn, plain, process.states)
    if len(numbers) == 4:
        constant = by_hand(net, process, *numbers[:3])
        assert not agrees(
            drawn, composed(noise(process), process, L, ancestor(process, constant), grid), process.states
        )


@pytest.mark.parametrize("sampler", ["plain", "corrector", "first-hitting", "confidence", "entropy-bound"])
def test_every_sampler_reads_the_ramp(sampler: str) -> None:
    """From no guidance to no guidance is none; a ramp changes samples."""
    process = masked(V)
    orders = {"first-hitting": "first-hitting", "confidence": "margin", "entropy-bound": "entropy-bound"}
    given = {"order": orders[sampler], "steps": None} if sampler in orders else {}
    given |= {"corrector": "cap", "eta": 0.5} if sampler == "corrector" else {}
    net = Table(process)
    net = net if sampler != "plain" else net.plain  # type: ignore[assignment]
    off, flat, ramp = (
        draw(net, process, sampler=sampler, **given, **more)
        for more in ({}, {"guidance_end": 0.0}, {"guidance_end": 3.0})
    )
    assert torch.equal(off, flat)
    assert not torch.equal(off, ramp)


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
