"""The core needs none of the optional packages: every command of the first page runs with all of them blocked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

OPTIONAL = (
    *("transformers", "sklearn", "sacrebleu", "scipy", "datasets", "pyarrow", "wandb", "tensorboard"),
    *("fastapi", "starlette", "uvicorn", "lm_eval", "mauve", "gguf", "accelerate", "playwright", "httpx"),
)
BLOCK = f"""
from importlib.machinery import PathFinder

real = PathFinder.find_spec

def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in {OPTIONAL!r} else real(name, path, target)

PathFinder.find_spec = classmethod(find_spec)
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, and a start-up file that blocks every optional package."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(BLOCK)
    (folder / "corpus.txt").write_text("the cat sat on the mat\n" * 200)
    return folder


def cdlm(bare: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Several commands in one process, as `cdlm` would run them, without the optional packages."""
    path = os.pathsep.join([str(bare), str(ROOT)])
    code = "from cdlm.cli.main import cli\n" + script
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=bare,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_the_block_holds(bare: Path) -> None:
    done = cdlm(bare, f"import importlib.util\nprint([importlib.util.find_spec(name) for name in {OPTIONAL!r}])")
    assert done.stdout.strip() == str([None] * len(OPTIONAL)), done.stderr


def test_text_to_model_to_text_without_any_extra(bare: Path, tried) -> None:
    script = """
cli("prepare corpus.txt --source lines --seq-length 16 --packing plain --out data".split())
quick = "--steps 4 --seq-length 16 --batch-size 4 --valid-samples 1 --valid-sample-steps 2"
cli(f"train tiny-mdlm --data data --out run {quick}".split())
cli("sample run --num-samples 1 --steps 2".split())
cli("plot run".split())
cli("recipes".split())
"""
    done = cdlm(bare, script)
    assert done.returncode == 0, done.stderr
    assert (bare / "run" / "step-00000004" / "model.safetensors").is_file()
    tried("every optional package is missing: prepare, train, sample, plot, recipes", 5, "they run")


def test_two_moons_without_any_extra(bare: Path, tried) -> None:
    flags = "--train-steps 3 --num-samples 50 --bins 8 --sampling-steps 1 --methods mdlm --out moons"
    done = cdlm(bare, f"cli('moons {flags}'.split())")
    assert done.returncode == 0, done.stderr
    assert (bare / "moons" / "moons.png").is_file()
    tried("every optional package is missing: moons", 1, "it runs")


def test_what_needs_an_extra_says_which(bare: Path, tried) -> None:
    """One process, several commands, each refused with the line to type."""
    script = """
from pathlib import Path
Path("x.parquet").write_bytes(b"PAR1")
for words in ("prepare x.parquet --out p", "prepare owner/name --out p", "studio nowhere"):
    try:
        cli(words.split())
    except (ValueError, OSError) as error:
        print("refused:", error)
    except SystemExit as end:
        print("refused:", end.code)
"""
    done = cdlm(bare, script)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    assert len(said) == 3, done.stdout + done.stderr
    assert all("pip install" in line for line in said), said
    tried("a command that needs a missing package", len(said), "an error with the line to type")
