"""Visitors who are slow or mean, at a real socket: they hold up nobody, see nothing, and reach nothing beside."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..writers import BPE, write_model
from .test_serve import get, studio

Process = subprocess.Popen[str]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Process]]:
    folder = write_model(tmp_path_factory.mktemp("slow") / "model", "uniform", BPE, length=64)
    with studio(f"U={folder}", "--max-concurrent", 2) as (url, process):
        get(f"{url}health")
        yield url, process


def visitor(url: str, sent: bytes, host: str | None = None, room: int = 0) -> socket.socket:
    """Someone who connects and sends these bytes, and no more."""
    found = re.findall(r"//([\d.]+):(\d+)", url)[0]
    line = socket.socket()
    if room:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    line.settimeout(10)
    try:
        line.connect((host or found[0], int(found[1])))
        line.sendall(sent)
    except OSError:
        line.close()
        raise
    return line


def request(body: dict[str, Any], length: int | None = None) -> bytes:
    text = json.dumps(body)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length or len(text)}\r\n\r\n{text}".encode()


def resident(process: Process) -> float:
    """MiB."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def idle(url: str) -> bool:
    until = time.monotonic() + 10
    while get(f"{url}health")["running"] and time.monotonic() < until:
        time.sleep(0.1)
    return get(f"{url}health")["running"] == 0


def test_who_sends_slowly_holds_up_nobody(service: tuple[str, Process]) -> None:
    """Half a head, half a body, each from fifty visitors who stay on the line."""
    url, _ = service
    halves = [b"POST /v1/completions HTTP/1.1\r\nHost: local", request({"steps": 2}, length=1000)]
    slow = [visitor(url, half) for half in halves for _ in range(50)]
    try:
        assert get(f"{url}health")["running"] == 0  # they have no turn before they have asked
        began = time.monotonic()
        assert get(f"{url}v1/completions", {"steps": 2})["choices"][0]["text"]
        assert time.monotonic() - began < 8
    finally:
        for line in slow:
            line.close()


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_who_does_not_read_holds_up_nobody(service: tuple[str, Process]) -> None:
    """Two take both places, read nothing, and lose them to the next; memory does not grow with what is unread."""
    url, process = service
    get(f"{url}v1/completions", {"steps": 256, "n": 4, "max_tokens": 64})
    before = resident(process)
    asked = request({"steps": 1024, "n": 4, "max_tokens": 64, "stream": True, "stream_drafts": True})
    deaf = [visitor(url, asked, room=4096) for _ in range(2)]
    try:
        began = time.monotonic()
        assert get(f"{url}v1/completions", {"steps": 2})["choices"][0]["text"]
        assert time.monotonic() - began < 15
        assert resident(process) < before + 100
    finally:
        for line in deaf:
            line.close()
    assert idle(url)  # their work went with them


@pytest.mark.parametrize("name", ["../model", "../../../../etc/passwd", "/etc/passwd", "U/../U", "U\0", "%2e%2e/model"])
def test_model_names_are_labels_and_never_paths(name: str, service: tuple[str, Process]) -> None:
    url, _ = service
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        get(f"{url}v1/completions", {"model": name, "steps": 2})
    assert json.load(caught.value)["error"]["message"] == f"there is no model {name!r}; there are: U"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a machine has one loopback address")
def test_it_listens_to_this_machine_alone_unless_told(service: tuple[str, Process]) -> None:
    """The whole of 127/8 is this machine; a socket that listened to everyone would answer at any of it."""
    url, _ = service
    assert url.startswith("http://127.0.0.1:")
    with pytest.raises(ConnectionRefusedError):
        visitor(url, b"", host="127.0.0.2")
