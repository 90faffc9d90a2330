"""Noise schedules: alpha(t), the share of signal left at time t; its derivative; its inverse.

alpha(0) = 1 exactly and alpha(1) = eps, so that the prior is reached up to eps.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

Times = Float[Tensor, "..."]


@runtime_checkable
class Noise(Protocol):
    """A noise schedule: a dataclass with the field `eps`. alpha' < 0 from t = 0 on, at 0 as well."""

    @property
    def eps(self) -> float: ...

    def alpha(self, t: Times) -> Times: ...

    def derivative(self, t: Times) -> Times: ...

    def inverse(self, alpha: Times) -> Times: ...


@dataclasses.dataclass(frozen=True)
class LogLinear:
    """alpha(t) = 1 - (1 - eps) t, the schedule of MDLM, UDLM, DUO and the paper (its Algorithm 2 has eps = 0).

    Called log-linear because -log alpha(t) is a logarithm of a linear function. -alpha'/(1 - alpha) = 1/t for every
    eps.
    """

    eps: float = 1e-3

    def alpha(self, t: Times) -> Times:
        return 1 - (1 - self.eps) * t

    def derivative(self, t: Times) -> Times:
        return torch.full_like(t, self.eps - 1)

    def inverse(self, alpha: Times) -> Times:
        return (1 - alpha) / (1 - self.eps)


@dataclasses.dataclass(frozen=True)
class Cosine:
    """alpha(t) = 1 - (1 - eps) sin(pi t / 2), slow near the prior and fast near the data."""

    eps: float = 1e-3

    def alpha(self, t: Times) -> Times:
        return 1 - (1 - self.eps) * torch.sin(t * (math.pi / 2))

    def derivative(self, t: Times) -> Times:
        return -(1 - self.eps) * (math.pi / 2) * torch.cos(t * (math.pi / 2))

    def inverse(self, alpha: Times) -> Times:
        return torch.asin(((1 - alpha) / (1 - self.eps)).clamp(max=1)) * (2 / math.pi)


SCHEDULES: dict[str, Callable[..., Noise]] = {"log-linear": LogLinear, "cosine": Cosine}
"""By the names that `--noise-schedule` and config.json have for them; called with `eps`, or without."""
