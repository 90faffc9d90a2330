"""Unmasking orders: a level in (0, 1) for every masked position, from which its time of unmasking follows.

A position is masked at time t while its level is below (1 - alpha_t) / (1 - alpha_1). Under independent uniform levels
that is the marginal q(x_t | x_0) of the masked process; other orders keep the marginal of each position, and positions
depend on each other. Samplers unmask along them (`sample/order.py`), and couplings draw both ends of a hop along them
(`objective/coupling.py`). `sample/samplers.py` has the table of orders.
"""

import math
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cdlm.process.grid import sudoku_pattern
from cdlm.rng import Rng

Level = Float[Tensor, "b l"]

_BITS = 30
_TIE = 1e-10  # half a position counts as a whole one, whatever the last bit of a time


@runtime_checkable
class OrderLevels(Protocol):
    """An unmasking order: the level of every position, of which the masked ones count; high levels come first.

    `steps` is the number of steps that the sampler takes."""

    def __call__(self, is_mask: Bool[Tensor, "b l"], steps: int, rng: Rng) -> Level: ...


def random_order(is_mask: Bool[Tensor, "b l"], steps: int, rng: Rng) -> Level:
    """Independent uniform levels: ancestral sampling."""
    return rng("reveal").uniform(is_mask.shape[1])


def dilated_order(is_mask: Bool[Tensor, "b l"], steps: int, rng: Rng) -> Level:
    """The positions of a step are exactly `steps` apart, and the steps come in random order.

    Only masked positions are counted, so that a masked span is spread over itself.
    """
    place = _places(is_mask, rng)
    turn = rng("reveal").uniform(steps).argsort(-1).argsort(-1)
    within = _radical_inverse(place // steps) * (1 - 2e-6) + 1e-6
    return (turn.gather(-1, place % steps) + within) / steps


def bit_reversed_order(is_mask: Bool[Tensor, "b l"], steps: int, rng: Rng) -> Level:
    """From coarse to fine: each step lies halfway between what is there already."""
    return _radical_inverse(_places(is_mask, rng))


def grid_order(is_mask: Bool[Tensor, "b l"], steps: int, rng: Rng) -> Level:
    """For grids such as Sudoku: the positions fill a square row by row, and k steps of equal size over a k x k grid
    take cells in different rows, columns and boxes each. The cells of a symbol of a fixed Sudoku grid come together;
    symbols, and cells of a symbol, come in random order. A sequence whose length is no square leaves some cells out.
    """
    length = is_mask.shape[1]
    side = math.isqrt(length - 1) + 1
    symbol = sudoku_pattern(side).flatten()[:length]
    turn = rng("reveal").uniform(side).argsort(-1).argsort(-1)
    within = rng("within").uniform(length) * (1 - 2e-6) + 1e-6
    return (turn[:, symbol] + within) / side


def equal_steps(level: Level, is_mask: Bool[Tensor, "b l"]) -> Level:
    """The same order with levels that are evenly spaced: every step of a uniform grid unmasks the same number.

        level = (rank + 1/2) / n    among the n masked positions, rank 0 is unmasked last

    The number that is unmasked before time t is then the expected one, rounded half up, in place of a binomial one.
    """
    rank = level.masked_fill(~is_mask, torch.inf).argsort(dim=-1, stable=True).argsort(dim=-1)
    num_masks = is_mask.sum(-1, keepdim=True).clamp(min=1)
    return (rank.to(level.dtype) + 0.5) / num_masks + _TIE


def _places(is_mask: Bool[Tensor, "b l"], rng: Rng) -> Int[Tensor, "b l"]:
    """The number of each masked position, from a random first number on."""
    return is_mask.cumsum(-1) - 1 + rng("offset").integers(1, 2**20)


def _radical_inverse(place: Int[Tensor, "b l"]) -> Level:
    """In base 2: the binary digits of a number, mirrored behind the point."""
    value = torch.zeros(place.shape, dtype=torch.float64)
    for bit in range(_BITS):
        value += (place >> bit & 1) * 2.0 ** -(bit + 1)
    return value
