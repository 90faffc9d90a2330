"""Ancestral sampling: the posterior bridge, iterated with the model's own prediction in place of the data.

x_s ~ q(x_s | x_t, f(x_t, t)) down a grid, for every prior, with correctors on request. `plan.py` has the factorised
law that makes it cheap.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cdlm.process.process import Posterior, Process
from cdlm.rng import Rng, categorical
from cdlm.sample.corrector import Corrector
from cdlm.sample.order import check_tail, ordered
from cdlm.sample.plan import Drawing, Pass, State, follow, moving
from cdlm.sample.settings import Tail
from cdlm.sample.timesteps import Grid
from cdlm.types import Predictor, Tokens, wide

_AT_ONCE = 2**22


@torch.no_grad()
def plain_ancestral(
    predict: Predictor,
    process: Process,
    x: Tokens,
    grid: Grid,
    rng: Rng,
    posterior: Posterior = "plug-in",
    given: Bool[Tensor, "b l"] | None = None,
) -> Iterator[State]:
    """Ancestral sampling as it is defined: x_s ~ q(x_s | x_t, f(x_t, t)), at every position and in every hop.

    `ancestral` draws from the same distribution with noise drawn beforehand, and runs the network only where it is
    needed. As there, `given` positions keep their tokens.
    """
    hops = len(grid) - 1
    yield State(x, 0, hops, [0] * len(x))
    for hop, (t, s) in enumerate(itertools.pairwise(grid.tolist()), 1):
        noise = rng("hop", hop)
        clean = predict(x, t)
        if posterior == "mixture":  # draw x_0 from the prediction first; what is known carries over
            drawn = categorical(clean, noise("x_0").uniform(x.shape[1], x.device))
            clean = torch.where(process.positions(x), drawn, x)
        x_s = process.bridge(clean, x, s, t, noise)
        x = x_s if given is None else torch.where(given, x, x_s)
        yield State(x, hop, hops, [hop] * len(x))


def ancestral(
    predict: Predictor,
    process: Process,
    x: Tokens,
    grid: Grid,
    rng: Rng,
    drawing: Drawing | None = None,
    tail: Tail = "none",
    given: Bool[Tensor, "b l"] | None = None,
    corrector: Corrector | None = None,
) -> Iterator[State]:
    """Sample down the grid; yields the state after each evaluation.

    `given` positions never change. Under masking, whatever is visible in x is given anyway; under another prior this
    clamps them. A `tail` is one more evaluation after the hops, and wants a grid that ends above 0.
    """
    masks = process.absorbing
    if masks and corrector is None:
        return ordered(predict, process, x, grid, rng, "random", drawing, tail, given)
    check_tail(process, grid, tail)
    full = torch.cat([grid, torch.zeros(1, dtype=grid.dtype)]) if tail == "sample" else grid
    plan = _masked if masks else _full
    hops = plan(process, moving(process, x, given), full, rng, corrector, tail == "argmax")
    return follow(predict, process, x, hops, drawing, len(grid) - 1 + (tail != "none"))


def _masked(
    process: Process, free: Bool[Tensor, "b l"], grid: Grid, rng: Rng, corrector: Corrector | None, greedy: bool
) -> Iterator[Pass]:
    """Under masking the pattern of masks is a Markov chain of its own: it is drawn first, re-masking included."""
    is_mask = free
    for first, t, a_t, a_s, kappa in _stretches(process, free, grid, corrector):
        reveal = kappa * (a_s - a_t) / (1 - a_t) + (1 - kappa) * a_s
        remask = (1 - kappa) * (1 - a_s)
        u = _noise(rng("leave"), first, t, free)
        draw, clear = torch.zeros_like(u, dtype=torch.bool), torch.zeros_like(u, dtype=torch.bool)
        for k in range(len(t)):
            draw[k] = is_mask & (u[k] < reveal[k])
            clear[k] = free & ~is_mask & (u[k] < remask[k])
            is_mask = (is_mask & ~draw[k]) | clear[k]
        columns = _chosen(draw, _noise(rng("data"), first, t, free))
        cleared = _chosen(clear)
        for k, (counts, index, token) in enumerate(columns):
            gone = cleared[k][1]
            noise = (gone, torch.full_like(gone, process.vocab)) if len(gone) else None
            yield Pass(_times(t[k], free), counts, index, token, noise=noise)
    if greedy:
        yield _greedy(is_mask, grid)


def _full(
    process: Process, free: Bool[Tensor, "b l"], grid: Grid, rng: Rng, corrector: Corrector | None, greedy: bool
) -> Iterator[Pass]:
    """Under any other prior every position may leave its token, whatever it is; few do.

    Where a corrector acts (Psi), a position goes to s = 0 and is noised again: with a_s it takes the clean token, else
    it turns into noise and asks nobody.
    """
    for first, t, a_t, a_s, kappa in _stretches(process, free, grid, corrector):
        to, noised = a_s, torch.zeros((), dtype=torch.bool, device=free.device)
        if corrector is not None:
            corrected = _noise(rng("corrected"), first, t, free) >= kappa.clamp(0, 1)
            to = torch.where(corrected, torch.ones_like(a_s), a_s)
            noised = corrected & (_noise(rng("noised"), first, t, free) >= a_s)
        most = (1 - a_t / to) / (1 - a_t)
        u = _noise(rng("leave"), first, t, free)
        prior = process.prior_at(_noise(rng("prior"), first, t, free))
        route = torch.where(_noise(rng("route"), first, t, free) < to, -1, prior)
        data = _noise(rng("data"), first, t, free)
        columns = _chosen(free & ~noised & (u < most), data, u / most, route)
        noise = _chosen((free & noised).expand_as(u), prior)
        for k, (counts, index, *noises) in enumerate(columns):
            yield Pass(_times(t[k], free), counts, index, *noises, noise=noise[k][1:] if len(noise[k][1]) else None)
    if greedy:
        yield _greedy(free, grid)


def _stretches(
    process: Process, free: Bool[Tensor, "b l"], grid: Grid, corrector: Corrector | None
) -> Iterator[tuple[int, list[float], *tuple[Float[Tensor, "k 1 1"], ...]]]:
    """Hops a few at a time, as many as fit in memory: the first's number, times, alphas, and the corrector's kappa."""
    alpha, times = process.noise.alpha(grid), grid.tolist()
    size = max(1, _AT_ONCE // free.numel())
    for first in range(0, len(grid) - 1, size):
        end = min(first + size, len(grid) - 1)
        a_t, a_s = alpha[first:end], alpha[first + 1 : end + 1]
        kappa = torch.ones_like(a_t) if corrector is None else corrector.kappa(a_t, a_s)
        columns = (column.to(wide(free.device)).to(free.device)[:, None, None] for column in (a_t, a_s, kappa))
        yield first, times[first:end], *columns


def _noise(rng: Rng, first: int, hops: list[float], like: Bool[Tensor, "b l"]) -> Float[Tensor, "k b l"]:
    """A uniform for each hop, sequence and position; the column of a hop and position is hop * l + position."""
    b, l = like.shape
    return rng.uniform(len(hops) * l, like.device, first * l).view(b, len(hops), l).transpose(0, 1).contiguous()


def _chosen(where: Bool[Tensor, "k b l"], *columns: Tensor) -> list[tuple[Any, ...]]:
    """For each hop, the chosen positions: how many in each sequence, their index, and the columns that go with them.

    The counts of all hops come from the device at once.
    """
    counts = where.sum(-1).tolist()
    sizes = [sum(row) for row in counts]
    flat = where.flatten().nonzero()[:, 0]
    split = [(flat % (where.shape[1] * where.shape[2])).split(sizes)]
    split += [column.flatten()[flat].split(sizes) for column in columns]
    return list(zip(counts, *split, strict=True))


def _times(t: float, like: Tensor) -> Float[Tensor, "b"]:
    return torch.full((len(like),), t, dtype=wide(like.device), device=like.device)


def _greedy(where: Bool[Tensor, "b l"], grid: Grid) -> Pass:
    """The greedy tail: the most likely token wherever it is not settled."""
    counts, index = _chosen(where[None])[0]
    return Pass(_times(float(grid[-1]), where), counts, index, None)
