"""`cdlm eval`: measure models over a grid of settings."""

from cdlm.cli.common import console, parse, prepare_torch
from cdlm.eval.config import EvalConfig


def main(arguments: list[str]) -> None:
    config = parse(EvalConfig, "eval", arguments)
    prepare_torch()
    from cdlm.eval.sweep import evaluate

    evaluate(config, console())
