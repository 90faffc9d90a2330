"""The service under load: 200 visitors at once for a minute. It refuses fairly, stays flat, and stays awake."""

import asyncio
import collections
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ..studio.test_serve import get, studio
from ..writers import BPE, write_model

httpx = pytest.importorskip("httpx")
pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("default")]
PULSE = """
import json, sys, time, urllib.request
url, until, found = sys.argv[1], time.monotonic() + float(sys.argv[2]), []
while time.monotonic() < until:
    began = time.monotonic()
    health = json.loads(urllib.request.urlopen(url + "health", timeout=30).read())
    found.append((time.monotonic() - began, health["running"], health["queued"]))
    time.sleep(0.5)
print(json.dumps(found))
"""  # a process of its own: 200 visitors keep this one busy
VISITORS, SECONDS = 200, float(os.environ.get("CDLM_LOAD_SECONDS", "60"))


def resident(pid: int) -> float:
    """MiB."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


async def visit(
    client: Any, url: str, until: float, number: int, seen: collections.Counter, waits: list[float]
) -> None:
    """Ask, read, ask again; every third leaves in the middle of a stream. The refused come back when told to."""
    while time.monotonic() < until:
        stream = number % 3 == 0
        asked = {"model": "U", "steps": 32, "seed": number, "max_tokens": 64}
        asked |= {"stream": stream, "stream_drafts": stream}
        began = time.monotonic()
        try:
            if stream:
                async with client.stream("POST", f"{url}v1/completions", json=asked) as answer:
                    seen[answer.status_code] += 1
                    async for line in answer.aiter_lines():
                        if '"draft"' in line:
                            seen["left in the middle"] += 1
                            break
            else:
                answer = await client.post(f"{url}v1/completions", json=asked)
                seen[answer.status_code] += 1
                if answer.status_code == 200:
                    waits.append(time.monotonic() - began)
            if answer.status_code == 429:
                await asyncio.sleep(float(answer.headers["retry-after"]))
        except httpx.HTTPError as error:
            seen[type(error).__name__] += 1


async def crowd(url: str, pid: int) -> tuple[collections.Counter, list[float], list[float]]:
    seen, waits, sizes = collections.Counter(), [], []
    until = time.monotonic() + SECONDS
    limits = httpx.Limits(max_connections=VISITORS + 10)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        visitors = [asyncio.create_task(visit(client, url, until, k, seen, waits)) for k in range(VISITORS)]
        while time.monotonic() < until:
            sizes.append(resident(pid))
            await asyncio.sleep(1)
        await asyncio.gather(*visitors)
    return seen, waits, sizes


def test_two_hundred_visitors(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "uniform", BPE, length=64)
    with studio(f"U={folder}") as (url, process):
        get(f"{url}health")
        words = [sys.executable, "-c", PULSE, url, str(SECONDS)]
        pulse = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        seen, waits, sizes = asyncio.run(crowd(url, process.pid))
        awake, running, waiting = zip(*json.loads(pulse.communicate()[0]), strict=True)
        until = time.monotonic() + 15
        while get(f"{url}health")["running"] and time.monotonic() < until:
            time.sleep(0.2)
        assert get(f"{url}health")["running"] == 0  # the work of those who left is gone
        assert get(f"{url}health")["queued"] == 0
        assert process.poll() is None
    early, late = statistics.median(sizes[: len(sizes) // 3]), statistics.median(sizes[-len(sizes) // 3 :])
    found = {
        "answers": dict(seen),
        "texts a second": round(seen[200] / SECONDS, 1),
        "median wait (s)": round(statistics.median(waits), 2),
        "longest wait (s)": round(max(waits), 2),
        "health, slowest answer (s)": round(max(awake), 2),
        "memory (MiB), early and late": [round(early), round(late)],
    }
    print(json.dumps(found, indent=1))
    assert set(seen) <= {200, 429, "left in the middle"}
    assert seen[200] > SECONDS
    assert seen[429] > 0
    assert max(awake) < 1
    assert max(running) <= 4
    assert max(waiting) <= 16
    assert late < 1.2 * early + 20
