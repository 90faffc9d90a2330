"""A small corpus of English-like text, prepared once, and runs on it."""

import dataclasses
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from cdlm.data.config import PrepareConfig
from cdlm.data.prepare import prepare
from cdlm.train.config import TrainConfig
from cdlm.train.recipes import RECIPES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of a tiny grammar as bytes: enough for a loss to fall on."""
    draw = random.Random(0)
    subjects, verbs, objects = (
        ("the cat", "a dog", "my aunt", "the sea"),
        ("sees", "likes", "follows"),
        ("fish", "rain", "us"),
    )
    documents = [
        " ".join(f"{draw.choice(subjects)} {draw.choice(verbs)} {draw.choice(objects)}." for _ in range(30))
        for _ in range(60)
    ]
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(documents))
    config = PrepareConfig(
        (str(folder / "text.txt"),), folder / "tokens", packing="plain", seq_length=32, valid_documents=6
    )
    prepare(config)
    return folder / "tokens"


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path):
    """A tiny recipe on that corpus, with changes."""

    def make(name: str, **changes: object) -> TrainConfig:
        config = RECIPES[f"tiny-{name}"].config
        quick = {
            "steps": 12,
            "batch_size": 8,
            "seq_length": 32,
            "log_every": 4,
            "valid_every": 0,
            "save_every": 4,
            "valid_samples": 0,
        }
        base = {"init_from": changes.pop("init_from", None)} if config.init_from else {}
        settings = {"data": corpus, "out": tmp_path / name, **quick, **base, **changes}
        return dataclasses.replace(config, **settings)

    return make


def launch(config_path: Path, *flags: str, processes: int = 1, **popen: object) -> subprocess.Popen[str]:
    """`cdlm train CONFIG` in processes of its own."""
    start = [sys.executable, "-m"]
    if processes > 1:
        start += ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), "-m"]
    return subprocess.Popen(
        [*start, "cdlm", "train", str(config_path), *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **popen,
    )
