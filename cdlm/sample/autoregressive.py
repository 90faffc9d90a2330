"""Sampling of the autoregressive baseline, one token after the other, with a cache of keys and values."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from cdlm.model.compile import recorded
from cdlm.model.denoiser import Denoiser
from cdlm.model.dit import DiT
from cdlm.rng import Rng
from cdlm.sample.draw import Draw, State, make_draw, token_probs
from cdlm.sample.logits import LogitsRows
from cdlm.sample.naive import gumbel_race
from cdlm.sample.settings import Settings
from cdlm.types import LogLaw, Tokens

NextLogits = Callable[[Int[Tensor, "1"]], LogLaw]
"""The logits of the token after a position, for each sequence."""


@torch.no_grad()
def autoregressive(
    predict: Denoiser,
    process: None,
    x: Tokens,
    settings: Settings,
    rng: Rng,
    *,
    given: Bool[Tensor, "b l"] | None = None,
    start: float = 1.0,
    draw: Draw | None = None,
) -> Iterator[State]:
    """Continue the prompts, the first positions of x that are `given` (by default one, the start of the text).

    A step of a `DiT` reads and writes fixed tensors only, so that on a GPU it is recorded once and replayed. A network
    of the user's own has no cache: it reads the whole prefix in every step.
    """
    naive = settings.precision == "naive-fp32"
    b, length = x.shape
    prompt = 1 if given is None else int(given[0].sum())
    later = torch.arange(length, device=x.device) >= prompt
    draw = draw or make_draw(predict, process, x, settings, prompt=~later.expand_as(x))
    text = x.masked_fill(later, predict.vocab)
    u = rng("next").uniform(length, x.device)
    next_logits = _cached(predict, text, prompt) if isinstance(predict.backbone, DiT) else _uncached(predict, text)
    position = torch.full((1,), prompt - 1, device=x.device)
    rows = torch.arange(b, device=x.device)
    probs, t = draw.unknown_probs(text), torch.ones(b, device=x.device)

    def step() -> None:
        raw = next_logits(position)
        logits = draw.process(raw, LogitsRows(t, text, rows * length + position + 1))
        if naive:
            token = gumbel_race(logits.float().softmax(-1)[:, None], rng("race", int(position)))[:, 0]
        else:
            token = draw.token(logits, u.index_select(1, position + 1)[:, 0])
        text.index_copy_(1, position + 1, token[:, None])
        if probs is not None:
            probs.index_copy_(1, position + 1, token_probs(raw, token)[:, None])
        position.add_(1)

    if length - prompt > 8 and not naive and isinstance(predict.backbone, DiT):  # recording runs the step a few times
        step = recorded(step, x.device)
        position.fill_(prompt - 1)
        text.masked_fill_(later, predict.vocab)
    num_steps = length - prompt
    yield State(text[:, :prompt].clone(), 0, num_steps, [0] * b, draw.unknown_probs(text[:, :prompt]))
    for done in range(1, num_steps + 1):
        step()
        seen = None if probs is None else probs[:, : prompt + done].clone()
        yield State(text[:, : prompt + done].clone(), done, num_steps, [done] * b, seen)


def _cached(denoiser: Denoiser, text: Tokens, prompt: int) -> NextLogits:
    """By a cache of keys and values, in which the prompt is."""
    dit = denoiser.dit
    past = dit.blank_past(*text.shape)
    if prompt > 1:
        dit.extend(text[:, : prompt - 1], torch.arange(prompt - 1, device=text.device), past)

    def next_logits(position: Int[Tensor, "1"]) -> LogLaw:
        hidden = dit.extend(text.index_select(1, position), position, past)
        return denoiser.logits(hidden[:, 0])

    return next_logits


def _uncached(denoiser: Denoiser, text: Tokens) -> NextLogits:
    """By the whole prefix."""
    alpha = torch.ones(len(text), dtype=torch.float64)

    def next_logits(position: Int[Tensor, "1"]) -> LogLaw:
        prefix = text[:, : int(position) + 1]
        return denoiser.logits(denoiser.features(prefix, alpha)[:, -1])

    return next_logits
