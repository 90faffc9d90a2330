"""The generalised consistency objective: Eq. (8), with the anchor of Eq. (7). Every method is a list of its terms.

L = sum_k share_k(step) E[ sum_{i in M(x_t)} w(t, t - s) D( target(x_s, s)_i , f_theta(x_t, t)_i ) ]
        (s, t) ~ times_k        (x_s, x_t) ~ coupling_k( . | x_0)
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cdlm.devices import send
from cdlm.model.denoiser import Denoiser
from cdlm.objective.coupling import Coupling, Relaxed
from cdlm.objective.divergence import Divergence
from cdlm.objective.fused import Part, weighted_sum
from cdlm.objective.target import Network, Target
from cdlm.objective.times import TimePairs
from cdlm.rng import Rng
from cdlm.schedules import PAPER_STEPS, Schedule, constant
from cdlm.types import Index, Mixture, Pair, Tokens, there, wide


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


@runtime_checkable
class Student(Protocol):
    """What Eq. (8) asks of a network: hidden states, and log-probabilities made of them. A `Denoiser` has both."""

    def features(self, x: Any, alpha: Any) -> Tensor: ...

    def head(self, rows: Any) -> Tensor: ...


def term_losses(
    term: Term, pair: Pair, student: Student, target: Denoiser | None, chunk: int | None = None
) -> Iterator[tuple[Index, Float[Tensor, "n"]]]:
    """The summands of Eq. (8), by definition: w(t, t - s) D( target(x_s, s)_i , f_theta(x_t, t)_i ) for i in M(x_t).

    Yields positions, flattened over batch and length, with their values. Where the target is the data, at most `chunk`
    positions come at a time, since a distribution is as wide as the vocabulary.
    """
    hidden = student.features(pair.x_t if pair.input is None else pair.input, pair.alpha_t).flatten(0, 1)
    for index, goal in term.target(pair, target):
        tokens = isinstance(goal, Tensor)
        for part in torch.arange(len(index)).split(chunk if chunk and tokens else max(1, len(index))):
            here = index[part.to(index.device)]
            at, f_t = pair.at(here), student.head(hidden[here.to(hidden.device)])
            f_s = goal[part.to(goal.device)].to(f_t.device) if isinstance(goal, Tensor) else goal.law()
            d = term.divergence(target=f_s, student=f_t, pair=at).to(wide(f_t.device))
            yield here, term.weight(at).to(d) * d


def plain_loss(
    objective: "Objective", student: Denoiser, target: Denoiser | None, x0: Tokens, step: int, rng: Rng
) -> "Loss":
    """Eq. (8) as it is written. `Objective.loss` computes the same with one pass of the student and fused kernels."""
    progress = step / objective.total
    shares = [term.share(progress) for term in objective.terms]
    sums, tokens = {}, {}
    for term, (rows, stratum, strata) in zip(objective.terms, split(shares, rng), strict=True):
        if len(rows):
            own = rng[rows](term.name)
            s, t = term.times(progress, stratum, strata, own)
            pair = term.coupling(x0[rows.to(x0.device)], s, t, own, target)
            sums[term.name] = torch.stack([w_d.sum() for _, w_d in term_losses(term, pair, student, target)]).sum()
            tokens[term.name] = pair.x0.numel()
    total = sum(shares) * torch.stack(list(sums.values())).sum() / sum(tokens.values())
    return Loss(total, {name: value.detach() / tokens[name] for name, value in sums.items()})


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

    def loss(self, student: Denoiser, target: Denoiser | None, x0: Tokens, step: int, rng: Rng) -> Loss:
        """Eq. (8) for this batch, unbiased: the rows are split among the terms in proportion to their shares. Equal to
        `plain_loss` in value and gradient, and faster.

        The student runs once over the whole batch, targets only over their rows. Sums over positions are divided by
        the number of tokens, here and nowhere else, so the losses of all methods are in nats per token.
        """
        progress = step / self.total
        shares = [term.share(progress) for term in self.terms]
        batch = []
        for term, (rows, stratum, strata) in zip(self.terms, split(shares, rng), strict=True):
            if len(rows):
                own = rng[rows](term.name)
                s, t = term.times(progress, stratum, strata, own)
                data = x0[rows.to(x0.device)]
                data = send(data, student.device) if isinstance(term.coupling, Relaxed) else data  # the heaviest draw
                batch.append((term, term.coupling(data, s, t, own, target)))

        parts, owners, first = [], [], 0  # targets first: what they need is gone when the student's memory fills
        for term, pair in batch:
            for index, goal in term.target(pair, target):
                at = pair.at(index)
                parts.append(Part(index + first, goal, term.weight(at), term.divergence, at))
                owners.append(term.name)
            first += pair.x0.numel()
        inputs = [there(pair.x_t if pair.input is None else pair.input, student.device) for _, pair in batch]
        hidden = student.features(stack(inputs), torch.cat([pair.alpha_t for _, pair in batch])).flatten(0, 1)
        total, sums = weighted_sum(student, hidden, parts)
        means = {}
        for term, pair in batch:
            values = [value for value, owner in zip(sums, owners, strict=True) if owner == term.name]
            means[term.name] = torch.stack(values).sum() / pair.x0.numel()
        return Loss(sum(shares) * total / first, means)

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
