"""log p(some tokens | the others): exact for an autoregressive model, a lower bound for a diffusion model.

For a diffusion model the other tokens, the context, stay clean, and k of the l scored tokens turn into noise, at the
level 1 - alpha = t. With g the KL of reverse rates at a level, summed over all l tokens,

    -log p  <=  integral of E[g(t)] dt  =  mean over k of  E[ (l + 1)/k t g(t) ],   k in 0..l,  t the k-th smallest of l

uniforms (for k = 0: g(t), t the smallest of l + 1). Under masking t g(t) = -sum of log f over the masked tokens, for
every t, and nothing for k = 0: what remains is l/k times that sum, over k in 1..l. A fixed number of noised tokens
varies less than one that a time decides, and nothing is divided by a small time. No schedule plays a part.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cdlm.model.denoiser import Denoiser
from cdlm.objective.divergence import rate_kl
from cdlm.rng import Rng, seeded
from cdlm.types import LogLaw, Pair, Time, Tokens

Scored = Bool[Tensor, "b l"]
"""The tokens that are asked for, on the host; all others are context."""
_ROWS = 1024
"""Positions whose distributions over the vocabulary are in memory at once."""


@torch.no_grad()
def exact_log_likelihood(
    denoiser: Denoiser, x0: Tokens, scored: Scored
) -> tuple[Float[Tensor, "b"], Bool[Tensor, "b"]]:
    """log p of the scored tokens under an autoregressive model, and whether each is the likeliest."""
    hidden = denoiser.features(x0[:, :-1], torch.ones(len(x0), dtype=torch.float64))
    return _compare(denoiser, hidden, x0[:, 1:], scored[:, 1:])


@torch.no_grad()
def is_greedy_at_once(denoiser: Denoiser, x0: Tokens, scored: Scored, rng: Rng) -> Bool[Tensor, "b"]:
    """Whether each scored token is the likeliest where all of them are noise."""
    process = denoiser.process
    assert process is not None
    scored = scored & ~process.is_special(x0).cpu()
    x1 = torch.where(scored.to(x0.device), process.start(x0.shape[1], rng, x0.device), x0)
    hidden = denoiser.features(x1, process.noise.alpha(torch.ones(len(x0), dtype=torch.float64)))
    return _compare(denoiser, hidden, x0, scored)[1]


def repeated_bound(
    denoiser: Denoiser, x0: Tokens, scored: Scored, rng: Rng, num_levels: int, rows: int
) -> Float[Tensor, "b num_levels"]:
    """Several estimates for each sequence at stratified noise levels, `rows` sequences through the network at a time.

    The noise of a sequence is that of its row of `rng` and the `num_levels` - 1 rows that follow.
    """
    estimates = torch.zeros(len(x0) * num_levels, dtype=torch.float64)
    for part in torch.arange(len(x0) * num_levels).split(rows):
        owner, level = part // num_levels, part % num_levels
        own = dataclasses.replace(rng, rows=rng.rows[owner] + level)
        u = (level + own("level").uniform(1)[:, 0]) / num_levels
        estimates[part] = log_likelihood_bound(denoiser, x0[owner.to(x0.device)], scored[owner], u, own("noise"))
    return estimates.view(len(x0), num_levels)


@torch.no_grad()
def log_likelihood_bound(denoiser: Denoiser, x0: Tokens, scored: Scored, u: Time, rng: Rng) -> Float[Tensor, "b"]:
    """One estimate for each row, whose mean over u ~ U(0, 1) and the noise is at most log p(scored | the rest)."""
    process = denoiser.process
    assert process is not None
    masks = process.absorbing
    scored = scored & ~process.is_special(x0).cpu()  # they are context wherever they stand
    l = scored.sum(1).double()
    k = torch.floor(u * l).clamp(max=l - 1) + 1 if masks else torch.floor(u * (l + 1)).clamp(max=l)
    order = rng("order").uniform(x0.shape[1]).masked_fill(~scored, torch.inf)
    smallest = order.sort(1).values.gather(1, (k.long()[:, None] - 1).clamp(min=0))[:, 0]
    noised = (order <= smallest[:, None]) & (k[:, None] > 0)
    x_t = torch.where(noised.to(x0.device), process.start(x0.shape[1], rng, x0.device), x0)
    t = torch.where(k > 0, smallest, 1 - rng("none").uniform(1)[:, 0] ** (1 / (l + 1)))
    end = process.noise.alpha(torch.ones_like(t))
    hidden = denoiser.features(x_t, torch.maximum(1 - t, end))  # it was trained on no more noise than that
    if masks:
        return l / k.clamp(min=1) * _compare(denoiser, hidden, x0, noised)[0]
    one = torch.ones_like(t)
    pair = Pair(
        x0=x0, x_s=x0, x_t=x_t, s=0 * t, t=t, alpha_s=one, alpha_t=1 - t, dalpha_t=-one, positions=scored, known=scored,
        prior=process.prior,
    )  # fmt: skip
    total = torch.zeros(len(x0), dtype=torch.float64)
    for index, law in _log_prob_chunks(denoiser, hidden, scored & process.positions(x_t).cpu()):
        at = pair.at(index.to(law.device)).to(law.device)
        total.index_add_(0, index // x0.shape[1], rate_kl(target=at.x0, student=law, pair=at).cpu().double())
    return -torch.where(k > 0, (l + 1) / k * t, one) * total


def likelihood_rng(seed: int, noise_rows: Sequence[int]) -> Rng:
    """The noise under which sequences are scored, one row of it for each."""
    return seeded(seed, "harness read", batch=len(noise_rows), rows=torch.tensor(noise_rows))


def noise_row(token_ids: Sequence[int]) -> int:
    """A row of noise for these tokens, wherever they stand among others."""
    return int.from_bytes(hashlib.blake2b(repr(list(token_ids)).encode(), digest_size=7).digest(), "little")


def _compare(
    denoiser: Denoiser, hidden: Float[Tensor, "b l d"], tokens: Tokens, where: Scored
) -> tuple[Float[Tensor, "b"], Bool[Tensor, "b"]]:
    """The predicted log-probabilities of tokens, added up, and whether there is none that another token exceeds."""
    total, misses = torch.zeros(2, len(tokens), dtype=torch.float64)
    for index, law in _log_prob_chunks(denoiser, hidden, where):
        token, owner = tokens.flatten()[index.to(law.device)], index // tokens.shape[1]
        total.index_add_(0, owner, law.gather(-1, token[:, None])[:, 0].cpu().double())
        misses.index_add_(0, owner, (law.argmax(-1) != token).cpu().double())
    return total, misses == 0


def _log_prob_chunks(
    denoiser: Denoiser, hidden: Float[Tensor, "b l d"], where: Scored
) -> Iterator[tuple[Int[Tensor, "n"], LogLaw]]:
    """The predicted distributions at some positions, a few at a time: a vocabulary is large."""
    for index in where.flatten().nonzero()[:, 0].split(_ROWS):
        yield index, denoiser.head(hidden.flatten(0, 1)[index.to(hidden.device)])
