"""Numbers that go wrong and processes that go away: the run stops, says where, and saves nothing over what was good."""

import dataclasses
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cdlm.train import checkpoint, distributed, loop
from cdlm.train.config import TrainConfig, to_json
from cdlm.train.log import read_metrics
from cdlm.train.loop import train
from cdlm.train.step import Learner

from .conftest import ROOT, Child, Ended, command

PLACES = (
    *("online weights", "target weights", "EMA weights", "optimizer"),
    *("online activations", "target activations", "gradient"),
)


def poison(state: Learner, where: str, value: float) -> None:
    """Put a number that is none into one place of the networks."""
    network = {"online": state.denoiser, "target": state.target, "EMA": state.ema}.get(where.split()[0])
    first = next(state.denoiser.parameters())
    if where.endswith("weights"):
        next(network.parameters()).data.flatten()[3] = value
    elif where.endswith("activations"):
        network.backbone.blocks[0].register_forward_hook(lambda module, inputs, output: output * value)
    elif where == "gradient":
        first.register_hook(lambda gradient: gradient + value)
    else:
        state.optimizers[0].state[first]["exp_avg_sq"].flatten()[3] = value


def assert_finite(run: Path, steps: list[int]) -> None:
    assert [step for step, _ in checkpoint.listed(run)] == steps
    for _, path in checkpoint.listed(run):
        for part in checkpoint.read(path).tensors.values():
            assert all(bool(tensor.isfinite().all()) for tensor in part.values()), path


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", PLACES)
def test_numbers_that_are_none_stop_the_run(where: str, value: float, recipe, monkeypatch, tried) -> None:
    """Poisoned before step 5; the checkpoint of step 4 stays the last, and every saved number is one."""
    real = loop.train_step

    def poisoned(state: Learner, batches, step: int):
        if step == 4:
            poison(state, where, value)
        return real(state, batches, step)

    monkeypatch.setattr(loop, "train_step", poisoned)
    config = recipe("mcdlm", steps=12, reference_steps=12)  # so that averages remember
    with pytest.raises(FloatingPointError, match=r"not a finite number") as caught:
        train(config)
    said = str(caught.value)
    assert "at step 5: " in said or "after step 6: " in said  # seen in the loss, or in the weights before saving
    terms = ("loss", "consistency", "anchor", "grad_norm", "EMA", "optimizer", "online", "target")
    assert any(term in said for term in terms)
    assert "last good checkpoint is" in said
    assert "step-00000004" in said
    assert_finite(config.out, [2, 4])
    tried(f"{value} in the {where}", 1, "the run stops; step, term and last good checkpoint are named")


@pytest.mark.parametrize("name", ["mdlm", "mcdlm", "ar"])
def test_overflow_is_not_saved(name: str, recipe, tried) -> None:
    """A step so large that loss and gradient are still finite, and the weights no longer."""
    config = recipe(name, learning_rate=1e29, save_every=1, warmup_ratio=0.5, steps=8)
    with pytest.raises(FloatingPointError, match=r"not a finite number (at|after) step .*try a lower --learning-rate"):
        train(config)
    assert_finite(config.out, [step for step, _ in checkpoint.listed(config.out)])
    tried(f"overflow of the weights ({name})", 1, "the run stops before it saves them")


@pytest.mark.soak
def test_overflow_in_bfloat16_is_not_saved(recipe, tmp_path: Path, tried) -> None:
    """In a process of its own, without the tile registers, which some virtual machines announce and do not have."""
    config = recipe("mcdlm", learning_rate=1e29, save_every=1, warmup_ratio=0.5, steps=8, dtype="bfloat16")
    (tmp_path / "run.json").write_text(json.dumps(to_json(config)))
    done = subprocess.run(
        [sys.executable, "-m", "cdlm", "train", str(tmp_path / "run.json")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1, done.stderr
    assert re.match(r"cdlm: not a finite number (at|after) step .*try a lower --learning-rate", done.stderr), (
        done.stderr
    )
    assert_finite(config.out, [step for step, _ in checkpoint.listed(config.out)])
    tried("overflow of the weights (bfloat16)", 1, "the run stops before it saves them")


def test_collapse_raises_the_alarm(recipe, monkeypatch, capsys, tried) -> None:
    real = loop.train_step

    def collapsing(state: Learner, batches, step: int):
        found = real(state, batches, step)
        state.ema.backbone.output_layer.linear.bias.data[97] = 1e4
        return found

    monkeypatch.setattr(loop, "train_step", collapsing)
    config = recipe("mdlm", valid_samples=2, valid_sample_steps=4, steps=4, valid_every=2)
    train(config)
    assert capsys.readouterr().out.count("WARNING: mode collapse") == 2
    assert [line["alarm"] for line in read_metrics(config.out) if line["kind"] == "valid"] == ["mode collapse"] * 2
    tried("entropy collapse", 2, "an alarm at every validation, on the console and in the metrics")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_too_little_memory_is_explained(error: Exception, recipe, monkeypatch, tried) -> None:
    real = loop.train_step

    def full(state, batches, step):
        if step == 3:
            raise error
        return real(state, batches, step)

    monkeypatch.setattr(loop, "train_step", full)
    with pytest.raises(
        OSError, match=r"smaller --batch-size, or a larger --grad-accum-steps.*last good checkpoint is .*00000002"
    ):
        train(recipe())
    tried("out of memory", 1, "an error that says what to change")


def test_other_errors_are_not_hidden(recipe, monkeypatch) -> None:
    def broken(*_):
        raise RuntimeError("a mistake in the code")

    monkeypatch.setattr(loop, "train_step", broken)
    with pytest.raises(RuntimeError, match="a mistake in the code"):
        train(recipe())


def two(config: TrainConfig, path: Path, accident: Callable[[int, int], None]) -> tuple[list[Child], float]:
    """Two processes of one run on this machine; the accident is called before every step."""
    path.write_text(json.dumps(to_json(dataclasses.replace(config, parallel="ddp"))))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def work(rank: int) -> Callable[[], None]:
        def run() -> None:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            real = loop.train_step
            loop.train_step = lambda state, batches, step: (accident(rank, step), real(state, batches, step))[1]
            distributed.PATIENCE = distributed.datetime.timedelta(seconds=4)
            command("train", path, "--resume", "auto")()

        return run

    return [Child(work(rank), limit=50) for rank in (0, 1)], time.monotonic()


def assert_told(end: Ended, seconds: float, limit: float) -> None:
    assert end.status == 1, end.text
    assert "Traceback" not in end.text, end.text
    assert "another process died or no longer answers" in end.text
    assert "step-00000002" in end.text
    assert "--resume auto" in end.text
    assert seconds < limit


@pytest.mark.parametrize("dead", [0, 1])
def test_a_process_that_is_killed_does_not_leave_the_other_waiting(dead: int, recipe, tmp_path: Path, tried) -> None:
    config = recipe("mdlm", steps=200)

    def accident(rank: int, step: int) -> None:
        if (rank, step) == (dead, 3):
            os.kill(os.getpid(), signal.SIGKILL)

    children, began = two(config, tmp_path / "run.json", accident)
    assert children[dead].end().status == -signal.SIGKILL
    assert_told(children[1 - dead].end(), time.monotonic() - began, 40)
    assert [step for step, _ in checkpoint.listed(config.out)] == [2]
    tried("kill -9 of one of two processes", 1, "the other stops with a message at once")


def test_a_process_that_hangs_is_given_up(recipe, tmp_path: Path, tried) -> None:
    config = recipe("mdlm", steps=200)

    def accident(rank: int, step: int) -> None:
        if (rank, step) == (1, 3):
            os.kill(os.getpid(), signal.SIGSTOP)

    children, began = two(config, tmp_path / "run.json", accident)
    try:
        assert_told(children[0].end(), time.monotonic() - began, 45)
    finally:
        os.kill(children[1].pid, signal.SIGKILL)
        children[1].end()
    tried("one of two processes hangs (patience of 4 s instead of 10 minutes)", 1, "the other stops with a message")


def test_all_processes_hear_why_the_first_refuses(recipe, tmp_path: Path, tried) -> None:
    """Only the first looks at the folder; what it finds wrong is told to all, instead of a wait."""
    config = recipe("mdlm")
    last = train(config)
    for _, path in checkpoint.listed(config.out):
        (path / "online.safetensors").write_bytes(b"")
    children, _ = two(config, tmp_path / "run.json", lambda rank, step: None)
    for child in children:
        end = child.end()
        assert end.status == 1
        assert "no good checkpoint is left" in end.text, end.text
        assert "Traceback" not in end.text
    assert last.is_dir()
    tried("two processes resume a damaged run", 1, "both say why")


@pytest.mark.soak
def test_torchrun_starts_again_and_the_run_goes_on(recipe, tmp_path: Path, tried) -> None:
    """One of two workers is killed; torchrun starts both again, and they go on from the last checkpoint."""
    alone = train(recipe("mdlm", out=tmp_path / "alone"))
    config = recipe("mdlm", parallel="ddp")
    (tmp_path / "run.json").write_text(json.dumps(to_json(config)))
    (tmp_path / "worker.py").write_text(
        "import os, signal\n"
        "from cdlm.__main__ import main\n"
        "from cdlm.train import loop\n"
        "real = loop.train_step\n"
        "def fragile(state, batches, step):\n"
        "    if step == 3 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(state, batches, step)\n"
        "loop.train_step = fragile\n"
        "main()\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    launch += ["--max-restarts", "1", str(tmp_path / "worker.py"), "train", str(tmp_path / "run.json")]
    done = subprocess.run(
        [*launch, "--resume", "auto"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming after step 2" in done.stdout
    a, b = (checkpoint.read(path).tensors["online"] for path in (alone, checkpoint.latest(config.out)))
    assert all(torch.allclose(a[name], b[name], atol=3e-5) for name in a)
    tried("torchrun --max-restarts 1, one of two workers killed", 1, "goes on from the last checkpoint by itself")
