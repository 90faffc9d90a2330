"""`cdlm studio`: open models and serve them, to this machine alone unless told otherwise."""

import ipaddress
import os
import socket

from rich.console import Console

from cdlm.studio.config import StudioConfig
from cdlm.text.pipeline import load

LOCAL = ("localhost", "127.0.0.1", "[::1]", "::1")
UNREAD = 1 << 18
"""Bytes that the system keeps for one who does not read; its own choice, megabytes, hides for long that nobody does."""


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
