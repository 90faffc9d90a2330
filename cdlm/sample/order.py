"""Sampling along an unmasking order: which positions are drawn in which step, settled before the network runs.

An order (`process/order.py`) gives every masked position a level in (0, 1); it is still masked at time t while its
level lies below the share of masks left, (1 - alpha_t) / (1 - alpha_start). Independent uniform levels are the
ancestral sampler of the paper; levels far apart at neighbouring positions spread the tokens of one step, which are
drawn independently of each other, over the text; and steps at the levels themselves are first-hitting sampling, one
token at a time: the limit of infinitely many steps.
"""

import dataclasses
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cdlm.process.order import Level, equal_steps
from cdlm.process.process import Process
from cdlm.rng import Rng
from cdlm.sample.draw import Draw, State, make_draw, writable
from cdlm.sample.plan import Evaluation, NewTokens, execute
from cdlm.sample.samplers import ORDERS, load_function
from cdlm.sample.settings import Settings
from cdlm.sample.timesteps import Times, timesteps
from cdlm.types import Predictor, Tokens, wide


def unmask_in_order(
    predict: Predictor,
    process: Process,
    x: Tokens,
    settings: Settings,
    rng: Rng,
    *,
    given: Bool[Tensor, "b l"] | None = None,
    start: float = 1.0,
    draw: Draw | None = None,
    new_tokens: NewTokens | None = None,
) -> Iterator[State]:
    """Unmask x along the timesteps, in the order of the settings; the tokens of a step are drawn by `new_tokens`, or
    else independently."""
    times = timesteps(settings, start)
    is_mask = writable(process, x, given).cpu()
    level = _levels(settings, is_mask, len(times) - 1, rng)
    plan = plan_by_level(process, is_mask, level, times, rng, settings.final_step, x.device)
    draw = draw or make_draw(predict, process, x, settings)
    return execute(predict, process, x, plan, draw, len(plan), new_tokens)


def first_hitting(
    predict: Predictor,
    process: Process,
    x: Tokens,
    settings: Settings,
    rng: Rng,
    *,
    given: Bool[Tensor, "b l"] | None = None,
    start: float = 1.0,
    draw: Draw | None = None,
) -> Iterator[State]:
    """One token in each evaluation, in random order and at its exact time: ancestral sampling with perfect steps."""
    is_mask = writable(process, x, given).cpu()
    step, t = _one_at_a_time(process, is_mask, rng, start)
    plan = _without_empty_steps(step, t, is_mask, rng, x.device)
    return execute(predict, process, x, plan, draw or make_draw(predict, process, x, settings), len(plan))


def unmasking_steps(
    process: Process, is_mask: Bool[Tensor, "b l"], settings: Settings, rng: Rng, start: float = 1.0
) -> tuple[Int[Tensor, "b l"], Float[Tensor, "b l"]]:
    """The step in which a sampler with these settings draws each masked position, and the time of that step.

    Of samplers with an order that is fixed before the network runs.
    """
    if settings.sampler == "first-hitting":
        return _one_at_a_time(process, is_mask, rng, start)
    times = timesteps(settings, start)
    step = step_of_level(process, _levels(settings, is_mask, len(times) - 1, rng), times)
    return step, times[step]


def _levels(settings: Settings, is_mask: Bool[Tensor, "b l"], steps: int, rng: Rng) -> Level:
    level: Level = load_function(ORDERS[settings.order].levels)(is_mask, steps, rng)
    return equal_steps(level, is_mask) if settings.step_size == "equal" else level


def _one_at_a_time(
    process: Process, is_mask: Bool[Tensor, "b l"], rng: Rng, start: float
) -> tuple[Int[Tensor, "b l"], Float[Tensor, "b l"]]:
    """The steps and times of first-hitting sampling."""
    level = rng("reveal").uniform(is_mask.shape[1]).masked_fill(~is_mask, -1.0)
    step = level.argsort(-1, descending=True).argsort(-1)
    noise = process.noise
    alpha = float(noise.alpha(torch.tensor(start, dtype=torch.float64)))
    return step, noise.inverse(1 - level.clamp(min=0) * (1 - alpha))


def plan_by_level(
    process: Process,
    is_mask: Bool[Tensor, "b l"],
    level: Level,
    times: Times,
    rng: Rng,
    final_step: str = "none",
    device: torch.device | str = "cpu",
) -> list[Evaluation]:
    """The evaluations that unmask positions at their levels; what the steps leave over falls to the final step.

    Steps in which a sequence draws nothing are left out, for each sequence by itself: its next step moves up.
    """
    steps, step = len(times) - 1, step_of_level(process, level, times)
    now = is_mask if final_step == "sample" else is_mask & (step < steps)
    plan = _without_empty_steps(step, times[step], now, rng, device)
    over = is_mask & (step == steps)
    if final_step == "argmax" and bool(over.any()):
        greedy = _without_empty_steps(torch.zeros_like(step), times[step], over, rng, device)
        plan += [dataclasses.replace(evaluation, u=None) for evaluation in greedy]
    return plan


def step_of_level(process: Process, level: Level, times: Times) -> Int[Tensor, "b l"]:
    """The step, from 0 on, in which a position of each level is unmasked; the number of steps if in none of them."""
    masks = 1 - process.noise.alpha(times)
    share = masks[1:] / masks[0]
    return len(share) - torch.searchsorted(share.flip(0).contiguous(), level, right=True)


def _without_empty_steps(
    step: Int[Tensor, "b l"],
    t: Float[Tensor, "b l"],
    where: Bool[Tensor, "b l"],
    rng: Rng,
    device: torch.device | str,
) -> list[Evaluation]:
    """Evaluations in which every sequence goes through its own non-empty steps, one after the other.

    Made on the host, in one piece: the device then never waits to learn how many positions come next.
    """
    b, l = step.shape
    busy = torch.zeros(b, int(step.max()) + 1, dtype=torch.bool)
    flat = where.flatten().nonzero()[:, 0]
    busy[flat // l, step.flatten()[flat]] = True
    number = (busy.cumsum(-1) - 1).gather(-1, step).flatten()[flat]
    total = int(busy.sum(-1).max())
    counts = torch.bincount(number * b + flat // l, minlength=total * b).view(total, b).tolist()
    times = torch.ones(total, b, dtype=t.dtype)
    times[number, flat // l] = t.flatten()[flat]
    index = flat[number.argsort(stable=True)]
    u = rng("data").uniform(l).flatten()[index]
    sizes = [sum(row) for row in counts]
    times, u = (column.to(wide(device)).to(device) for column in (times, u))
    split = zip(times, counts, index.to(device).split(sizes), u.split(sizes), strict=True)
    max_count = max((max(row) for row in counts), default=0)
    return [Evaluation(*columns, max_count=max_count) for columns in split]
