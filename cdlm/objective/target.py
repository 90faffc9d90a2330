"""Targets: what the student at (x_t, t) must agree with. The data, or a slow copy of the network at (x_s, s).

A target returns the rows of M(x_t) in groups, each with what it is compared with: token ids where the target is a point
mass (a cross entropy is then one gather, never a one-hot), elsewhere hidden rows of a network whose head is yet to run.
"""

import dataclasses
import math
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from cdlm.devices import send
from cdlm.model.denoiser import Denoiser, mean_law
from cdlm.schedules import PAPER_STEPS, Schedule, constant, ema_decay, number
from cdlm.types import Index, LogLaw, Pair


class Prediction(NamedTuple):
    """Laws to be: hidden rows, and the network whose head makes laws of them."""

    rows: Float[Tensor, "n d"]
    network: Denoiser
    temperature: float = 1.0
    """Below 1 the laws are sharpened."""
    guidance: float = 0.0
    blank: Float[Tensor, "k d"] | None = None
    """Hidden rows of a fully masked text, for guidance as in `sample/logits.py`; one row if all positions are alike."""

    def law(self) -> LogLaw:
        """All of them at once, gradient stopped."""
        with torch.no_grad():
            blank = None if self.blank is None else mean_law(self.network.head(self.blank))
            return self.shaped(self.network.head(self.rows), blank).log_softmax(-1)

    def shaped(self, logits: LogLaw, blank: Float[Tensor, "v"] | None) -> LogLaw:
        """Guided and sharpened."""
        if blank is not None:
            logits = logits + self.guidance * (logits - blank)
        return logits if self.temperature == 1 else logits / self.temperature


@runtime_checkable
class Dense(Protocol):
    """A target that is a distribution for each row, given when it is asked for. `Prediction` also has a fast path."""

    def law(self) -> LogLaw:
        """Log-probabilities, one row for each position, gradient stopped."""
        ...


Group = tuple[Index, Index | Dense]
"""Positions (flattened over batch and length), and what each is compared with: token ids, which are point masses, or
distributions."""


@runtime_checkable
class Target(Protocol):
    """What the student at (x_t, t) must agree with: every position of M(x_t) at most once, in groups.

    A target that needs a network is a `Network`, whose rule says how the weights of that network follow the student's.
    `str` names it in `cdlm methods`.
    """

    def __call__(self, pair: Pair, network: Denoiser | None = None) -> list[Group]: ...


@dataclasses.dataclass(frozen=True)
class Data:
    """x_0 itself: the boundary f(x_0, 0) = x_0."""

    def __call__(self, pair: Pair, network: Denoiser | None = None) -> list[Group]:
        index = pair.positions.flatten().nonzero()[:, 0]
        return [(index, pair.x0.flatten()[send(index, pair.x0.device)])]

    def __str__(self) -> str:
        return "data"


@dataclasses.dataclass(frozen=True)
class Revealed:
    """x_0, but only where the hop reveals it: what a sampler with hops of this size draws next, and no more."""

    def __call__(self, pair: Pair, network: Denoiser | None = None) -> list[Group]:
        index = (pair.positions & send(pair.known, pair.positions.device)).flatten().nonzero()[:, 0]
        return [(index, pair.x0.flatten()[send(index, pair.x0.device)])]

    def __str__(self) -> str:
        return "data revealed"


@dataclasses.dataclass(frozen=True)
class Network:
    """f at (x_s, s) with weights w of its own, gradient stopped; after each step w <- lambda w + (1 - lambda) theta.

    lambda is an average's decay (quoted for a run of `reference` steps, scaled to the run's own length), 1 for a
    frozen teacher, and 0 at the end of each of `copies` equal spans of the run that lie at or after `copy_from`.
    """

    decay: Schedule = constant(0.999)
    copies: int = 0
    copy_from: float = 0.0
    temperature: float = 1.0
    """Of the laws it predicts; below 1 they are sharpened."""
    guidance: float = 0.0
    """Sharpen them relative to the law of a blank text, which the network is asked for too; for masks."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"the temperature of a target must be above 0; got {self.temperature}")
        if not self.guidance >= 0:
            raise ValueError(f"the guidance of a target is at least 0, none; got {self.guidance}")
        if not all(0 <= value <= 1 for _, value in self.decay.knots) or self.copies < 0:
            raise ValueError(
                f"lambda is a decay in [0, 1], copies a count; got lambda {self.decay}, {self.copies} copies"
            )

    @torch.no_grad()
    def __call__(self, pair: Pair, network: Denoiser | None = None) -> list[Group]:
        if network is None:
            raise ValueError(
                "this method compares with a target network: pass a copy of the student, or a trained teacher"
            )
        index = pair.positions.flatten().nonzero()[:, 0]
        known = pair.known.flatten()[index]
        point, dense = index[known], index[~known]
        if pair.law is None:
            certain: Group = (point, pair.x_s.flatten()[send(point, pair.x_s.device)])
        else:
            rows = pair.law.flatten(0, 1)[send(point, pair.law.device)]
            certain = (point, Prediction(rows, network, self.temperature))
        live = (pair.alpha_s < 1).nonzero()[:, 0]
        if not len(live):  # rows at the boundary need no network
            return [certain]
        x_s, alpha_s, l = pair.x_s[send(live, pair.x_s.device)], pair.alpha_s[live], pair.x_s.shape[1]
        if self.guidance and network.process is not None:  # one sequence more, fully masked
            x_s = torch.cat([x_s, torch.full_like(x_s[:1], network.vocab)])
            alpha_s = torch.cat([alpha_s, network.process.noise.alpha(torch.ones_like(alpha_s[:1]))])
        hidden = network.features(x_s, alpha_s)
        blank = (hidden[-1, :1] if network.position_invariant else hidden[-1]) if self.guidance else None
        place = torch.zeros(len(pair.alpha_s), dtype=torch.long).scatter(0, live, torch.arange(len(live)))
        at = place.to(dense.device)[dense // l] * l + dense % l
        at = send(at, hidden.device)
        return [certain, (dense, Prediction(hidden.flatten(0, 1)[at], network, self.temperature, self.guidance, blank))]

    @property
    def frozen(self) -> bool:
        """Whether its weights never change: those of a trained teacher."""
        return not self.copies and all(value == 1 for _, value in self.decay.knots)

    def lam(self, step: int, total: int, reference: int = PAPER_STEPS) -> float:
        """lambda of the update that follows step number `step` of `total`, a pure function of both.

        A decay below 1 is that of an EMA (`schedules.ema_decay`)."""
        if self.copies:
            spans = math.floor((step + 1) * self.copies / total)
            crossed = spans > math.floor(step * self.copies / total)
            if crossed and spans >= math.ceil(self.copy_from * self.copies - 1e-9):
                return 0.0
        decay = self.decay((step + 1) / total)
        return decay if decay == 1 else ema_decay(decay, step, total, reference)

    def __str__(self) -> str:
        rule = "" if all(value == 1 for _, value in self.decay.knots) else f"lambda {self.decay}"
        copies = (
            f"{self.copies} copies" + (f" from {number(self.copy_from)}" if self.copy_from else "")
            if self.copies
            else ""
        )
        sharp = f"T {number(self.temperature)}" if self.temperature != 1 else ""
        guided = f"guidance {number(self.guidance)}" if self.guidance else ""
        return f"network({', '.join(filter(None, [rule or ('' if copies else 'frozen'), copies, guided, sharp]))})"
