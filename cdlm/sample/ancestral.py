"""Ancestral sampling: the posterior bridge, iterated with the model's own prediction in place of the data.

`plain_ancestral` is the definition, for every prior. `ancestral` draws from the same distribution with noise that is
drawn beforehand (`plan.py`) and runs the network only where a token is drawn; `ancestral_with_corrector` also remasks.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cdlm.process.process import Process
from cdlm.rng import Rng, categorical
from cdlm.sample.corrector import Corrector
from cdlm.sample.draw import Draw, State, make_draw, writable
from cdlm.sample.order import unmask_in_order
from cdlm.sample.plan import Evaluation, execute
from cdlm.sample.settings import Settings
from cdlm.sample.timesteps import Times, timesteps
from cdlm.types import Predictor, Tokens, wide

_AT_ONCE = 2**22

Given = Bool[Tensor, "b l"] | None


@torch.no_grad()
def plain_ancestral(
    predict: Predictor,
    process: Process,
    x: Tokens,
    settings: Settings,
    rng: Rng,
    *,
    given: Given = None,
    start: float = 1.0,
    draw: Draw | None = None,
) -> Iterator[State]:
    """Ancestral sampling as it is defined: x_s ~ q(x_s | x_t, f(x_t, t)), at every position and in every step."""
    draw = draw or make_draw(predict, process, x, settings)
    times = timesteps(settings, start)
    num_steps = len(times) - 1
    yield State(x, 0, num_steps, [0] * len(x))
    for step, (t, s) in enumerate(itertools.pairwise(times.tolist()), 1):
        noise = rng("hop", step)
        prediction = draw.log_probs(predict, process, x, t)
        if settings.posterior == "mixture":  # draw x_0 from the prediction first; what is known carries over
            x0 = categorical(prediction, noise("x_0").uniform(x.shape[1], x.device))
            prediction = torch.where(process.positions(x), x0, x)
        x_s = process.bridge(prediction, x, s, t, noise)
        x = x_s if given is None else torch.where(given, x, x_s)
        yield State(x, step, num_steps, [step] * len(x))


def ancestral(
    predict: Predictor,
    process: Process,
    x: Tokens,
    settings: Settings,
    rng: Rng,
    *,
    given: Given = None,
    start: float = 1.0,
    draw: Draw | None = None,
) -> Iterator[State]:
    """The same distribution by a plan; under masking in any unmasking order.

    `given` positions never change. Under masking, whatever is visible in x is given anyway; under another prior this
    clamps them.
    """
    draw = draw or make_draw(predict, process, x, settings)
    if process.absorbing:
        return unmask_in_order(predict, process, x, settings, rng, given=given, start=start, draw=draw)
    plan = _plan_any_prior(process, writable(process, x, given), settings, start, rng, None)
    return execute(predict, process, x, plan, draw, _num_evaluations(settings))


def ancestral_with_corrector(
    predict: Predictor,
    process: Process,
    x: Tokens,
    settings: Settings,
    rng: Rng,
    *,
    given: Given = None,
    start: float = 1.0,
    draw: Draw | None = None,
) -> Iterator[State]:
    """Ancestral steps in which the corrector also takes tokens back (`corrector.py`)."""
    draw = draw or make_draw(predict, process, x, settings)
    corrector = Corrector(settings.corrector, settings.eta)
    make_plan = _plan_masked if process.absorbing else _plan_any_prior
    plan = make_plan(process, writable(process, x, given), settings, start, rng, corrector)
    return execute(predict, process, x, plan, draw, _num_evaluations(settings))


def _num_evaluations(settings: Settings) -> int:
    return (settings.steps or 0) + (settings.final_step != "none")


def _plan_masked(
    process: Process, free: Bool[Tensor, "b l"], settings: Settings, start: float, rng: Rng, corrector: Corrector
) -> Iterator[Evaluation]:
    """Under masking the pattern of masks is a Markov chain of its own: it is drawn first, remasking included."""
    is_mask, times = free, _times(settings, start)
    for first, t, a_t, a_s, kappa in _stretches(process, free, times, corrector):
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
        for k, (counts, index, u_token) in enumerate(columns):
            gone = cleared[k][1]
            noise = (gone, torch.full_like(gone, process.vocab)) if len(gone) else None
            yield Evaluation(_time_column(t[k], free), counts, index, u_token, noise=noise)
    if settings.final_step == "argmax":
        yield _greedy(is_mask, times)


def _plan_any_prior(
    process: Process,
    free: Bool[Tensor, "b l"],
    settings: Settings,
    start: float,
    rng: Rng,
    corrector: Corrector | None,
) -> Iterator[Evaluation]:
    """Under any other prior every position may leave its token, whatever it is; few do.

    Where a corrector acts (Psi), a position goes to s = 0 and is noised again: with a_s it takes the clean token, else
    it turns into noise and asks nobody.
    """
    times = _times(settings, start)
    for first, t, a_t, a_s, kappa in _stretches(process, free, times, corrector):
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
            turned = noise[k][1:] if len(noise[k][1]) else None
            yield Evaluation(_time_column(t[k], free), counts, index, *noises, noise=turned)
    if settings.final_step == "argmax":
        yield _greedy(free, times)


def _times(settings: Settings, start: float) -> Times:
    """The times of the steps; a sampled final step is one more step, to 0."""
    times = timesteps(settings, start)
    return torch.cat([times, torch.zeros(1, dtype=times.dtype)]) if settings.final_step == "sample" else times


def _stretches(
    process: Process, free: Bool[Tensor, "b l"], times: Times, corrector: Corrector | None
) -> Iterator[tuple[int, list[float], *tuple[Float[Tensor, "k 1 1"], ...]]]:
    """Steps a few at a time, as many as fit in memory: the first's number, times, alphas, and the corrector's kappa."""
    alpha, t = process.noise.alpha(times), times.tolist()
    size = max(1, _AT_ONCE // free.numel())
    for first in range(0, len(times) - 1, size):
        end = min(first + size, len(times) - 1)
        a_t, a_s = alpha[first:end], alpha[first + 1 : end + 1]
        kappa = torch.ones_like(a_t) if corrector is None else corrector.kappa(a_t, a_s)
        columns = (column.to(wide(free.device)).to(free.device)[:, None, None] for column in (a_t, a_s, kappa))
        yield first, t[first:end], *columns


def _noise(rng: Rng, first: int, steps: list[float], like: Bool[Tensor, "b l"]) -> Float[Tensor, "k b l"]:
    """A uniform for each step, sequence and position; the column of a step and position is step * l + position."""
    b, l = like.shape
    return rng.uniform(len(steps) * l, like.device, first * l).view(b, len(steps), l).transpose(0, 1).contiguous()


def _chosen(where: Bool[Tensor, "k b l"], *columns: Tensor) -> list[tuple[Any, ...]]:
    """For each step, the chosen positions: how many in each sequence, their index, and the columns that go with them.

    The counts of all steps come from the device at once.
    """
    counts = where.sum(-1).tolist()
    sizes = [sum(row) for row in counts]
    flat = where.flatten().nonzero()[:, 0]
    split = [(flat % (where.shape[1] * where.shape[2])).split(sizes)]
    split += [column.flatten()[flat].split(sizes) for column in columns]
    return list(zip(counts, *split, strict=True))


def _time_column(t: float, like: Tensor) -> Float[Tensor, "b"]:
    return torch.full((len(like),), t, dtype=wide(like.device), device=like.device)


def _greedy(where: Bool[Tensor, "b l"], times: Times) -> Evaluation:
    """The greedy final step: the most probable token wherever it is not settled."""
    counts, index = _chosen(where[None])[0]
    return Evaluation(_time_column(float(times[-1]), where), counts, index, None)
