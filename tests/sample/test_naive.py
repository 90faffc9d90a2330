"""The published sampler: in double precision the law of `ancestral`, in single precision sharper than it."""

import math

import pytest
import torch
from torch import Tensor

from cdlm.process import Process, bridge_law, masked, transition
from cdlm.rng import Rng, seeded
from cdlm.sample.ancestral import ancestral
from cdlm.sample.draw import State, last
from cdlm.sample.naive import dense_posterior, gumbel_race, naive_ancestral
from cdlm.sample.settings import resolve
from cdlm.sample.timesteps import cosine_times, uniform_times

from .truth import (
    PRIORS,
    L,
    Table,
    V,
    agrees,
    along,
    ancestor,
    bridge,
    clamped,
    composed,
    greedy,
    noise,
    point,
    push,
    sequences,
    text,
)

N = 10_000
GRAIN = 2.0**-24
"""The resolution of a single-precision uniform."""
SINGLE, DOUBLE = torch.float32, torch.float64


def race(
    net, process: Process, x: Tensor, grid: Tensor, rng: Rng, dtype: torch.dtype = SINGLE, given=None, **settings
) -> State:
    """The last state of the published sampler."""
    resolved = resolve({"precision": "naive-fp32", **settings}, process)
    with along(grid):
        return last(naive_ancestral(net, process, x, resolved, rng, given=given, dtype=dtype))


every_prior = pytest.mark.parametrize("process", PRIORS.values(), ids=PRIORS)


@pytest.mark.parametrize("final_step", ["none", "sample", "argmax"])
@every_prior
def test_in_double_precision_the_race_is_ancestral_sampling(process: Process, final_step: str) -> None:
    grid = cosine_times(3, end=0.0 if final_step == "none" else 0.3)
    net, rng = Table(process), seeded(0, batch=N)
    hops = [*grid.tolist(), *([0.0] if final_step == "sample" else [])]
    law = composed(noise(process), process, L, ancestor(process, net.law), hops)
    if final_step == "argmax":
        law = push(law, process, L, greedy(process, net.law), float(grid[-1]), 0.0)
    state = race(net, process, process.start(L, rng("start")), grid, rng, DOUBLE, final_step=final_step)
    assert agrees(state.x, law, process.states)
    assert state.nfe == [3 + (final_step != "none")] * N


def test_in_double_precision_a_race_of_three_positions_with_a_shape() -> None:
    process, grid, rng = PRIORS["uniform"], uniform_times(3), seeded(0, batch=N)
    net = Table(process, 3)
    sharp = ancestor(process, lambda x, t: net.law(x, t) ** 2 / (net.law(x, t) ** 2).sum(-1, keepdim=True))
    law = composed(noise(process, 3), process, 3, sharp, grid)
    x = process.start(3, rng("start"))
    assert agrees(race(net, process, x, grid, rng, DOUBLE, temperature=0.5).x, law, V)


@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_with_few_tokens_and_steps_single_precision_does_no_harm(kind: str) -> None:
    process, grid, rng = PRIORS[kind], uniform_times(3), seeded(1, batch=N)
    net = Table(process)
    law = composed(noise(process), process, L, ancestor(process, net.law), grid)
    assert agrees(race(net, process, process.start(L, rng("start")), grid, rng).x, law, process.states)


@every_prior
def test_given_positions_do_not_race(process: Process) -> None:
    net, rng, grid = Table(process), seeded(0, batch=N), uniform_times(2)
    x, given = torch.tensor([process.states - 1, 0]), torch.tensor([False, True])
    law = composed(point(x, process.states), process, L, clamped(ancestor(process, net.law), given), grid)
    drawn = race(net, process, x.expand(N, -1), grid, rng, DOUBLE, given=given.expand(N, -1)).x
    assert agrees(drawn, law, process.states)


@every_prior
def test_the_dense_posterior_is_the_bridge_law(process: Process) -> None:
    """Up to a factor, over all states, for any prediction; also at the end of the grid."""
    x = sequences(process.states, L)
    for t, s in ((1.0, 0.6), (0.5, 0.45), (0.3, 0.0)):
        clean = Table(process).law(x, t)
        posterior = dense_posterior(clean.log(), process, x, s, t)
        padded = torch.nn.functional.pad(clean, (0, process.states - V))
        truth = bridge_law(padded, x, transition(process, 0.0, s), transition(process, s, t))
        assert torch.allclose(posterior / posterior.sum(-1, keepdim=True), truth, atol=1e-12)
        assert torch.allclose(truth, bridge(process, clean, x, t, s, "plug-in"), atol=1e-12)
        single = dense_posterior(clean.log().float(), process, x, s, t)
        assert single.dtype == torch.float32
        assert torch.allclose(single.double(), posterior, atol=1e-6)


def test_uniforms_of_single_precision_have_24_bits() -> None:
    u = torch.empty(10**6).uniform_() / GRAIN
    assert torch.equal(u, u.round())
    assert len(u.remainder(2).unique()) == 2


@pytest.mark.parametrize("grains", [0.25, 1.0, 4.0, 16.0])
def test_an_unlikely_state_wins_too_rarely_in_single_precision(grains: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a near-certain state, by listing the uniforms with which a state of probability c 2^-24 can win.

    Its score is E = m 2^-24, m = 1, 2, ..., each with probability 2^-24, against an exponential: it wins with
    probability 2^-24 / (exp(1/c) - 1) instead of c 2^-24. Doubles get it right.
    """
    chance, columns = grains * GRAIN, 40 * max(1, round(grains))
    quantiles = 16_000 // max(1, round(grains))
    other = ((torch.arange(quantiles) + 0.5) / quantiles).double()

    def wins(dtype: torch.dtype, steps: Tensor) -> float:
        """The share of all pairs of uniforms, `steps` below 1 for the state, that it wins with."""
        u = torch.cartesian_prod(1 - steps, other).to(dtype)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "uniform_", lambda self, generator: self.copy_(u))
            law = torch.tensor([chance, 1 - chance], dtype=dtype).expand(1, len(u), 2)
            return float((gumbel_race(law, seeded(0, batch=1)) == 0).double().mean())

    listed = (torch.arange(columns) + 1).double() * GRAIN
    single = wins(torch.float32, listed) * columns * GRAIN
    assert single == pytest.approx(GRAIN / math.expm1(1 / grains), rel=0.02)
    fine = (torch.arange(320) + 0.5).double() * chance / 8
    assert wins(torch.float64, fine) * 40 * chance == pytest.approx(chance, rel=0.01)


HEAD, LENGTH = 8, 32


def flat(tail: int) -> Tensor:
    """Half of the mass on a few tokens, the other half on hundreds."""
    return torch.cat([torch.full((HEAD,), 0.5 / HEAD), torch.full((tail,), 0.5 / tail)]).log()


def exact(law: Tensor, n: int, steps: int = 256, precision: str = "fp64", seed: int = 0) -> Tensor:
    x, rng = torch.full((n, LENGTH), len(law)), seeded(seed, batch=n)
    predict = lambda x, t: law.expand(*x.shape, -1)  # noqa: E731
    return text(ancestral(predict, masked(len(law)), x, resolve({"steps": steps, "precision": precision}), rng))


def naive(law: Tensor, n: int, dtype: torch.dtype, steps: int = 256) -> Tensor:
    x, grid, rng = torch.full((n, LENGTH), len(law)), uniform_times(steps), seeded(0, batch=n)
    return race(lambda x, t: law.expand(*x.shape, -1), masked(len(law)), x, grid, rng, dtype).x


def entropies(x: Tensor) -> Tensor:
    """The entropy of the tokens of each text."""
    shares = [torch.bincount(row).double() / x.shape[1] for row in x]
    return torch.stack([-torch.special.xlogy(share, share).sum() for share in shares])


def apart(x: Tensor, y: Tensor) -> float:
    """The difference of mean entropies, in standard errors."""
    a, b = entropies(x), entropies(y)
    return float((a.mean() - b.mean()) / (a.var() / len(a) + b.var() / len(b)).sqrt())


def test_accurate_single_precision_keeps_the_entropy() -> None:
    """fp32 sums the vocabulary in single precision, and that is all: same uniforms, same texts but for a few edges."""
    law = flat(292)
    assert abs(apart(exact(law, 200, precision="fp32", seed=1), exact(law, 200))) < 5
    assert float((exact(law, 200, precision="fp32") == exact(law, 200)).double().mean()) > 0.999


def test_the_entropy_drops_with_the_resolution_of_the_uniforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale model: uniforms of 12 bits in single precision, 300 tokens and 256 steps stand for 24 bits and a
    vocabulary times steps 4,096 times as large. Doubles keep their bits, and the entropy of ancestral sampling."""
    law, uniform = flat(292), torch.Tensor.uniform_
    reference = exact(law, 400)

    def coarse(self: Tensor, generator: torch.Generator) -> Tensor:
        uniform(self, generator=generator)
        return self.mul_(2**12).floor_().div_(2**12) if self.dtype == torch.float32 else self

    assert abs(apart(naive(law, 8, SINGLE), reference)) < 5
    monkeypatch.setattr(torch.Tensor, "uniform_", coarse)
    assert apart(naive(law, 8, SINGLE), reference) < -12
    assert abs(apart(naive(law, 8, DOUBLE), reference)) < 5


@pytest.mark.soak
def test_the_entropy_drops_as_published() -> None:
    """The real thing, 24 bits: a thousand tokens and 2^15 steps, where a rare token has a fourth of a grain a step."""
    law = flat(1000)
    drawn = naive(law, 6, SINGLE, 2**15)
    rare = (drawn >= HEAD).double().mean()
    assert float(rare - 0.5) < -5 * 0.5 / math.sqrt(drawn.numel())
    assert apart(drawn, exact(law, 400)) < -5
