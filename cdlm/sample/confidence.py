"""Reveal orders that ask the network: first the positions it is most certain about.

Not the law of the model any more (what is revealed depends on what was drawn), and often better text for it. For masked
processes.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cdlm.process.process import Process
from cdlm.rng import Rng
from cdlm.sample.plan import Drawing, Head, State, chunks, is_blank, moving, picked, split
from cdlm.sample.settings import Confidence
from cdlm.sample.timesteps import Grid
from cdlm.types import Index, LogLaw, Predictor, Tokens, wide


@torch.no_grad()
def confident(
    predict: Predictor,
    process: Process,
    x: Tokens,
    grid: Grid,
    rng: Rng,
    by: Confidence = "probability",
    drawing: Drawing | None = None,
    bound: float = 0.0,
    given: Bool[Tensor, "b l"] | None = None,
) -> Iterator[State]:
    """Draw a token at every mask, keep the most certain ones, ask again for the rest.

    Each hop keeps the share of masks that the grid says. With `entropy-bound` it keeps more as long as the entropies of
    all that it keeps but the largest add up to at most `bound` nats, a limit on how much drawing them independently can
    cost: the number of evaluations then follows from the text, and is at most the number of hops. Certainty is that of
    the prediction itself, before temperature, top-k or top-p; what is equally certain goes in random order.
    """
    drawing = drawing or Drawing()
    trunk, logits = split(predict, process)
    l, hops = x.shape[1], len(grid) - 1
    masks = 1 - process.noise.alpha(grid)
    start = moving(process, x, given).sum(-1)
    blank = is_blank(predict, process, x)
    evaluations, chance = [0] * len(x), drawing.unknown(x)
    yield State(x, 0, hops, evaluations, chance)
    for hop in range(hops):
        is_mask = moving(process, x, given)
        left = is_mask.sum(-1)
        share = float(masks[hop + 1] / masks[0])
        keep = (left - (start.to(wide(x.device)) * share + 1e-9).floor().long()).clamp(min=0)
        busy = (left > 0) if by == "entropy-bound" else (keep > 0)
        run = torch.ones_like(busy) if drawing.compiled else busy
        running = run.nonzero()[:, 0]
        if bool(busy.any()):
            evaluations = [done + now for done, now in zip(evaluations, busy.tolist(), strict=True)]
            index = (is_mask & busy[:, None]).flatten().nonzero()[:, 0]
            place = (run.cumsum(0) - 1)[index // l] * l + index % l
            t = torch.full((len(running),), float(grid[hop]), dtype=wide(x.device), device=x.device)
            hidden = trunk(x[running][:, :1], t).expand(-1, l, -1) if blank else trunk(x[running], t)
            u = rng("hop", hop).uniform(l, x.device).flatten()[index]
            token, certainty, likely = _drawn(
                logits, hidden.flatten(0, 1)[place], float(grid[hop]), u, drawing, by, process.vocab
            )
            table = torch.full(x.shape, -torch.inf, dtype=certainty.dtype, device=x.device)
            table.view(-1)[index] = certainty
            tie = rng("tie", hop).uniform(l, x.device)
            chosen = _most(table, tie, keep, bound if by == "entropy-bound" else None) & is_mask
            blank = False
            drawn = x.flatten().scatter(0, index, token).view_as(x)
            x = torch.where(chosen, drawn, x)
            if chance is not None:
                chance = torch.where(chosen, chance.flatten().scatter(0, index, likely).view_as(x), chance)
        yield State(x, hop + 1, hops, evaluations, chance)
        if not bool(moving(process, x, given).any()):
            return


def _drawn(
    logits: Head, rows: Tensor, t: float, u: Float[Tensor, "n"], drawing: Drawing, by: Confidence, vocab: int
) -> tuple[Index, Float[Tensor, "n"], Float[Tensor, "n"]]:
    """A token for each row, how certain the network is about it, and the token's probability, if that is watched."""
    device = u.device
    token = torch.empty(len(rows), dtype=torch.long, device=device)
    certainty = torch.empty(len(rows), dtype=wide(device), device=device)
    likely = torch.full((len(rows),), torch.nan, device=device)
    for at in chunks(len(rows), vocab):
        law = logits(rows[at]).to(device)
        token[at] = drawing.draw(drawing.shape(law, t, drawing.blank), u[at])
        certainty[at] = _certainty(law.to(wide(device)).log_softmax(-1), token[at], by)
        if drawing.watched:
            likely[at] = picked(law, token[at])
    return token, certainty, likely


def _certainty(law: LogLaw, token: Index, by: Confidence) -> Float[Tensor, "n"]:
    if by == "probability":
        return law.gather(-1, token[:, None])[:, 0]
    if by == "margin":
        best = law.topk(min(2, law.shape[-1])).values.exp()
        return best[:, 0] - best[:, -1]
    return (law.exp() * law.clamp(min=-1e9)).sum(-1)  # minus the entropy


def _most(
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
