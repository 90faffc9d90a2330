"""Unmasking orders that ask the network: first the positions that it is most certain about.

This is no longer the distribution of the model (what is unmasked depends on what was drawn), and often better text for
it. For masked processes.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cdlm.process.process import Process
from cdlm.rng import Rng
from cdlm.sample.draw import (
    Draw,
    Head,
    State,
    make_draw,
    row_chunks,
    same_at_all_positions,
    token_probs,
    trunk_and_head,
    writable,
)
from cdlm.sample.logits import LogitsRows
from cdlm.sample.settings import Settings
from cdlm.sample.timesteps import timesteps
from cdlm.types import Index, LogLaw, Predictor, Tokens, wide

Certainty = Callable[[LogLaw, Index], Float[Tensor, "n"]]
"""How certain the network is of each row, from its log-probabilities and the token drawn."""


def probability(log_probs: LogLaw, token: Index) -> Float[Tensor, "n"]:
    """The log-probability of the token that was drawn."""
    return log_probs.gather(-1, token[:, None])[:, 0]


def margin(log_probs: LogLaw, token: Index) -> Float[Tensor, "n"]:
    """Between the two most probable tokens."""
    best = log_probs.topk(min(2, log_probs.shape[-1])).values.exp()
    return best[:, 0] - best[:, -1]


def negative_entropy(log_probs: LogLaw, token: Index) -> Float[Tensor, "n"]:
    return (log_probs.exp() * log_probs.clamp(min=-1e9)).sum(-1)


CERTAINTIES: dict[str, Certainty] = {
    "probability": probability,
    "margin": margin,
    "entropy-bound": negative_entropy,
}


def confidence(
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
    """Draw a token at every mask, keep the most certain ones, ask again for the rest.

    Each step keeps the share of masks that the timesteps say. Certainty is that of the prediction itself, before any
    logits processor; ties go in random order.
    """
    return _most_certain_first(predict, process, x, settings, rng, given, start, draw, bound=None)


def entropy_bound(
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
    """Lowest entropies first, and more than the timesteps say as long as the entropies of all that a step keeps but the
    largest add up to at most `settings.entropy_bound` nats: a limit on how much drawing them independently can cost.

    The number of evaluations then follows from the text, and is at most the number of steps.
    """
    bound = settings.entropy_bound
    return _most_certain_first(predict, process, x, settings, rng, given, start, draw, bound=bound)


@torch.no_grad()
def _most_certain_first(
    predict: Predictor,
    process: Process,
    x: Tokens,
    settings: Settings,
    rng: Rng,
    given: Bool[Tensor, "b l"] | None,
    start: float,
    draw: Draw | None,
    bound: float | None,
) -> Iterator[State]:
    draw = draw or make_draw(predict, process, x, settings)
    certainty = CERTAINTIES[settings.order]
    times = timesteps(settings, start)
    trunk, head = trunk_and_head(predict, process)
    l, steps = x.shape[1], len(times) - 1
    masks = 1 - process.noise.alpha(times)
    first_masks = writable(process, x, given).sum(-1)
    uniform_input = same_at_all_positions(predict, process, x)
    nfe, probs = [0] * len(x), draw.unknown_probs(x)
    yield State(x, 0, steps, nfe, probs)
    for step in range(steps):
        is_mask = writable(process, x, given)
        left = is_mask.sum(-1)
        share = float(masks[step + 1] / masks[0])
        keep = (left - (first_masks.to(wide(x.device)) * share + 1e-9).floor().long()).clamp(min=0)
        busy = (left > 0) if bound is not None else (keep > 0)
        run = torch.ones_like(busy) if draw.compiled else busy
        running = run.nonzero()[:, 0]
        if bool(busy.any()):
            nfe = [done + now for done, now in zip(nfe, busy.tolist(), strict=True)]
            index = (is_mask & busy[:, None]).flatten().nonzero()[:, 0]
            place = (run.cumsum(0) - 1)[index // l] * l + index % l
            t = torch.full((len(running),), float(times[step]), dtype=wide(x.device), device=x.device)
            hidden = trunk(x[running][:, :1], t).expand(-1, l, -1) if uniform_input else trunk(x[running], t)
            u = rng("hop", step).uniform(l, x.device).flatten()[index]
            rows = LogitsRows(t.new_full((len(index),), float(times[step])), x, index)
            token, certain, new_probs = _drawn(
                head, hidden.flatten(0, 1)[place], rows, u, draw, certainty, process.vocab
            )
            table = torch.full(x.shape, -torch.inf, dtype=certain.dtype, device=x.device)
            table.view(-1)[index] = certain
            tie = rng("tie", step).uniform(l, x.device)
            chosen = most_certain(table, tie, keep, bound) & is_mask
            uniform_input = False
            drawn = x.flatten().scatter(0, index, token).view_as(x)
            x = torch.where(chosen, drawn, x)
            if probs is not None:
                probs = torch.where(chosen, probs.flatten().scatter(0, index, new_probs).view_as(x), probs)
        yield State(x, step + 1, steps, nfe, probs)
        if not bool(writable(process, x, given).any()):
            return


def _drawn(
    head: Head,
    hidden: Tensor,
    rows: LogitsRows,
    u: Float[Tensor, "n"],
    draw: Draw,
    certainty: Certainty,
    vocab: int,
) -> tuple[Index, Float[Tensor, "n"], Float[Tensor, "n"]]:
    """A token for each row, how certain the network is about it, and the token's probability, if that is watched."""
    device = u.device
    token = torch.empty(len(hidden), dtype=torch.long, device=device)
    certain = torch.empty(len(hidden), dtype=wide(device), device=device)
    probs = torch.full((len(hidden),), torch.nan, device=device)
    for part in row_chunks(len(hidden), vocab):
        logits = head(hidden[part]).to(device)
        token[part] = draw.token(draw.process(logits, LogitsRows(rows.t[part], rows.x, rows.index[part])), u[part])
        certain[part] = certainty(logits.to(wide(device)).log_softmax(-1), token[part])
        if draw.watch:
            probs[part] = token_probs(logits, token[part])
    return token, certain, probs


def most_certain(
    certainty: Float[Tensor, "b l"], tie: Float[Tensor, "b l"], keep: Int[Tensor, "b"], bound: float | None
) -> Bool[Tensor, "b l"]:
    """The `keep` most certain positions of each sequence, and those that the entropy bound adds."""
    place = ((certainty * 1e6).round() + tie).argsort(-1, descending=True)
    value = certainty.gather(-1, place)
    rank = torch.arange(certainty.shape[1], device=certainty.device)
    first = rank < keep[:, None]
    if bound is not None:
        entropy = -value.clamp(min=-1e9)
        first |= (entropy.cumsum(-1) - entropy <= bound) & (value > -torch.inf)  # sorted: the largest is the last
    return torch.zeros_like(first).scatter(-1, place, first)
