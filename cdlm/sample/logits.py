"""Guidance, temperature, top-k and top-p: how a predicted law is sharpened before it is drawn from."""

import dataclasses
import functools

import torch
from jaxtyping import Float
from torch import Tensor

from cdlm.sample.settings import check_shape
from cdlm.types import LogLaw


@dataclasses.dataclass(frozen=True)
class Shape:
    """Applied in this order, after `without`; the defaults leave the law as it is."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    without: tuple[int, ...] = ()
    """Tokens that are never drawn."""
    guidance: float = 0.0
    """g in  f^(1 + g) / b^g,  b the law of a blank text: sharper where context speaks, and no likelier to say what is
    frequent anyway. It acts before the temperature."""
    cool: float | None = None
    """The temperature at t = 0; in between it falls (or rises) in proportion to t."""

    def __post_init__(self) -> None:
        check_shape(self.temperature, self.top_k, self.top_p, self.guidance, self.cool)

    def __call__(
        self, logits: LogLaw, t: Float[Tensor, "*rows"] | float = 1.0, blank: Float[Tensor, "v"] | None = None
    ) -> LogLaw:
        """Logits in, logits of the sharpened law out; -inf where it is zero.

        `t` is the time of each row, `blank` the law of a blank text: for cooling and for guidance.
        """
        if self.guidance or self.temperature != 1 or self.cool is not None:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.guidance:
            if blank is None:
                raise ValueError("guidance compares with the law of a blank text: pass it")
            logits = logits + self.guidance * (logits - blank.to(logits))
        if self.without:
            logits = logits.index_fill(-1, _index(self.without, logits.device), -torch.inf)
        if self.cool is not None:
            t = torch.as_tensor(t, device=logits.device, dtype=logits.dtype)
            logits = logits / (self.cool + (self.temperature - self.cool) * t)[..., None]
        elif self.temperature != 1:
            logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            best = logits.topk(self.top_k)
            logits = torch.full_like(logits, -torch.inf).scatter(-1, best.indices, best.values)
        return _nucleus(logits, self.top_p) if self.top_p < 1 else logits


def _nucleus(logits: LogLaw, p: float, among: int = 1024) -> LogLaw:
    """The smallest set of tokens with probability p, sought among the likeliest first."""
    v = logits.shape[-1]
    best = logits.topk(min(among, v))
    share = (best.values.double() - logits.double().logsumexp(-1, keepdim=True)).exp()
    reached = share.cumsum(-1)
    if among < v and not bool((reached[..., -1] >= p).all()):
        return _nucleus(logits, p, v)
    kept = best.values.masked_fill(reached - share >= p, -torch.inf)  # the first token always stays
    return torch.full_like(logits, -torch.inf).scatter(-1, best.indices, kept)


@functools.lru_cache(maxsize=16)
def _index(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(tokens, device=device)
