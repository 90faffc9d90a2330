"""What commands share: arguments to a configuration, a console, recipes by name, and torch when it is needed."""

import dataclasses
import difflib
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import tyro
from rich.console import Console

from cdlm.cli.main import fail
from cdlm.text.options import current_options

if TYPE_CHECKING:
    from cdlm.train.config import TrainConfig

Config = TypeVar("Config")


_REGISTRY = tyro.constructors.ConstructorRegistry()


@_REGISTRY.primitive_rule
def _whole_number(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[int] | None:
    """Integers are read as usual; the message for anything else names the value."""

    def read(words: list[str]) -> int:
        try:
            return int(words[0])
        except ValueError:
            raise ValueError(f"it takes a whole number; got {words[0]!r}") from None

    if info.type is not int:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=read,
        is_instance=lambda x: type(x) is int,
        str_from_instance=lambda x: [str(x)],
    )


def parse(kind: type[Config], name: str, arguments: list[str], prog: str = "") -> Config:
    """The configuration that the arguments of a command describe; its attribute docstrings are the help.

    Errors begin with the name of the class: here that of the command.
    """
    prog = prog or f"cdlm {name}"
    options = current_options(kind) if dataclasses.is_dataclass(kind) else {}
    defaults = {name: getattr(kind, name) for name in options}
    body = {"__doc__": kind.__doc__, "__annotations__": options, **defaults}
    named: type[Config] = dataclasses.dataclass(frozen=True)(type(prog, (kind,), body))
    return tyro.cli(named, prog=prog, args=arguments, registry=_REGISTRY)


def console() -> Console:
    """The terminal as it is; wide enough for tables where the output goes elsewhere."""
    found = Console()
    return found if found.is_terminal else Console(width=160)


def prepare_torch() -> None:
    """Import torch, and set what every computation of the command line relies on."""
    import torch

    torch.set_flush_denormal(True)  # tiny probabilities make denormals, which slow a CPU down tenfold


def recipe(name: str) -> "TrainConfig":
    """A named run, or the settings in a run.json."""
    from cdlm.train.config import read_config
    from cdlm.train.recipes import RECIPES

    if name in RECIPES:
        return RECIPES[name].config
    if name.endswith(".json"):
        return read_config(Path(name))
    if (Path(name) / "run.json").is_file():
        fail(f"{name} is a run; start it again from its settings: cdlm train {name}/run.json")
    near = [known for known in RECIPES if known.startswith(name.lower())]
    near = near or difflib.get_close_matches(name.lower(), RECIPES, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else "see: cdlm recipes"
    return fail(f"there is no recipe {name!r}; {hint}")
