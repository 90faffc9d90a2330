"""The command line as a user meets it: in a process of its own (a fork of one that has imported everything)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cdlm.methods import METHODS

from ..zygote import run

ROOT = Path(__file__).parents[2]


def cdlm(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run("cdlm", *arguments, cwd=ROOT, **environment)


def test_the_command_line_starts_by_itself() -> None:
    """Without the help of these tests."""
    words = [sys.executable, "-m", "cdlm", "methods", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--run" in done.stdout


def test_methods_prints_every_row_from_the_objects() -> None:
    done = cdlm("methods")
    assert done.returncode == 0, done.stderr
    for slug, method in METHODS.items():
        assert f"[{slug}]" in done.stdout
        for term in method(method.default_process(50_257)).terms:
            assert str(term.target).split("(")[0] in done.stdout
    assert "1/8, 5/8" in done.stdout


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("tiny", "6,621,329"), pytest.param("110m", "169,626,449", marks=pytest.mark.soak)],
)
def test_one_step_of_every_method(size: str, parameters: str) -> None:
    """The 110m class has 769 parameters fewer than the peers' 169,627,218: our law has no mask."""
    done = cdlm("methods", "--run", size, "--batch-size", "1", "--seq-length", "16", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert parameters in done.stdout
    lines = done.stdout.split("One step of")[1].splitlines()
    for method in METHODS.values():
        row = next(line for line in lines if f"│ {method.name} " in line)
        loss = float(row.split("│")[3])
        assert 0 < loss < 100, row


def test_moons_writes_picture_table_and_models(tmp_path: Path) -> None:
    flags = ["--train-steps", "20", "--num-samples", "500", "--bins", "8", "--sampling-steps", "1", "4"]
    done = cdlm("moons", *flags, "--out", str(tmp_path), "--methods", "mdlm", "mcdlm:kappa=0,steps=staged")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "moons.json").read_text())
    assert {(cell["method"], cell["steps"]) for cell in result["cells"]} == {
        ("data", 0),
        *((row, steps) for row in ("exact", "mdlm", "mcdlm:kappa=0,steps=staged") for steps in (1, 4)),
    }
    assert (tmp_path / "moons.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "mcdlm-kappa-0-steps-staged" / "model.safetensors").is_file()
    assert "exact f*" in done.stdout
    assert len(result["losses"]["mdlm"]) == 20


@pytest.mark.parametrize(
    ("arguments", "advice", "status"),
    [
        (["moons", "--methods", "mdlm", "sdtt"], "does not fit two moons", 1),
        (["moons", "--methods", "mcdlm:kapa=1"], "it has: kappa", 1),
        (["moons", "--methods", "mcdlm:kappa=much"], "takes a float", 1),
        (["moons", "--methods", "mcdlm:kappa"], "name=value", 1),
        (["moons", "--bins", "60", "--encoding", "digits"], "power of 4", 1),
        (["moons", "--sampling-steps", "0"], "--sampling-steps must", 2),
        (["moons", "--train-steps", "0"], "at least 1", 2),
        (["moons", "--device", "tpu"], "cuda", 2),
        (["moons", "--unknown", "3"], "Unrecognized", 2),
        (["methods", "--vocab-size", "1"], "at least 2", 2),
        (["mooons"], "moons", 2),
        ([], "moons", 2),
    ],
)
def test_bad_input_says_what_to_type(arguments: list[str], advice: str, status: int) -> None:
    """Status 2 for what the parser finds, 1 for what the command finds."""
    done = cdlm(*arguments, COLUMNS="200")
    assert done.returncode == status
    assert advice in done.stderr
    assert "Traceback" not in done.stderr


def test_output_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = cdlm("moons", "--out", str(tmp_path / "file" / "inside"))
    assert done.returncode == 1
    assert "file" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "file").read_text() == "in the way"


def test_help_shows_every_default() -> None:
    text = cdlm("moons", "--help").stdout
    for flag in ("--device", "--dtype", "--seed", "--out", "--methods", "(default: 64)"):
        assert flag in text


def test_core_works_without_command_line_libraries() -> None:
    """Training and sampling import torch, numpy, safetensors and jaxtyping alone."""
    code = (
        "import sys\n"
        "for name in ('tyro', 'matplotlib', 'transformers', 'datasets', 'wandb', 'tokenizers', 'beartype'):\n"
        "    sys.modules[name] = None\n"
        "import cdlm, cdlm.methods, cdlm.sample, cdlm.train.loop, cdlm.process.exact, cdlm.data.toy\n"
        "import cdlm.text.pipeline\n"
        "print(len(cdlm.methods.METHODS))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(len(METHODS)), done.stderr


def test_a_missing_command_line_library_is_named() -> None:
    code = (
        "import sys; sys.modules['tyro'] = None; from cdlm.__main__ import main; sys.argv = ['cdlm', 'recipes']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "pip install tyro" in done.stderr
