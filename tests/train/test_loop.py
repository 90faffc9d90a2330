"""The loop: losses fall, golden curves hold, runs are kept and bad input is refused before it costs anything."""

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest
import torch

from cdlm import load
from cdlm.config import RunConfig, from_json, read_config, to_json
from cdlm.methods import METHODS
from cdlm.model import LayoutError
from cdlm.recipes import RECIPES
from cdlm.train import checkpoint, loop
from cdlm.train.loop import train
from cdlm.train.validation import alarm

GOLDEN = Path(__file__).parents[1] / "golden"


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


def trained(name: str, recipe, bases: Path, **changes: object) -> Path:
    """A run of a tiny recipe of 60 steps, started from its base where it needs one."""
    base = {"sdtt": "mdlm", "duo-dcd": "duo", "mcdlm-sdtt": "mcdlm"}.get(name)
    if base and not (bases / base).exists():
        train(recipe(base, out=bases / base, steps=60, log_every=10, save_every=60))
    extra = {"init_from": bases / base} if base else {}
    config = recipe(name, steps=60, log_every=10, save_every=60, **extra, **changes)
    train(config)
    return config.out


@pytest.mark.parametrize("name", [*METHODS, "mcdlm-sdtt"])
def test_golden_curve(name: str, recipe, bases: Path) -> None:
    """The loss of every tiny recipe, fp32 and seed 0; it falls, or, for a student of its own teacher, stays small."""
    run = trained(name, recipe, bases)
    curve = losses(run)
    path = GOLDEN / f"{name}.json"
    if os.environ.get("CDLM_WRITE_GOLDEN"):  # to renew the curves after a change that is meant to move them
        path.write_text(json.dumps([round(value, 6) for value in curve]) + "\n")
    stored = json.loads(path.read_text())
    assert curve == pytest.approx(stored, rel=1e-3, abs=1e-6)
    if name in ("sdtt", "duo-dcd", "mcdlm-sdtt"):
        assert max(curve) < 0.5
    else:
        assert curve[-1] < 0.9 * curve[0]


def test_a_run_that_is_training_can_be_loaded(recipe) -> None:
    config = recipe("mcdlm", steps=4)
    folder = train(config)
    model = load(config.out)
    assert model.vocab == 257
    assert model.process is not None
    assert torch.allclose(load(folder)(torch.full((1, 8), 257)), model(torch.full((1, 8), 257)))
    assert (folder / "tokenizer.json").is_file()


def test_saved_configuration_starts_the_identical_run(recipe, tmp_path: Path) -> None:
    config = recipe("mcdlm")
    first = train(config)
    again = read_config(config.out / "run.json")
    assert again == config
    second = train(dataclasses.replace(again, out=tmp_path / "again"))
    for part in ("model", "online", "target", "optimizer"):
        assert (first / f"{part}.safetensors").read_bytes() == (second / f"{part}.safetensors").read_bytes()


def test_accumulation_does_not_change_the_run(recipe, tmp_path: Path) -> None:
    one, two = (train(recipe("mcdlm", out=tmp_path / str(n), accumulate=n)) for n in (1, 4))
    a, b = (checkpoint.read(path).tensors["online"] for path in (one, two))
    for name in a:
        assert torch.allclose(a[name], b[name], atol=2e-5), name


def test_last_and_best_checkpoints_are_kept(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([3.0, 1.0, 2.0, 2.5, 2.6, 2.7])
    monkeypatch.setattr(loop, "validate", lambda *_: {"step": 0, "kind": "valid", "nelbo": next(values)})
    config = recipe("mdlm", steps=12, save_every=2, valid_every=2, keep=2)
    train(config)
    assert [step for step, _ in checkpoint.listed(config.out)] == [4, 10, 12]


def test_an_existing_run_is_not_overwritten(recipe) -> None:
    config = recipe("mdlm", steps=4)
    train(config)
    with pytest.raises(ValueError, match="--resume auto"):
        train(config)


def test_resume_with_other_settings_is_refused_unless_forced(recipe) -> None:
    config = recipe("mdlm", steps=8)
    train(config)
    changed = dataclasses.replace(config, lr=1e-4, steps=12)
    with pytest.raises(ValueError, match=r"lr: 0\.002 -> 0\.0001.*--resume force"):
        train(changed, "auto")
    assert train(changed, "force").name == "step-00000012"


@pytest.mark.parametrize("where", ["weights", "gradient"])
def test_not_a_number_stops_the_run_and_names_it(where: str, recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    real = loop.take_step

    def poisoned(state, batches, step):
        if step == 6:
            if where == "weights":
                next(state.denoiser.parameters()).data.fill_(math.nan)
            else:
                return {**real(state, batches, step), "gradient": torch.tensor(math.inf)}
        return real(state, batches, step)

    monkeypatch.setattr(loop, "take_step", poisoned)
    config = recipe("mcdlm")
    with pytest.raises(FloatingPointError, match=r"at step 7: .*last good checkpoint is .*step-00000004"):
        train(config)
    assert [step for step, _ in checkpoint.listed(config.out)] == [4]


def test_a_full_disk_leaves_the_last_checkpoint_good(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpoint.save_file

    def full(tensors, path):
        if "step-00000008" in str(path) and "optimizer" in str(path):
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    config = recipe("mcdlm")
    with pytest.raises(OSError, match=r"last good checkpoint is .*step-00000004.*--resume auto"):
        train(config)
    assert sorted(path.name for path in config.out.iterdir() if path.is_dir()) == ["step-00000004"]
    monkeypatch.setattr(checkpoint, "save_file", real)
    assert train(config, "auto").name == "step-00000012"


@pytest.mark.parametrize("part", ["model", "online", "target", "optimizer"])
def test_damaged_checkpoints_are_named(part: str, recipe) -> None:
    config = recipe("mcdlm", steps=8)
    last = train(config)
    data = (last / f"{part}.safetensors").read_bytes()
    (last / f"{part}.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(LayoutError, match=rf"{part}\.safetensors is damaged.*remove the folder"):
        train(config, "auto")
    (last / f"{part}.safetensors").unlink()
    with pytest.raises(LayoutError, match=rf"{part}\.safetensors is missing"):
        train(config, "auto")


def test_init_from_must_fit(recipe, tmp_path: Path) -> None:
    base = train(recipe("mdlm", steps=4))
    with pytest.raises(ValueError, match="does not fit: its process"):
        train(
            recipe("udlm", init_from=base, network=dataclasses.replace(recipe("mdlm").network, time_conditioning=True))
        )
    with pytest.raises(ValueError, match="does not fit: its architecture"):
        train(recipe("mcdlm", init_from=base, network=dataclasses.replace(recipe("mdlm").network, blocks=3)))
    with pytest.raises(LayoutError, match="not a model folder"):
        train(recipe("mcdlm", init_from=tmp_path / "nowhere"))


def test_a_public_mdlm_checkpoint_can_be_distilled(peers: Path, corpus: Path, recipe) -> None:
    """The fixture has 96 tokens, the corpus 257: the mismatch is named, not hidden."""
    with pytest.raises(ValueError, match=r"its (process|vocab)"):
        train(recipe("sdtt", init_from=peers / "mdlm-hf-tiny"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "mcdm"}, "choose from"),
        ({"method": "sdtt"}, "--init-from"),
        ({"method": "ar"}, "causal"),
        ({"batch": 10, "accumulate": 3}, "does not divide"),
        ({"steps": 0}, "at least 1"),
        ({"length": 1}, "at least 2"),
        ({"lr": 0.0}, "positive"),
        ({"average": 1.0}, "decay in"),
        ({"valid_every": -1}, "at least 0"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig(**changes)


def test_missing_data_is_refused(recipe, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cdlm prepare"):
        train(recipe("mdlm", data=tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"metod": "mdlm"}, "unknown setting 'metod'"),
        ({"network": {"hiden": 64}}, r"unknown setting 'network\.hiden'"),
        ({"steps": "many"}, "'steps' takes int"),
        ({"dtype": "float8"}, "takes float32, bfloat16, float64"),
        ({"network": 3}, "takes Architecture"),
        ({"compile": 1}, "takes bool"),
    ],
)
def test_bad_json_is_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(values)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_json(name: str) -> None:
    config = RECIPES[name].config
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_entropy_alarm_has_two_sides() -> None:
    assert alarm(3.0, 5.4, 1024) == "mode collapse"
    assert alarm(5.3, 5.4, 1024) is None
    assert alarm(6.8, 5.4, 1024) == "uniform drift"
