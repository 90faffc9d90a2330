"""Weights w(t, delta) of Eq. (8), row by row."""

import torch
from jaxtyping import Float
from torch import Tensor

from cdlm.types import Pair


def unit(pair: Pair) -> Float[Tensor, "n"]:
    """w = 1."""
    return torch.ones_like(pair.t)


def inverse_step(pair: Pair) -> Float[Tensor, "n"]:
    """w = 1 / delta, with the realised delta = t - s: every unit of corruption time counts the same."""
    return 1 / (pair.t - pair.s)


def inverse_noise(pair: Pair) -> Float[Tensor, "n"]:
    """w = -alpha' / (1 - alpha), the weight of the masked NELBO (Prop. D.1): 1 / t if log-linear, Eq. (7)."""
    return -pair.dalpha_t / (1 - pair.alpha_t)
