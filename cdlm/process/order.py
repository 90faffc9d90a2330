"""Unmasking orders: a level u in (0, 1) for every masked position, from which its time of unmasking follows.

A position is masked at time t while u < (1 - alpha_t) / (1 - alpha_1). Under independent uniform levels that is the
marginal q(x_t | x_0) of the masked process; other orders keep the marginal of each position, and positions depend on
each other. Samplers unmask along them (`sample/order.py`), and couplings draw both ends of a hop along them
(`objective/coupling.py`).
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cdlm.rng import Rng

Order = Literal["random", "dilated", "bit-reversed"]
Level = Float[Tensor, "b l"]

_BITS = 30


def levels(order: Order, is_mask: Bool[Tensor, "b l"], steps: int, rng: Rng) -> Level:
    """The level of each position; high ones are revealed first.

    dilated: the positions of a hop are exactly `steps` apart (on a uniform grid), hops in random order. bit-reversed:
    coarse to fine, each hop halfway between what is there already. Both count masked positions only, so that a blank is
    spread over itself.
    """
    if order == "random":
        return rng("reveal").uniform(is_mask.shape[1])
    place = is_mask.cumsum(-1) - 1 + rng("offset").integers(1, 2**20)
    if order == "bit-reversed":
        return _bit_reversed(place)
    turn = rng("reveal").uniform(steps).argsort(-1).argsort(-1)
    within = _bit_reversed(place // steps) * (1 - 2e-6) + 1e-6
    return (turn.gather(-1, place % steps) + within) / steps


def _bit_reversed(place: Int[Tensor, "b l"]) -> Level:
    """The radical inverse in base 2: the binary digits of a number, mirrored behind the point."""
    value = torch.zeros(place.shape, dtype=torch.float64)
    for bit in range(_BITS):
        value += (place >> bit & 1) * 2.0 ** -(bit + 1)
    return value
