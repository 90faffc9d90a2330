"""How a text is drawn: the settings of all samplers as plain values, checked without importing torch.

`generate.py` carries them out.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from cdlm.process.process import Posterior, Process

Confidence = Literal["probability", "margin", "entropy-bound"]
"""Orders that ask the network. probability: of the token drawn. margin: between the two likeliest tokens.
entropy-bound: lowest entropies first, and as many at once as the bound allows."""
UnmaskingOrder = Literal["random", "dilated", "bit-reversed", "first-hitting", Confidence]
CorrectorKind = Literal["constant", "cap", "rescale", "loop"]
Precision = Literal["fp64", "fp32", "naive-fp32"]
Tail = Literal["none", "sample", "argmax"]
"""One more evaluation after the last hop: none; drawn; or its most likely token at every position that is still noisy
(the greedy tail)."""

STEPS, ETA, BOUND = 32, 0.05, 0.5
KINDS = ("order", "grid", "corrector")
"""Settings that make another sampler."""
LOOP_STEPS = 4
"""The fewest steps of the corrector `loop`, which goes down, stays and finishes."""
_MOST = 1_000_000


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a text is drawn; the same settings in Python and on the command line.

    What contradicts itself is refused when the settings are made, what does not fit a process before anything is
    computed.
    """

    steps: int | None = None
    """Denoising steps: evaluations of the network, before the tail [as the model writes best, else 32]."""
    grid: str = "uniform"
    """Where the steps lie: uniform, cosine (small steps first), or times of your own from 1 to 0, as in 1,0.6,0.2,0."""
    order: UnmaskingOrder = "random"
    """Which masks are revealed first. random is the exact ancestral sampler; first-hitting its limit of one token a
    step; dilated and bit-reversed keep the tokens of one step far apart; probability, margin and entropy-bound begin
    with what the network is most certain about (with entropy-bound, steps is the most it takes)."""
    bound: float | None = None
    """For entropy-bound: how many nats of entropy to reveal in one step; more is faster and coarser [0.5]."""
    tail: Tail = "none"
    """One more evaluation after the steps: sample as in the paper's protocol, argmax for the greedy tail. Under masking
    hardly anything is left for it."""
    corrector: Literal["none", CorrectorKind] = "none"
    """Take tokens back on the way: constant (Psi), or ReMDM's cap, rescale and loop."""
    eta: float | None = None
    """How strongly the corrector acts, in (0, 1] [0.05]."""
    temperature: float = 1.0
    """Below 1 sharpens the predicted law, above 1 flattens it."""
    cool: float | None = None
    """The temperature at the end, where it is not the same all along: from --temperature it goes there in a straight
    line."""
    guidance: float = 0.0
    """Above 0 sharpens the law relative to what the network says of a blank text, so that frequent tokens do not get
    more frequent. For masked models."""
    top_k: int = 0
    """Draw from the k likeliest tokens alone; 0 for all."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens with this probability."""
    precision: Precision = "fp64"
    """Of the draw. fp64 and fp32 draw from the same law; naive-fp32 is the published race over rounded probabilities,
    which sharpens samples, for comparison with FP32 tables."""
    posterior: Literal["auto", "plug-in", "mixture"] = "auto"
    """How the prediction enters the bridge; auto is what the model's method calls for (docs/choices.md)."""
    block: int = 0
    """Write texts longer than the model's own: after its own length, this many tokens at a time."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            choices = _choices(field.type)
            value = getattr(self, field.name)
            if choices and value not in choices:
                raise ValueError(f"{_flag(field.name)} is one of {', '.join(choices)}; got {value!r}")
        for name in ("steps", "top_k", "block", "temperature", "top_p", "cool", "guidance", "bound", "eta"):
            value, whole = getattr(self, name), name in ("steps", "top_k", "block")
            if value is not None and (not isinstance(value, int if whole else (int, float)) or isinstance(value, bool)):
                raise ValueError(f"{_flag(name)} is a {'whole ' if whole else ''}number; got {value!r}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"--steps must be at least 1; got {self.steps}")
        if self.steps is not None and self.steps > _MOST:
            raise ValueError(f"--steps must be at most {_MOST:,}; got {self.steps}")
        if self.block < 0:
            raise ValueError(f"--block must be at least 1, or 0 for none; got {self.block}")
        check_shape(self.temperature, self.top_k, self.top_p, self.guidance, self.cool)
        times = self.times()
        if times and self.steps not in (None, len(times) - 1):
            raise ValueError(f"--grid {self.grid} has {len(times) - 1} steps; leave out --steps {self.steps}")
        if self.bound is not None and (self.order != "entropy-bound" or not self.bound >= 0):
            raise ValueError("--bound is at least 0 and goes with --order entropy-bound")
        if self.eta is not None and self.corrector == "none":
            raise ValueError("--eta goes with a corrector: add --corrector rescale, or leave it out")
        if self.precision == "naive-fp32" and (self.guidance or self.cool is not None):
            name = "guidance" if self.guidance else "cool"
            raise ValueError(f"--precision naive-fp32 is the published sampler, which has no --{name}: leave it out")
        if self.corrector != "none":
            check_eta(ETA if self.eta is None else self.eta)
            self._alone(f"--corrector {self.corrector}", "order", "precision")
        if self.corrector == "loop" and self.grid != "uniform":
            raise ValueError("--corrector loop brings its own grid; leave out --grid")
        if self.corrector == "loop" and (self.steps or STEPS) < LOOP_STEPS:
            raise ValueError(f"--corrector loop needs at least {LOOP_STEPS} steps; got {self.steps}")
        if self.order == "first-hitting" and (self.steps, self.grid, self.tail) != (None, "uniform", "none"):
            raise ValueError("--order first-hitting reveals one token a step: leave out --steps, --grid and --tail")
        if self.order in get_args(Confidence) and self.tail != "none":
            raise ValueError(f"--order {self.order} leaves no mask for a tail; leave out --tail")
        if self.precision == "naive-fp32":
            self._alone("--precision naive-fp32", "order")
            if self.posterior == "mixture":
                raise ValueError("--precision naive-fp32 races over the plug-in posterior: add --posterior plug-in")
        if self.order == "dilated" and self.grid != "uniform":
            raise ValueError("--order dilated needs the uniform grid: leave out --grid, or use --order bit-reversed")

    def _alone(self, flag: str, *others: str) -> None:
        """Some samplers do not combine."""
        for name in others:
            value = getattr(self, name)
            if value in (*get_args(Confidence), "dilated", "bit-reversed", "first-hitting", "naive-fp32"):
                raise ValueError(f"{flag} does not go with {_flag(name)} {value}: leave out one of them")

    def check(self, process: "Process | None", posterior: "Posterior" = "plug-in") -> None:
        """Refuse what the process, or the posterior that the model calls for, cannot do."""
        if process is None:
            allowed = ("temperature", "top_k", "top_p", "precision")
            wrong = [name for name in asked(self) if name not in allowed]
            if wrong:
                raise ValueError(
                    f"an autoregressive model draws one token after another and has no {_flag(wrong[0])}; leave it out"
                )
        elif not process.absorbing and self.order != "random":
            raise ValueError(
                f"--order {self.order} reveals masks, and this model has none (its process is {process.name}); "
                "use --order random"
            )
        elif not process.has_mask and self.guidance:
            raise ValueError(
                f"--guidance compares with a blank text, and this model has no mask to write one (its process is "
                f"{process.name}); use --temperature"
            )
        elif process.absorbing and self.posterior != "auto":
            raise ValueError("under masking plug-in and mixture are the same: leave out --posterior")
        elif self.precision == "naive-fp32" and self.posterior == "auto" and posterior == "mixture":
            raise ValueError("--precision naive-fp32 races over the plug-in posterior: add --posterior plug-in")

    def times(self) -> list[float]:
        """The times of a grid of one's own."""
        if not isinstance(self.grid, str):
            raise ValueError(f'--grid is a word or times in one string, such as "1,0.6,0.2,0"; got {self.grid!r}')
        if self.grid in ("uniform", "cosine"):
            return []
        try:
            times = [float(part) for part in self.grid.split(",")]
        except ValueError:
            raise ValueError(
                f"--grid is uniform, cosine, or times from 1 to 0 such as 1,0.6,0.2,0; got {self.grid!r}"
            ) from None
        if len(times) < 2 or times[0] != 1 or times[-1] != 0 or any(not t > s for t, s in itertools.pairwise(times)):
            raise ValueError(f"a grid of your own falls from 1 to 0, such as 1,0.6,0.3,0; got {self.grid}")
        return times


Own = Sequence[dict[str, Any]]
"""Settings that a model writes best with, for one number of steps or several; the first are its usual ones."""


def nearest(own: Own, steps: int | None) -> dict[str, Any]:
    """Those for the number of steps closest by ratio, as few steps want other guidance than many; or the usual ones."""
    if not own or steps is None:
        return own[0] if own else {}
    return min(own, key=lambda one: abs(math.log(one["steps"] / steps)))


def sampling_of(how: dict[str, Any], own: Own = ()) -> Sampling:
    """Settings given as keywords, with those of a model's `own` where nothing is said.

    Another sampler than its own begins from the plain settings: what was found good for one says little of another. An
    unknown setting is named together with those there are.
    """
    known = [field.name for field in dataclasses.fields(Sampling)]
    unknown = [name for name in how if name not in known]
    if unknown:
        raise TypeError(f"there is no setting {unknown[0]!r}; there are: {', '.join(known)}")
    how = {name: value for name, value in how.items() if value is not None}
    best = nearest(own, Sampling(steps=how.get("steps")).steps)  # refused here if they are none
    other = any(name in how and how[name] != best.get(name, getattr(Sampling, name)) for name in KINDS)
    other = other or how.get("precision") == "naive-fp32"  # the published one, which knows no guidance
    chosen = Sampling(**({} if other else best) | how)
    if own and chosen.steps is None and chosen.order != "first-hitting" and not chosen.times():
        return dataclasses.replace(chosen, steps=STEPS)  # which is not the model's own number, and should be seen
    return chosen


def asked(how: Sampling, own: Own = ()) -> dict[str, Any]:
    """What one has to ask for to be answered so: all that is not plain, or not as a model with `own` settings would."""
    best, found = nearest(own, how.steps), {}
    for field in dataclasses.fields(Sampling):
        value = getattr(how, field.name)
        if value is not None and not field.default == best.get(field.name, field.default) == value:
            found[field.name] = value
    return found


def flags(how: Sampling, own: Own = ()) -> str:
    """The same, as a command takes them."""
    return " ".join(
        f"{_flag(name)} {value:g}" if isinstance(value, float) else f"{_flag(name)} {value}"
        for name, value in asked(how, own).items()
    )


def check_shape(temperature: float, top_k: int, top_p: float, guidance: float, cool: float | None) -> None:
    """Validate temperature, top-k, top-p and guidance."""
    if not 1e-6 <= temperature < float("inf"):
        raise ValueError(
            f"temperature must be above 0 and finite, and at least 1e-6; got {temperature} (for the most likely token "
            "alone, use top-k 1)"
        )
    if not 0 < top_p <= 1:
        raise ValueError(f"top-p must lie in (0, 1]; got {top_p} (1 keeps every token)")
    if top_k < 0:
        raise ValueError(f"top-k must be at least 1, or 0 to keep every token; got {top_k}")
    if not 0 <= guidance < float("inf"):
        raise ValueError(f"guidance must be finite and at least 0 (none); got {guidance}")
    if cool is not None and not 1e-6 <= cool < float("inf"):
        raise ValueError(f"the temperature to cool to must be at least 1e-6, and finite; got {cool}")


def check_eta(eta: float) -> None:
    if not 0 < eta <= 1:
        raise ValueError(f"the eta of a corrector lies in (0, 1]; got {eta}")


def _choices(hint: object) -> tuple[str, ...]:
    return tuple(choice for choice in get_args(hint) if isinstance(choice, str))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
