"""Truth by enumeration, itself checked by hand: listing, posteriors, and the law that a sampler draws from."""

import itertools

import pytest
import torch

from cdlm.model.config import SIZES
from cdlm.model.denoiser import Denoiser
from cdlm.process import Process, masked, uniform, unigram
from cdlm.process.exact import listed, posterior
from cdlm.process.process import Posterior
from cdlm.rng import seeded
from cdlm.sample.ancestral import ancestral
from cdlm.sample.draw import last
from cdlm.sample.exact import ancestral_law, tabulate
from cdlm.sample.settings import resolve
from cdlm.sample.timesteps import uniform_times

V, L = 3, 2
LAW = torch.tensor([8.0, 1, 0, 2, 5, 1, 0, 3, 4], dtype=torch.float64) / 24
PRIORS = [masked(V), uniform(V), unigram(torch.tensor([0.5, 0.3, 0.2])), unigram(torch.tensor([0.2, 0.1, 0.3, 0.4]), V)]
NAMES = ["masked", "uniform", "unigram", "mask and unigram"]


def brute_posterior(process: Process, x_t: tuple[int, ...], t: float, skip: int | None = None) -> torch.Tensor:
    """Bayes by a loop over every clean sequence, leaving out the evidence at one position if asked."""
    alpha = float(process.noise.alpha(torch.tensor(t, dtype=torch.float64)))
    marginals = torch.zeros(L, V, dtype=torch.float64)
    for k, x0 in enumerate(itertools.product(range(V), repeat=L)):
        weight = float(LAW[k]) + 1e-30  # impossible states: the law of a vanishing uniform mixture
        for i in range(L):
            if i != skip:
                weight *= alpha * (x0[i] == x_t[i]) + (1 - alpha) * float(process.prior[x_t[i]])
        for i in range(L):
            marginals[i, x0[i]] += weight
    return marginals / marginals.sum(-1, keepdim=True)


def test_listed_counts_in_base() -> None:
    assert listed(3, 2).tolist() == [list(x) for x in itertools.product(range(3), repeat=2)]


@pytest.mark.parametrize("process", PRIORS, ids=NAMES)
def test_posterior_is_bayes(process: Process) -> None:
    predict, left_out = posterior(LAW, process, L), posterior(LAW, process, L, leave_one_out=True)
    for x_t in listed(process.states, L):
        law, other = predict(x_t[None], 0.6)[0].exp(), left_out(x_t[None], 0.6)[0].exp()
        truth = brute_posterior(process, tuple(x_t.tolist()), 0.6)
        assert torch.allclose(law, truth, atol=1e-12)
        for i in range(L):
            assert torch.allclose(other[i], brute_posterior(process, tuple(x_t.tolist()), 0.6, skip=i)[i], atol=1e-12)


def test_two_masked_tokens_fall_together_once_in_n() -> None:
    """Two tokens, N steps: with probability 1/N both are drawn in one step, from the product of the marginals."""
    table = LAW.view(V, V)
    product = torch.outer(table.sum(1), table.sum(0)).flatten()
    for steps in (1, 2, 5):
        law = ancestral_law(posterior(LAW, masked(V), L), masked(V), L, uniform_times(steps))
        assert torch.allclose(law, product / steps + LAW * (1 - 1 / steps), atol=1e-12)


@pytest.mark.parametrize("process", PRIORS[1:], ids=NAMES[1:])
def test_leave_one_out_plugged_in_equals_the_mixture_of_bridges(process: Process) -> None:
    """docs/choices.md: p(x_0^i | x_t) calls for the mixture, p(x_0^i | the others) for the plug-in; the laws agree."""
    full, left_out = posterior(LAW, process, L), posterior(LAW, process, L, leave_one_out=True)
    grid = uniform_times(4)
    mixture = ancestral_law(full, process, L, grid, "mixture")
    assert torch.allclose(mixture, ancestral_law(left_out, process, L, grid, "plug-in"), atol=1e-12)
    assert (mixture - ancestral_law(full, process, L, grid, "plug-in")).abs().sum() / 2 > 0.02


def test_only_the_matching_posterior_converges_on_the_uniform_process() -> None:
    """With f* = p(x_0^i | x_t), many steps of the mixture reach the data law; of the plug-in they never do."""
    process, grid = uniform(V), uniform_times(60)
    predict = posterior(LAW, process, L)
    assert (ancestral_law(predict, process, L, grid, "mixture") - LAW).abs().sum() / 2 < 0.02
    assert (ancestral_law(predict, process, L, grid, "plug-in") - LAW).abs().sum() / 2 > 0.1


@pytest.mark.parametrize("how", ["plug-in", "mixture"])
@pytest.mark.parametrize("process", PRIORS, ids=NAMES)
def test_samples_follow_the_exact_law(process: Process, how: Posterior) -> None:
    """Chi-square of 50,000 draws of `ancestral` against `ancestral_law` (rejects at p < 1e-6)."""
    predict, n = posterior(LAW, process, L), 50_000
    rng = seeded(3, batch=n)
    start = process.start(L, rng("start"))
    drawn = last(ancestral(predict, process, start, resolve({"steps": 3}, process, how), rng)).x
    law = ancestral_law(predict, process, L, uniform_times(3), how)
    count = torch.bincount((drawn * torch.tensor([V, 1])).sum(-1), minlength=V**L)
    expected = n * law
    alive = expected > 1e-9
    assert count[~alive].sum() == 0
    statistic = ((count - expected)[alive] ** 2 / expected[alive]).sum()
    assert statistic < 48  # chi-square with 8 degrees of freedom exceeds 48 with probability 1e-7


@pytest.mark.parametrize("conditioned", [False, True])
def test_tabulate_is_the_network(conditioned: bool) -> None:
    import dataclasses

    process = masked(V)
    denoiser = Denoiser(dataclasses.replace(SIZES["tiny"], time_conditioning=conditioned), process).eval()
    for parameter in denoiser.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = listed(process.states, L)[::3]
    for t in (0.9, 0.2):
        assert torch.allclose(tabulate(denoiser, L)(x, t).exp(), denoiser(x, t).double().exp(), atol=1e-6)
