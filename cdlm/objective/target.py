"""Targets: what the student at (x_t, t) must agree with. The data, or a slow copy of the network at (x_s, s).

A target returns the positions of M(x_t) in groups, each with what it is compared with: token ids where the target is a
point mass (a cross entropy is then one gather, never a one-hot), elsewhere distributions over the vocabulary.
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
from cdlm.types import Index, LogLaw, Pair, select


class Prediction(NamedTuple):
    """Distributions to be: hidden states, and the network whose head makes distributions of them."""

    hidden: Float[Tensor, "n d"]
    network: Denoiser
    temperature: float = 1.0
    """Below 1 the distributions are sharpened."""
    guidance: float = 0.0
    unconditional: Float[Tensor, "k d"] | None = None
    """Hidden states of a fully masked sequence, for guidance as in sampling; one row if all positions are alike."""

    def log_probs(self) -> LogLaw:
        """All of them at once, gradient stopped."""
        with torch.no_grad():
            given = self.unconditional
            unconditional = None if given is None else mean_law(self.network.head(given))
            return self.adjusted(self.network.head(self.hidden), unconditional).log_softmax(-1)

    def adjusted(self, logits: LogLaw, unconditional: Float[Tensor, "v"] | None) -> LogLaw:
        """With guidance and temperature."""
        if unconditional is not None:
            logits = logits + self.guidance * (logits - unconditional)
        return logits if self.temperature == 1 else logits / self.temperature


@runtime_checkable
class Dense(Protocol):
    """A target that is a distribution for each row, given when it is asked for. `Prediction` also has a fast path."""

    def log_probs(self) -> LogLaw:
        """Log-probabilities, one row for each position, gradient stopped."""
        ...


Group = tuple[Index, Index | Dense]
"""Positions (flattened over batch and length), and what each is compared with: token ids, which are point masses, or
distributions."""


@runtime_checkable
class Target(Protocol):
    """What the student at (x_t, t) must agree with: every position of M(x_t) at most once, in groups.

    A group of point masses has token ids, any other group distributions, so the divergence of a term meets both. Also
    with a `Network`: where the bridge has already revealed the token at x_s, or s = 0, its target is a token id.

    A target that needs a network is a `Network`, whose rule says how the weights of that network follow the student's.
    `str` names it in `cdlm methods`.
    """

    def __call__(self, pair: Pair, network: Denoiser | None = None) -> list[Group]: ...


@dataclasses.dataclass(frozen=True)
class Data:
    """x_0 itself: the boundary f(x_0, 0) = x_0."""

    def __call__(self, pair: Pair, network: Denoiser | None = None) -> list[Group]:
        index = pair.positions.flatten().nonzero()[:, 0]
        return [(index, select(pair.x0, index))]

    def __str__(self) -> str:
        return "data"


@dataclasses.dataclass(frozen=True)
class Revealed:
    """x_0, but only where the hop reveals it: what a sampler with hops of this size draws next, and no more."""

    def __call__(self, pair: Pair, network: Denoiser | None = None) -> list[Group]:
        index = (pair.positions & pair.known).flatten().nonzero()[:, 0]
        return [(index, select(pair.x0, index))]

    def __str__(self) -> str:
        return "data revealed"


@dataclasses.dataclass(frozen=True)
class Network:
    """f at (x_s, s) with weights w of its own, gradient stopped; after each step w <- lambda w + (1 - lambda) theta.

    Its target is a distribution where x_s is noisy. It is a point mass, that is a token id, where f(x_s, s) is certain:
    where the bridge has revealed the token at x_s, and everywhere at s = 0, where f(x_0, 0) = x_0.

    lambda is an EMA's decay (quoted for a run of `reference` steps, scaled to the run's own length), 1 for a
    frozen teacher, and 0 at the end of each of `copies` equal spans of the run that lie at or after `copy_from`.
    """

    decay: Schedule = constant(0.999)
    copies: int = 0
    copy_from: float = 0.0
    temperature: float = 1.0
    """Of the distributions it predicts; below 1 they are sharpened."""
    guidance: float = 0.0
    """Sharpen them relative to the unconditional prediction (fully masked input); for processes with a mask."""

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
        certain: Group = (point, select(pair.x_s, point))
        if pair.drawn_from is not None:
            hidden = pair.drawn_from.flatten(0, 1)[send(point, pair.drawn_from.device)]
            certain = (point, Prediction(hidden, network, self.temperature))
        live = (pair.alpha_s < 1).nonzero()[:, 0]
        if not len(live):  # rows at the boundary need no network
            return [certain]
        x_s, alpha_s, length = pair.x_s[send(live, pair.x_s.device)], pair.alpha_s[live], pair.x_s.shape[1]
        if self.guidance and network.process is not None:  # one sequence more, fully masked
            x_s = torch.cat([x_s, torch.full_like(x_s[:1], network.vocab)])
            alpha_s = torch.cat([alpha_s, network.process.noise.alpha(torch.ones_like(alpha_s[:1]))])
        hidden = network.features(x_s, alpha_s)
        unconditional = (hidden[-1, :1] if network.position_invariant else hidden[-1]) if self.guidance else None
        place = torch.zeros(len(pair.alpha_s), dtype=torch.long).scatter(0, live, torch.arange(len(live)))
        among_live = place.to(dense.device)[dense // length] * length + dense % length
        rows = hidden.flatten(0, 1)[send(among_live, hidden.device)]
        return [certain, (dense, Prediction(rows, network, self.temperature, self.guidance, unconditional))]

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
