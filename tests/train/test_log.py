"""Metrics reach every sink that was asked for, and a missing one says what to install."""

import dataclasses
import json
import shutil
import sys
import types
from pathlib import Path

import pytest

from cdlm.train.config import read_config
from cdlm.train.log import describe_decay, open_log, read_metrics
from cdlm.train.loop import train

FIXTURE = Path(__file__).parents[1] / "fixtures" / "fef84f3" / "trained" / "mdlm"


def test_tracked_runs_write_the_same_numbers_everywhere(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list] = {"tensorboard": [], "wandb": []}

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            self.folder = folder

        def add_scalar(self, name: str, value: float, step: int) -> None:
            seen["tensorboard"].append((step, name, value))

        def flush(self) -> None:
            pass

    tensorboard = types.ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = Writer
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **settings: seen["wandb"].append(settings["config"]["method"])
    wandb.log = lambda values, step: seen["wandb"].append((step, values.get("loss")))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = recipe("mdlm", steps=4, track=("tensorboard", "wandb"))
    train(config)
    loss = next(line["loss"] for line in read_metrics(config.out) if line["kind"] == "train")
    assert (4, "loss", loss) in seen["tensorboard"]
    assert seen["wandb"][:2] == ["mdlm", (4, loss)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_sink_names_its_extra(name: str, recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}[name], None)
    with pytest.raises(ValueError, match=r"\.\[track\]"):
        train(recipe("mdlm", track=(name,)))


def test_lines_of_an_earlier_version_have_the_present_names(tmp_path: Path) -> None:
    """A resumed run may have lines of both versions; the earlier ones are written anew, with the same values."""
    before = [json.loads(line) for line in (FIXTURE / "metrics.jsonl").read_text().splitlines()]
    shutil.copytree(FIXTURE, tmp_path / "run")
    config = dataclasses.replace(read_config(FIXTURE / "run.json"), out=tmp_path / "run")
    record = open_log(config, from_step=6)
    record({"step": 9, "kind": "train", "grad_norm": 2.0, "learning_rate": 0.5})
    after = read_metrics(config.out)
    assert after == [json.loads(line) for line in (config.out / "metrics.jsonl").read_text().splitlines()]
    train, valid = ([line for line in before if line["kind"] == kind] for kind in ("train", "valid"))
    assert [line["grad_norm"] for line in after if "grad_norm" in line] == [*(line["gradient"] for line in train), 2.0]
    rates = [line["learning_rate"] for line in after if "learning_rate" in line]
    assert rates == [*(line["lr"] for line in train), 0.5]
    assert [line["samples"] for line in after if line["kind"] == "valid"] == [line["texts"] for line in valid]
    assert not {"gradient", "lr", "texts"} & {name for line in after for name in line}


def test_resuming_drops_the_lost_future_and_a_torn_line(recipe) -> None:
    config = recipe("mdlm")
    config.out.mkdir()
    lines = [json.dumps({"step": step, "kind": "train", "loss": 1.0}) for step in (4, 8, 12)]
    (config.out / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 16, "ki')
    record = open_log(config, from_step=8)
    record({"step": 10, "kind": "train", "loss": 0.5})
    assert [line["step"] for line in read_metrics(config.out)] == [4, 8, 10]


def test_a_decay_is_described_for_the_length_of_the_run() -> None:
    assert describe_decay("EMA", 0.9999, 150_000, 150_000) == (
        "EMA decay: 0.9999 at 150,000 steps, 0.9999 at 150,000 steps (averages about 10,000 steps)"
    )
    assert describe_decay("target", 0.999, 1500, 150_000).endswith("0.9 at 1,500 steps (averages about 10 steps)")
    assert describe_decay("EMA", 0.99, 200, 150_000).endswith("no averaging in a run of 200 steps")
    assert describe_decay("target", 1.0, 200, 150_000).endswith("keeps the initial weights")
