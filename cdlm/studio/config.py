"""The options of `cdlm studio`, checked without importing torch or the server."""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from cdlm import zoo
from cdlm.devices import Device, Dtype
from cdlm.hub import parse_models


@dataclasses.dataclass(frozen=True)
class StudioConfig:
    """Generate text in a browser, and over HTTP (/openapi.json describes the API)."""

    models: tyro.conf.Positional[tuple[str, ...]] = ()
    """Model directories, runs, bundled models, or hub ids; LABEL=MODEL gives one a name of its own. [all bundled
    models]"""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    host: str = "127.0.0.1"
    """Address to listen on: this machine only by default; 0.0.0.0 for all who can reach it (then set a token, too)."""
    token: str | None = None
    """Require this bearer token in every request; also read from the environment variable CDLM_TOKEN."""
    results: tuple[Path, ...] = ()
    """Directories written by `cdlm eval`, to plot."""
    max_concurrent: int = 4
    """Requests that are computed in turns."""
    max_queue: int = 16
    """Requests that may wait; further ones are refused."""
    max_steps: int = 1024
    """The most denoising steps of a request."""
    max_length: int = 1024
    """The most tokens in a sample."""
    max_samples: int = 8
    """The most samples of a request."""
    device: Device = "auto"
    """Where to compute."""
    dtype: Literal["auto", Dtype] = "auto"
    """Precision of the network: bfloat16 on a GPU and float32 elsewhere unless given."""
    tokenizer: Path | None = None
    """A tokenizer.json or a directory of GPT-2's files, for model directories that have none."""

    def __post_init__(self) -> None:
        for name in ("max_concurrent", "max_queue", "max_steps", "max_length", "max_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1 (got {getattr(self, name)}).")
        if not 0 <= self.port < 65_536:
            raise ValueError(f"--port must be between 0 and 65535 (got {self.port}).")
        self.sources()  # refuses two models of one name
        for directory in self.results:
            if not directory.exists():
                raise ValueError(
                    f"there is no directory {directory}; --results takes what cdlm eval --out has written."
                )

    def sources(self) -> list[tuple[str, str]]:
        """The label and the source of each model."""
        return parse_models(self.models or zoo.names())
