"""The negative evidence lower bound of a model on data, in nats per token; exact for an autoregressive one.

It is that of the model, which is a sampler of infinitely many steps; `sampler_likelihood.py` has those of samplers.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cdlm.methods import METHODS
from cdlm.model.denoiser import Denoiser
from cdlm.objective.loss import weighted_divergence
from cdlm.rng import Rng, seeded
from cdlm.types import Tokens

CHUNK_SIZE = 4096
"""Positions whose laws over the vocabulary are there at once."""


def nelbo(denoiser: Denoiser, batches: Iterable[tuple[int, Tokens]], seed: int = 0, rows: int = 64) -> float:
    """The mean over numbered batches, one stratified time a sequence, `rows` sequences at a time.

    A batch's noise depends on its number and size alone, not on how it is cut.
    """
    found = []
    for number, x0 in batches:
        rng = seeded(seed, "nelbo", number, batch=len(x0))
        found.append(nelbo_estimates(denoiser, x0, rng("order").uniform(1)[:, 0].argsort(), rng, rows))
    return float(torch.cat(found).mean())


def repeated_nelbo(
    denoiser: Denoiser, x0: Tokens, times: int = 16, seed: int = 0, rows: int = 64
) -> Float[Tensor, "b times"]:
    """Several estimates for each sequence, stratified over its own times and over those of all: the bound's spread."""
    if denoiser.process is None:  # exact: nothing to repeat
        times = 1
    n = len(x0)
    order = seeded(seed, "order", batch=n).uniform(times).argsort(0)
    stratum = (torch.arange(times) * n + order).flatten()  # one of the first n, one of the next n, ...
    rng = seeded(seed, "likelihood", batch=n * times)
    return nelbo_estimates(denoiser, x0.repeat_interleave(times, 0), stratum, rng, rows).view(n, times)


def monte_carlo_error(estimates: Float[Tensor, "b repeats"]) -> float | None:
    """The standard error of the mean over texts that the noise of the estimates causes, the texts given; None if there
    is one estimate for each."""
    if estimates.shape[1] < 2:
        return None
    return float((estimates.var(-1) / estimates.shape[1]).sum().sqrt() / len(estimates))


@torch.no_grad()
def nelbo_estimates(
    denoiser: Denoiser,
    x0: Tokens,
    stratum: Int[Tensor, "b"],
    rng: Rng,
    rows: int = 64,
) -> Float[Tensor, "b"]:
    """One estimate for each sequence, at a time in its own stratum of the batch."""
    row = "ar" if denoiser.process is None else "mdlm" if denoiser.process.absorbing else "udlm"
    (term,) = METHODS[row](denoiser.process, total=1).terms
    found = []
    for part in torch.arange(len(x0)).split(rows):
        pair = term.draw(x0[part.to(x0.device)], 0.0, stratum[part], rng.batch, rng[part], None)
        hidden = denoiser.features(pair.student_input, pair.alpha_t).flatten(0, 1)
        length, sums = pair.x0.shape[1], torch.zeros(len(part), dtype=torch.float64)
        for summands in term.summands(pair, chunk=CHUNK_SIZE):
            nats = weighted_divergence(summands, denoiser, hidden)
            sums.index_add_(0, summands.index.cpu() // length, nats.cpu().double())
        found.append(sums / length)
    return torch.cat(found)
