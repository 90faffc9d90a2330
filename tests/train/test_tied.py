"""Training with a head that is the embeddings: resumed, replicated or sharded, it ends with the same weights; and runs
from before there were such heads go on."""

import dataclasses
import json
from pathlib import Path

import pytest

from cdlm.files import digest, sealed
from cdlm.model.config import RENAMED_NETWORK, SIZES
from cdlm.train import checkpoint, loop
from cdlm.train.config import RENAMED, TrainConfig, migrate, read_config, to_json
from cdlm.train.loop import train

from .test_parallel import assert_close, run_in_two
from .test_resume import assert_same_bits

TIED = dataclasses.replace(SIZES["tiny"], tie_embeddings=True)


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.soak), "fsdp"])
def test_two_processes_equal_one(parallel: str, recipe, tmp_path: Path) -> None:
    config = recipe("mcdlm", steps=6, network=TIED, weight_decay=0.1)
    alone = train(dataclasses.replace(config, out=tmp_path / "alone"))
    two = dataclasses.replace(config, out=tmp_path / "two", parallel=parallel)
    assert_close(alone, run_in_two(two, tmp_path / "two.json"))


def stopped_at(step: int, config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = loop.train_step

    def breaks(state, batches, now):
        if now == step:
            raise RuntimeError("the machine dies")
        return real(state, batches, now)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", breaks)
        with pytest.raises(RuntimeError, match="dies"):
            train(config)


def test_a_resumed_run_ends_with_the_same_bits(recipe, tmp_path: Path, monkeypatch) -> None:
    config = recipe("mcdlm", network=TIED)
    whole = train(dataclasses.replace(config, out=tmp_path / "whole"))
    stopped_at(6, config, monkeypatch)
    assert_same_bits(whole, train(config, "auto"))
    assert "backbone.output_layer.linear.weight" not in checkpoint.read(whole).tensors["online"]


def test_a_run_of_an_earlier_version_goes_on(recipe, tmp_path: Path, monkeypatch) -> None:
    """Its files do not know the settings that came later."""
    config = recipe("mcdlm")
    whole = train(dataclasses.replace(config, out=tmp_path / "whole"))
    stopped_at(6, config, monkeypatch)
    last = checkpoint.latest(config.out)
    model, state = (json.loads((last / name).read_text()) for name in ("config.json", "state.json"))
    del model["network"]["tie_embeddings"], state["run"]["network"]["tie_embeddings"], state["seal"]
    (last / "config.json").write_text(json.dumps(model))
    state["files"]["config.json"] = digest(last / "config.json")
    (last / "state.json").write_text(json.dumps(sealed(state)))
    assert_same_bits(whole, train(config, "auto"))


def test_settings_are_completed_with_defaults() -> None:
    now = to_json(TrainConfig())
    old = {**now, "network": {key: value for key, value in now["network"].items() if key != "tie_embeddings"}}
    assert migrate(old) == now
    with pytest.raises(ValueError, match="'network' takes an object"):
        migrate({"network": 5})


def test_settings_of_an_earlier_version_have_the_present_names() -> None:
    """Every setting of fef84f3 arrives with its value, on both ways in."""
    path = Path(__file__).parents[1] / "fixtures" / "fef84f3" / "trained" / "mdlm" / "run.json"
    before = json.loads(path.read_text())
    after = migrate(before)
    assert after == to_json(read_config(path))
    added = {"prior": "auto", "freeze_trunk": False, "trust_remote_code": False}
    network = before.pop("network")
    assert {RENAMED.get(name, name): value for name, value in before.items()} == {
        name: value for name, value in after.items() if name not in ("network", *added)
    }
    kept = {name: value for name, value in after["network"].items() if name not in ("grid_embeddings", "joint_layers")}
    assert {RENAMED_NETWORK.get(name, name): value for name, value in network.items()} == kept
    assert {name: after[name] for name in added} == added
    assert not (RENAMED.keys() & after.keys())
    assert not (RENAMED_NETWORK.keys() & after["network"].keys())
    assert set(RENAMED.values()) <= after.keys()
    assert set(RENAMED_NETWORK.values()) <= after["network"].keys()


def test_a_setting_under_both_names_is_an_error() -> None:
    with pytest.raises(ValueError, match="'lr' is the former name of 'learning_rate'; give only the latter"):
        migrate({**to_json(TrainConfig()), "lr": 0.1})


@pytest.mark.parametrize("values", [{"ema": 0.9}, {"network": {**to_json(TrainConfig())["network"], "depth": 3}}])
def test_settings_of_no_version_are_errors(values: dict[str, object]) -> None:
    """Resuming never drops a setting that it does not know, and never takes today's default in its place."""
    now = to_json(TrainConfig())
    with pytest.raises(ValueError, match="unknown setting"):
        migrate({**now, **values})


def test_settings_that_every_version_had_must_be_there() -> None:
    """A checkpoint without its learning rate does not get today's default."""
    now = to_json(TrainConfig())
    with pytest.raises(ValueError, match="settings are missing: learning_rate"):
        migrate({name: value for name, value in now.items() if name != "learning_rate"})


def test_another_kind_of_head_is_another_network(recipe, monkeypatch) -> None:
    config = recipe("mdlm")
    stopped_at(6, config, monkeypatch)
    with pytest.raises(ValueError, match="other settings"):
        train(dataclasses.replace(config, network=TIED), "auto")
    with pytest.raises(ValueError, match="another network"):
        train(dataclasses.replace(config, network=TIED), "force")
