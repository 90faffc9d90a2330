"""Requests that nobody would write, made from the service's own description: none may break it."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..writers import BPE, write_model
from .test_serve import get, studio

pytest.importorskip("schemathesis")


def test_the_service_keeps_what_its_description_promises(tmp_path: Path) -> None:
    """No failure of the server, no answer that is not described, nothing accepted that the description forbids. (What
    it allows may be refused: settings that contradict each other are not part of it.)"""
    folders = [write_model(tmp_path / kind, kind, BPE, length=16) for kind in ("masked", "uniform", "causal")]
    tool = shutil.which("schemathesis", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert tool
    with studio(*folders, "--max-steps", 2, "--max-length", 32, "--max-samples", 2) as (url, process):
        get(f"{url}health")
        words = [tool, "run", f"{url}openapi.json", "--max-examples", "8", "--seed", "1", "--no-color"]
        words += ["--exclude-checks", "positive_data_acceptance"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=200, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-6000:]
        until = time.monotonic() + 10
        while get(f"{url}health")["running"] and time.monotonic() < until:
            time.sleep(0.1)
        assert get(f"{url}health")["running"] == 0
        assert process.poll() is None
