"""The settings of a request: completed and checked for a model, and what may still be changed about them."""

import contextlib
import re
from typing import Any

from cdlm.sample.samplers import SAMPLERS
from cdlm.sample.settings import SPECS, choices, describe_settings, sources
from cdlm.sample.settings import Settings as ResolvedSampler
from cdlm.studio.schema import Limits, ResolvedSettings, Settings
from cdlm.text.pipeline import Pipeline


def given_settings(request: Settings) -> dict[str, Any]:
    """The settings that a request gives. A temperature of 0 is top-k 1."""
    given = {name: getattr(request, name) for name in SPECS if getattr(request, name) is not None}
    if given.get("temperature") == 0:
        del given["temperature"]
        given["top_k"] = 1
    return given


def resolve_within(model: Pipeline, given: dict[str, Any], limits: Limits) -> ResolvedSampler:
    """The complete settings, with at most as many steps as the limits allow."""
    settings = model.resolve(given)
    if settings.steps is None or settings.steps <= limits.max_steps:
        return settings
    if "steps" in given or "timesteps" in given:
        raise RequestError(
            f"steps must be at most {limits.max_steps} (got {settings.steps}).",
            "steps" if "steps" in given else "timesteps",
        )
    return model.resolve({**given, "steps": limits.max_steps})


def form_settings(label: str, model: Pipeline, given: dict[str, Any], limits: Limits) -> ResolvedSettings:
    """What a form shows for these settings; settings that do not apply are left out, combinations without a sampler
    are a `ValueError`."""
    settings, used = _resolve_leniently(model, given, limits)
    row = SAMPLERS[settings.sampler]
    possible = {name: _possible_values(model, given, name, limits) for name in SPECS if choices(name)}
    applicable = _applicable(model)
    return ResolvedSettings(
        model=label,
        settings={name: getattr(settings, name) for name in SPECS if name == "sampler" or name in row.settings},
        summary=", ".join(describe_settings(settings)),
        sources=sources(settings, used, model.generation_config),
        ignored=[name for name in given if name not in used],
        available=[
            name
            for name in SPECS
            if name in applicable and (len(possible[name]) > 1 if name in possible else name in row.settings)
        ],
        choices=possible,
    )


class RequestError(ValueError):
    """What is wrong with a request, and with which of its fields."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def request_error(error: ValueError) -> RequestError:
    """An error of the library as one of a request: with fields instead of flags, and the one that it begins with."""
    if isinstance(error, RequestError):
        return error
    message = _message_in_fields(str(error))
    named = re.match(r"(?:no sampler takes )?--([a-z][a-z-]*)", str(error))
    param = named[1].replace("-", "_") if named else None
    return RequestError(message, "max_tokens" if param == "max_length" else param)


def _message_in_fields(message: str) -> str:
    """A message of the library with the fields of a request instead of flags."""
    message = re.sub(r" \(in Python [^)]*\)", "", message).replace("--max-length", "max_tokens")
    return re.sub(r"--([a-z][a-z-]*)", lambda flag: flag[1].replace("-", "_"), message)


def _resolve_leniently(
    model: Pipeline, given: dict[str, Any], limits: Limits
) -> tuple[ResolvedSampler, dict[str, Any]]:
    """The complete settings, and those of the given ones that apply: choices decide on the sampler, and numbers that it
    does not read are left out."""
    applicable = _applicable(model)
    used = {name: value for name, value in given.items() if name in applicable}
    with contextlib.suppress(ValueError):
        return resolve_within(model, used, limits), used
    row = SAMPLERS[model.resolve({name: value for name, value in used.items() if choices(name)}).sampler]
    used = {name: value for name, value in used.items() if choices(name) or name in row.settings}
    return resolve_within(model, used, limits), used


def _possible_values(model: Pipeline, given: dict[str, Any], name: str, limits: Limits) -> list[str]:
    """The values of a setting that some sampler takes together with the given ones."""
    if name not in _applicable(model):
        return []
    found = []
    for value in choices(name):
        with contextlib.suppress(ValueError):
            _resolve_leniently(model, {**given, name: value}, limits)
            found.append(value)
    return found


def _applicable(model: Pipeline) -> set[str]:
    """The settings that any sampler of a model reads, as far as its process has what they require."""
    process = model.denoiser.process
    read = {name for row in SAMPLERS.values() if row.fits(process) for name in row.settings}
    return {
        name
        for name, spec in SPECS.items()
        if name == "sampler"
        or (name in read and (process is None or not spec.requires or getattr(process, spec.requires)))
    }
