"""Logits processors: what happens to the logits of the network before a token is drawn.

A processor is a function from logits and the rows that they belong to to logits; -inf forbids a token.
`logits_processors` lists those of the settings, in the order in which they act:

    guidance, banned tokens, frequency and presence penalty, processors of the caller,
    temperature, log-frequency penalty, top-k, top-p
"""

import dataclasses
import functools
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cdlm.sample.settings import Settings
from cdlm.types import Index, LogLaw, Tokens


@dataclasses.dataclass(frozen=True)
class LogitsRows:
    """What a processor may know of its rows."""

    t: Float[Tensor, "n"]
    """The time of each row."""
    x: Tokens
    """The batch before the draw; a position that is masked or not generated yet holds the size of the vocabulary."""
    index: Index
    """The position of each row, flattened over batch and length."""


@runtime_checkable
class LogitsProcessor(Protocol):
    """Logits in, logits out, one row for each token to be drawn."""

    def __call__(self, logits: LogLaw, rows: LogitsRows) -> LogLaw: ...


def logits_processors(
    settings: Settings,
    unconditional: Float[Tensor, "v"] | None = None,
    banned: tuple[int, ...] = (),
    processors: tuple[LogitsProcessor, ...] = (),
    prompt: Bool[Tensor, "b l"] | None = None,
    special: tuple[int, ...] = (),
) -> tuple[LogitsProcessor, ...]:
    """The processors that these settings call for; none where nothing is to be done.

    Tokens at `prompt` positions were not sampled; tokens in `special` are neither counted nor penalised.
    """
    stages: list[LogitsProcessor] = []
    if unconditional is not None:
        strength, end = settings.guidance, settings.guidance_end
        stages.append(functools.partial(guide, guidance=strength, unconditional=unconditional, end=end))
    if banned:
        stages.append(functools.partial(ban, tokens=banned))
    if settings.frequency_penalty or settings.presence_penalty:
        frequency, presence = float(settings.frequency_penalty), float(settings.presence_penalty)
        stages.append(
            functools.partial(penalise, frequency=frequency, presence=presence, prompt=prompt, special=special)
        )
    stages += processors
    if settings.temperature != 1 or settings.temperature_end is not None:
        stages.append(functools.partial(temper, start=settings.temperature, end=settings.temperature_end))
    if settings.log_frequency_penalty:
        penalty = float(settings.log_frequency_penalty)
        stages.append(functools.partial(penalise_log, penalty=penalty, special=special))
    if settings.top_k:
        stages.append(functools.partial(keep_top_k, k=settings.top_k))
    if settings.top_p < 1:
        stages.append(functools.partial(keep_top_p, p=settings.top_p))
    return tuple(stages)


def guide(
    logits: LogLaw,
    rows: LogitsRows,
    *,
    guidance: float,
    unconditional: Float[Tensor, "v"],
    end: float | None = None,
) -> LogLaw:
    """f^(1 + g) / b^g, with b the unconditional prediction: sharper where the context speaks, and no likelier to say
    what is frequent anyway. g goes linearly in t from `guidance` at t = 1 to `end` at t = 0, if that is given."""
    logits = _float32(logits)
    g = guidance if end is None else _ramp(guidance, end, rows, logits)
    return logits + g * (logits - unconditional.to(logits))


def ban(logits: LogLaw, rows: LogitsRows, *, tokens: tuple[int, ...]) -> LogLaw:
    """Tokens that are never drawn."""
    return logits.index_fill(-1, _tensor(tokens, logits.device), -torch.inf)


def penalise(
    logits: LogLaw,
    rows: LogitsRows,
    *,
    frequency: float,
    presence: float,
    prompt: Bool[Tensor, "b l"] | None = None,
    special: tuple[int, ...] = (),
) -> LogLaw:
    """mu[j] - c[j] * frequency - float(c[j] > 0) * presence, with c[j] how often token j has been sampled so far.

    Tokens at `prompt` positions do not count.
    """
    logits = _float32(logits)
    counts = token_counts(rows, logits.shape[-1], None if prompt is None else ~prompt, special).to(logits)
    return logits - counts * frequency - (counts > 0).to(logits) * presence


def penalise_log(logits: LogLaw, rows: LogitsRows, *, penalty: float, special: tuple[int, ...] = ()) -> LogLaw:
    """mu[j] - penalty * log(1 + c[j]), with c[j] how often token j occurs in the text so far, the prompt included."""
    logits = _float32(logits)
    return logits - penalty * token_counts(rows, logits.shape[-1], None, special).to(logits).log1p()


def token_counts(
    rows: LogitsRows, vocab: int, where: Bool[Tensor, "b l"] | None = None, special: tuple[int, ...] = ()
) -> Float[Tensor, "n v"]:
    """How often each token occurs `where` it counts (everywhere if None), at other positions than that of the row.

    Masks and `special` tokens do not count. A row sees the batch before the draw, so tokens of one step do not see each
    other.
    """
    x = rows.x
    counted = x < vocab
    if where is not None:
        counted &= where
    if special:
        counted &= (x[..., None] != _tensor(special, x.device)).all(-1)
    token, ones = x.clamp(max=vocab - 1), counted.float()
    counts = ones.new_zeros(len(x), vocab).scatter_add_(1, token, ones)[rows.index // x.shape[1]]
    own = rows.index[:, None]
    return counts.scatter_add_(1, token.flatten()[own], -ones.flatten()[own])


def temper(logits: LogLaw, rows: LogitsRows, *, start: float, end: float | None = None) -> LogLaw:
    """Divide by the temperature, which goes linearly in t from `start` at t = 1 to `end` at t = 0."""
    logits = _float32(logits)
    if end is None:
        return logits / start
    return logits / _ramp(start, end, rows, logits)


def keep_top_k(logits: LogLaw, rows: LogitsRows, *, k: int) -> LogLaw:
    """The k most probable tokens."""
    if k >= logits.shape[-1]:
        return logits
    best = logits.topk(k)
    return torch.full_like(logits, -torch.inf).scatter(-1, best.indices, best.values)


def keep_top_p(logits: LogLaw, rows: LogitsRows, *, p: float, among: int = 1024) -> LogLaw:
    """The smallest set of tokens with probability p, sought among the most probable ones first."""
    v = logits.shape[-1]
    best = logits.topk(min(among, v))
    share = (best.values.double() - logits.double().logsumexp(-1, keepdim=True)).exp()
    reached = share.cumsum(-1)
    if among < v and not bool((reached[..., -1] >= p).all()):
        return keep_top_p(logits, rows, p=p, among=v)
    kept = best.values.masked_fill(reached - share >= p, -torch.inf)  # the first token always stays
    return torch.full_like(logits, -torch.inf).scatter(-1, best.indices, kept)


def _ramp(start: float, end: float, rows: LogitsRows, like: LogLaw) -> Float[Tensor, "n 1"]:
    """A value for each row, linear in t: `start` at t = 1 and `end` at t = 0."""
    t = rows.t.to(device=like.device, dtype=like.dtype)
    return (end + (start - end) * t)[..., None]


def _float32(logits: LogLaw) -> LogLaw:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@functools.lru_cache(maxsize=16)
def _tensor(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(tokens, device=device)
