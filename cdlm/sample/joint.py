"""Sampling with a joint head (`model/joint.py`): the tokens of a step are drawn one after the other, left to right.

Which positions a step unmasks is settled before the network runs, as for `unmask_in_order`. The trunk runs once per
step; the head runs once per token, with a key-value cache over the tokens of the step.
"""

import functools
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cdlm.model.denoiser import Denoiser
from cdlm.process.process import Process
from cdlm.rng import Rng
from cdlm.sample.draw import Draw, State, token_probs
from cdlm.sample.logits import LogitsRows
from cdlm.sample.order import unmask_in_order
from cdlm.sample.plan import Evaluation
from cdlm.sample.settings import Settings
from cdlm.types import Index, Predictor, Tokens


def joint(
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
    """Unmask x along the timesteps, in the order of the settings; each token is drawn given those of its step before
    it. A step with one token is one of the ancestral sampler."""
    new_tokens = functools.partial(joint_tokens, with_joint_head(predict))
    return unmask_in_order(
        predict, process, x, settings, rng, given=given, start=start, draw=draw, new_tokens=new_tokens
    )


def with_joint_head(predict: Predictor) -> Denoiser:
    """The same predictor, or an error."""
    if not isinstance(predict, Denoiser) or predict.joint_head is None:
        raise ValueError("--sampler joint needs a model with a joint head, and this one has none; leave it out.")
    return predict


def joint_tokens(
    denoiser: Denoiser,
    hidden: Float[Tensor, "n d"],
    process: Process,
    x: Tokens,
    old: Index,
    evaluation: Evaluation,
    draw: Draw,
) -> tuple[Index, Float[Tensor, "n"]]:
    """The new token of each position of an evaluation, and its probability, if that is watched.

    Sequences with more positions come first, so that those that are not finished are always the first ones.
    """
    head, embed = denoiser.joint_head, denoiser.dit.vocab_embed
    assert head is not None
    length, device = x.shape[1], x.device
    counts = torch.tensor(evaluation.counts)
    by_count = counts.argsort(descending=True, stable=True)
    first = (counts.cumsum(0) - counts)[by_count].to(device)
    running = (counts[None] > torch.arange(int(counts.max()))[:, None]).sum(-1).tolist()
    cache = head.empty_cache(running[0], len(running), hidden)
    token, probs = torch.empty_like(old), torch.full(old.shape, torch.nan, device=device)
    t = evaluation.t[evaluation.index // length]
    place = evaluation.index % length
    for rank, count in enumerate(running):
        rows = first[:count] + rank
        conditioned = hidden[rows][:, None]
        if len(running) > 1:  # a step of one token is the trunk's own
            previous = embed(token[rows - 1][:, None]).to(hidden.dtype) if rank else torch.zeros_like(conditioned)
            previous_place = place[rows - 1] if rank else torch.full_like(rows, -1)
            at = torch.full((1,), rank, device=device)
            past = [(keys[:count], values[:count], at) for keys, values in cache]
            conditioned = head(conditioned, previous, place[rows][:, None], previous_place[:, None], length, past)
        raw = denoiser.logits(conditioned[:, 0]).to(device)
        logits = draw.process(raw, LogitsRows(t[rows], x, evaluation.index[rows]))
        new = logits.argmax(-1) if evaluation.u is None else draw.token(logits, evaluation.u[rows])
        token[rows] = new
        if draw.watch:
            probs[rows] = token_probs(raw, new)
        x = x.flatten().scatter(0, evaluation.index[rows], new).view_as(x)  # for the penalties
    return token, probs
