"""Training a joint head: from nothing, or on top of a model whose weights move or stay."""

import dataclasses
from pathlib import Path

import pytest
import torch

import cdlm
from cdlm.train import checkpoint, train
from cdlm.train.config import TrainConfig


@pytest.fixture
def base(recipe, tmp_path: Path) -> Path:
    run = train(recipe("mdlm", steps=2)).parent
    (run / "step-00000002" / "generation_config.json").write_text('{"steps": 4, "guidance": 1.0}')
    return run


def online(run: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read(run).tensors["online"]


@pytest.mark.parametrize("frozen", [True, False])
def test_a_trained_model_gets_a_head(frozen: bool, base: Path, recipe) -> None:
    config = recipe("joint", init_from=base, freeze_trunk=frozen, steps=4)
    config = dataclasses.replace(config, network=dataclasses.replace(config.network, dropout=0.2))
    before, after = online(base / "step-00000002"), online(train(config))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert not moved if frozen else len(moved) > 20
    heads = after.keys() - before.keys()
    assert heads
    assert all(name.startswith("joint_head.") for name in heads)
    assert float(after["joint_head.output.weight"].abs().max()) > 0
    pipe = cdlm.load(config.out, "cpu")
    assert pipe.generation_config == {}  # it was found for another sampler
    assert pipe.resolve({"steps": 2}).sampler == "joint"
    assert len(pipe.sample(num_samples=2, steps=2, order="dilated")) == 2


def test_a_run_with_a_frozen_trunk_resumes_with_the_same_bits(base: Path, recipe, tmp_path: Path) -> None:
    config = recipe("joint", init_from=base, freeze_trunk=True, steps=6, save_every=3)
    whole = train(config)
    other = dataclasses.replace(config, out=tmp_path / "again")
    train(other)
    for path in (other.out / "step-00000006").iterdir():
        path.unlink()
    (other.out / "step-00000006").rmdir()
    again = train(other, "auto")
    for part in ("model", "online", "optimizer"):
        assert (whole / f"{part}.safetensors").read_bytes() == (again / f"{part}.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("joint", {"layers": 0}, "add --network.joint-layers 1"),
        ("mdlm", {"layers": 1}, "MDLM does not train a joint head"),
        ("mdlm", {"freeze_trunk": True}, "trains the joint head alone"),
        ("joint", {"freeze_trunk": True}, "give it with --init-from"),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, changes: dict, message: str, recipe) -> None:
    layers = changes.pop("layers", None)
    config: TrainConfig = recipe(name, **changes)
    if layers is not None:
        config = dataclasses.replace(config, network=dataclasses.replace(config.network, joint_layers=layers))
    with pytest.raises(ValueError, match=message):
        train(config)
