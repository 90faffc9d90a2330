"""The settings of the sampler as options of a command line: derived from the schema, one field for each setting."""

import dataclasses
from typing import Annotated, Any

import tyro

from cdlm.sample.settings import SPECS, choices, setting_type


def setting_options(name: str = "SettingOptions") -> type:
    """A dataclass with one option for each setting, None unless given."""
    fields = [(setting, _option(setting, several=False), None) for setting in SPECS]
    return dataclasses.make_dataclass(name, fields, frozen=True)


def setting_axes(defaults: dict[str, tuple[Any, ...]], name: str = "SettingAxes") -> type:
    """A dataclass with one option for each setting that takes several values, to sweep over."""
    fields = [
        (setting, _option(setting, several=True, default=defaults.get(setting)), defaults.get(setting, ()))
        for setting in SPECS
    ]
    return dataclasses.make_dataclass(name, fields, frozen=True)


def given_settings(options: Any) -> dict[str, Any]:
    """The settings that were given."""
    return {name: getattr(options, name) for name in SPECS if getattr(options, name) is not None}


def _option(name: str, several: bool, default: tuple[Any, ...] | None = None) -> Any:
    spec, kind = SPECS[name], setting_type(name)
    kind = tuple[kind, ...] if several else kind | None
    metavar = "{" + ",".join(choices(name)) + "}" if choices(name) else None
    value = "off" if spec.default is None or spec.default == 0 else f"{spec.default}"
    value = " ".join(map(str, default)) if default else value
    hint = f"(default: {value})" if several else f"(default: the model's generation config, else {value})"
    if metavar is not None and several:
        metavar = f"[{metavar} ...]"
    return Annotated[kind, tyro.conf.arg(help=spec.help, metavar=metavar, help_behavior_hint=hint)]
