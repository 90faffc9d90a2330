"""Load the models of `cdlm studio` and serve them, to this machine only unless configured otherwise."""

import ipaddress
import os
import socket

from rich.console import Console

from cdlm.studio.config import StudioConfig
from cdlm.text.pipeline import load

LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]", "::1")
SEND_BUFFER = 1 << 18
"""Bytes that the system buffers for a client; its default of megabytes would hide a client that reads nothing."""


def serve(config: StudioConfig, console: Console) -> None:
    """Load the models, then serve until interrupted."""
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
        with console.status(f"loading {source}"):
            models[label] = load(source, config.device, config.dtype, tokenizer=config.tokenizer)
    listener = _listener(config)
    token = config.token or os.environ.get("CDLM_TOKEN")
    hosts = LOCAL_HOSTS if _is_local(config.host) else ("*",)
    limits = Limits(max_steps=config.max_steps, max_length=config.max_length, max_samples=config.max_samples)
    app = create_app(models, config.results, limits, token, config.max_concurrent, config.max_queue, hosts)
    host, port = listener.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}/{f'?token={token}' if token else ''}"
    console.print(
        f"{', '.join(models)}: open {where} (stop with Ctrl-C)", highlight=False, markup=False, soft_wrap=True
    )
    if not _is_local(config.host) and not token:
        console.print("anyone who can reach this machine can use it; set --token to require a password", markup=False)
    options = uvicorn.Config(
        app, log_level="warning", timeout_keep_alive=10, limit_concurrency=500, server_header=False
    )
    uvicorn.Server(options).run(sockets=[listener])


def _listener(config: StudioConfig) -> socket.socket:
    """Bound before the address is printed, so that a client that opens it at once waits instead of being refused."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    try:
        listener.bind((config.host, config.port))
        listener.listen()
    except OSError as error:
        listener.close()
        other = f"; try --port {config.port + 1}" if "in use" in str(error) else ""
        raise ValueError(f"cannot listen on {config.host}, port {config.port}: {error.strerror}{other}") from None
    return listener


def _is_local(host: str) -> bool:
    """Whether only this machine can connect."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
