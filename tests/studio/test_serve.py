"""`cdlm studio` as a process: it says where it is, answers, drops the work of those who leave, and ends when asked."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdlm.studio.config import StudioConfig

from ..writers import BPE, write_model

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")


@contextlib.contextmanager
def studio(*flags: object, **env: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    words = [sys.executable, "-m", "cdlm", "studio", *map(str, flags), "--port", "0", "--device", "cpu"]
    given = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **env}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=given)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"open (http://\S+)", line)
        assert found, line + (process.stderr.read() if process.stderr and process.poll() is not None else "")
        yield found[1], process
    finally:
        process.kill()
        process.communicate()


def get(url: str, body: dict[str, Any] | None = None, **headers: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", **headers}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=20) as answer:
        return json.loads(answer.read())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("studio") / "model", "uniform", BPE, length=64)


def test_it_answers_and_ends(folder: Path) -> None:
    with studio(f"U={folder}") as (url, process):
        assert get(f"{url}health")["models"] == 1
        assert get(f"{url}v1/completions", {"steps": 2})["choices"][0]["text"]
        assert urllib.request.urlopen(url, timeout=5).read().startswith(b"<!doctype html>")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
        assert "Traceback" not in out + err


def test_the_work_of_those_who_leave_is_dropped(folder: Path) -> None:
    with studio(f"U={folder}", "--max-concurrent", 1) as (url, _):
        get(f"{url}health")
        host, port = re.findall(r"//([\d.]+):(\d+)", url)[0]
        body = json.dumps({"steps": 1024, "n": 8, "max_tokens": 64, "stream": True, "stream_drafts": True})
        with socket.create_connection((host, int(port)), timeout=10) as visitor:
            visitor.sendall(
                f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            seen = b""
            while b'"draft"' not in seen:
                seen += visitor.recv(4096)
            assert get(f"{url}health")["running"] == 1
        until = time.monotonic() + 8
        while get(f"{url}health")["running"] and time.monotonic() < until:
            time.sleep(0.1)
        assert get(f"{url}health")["running"] == 0


def test_a_job_is_cancelled_by_name(folder: Path) -> None:
    with studio(f"U={folder}") as (url, _):
        get(f"{url}health")
        asked = urllib.request.Request(
            f"{url}v1/completions",
            json.dumps({"steps": 1024, "n": 8, "max_tokens": 64, "stream": True, "stream_drafts": True}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=20) as answer:
            name = json.loads(answer.readline().removeprefix(b"data: "))["id"]
            urllib.request.urlopen(urllib.request.Request(f"{url}v1/jobs/{name}", method="DELETE"), timeout=10)
            rest = answer.read().decode()
        error = json.loads(rest.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
        assert (error["message"], error["code"]) == ("this request was cancelled.", "cancelled")
        assert rest.count('"draft"') < 8000


def test_a_token_from_the_environment(folder: Path) -> None:
    with studio(folder, CDLM_TOKEN="abc") as (url, _):
        assert url.endswith("?token=abc")
        plain = url.partition("?")[0]
        get(f"{plain}health")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(f"{plain}v1/models")
        assert get(f"{plain}v1/models", Authorization="Bearer abc")["data"][0]["id"] == "model"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["a/b", "c/b"], "two models are called b"),
        (["nowhere/at/all"], "does not exist"),
        (["x", "--port", "70000"], "--port must be between 0 and 65535 (got 70000)"),
        (["x", "--max-queue", "0"], "--max-queue must be at least 1 (got 0)"),
        (["x", "--results", "nowhere"], "there is no directory nowhere"),
    ],
)
def test_wrong_flags_are_explained(flags: list[str], message: str) -> None:
    words = [sys.executable, "-m", "cdlm", "studio", *flags]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = [sys.executable, "-m", "cdlm", "studio", str(folder), "--port", str(port), "--device", "cpu"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode != 0
    assert f"try --port {port + 1}" in done.stderr


def test_labels() -> None:
    config = StudioConfig(("A=runs/a", "runs/b"))
    assert config.sources() == [("A", "runs/a"), ("b", "runs/b")]
