"""Texts longer than a model was trained on: semi-autoregressive, one window after the other."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool
from torch import Tensor

from cdlm.sample.draw import State
from cdlm.types import Tokens

Window = Callable[[Tokens, Bool[Tensor, "b l"], int], Iterator[State]]
"""Fills a window: its tokens, which of them are given, and its number."""


def windows(fill: Window, x: Tokens, given: Bool[Tensor, "b l"], width: int, block: int) -> Iterator[State]:
    """Fill x from left to right: a first window of `width` positions, then `block` more at a time.

    Each window ends with its block and sees the `width - block` tokens before it, which stay as they are.
    """
    total = x.shape[1]
    before = State(x, 0, None, [0] * len(x))
    ends = [min(width, total), *range(width + block, total, block), *([total] if total > width else [])]
    for number, end in enumerate(ends):
        begin, now = max(0, end - width), before
        for state in fill(before.x[:, begin:end], given[:, begin:end], number):
            x = torch.cat([before.x[:, :begin], state.x, before.x[:, end:]], 1)
            nfe = [a + b for a, b in zip(before.nfe, state.nfe, strict=True)]
            seen = None
            if state.token_probs is not None:
                old = (
                    torch.full_like(x, torch.nan, dtype=torch.float32)
                    if before.token_probs is None
                    else before.token_probs
                )
                seen = torch.cat(
                    [
                        old[:, :begin],
                        state.token_probs.where(~state.token_probs.isnan(), old[:, begin:end]),
                        old[:, end:],
                    ],
                    1,
                )
            now = State(x, before.step + state.step, state.num_steps if len(ends) == 1 else None, nfe, seen)
            if state.step or not number:
                yield now
        before = now
        given = given | (torch.arange(total, device=x.device) < end)
