"""`cdlm studio`: open models and serve them, to this machine alone unless told otherwise."""

import dataclasses
import ipaddress
import os
import socket
from pathlib import Path
from typing import Literal

from rich.console import Console

from cdlm import zoo
from cdlm.devices import Device, Dtype
from cdlm.fetch import labelled
from cdlm.text import load

LOCAL = ("localhost", "127.0.0.1", "[::1]", "::1")
UNREAD = 1 << 18
"""Bytes that the system keeps for one who does not read; its own choice, megabytes, hides for long that nobody does."""


@dataclasses.dataclass(frozen=True)
class StudioConfig:
    """Watch models write in a browser, and use them over HTTP (the API is described at /openapi.json)."""

    models: tuple[str, ...] = ()
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


def serve(config: StudioConfig, console: Console) -> None:
    """Open the models, then answer until interrupted."""
    try:
        import uvicorn

        from cdlm.studio.app import create_app
        from cdlm.studio.schema import Limits
    except ImportError as error:
        raise ValueError(
            f'the studio needs {error.name}; run in the checkout: pip install -c constraints.txt -e ".[studio]"'
        ) from None
    models = {}
    for label, source in config.sources():
        with console.status(f"opening {source}"):
            models[label] = load(source, config.device, config.dtype, tokenizer=config.tokenizer)
    listener = _listener(config)
    token = config.token or os.environ.get("CDLM_TOKEN")
    hosts = LOCAL if _private(config.host) else ("*",)
    limits = Limits(steps=config.max_steps, length=config.max_length, n=config.max_texts)
    app = create_app(models, config.results, limits, token, config.at_once, config.queue, hosts)
    host, port = listener.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}/{f'?token={token}' if token else ''}"
    console.print(
        f"{', '.join(models)}: open {where} (stop with Ctrl-C)", highlight=False, markup=False, soft_wrap=True
    )
    if not _private(config.host) and not token:
        console.print("everyone who can reach this machine can use it: --token asks for a password", markup=False)
    quiet = uvicorn.Config(app, log_level="warning", timeout_keep_alive=10, limit_concurrency=500, server_header=False)
    server = uvicorn.Server(quiet)
    server.run(sockets=[listener])


def _listener(config: StudioConfig) -> socket.socket:
    """Taken before anything is printed, so that the address in the message is the one, and whoever opens it at once
    waits instead of being refused."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)
    try:
        found.bind((config.host, config.port))
        found.listen()
    except OSError as error:
        found.close()
        other = f"; try --port {config.port + 1}" if "in use" in str(error) else ""
        raise ValueError(f"cannot listen on {config.host}, port {config.port}: {error.strerror}{other}") from None
    return found


def _private(host: str) -> bool:
    """Whether only this machine can connect."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
