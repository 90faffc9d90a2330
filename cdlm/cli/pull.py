"""`cdlm pull`: download a model from the hub."""

import dataclasses
from pathlib import Path

import tyro

from cdlm.cli.common import parse
from cdlm.hub import check_id, pull


@dataclasses.dataclass(frozen=True)
class PullConfig:
    """Download a model from the hub into a directory."""

    source: tyro.conf.Positional[str]
    """The repository: owner/name."""
    out: tyro.conf.Positional[Path]
    """A directory that does not exist yet."""
    revision: str | None = None
    """A branch, tag or commit."""

    def __post_init__(self) -> None:
        check_id(self.source)
        if self.out.exists():
            raise ValueError(f"{self.out} exists; name another directory, or remove it first")


def main(arguments: list[str]) -> None:
    config = parse(PullConfig, "pull", arguments)
    print(f"wrote {pull(config.source, config.out, config.revision)}")
