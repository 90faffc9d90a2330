"""Guidance, temperature, top-k and top-p: how a predicted law is sharpened before it is drawn from."""

import dataclasses
import functools
import math

import torch
from jaxtyping import Float
from torch import Tensor

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
        if not 1e-6 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be above 0 and finite, and at least 1e-6; got {self.temperature} (for the most "
                "likely token alone, use top-k 1)"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p must lie in (0, 1]; got {self.top_p} (1 keeps every token)")
        if self.top_k < 0:
            raise ValueError(f"top-k must be at least 1, or 0 to keep every token; got {self.top_k}")
        if not 0 <= self.guidance < float("inf"):
            raise ValueError(f"guidance must be finite and at least 0 (none); got {self.guidance}")
        if self.cool is not None and not 1e-6 <= self.cool < float("inf"):
            raise ValueError(f"the temperature to cool to must be at least 1e-6, and finite; got {self.cool}")

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


def mean_law(laws: Float[Tensor, "k v"]) -> Float[Tensor, "v"]:
    """What is said of a blank text on average over its positions: how frequent tokens are. Logarithms in and out."""
    return laws.logsumexp(0) - math.log(len(laws))


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
