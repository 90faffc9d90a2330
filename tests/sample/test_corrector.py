"""Predictor-corrector sampling: the laws of ReMDM under masking, and of Psi samplers under any other prior."""

import itertools

import pytest
import torch

from cdlm.process import Process, masked, unigram
from cdlm.process.process import Posterior
from cdlm.rng import seeded
from cdlm.sample.ancestral import ancestral_with_corrector
from cdlm.sample.corrector import Corrector
from cdlm.sample.settings import resolve
from cdlm.sample.timesteps import cosine_times, loop_times, uniform_times

from ..paper.enumeration import p_value
from .truth import (
    ALPHA,
    PRIORS,
    Kernel,
    L,
    Table,
    V,
    agrees,
    along,
    bridge,
    clamped,
    composed,
    forward,
    greedy,
    index,
    level,
    noise,
    onehot,
    point,
    push,
    sequences,
    text,
)

N = 12_000
GRIDS = {"uniform": uniform_times(5), "cosine": cosine_times(4), "loop": loop_times(10)}
CORRECTORS = [Corrector("constant", 0.3), Corrector("cap", 0.2), Corrector("rescale", 0.4), Corrector("loop", 0.7)]
OTHERS = {name: process for name, process in PRIORS.items() if name != "masked"}


def share(corrector: Corrector, a_t: float, a_s: float) -> float:
    """sigma: the share of visible tokens that is masked again, by the table of `Corrector`."""
    if corrector.kind == "constant":
        return corrector.eta * (1 - a_s)
    most = min(1.0, (1 - a_s) / a_t)
    if corrector.kind == "cap":
        return min(corrector.eta, most)
    return corrector.eta * most if corrector.kind == "rescale" or a_s == a_t else 0.0


def mixed(corrector: Corrector, a_t: float, a_s: float) -> float:
    """kappa = 1 - sigma / (1 - a_s)."""
    return 1 - share(corrector, a_t, a_s) / (1 - a_s) if a_s < 1 else 1.0


def remasked(net: Table, corrector: Corrector) -> Kernel:
    """ReMDM: a visible token is masked with sigma, a mask revealed with (a_s - (1 - sigma) a_t) / (1 - a_t)."""

    def kernel(x: torch.Tensor, t: float, s: float) -> torch.Tensor:
        a_t, a_s = level(net.process, t), level(net.process, s)
        sigma = share(corrector, a_t, a_s)
        reveal = (a_s - (1 - sigma) * a_t) / (1 - a_t)
        assert 0 <= reveal <= 1
        masks = onehot(torch.full_like(x, V), V + 1)
        revealed = torch.nn.functional.pad(reveal * net.law(x, t), (0, 1)) + (1 - reveal) * masks
        return torch.where((x == V)[..., None], revealed, (1 - sigma) * onehot(x, V + 1) + sigma * masks)

    return kernel


def psi(net: Table, corrector: Corrector, how: str, process: Process | None = None, law=None) -> Kernel:
    """kappa q(x_s | x_t, f) + (1 - kappa) (q(x_0 | x_t, f), noised to s), kappa within [0, 1]."""
    process, law = process or net.process, law or net.law

    def kernel(x: torch.Tensor, t: float, s: float) -> torch.Tensor:
        kappa = min(max(mixed(corrector, level(process, t), level(process, s)), 0.0), 1.0)
        anew = bridge(process, law(x, t), x, t, 0.0, how) @ forward(process, 0.0, s)
        stays = onehot(x, process.states)
        return kappa * (bridge(process, law(x, t), x, t, s, how) if s < t else stays) + (1 - kappa) * anew

    return kernel


def draw(
    net, process: Process, grid: torch.Tensor, corrector: Corrector, x=None, n: int = N, seed: int = 11, given=None,
    how: Posterior = "plug-in", final_step: str = "none",
) -> torch.Tensor:  # fmt: skip
    rng = seeded(seed, batch=n)
    x = process.start(L, rng("start")) if x is None else x.expand(n, -1)
    chosen = {"corrector": corrector.kind, "eta": corrector.eta, "final_step": final_step}
    settings = resolve(chosen, process, how)
    assert settings.sampler == "corrector"
    with along(grid):
        return text(ancestral_with_corrector(net, process, x, settings, rng, given=given))


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("corrector", CORRECTORS, ids=str)
def test_masked_samples_follow_remdm(corrector: Corrector, grid: torch.Tensor) -> None:
    process = masked(V)
    net = Table(process)
    law = composed(noise(process), process, L, remasked(net, corrector), grid)
    assert agrees(draw(net, process, grid, corrector), law, 4)


@pytest.mark.parametrize("kind", ["cap", "rescale"])
def test_remdm_takes_back_more_than_a_mixture_could(kind: str) -> None:
    """kappa below 0 in the middle of the grid, with a strong corrector: the law is ReMDM's all the same."""
    process, grid, corrector = masked(V), uniform_times(6), Corrector(kind, 0.9)
    alphas = [level(process, float(t)) for t in grid]
    kappas = [mixed(corrector, a_t, a_s) for a_t, a_s in itertools.pairwise(alphas)]
    assert min(kappas) < -0.2
    assert torch.allclose(corrector.kappa(torch.tensor(alphas[:-1]), torch.tensor(alphas[1:])), torch.tensor(kappas))
    net = Table(process)
    law = composed(noise(process), process, L, remasked(net, corrector), grid)
    assert agrees(draw(net, process, grid, corrector), law, 4)


@pytest.mark.parametrize("final_step", ["sample", "argmax"])
@pytest.mark.parametrize("corrector", CORRECTORS, ids=str)
def test_masked_samples_with_a_corrector_and_a_final_step(corrector: Corrector, final_step: str) -> None:
    process, grid = masked(V), loop_times(6, end=0.05)
    net = Table(process)
    kernel = remasked(net, corrector)
    law = composed(noise(process), process, L, kernel, [*grid, *([0.0] * (final_step == "sample"))])
    if final_step == "argmax":
        law = push(law, process, L, greedy(process, net.law), float(grid[-1]), 0.0)
    assert agrees(draw(net, process, grid, corrector, final_step=final_step), law, 4)


def test_a_loop_without_its_plateau_is_the_plain_sampler() -> None:
    """On a strictly falling grid nothing is taken back; on a plateau nothing but corrections happens."""
    process, grid = masked(V), loop_times(10)
    net, corrector = Table(process), Corrector("loop", 0.7)
    plain = Corrector("constant", 1e-12)
    falling = composed(noise(process), process, L, remasked(net, plain), uniform_times(4))
    assert agrees(draw(net, process, uniform_times(4), corrector), falling, 4)
    assert not agrees(
        draw(net, process, grid, corrector), composed(noise(process), process, L, remasked(net, plain), grid), 4
    )
    assert int((grid[1:] == grid[:-1]).sum()) == 5


@pytest.mark.parametrize("how", ["plug-in", "mixture"])
@pytest.mark.parametrize("corrector", CORRECTORS, ids=str)
@pytest.mark.parametrize("process", OTHERS.values(), ids=OTHERS)
def test_other_samples_follow_psi(process: Process, corrector: Corrector, how: Posterior) -> None:
    """Plateaus included: there the ancestral share of a hop stays where it is."""
    net, grid = Table(process), loop_times(6)
    law = composed(noise(process), process, L, psi(net, corrector, how), grid)
    assert agrees(draw(net, process, grid, corrector, how=how), law, process.states)


@pytest.mark.parametrize("corrector", [*CORRECTORS, Corrector("constant", 1.0), Corrector("cap", 0.9)], ids=str)
@pytest.mark.parametrize("process", OTHERS.values(), ids=OTHERS)
def test_a_single_hop_from_every_state_follows_psi(process: Process, corrector: Corrector) -> None:
    """kappa = 0 (a new start in every hop) and kappa clipped to 0 included, and tokens the prior cannot produce."""
    net, grid, every = Table(process), uniform_times(1, 0.6, 0.35), sequences(process.states, L)
    x = every.repeat_interleave(1000, 0)
    after = draw(net, process, grid, corrector, x=x, n=len(x), seed=3)
    kernel = psi(net, corrector, "plug-in")(every, 0.6, 0.35)
    for i in range(L):
        pairs = index(x, process.states) * process.states + after[:, i]
        counts = torch.bincount(pairs, minlength=len(every) * process.states).view(len(every), -1)
        assert p_value(counts, kernel[:, i]) > ALPHA


@pytest.mark.parametrize("final_step", ["sample", "argmax"])
def test_uniform_samples_with_a_corrector_and_a_final_step(final_step: str) -> None:
    process, grid, corrector = PRIORS["uniform"], uniform_times(3, end=0.3), Corrector("rescale", 0.5)
    net = Table(process)
    kernel = psi(net, corrector, "plug-in")
    law = composed(noise(process), process, L, kernel, [*grid, *([0.0] * (final_step == "sample"))])
    if final_step == "argmax":
        law = push(law, process, L, greedy(process, net.law), float(grid[-1]), 0.0)
    assert agrees(draw(net, process, grid, corrector, final_step=final_step), law, V)


@pytest.mark.parametrize("process", PRIORS.values(), ids=PRIORS)
def test_a_corrector_takes_back_nothing_that_is_given(process: Process) -> None:
    net, corrector, grid = Table(process), Corrector("constant", 0.5), uniform_times(4)
    x, given = torch.tensor([process.states - 1, 0]), torch.tensor([False, True])
    kernel = remasked(net, corrector) if process.name == "masked" else psi(net, corrector, "plug-in")
    law = composed(point(x, process.states), process, L, clamped(kernel, given), grid)
    drawn = draw(net, process, grid, corrector, x=x, given=given.expand(N, -1))
    assert bool((drawn[:, 1] == 0).all())
    assert agrees(drawn, law, process.states)
    if process.name == "masked":  # what is visible at the start counts as given
        assert torch.equal(draw(net, process, grid, corrector, x=x), drawn)


DATA = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
CASES = [
    pytest.param(process, how, id=f"{name}, {how}")
    for name, process in {**PRIORS, "unigram with a zero": unigram(torch.tensor([0.6, 0.0, 0.4]))}.items()
    for how in (("plug-in",) if name == "masked" else ("plug-in", "mixture"))
]


@pytest.mark.parametrize("corrector", [*CORRECTORS, Corrector("cap", 0.9)], ids=str)
@pytest.mark.parametrize(("process", "how"), CASES)
def test_with_an_exact_predictor_correctors_keep_the_data(
    process: Process, how: Posterior, corrector: Corrector
) -> None:
    """One position, from its marginal at t = 1: the posterior for the mixture, the data law for the plug-in."""

    def law(x: torch.Tensor, t: float) -> torch.Tensor:
        if how == "plug-in":
            return DATA.expand(*x.shape, V)
        joint = DATA * forward(process, 0.0, t)[:V].T[x]
        return joint / joint.sum(-1, keepdim=True)

    n, grid, rng = 6000, loop_times(6), seeded(1, batch=6000)
    x0 = torch.multinomial(DATA, n, replacement=True, generator=torch.Generator().manual_seed(0))[:, None]
    x = process.corrupt(x0, 1.0, rng("start"))
    drawn = draw(lambda x, t: law(x, t).log(), process, grid, corrector, x=x, n=n, seed=1, how=how)
    assert agrees(drawn, torch.nn.functional.pad(DATA, (0, process.states - V)), process.states)
    if process.name != "masked":  # and the kernel of these tests keeps every marginal to the last digit
        start = torch.nn.functional.pad(DATA, (0, process.states - V)) @ forward(process, 0.0, 1.0)
        kernel = psi(None, corrector, how, process, law)
        for stop in range(1, len(grid) + 1):
            marginal = torch.nn.functional.pad(DATA, (0, process.states - V)) @ forward(
                process, 0.0, float(grid[stop - 1])
            )
            assert torch.allclose(composed(start, process, 1, kernel, grid[:stop]), marginal, atol=1e-12)
