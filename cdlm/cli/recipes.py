"""`cdlm recipes`: the named runs."""

import dataclasses

from rich.console import Console
from rich.table import Table

from cdlm.cli.common import console, parse
from cdlm.train.recipes import RECIPES


@dataclasses.dataclass(frozen=True)
class RecipesConfig:
    """List the named runs, what each reproduces and what it costs."""


def main(arguments: list[str]) -> None:
    parse(RecipesConfig, "recipes", arguments)
    show_recipes(console())


def show_recipes(console: Console) -> None:
    """Every recipe with what it reproduces, its command and its cost."""
    table = Table(title="Every setting can be changed: cdlm train RECIPE --help")
    for heading in ("recipe", "reproduces", "command", "steps x batch x length", "cost"):
        table.add_column(heading)
    for name, recipe in RECIPES.items():
        config = recipe.config
        size = f"{config.steps:,} x {config.batch_size} x {config.seq_length}"
        command = f"cdlm train {name} --data DIR" + (f" --init-from {config.init_from}" if config.init_from else "")
        table.add_row(name, recipe.reproduces, command, size, recipe.cost)
    console.print(table)
