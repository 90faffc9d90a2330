"""One seed, one result: across batches, resumes and processes, to the last bit where floating point allows it.

Elsewhere: texts of any sampler and batch (tests/text/test_pipeline.py), noise of rows alone (tests/test_rng.py),
batches of data (tests/data/test_tokens.py), resumed weights (tests/train/test_resume.py), two processes in float32
(tests/train/test_parallel.py), one seed one evaluation (tests/eval/test_sweep.py).
"""

import dataclasses
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import cdlm
from cdlm.train import checkpoint, loop
from cdlm.train.config import TrainConfig, to_json
from cdlm.train.loop import train

from .conftest import Child, command


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run for each method, made once."""
    from cdlm.train.recipes import RECIPES

    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            config = RECIPES[f"tiny-{name}"].config
            network = dataclasses.replace(config.network, hidden_size=16, num_layers=2, num_heads=2, cond_dim=8)
            out = tmp_path_factory.mktemp(name) / "run"
            quick = {
                "steps": 20,
                "batch_size": 8,
                "seq_length": 16,
                "valid_samples": 0,
                "valid_batches": 1,
                "dtype": "float32",
            }
            train(dataclasses.replace(config, data=corpus, out=out, network=network, device="cpu", **quick))
            made[name] = out
        return made[name]

    return make


@pytest.mark.parametrize("name", ["mdlm", "udlm", "ar"])
def test_a_trained_model_writes_the_same_in_any_batch(name: str, trained, tried) -> None:
    """In float64: seven texts, in batches of 1, 2, 3 and 7, and the third alone."""
    model = cdlm.load(str(trained(name)), "cpu", "float64")
    how = {} if name == "ar" else {"steps": 5}
    texts = [text.token_ids for text in model.sample(num_samples=7, seed=3, batch_size=7, **how)]
    for batch in (1, 2, 3):
        assert [text.token_ids for text in model.sample(num_samples=7, seed=3, batch_size=batch, **how)] == texts
    assert [text.token_ids for text in model.sample(num_samples=3, seed=3, batch_size=32, **how)] == texts[:3]
    assert texts != [text.token_ids for text in model.sample(num_samples=7, seed=4, batch_size=7, **how)]
    tried(f"other batch sizes ({name}, float64)", 4, "the same texts")


def test_a_run_that_was_resumed_writes_the_same(recipe, tmp_path: Path, monkeypatch, tried) -> None:
    whole = train(recipe(out=tmp_path / "whole"))
    config, real = recipe(), loop.train_step
    for stop in (1, 3, 5):

        def breaks(state, batches, step, stop=stop):
            if step == stop:
                raise RuntimeError("the machine dies")
            return real(state, batches, step)

        monkeypatch.setattr(loop, "train_step", breaks)
        with pytest.raises(RuntimeError, match="dies"):
            train(config, "auto")
    monkeypatch.setattr(loop, "train_step", real)
    texts = [
        [text.text for text in cdlm.load(str(path), "cpu", "float32").sample(num_samples=3, steps=4, seed=1)]
        for path in (whole, train(config, "auto"))
    ]
    assert texts[0] == texts[1]
    tried("three resumes", 3, "the same texts")


def in_two(config: TrainConfig, path: Path) -> Path:
    """The run in two processes of this machine."""
    path.write_text(json.dumps(to_json(dataclasses.replace(config, parallel="ddp"))))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])

    def work(rank: int) -> Callable[[], None]:
        def run() -> None:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
            command("train", path)()

        return run

    for end in [child.end() for child in [Child(work(rank)) for rank in (0, 1)]]:
        assert end.status == 0, end.text
    return checkpoint.latest(config.out)


@pytest.mark.parametrize("name", ["mcdlm", "udlm"])
def test_one_process_or_two_write_the_same(name: str, recipe, tmp_path: Path, tried) -> None:
    """In float64 the weights agree to 1e-9: sums are added in another order. The texts are the same."""
    alone = train(recipe(name, out=tmp_path / "alone", dtype="float64"))
    both = in_two(recipe(name, out=tmp_path / "both", dtype="float64"), tmp_path / "two.json")
    a, b = (checkpoint.read(path).tensors["online"] for path in (alone, both))
    assert all(torch.allclose(a[key], b[key], rtol=0, atol=1e-9) for key in a)
    texts = [
        [text.token_ids for text in cdlm.load(str(path), "cpu", "float64").sample(num_samples=4, steps=4, seed=1)]
        for path in (alone, both)
    ]
    assert texts[0] == texts[1]
    tried(f"one process or two ({name}, float64)", 1, "weights to 1e-9, the same texts")


def test_the_same_run_twice_has_the_same_bits(recipe, tmp_path: Path, tried) -> None:
    """Also where the global generators of torch and Python stand elsewhere."""
    runs = []
    for number in range(2):
        torch.manual_seed(number)
        torch.rand(number)
        runs.append(train(recipe("udlm", out=tmp_path / str(number))))
    for part in ("model", "online", "optimizer"):
        assert (runs[0] / f"{part}.safetensors").read_bytes() == (runs[1] / f"{part}.safetensors").read_bytes()
    tried("the same run twice", 2, "the same bytes")
