"""Backward compatibility with commit fef84f3: what it wrote is read, continued and reproduced.

The fixtures in ``tests/fixtures/fef84f3`` were written by that commit (see ``make.py`` there) and are never regenerated
with newer code. Only the public interface is used, the command line and ``cdlm.load``, so that these tests hold however
the modules of the package are arranged. If a flag, a keyword or a recipe is renamed on purpose, add the new name to
``RENAMED``; everything else must stay as it is.

Weights are compared bit by bit on the CPU and torch version that made the fixtures, and with a tolerance elsewhere::

    python -m pytest tests/test_fef84f3.py
"""

import dataclasses
import functools
import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import cdlm
from cdlm.eval.results import read_rows
from studies.bundled import PREVIOUS

FIXTURES = Path(__file__).parent / "fixtures" / "fef84f3"
ROOT = Path(__file__).parents[1]

RENAMED: dict[str, str] = {
    "--accumulate": "--grad-accum-steps",
    "--average": "--ema-decay",
    "--batch": "--batch-size",
    "--clip": "--max-grad-norm",
    "--cooldown": "--cooldown-ratio",
    "--keep": "--keep-checkpoints",
    "--length": "--seq-length",
    "--lr": "--learning-rate",
    "--network.absolute": "--network.position-embeddings",
    "--network.blocks": "--network.num-layers",
    "--network.cond": "--network.cond-dim",
    "--network.heads": "--network.num-heads",
    "--network.hidden": "--network.hidden-size",
    "--network.tied": "--network.tie-embeddings",
    "--noise": "--noise-schedule",
    "--reference": "--reference-steps",
    "--sample-steps": "--valid-sample-steps",
    "--samples": "--valid-samples",
    "--train-vocab": "--train-vocab-size",
    "--valid-share": "--valid-fraction",
    "--warmup": "--warmup-ratio",
    "--num": "--num-samples",
    "--times": "--likelihood-samples",
    "num": "num_samples",
    "length": "max_length",
    "t": "noise_level",
    "grid": "timesteps",
    "tail": "final_step",
    "cool": "temperature_end",
    "bound": "entropy_bound",
    "block": "block_length",
}
"""Names of fef84f3 (flags such as "--average", recipes, commands, methods and keywords of a model) and what they are
called now."""

COMMANDS = json.loads((FIXTURES / "commands.json").read_text())
HASHES = json.loads((FIXTURES / "hashes.json").read_text())
SAMPLES = json.loads((FIXTURES / "samples.json").read_text())
MAKE = runpy.run_path(str(FIXTURES / "make.py"), run_name="make")

ATOL = 1e-4
"""Largest difference of a weight on another CPU: rounding errors that AdamW has scaled up in six steps at lr 0.03."""


def same_machine() -> bool:
    """Whether floating-point results can be expected to agree bit by bit with the fixtures."""
    return MAKE["environment"]() == HASHES["environment"]


def run(words: Sequence[str], cwd: Path) -> str:
    """Run ``cdlm ...`` with the words of fef84f3 and return what it prints."""
    command = [sys.executable, "-m", "cdlm", *(RENAMED.get(word, word) for word in words)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A copy of the fixtures that commands can write to, with the same relative paths."""
    shutil.copytree(FIXTURES, tmp_path / "fixtures")
    return tmp_path / "fixtures"


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("name", COMMANDS["train"])
def test_interrupted_run_resumes_to_the_same_weights(name: str, here: Path) -> None:
    out = here / "trained" / name
    run([*COMMANDS["train"][name], "--out", f"trained/{name}", "--resume", "auto"], here)
    last = out / "step-00000012"
    found = load_file(last / "model.safetensors")
    expected = load_file(FIXTURES / "final" / name / "model.safetensors")
    before = load_file(out / "step-00000006" / "model.safetensors")
    assert found.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=ATOL, msg=lambda text, k=key: f"{k}: {text}")
    assert max(float((expected[key] - before[key]).abs().max()) for key in expected) > 100 * ATOL
    if same_machine():
        assert MAKE["weight_digests"](last) == HASHES["weights"][name]


@pytest.mark.parametrize("name", COMMANDS["train"])
def test_checkpoint_and_model_folder_load(name: str) -> None:
    for folder in (FIXTURES / "trained" / name, FIXTURES / "final" / name):
        model = cdlm.load(folder, "cpu", "float32")
        (text,) = model.sample(num_samples=1, seed=0, **({} if name == "ar" else {"steps": 2}))
        assert len(text.token_ids) == 16


def test_prepare_writes_the_same_tokens(here: Path) -> None:
    shutil.rmtree(here / "tokens")
    run(COMMANDS["prepare"], here)
    for file in ("train.bin", "valid.bin"):
        assert (here / "tokens" / file).read_bytes() == (FIXTURES / "tokens" / file).read_bytes()
    now, then = (json.loads((folder / "tokens" / "meta.json").read_text()) for folder in (here, FIXTURES))
    for key in ("dtype", "vocab", "eos", "bos", "packing", "length", "document_eos", "splits"):
        assert now[key] == then[key]


def test_report_is_the_same(here: Path) -> None:
    shutil.rmtree(here / "report")
    run(COMMANDS["report"], here)
    found, expected = here / "report", FIXTURES / "report"
    now, then = (json.loads((folder / "report.json").read_text()) for folder in (found, expected))
    close(now, then)
    if same_machine():
        assert (found / "report.json").read_bytes() == (expected / "report.json").read_bytes()
    for path in sorted(expected.rglob("*")):
        if path.suffix in (".md", ".tex"):
            name = path.relative_to(expected)
            assert (found / name).read_text() == path.read_text(), name


def close(now: Any, then: Any) -> None:
    """The same JSON, but for the last digits of numbers."""
    if isinstance(then, dict):
        assert list(now) == list(then)
        for key in then:
            close(now[key], then[key])
    elif isinstance(then, list):
        assert len(now) == len(then)
        for one, other in zip(now, then, strict=True):
            close(one, other)
    else:
        assert now == (pytest.approx(then, rel=1e-9) if isinstance(then, float) else then)


@pytest.mark.parametrize("number", range(len(COMMANDS["eval"])))
def test_evaluation_finds_every_cell_finished(number: int, here: Path) -> None:
    """But for likelihoods: those of the samplers of a sweep are bounded since then, which makes new rows."""
    before, rows = contents(here / "results"), read_rows(here / "results")
    run(COMMANDS["eval"][number], here)
    after, found = contents(here / "results"), read_rows(here / "results")
    assert found[: len(rows)] == rows
    assert {row["task"] for row in found[len(rows) :]} <= {"likelihood"}
    assert {**after, "results.jsonl": ""} == {**before, "results.jsonl": ""}


@functools.cache
def bundled(name: str) -> Any:
    """A bundled model with the generation config that it had."""
    presets = [{"steps": steps, **settings} for steps, settings in PREVIOUS[name].items()]
    config = {**presets[0], "step_presets": presets}
    return dataclasses.replace(cdlm.load(name, "cpu", "float32"), generation_config=config)


FEW = ("order random", "precision naive-fp32", "prompt", "own settings, 4 steps", "infill, own settings")
"""Both bundled models have the same network: every sampler is tried on one of them, and these on the other."""


@pytest.mark.parametrize(
    ("name", "titles"),
    [
        ("mcdlm-guided", tuple(SAMPLES["mcdlm-guided"])),
        ("mdlm", FEW),
        pytest.param("mdlm", tuple(title for title in SAMPLES["mdlm"] if title not in FEW), marks=pytest.mark.soak),
    ],
    ids=["mcdlm-guided", "mdlm", "mdlm-rest"],
)
def test_sampled_tokens_are_the_same(name: str, titles: tuple[str, ...]) -> None:
    different = []
    for title in titles:
        expected = SAMPLES[name][title]
        arguments = {RENAMED.get(key, key): value for key, value in expected["arguments"].items()}
        found = sampled(bundled(name), RENAMED.get(expected["method"], expected["method"]), arguments)
        if found != {key: expected[key] for key in found}:
            different.append(title)
    assert not different


def sampled(model: Any, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What `call` of make.py records: the digest of the token ids, and the network evaluations of each sample."""
    samples = list(getattr(model, method)(**arguments))
    token_ids = [sample.token_ids for sample in samples]
    evaluations = samples[-1].nfe if method == "stream" else [sample.nfe for sample in samples]
    return {"sha256": hashlib.sha256(json.dumps(token_ids).encode()).hexdigest(), "evaluations": evaluations}
