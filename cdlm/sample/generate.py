"""Every sampler behind one signature: `Sampling` says how, `generate` does it."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

from jaxtyping import Bool
from torch import Tensor

from cdlm.process.process import Process
from cdlm.rng import Rng
from cdlm.sample.ancestral import ancestral
from cdlm.sample.confidence import Confidence, confident
from cdlm.sample.correct import Corrector, Kind
from cdlm.sample.grid import NEAR_ZERO, Grid, Tail, cosine_grid, custom_grid, loop_grid, uniform_grid
from cdlm.sample.order import Order, first_hitting, ordered
from cdlm.sample.passes import Drawing, Posterior, Predictor, State, blank_law
from cdlm.sample.race import race
from cdlm.sample.shape import Shape
from cdlm.types import Tokens

STEPS, ETA, BOUND = 32, 0.05, 0.5
KINDS = ("order", "grid", "corrector")
"""Settings that make another sampler."""
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
    order: Literal[Order, "first-hitting", Confidence] = "random"
    """Which masks are revealed first. random is the exact ancestral sampler; first-hitting its limit of one token a
    step; dilated and bit-reversed keep the tokens of one step far apart; probability, margin and entropy-bound begin
    with what the network is most certain about (with entropy-bound, steps is the most it takes)."""
    bound: float | None = None
    """For entropy-bound: how many nats of entropy to reveal in one step; more is faster and coarser [0.5]."""
    tail: Tail = "none"
    """One more evaluation after the steps: sample as in the paper's protocol, argmax for the greedy tail. Under masking
    hardly anything is left for it."""
    corrector: Literal["none", Kind] = "none"
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
    precision: Literal["fp64", "fp32", "naive-fp32"] = "fp64"
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
        self.shape()
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
            Corrector(self.corrector, ETA if self.eta is None else self.eta)
            self._alone(f"--corrector {self.corrector}", "order", "precision")
        if self.corrector == "loop" and self.grid != "uniform":
            raise ValueError("--corrector loop brings its own grid; leave out --grid")
        self.spaced()
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

    def check(self, process: Process | None, posterior: Posterior = "plug-in") -> None:
        """Refuse what the process, or the posterior that the model calls for, cannot do."""
        if process is None:
            allowed = ("temperature", "top_k", "top_p", "precision")
            wrong = [name for name in asked(self) if name not in allowed]
            if wrong:
                raise ValueError(
                    f"an autoregressive model draws one token after another and has no {_flag(wrong[0])}; leave it out"
                )
        elif process.name != "masked" and self.order != "random":
            raise ValueError(
                f"--order {self.order} reveals masks, and this model has none (its process is {process.name}); "
                "use --order random"
            )
        elif process.name != "masked" and self.guidance:
            raise ValueError(
                f"--guidance compares with a blank text, and this model has no mask to write one (its process is "
                f"{process.name}); use --temperature"
            )
        elif process.name == "masked" and self.posterior != "auto":
            raise ValueError("under masking plug-in and mixture are the same: leave out --posterior")
        elif self.precision == "naive-fp32" and self.posterior == "auto" and posterior == "mixture":
            raise ValueError("--precision naive-fp32 races over the plug-in posterior: add --posterior plug-in")

    def shape(self, without: tuple[int, ...] = ()) -> Shape:
        return Shape(self.temperature, self.top_k, self.top_p, without, self.guidance, self.cool)

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
        custom_grid(times)
        return times

    def spaced(self, start: float = 1.0) -> Grid:
        """The grid, from `start` to 0 or, before a tail, to just above it."""
        end, steps, times = 0.0 if self.tail == "none" else NEAR_ZERO, self.steps or STEPS, self.times()
        if times:
            return custom_grid(times, start, end)
        if self.corrector == "loop":
            return loop_grid(steps, start, end)
        return (cosine_grid if self.grid == "cosine" else uniform_grid)(steps, start, end)


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


def generate(
    predict: Predictor,
    process: Process,
    x: Tokens,
    sampling: Sampling,
    rng: Rng,
    posterior: Posterior = "plug-in",
    start: float = 1.0,
    given: Bool[Tensor, "b l"] | None = None,
    compiled: bool = False,
    without: tuple[int, ...] = (),
    watched: bool = False,
) -> Iterator[State]:
    """Denoise x from time `start` on; yields the start, and the state after each evaluation.

    `given` positions keep their tokens (under masking, visible ones do anyway). `compiled` is for
    networks that `accelerate` has compiled. Tokens of `without` are never drawn. If `watched`, states tell how probable
    each token was (but for naive-fp32).
    """
    sampling.check(process, posterior)
    posterior = posterior if sampling.posterior == "auto" else sampling.posterior
    if sampling.precision == "naive-fp32":
        return race(
            predict,
            process,
            x,
            sampling.spaced(start),
            rng,
            "naive-fp32",
            sampling.shape(without),
            sampling.tail,
            given,
        )
    blank = blank_law(predict, process, x) if sampling.guidance else None
    drawing = Drawing(sampling.shape(without), posterior, sampling.precision, compiled, watched, blank)
    if sampling.order == "first-hitting":
        return first_hitting(predict, process, x, rng, start, drawing, given)
    grid = sampling.spaced(start)
    order = sampling.order
    if order == "probability" or order == "margin" or order == "entropy-bound":
        bound = BOUND if sampling.bound is None else sampling.bound
        return confident(predict, process, x, grid, rng, order, drawing, bound, given)
    if order != "random":
        return ordered(predict, process, x, grid, rng, order, drawing, sampling.tail, given)
    corrector = None
    if sampling.corrector != "none":
        corrector = Corrector(sampling.corrector, ETA if sampling.eta is None else sampling.eta)
    return ancestral(predict, process, x, grid, rng, drawing, sampling.tail, given, corrector)


def _choices(hint: object) -> tuple[str, ...]:
    return tuple(choice for choice in get_args(hint) if isinstance(choice, str))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
