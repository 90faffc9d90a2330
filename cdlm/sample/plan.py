"""Planned sampling: network evaluations with all of their randomness drawn beforehand.

Which positions change in a step hardly depends on what the network says. Write pi for the prior, z = x_t^i for the
token of a position, and p for the predicted probability that z is clean (zero for the mask). Lemma 3.1 with the
prediction in the place of x_0 factorises:

    x_s leaves z     with probability   (1 - a_ts)/(1 - a_t)  *  (1 - a_t) pi[z] / (a_t p + (1 - a_t) pi[z])
                                        known beforehand         asks the network; 1 for the mask
    having left      x_s ~ f(x_t)       with probability a_s
                     x_s ~ pi           otherwise

So a sampler first draws the few positions that *may* leave: an `Evaluation`. Only there does it run the head and draw a
token, and only sequences that have such a position run through the network. This is the distribution of the dense
posterior, exactly; the mixture of exact bridges has the same form with [x_0 = z] for p.

Example: two sequences of four masked positions (_), four steps, ancestral sampling under masking. Every position has a
level, and is drawn in the step in which the share of masks falls below it: 1 -> 3/4 -> 1/2 -> 1/4 -> 0.

    level    sequence 0:  .9  .1  .3  .8         step of each position:   1  4  3  1
             sequence 1:  .6  .2  .7  .55                                 2  4  2  2

Steps in which a sequence draws nothing are left out, for each sequence by itself, so three evaluations remain:

    evaluation   t of each sequence   counts   index (of 8)   draws
    1            1     3/4            2  3     0 3 4 6 7      A _ _ B    C _ D E
    2            1/2   1/4            1  1     2 5            A _ F B    C G D E
    3            1/4   -              1  0     1              A H F B    (does not run)

The network runs on 2 + 2 + 1 sequences and its head on 8 positions, where the plain sampler runs 8 and 32.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from cdlm.process.process import Posterior, Process
from cdlm.sample.draw import (
    Draw,
    Head,
    State,
    Trunk,
    row_chunks,
    same_at_all_positions,
    token_probs,
    trunk_and_head,
)
from cdlm.sample.logits import LogitsRows
from cdlm.types import Index, LogLaw, Predictor, Time, Tokens, wide


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One evaluation of the network: the positions that it is asked for, and the noise that answers are drawn with."""

    t: Time
    """The time of each sequence, beside the tokens."""
    counts: list[int]
    """Positions in each sequence; one without any does not run."""
    index: Index
    """These positions, flattened over batch and length, ascending."""
    u: Float[Tensor, "n"] | None
    """One uniform for each draw; None takes the most probable token."""
    leave: Float[Tensor, "n"] | None = None
    """Decides whether a position leaves its token, where that asks the network; None if it leaves for certain."""
    prior: Index | None = None
    """The token of a position that leaves towards the prior, -1 where it leaves towards the data; None if all do."""
    noise: tuple[Int[Tensor, "m"], Int[Tensor, "m"]] | None = None
    """Positions that turn into noise without asking the network, and their tokens."""
    max_count: int = 0
    """The largest count of the whole plan, where it is known: a compiled network then sees one shape."""


NewTokens = Callable[[Tensor, Process, Tokens, Index, Evaluation, Draw], tuple[Index, Float[Tensor, "n"]]]
"""new_tokens(hidden, process, x, old, evaluation, draw): the new token of each position of an evaluation, and its
probability, if that is watched."""


@torch.no_grad()
def execute(
    predict: Predictor,
    process: Process,
    x: Tokens,
    plan: Iterable[Evaluation],
    draw: Draw | None = None,
    num_steps: int | None = None,
    new_tokens: NewTokens | None = None,
) -> Iterator[State]:
    """Carry out a plan; yields the initial state and the state after each evaluation.

    The tokens of an evaluation are drawn independently, or by `new_tokens`.
    """
    draw = draw or Draw()
    trunk, head = trunk_and_head(predict, process)
    new_tokens = new_tokens or functools.partial(_independent_tokens, head)
    nfe, probs = [0] * len(x), draw.unknown_probs(x)
    uniform_input = same_at_all_positions(predict, process, x)
    yield State(x, 0, num_steps, nfe, probs)
    for step, evaluation in enumerate(plan, 1):
        if len(evaluation.index):
            nfe = [done + (count > 0) for done, count in zip(nfe, evaluation.counts, strict=True)]
            hidden = _hidden_rows(trunk, x, evaluation, draw.compiled, uniform_input)
            old = x.flatten()[evaluation.index]
            new, new_probs = new_tokens(hidden, process, x, old, evaluation, draw)
            if probs is not None:
                new_probs = torch.where(new == old, probs.flatten()[evaluation.index], new_probs)
                probs = probs.flatten().scatter(0, evaluation.index, new_probs).view_as(x)
            x = x.flatten().scatter(0, evaluation.index, new).view_as(x)
            uniform_input = False
        if evaluation.noise is not None:
            x = x.flatten().scatter(0, *evaluation.noise).view_as(x)
            if probs is not None:
                probs = probs.flatten().index_fill(0, evaluation.noise[0], torch.nan).view_as(x)
        yield State(x, step, num_steps, nfe, probs)


def _hidden_rows(
    trunk: Trunk, x: Tokens, evaluation: Evaluation, compiled: bool, uniform_input: bool
) -> Float[Tensor, "n d"]:
    """The hidden states at the positions of an evaluation."""
    length, index = x.shape[1], evaluation.index
    sequence, place = index // length, index % length
    if uniform_input:
        return trunk(x[:, :1], evaluation.t)[sequence, 0]
    t, counts = evaluation.t, evaluation.counts
    if 0 in counts and not compiled:
        running = torch.tensor([number for number, count in enumerate(counts) if count], device=x.device)
        x, t = x[running], t[running]
        sequence = torch.searchsorted(running, sequence)
    width = max(8, 1 << (max(evaluation.max_count, *counts) - 1).bit_length())  # few different shapes
    if 2 * width > length:
        return trunk(x, t)[sequence, place]
    first = torch.searchsorted(sequence, torch.arange(len(x), device=x.device))
    rank = torch.arange(len(sequence), device=x.device) - first[sequence]
    rows = place.new_zeros(len(x), width).index_put((sequence, rank), place)
    return trunk(x, t, rows)[sequence, rank]


def _independent_tokens(
    head: Head, hidden: Tensor, process: Process, x: Tokens, old: Index, evaluation: Evaluation, draw: Draw
) -> tuple[Index, Float[Tensor, "n"]]:
    """The new token of each position of an evaluation; and its probability, if that is watched."""
    n = len(old)
    padding = -n % 64 if draw.compiled else 0  # few different shapes here too
    hidden, held = F.pad(hidden, (0, 0, 0, padding)), F.pad(old, (0, padding))
    index = F.pad(evaluation.index, (0, padding))
    u = None if evaluation.u is None else F.pad(evaluation.u, (0, padding), value=0.5)
    t = F.pad(evaluation.t[evaluation.index // x.shape[1]], (0, padding), value=1.0)
    token = torch.empty_like(held)
    stay = torch.zeros(n + padding, dtype=wide(old.device), device=old.device)
    probs = torch.full((n + padding,), torch.nan, device=old.device)
    for rows in row_chunks(n + padding, process.vocab):
        raw = head(hidden[rows])
        logits = draw.process(raw, LogitsRows(t[rows], x, index[rows])).to(old.device)
        token[rows] = logits.argmax(-1) if u is None else draw.token(logits, u[rows])
        if draw.watch:
            probs[rows] = token_probs(raw.to(old.device), token[rows])
        if evaluation.leave is not None:
            stay[rows] = _stay_probs(logits, held[rows], token[rows], process.vocab, draw.posterior)
    token, stay, probs = token[:n], stay[:n], probs[:n]
    if u is None:
        return torch.where(process.positions(old), token, old), probs
    if evaluation.leave is None:
        return token, probs
    a_t = process.noise.alpha(t[:n])
    odds = (1 - a_t) * process.pi(old)
    leaves = evaluation.leave * (a_t * stay + odds) < odds
    if evaluation.prior is None:
        return torch.where(leaves, token, old), probs
    data = evaluation.prior < 0
    return torch.where(leaves, torch.where(data, token, evaluation.prior), old), torch.where(data, probs, torch.nan)


def _stay_probs(logits: LogLaw, old: Index, token: Index, vocab: int, posterior: Posterior) -> Float[Tensor, "n"]:
    """p: the predicted probability of the old token (plug-in), or whether it is the one that was drawn (mixture)."""
    if posterior == "mixture":
        return (token == old).to(wide(old.device))
    log_probs = logits.to(wide(old.device)).log_softmax(-1)
    return log_probs.gather(-1, old.clamp(max=vocab - 1)[:, None])[:, 0].exp() * (old < vocab)
