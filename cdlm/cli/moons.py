"""`cdlm moons`: methods on two moons, against exact laws."""

from cdlm.cli.common import console, parse, prepare_torch
from cdlm.eval.config import MoonsConfig


def main(arguments: list[str]) -> None:
    config = parse(MoonsConfig, "moons", arguments)
    prepare_torch()
    from cdlm.eval.moons import run_moons

    run_moons(config, console())
