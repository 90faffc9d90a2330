"""`cdlm plot`: the curves of a run, or the schedules of a recipe."""

import dataclasses
from pathlib import Path

import tyro

from cdlm.cli.common import parse, recipe
from cdlm.cli.main import fail


@dataclasses.dataclass(frozen=True)
class PlotConfig:
    """Draw the curves of a run (loss, NELBO, entropy), or the schedules of a recipe (kappa, delta, lambda)."""

    what: tyro.conf.Positional[str]
    """A run directory, or the name of a recipe."""
    out: Path | None = None
    """The picture; RUN/curves.png or runs/schedules-RECIPE.png unless given."""


def main(arguments: list[str]) -> None:
    config = parse(PlotConfig, "plot", arguments)
    run = Path(config.what)
    if (run / "metrics.jsonl").is_file():
        from cdlm.train.plot import plot_run

        print(f"wrote {plot_run(run, config.out or run / 'curves.png')}")
    elif run.is_dir():
        known = (run / "run.json").is_file()
        why = "has no metrics yet: wait for its first --log-every steps" if known else "is not a run directory"
        fail(f"{run} {why}; or give the name of a recipe")
    else:
        settings, name = recipe(config.what), config.what.replace("/", "-")
        from cdlm.train.plot import plot_schedules

        print(f"wrote {plot_schedules(settings, name, config.out or Path(f'runs/schedules-{name}.png'))}")
