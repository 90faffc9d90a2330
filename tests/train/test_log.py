"""Metrics reach every sink that was asked for, and a missing one says what to install."""

import json
import sys
import types

import pytest

from cdlm.train.log import open_log, read_metrics
from cdlm.train.loop import train


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


def test_resuming_drops_the_lost_future_and_a_torn_line(recipe) -> None:
    config = recipe("mdlm")
    config.out.mkdir()
    lines = [json.dumps({"step": step, "kind": "train", "loss": 1.0}) for step in (4, 8, 12)]
    (config.out / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 16, "ki')
    record = open_log(config, from_step=8)
    record({"step": 10, "kind": "train", "loss": 0.5})
    assert [line["step"] for line in read_metrics(config.out)] == [4, 8, 10]
