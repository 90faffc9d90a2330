"""The settings of the sampler as options of a command line: derived from the schema, one field for each setting."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import tyro

from cdlm.sample.samplers import ORDERS, SAMPLERS, Sampler, UnmaskingOrder
from cdlm.sample.settings import SPECS, TYPES, choices


def setting_options(name: str = "SettingOptions") -> type:
    """A dataclass with one option for each setting, None unless given."""
    fields = [(setting, _option(setting, several=False), None) for setting in SPECS]
    return dataclasses.make_dataclass(name, fields, frozen=True)


def setting_axes(hints: dict[str, str], name: str = "SettingAxes") -> type:
    """A dataclass with one option for each setting that takes several values, to sweep over.

    Settings with a hint are swept by default, over the values that it names: they are None unless given.
    """
    fields = [
        (setting, _option(setting, several=True, hint=hints.get(setting)), None if setting in hints else ())
        for setting in SPECS
    ]
    kind = dataclasses.make_dataclass(name, fields, frozen=True)
    kind.AXIS_HINTS = hints  # type: ignore[attr-defined]
    return kind


def current_options(kind: type) -> dict[str, Any]:
    """The annotations of the settings of a configuration that has them, with the choices that there are now: a file of
    the user's own may have added rows to the tables."""
    names = {field.name for field in dataclasses.fields(kind)}
    if not SPECS.keys() <= names:
        return {}
    hints: dict[str, str] | None = getattr(kind, "AXIS_HINTS", None)
    return {name: _option(name, hints is not None, (hints or {}).get(name)) for name in SPECS}


def given_settings(options: Any) -> dict[str, Any]:
    """The settings that were given."""
    return {name: getattr(options, name) for name in SPECS if getattr(options, name) is not None}


def setting_help(name: str) -> str:
    """The help of a setting, with what its choices do where a table says so."""
    tables: dict[str, Mapping[str, Sampler | UnmaskingOrder]] = {"sampler": SAMPLERS, "order": ORDERS}
    return " ".join([SPECS[name].help, *(f"{choice}: {row.about}." for choice, row in tables.get(name, {}).items())])


def default_text(name: str) -> str:
    """The default of a setting in words."""
    default = SPECS[name].default
    return "off" if default is None or default == 0 else f"{default}"


def by_model(name: str) -> str:
    """What a setting is unless given, where the model's generation config holds."""
    return f"generation config, else {default_text(name)}"


def _option(name: str, several: bool, hint: str | None = None) -> Any:
    kind: Any = tuple[TYPES[name], ...] if several else TYPES[name]
    metavar = "{" + ",".join(choices(name)) + "}" if choices(name) else TYPES[name].__name__.upper()
    default = f"(default: {hint or default_text(name)})" if several else f"(default: {by_model(name)})"
    if several:
        metavar = f"[{metavar} ...]"
    if hint or not several:
        kind = kind | None
    return Annotated[kind, tyro.conf.arg(help=setting_help(name), metavar=metavar, help_behavior_hint=default)]
