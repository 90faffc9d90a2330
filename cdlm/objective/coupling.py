"""Couplings Pi(x_s, x_t | x_0): how the two ends of a hop are drawn together. Each is one section of Appendix D."""

import dataclasses
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool
from torch import Tensor

from cdlm.devices import send
from cdlm.model.denoiser import Denoiser
from cdlm.process.gaussian import Gaussian
from cdlm.process.order import OrderLevels
from cdlm.process.process import DATA, Process
from cdlm.rng import Rng, categorical
from cdlm.types import Pair, Time, Tokens, wide

_ROWS = 4096


@runtime_checkable
class Coupling(Protocol):
    """Pi(x_s, x_t | x_0): draws both ends of a hop. `pair_of` makes the result from them.

    `teacher` is the target network, where the objective has one. `str` names the coupling in `cdlm methods`. x_0 is on
    the host; a coupling whose draws are too heavy for it sets `on_device = True`, and gets x_0 on the student's device.
    """

    def __call__(self, x0: Tokens, s: Time, t: Time, rng: Rng, teacher: Denoiser | None = None) -> Pair: ...


@dataclasses.dataclass(frozen=True)
class Bridge:
    """CDLM's exact coupling: q(x_t | x_0) q(x_s | x_t, x_0)."""

    process: Process

    def __call__(self, x0: Tokens, s: Time, t: Time, rng: Rng, teacher: Denoiser | None = None) -> Pair:
        x_t = self.process.corrupt(x0, t, rng("x_t"))
        x_s = self.process.bridge(x0, x_t, s, t, rng("x_s"))
        return pair_of(self.process, x0, x_s, x_t, s, t)

    def __str__(self) -> str:
        return f"Bridge({self.process.name})"


@dataclasses.dataclass(frozen=True)
class Ordered:
    """The bridge along a reveal order: x_t and x_s have the masks that a sampler in this order meets at t and s.

    Each position alone is masked as ever, but positions are no longer independent of each other: their levels (see
    `sample/order.py`) are spread over the text. `steps` is what a dilated order is dilated by.
    """

    process: Process
    order: OrderLevels
    steps: int

    def __call__(self, x0: Tokens, s: Time, t: Time, rng: Rng, teacher: Denoiser | None = None) -> Pair:
        self.process.check_ids(x0)
        words = ~self.process.is_special(x0)
        level = self.order(words.cpu(), self.steps, rng).to(x0.device)
        largest = 1 - self.process.noise.alpha(torch.ones(1, dtype=t.dtype))

        def noised(time: Time) -> Tokens:
            share = (1 - self.process.noise.alpha(time)) / largest
            return torch.where((level < share.to(level)[:, None]) & words, self.process.vocab, x0)

        return pair_of(self.process, x0, noised(s), noised(t), s, t)

    def __str__(self) -> str:
        return f"Ordered({self.process.name}, {getattr(self.order, '__name__', self.order)})"


@dataclasses.dataclass(frozen=True)
class Rollout:
    """SDTT's coupling: x_s is one ancestral hop of the teacher, x_0 replaced by its prediction at x_t (Prop. D.4).

    The tokens it reveals keep the distribution they were drawn from as their target, not the drawn token alone.
    """

    process: Process

    def __call__(self, x0: Tokens, s: Time, t: Time, rng: Rng, teacher: Denoiser | None = None) -> Pair:
        if teacher is None:
            raise ValueError("a rollout needs a teacher: start the target network from a trained masked model")
        x_t = self.process.corrupt(x0, t, rng("x_t"))
        alpha_t = self.process.noise.alpha(t)
        with torch.no_grad():
            hidden = teacher.features(x_t, alpha_t)
            # Under masking the route does not depend on the prediction: the head runs only where a token is revealed.
            visible = (~self.process.positions(x_t)).to(wide(x_t.device))
            drawn = self.process.route(x_t, visible, s, t, rng("x_s")) == DATA
            index = drawn.flatten().nonzero()[:, 0]
            u = rng("token").uniform(x_t.shape[1], x_t.device).flatten()[index]
            index, u, x_s = (send(tensor, hidden.device) for tensor in (index, u, x_t.flatten()))
            for rows, u_rows in zip(index.split(_ROWS), u.split(_ROWS), strict=True):
                log_probs = teacher.head(hidden.flatten(0, 1)[rows])  # as wide as the vocabulary
                x_s = x_s.scatter(0, rows, categorical(log_probs, u_rows))
        pair = pair_of(self.process, x0, x_t, x_t, s, t)  # what is known at s is known here, on the host
        return dataclasses.replace(pair, x_s=x_s.view_as(x_t), drawn_from=hidden, known=pair.known | drawn)

    def __str__(self) -> str:
        return f"Rollout({self.process.name})"


@dataclasses.dataclass(frozen=True)
class SharedNoise:
    """DUO-DCD's coupling: both ends are argmaxes of one Gaussian noise vector (Prop. D.5)."""

    process: Process
    gaussian: Gaussian

    def __call__(self, x0: Tokens, s: Time, t: Time, rng: Rng, teacher: Denoiser | None = None) -> Pair:
        self.process.check_ids(x0)
        x_s, x_t = self.gaussian.shared(x0, s, t, rng)
        return pair_of(self.process, x0, x_s, x_t, s, t, self.gaussian)

    def __str__(self) -> str:
        return f"SharedNoise(gamma {self.gaussian.gamma_min:g} to {self.gaussian.gamma_max:g})"


@dataclasses.dataclass(frozen=True)
class Relaxed:
    """DUO's curriculum: x_t = argmax(w_t), while the student sees softmax(w_t / tau)."""

    process: Process
    gaussian: Gaussian
    tau: float
    top: int = 16
    on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.tau <= 0 or self.top < 1:
            raise ValueError(
                f"relaxed tokens need a temperature tau > 0 and at least one other token; got tau {self.tau}"
            )

    def __call__(self, x0: Tokens, s: Time, t: Time, rng: Rng, teacher: Denoiser | None = None) -> Pair:
        self.process.check_ids(x0)
        x_t, mixture = self.gaussian.relaxed(x0, t, self.tau, self.top, rng)
        pair = pair_of(self.process, x0, x0, x_t, s, t, self.gaussian)
        return dataclasses.replace(pair, alpha_s=torch.ones_like(s), input=mixture)

    def __str__(self) -> str:
        return f"Relaxed(tau {self.tau:g})"


@dataclasses.dataclass(frozen=True)
class TeacherForced:
    """AR in the terms of Eq. (8), our reading: a process whose mask is always a suffix, boundary target x_0.

    A causal network evaluates all suffix states in one pass, so every position but the first is predicted at once.
    """

    def __call__(self, x0: Tokens, s: Time, t: Time, rng: Rng, teacher: Denoiser | None = None) -> Pair:
        following, everywhere = x0[:, 1:], torch.ones_like(x0[:, 1:], dtype=torch.bool)
        ones = torch.ones_like(t)
        return Pair(
            x0=following, x_s=following, x_t=following, s=s, t=t, alpha_s=ones, alpha_t=ones, dalpha_t=-ones,
            positions=everywhere, known=everywhere, input=x0[:, :-1],
        )  # fmt: skip

    def __str__(self) -> str:
        return "TeacherForced"


def pair_of(
    process: Process, x0: Tokens, x_s: Tokens, x_t: Tokens, s: Time, t: Time, gaussian: Gaussian | None = None
) -> Pair:
    """A pair of a process, at the signal levels of its noise schedule or of its Gaussian twin."""
    for name, x in (("x_s", x_s), ("x_t", x_t)):
        if x.shape != x0.shape or x.dtype != x0.dtype:
            raise ValueError(
                f"the {name} of a coupling must have the shape and dtype of x_0: {_kind(x0)} (got {_kind(x)})."
            )
    noise = gaussian or process.noise
    alpha_s = noise.alpha(s)
    noisy = _noisy(process, x_s)
    return Pair(
        x0=x0,
        x_s=x_s,
        x_t=x_t,
        s=s,
        t=t,
        alpha_s=alpha_s,
        alpha_t=noise.alpha(t),
        dalpha_t=noise.derivative(t),
        positions=_noisy(process, x_t),
        known=~noisy | (alpha_s == 1).to(noisy.device)[:, None],
        prior=process.prior,
    )


def _noisy(process: Process, x: Tokens) -> Bool[Tensor, "b l"]:
    """M(x). Under a prior that allows every token it is everywhere: on the host, whatever device x is on."""
    return torch.ones(x.shape, dtype=torch.bool) if process.full else process.positions(x)


def _kind(x: Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
