"""What every sampler is made of: passes over the network, each with all of its randomness drawn beforehand.

Which positions change in a hop hardly depends on what the network says. Write pi for the prior, z = x_t^i for the token
of a position, and p for the predicted probability that z is clean (zero for the mask). Lemma 3.1 with the prediction in
the place of x_0 factorises:

    x_s leaves z     with probability   (1 - a_ts)/(1 - a_t)  *  (1 - a_t) pi[z] / (a_t p + (1 - a_t) pi[z])
                                        known beforehand         asks the network; 1 for the mask
    having left      x_s ~ f(x_t)       with probability a_s
                     x_s ~ pi           otherwise

So a sampler first draws the few positions that *may* leave: a pass. Only there does it run the head and draw a token,
and only sequences that have such a position run through the network. This is the law of the dense posterior, exactly;
the mixture of exact bridges has the same form with [x_0 = z] for p.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cdlm.model.denoiser import Denoiser, mean_law
from cdlm.model.dit import take
from cdlm.process.process import Posterior, Process
from cdlm.rng import categorical
from cdlm.sample.logits import Shape
from cdlm.types import Index, LogLaw, Predictor, Time, Tokens, wide

Trunk = Callable[..., Tensor]
Head = Callable[[Tensor], LogLaw]

DrawPrecision = Literal["fp64", "fp32"]
"""In which the mass of the vocabulary is summed. Both draw from the same law: positions, uniforms and choices are
double in either, and single precision moves a probability by about one part in ten million."""

_ENTRIES = 2**26
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


@dataclasses.dataclass(frozen=True)
class Pass:
    """One evaluation of the network: where its law is asked for, and the noise with which it is answered."""

    t: Time
    """The time of each sequence, beside the tokens."""
    counts: list[int]
    """Positions asked for in each sequence; one without any does not run."""
    index: Index
    """These positions, flattened over batch and length, ascending."""
    u: Float[Tensor, "n"] | None
    """One uniform for each draw; None takes the most likely token."""
    leave: Float[Tensor, "n"] | None = None
    """Decides whether a position leaves its token, where that asks the network; None if it leaves for certain."""
    prior: Index | None = None
    """The token of a position that leaves towards the prior, -1 where it leaves towards the data; None if all do."""
    noise: tuple[Int[Tensor, "m"], Int[Tensor, "m"]] | None = None
    """Positions that turn into noise without asking the network, and their tokens."""
    most: int = 0
    """The largest count of all passes of the plan, where it is known: a compiled network then sees one shape."""


@dataclasses.dataclass(frozen=True)
class State:
    """A sample on its way."""

    x: Tokens
    step: int
    """Hops done."""
    steps: int | None
    """Hops in all, where that is known."""
    evaluations: list[int]
    """Passes over the network, for each sequence, so far."""
    chance: Float[Tensor, "b l"] | None = None
    """How probable the network found each token when it was drawn, where that was asked for; NaN where none was."""


@dataclasses.dataclass(frozen=True)
class Drawing:
    """How a token is drawn from the prediction."""

    shape: Shape = dataclasses.field(default_factory=Shape)
    posterior: Posterior = "plug-in"
    precision: DrawPrecision = "fp64"
    compiled: bool = False
    """Draw with a compiled kernel, and run the whole batch in every pass, so that a compiled network sees one shape."""
    watched: bool = False
    """Keep the probability of every token that is drawn (`State.chance`), before temperature, top-k and top-p."""
    blank: Float[Tensor, "v"] | None = None
    """The law of a blank text, for guidance."""

    def draw(self, law: LogLaw, u: Float[Tensor, "n"]) -> Index:
        draw = _compiled_categorical() if self.compiled else categorical
        return draw(law, u, _DTYPES[self.precision])

    def unknown(self, x: Tokens) -> Float[Tensor, "b l"] | None:
        """The chances of a start, of which nothing was drawn."""
        return torch.full(x.shape, torch.nan, device=x.device) if self.watched else None


@functools.cache
def _compiled_categorical() -> Callable[..., Index]:
    return torch.compile(categorical, dynamic=True)


@torch.no_grad()
def follow(
    predict: Predictor,
    process: Process,
    x: Tokens,
    passes: Iterable[Pass],
    drawing: Drawing | None = None,
    steps: int | None = None,
) -> Iterator[State]:
    """Carry out the passes; yields the start, and the state after each."""
    drawing = drawing or Drawing()
    trunk, logits = split(predict, process)
    evaluations = [0] * len(x)
    blank, chance = is_blank(predict, process, x), drawing.unknown(x)
    yield State(x, 0, steps, evaluations, chance)
    for number, one in enumerate(passes):
        if len(one.index):
            evaluations = [done + (count > 0) for done, count in zip(evaluations, one.counts, strict=True)]
            rows = _rows(trunk, x, one, drawing.compiled, blank)
            old = x.flatten()[one.index]
            new, likely = _answer(logits, rows, process, old, x.shape[1], one, drawing)
            if chance is not None:
                likely = torch.where(new == old, chance.flatten()[one.index], likely)
                chance = chance.flatten().scatter(0, one.index, likely).view_as(x)
            x = x.flatten().scatter(0, one.index, new).view_as(x)
            blank = False
        if one.noise is not None:
            x = x.flatten().scatter(0, *one.noise).view_as(x)
            if chance is not None:
                chance = chance.flatten().index_fill(0, one.noise[0], torch.nan).view_as(x)
        yield State(x, number + 1, steps, evaluations, chance)


def last(states: Iterable[State]) -> State:
    """The end of a sample, without looking at the way."""
    return collections.deque(states, maxlen=1)[0]


def split(predict: Predictor, process: Process) -> tuple[Trunk, Head]:
    """A predictor as trunk and head: the head runs where a token is drawn. An exact posterior is all trunk."""
    if isinstance(predict, Denoiser):
        return (lambda x, t, rows=None: predict.features(x, process.noise.alpha(t), rows)), predict.logits

    def law(x: Tokens, t: Time, rows: Int[Tensor, "b r"] | None = None) -> Tensor:
        order, parts = [], []
        for time in t.unique().tolist():
            order.append((t == time).nonzero()[:, 0])
            parts.append(predict(x[order[-1]], time))
        found = torch.cat(parts)[torch.cat(order).argsort()]
        return found if rows is None else take(found, rows)

    return law, lambda rows: rows


def moving(process: Process, x: Tokens, given: Bool[Tensor, "b l"] | None) -> Bool[Tensor, "b l"]:
    """Where a sampler may write: under masking the masks, else everywhere; but not at given positions."""
    free = process.positions(x) if process.absorbing else torch.ones_like(x, dtype=torch.bool)
    return free if given is None else free & ~given


def is_blank(predict: Predictor, process: Process, x: Tokens) -> bool:
    """Whether one position speaks for all: rotary attention mixes the equal values of masks into the same value."""
    return isinstance(predict, Denoiser) and predict.position_invariant and bool((x == process.vocab).all())


@torch.no_grad()
def blank_law(predict: Predictor, process: Process, like: Tokens) -> Float[Tensor, "v"]:
    """What the network says of a text of which nothing is known."""
    trunk, logits = split(predict, process)
    x = torch.full_like(like[:1], process.vocab)
    x = x[:, :1] if is_blank(predict, process, x) else x
    t = torch.ones(len(x), dtype=wide(x.device), device=x.device)
    law = logits(trunk(x, t)[0])
    law = law.to(torch.promote_types(law.dtype, torch.float32)).log_softmax(-1)
    return mean_law(law)


def chunks(rows: int, vocab: int) -> Iterator[slice]:
    """Some rows at a time: the law over the vocabulary of all of them at once may not fit in memory."""
    size = max(64, _ENTRIES // vocab)
    return (slice(first, first + size) for first in range(0, rows, size))


def _rows(trunk: Trunk, x: Tokens, one: Pass, compiled: bool, blank: bool) -> Float[Tensor, "n d"]:
    """What the trunk says at the positions of a pass."""
    length, sequence, place = x.shape[1], one.index // x.shape[1], one.index % x.shape[1]
    if blank:
        return trunk(x[:, :1], one.t)[sequence, 0]
    t, counts = one.t, one.counts
    if 0 in counts and not compiled:
        running = torch.tensor([number for number, count in enumerate(counts) if count], device=x.device)
        x, t = x[running], t[running]
        sequence = torch.searchsorted(running, sequence)
    width = max(8, 1 << (max(one.most, *counts) - 1).bit_length())  # few different shapes
    if 2 * width > length:
        return trunk(x, t)[sequence, place]
    first = torch.searchsorted(sequence, torch.arange(len(x), device=x.device))
    rank = torch.arange(len(sequence), device=x.device) - first[sequence]
    rows = place.new_zeros(len(x), width).index_put((sequence, rank), place)
    return trunk(x, t, rows)[sequence, rank]


def _answer(
    logits: Head, rows: Tensor, process: Process, old: Index, length: int, one: Pass, drawing: Drawing
) -> tuple[Index, Float[Tensor, "n"]]:
    """The new token of each position of a pass; and its probability, if that is watched."""
    n, ask = len(old), one.leave is not None
    more = -n % 64 if drawing.compiled else 0  # few different shapes here too
    rows, held = F.pad(rows, (0, 0, 0, more)), F.pad(old, (0, more))
    u = None if one.u is None else F.pad(one.u, (0, more), value=0.5)
    t = F.pad(one.t[one.index // length], (0, more), value=1.0)
    token, stay = torch.empty_like(held), torch.zeros(n + more, dtype=wide(old.device), device=old.device)
    likely = torch.full((n + more,), torch.nan, device=old.device)
    for at in chunks(n + more, process.vocab):
        said = logits(rows[at])
        law = drawing.shape(said, t[at], drawing.blank).to(old.device)
        token[at] = law.argmax(-1) if u is None else drawing.draw(law, u[at])
        if drawing.watched:
            likely[at] = picked(said.to(old.device), token[at])
        if ask:
            stay[at] = _probability(law, held[at], token[at], process.vocab, drawing.posterior)
    token, stay, likely = token[:n], stay[:n], likely[:n]
    if u is None:
        return torch.where(process.positions(old), token, old), likely
    if one.leave is None:
        return token, likely
    a_t = process.noise.alpha(t[:n])
    odds = (1 - a_t) * process.pi(old)
    leaves = one.leave * (a_t * stay + odds) < odds
    if one.prior is None:
        return torch.where(leaves, token, old), likely
    data = one.prior < 0
    return torch.where(leaves, torch.where(data, token, one.prior), old), torch.where(data, likely, torch.nan)


def picked(law: LogLaw, token: Index) -> Float[Tensor, "n"]:
    """The probability of each token under logits or a law."""
    return law.float().log_softmax(-1).gather(-1, token[:, None])[:, 0].exp()


def _probability(law: LogLaw, old: Index, token: Index, vocab: int, posterior: Posterior) -> Float[Tensor, "n"]:
    """p: of the old token under the law (plug-in), or whether it is the one that was drawn (mixture)."""
    if posterior == "mixture":
        return (token == old).to(wide(old.device))
    law = law.to(wide(old.device)).log_softmax(-1)
    return law.gather(-1, old.clamp(max=vocab - 1)[:, None])[:, 0].exp() * (old < vocab)
