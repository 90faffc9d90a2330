"""Two processes, replicated or sharded, with and without accumulation, compute what one does."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from cdlm.train import checkpoint, loop
from cdlm.train.config import to_json
from cdlm.train.loop import train

from .conftest import launch


def run_in_two(config, path: Path, *flags: str) -> Path:
    path.write_text(json.dumps(to_json(config)))
    process = launch(path, *flags, processes=2)
    text, _ = process.communicate(timeout=200)
    assert process.returncode == 0, text
    last = checkpoint.latest(config.out)
    assert last is not None
    return last


def assert_close(one: Path, other: Path) -> None:
    a, b = checkpoint.read(one), checkpoint.read(other)
    assert a.step == b.step
    assert a.tensors.keys() == b.tensors.keys()
    for part, tensors in a.tensors.items():
        for name, tensor in tensors.items():
            assert torch.allclose(tensor, b.tensors[part][name], atol=3e-5, rtol=1e-4), f"{part}: {name}"


@pytest.mark.parametrize(
    ("parallel", "accumulate"),
    [
        ("ddp", 1),
        pytest.param("ddp", 2, marks=pytest.mark.soak),
        pytest.param("fsdp", 1, marks=pytest.mark.soak),
        ("fsdp", 2),
    ],
)
def test_two_processes_equal_one(parallel: str, accumulate: int, recipe, tmp_path: Path) -> None:
    """MCDLM-PPLOptimized passes through its switch, with target copies, in these few steps."""
    config = recipe("mcdlm-pplopt", steps=9, valid_samples=1)
    alone = train(dataclasses.replace(config, out=tmp_path / "alone"))
    config = dataclasses.replace(config, out=tmp_path / "two", parallel=parallel, grad_accum_steps=accumulate)
    assert_close(alone, run_in_two(config, tmp_path / "two.json"))


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.soak), "fsdp"])
def test_a_checkpoint_resumes_under_another_layout(parallel: str, recipe, tmp_path: Path, monkeypatch) -> None:
    """Begun by one process, ended by two: the same weights as one process all along."""
    config = recipe("mcdlm", out=tmp_path / "moving")
    alone = train(dataclasses.replace(config, out=tmp_path / "alone"))
    real = loop.train_step

    def breaks(state, batches, step):
        if step == 6:
            raise RuntimeError("the machine dies")
        return real(state, batches, step)

    monkeypatch.setattr(loop, "train_step", breaks)
    with pytest.raises(RuntimeError, match="dies"):
        train(config)
    last = run_in_two(dataclasses.replace(config, parallel=parallel), tmp_path / "two.json", "--resume", "auto")
    assert_close(alone, last)


def test_torchrun_without_a_layout_and_a_layout_without_torchrun(recipe, tmp_path: Path) -> None:
    config = recipe("mdlm")
    path = tmp_path / "run.json"
    path.write_text(json.dumps(to_json(config)))
    process = launch(path, processes=2)
    text, _ = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "--parallel ddp" in text
    with pytest.raises(ValueError, match="needs torchrun"):
        train(dataclasses.replace(config, parallel="ddp"))
