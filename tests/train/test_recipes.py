"""The recipes of the zoo fit what they promise, and a learning rate that cools down ends at nearly nothing."""

import dataclasses
from pathlib import Path

import pytest
import torch
from rich.console import Console

import cdlm
from benchmarks.cost import estimate
from cdlm.data.config import PrepareConfig
from cdlm.data.prepare import prepare
from cdlm.methods import METHODS
from cdlm.model.denoiser import Denoiser
from cdlm.model.pretrained import load_denoiser, save_denoiser
from cdlm.process import masked
from cdlm.train.config import TrainConfig
from cdlm.train.loop import train
from cdlm.train.optim import learning_rate
from cdlm.train.recipes import CAUSAL, RECIPES, SLUGS, TIME_CONDITIONED

ZOO = [name for name in RECIPES if name.startswith("zoo-")]


def test_recipes_know_the_table_of_methods() -> None:
    """Recipes are listed without torch, so they repeat what they need of the table."""
    assert tuple(METHODS) == SLUGS
    assert tuple(slug for slug, method in METHODS.items() if method.process == "none") == CAUSAL
    assert tuple(slug for slug, method in METHODS.items() if method.time_conditioning) == TIME_CONDITIONED


def test_the_zoo_has_a_pair_that_differs_in_the_objective_of_its_end_alone() -> None:
    assert ZOO == ["zoo-base", "zoo-mdlm", "zoo-mcdlm-guided"]
    base, one, other = (RECIPES[name].config for name in ZOO)
    assert dataclasses.replace(one, method=other.method, out=other.out) == other
    assert one.init_from == other.init_from == base.out
    assert (base.steps + one.steps) * one.batch_size * one.seq_length > 1_000_000_000
    assert other.method == RECIPES["small-mcdlm-guided"].config.method


@pytest.mark.parametrize("name", ZOO)
def test_parameters_and_bytes_by_hand(name: str, tmp_path: Path) -> None:
    """18M parameters with embeddings, 36 MB, in files under 16 MB."""
    vocab, d, blocks, cond, length = 8192, 384, 8, 16, 256
    block = 12 * d * d + 5 * d + 2 * d + 6 * d * (cond + 1)
    ends = (vocab + 1) * d + length * d + d + 2 * d * (cond + 1) + vocab
    level = 256 * cond + cond + cond * cond + cond
    config = RECIPES[name].config
    net = Denoiser(config.network, masked(vocab))
    assert net.count() == blocks * block + ends + level == 17_761_056
    assert net.count() <= 18_000_000
    assert estimate(config, vocab=vocab).parameters == net.count()
    folder = save_denoiser(net, tmp_path / name, torch.bfloat16, part=15_000_000)
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(sizes) == 3
    assert max(sizes) < 16_000_000
    assert sum(sizes) < 36_000_000
    assert load_denoiser(folder).count() == net.count()


def test_the_learning_rate_rises_holds_and_falls() -> None:
    config = TrainConfig(steps=100, learning_rate=2.0, warmup_ratio=0.1, cooldown_ratio=0.4)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (k + 1) for k in range(10)])
    assert rates[9:61] == pytest.approx([2.0] * 52)
    assert rates[61:] == pytest.approx([2.0 * (39 - k) / 40 for k in range(39)])
    held = dataclasses.replace(config, cooldown_ratio=0.0)
    assert [learning_rate(held, step) for step in range(10, 100)] == [2.0] * 90
    with pytest.raises(ValueError, match="--cooldown-ratio is a fraction of the run"):
        dataclasses.replace(config, cooldown_ratio=1.5)


def test_a_zoo_run_in_the_small(tmp_path: Path) -> None:
    """Sentences, learned positions, tied embeddings and a cool-down together: it trains, and writes what begins."""
    text = "\n<|endoftext|>\n".join(" ".join(f"The cat sees {n} dogs." for n in range(k, k + 30)) for k in range(40))
    (tmp_path / "text.txt").write_text(text)
    prepare(
        PrepareConfig(
            (str(tmp_path / "text.txt"),), tmp_path / "data", train_vocab_size=300, packing="sentences", seq_length=32
        ),
        Console(quiet=True),
    )
    runs = []
    for name in ("zoo-base", "zoo-mcdlm-guided"):
        config = RECIPES[name].config
        network = dataclasses.replace(config.network, hidden_size=32, num_layers=2, num_heads=2, position_embeddings=32)
        quick = {
            "batch_size": 16,
            "seq_length": 32,
            "device": "cpu",
            "dtype": "float32",
            "compile": False,
            "learning_rate": 1e-2,
        }
        start = runs[-1].out if runs else None
        place = {"data": tmp_path / "data", "out": tmp_path / name, "init_from": start}
        runs.append(dataclasses.replace(config, **place, **quick, network=network, steps=30, valid_samples=1))
        train(runs[-1])
    run = runs[-1]
    model = cdlm.load(run.out, "cpu")
    assert model.bos_framed
    assert model.denoiser.config.tie_embeddings
    written = model.sample(num_samples=4, steps=32, seed=0)
    assert sum(text.token_ids[0] == model.tokenizer.bos for text in written) >= 3
