"""Logits processors: what happens to the logits of the network before a token is drawn.

A processor is a function from logits and the rows that they belong to to logits; -inf forbids a token.
`logits_processors` lists those of the settings, in the order in which they act:

    guidance, banned tokens, processors of the caller, temperature, top-k, top-p
"""

import dataclasses
import functools
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from cdlm.sample.settings import Settings
from cdlm.types import Index, LogLaw, Tokens


@dataclasses.dataclass(frozen=True)
class LogitsRows:
    """What a processor may know of its rows."""

    t: Float[Tensor, "n"]
    """The time of each row."""
    x: Tokens
    """The batch before the draw."""
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
) -> tuple[LogitsProcessor, ...]:
    """The processors that these settings call for; none where nothing is to be done."""
    stages: list[LogitsProcessor] = []
    if unconditional is not None:
        stages.append(functools.partial(guide, guidance=settings.guidance, unconditional=unconditional))
    if banned:
        stages.append(functools.partial(ban, tokens=banned))
    stages += processors
    if settings.temperature != 1 or settings.temperature_end is not None:
        stages.append(functools.partial(temper, start=settings.temperature, end=settings.temperature_end))
    if settings.top_k:
        stages.append(functools.partial(keep_top_k, k=settings.top_k))
    if settings.top_p < 1:
        stages.append(functools.partial(keep_top_p, p=settings.top_p))
    return tuple(stages)


def guide(logits: LogLaw, rows: LogitsRows, *, guidance: float, unconditional: Float[Tensor, "v"]) -> LogLaw:
    """f^(1 + g) / b^g, with b the unconditional prediction: sharper where the context speaks, and no likelier to say
    what is frequent anyway."""
    logits = _float32(logits)
    return logits + guidance * (logits - unconditional.to(logits))


def ban(logits: LogLaw, rows: LogitsRows, *, tokens: tuple[int, ...]) -> LogLaw:
    """Tokens that are never drawn."""
    return logits.index_fill(-1, _tensor(tokens, logits.device), -torch.inf)


def temper(logits: LogLaw, rows: LogitsRows, *, start: float, end: float | None = None) -> LogLaw:
    """Divide by the temperature, which goes linearly in t from `start` at t = 1 to `end` at t = 0."""
    logits = _float32(logits)
    if end is None:
        return logits / start
    t = rows.t.to(device=logits.device, dtype=logits.dtype)
    return logits / (end + (start - end) * t)[..., None]


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


def _float32(logits: LogLaw) -> LogLaw:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@functools.lru_cache(maxsize=16)
def _tensor(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(tokens, device=device)
