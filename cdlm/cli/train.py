"""`cdlm train`: train a recipe, or the run.json of an earlier run."""

import dataclasses
import sys
from typing import Annotated

import tyro

from cdlm.cli.common import parse, prepare_torch, recipe
from cdlm.cli.main import fail
from cdlm.train.config import Resume, TrainConfig


def main(arguments: list[str]) -> None:
    if arguments[:1] in (["-h"], ["--help"]):
        print("usage: cdlm train RECIPE --data DIR [--resume auto] [any setting below]\n")
        print("Recipes begin with tiny- (a laptop, a minute), small- (one GPU), zoo-, or are the paper's: cdlm recipes")
        print("Each has the same settings with defaults of its own; these are those of tiny-mcdlm:\n")
        arguments = ["tiny-mcdlm", "--help"]
    if not arguments or arguments[0].startswith("-"):
        fail("train takes a recipe or a run.json first, such as: cdlm train tiny-mcdlm --data DIR; see cdlm recipes")
    default = recipe(arguments[0])

    @dataclasses.dataclass(frozen=True)
    class Train:
        """Train a model; nothing is lost if the machine dies: go on with --resume auto."""

        config: Annotated[TrainConfig, tyro.conf.arg(name="")] = default
        resume: Resume = "no"
        """auto continues the run in --out if there is one; force does so although its settings differ."""

    chosen = parse(Train, f"train {arguments[0]}", arguments[1:])
    prepare_torch()
    from cdlm.train.loop import Stopped, train

    try:
        train(chosen.config, chosen.resume)
    except Stopped as end:  # not a success: what follows in a script must not take the run for finished
        print(f"cdlm: {end}", file=sys.stderr)
        sys.exit(143)
