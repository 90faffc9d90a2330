"""Whatever kills a run, it goes on from its last checkpoint and ends with the bits of one that was never stopped."""

import dataclasses
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from cdlm.train import checkpoint
from cdlm.train.config import TrainConfig, to_json
from cdlm.train.loop import train

from .conftest import launch

PARTS = ("model", "online", "target", "optimizer")


def write_config(config: TrainConfig, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_json(config)))
    return path


def assert_same_bits(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    for part in PARTS:
        if f"{part}.safetensors" in names:
            a, b = load_file(one / f"{part}.safetensors"), load_file(other / f"{part}.safetensors")
            assert a.keys() == b.keys()
            for name in a:
                assert a[name].equal(b[name]), f"{part}: {name}"


def finish_through_kills(config: TrainConfig, path: Path, kills: int, seed: int, number: int = signal.SIGKILL) -> None:
    """Kill a run at random moments while it trains, resuming it each time, until it has been killed that often."""
    draw = random.Random(seed)
    metrics = config.out / "metrics.jsonl"
    for _ in range(kills):
        process = launch(path, "--resume", "auto")
        seen = metrics.stat().st_size if metrics.exists() else 0
        for _ in range(3000):  # wait until it has started to train, then a little longer
            if process.poll() is not None or (metrics.exists() and metrics.stat().st_size > seen):
                break
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.25))
        if process.poll() is None:
            os.kill(process.pid, number)
        process.communicate(timeout=60)
        if checkpoint.latest(config.out) and checkpoint.listed(config.out)[-1][0] == config.steps:
            break
    done = launch(path, "--resume", "auto")
    text, _ = done.communicate(timeout=120)
    assert done.returncode == 0, text


def test_killed_twice_equals_uninterrupted(recipe, tmp_path: Path) -> None:
    config = recipe("mcdlm", steps=100, log_every=2, save_every=5, valid_every=50, valid_samples=1)
    whole = train(dataclasses.replace(config, out=tmp_path / "whole"))
    finish_through_kills(config, write_config(config, tmp_path / "run.json"), kills=2, seed=1)
    assert_same_bits(whole, checkpoint.latest(config.out))
    lines = [
        [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        for out in (tmp_path / "whole", config.out)
    ]
    for line in (*lines[0], *lines[1]):
        line.pop("tokens_per_second", None)
    steps = [line["step"] for line in lines[1] if line["kind"] == "train"]
    assert steps == sorted(set(steps))  # nothing twice, nothing out of order
    valid = [[line for line in each if line["kind"] == "valid"] for each in lines]
    assert valid[0] == valid[1]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["mcdlm", "mcdlm-pplopt", "sdtt", "duo-dcd"])
def test_killed_twenty_times_equals_uninterrupted(name: str, recipe, tmp_path: Path) -> None:
    base = {"sdtt": "mdlm", "duo-dcd": "duo"}.get(name)
    init = train(recipe(base, out=tmp_path / "base", steps=20)) if base else None
    extra = {"init_from": init} if init else {}
    config = recipe(name, steps=600, log_every=2, save_every=5, **extra)
    whole = train(dataclasses.replace(config, out=tmp_path / "whole"))
    finish_through_kills(config, write_config(config, tmp_path / "run.json"), kills=20, seed=2)
    assert_same_bits(whole, checkpoint.latest(config.out))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_polite_signal_saves_and_exits_cleanly(number: int, recipe, tmp_path: Path) -> None:
    config = recipe("mdlm", steps=100_000, log_every=2, save_every=100_000)
    process = launch(write_config(config, tmp_path / "run.json"))
    while not (config.out / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 143, text  # so that what follows in a script does not take it for finished
    assert "--resume auto" in text
    assert "Traceback" not in text
    assert checkpoint.latest(config.out) is not None


@pytest.mark.parametrize("name", ["mdlm", "mcdlm-pplopt", "ar", "ucdlm"])
def test_resume_in_halves_equals_the_whole(name: str, recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped at a checkpoint by an error and resumed, every part has the same bits as an uninterrupted run."""
    whole = train(recipe(name, out=tmp_path / "whole"))
    config = recipe(name, out=tmp_path / "halves")
    from cdlm.train import loop

    real = loop.train_step

    def breaks(state, batches, step):
        if step == 9:
            raise RuntimeError("the machine dies")
        return real(state, batches, step)

    monkeypatch.setattr(loop, "train_step", breaks)
    with pytest.raises(RuntimeError, match="dies"):
        train(config)
    monkeypatch.setattr(loop, "train_step", real)
    assert [step for step, _ in checkpoint.listed(config.out)] == [4, 8]
    assert_same_bits(whole, train(config, "auto"))


def test_a_finished_run_resumes_to_itself(recipe) -> None:
    config = recipe("mdlm")
    assert train(config) == train(config, "auto")
