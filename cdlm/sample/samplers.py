"""The tables of samplers and of unmasking orders. A new one is a function plus a row.

A sampler has the signature

    sampler(predict, process, x, settings, rng, *, given, start, draw) -> Iterator[State]

and yields the initial state and the state after each step. `predict` is f(x_t, t), `x` the tokens at time `start`,
`settings` the resolved `Settings`, `rng` the noise; positions where `given` is true keep their tokens, and `draw` turns
logits into tokens as the settings say.

An order is a function `order(is_mask, steps, rng)` that gives every masked position a level in (0, 1); positions with
high levels are unmasked first (`process/order.py`).

Validation, flags and help of the command line, sweep axes, the form of the studio and the documentation are derived
from these tables and from `Settings`. Functions of the package are named as "module:function", so that reading the
tables imports no torch; a row may also hold the function itself.
"""

import dataclasses
import pkgutil
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from cdlm.process.process import Process

STEPS = ("steps", "timesteps", "block_length")
PENALTIES = ("frequency_penalty", "presence_penalty", "log_frequency_penalty")
SHAPING = ("temperature", "temperature_end", "top_k", "top_p", *PENALTIES, "guidance", "guidance_end")


def load_function(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function that a row names."""
    found: Callable[..., Any] = pkgutil.resolve_name(function) if isinstance(function, str) else function
    return found


@dataclasses.dataclass(frozen=True)
class UnmaskingOrder:
    """A row of `ORDERS`: an order that is fixed before the network runs."""

    levels: str | Callable[..., Any]
    """`levels(is_mask, steps, rng)`: a level in (0, 1) for every position."""
    about: str
    uniform_timesteps: bool = False
    """Whether its steps must be equally long."""


ORDERS: dict[str, UnmaskingOrder] = {
    "random": UnmaskingOrder("cdlm.process.order:random_order", "independent of the text: the exact ancestral sampler"),
    "dilated": UnmaskingOrder(
        "cdlm.process.order:dilated_order", "the tokens of one step lie far apart", uniform_timesteps=True
    ),
    "bit-reversed": UnmaskingOrder("cdlm.process.order:bit_reversed_order", "from coarse to fine, each step halfway"),
    "grid": UnmaskingOrder(
        "cdlm.process.order:grid_order",
        "for Sudoku and other square grids: the cells of one step lie in different rows, columns and boxes",
    ),
}


@dataclasses.dataclass(frozen=True)
class Sampler:
    """A row of `SAMPLERS`: the function, what it is for, and the settings that it reads."""

    function: str | Callable[..., Any]
    about: str
    process: Literal["any", "masked", "none"]
    """What it is defined on: every process, absorbing ones, or autoregressive models, which have none."""
    settings: tuple[str, ...]
    """The fields of `Settings` that it reads."""
    choices: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict)
    """Settings of which it takes some values only."""
    joint_head: bool = False
    """Whether it draws by a joint head, which the model must have."""
    keeps_tokens: bool = False
    """Whether a token of a masked model stays once it is drawn: then a text can be streamed before it is finished."""

    def fits(self, process: "Process | None", joint_head: bool = False) -> bool:
        """Whether it is defined for models of this process, with or without a joint head."""
        if self.joint_head and not joint_head:
            return False
        if process is None or self.process == "none":
            return process is None and self.process == "none"
        return process.absorbing or self.process == "any"

    def takes(self, name: str, value: object) -> bool:
        """Whether it reads a setting, and takes this value of it."""
        return name in self.settings and (name not in self.choices or value in self.choices[name])


SAMPLERS: dict[str, Sampler] = {
    "joint": Sampler(
        "cdlm.sample.joint:joint",
        "draws the tokens of a step one after the other, by the joint head of the model",
        "masked",
        (*STEPS, *SHAPING, "order", "step_size", "final_step", "precision"),
        {"order": ORDERS, "precision": ("fp64", "fp32")},
        joint_head=True,
        keeps_tokens=True,
    ),
    "ancestral": Sampler(
        "cdlm.sample.ancestral:ancestral",
        "the exact posterior bridge, iterated; the network runs only where a token is drawn",
        "any",
        (*STEPS, *SHAPING, "order", "step_size", "final_step", "precision", "posterior"),
        {"order": ORDERS, "precision": ("fp64", "fp32")},
        keeps_tokens=True,
    ),
    "corrector": Sampler(
        "cdlm.sample.ancestral:ancestral_with_corrector",
        "ancestral steps that also remask tokens (Psi samplers, ReMDM)",
        "any",
        (*STEPS, *SHAPING, "corrector", "eta", "final_step", "precision", "posterior"),
        {"corrector": ("constant", "cap", "rescale", "loop"), "precision": ("fp64", "fp32")},
    ),
    "first-hitting": Sampler(
        "cdlm.sample.order:first_hitting",
        "one token per network evaluation, each at its exact time",
        "masked",
        ("block_length", *SHAPING, "order", "precision"),
        {"order": ("first-hitting",), "precision": ("fp64", "fp32")},
        keeps_tokens=True,
    ),
    "confidence": Sampler(
        "cdlm.sample.confidence:confidence",
        "unmasks first what the network is most certain about",
        "masked",
        (*STEPS, *SHAPING, "order", "precision"),
        {"order": ("probability", "margin"), "precision": ("fp64", "fp32")},
        keeps_tokens=True,
    ),
    "entropy-bound": Sampler(
        "cdlm.sample.confidence:entropy_bound",
        "lowest entropies first, as many at once as a bound allows; --steps is the maximum",
        "masked",
        (*STEPS, *SHAPING, "order", "entropy_bound", "precision"),
        {"order": ("entropy-bound",), "precision": ("fp64", "fp32")},
        keeps_tokens=True,
    ),
    "naive": Sampler(
        "cdlm.sample.naive:naive_ancestral",
        "the published sampler with its Gumbel race in single precision, for comparison with FP32 tables",
        "any",
        (*STEPS, "temperature", "top_k", "top_p", "final_step", "precision", "posterior"),
        {"precision": ("naive-fp32",), "posterior": ("plug-in",)},
        keeps_tokens=True,
    ),
    "plain": Sampler(
        "cdlm.sample.ancestral:plain_ancestral",
        "ancestral sampling exactly as it is defined: the reference of the tests",
        "any",
        (*STEPS, *SHAPING, "posterior"),
        keeps_tokens=True,
    ),
    "autoregressive": Sampler(
        "cdlm.sample.autoregressive:autoregressive",
        "one token after the other, with a key-value cache",
        "none",
        ("temperature", "top_k", "top_p", *PENALTIES, "precision"),
    ),
}
"""The first sampler that takes all settings of a call carries it out, unless `sampler` names one."""
