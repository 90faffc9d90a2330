"""Ingredients of several methods that are derived from their arguments, and the checks of these arguments."""

import dataclasses
import math
from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from cdlm.objective.coupling import Bridge, Ordered
from cdlm.objective.divergence import FLOOR, ClosedForm, divergence
from cdlm.objective.weight import inverse_noise, unit
from cdlm.process import Gaussian, Process
from cdlm.sample.samplers import ORDERS, load_function
from cdlm.schedules import Schedule, number, stairs
from cdlm.types import Pair


def gaussian_of(process: Process, gamma_min: float, gamma_max: float) -> Gaussian:
    if not gamma_min < gamma_max:
        raise ValueError(f"noise grows from gamma_min to gamma_max, a larger one; got {gamma_min} and {gamma_max}")
    return Gaussian(process.vocab, gamma_min, gamma_max)


def doubling(smallest: float, rounds: int) -> Schedule:
    """A step size that doubles from round to round."""
    if rounds < 1:
        raise ValueError(f"a distillation has at least one round; got {rounds}")
    if not 0 < smallest * 2 ** (rounds - 1) <= 1:
        raise ValueError(
            f"hops double from `smallest` over the rounds and end at 1 or below; got smallest={number(smallest)} and "
            f"rounds={rounds}, so at most {1 + math.floor(-math.log2(smallest)) if 0 < smallest <= 1 else 0} rounds"
        )
    return stairs(*(smallest * 2**k for k in range(rounds)))


def coupling_along(process: Process, order: str, steps: int) -> Bridge | Ordered:
    """The bridge, in the order in which a sampler of so many steps unmasks."""
    return Bridge(process) if order == "random" else sampler_coupling(process, order, steps)


def sampler_coupling(process: Process, order: str, steps: int) -> Ordered:
    """The masks that a sampler of so many steps meets, from the fully masked text on.

    The bridge, which is the same for the random order otherwise, leaves a token in a thousand visible at t = 1.
    """
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}; choose from {', '.join(ORDERS)}")
    if not process.absorbing:
        raise ValueError(f"an order is one of masks, and the process is {process.name}: leave out order={order}")
    return Ordered(process, load_function(ORDERS[order].levels), steps)


def anchor_share(kappa: Schedule, additive: bool) -> Schedule:
    """kappa of Eq. (7), checked. The consistency loss has 1 - kappa, or 1 beside an additive anchor."""
    largest = math.inf if additive else 1
    if not all(0 <= value <= largest for _, value in kappa.knots):
        raise ValueError(f"kappa is a share in [0, 1], and got {kappa}; only the additive anchor takes more")
    return kappa


def complement(share: Schedule) -> Schedule:
    """1 - share."""
    return dataclasses.replace(share, knots=tuple((at, 1 - value) for at, value in share.knots))


def consistency_divergence(name: str, floor: float) -> ClosedForm:
    """The divergence of the consistency loss."""
    if name != "reverse_kl" and floor != FLOOR:
        raise ValueError(f"floor belongs to the reverse KL; the divergence is {name}, so leave it out")
    return divergence(name, floor)


def anchor_weight(anchor: str) -> Callable[[Pair], Float[Tensor, "n"]]:
    """The weight of the NELBO, which the rate KL brings itself."""
    return unit if anchor == "rate_kl" else inverse_noise
