"""What `cdlm studio` is asked for: plain values, checked without importing torch or the server."""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from cdlm import zoo
from cdlm.devices import Device, Dtype
from cdlm.hub import labelled


@dataclasses.dataclass(frozen=True)
class StudioConfig:
    """Watch models write in a browser, and use them over HTTP (the API is described at /openapi.json)."""

    models: tyro.conf.Positional[tuple[str, ...]] = ()
    """Folders, runs, models that come with cdlm, or hub ids; LABEL=MODEL calls one by a name of its own. [all that come
    with cdlm]"""
    port: int = 8000
    """Where to listen."""
    host: str = "127.0.0.1"
    """Who may connect: this machine alone; 0.0.0.0 for everyone who can reach it (then give a token, too)."""
    token: str | None = None
    """Ask for it in every request; also from the environment, as CDLM_TOKEN."""
    results: tuple[Path, ...] = ()
    """Folders that `cdlm eval` has written, to plot."""
    at_once: int = 4
    """Texts that are written in turns."""
    queue: int = 16
    """Requests that may wait; the next one is refused."""
    max_steps: int = 1024
    """The most denoising steps of a request."""
    max_length: int = 1024
    """The most tokens of a text."""
    max_texts: int = 8
    """The most texts of a request."""
    device: Device = "auto"
    """Where to compute."""
    dtype: Literal["auto", Dtype] = "auto"
    """Precision of the network: bfloat16 on a GPU and float32 elsewhere unless told otherwise."""
    tokenizer: Path | None = None
    """A tokenizer.json or a folder of GPT-2's files, for model folders that have none."""

    def __post_init__(self) -> None:
        for name in ("at_once", "queue", "max_steps", "max_length", "max_texts"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1; got {getattr(self, name)}")
        if not 0 <= self.port < 65_536:
            raise ValueError(f"--port is a number from 0 to 65535; got {self.port}")
        self.sources()  # refuses two models of one name
        for folder in self.results:
            if not folder.exists():
                raise ValueError(f"there is no folder {folder}; --results takes what cdlm eval --out has written")

    def sources(self) -> list[tuple[str, str]]:
        return labelled(self.models or zoo.names())
