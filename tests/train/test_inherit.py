"""A run that starts from a model is best sampled as that model is, until someone measures otherwise."""

import json
import shutil
from pathlib import Path

import pytest

import cdlm
from cdlm.cli.main import cli
from cdlm.model.pretrained import resolve_checkpoint
from cdlm.train import checkpoint
from cdlm.train.loop import train

SETTINGS = {"steps": 4, "order": "dilated", "temperature": 0.8}
CONFIG = {**SETTINGS, "step_presets": [SETTINGS, {"steps": 16, "temperature": 0.9}]}


def test_the_generation_config_is_inherited(recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = train(recipe("mdlm", steps=2))
    assert cdlm.load(base, "cpu").generation_config == {}
    (base / "generation_config.json").write_text(json.dumps(CONFIG))
    tuned = recipe("mdlm", steps=4, save_every=2, init_from=base.parent, out=tmp_path / "tuned")
    train(tuned)
    said = "generation config, from the model it started from: --steps 4 --order dilated --temperature 0.8"
    assert said in capsys.readouterr().out
    for step in (2, 4):
        model = cdlm.load(tmp_path / "tuned" / f"step-{step:08}", "cpu")
        assert model.generation_config == CONFIG
    cli(["sample", str(tmp_path / "tuned"), "--num-samples", "1", "--device", "cpu", "--temperature", "0.5"])
    origins = "settings: --steps 4 --order dilated (generation config); --temperature 0.5 (given)"
    assert origins in capsys.readouterr().out
    cli(["sample", str(tmp_path / "tuned"), "--num-samples", "1", "--device", "cpu", "--order", "probability"])
    origins = "settings: --steps 32 --temperature 1 (default); --order probability (given)"
    assert origins in capsys.readouterr().out  # another sampler: none of the generation config applies

    shutil.rmtree(base.parent)  # a run goes on without the model that it started from
    shutil.rmtree(tmp_path / "tuned" / "step-00000004")
    edited = {**CONFIG, "temperature": 0.7}
    saved = resolve_checkpoint(tmp_path / "tuned") / "generation_config.json"
    saved.write_text(json.dumps(edited))  # which one may do
    train(tuned, "auto")
    assert checkpoint.latest(tmp_path / "tuned") == tmp_path / "tuned" / "step-00000004"
    assert cdlm.load(tmp_path / "tuned", "cpu").generation_config == edited


def test_that_of_version_1_is_inherited(recipe, tmp_path: Path) -> None:
    """It stood in config.json, as "sampling"."""
    base = cdlm.load(train(recipe("mdlm", steps=2)), "cpu").save_pretrained(tmp_path / "saved")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "sampling": [{"steps": 4, "cool": 0.5}]}))
    (base / "generation_config.json").unlink()
    end = train(recipe("mdlm", steps=2, init_from=base, out=tmp_path / "tuned"))
    assert json.loads((end / "generation_config.json").read_text()) == {
        "max_denoising_steps": 4,
        "temperature_end": 0.5,
    }
