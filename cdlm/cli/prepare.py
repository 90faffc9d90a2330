"""`cdlm prepare`: text in, a directory of tokens out."""

from cdlm.cli.common import console, parse
from cdlm.cli.main import fail
from cdlm.data.config import PrepareConfig


def main(arguments: list[str]) -> None:
    if not arguments:
        fail("prepare takes a text and a directory to write: cdlm prepare FILE... --out DIR")
    config = parse(PrepareConfig, "prepare", arguments)
    from cdlm.data.prepare import prepare

    prepare(config, console())
