"""The generalised consistency objective: Eq. (8), with the anchor of Eq. (7). Every method is a list of its terms.

L = sum_k share_k(step) E[ sum_{i in M(x_t)} w(t, t - s) D( target(x_s, s)_i , f_theta(x_t, t)_i ) ]
        (s, t) ~ times_k        (x_s, x_t) ~ coupling_k( . | x_0)

In this order: `Term.draw` has the times and the coupling, `Term.summands` target and weight, `weighted_divergence` the
student and w D, `plain_sum` the sum. `fused_sum` sums the same summands with one pass of the student.

An extension of ours, not of the paper: a term whose `reduction` is "sequence" predicts the tokens R that its hop
reveals one after the other, by a joint head (`student_hidden`). With the data as target and D = KL, its sum over
positions is then

    sum_{i in R} -log f_theta(x_t, t, x_s^{R before i})_i = -log p_theta(x_s^R | x_t)

the negative log-likelihood of all that the hop reveals, where Eq. (8) has a sum of marginal ones.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cdlm.devices import send
from cdlm.model.denoiser import Denoiser
from cdlm.objective.coupling import Coupling
from cdlm.objective.divergence import Divergence
from cdlm.objective.fused import Summands, has_closed_form, value_dtype, weighted_sums
from cdlm.objective.target import Network, Target
from cdlm.objective.times import TimePairs
from cdlm.rng import Rng
from cdlm.schedules import PAPER_STEPS, Schedule, constant
from cdlm.types import Mixture, Pair, Tokens, to_device

Reduction = Literal["positions", "sequence"]
"""Whether the positions of a hop are predicted independently, or each given the revealed ones before it."""


@dataclasses.dataclass(frozen=True)
class Term:
    """One line of Eq. (8): a choice of times, coupling, target, divergence and weight, and its share of the loss."""

    name: str
    times: TimePairs
    coupling: Coupling
    target: Target
    divergence: Divergence
    weight: Callable[[Pair], Float[Tensor, "n"]]
    share: Schedule = constant(1.0)
    reduction: Reduction = "positions"

    def draw(
        self, x0: Tokens, progress: float, stratum: Int[Tensor, "b"], strata: int, rng: Rng, target: Denoiser | None
    ) -> Pair:
        """(s, t) ~ times and (x_s, x_t) ~ coupling( . | x_0)."""
        rng = rng(self.name)
        s, t = self.times(progress, stratum, strata, rng)
        return self.coupling(x0, s, t, rng, target)

    def summands(self, pair: Pair, target: Denoiser | None = None, chunk: int | None = None) -> Iterator[Summands]:
        """target(x_s, s)_i, w(t, t - s) and D for the positions i in M(x_t); token ids `chunk` positions at a time."""
        for index, goal in self.target(pair, target):
            size = chunk if chunk and isinstance(goal, Tensor) else max(1, len(index))
            for first in range(0, max(1, len(index)), size):
                part = slice(first, first + size)
                rows = pair.at(index[part])
                compared = goal[part] if isinstance(goal, Tensor) else goal
                yield Summands(index[part], compared, self.weight(rows), self.divergence, rows)


@runtime_checkable
class Student(Protocol):
    """What Eq. (8) asks of a network: hidden states, and log-probabilities made of them. A `Denoiser` has both."""

    def features(self, x: Any, alpha: Any) -> Tensor: ...

    def head(self, rows: Any) -> Tensor: ...


def student_hidden(term: Term, pair: Pair, student: Student, hidden: Float[Tensor, "b l d"]) -> Float[Tensor, "n d"]:
    """The hidden states that a term compares, flattened over batch and length.

    They are those of the student at (x_t, t); under the reduction "sequence" each position that the hop reveals is also
    conditioned on the tokens that the hop reveals before it.
    """
    if term.reduction == "sequence":
        assert isinstance(student, Denoiser)
        hidden = student.condition(hidden, pair.x_s, pair.positions & pair.known)
    return hidden.flatten(0, 1)


def weighted_divergence(part: Summands, student: Student, hidden: Float[Tensor, "n d"]) -> Float[Tensor, "rows"]:
    """w(t, t - s) D( target(x_s, s)_i , f_theta(x_t, t)_i ), from the student's hidden states at (x_t, t)."""
    part = part.to(hidden.device)
    f_s = part.target if isinstance(part.target, Tensor) else send(part.target.log_probs(), hidden.device)
    f_t = student.head(hidden[part.index])
    return part.weight * part.divergence(target=f_s, student=f_t, pair=part.pair)


Sums = tuple[Float[Tensor, ""], list[Float[Tensor, ""]]]
"""A sum that can be differentiated, and its part of each term, which cannot."""


def plain_sum(draws: list[tuple[Term, Pair]], student: Student, target: Denoiser | None) -> Sums:
    """The sum over k and i in Eq. (8), by definition."""
    sums = []
    for term, pair in draws:
        hidden = student_hidden(term, pair, student, student.features(pair.student_input, pair.alpha_t))
        parts = [weighted_divergence(part, student, hidden).sum() for part in term.summands(pair, target)]
        sums.append(torch.stack(parts).sum())
    return torch.stack(sums).sum(), [value.detach() for value in sums]


def fused_sum(draws: list[tuple[Term, Pair]], student: Denoiser, target: Denoiser | None) -> Sums:
    """The same value and gradient, faster: the student runs once for all terms, and head, divergence and gradient are
    one pass where the divergence has a closed form."""
    parts, first = [], 0  # targets first: what they need is gone when the student's memory fills
    for term, pair in draws:
        for part in term.summands(pair, target):
            parts.append((term.name, dataclasses.replace(part, index=part.index + first)))
        first += pair.x0.numel()
    x_t = stack([to_device(pair.student_input, student.device) for _, pair in draws])
    features = student.features(x_t, torch.cat([pair.alpha_t for _, pair in draws]))
    rows = features.split([len(pair.x0) for _, pair in draws])
    if all(term.reduction == "positions" for term, _ in draws):
        hidden = features.flatten(0, 1)
    else:
        hidden = torch.cat([student_hidden(*draw, student, part) for draw, part in zip(draws, rows, strict=True)])

    closed = [(name, part) for name, part in parts if has_closed_form(part, student)]
    total, values = torch.zeros((), dtype=value_dtype(hidden.dtype), device=hidden.device), list[Tensor]()
    if student.linear_head is not None:
        total, values = weighted_sums(student, hidden, [part for _, part in closed])
    sums: dict[str, list[Tensor]] = {term.name: [] for term, _ in draws}
    for (name, _), value in zip(closed, values, strict=True):
        sums[name].append(value)
    for name, part in parts:
        if not has_closed_form(part, student):
            weight = part.weight.to(value_dtype(hidden.dtype))  # in the precision of the closed forms
            value = weighted_divergence(dataclasses.replace(part, weight=weight), student, hidden).sum()
            total = total + value
            sums[name].append(value.detach())
    return total, [torch.stack(sums[term.name]).sum() for term, _ in draws]


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss in nats per token, and each term's own mean over its rows (before its share)."""

    total: Float[Tensor, ""]
    terms: dict[str, Float[Tensor, ""]]


@dataclasses.dataclass(frozen=True)
class Objective:
    """A method: the terms of Eq. (8), over a run of `total` steps. It is data; the weights live with whoever trains."""

    terms: tuple[Term, ...]
    total: int
    reference: int = PAPER_STEPS
    """The run length that decays are quoted for."""

    def __post_init__(self) -> None:
        names = [term.name for term in self.terms]
        if len(set(names)) < len(names):
            raise ValueError(f"each term draws its noise by its name: give every term another one than {names}")
        targets = [term.target for term in self.terms if isinstance(term.target, Network)]
        rules = {(target.decay, target.copies, target.copy_from): target for target in targets}
        if len(rules) > 1:
            raise ValueError(
                "an objective has one target network, but its terms update it by different rules: "
                f"{' and '.join(map(str, rules.values()))}"
            )

    def loss(
        self, student: Denoiser, target: Denoiser | None, x0: Tokens, step: int, rng: Rng, *, plain: bool = False
    ) -> Loss:
        """Eq. (8) for this batch, unbiased: the rows are split among the terms in proportion to their shares.

        Sums over positions are divided by the number of tokens, here and nowhere else, so the losses of all methods
        are in nats per token. `plain` computes it by definition: the same value and gradient, slower.
        """
        progress = step / self.total
        shares = [term.share(progress) for term in self.terms]
        draws = []
        for term, (rows, stratum, strata) in zip(self.terms, split(shares, rng), strict=True):
            if len(rows):
                data = x0[rows.to(x0.device)]
                data = send(data, student.device) if getattr(term.coupling, "on_device", False) else data
                draws.append((term, term.draw(data, progress, stratum, strata, rng[rows], target)))
        total, sums = (plain_sum if plain else fused_sum)(draws, student, target)
        tokens = [pair.x0.numel() for _, pair in draws]
        means = {term.name: value / count for (term, _), value, count in zip(draws, sums, tokens, strict=True)}
        return Loss(sum(shares) * total / sum(tokens), means)

    def lam(self, step: int) -> float:
        """lambda of the target's update after this step; 1 (nothing to update) without a target network."""
        return 1.0 if self.network is None else self.network.lam(step, self.total, self.reference)

    @property
    def network(self) -> Network | None:
        """The rule of the target network, if any term has one."""
        return next((term.target for term in self.terms if isinstance(term.target, Network)), None)


def split(shares: list[float], rng: Rng) -> list[tuple[Int[Tensor, "rows"], Int[Tensor, "rows"], int]]:
    """Divide the global batch among terms: for each its local rows, their strata, and how many strata there are.

    Systematic rounding with one uniform offset: the expected number of rows is exactly proportional to the share.
    Rows are taken in a low-discrepancy order, so that each process of a distributed run, and each micro-batch, gets
    its part of every term.
    """
    if min(shares) < 0 or sum(shares) <= 0:
        raise ValueError(f"shares must be >= 0, and one of them positive; got {shares}")
    share = torch.tensor(shares, dtype=torch.float64)
    offset = Rng(rng.key, torch.zeros(1, dtype=torch.long), 1)("split").uniform(1)[0, 0]
    edges = torch.floor((share.cumsum(0) / share.sum()).clamp(max=1) * rng.batch + offset).long()
    edges = torch.cat([edges.new_zeros(1), edges[:-1].clamp(max=rng.batch), edges.new_tensor([rng.batch])])
    golden = torch.arange(rng.batch, dtype=torch.float64) * 0.6180339887498949 % 1
    rank = golden.argsort().argsort()[rng.rows]
    parts = []
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        rows = ((rank >= low) & (rank < high)).nonzero()[:, 0]
        parts.append((rows, rank[rows] - low, high - low))
    return parts


def stack(inputs: list[Int[Tensor, "_ l"] | Mixture]) -> Tokens | Mixture:
    """One batch out of several; plain tokens beside relaxed ones become mixtures of a single token."""
    plain = [x for x in inputs if isinstance(x, Tensor)]
    if len(plain) == len(inputs):
        return torch.cat(plain)
    k = max(x.ids.shape[-1] for x in inputs if isinstance(x, Mixture))

    def relax(x: Tokens | Mixture) -> Mixture:
        if isinstance(x, Mixture):
            return x
        alone = torch.nn.functional.one_hot(torch.zeros_like(x), k).float()
        return Mixture(x[..., None].expand(*x.shape, k), alone, torch.zeros(x.shape, device=x.device))

    mixed = [relax(x) for x in inputs]
    return Mixture(*(torch.cat([getattr(x, name) for x in mixed]) for name in ("ids", "weights", "rest")))
