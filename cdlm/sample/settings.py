"""The settings of a sampler: one schema, from which everything that reads or shows settings is derived.

`Settings` names every setting with its default, range and help. `resolve` completes what a call gives with the model's
generation config and the defaults, and validates the result once. torch is not imported.
"""

import dataclasses
import difflib
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from cdlm.sample.samplers import ORDERS, SAMPLERS, Sampler

if TYPE_CHECKING:
    from cdlm.process.process import Posterior, Process

LOOP_STEPS = 4
"""The fewest steps of the corrector `loop`."""

GenerationConfig = Mapping[str, Any]
"""What a model's generation_config.json says: settings by name, and `step_presets`, a list of settings for different
numbers of steps (`cdlm/sample/generation_config.py`)."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is known of a setting besides its name and type."""

    default: Any
    help: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """An exclusive minimum."""
    choices: Collection[str] | None = None
    requires: str | None = None
    """The capability of the process, an attribute of `Process`, that any value but the default needs."""
    explicit: bool = False
    """Whether giving it at all, even its default, asks for a sampler that reads it."""
    hint: str = ""
    """Advice after an error."""


def setting(default: Any, text: str, **more: Any) -> Any:
    return dataclasses.field(metadata={"spec": Spec(default, text, **more)})


@dataclasses.dataclass(frozen=True)
class Settings:
    """The complete settings of one call, made by `resolve`."""

    sampler: str = setting("auto", "The sampler; auto is the first that takes all other settings.")
    steps: int | None = setting(
        32, "Denoising steps. Steps in which nothing is drawn are free.", minimum=1, maximum=1_000_000, explicit=True
    )
    timesteps: str = setting(
        "uniform", "Times of the steps: uniform, cosine (small steps first), or your own, such as 1,0.6,0.2,0."
    )
    order: str = setting("random", "Which masked positions are drawn first.", requires="absorbing")
    step_size: str = setting(
        "random",
        "Positions per step: a random number as in the forward process, or an equal number in each step.",
        choices=("random", "equal"),
        requires="absorbing",
    )
    final_step: str = setting(
        "none",
        "One more network evaluation after the last step: sample as in the paper's protocol, argmax for greedy rows.",
        choices=("none", "sample", "argmax"),
    )
    corrector: str = setting(
        "none",
        "Remask tokens between steps: constant (Psi sampler), or ReMDM's cap, rescale and loop.",
        choices=("none", "constant", "cap", "rescale", "loop"),
    )
    eta: float = setting(0.05, "Strength of the corrector.", above=0, maximum=1, explicit=True)
    entropy_bound: float = setting(
        0.5, "For --order entropy-bound: nats of entropy that one step may draw at once.", minimum=0, explicit=True
    )
    temperature: float = setting(
        1.0,
        "Below 1 sharpens the predicted distribution.",
        minimum=1e-6,
        maximum=1_000_000,
        hint="; for greedy decoding use top-k 1",
    )
    temperature_end: float | None = setting(
        None,
        "Temperature at the end, reached linearly in t; constant if not given.",
        minimum=1e-6,
        maximum=1_000_000,
    )
    guidance: float = setting(
        0.0,
        "Guidance relative to the unconditional prediction (fully masked input); 0 is off, and g equals a CFG scale of "
        "1 + g.",
        minimum=0,
        maximum=1_000_000,
        requires="has_mask",
    )
    guidance_end: float | None = setting(
        None,
        "Guidance at the end, reached linearly in t; constant if not given.",
        minimum=0,
        maximum=1_000_000,
        requires="has_mask",
    )
    top_k: int = setting(0, "Draw from the k most probable tokens only; 0 is off.", minimum=0)
    top_p: float = setting(1.0, "Draw from the smallest set of tokens with this probability.", above=0, maximum=1)
    frequency_penalty: float = setting(
        0.0,
        "Subtract this from a token's logit for each of its occurrences among the tokens sampled so far (OpenAI's "
        "frequency_penalty); 0 is off.",
        minimum=-2,
        maximum=2,
        requires="absorbing",
    )
    presence_penalty: float = setting(
        0.0,
        "Subtract this from the logit of every token that has been sampled so far (OpenAI's presence_penalty); 0 is "
        "off.",
        minimum=-2,
        maximum=2,
        requires="absorbing",
    )
    log_frequency_penalty: float = setting(
        0.0,
        "Subtract this times log(1 + count) from a token's logit after the temperature, with its count in the text so "
        "far, prompt included; 0 is off.",
        minimum=-1_000,
        maximum=1_000,
    )
    precision: str = setting(
        "fp64",
        "Precision of the draw. naive-fp32 is the published FP32 sampler, which sharpens samples.",
        choices=("fp64", "fp32", "naive-fp32"),
    )
    posterior: str = setting(
        "auto",
        "How the prediction enters the bridge; auto is what the model's method uses.",
        choices=("auto", "plug-in", "mixture"),
        explicit=True,
    )
    block_length: int = setting(
        0, "Generate beyond the model's length, this many tokens at a time; 0 is off.", minimum=0
    )


class SettingValues(TypedDict, total=False):
    """Some of the settings by name, as keyword arguments: what an editor completes and a type checker checks.

    The fields are those of `Settings`, which says what they mean; None is as good as not given.
    """

    sampler: str | None
    steps: int | None
    timesteps: str | None
    order: str | None
    step_size: Literal["random", "equal"] | None
    final_step: Literal["none", "sample", "argmax"] | None
    corrector: Literal["none", "constant", "cap", "rescale", "loop"] | None
    eta: float | None
    entropy_bound: float | None
    temperature: float | None
    temperature_end: float | None
    guidance: float | None
    guidance_end: float | None
    top_k: int | None
    top_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    log_frequency_penalty: float | None
    precision: Literal["fp64", "fp32", "naive-fp32"] | None
    posterior: Literal["auto", "plug-in", "mixture"] | None
    block_length: int | None


SPECS: dict[str, Spec] = {field.name: field.metadata["spec"] for field in dataclasses.fields(Settings)}
DEFAULTS: dict[str, Any] = {name: spec.default for name, spec in SPECS.items()}
TYPES: dict[str, type] = {"temperature_end": float, "guidance_end": float, "steps": int} | {
    field.name: field.type for field in dataclasses.fields(Settings) if isinstance(field.type, type)
}
SELECTING = ("sampler", "order", "step_size", "timesteps", "corrector")
"""Settings that make another sampler: a generation config does not apply to one that it was not chosen for."""


def choices(name: str) -> list[str]:
    """The values of a setting with a choice, read off the tables; empty for other settings."""
    if name == "sampler":
        return ["auto", *SAMPLERS]
    if name == "order":
        return list(dict.fromkeys(order for row in SAMPLERS.values() for order in row.choices.get("order", ())))
    return list(SPECS[name].choices or ())


def resolve(
    given: Mapping[str, Any] | None = None,
    process: "Process | Literal['any'] | None" = "any",
    posterior: "Posterior" = "plug-in",
    generation_config: GenerationConfig | None = None,
    joint_head: bool = False,
) -> Settings:
    """The settings of a call: what is given, else the generation config of the model, else the defaults.

    Without a `process` it is not checked whether they fit the model, which is autoregressive if the process is None.
    `posterior` is the one that the model's method uses, `joint_head` whether the model has one.
    Settings of another sampler than that of the generation config start from the defaults. An unknown name is a
    `TypeError`, a value or a combination that makes no sense a `ValueError`.
    """
    given = {name: value for name, value in (given or {}).items() if value is not None}
    for name, value in given.items():
        check_value(name, value)
    preset = preset_for(given, generation_config)
    values = {**DEFAULTS, **preset, **given}
    times = custom_timesteps(values["timesteps"])
    if times:
        if "steps" in given and given["steps"] != len(times) - 1:
            raise ValueError(f"--timesteps {values['timesteps']} has {len(times) - 1} steps; leave out --steps.")
        values["steps"] = len(times) - 1
        given = {**given, "steps": len(times) - 1}
    _check_capabilities(values, process)
    values["posterior"] = posterior if values["posterior"] == "auto" else values["posterior"]
    if values["sampler"] != "auto":  # settings that it restricts take the first of its values
        for name, accepted in SAMPLERS[values["sampler"]].choices.items():
            if name not in given and name != "posterior" and values[name] not in accepted:
                values[name] = next(iter(accepted))
    values["sampler"] = _choose_sampler(values, given, process, joint_head)
    if "steps" not in SAMPLERS[values["sampler"]].settings:
        values["steps"] = None
    _check_steps(values)
    return Settings(**values)


def check_value(name: str, value: Any) -> None:
    """Refuse an unknown setting, and a value of a wrong type or outside the range."""
    if name not in SPECS:
        near = difflib.get_close_matches(name, SPECS, n=1)
        advice = f"did you mean {near[0]}?" if near else f"choose from {', '.join(SPECS)}"
        raise TypeError(f"unknown setting {name!r}; {advice}")
    spec, kind = SPECS[name], TYPES[name]
    if options := choices(name):
        if value not in options:
            raise ValueError(f"{flag(name)} must be one of {', '.join(options)} (got {value!r}).")
        return
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(f"{flag(name)} must be a string (got {value!r}).")
        return
    allowed = (int,) if kind is int else (int, float)
    infinite = isinstance(value, float) and not math.isfinite(value)  # an int may be too large to be converted
    if isinstance(value, bool) or not isinstance(value, allowed) or infinite:
        raise ValueError(f"{flag(name)} must be {'an integer' if kind is int else 'a finite number'} (got {value!r}).")
    low = spec.minimum if spec.above is None else spec.above
    outside = (low is not None and (value < low or value == spec.above)) or (
        spec.maximum is not None and value > spec.maximum
    )
    if outside:
        raise ValueError(f"{flag(name)} must be {_range(spec)} (got {value}){spec.hint}.")


def preset_for(given: Mapping[str, Any], generation_config: GenerationConfig | None) -> dict[str, Any]:
    """What the generation config says for this call: the preset for the closest number of steps, or the top level.

    Nothing if the call asks for another sampler, since settings found for one say little about another.
    """
    preset = _closest_preset(given.get("steps"), generation_config)
    merged = {**DEFAULTS, **preset}
    if given.get("precision") == "naive-fp32" or any(
        given.get(name, merged[name]) != merged[name] for name in SELECTING
    ):
        return {}
    return preset


def _closest_preset(steps: int | None, generation_config: GenerationConfig | None) -> dict[str, Any]:
    config = generation_config or {}
    presets = config.get("step_presets") or []
    if steps is None or not presets:
        return {name: value for name, value in config.items() if name in SPECS}
    return dict(min(presets, key=lambda preset: abs(math.log(preset["steps"] / steps))))


def custom_timesteps(timesteps: str) -> list[float]:
    """The times of `--timesteps 1,0.6,0.2,0`; empty for uniform and cosine ones."""
    if timesteps in ("uniform", "cosine"):
        return []
    try:
        times = [float(part) for part in timesteps.split(",")]
    except ValueError:
        times = []
    falling = all(t > s for t, s in itertools.pairwise(times))
    if len(times) < 2 or times[0] != 1 or times[-1] != 0 or not falling:
        raise ValueError(
            f"--timesteps must be uniform, cosine, or times that fall from 1 to 0, such as 1,0.6,0.2,0 "
            f"(got {timesteps!r})."
        )
    return times


def explicit(
    settings: Settings, generation_config: GenerationConfig | None = None, posterior: "Posterior" = "plug-in"
) -> dict[str, Any]:
    """The settings that a call has to give to be resolved to these again; `posterior` is that of the model's method."""
    row = SAMPLERS[settings.sampler]
    usual = {**DEFAULTS, "posterior": posterior}
    preset = _closest_preset(settings.steps, generation_config)
    found = {}
    for name in (name for name in SPECS if name in row.settings):
        value = getattr(settings, name)
        if value is not None and (name == "steps" or not value == usual[name] == preset.get(name, usual[name])):
            found[name] = value
    process: Literal["any"] | None = None if row.process == "none" else "any"
    if resolve(found, process, posterior, generation_config).sampler != settings.sampler:
        return {"sampler": settings.sampler, **found}
    return found


def sources(
    settings: Settings, given: Mapping[str, Any], generation_config: GenerationConfig | None = None
) -> dict[str, str]:
    """Where each setting that the sampler reads comes from: given, the generation config, or the default."""
    preset = preset_for({name: value for name, value in given.items() if value is not None}, generation_config)
    found = {
        name: "given" if given.get(name) is not None else "generation config" if name in preset else "default"
        for name in ("sampler", *SAMPLERS[settings.sampler].settings)
    }
    if custom_timesteps(settings.timesteps):  # they say how many steps there are
        found["steps"] = found["timesteps"]
    return found


def setting_type(name: str) -> Any:
    """The type of a setting for the command line and the HTTP API: a `Literal` where there is a choice."""
    options = choices(name)
    return Literal[tuple(options)] if options else TYPES[name]


def flags(values: Mapping[str, Any]) -> str:
    """Settings as the command line takes them."""
    return " ".join(
        f"{flag(name)} {value:g}" if isinstance(value, float) else f"{flag(name)} {value}"
        for name, value in values.items()
    )


def describe_settings(settings: Settings) -> list[str]:
    """Settings in words: the steps, the precision, and whatever is not the default."""
    return list(_words(settings))


def implied_sampler(settings: Settings) -> str:
    """The sampler that `auto` chooses for these settings, on the process that theirs is for."""
    if settings.sampler not in SAMPLERS:  # of a result whose sampler is in a file of its own, which is not loaded
        return "auto"
    values, row = dataclasses.asdict(settings), SAMPLERS[settings.sampler]
    given = {name: values[name] for name in ("steps",) if name in row.settings}
    for name, other in SAMPLERS.items():
        if other.joint_head:  # always named, since the process does not tell whether a model has one
            continue
        comparable = other.process == row.process or (other.process == "any" and row.process != "none")
        if name == settings.sampler or (comparable and not _unread(other, values, given)):
            return name
    return settings.sampler


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _words(settings: Settings) -> Iterator[str]:
    if settings.steps:
        yield f"{settings.steps} steps"
    yield settings.precision
    if settings.sampler != implied_sampler(settings):
        yield f"sampler {settings.sampler}"
    for name, value in dataclasses.asdict(settings).items():
        if name not in ("sampler", "steps", "precision", "posterior") and value != DEFAULTS[name]:
            yield f"{name.replace('_', '-')} {value}"


def _range(spec: Spec) -> str:
    if spec.above is not None:
        return f"above {spec.above:g}" + (f" and at most {spec.maximum:,}" if spec.maximum is not None else "")
    if spec.maximum is not None:
        return f"between {spec.minimum:g} and {spec.maximum:,}"
    return f"at least {spec.minimum:g}"


def _check_capabilities(values: Mapping[str, Any], process: "Process | Literal['any'] | None") -> None:
    """Refuse what the noise process cannot do."""
    if process is None or process == "any":
        return
    for name, spec in SPECS.items():
        if spec.requires and values[name] != spec.default and not getattr(process, spec.requires):
            needs = "a mask token" if spec.requires == "has_mask" else "a masked process"
            raise ValueError(
                f"{flag(name)} {values[name]} needs {needs}, and the process of this model is {process.name}; "
                f"leave out {flag(name)}."
            )
    if process.absorbing and values["posterior"] != "auto":
        raise ValueError("--posterior has no effect on a masked process, where both are the same; leave it out.")


def _choose_sampler(
    values: Mapping[str, Any], given: Mapping[str, Any], process: "Process | Literal['any'] | None", joint_head: bool
) -> str:
    """The sampler that is named, or else the first that takes all settings."""
    named = values["sampler"] != "auto"
    rows = {values["sampler"]: SAMPLERS[values["sampler"]]} if named else SAMPLERS
    unread = {name: _unread(row, values, given) for name, row in rows.items()}
    if process == "any":  # the model is not known: a joint head only if its sampler is named
        fitting = [name for name, row in rows.items() if named or not row.joint_head]
    else:
        fitting = [name for name, row in rows.items() if row.fits(process, joint_head)]
    for name in fitting:
        if not unread[name]:
            return name
    asked = [name for name in (*SELECTING, "precision") if values[name] != DEFAULTS[name]]
    if not fitting and named and SAMPLERS[values["sampler"]].joint_head and not joint_head:
        raise ValueError(f"--sampler {values['sampler']} needs a model with a joint head, and this one has none.")
    if not fitting:
        kind = "is autoregressive" if process is None or process == "any" else f"has the process {process.name}"
        raise ValueError(f"{_written(values, asked)} does not fit this model, which {kind}; leave it out.")
    best = min(fitting, key=lambda name: len(unread[name]))
    takers = [name for name in fitting if not set(unread[best]) & set(unread[name])]
    if not takers:
        raise ValueError(f"{_written(values, unread[best][:1])} does not apply to the {best} sampler; leave it out.")
    other = min(takers, key=lambda name: len(unread[name]))
    raise ValueError(
        f"no sampler takes {_written(values, unread[other])} together with {_written(values, unread[best])}; "
        "leave out one of them."
    )


def _unread(row: Sampler, values: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Settings that a sampler would ignore, or whose values it does not take."""
    ignored = [
        name
        for name, spec in SPECS.items()
        if name not in ("sampler", *row.settings)
        and ((values[name] != spec.default and name != "posterior") or (spec.explicit and name in given))
    ]
    return ignored + [name for name, accepted in row.choices.items() if values[name] not in accepted]


def _written(values: Mapping[str, Any], names: Collection[str]) -> str:
    return " ".join(f"{flag(name)} {values[name]}" for name in names)


def _check_steps(values: Mapping[str, Any]) -> None:
    """Combinations of settings that concern the number and the times of the steps."""
    if values["corrector"] == "loop":
        if values["timesteps"] != "uniform":
            raise ValueError("--corrector loop has timesteps of its own; leave out --timesteps.")
        if values["steps"] < LOOP_STEPS:
            raise ValueError(f"--corrector loop needs at least {LOOP_STEPS} steps (got {values['steps']}).")
    order = ORDERS.get(values["order"])
    if order is not None and order.uniform_timesteps and values["timesteps"] != "uniform":
        raise ValueError(f"--order {values['order']} needs uniform timesteps; leave out --timesteps.")
