"""The likelihood of a sampler itself: what a masked model generates in N steps, as a bound in nats.

A sampler whose order is fixed before the network runs draws, in step k, the positions S_k independently of each other:

    p(x) = E over orders of  prod_k prod_{i in S_k} f(x_t, t_k)_i[x_i]

with x_t = x at the positions of the steps before k and masks elsewhere, and f after all logits processors. By Jensen

    -log p(x)  <=  E over orders of  sum_k sum_{i in S_k} -log f(x_t, t_k)_i[x_i]

and `sampler_nats` is an unbiased estimate of the right side: exact where there is only one order. It exceeds the NELBO
of the model by what drawing the tokens of a step independently of each other costs. The sampler `joint` draws them one
after the other: its factors are the conditionals of the joint head, each given the tokens of S_k to its left. Where the
order follows from the predictions, but not from the tokens drawn with them (`margin`, `entropy-bound`), the sampler is
run with its tokens replaced by those of x: then only ties are random.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cdlm.model.denoiser import Denoiser
from cdlm.process.process import Process
from cdlm.rng import Rng, seeded
from cdlm.sample.draw import Draw, row_chunks, trunk_and_head, unconditional_log_probs
from cdlm.sample.joint import with_joint_head
from cdlm.sample.logits import LogitsProcessor, LogitsRows, logits_processors
from cdlm.sample.order import unmasking_steps
from cdlm.sample.samplers import SAMPLERS, load_function
from cdlm.sample.settings import Settings
from cdlm.types import Index, LogLaw, Predictor, Time, Tokens, wide

Nats = Float[Tensor, "b"]

FIXED_ORDER = ("joint", "ancestral", "plain", "first-hitting")
"""Samplers whose order is fixed before the network runs."""
UNROLLED = ("confidence", "entropy-bound")
"""Samplers whose order depends on the predictions, but not on the tokens drawn with them."""


def check_has_likelihood(settings: Settings, process: Process | None) -> None:
    """Refuse samplers for which there is no such bound."""
    obstacle = likelihood_obstacle(settings, process)
    if obstacle is not None:
        raise ValueError(f"there is no likelihood bound for {obstacle}.")


def likelihood_obstacle(settings: Settings, process: Process | None) -> str | None:
    """What leaves a sampler without such a bound; None if there is one."""
    if process is None:
        return "an autoregressive model, whose likelihood is exact"
    if not process.absorbing:
        return f"a {process.name} process, whose tokens may change more than once"
    if settings.order == "probability":
        return "--order probability, which depends on the tokens that are drawn and not kept"
    if settings.final_step == "argmax":
        return "--final-step argmax"
    if settings.block_length:
        return "--block-length"
    if settings.sampler not in (*FIXED_ORDER, *UNROLLED):
        return f"the {settings.sampler} sampler"
    return None


def repeated_sampler_nats(
    predict: Predictor,
    process: Process,
    x0: Tokens,
    settings: Settings,
    likelihood_samples: int = 16,
    seed: int = 0,
    *,
    given: Bool[Tensor, "b l"] | None = None,
    rows: int = 64,
    banned: Sequence[int] = (),
    special: Sequence[int] = (),
) -> Float[Tensor, "b repeats"]:
    """Independent estimates for each sequence, whose spread is the Monte Carlo error.

    They share `likelihood_samples` network evaluations, or more where the order depends on the predictions. There are
    at least two of them unless `likelihood_samples` is 1, and only one for a single step, which is exact.
    """
    steps = min(settings.steps or x0.shape[1], x0.shape[1]) + (settings.final_step != "none")
    repeats = 1 if steps == 1 else max(min(2, likelihood_samples), likelihood_samples // steps)
    found = [
        sampler_nats(
            predict, process, x0, settings, seeded(seed, "sampler likelihood", number, batch=len(x0)), given=given,
            num_evaluations=likelihood_samples // repeats, rows=rows, banned=banned, special=special,
        )
        for number in range(repeats)
    ]  # fmt: skip
    return torch.stack(found, -1)


@torch.no_grad()
def sampler_nats(
    predict: Predictor,
    process: Process,
    x0: Tokens,
    settings: Settings,
    rng: Rng,
    *,
    given: Bool[Tensor, "b l"] | None = None,
    num_evaluations: int | None = None,
    rows: int = 64,
    banned: Sequence[int] = (),
    special: Sequence[int] = (),
) -> Nats:
    """One estimate of the bound on -log p(x0) for each sequence, in nats; infinite where p is zero.

    `given` positions are context: the bound is that of the other tokens, given these. At most `num_evaluations` of the
    steps of a sequence are evaluated and stand for the others; by default, and where the order depends on the
    predictions, all of them. `rows` sequences go through the network at a time. `banned` and `special` tokens are those
    of `generate`.
    """
    check_has_likelihood(settings, process)
    process.check_ids(x0)
    joint = with_joint_head(predict) if settings.sampler == "joint" else None
    is_mask = ~process.is_special(x0) if given is None else ~(given.to(x0.device) | process.is_special(x0))
    unconditional = None
    if settings.guidance or settings.guidance_end:
        unconditional = unconditional_log_probs(predict, process, x0)

    def draw_of(is_mask: Bool[Tensor, "n l"], *processors: LogitsProcessor) -> Draw:
        stages = logits_processors(settings, unconditional, tuple(banned), prompt=~is_mask, special=tuple(special))
        return Draw((*stages, *processors))

    total = torch.zeros(len(x0), dtype=torch.float64)
    if settings.sampler in UNROLLED:
        for part in torch.arange(len(x0)).split(rows):
            at = part.to(x0.device)
            total[part] = _forced_nats(predict, process, x0[at], is_mask[at], settings, rng[part], draw_of)
        return total

    is_mask = is_mask.cpu()
    step, t = unmasking_steps(process, is_mask, settings, rng)
    sequence, number, weight = _evaluated_steps(step.masked_fill(~is_mask, -1), num_evaluations, rng)
    for part in torch.arange(len(sequence)).split(rows):
        own, now = sequence[part], number[part][:, None]
        drawn = is_mask[own] & (step[own] == now)
        time = t[own].masked_fill(~drawn, 0).amax(-1)
        clean, later = x0[own.to(x0.device)], (is_mask[own] & (step[own] >= now)).to(x0.device)
        x_t = clean.masked_fill(later, process.vocab)
        draw = draw_of(is_mask[own].to(x0.device))
        nats = _step_nats(predict, process, x_t, clean, drawn.to(x0.device), time, draw, joint)
        total.index_add_(0, own, nats * weight[part])
    return total


def _evaluated_steps(
    step: Int[Tensor, "b l"], most: int | None, rng: Rng
) -> tuple[Int[Tensor, "n"], Int[Tensor, "n"], Float[Tensor, "n"]]:
    """Which steps of which sequences are evaluated, and how many steps of its sequence each of them stands for.

    `step` is -1 where nothing is drawn; steps in which nothing is drawn are left out. If a sequence has more than
    `most` steps, a systematic sample is taken of them, in proportion to the positions that they draw.
    """
    width = int(step.max()) + 2
    pairs, drawn = (torch.arange(len(step))[:, None] * width + step)[step >= 0].unique(return_counts=True)
    sequence, number = pairs // width, pairs % width
    if most is None:
        return sequence, number, torch.ones(len(pairs), dtype=torch.float64)
    total = (step >= 0).sum(-1).double()
    through = drawn.cumsum(0) - (total.cumsum(0) - total)[sequence]
    begin, end = ((count * most) / total[sequence] for count in (through - drawn, through))
    offset = rng("steps").uniform(1)[:, 0][sequence]
    weight = ((end + offset).floor() - (begin + offset).floor()) / (end - begin)
    weight[torch.bincount(sequence)[sequence] <= most] = 1
    kept = weight > 0
    return sequence[kept], number[kept], weight[kept]


def _step_nats(
    predict: Predictor,
    process: Process,
    x_t: Tokens,
    x0: Tokens,
    drawn: Bool[Tensor, "b l"],
    t: Time,
    draw: Draw,
    joint: Denoiser | None,
) -> Nats:
    """-log f(x_t, t)[x0], added up over the `drawn` positions of each sequence; by the head of `joint`, from left to
    right, if that is given."""
    length, time = x0.shape[1], t.to(wide(x0.device)).to(x0.device)
    trunk, head = trunk_and_head(predict, process)
    hidden, turns = trunk(x_t, time), [drawn]
    if joint is not None:
        hidden, rank = joint.condition(hidden, x0, drawn), drawn.cumsum(-1)
        turns = [drawn & (rank == number) for number in range(1, int(rank.max()) + 1)]
    hidden = hidden.flatten(0, 1)
    total = torch.zeros(len(x0), dtype=wide(x0.device), device=x0.device)
    for turn in turns:
        index = turn.flatten().nonzero()[:, 0]
        for chunk in row_chunks(len(index), process.vocab):
            at = index[chunk]
            logits = draw.process(head(hidden[at]), LogitsRows(time[at // length], x_t, at))
            total.index_add_(0, at // length, _nats_of(logits, x0.flatten()[at]))
        x_t = torch.where(turn, x0, x_t)  # for the penalties of the next turn
    return total.cpu().double()


def _forced_nats(
    predict: Predictor,
    process: Process,
    x0: Tokens,
    is_mask: Bool[Tensor, "b l"],
    settings: Settings,
    rng: Rng,
    draw_of: Callable[..., Draw],
) -> Nats:
    """The sampler itself, made to draw the tokens of x0; the nats of those that it keeps."""
    nats = torch.zeros(x0.shape, dtype=wide(x0.device), device=x0.device)

    def force(logits: LogLaw, rows: LogitsRows) -> LogLaw:
        token = x0.flatten()[rows.index]
        nats.view(-1)[rows.index] = _nats_of(logits, token)
        return torch.full_like(logits, -torch.inf).scatter(-1, token[:, None], 0.0)

    sampler = load_function(SAMPLERS[settings.sampler].function)
    x = x0.masked_fill(is_mask, process.vocab)
    total = torch.zeros(len(x0), dtype=nats.dtype, device=x0.device)
    for before, after in itertools.pairwise(sampler(predict, process, x, settings, rng, draw=draw_of(is_mask, force))):
        total += torch.where(before.x != after.x, nats, 0).sum(-1)
    return total.cpu().double()


def _nats_of(logits: LogLaw, token: Index) -> Float[Tensor, "n"]:
    """-log p of each token, as precise as the draw."""
    return -logits.to(wide(logits.device)).log_softmax(-1).gather(-1, token[:, None])[:, 0]
