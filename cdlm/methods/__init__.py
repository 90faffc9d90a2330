"""The table of methods: each is one function that returns the terms of Eq. (8), and nothing else.

    Term(name, times, coupling, target, divergence, weight, share)

Every function takes the process and the length of the run; its keyword arguments are the choices that the paper
varies or leaves open, with the paper's values (or, where it is silent, ours: see docs/choices.md) as defaults. A new
method is a new function here. `cdlm.methods.spec` reads method strings such as `mcdlm:kappa=0.2`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cdlm.methods.ingredients import (
    anchor_share,
    anchor_weight,
    complement,
    consistency_divergence,
    coupling_along,
    doubling,
    gaussian_of,
    sampler_coupling,
)
from cdlm.objective.coupling import Bridge, Relaxed, Rollout, SharedNoise, TeacherForced
from cdlm.objective.divergence import FLOOR, kl, rate_kl, reverse_kl
from cdlm.objective.divergence import divergence as divergence_of
from cdlm.objective.loss import Objective, Term
from cdlm.objective.target import Data, Network, Revealed
from cdlm.objective.times import MAX_STEP, Overshoot, Steps, Times, step_scheduler
from cdlm.objective.weight import inverse_noise, inverse_step, unit
from cdlm.process import Process, masked, uniform
from cdlm.process.process import Posterior
from cdlm.schedules import PAPER_STEPS, Schedule, constant, linear, number

AnchorDivergence = Literal["kl", "jsd", "rate_kl"]
ConsistencyDivergence = Literal["jsd", "kl", "reverse_kl", "tv"]


def ar(process: None = None, total: int = PAPER_STEPS // 2) -> Objective:
    """Autoregressive baseline: a suffix of masks, all of them predicted in one causal pass."""
    return Objective((Term("next token", MAX_STEP, TeacherForced(), Data(), kl, unit),), total)


def mdlm(process: Process, total: int = PAPER_STEPS) -> Objective:
    """MDLM: the max-step boundary of CDLM under forward KL (Prop. D.1); on the uniform process, UDLM."""
    return Objective((Term("nelbo", MAX_STEP, Bridge(process), Data(), rate_kl, unit),), total)


def duo(
    process: Process,
    total: int = PAPER_STEPS,
    *,
    tau: float = 1e-3,
    gamma_min: float = -3.55,
    gamma_max: float = -1.85,
    curriculum: float = 0.5,
) -> Objective:
    """DUO: UDLM after a curriculum of relaxed inputs in the first part of the run."""
    gaussian = gaussian_of(process, gamma_min, gamma_max)
    if not 0 <= curriculum <= 1:
        raise ValueError(f"the curriculum is a share of the run, from 0 to 1; got {curriculum}")
    first = Schedule(((0.0, 1.0), (curriculum, 0.0)), jumps=True) if curriculum else constant(0.0)
    return Objective(
        (
            Term("curriculum", MAX_STEP, Relaxed(process, gaussian, tau), Data(), rate_kl, unit, first),
            Term("nelbo", MAX_STEP, Bridge(process), Data(), rate_kl, unit, complement(first)),
        ),
        total,
    )


def mcdlm(
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
) -> Objective:
    """CDLM: Eq. (6) over hops of the bridge, with the anchor of Eq. (7); MCDLM or UCDLM, as the process is.

    Given `anneal`, kappa falls from 1 to its value over that share of the run.
    """
    if not 0 <= anneal <= 1:
        raise ValueError(f"anneal is a share of the run, from 0 to 1; got {anneal}")
    share = anchor_share(linear((0.0, 1.0), (anneal, kappa)) if anneal else constant(kappa), additive)
    rest = constant(1.0) if additive else complement(share)
    times = step_scheduler(steps, low, high, overshoot)
    target = Network(constant(lam))
    compare = consistency_divergence(divergence, floor)
    return Objective(
        (
            Term("consistency", times, Bridge(process), target, compare, inverse_step, rest),
            Term("anchor", MAX_STEP, Bridge(process), Data(), divergence_of(anchor), anchor_weight(anchor), share),
        ),
        total,
    )


def mcdlm_guided(
    process: Process,
    total: int = PAPER_STEPS // 4,
    *,
    kappa: float = 0.4,
    steps: Steps = "random",
    low: float = 1 / 8,
    high: float = 5 / 8,
    guidance: float = 1.0,
    temperature: float = 0.85,
    lam: float = 1.0,
) -> Objective:
    """MCDLM with a guided target (ours, docs/search.md): forward KL to what a frozen MDLM predicts with guidance.

    The target at x_s is f^(1 + g) / b^g at a temperature, b the prediction for a fully masked text: the student learns
    the guidance, and samples without the second evaluation that it costs.
    """
    times = step_scheduler(steps, low, high)
    teacher = Network(constant(lam), temperature=temperature, guidance=guidance)
    return Objective(
        (
            Term("consistency", times, Bridge(process), teacher, kl, inverse_step, constant(1 - kappa)),
            Term("anchor", MAX_STEP, Bridge(process), Data(), kl, inverse_noise, constant(kappa)),
        ),
        total,
    )


def mcdlm_pplopt(
    process: Process,
    total: int = PAPER_STEPS,
    *,
    kappa: float = 0.4,
    kappa_end: float = 0.2,
    steps: Steps = "random",
    low: float = 1 / 8,
    high: float = 5 / 8,
    high_end: float = 3 / 8,
    overshoot: Overshoot = "clip",
    divergence: ConsistencyDivergence = "jsd",
    floor: float = FLOOR,
    anchor: AnchorDivergence = "kl",
    additive: bool = False,
    lam: float = 0.999,
    switch: float = 2 / 3,
    copies: int = 15,
) -> Objective:
    """MCDLM-PPLOptimized: MCDLM until `switch`, then shorter hops, a weaker anchor and hard copies of the target."""
    if not 0 < switch < 1:
        raise ValueError(f"switch is a share of the run between 0 and 1; got {switch}")

    def fade(start: float, end: float) -> Schedule:
        return linear((0.0, start), (switch, start), (1.0, end))

    if steps == "random":
        times = Times(constant(low), fade(high, high_end), overshoot)
    elif high_end != 3 / 8:
        raise ValueError(f"high_end belongs to random steps; the {steps} scheduler has its own course, so leave it out")
    else:
        times = step_scheduler(steps, low, high, overshoot)
    target = Network(Schedule(((0.0, lam), (switch, 1.0)), jumps=True), copies, copy_from=switch)
    share = anchor_share(fade(kappa, kappa_end), additive)
    rest = constant(1.0) if additive else complement(share)
    compare = consistency_divergence(divergence, floor)
    return Objective(
        (
            Term("consistency", times, Bridge(process), target, compare, inverse_step, rest),
            Term("anchor", MAX_STEP, Bridge(process), Data(), divergence_of(anchor), anchor_weight(anchor), share),
        ),
        total,
    )


def few_step(
    process: Process, total: int = PAPER_STEPS, *, steps: int = 8, most: int = 0, order: str = "random"
) -> Objective:
    """The likelihood of a sampler itself: of `steps` hops (or of any number up to `most`) along a reveal order.

    A hop draws the tokens that it reveals, each from its own distribution given x_t, so minus their log-probabilities,
    summed over the hops, are minus the log-likelihood of the text. In the limit of many steps it is MDLM.
    """
    if steps < 1 or (most and most < steps):
        raise ValueError(f"a sampler has at least one step, and `most` is not below `steps`; got {steps} and {most}")
    times = Times(constant(1 / (most or steps)), constant(1 / steps), whole=True)
    return Objective((Term("hop", times, coupling_along(process, order, steps), Revealed(), kl, inverse_step),), total)


def joint(
    process: Process, total: int = PAPER_STEPS, *, steps: int = 1, most: int = 32, dilated: float = 0.5
) -> Objective:
    """The likelihood of a sampler that draws the tokens of a hop one after the other, by a joint head; ours.

    Samplers of `steps` hops and of each power of two times that, up to `most`: in random order and, for a share of
    `dilated`, in dilated order.
    """
    if not 0 <= dilated <= 1 or steps < 1 or most < steps or (dilated and most == 1):
        raise ValueError(
            "`steps` is at least 1, `most` not below it, and `dilated` a share in [0, 1], which is 0 for most=1; got "
            f"steps={steps}, most={most}, dilated={number(dilated)}"
        )
    numbers = [steps * 2**k for k in range((most // steps).bit_length())]

    def terms(order: str, numbers: list[int], share: float) -> list[Term]:
        return [
            Term(
                f"{n} steps" + ("" if order == "random" else f", {order}"),
                Times(constant(1 / n), constant(1 / n), whole=True),
                sampler_coupling(process, order, n),
                Revealed(),
                kl,
                inverse_step,
                constant(share / len(numbers)),
                reduction="sequence",
            )
            for n in numbers
        ]

    random = terms("random", numbers, 1 - dilated) if dilated < 1 else []
    spread = terms("dilated", [n for n in numbers if n > 1], dilated) if dilated else []
    return Objective((*random, *spread), total)


def sdtt(process: Process, total: int = PAPER_STEPS // 3, *, rounds: int = 5, smallest: float = 1 / 1024) -> Objective:
    """SDTT: the teacher's rollout in place of the bridge (Prop. D.4); rounds double the hop and renew the teacher."""
    hops = doubling(smallest, rounds)
    times = Times(hops, hops, floor=1e-5)
    teacher = Network(constant(1.0), copies=rounds)
    return Objective((Term("distillation", times, Rollout(process), teacher, reverse_kl, unit),), total)


def duo_dcd(
    process: Process,
    total: int = PAPER_STEPS // 3,
    *,
    rounds: int = 5,
    smallest: float = 1 / 512,
    gamma_min: float = -4.0,
    gamma_max: float = -1.0,
) -> Objective:
    """DUO+DCD: hops between two argmaxes of one Gaussian (Prop. D.5); rounds as in SDTT."""
    hops = doubling(smallest, rounds)
    coupling = SharedNoise(process, gaussian_of(process, gamma_min, gamma_max))
    teacher = Network(constant(1.0), copies=rounds)
    times = Times(hops, hops, overshoot="shift")
    return Objective((Term("distillation", times, coupling, teacher, reverse_kl, unit),), total)


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the table: the objective, and what it asks of process and network."""

    name: str
    objective: Callable[..., Objective]
    process: Literal["masked", "any mask", "uniform", "none"]
    time_conditioning: bool = False
    starts_from: str = ""
    """The methods whose checkpoint it distils, for the two-stage ones."""
    joint_head: bool = False
    """Whether it trains a joint head, which the network must have."""
    duality: bool = False
    """Whether it rests on the Gaussian twin of the uniform process, and so needs that very prior."""
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Choices that differ from the function's own defaults."""
    posterior: Posterior = "plug-in"
    """How its prediction enters the bridge when sampling; under masking both ways agree (docs/choices.md)."""

    def default_process(self, vocab: int) -> Process | None:
        """The process that the paper runs it on."""
        return None if self.process == "none" else uniform(vocab) if self.process == "uniform" else masked(vocab)

    def fits(self, process: Process | None) -> bool:
        """Whether the method is defined on this process."""
        if process is None or self.process == "none":
            return process is None and self.process == "none"
        if self.process in ("masked", "any mask"):
            return process.absorbing if self.process == "masked" else process.has_mask
        return process.flat if self.duality else not process.absorbing

    @property
    def choices(self) -> dict[str, Any]:
        """What can be chosen, with the values taken otherwise."""
        return {**(self.objective.__kwdefaults__ or {}), **self.defaults}

    def __call__(self, process: Process | None, total: int | None = None, **choices: Any) -> Objective:
        """The method's objective on a process it fits; unknown choices and values are refused by name."""
        if not self.fits(process):
            need = {
                "none": "no process: it predicts next tokens",
                "masked": "a masked process, such as masked(vocab)",
                "any mask": "a process with a mask, such as masked(vocab)",
                "uniform": "a process without absorbing mask, such as uniform(vocab) or unigram(prior)",
            }[self.process]
            need = "the uniform process, uniform(vocab)" if self.duality else need
            given = "none" if process is None else process.name
            others = ", ".join(slug for slug, method in METHODS.items() if method.fits(process))
            raise ValueError(f"{self.name} needs {need}; for the process given ({given}) there are: {others}")
        kinds = get_type_hints(self.objective)
        for choice, value in choices.items():
            if choice not in self.choices:
                offered = ", ".join(self.choices) or "none"
                raise ValueError(f"{self.name} has no choice {choice!r}; it has: {offered}")
            if get_origin(kinds[choice]) is Literal and value not in get_args(kinds[choice]):
                offered = ", ".join(get_args(kinds[choice]))
                raise ValueError(f"unknown {choice} {value!r} for {self.name}; choose from {offered}")
        length = {} if total is None else {"total": total}
        return self.objective(process, **length, **{**self.defaults, **choices})


GROWING = {"steps": "increasing", "low": 1 / 8, "high": 3 / 8}

METHODS: dict[str, Method] = {
    "ar": Method("AR", ar, "none"),
    "mdlm": Method("MDLM", mdlm, "masked"),
    "mcdlm": Method("MCDLM", mcdlm, "masked"),
    "mcdlm-pplopt": Method("MCDLM-PPLOptimized", mcdlm_pplopt, "masked"),
    "mcdlm-guided": Method("MCDLM-guided", mcdlm_guided, "any mask"),
    "few-step": Method("Few-step", few_step, "masked"),
    "joint": Method("Joint", joint, "masked", joint_head=True),
    "sdtt": Method("SDTT", sdtt, "masked", starts_from="mdlm, mcdlm"),
    "udlm": Method("UDLM", mdlm, "uniform", time_conditioning=True),
    "duo": Method("DUO", duo, "uniform", time_conditioning=True, duality=True),
    "ucdlm": Method("UCDLM", mcdlm, "uniform", time_conditioning=True, defaults=GROWING, posterior="mixture"),
    "duo-dcd": Method("DUO+DCD", duo_dcd, "uniform", time_conditioning=True, starts_from="duo", duality=True),
}
