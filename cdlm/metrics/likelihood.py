"""The negative evidence lower bound of a model on data, in nats per token; exact for an autoregressive one.

There is one for the model, that is for a sampler of infinitely many steps, and one for a sampler of few steps, which
draws the tokens of a hop independently of each other and pays for it, or one after the other by a joint head.
"""

import dataclasses
from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cdlm.methods import METHODS
from cdlm.methods.ingredients import sampler_coupling
from cdlm.model.denoiser import Denoiser
from cdlm.objective.loss import Reduction, Term, student_hidden, weighted_divergence
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
    denoiser: Denoiser, x0: Tokens, times: int = 16, seed: int = 0, rows: int = 64, term: Term | None = None
) -> Float[Tensor, "b times"]:
    """Several estimates for each sequence, stratified over its own times and over those of all: the bound's spread.

    With the term of `few_step`, of the bound of that sampler.
    """
    if denoiser.process is None:  # exact: nothing to repeat
        times = 1
    n = len(x0)
    order = seeded(seed, "order", batch=n).uniform(times).argsort(0)
    stratum = (torch.arange(times) * n + order).flatten()  # one of the first n, one of the next n, ...
    rng = seeded(seed, "likelihood", batch=n * times)
    return nelbo_estimates(denoiser, x0.repeat_interleave(times, 0), stratum, rng, rows, term).view(n, times)


def few_step_term(denoiser: Denoiser, steps: int, order: str = "random", reduction: Reduction = "positions") -> Term:
    """What a sampler of so many steps in this order says of a text: minus its log-likelihood, or, as the order is
    random, a bound of it. With the reduction "sequence", of the sampler that draws by the joint head."""
    process = denoiser.process
    (term,) = METHODS["few-step"](process, total=1, steps=steps, order=order).terms
    if reduction == "positions" or process is None:
        return term
    return dataclasses.replace(term, coupling=sampler_coupling(process, order, steps), reduction=reduction)


@torch.no_grad()
def nelbo_estimates(
    denoiser: Denoiser,
    x0: Tokens,
    stratum: Int[Tensor, "b"],
    rng: Rng,
    rows: int = 64,
    term: Term | None = None,
) -> Float[Tensor, "b"]:
    """One estimate for each sequence, at a time in its own stratum of the batch."""
    row = "ar" if denoiser.process is None else "mdlm" if denoiser.process.absorbing else "udlm"
    term = term or METHODS[row](denoiser.process, total=1).terms[0]
    found = []
    for part in torch.arange(len(x0)).split(rows):
        pair = term.draw(x0[part.to(x0.device)], 0.0, stratum[part], rng.batch, rng[part], None)
        hidden = student_hidden(term, pair, denoiser, denoiser.features(pair.student_input, pair.alpha_t))
        length, sums = pair.x0.shape[1], torch.zeros(len(part), dtype=torch.float64)
        for summands in term.summands(pair, chunk=CHUNK_SIZE):
            nats = weighted_divergence(summands, denoiser, hidden)
            sums.index_add_(0, summands.index.cpu() // length, nats.cpu().double())
        found.append(sums / length)
    return torch.cat(found)
