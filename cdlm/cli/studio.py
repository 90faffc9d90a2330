"""`cdlm studio`: models in a browser, and over HTTP."""

from cdlm.cli.common import console, parse, prepare_torch
from cdlm.studio.config import StudioConfig


def main(arguments: list[str]) -> None:
    config = parse(StudioConfig, "studio", arguments)
    prepare_torch()
    from cdlm.studio.serve import serve

    serve(config, console())
