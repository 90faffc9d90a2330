"""Temperature, top-k and top-p: how a predicted law is sharpened before it is drawn from."""

import dataclasses

import torch

from cdlm.types import LogLaw


@dataclasses.dataclass(frozen=True)
class Shape:
    """Applied in this order, after `without`; the defaults leave the law as it is."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    without: tuple[int, ...] = ()
    """Tokens that are never drawn."""

    def __post_init__(self) -> None:
        if not self.temperature > 0 or self.temperature == float("inf"):
            raise ValueError(
                f"temperature must be above 0 and finite; got {self.temperature} (for the most likely token alone, "
                "use top-k 1)"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p must lie in (0, 1]; got {self.top_p} (1 keeps every token)")
        if self.top_k < 0:
            raise ValueError(f"top-k must be at least 1, or 0 to keep every token; got {self.top_k}")

    def __call__(self, logits: LogLaw) -> LogLaw:
        """Logits in, logits of the sharpened law out; -inf where it is zero."""
        if self.without:
            logits = logits.index_fill(-1, torch.tensor(self.without, device=logits.device), -torch.inf)
        if self.temperature != 1:
            logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            ordered, place = logits.double().sort(descending=True, stable=True)
            before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
            before[..., 0] = 0  # the first token always stays: the smallest set that reaches p
            beyond = torch.zeros_like(before, dtype=torch.bool).scatter(-1, place, before >= self.top_p)
            logits = logits.masked_fill(beyond, -torch.inf)
        return logits
