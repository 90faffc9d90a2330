"""MCDLM with the ingredients that the search tried and that did not win (docs/search.md), as rows of their own.

`mcdlm-search` has the choices of `mcdlm` and six more: another divergence where the hop reveals the token, another
weight, hops along an unmasking order, a temperature and guidance for the target, and targets averaged over several
bridges. `register` adds the rows to the table of methods.
"""

import dataclasses
import functools
from typing import Any, Literal

import torch
from torch import Tensor

from cdlm.devices import send
from cdlm.methods import GROWING, METHODS, AnchorDivergence, ConsistencyDivergence, Method, mcdlm
from cdlm.model.denoiser import Denoiser
from cdlm.objective import Network, Objective, Ordered, inverse_noise, inverse_step, unit
from cdlm.objective.coupling import pair_of
from cdlm.objective.divergence import FLOOR, Divergence, kl
from cdlm.objective.target import Group, Prediction
from cdlm.objective.times import Overshoot, Steps
from cdlm.process import Process
from cdlm.rng import Rng
from cdlm.sample.samplers import ORDERS, load_function
from cdlm.schedules import PAPER_STEPS
from cdlm.types import LogLaw, Pair, Time, Tokens

WEIGHTS = {"step": inverse_step, "noise": inverse_noise, "unit": unit}


@dataclasses.dataclass(frozen=True)
class ManyPairs(Pair):
    """A pair with more draws of x_s from the same x_t."""

    others: tuple[Pair, ...] = ()


@dataclasses.dataclass(frozen=True)
class Bridges:
    """The bridge, drawn several times from one x_t."""

    process: Process
    draws: int

    def __call__(self, x0: Tokens, s: Time, t: Time, rng: Rng, teacher: Denoiser | None = None) -> ManyPairs:
        x_t = self.process.corrupt(x0, t, rng("x_t"))
        first, *others = (
            pair_of(self.process, x0, self.process.bridge(x0, x_t, s, t, rng(f"x_s{k or ''}")), x_t, s, t)
            for k in range(self.draws)
        )
        return ManyPairs(**vars(first), others=tuple(others))

    def __str__(self) -> str:
        return f"Bridges({self.process.name}, {self.draws} draws)"


@dataclasses.dataclass(frozen=True)
class Mean:
    """The mean of several predictions, each left out where its own hop has revealed the token."""

    first: Prediction
    others: tuple[tuple[Prediction, Tensor], ...]

    def log_probs(self) -> LogLaw:
        total = self.first.log_probs()
        for other, silent in self.others:
            total = torch.where(silent[:, None], total, torch.logaddexp(total, other.log_probs()))
        return total.log_softmax(-1)


@dataclasses.dataclass(frozen=True)
class MeanNetwork(Network):
    """The target network at every draw of x_s, averaged."""

    @torch.no_grad()
    def __call__(self, pair: Pair, network: Denoiser | None = None) -> list[Group]:
        groups = super().__call__(pair, network)
        if network is None or not isinstance(pair, ManyPairs) or len(groups) == 1:
            return groups
        certain, (dense, goal) = groups
        others = []
        for other in pair.others:
            hidden = network.features(other.x_s, other.alpha_s).flatten(0, 1)
            rows = hidden[send(dense, hidden.device)]
            silent = send(other.known.flatten()[send(dense, other.known.device)], hidden.device)
            others.append((goal._replace(hidden=rows), silent))
        return [certain, (dense, Mean(goal, tuple(others)))]


def by_kind(*, target: Tensor, student: Tensor, pair: Pair, point: Divergence, dense: Divergence) -> Tensor:
    """One divergence where the target is a token, another where it is a distribution."""
    return (dense if target.is_floating_point() else point)(target=target, student=student, pair=pair)


def mcdlm_search(
    process: Process,
    total: int = PAPER_STEPS,
    *,
    kappa: float = 0.4,
    steps: Steps = "random",
    low: float = 1 / 8,
    high: float = 5 / 8,
    overshoot: Overshoot = "clip",
    divergence: ConsistencyDivergence = "jsd",
    floor: float = FLOOR,
    anchor: AnchorDivergence = "kl",
    additive: bool = False,
    anneal: float = 0.0,
    lam: float = 0.999,
    revealed: Literal["same", "kl"] = "same",
    weight: Literal["step", "noise", "unit"] = "step",
    order: Literal["random", "dilated", "bit-reversed"] = "random",
    sharpen: float = 1.0,
    guide: float = 0.0,
    bridges: int = 1,
) -> Objective:
    """`mcdlm` with its consistency term changed."""
    if guide and not process.has_mask:
        raise ValueError(f"guidance needs a mask, and the process is {process.name}: leave out guide")
    if order != "random" and (bridges > 1 or not process.absorbing):
        raise ValueError(f"the order {order} is one of masks and leaves a hop one bridge: leave out one of the two")
    if bridges < 1:
        raise ValueError(f"a hop has at least one bridge; got {bridges}")
    found = mcdlm(
        process, total, kappa=kappa, steps=steps, low=low, high=high, overshoot=overshoot, divergence=divergence,
        floor=floor, anchor=anchor, additive=additive, anneal=anneal, lam=lam,
    )  # fmt: skip
    hops, data = found.terms
    rule = hops.target
    assert isinstance(rule, Network)
    target = (MeanNetwork if bridges > 1 else Network)(rule.decay, temperature=sharpen, guidance=guide)
    changes: dict[str, Any] = {"target": target, "weight": WEIGHTS[weight]}
    if order != "random":
        changes["coupling"] = Ordered(process, load_function(ORDERS[order].levels), round(1 / high))
    if bridges > 1:
        changes["coupling"] = Bridges(process, bridges)
    if revealed == "kl":
        changes["divergence"] = functools.partial(by_kind, point=kl, dense=hops.divergence)
    return dataclasses.replace(found, terms=(dataclasses.replace(hops, **changes), data))


ROWS = {
    "mcdlm-search": Method("MCDLM-search", mcdlm_search, "masked"),
    "ucdlm-search": Method(
        "UCDLM-search", mcdlm_search, "uniform", time_conditioning=True, defaults=GROWING, posterior="mixture"
    ),
}
"""Old method strings with such choices, like mcdlm:bridges=4, stand for these rows (`split_method`)."""


def register() -> None:
    """Add the rows to the table of methods, so that runs can be trained by them and old runs resumed."""
    METHODS.update(ROWS)
