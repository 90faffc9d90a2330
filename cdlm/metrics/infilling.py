"""Infilling accuracy: how many masked tokens, and whole masked spans, a sampler recovers exactly."""

import dataclasses

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cdlm.metrics.gen_ppl import Interval, bootstrap_ratio
from cdlm.rng import Rng
from cdlm.types import Tokens


@dataclasses.dataclass(frozen=True)
class InfillingAccuracy:
    """Over all texts, with intervals over texts."""

    token_match: Interval
    """The share of masked tokens that are recovered."""
    span_match: Interval
    """The share of masked spans (runs of masked tokens, as long as possible) that are recovered whole."""
    num_tokens: int
    num_spans: int


def masked_evenly(rate: float, among: Bool[Tensor, "b l"], rng: Rng) -> Bool[Tensor, "b l"]:
    """A random subset of the positions `among` those given: this share of them in each row, rounded.

    The subsets of a smaller rate are part of those of a larger one.
    """
    rank = rng("mask").uniform(among.shape[1]).masked_fill(~among, torch.inf).argsort(-1).argsort(-1)
    return rank < (rate * among.sum(-1, keepdim=True)).round()


def infilling_accuracy(found: Tokens, x0: Tokens, masked: Bool[Tensor, "b l"]) -> InfillingAccuracy:
    """How much of the masked tokens of x0 is found."""
    wrong = masked & (found != x0)
    tokens, missed = masked.sum(-1), wrong.sum(-1)
    begins = masked & ~torch.nn.functional.pad(masked, (1, 0))[:, :-1]
    spans, broken = begins.sum(-1), _num_broken(begins, wrong)
    return InfillingAccuracy(
        bootstrap_ratio((tokens - missed).tolist(), tokens.tolist()),
        bootstrap_ratio((spans - broken).tolist(), spans.tolist()),
        int(tokens.sum()),
        int(spans.sum()),
    )


def _num_broken(begins: Bool[Tensor, "b l"], wrong: Bool[Tensor, "b l"]) -> Int[Tensor, "b"]:
    """The number of spans of each row with a wrong token."""
    span = begins.cumsum(-1)  # the number of the span that a masked position is in, from 1 on
    errors: Float[Tensor, "b spans"] = torch.zeros(len(span), span.shape[1] + 1)
    return (errors.scatter_add_(1, span, wrong.float()) > 0).sum(-1)
