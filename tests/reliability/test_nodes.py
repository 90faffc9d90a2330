"""Several nodes: a process or a whole node goes away, torchrun starts again, and the run ends with the same bits.

Both nodes are this machine: two launchers that find each other over its loopback, gloo between the processes. What
needs NCCL, or a network that loses packets, is not tried here.
"""

import contextlib
import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cdlm.train import checkpoint, distributed
from cdlm.train.config import TrainConfig, to_json
from cdlm.train.loop import train

from .conftest import ROOT

WORKER = """
import os, pathlib, signal, time
from cdlm.__main__ import main
from cdlm.train import loop
real, mark = loop.train_step, pathlib.Path(os.environ["MARK"])
def fragile(state, batches, step):
    if step == 3 and not mark.exists():
        if os.environ["RANK"] == os.environ["DEAD"]:
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ["DEAD"] == "node":
            mark.with_name(f"here-{os.environ['RANK']}").touch()
            while not mark.exists():
                time.sleep(0.05)
    return real(state, batches, step)
loop.train_step = fragile
main()
"""


class Node:
    """A launcher with its workers: what a node is to the others."""

    def __init__(self, folder: Path, port: int, workers: int, dead: str, host: bool = False) -> None:
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", str(workers)]
        launch += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{port}", "--rdzv_id", "run"]
        launch += ["--rdzv_conf", f"is_host={int(host)},keep_alive_interval=1", "--local_addr", "localhost"]
        launch += ["--max-restarts", "2"]
        launch += [str(folder / "worker.py"), "train", str(folder / "run.json"), "--resume", "auto"]
        apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if dead == "node" else {}  # or a new launcher waits in vain
        about = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MARK": str(folder / "mark"), "DEAD": dead}
        self.process = subprocess.Popen(
            launch,
            cwd=ROOT,
            env={**os.environ, **about, **apart},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self) -> str:
        text, _ = self.process.communicate(timeout=150)
        assert self.process.returncode == 0, text
        return text

    def kill(self) -> None:
        """The launcher first, so that it starts nothing again, then its workers."""
        launcher = self.process.pid
        workers = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        for pid in (launcher, *map(int, workers)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@contextlib.contextmanager
def two_nodes(config: TrainConfig, folder: Path, workers: int, dead: str = "none") -> Iterator[tuple[list[Node], int]]:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(to_json(config)))
    (folder / "worker.py").write_text(WORKER)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    nodes = [Node(folder, port, workers, dead, host=number == 0) for number in range(2)]
    try:
        yield nodes, port
    finally:
        for node in nodes:
            if node.process.poll() is None:
                node.kill()


def tensors(path: Path | None) -> dict[str, torch.Tensor]:
    assert path is not None
    return {f"{part} {name}": t for part, found in checkpoint.read(path).tensors.items() for name, t in found.items()}


@pytest.mark.soak
@pytest.mark.parametrize(("dead", "workers"), [("0", 1), ("3", 2), ("node", 1)])
def test_a_run_over_two_nodes_survives(dead: str, workers: int, recipe, tmp_path: Path, tried) -> None:
    """The first process, the last one, or all of the second node with its launcher, which is then started again.

    Two processes end with the same bits. With more, the sums of their gradients are rounded in another order after a
    start, since torch lays out their buckets anew.
    """
    calm, hit = (recipe("mcdlm", parallel="ddp", out=tmp_path / name) for name in ("calm", "hit"))
    with two_nodes(calm, tmp_path / "a", workers) as (nodes, _):
        assert not any("resuming" in node.end() for node in nodes)
    with two_nodes(hit, tmp_path / "b", workers, dead) as (nodes, port):
        if dead == "node":
            deadline = time.monotonic() + 100
            while len(list((tmp_path / "b").glob("here-*"))) < 2 * workers:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            (tmp_path / "b" / "mark").touch()
            nodes[1].kill()
            nodes[1] = Node(tmp_path / "b", port, workers, dead)
        text = "".join(node.end() for node in nodes)
    assert "resuming after step 2" in text
    alone = tensors(train(recipe("mcdlm", out=tmp_path / "alone")))
    expected, found = (tensors(checkpoint.latest(config.out)) for config in (calm, hit))
    for name, tensor in expected.items():
        same = torch.equal(tensor, found[name]) if workers == 1 else torch.allclose(tensor, found[name], atol=1e-6)
        assert same, name
        assert torch.allclose(tensor, alone[name], atol=3e-5), name
    what = "all of one node killed and started again" if dead == "node" else f"process {dead} of {2 * workers} killed"
    end = "the same bits" if workers == 1 else "the same weights to 1e-6"
    tried(f"torchrun --nnodes 2 --max-restarts 2: {what}", 1, f"goes on from the last checkpoint; ends with {end}")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_processes_agree_on_a_part_of_a_store_that_outlives_them(size: int, monkeypatch, tried) -> None:
    """Three attempts; in the second the first process is gone before it has its answers, as it is when a node dies."""
    monkeypatch.setattr(distributed, "PATIENCE", datetime.timedelta(seconds=20))
    store, seen = dist.HashStore(), set()
    for attempt in range(3):
        if attempt == 1:
            store.set("call", "a call of one who is dead")
        parts: dict[int, dist.Store] = {}

        def join(rank: int, parts: dict[int, dist.Store] = parts) -> None:
            parts[rank] = distributed._own(store, rank, size)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in reversed(range(size))]
        for thread in threads:
            thread.start()
            time.sleep(0.02)  # the first process comes last, so that all others hear the old call
        for thread in threads:
            thread.join(30)
        assert set(parts) == set(range(size))
        assert not parts[0].check(["who"])  # nothing of an earlier attempt
        parts[0].set("who", str(attempt))
        assert {part.get("who").decode() for part in parts.values()} == {str(attempt)}
        seen |= {part.get("who").decode() for part in parts.values()}
    assert len(seen) == 3
    tried("a store that still holds the addresses of dead processes", 3, "the living find each other")
