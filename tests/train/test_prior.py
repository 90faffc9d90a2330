"""The option `--prior`: the processes that it makes, what it refuses, and runs that train, resume and start with it."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import cdlm
from cdlm.cli.main import cli
from cdlm.data.tokens import TokenError, open_tokens
from cdlm.methods import METHODS
from cdlm.process.noise import SCHEDULES, Cosine
from cdlm.train import loop
from cdlm.train.config import TrainConfig, parse_prior
from cdlm.train.loop import check, train
from cdlm.train.prior import make_process, mixed

from .test_resume import assert_same_bits
from .test_tied import stopped_at

BYTES = 257


def smoothed_frequencies(corpus: Path) -> list[float]:
    """Counted from the file itself, one added to every token."""
    counts = Counter(np.fromfile(corpus / "train.bin", "<u2").tolist())
    total = sum(counts.values()) + BYTES
    return [(counts[token] + 1) / total for token in range(BYTES)]


@pytest.mark.parametrize(
    "prior", ["", "mask", "unigrams", "mixed", "mixed:", "mixed:0", "mixed:1", "mixed:nan", "mixed:x"]
)
def test_unknown_priors_are_refused(prior: str) -> None:
    with pytest.raises(ValueError, match="--prior must be auto, masked, uniform, unigram or mixed:M") as error:
        TrainConfig(prior=prior)
    assert f"(got {prior!r})" in str(error.value)


def test_the_probability_of_the_mask_is_read() -> None:
    assert parse_prior("mixed:0.8") == ("mixed", 0.8)
    assert parse_prior("unigram") == ("unigram", 0.0)


@pytest.mark.parametrize("name", METHODS)
def test_auto_is_the_process_of_the_method(name: str) -> None:
    method = METHODS[name]
    process, default = make_process(TrainConfig(name), method, 7), method.default_process(7)
    if default is None:
        assert process is None
    else:
        assert process is not None
        assert torch.equal(process.prior, default.prior)
        assert process.noise == default.noise


def test_every_kind_has_its_prior(recipe, corpus: Path) -> None:
    method = METHODS["udlm"]
    found = {
        prior: make_process(recipe("udlm", prior=prior, noise_schedule="cosine"), method, BYTES).prior.tolist()
        for prior in ("masked", "uniform", "unigram", "mixed:0.8")
    }
    assert found["masked"] == [0.0] * BYTES + [1.0]
    assert found["uniform"] == pytest.approx([1 / BYTES] * BYTES)
    assert found["unigram"] == pytest.approx(smoothed_frequencies(corpus), rel=1e-12)
    assert min(found["unigram"]) > 0
    assert found["mixed:0.8"] == pytest.approx([0.2 / BYTES] * BYTES + [0.8])


def test_a_noise_schedule_is_chosen_on_the_command_line(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"train tiny-mcdlm --data {corpus} --out {tmp_path / 'run'} --device cpu"
    quick = "--steps 1 --batch-size 2 --seq-length 32 --valid-samples 0 --valid-batches 1"
    cli(f"{command} {quick} --noise-schedule cosine".split())
    assert "noise schedule: cosine" in capsys.readouterr().out
    pipe = cdlm.load(tmp_path / "run", "cpu")
    assert pipe.denoiser.process is not None
    assert pipe.denoiser.process.noise == Cosine()
    assert pipe.sample(steps=2)[0].nfe == 2

    with pytest.raises(ValueError, match=r"--noise-schedule must be one of log-linear, cosine \(got 'linear'\)"):
        cli(f"{command} --noise-schedule linear".split())
    with pytest.raises(SystemExit):
        cli(["train", "tiny-mcdlm", "--help"])
    assert f"Noise schedule alpha(t): {', '.join(SCHEDULES)}" in " ".join(
        capsys.readouterr().out.replace("│", " ").split()
    )


def test_tokens_outside_the_vocabulary_are_not_counted(corpus: Path) -> None:
    tokens = open_tokens(corpus)
    meta = dataclasses.replace(tokens.meta, vocab=100)
    with pytest.raises(TokenError, match=r"outside the vocabulary of 100"):
        dataclasses.replace(tokens, meta=meta).token_counts()


@pytest.mark.parametrize(
    ("name", "prior", "message"),
    [
        ("mdlm", "uniform", "MDLM needs a masked process"),
        ("mdlm", "unigram", "MDLM needs a masked process"),
        ("mdlm", "mixed:0.5", "MDLM needs a masked process"),
        ("udlm", "masked", "UDLM needs a process without absorbing mask"),
        ("duo", "unigram", "DUO needs the uniform process"),
        ("duo", "mixed:0.5", "DUO needs the uniform process"),
        ("mcdlm-guided", "uniform", "MCDLM-guided needs a process with a mask"),
        ("ar", "masked", "AR needs no process"),
    ],
)
def test_a_prior_that_does_not_fit_is_refused_before_data_is_read(name: str, prior: str, message: str, recipe) -> None:
    with pytest.raises(ValueError, match=message):
        check(recipe(name, prior=prior, data=Path("nowhere")))


def test_naming_the_default_prior_changes_nothing(recipe, tmp_path: Path) -> None:
    auto = train(recipe("udlm", out=tmp_path / "auto"))
    named = train(recipe("udlm", out=tmp_path / "named", prior="uniform"))
    assert_same_bits_but_config(auto, named)


def assert_same_bits_but_config(one: Path, other: Path) -> None:
    for part in ("model", "online", "optimizer"):
        a, b = load_file(one / f"{part}.safetensors"), load_file(other / f"{part}.safetensors")
        assert a.keys() == b.keys()
        assert all(a[name].equal(b[name]) for name in a)


@pytest.mark.parametrize("prior", ["unigram", "mixed:0.8"])
def test_a_resumed_run_ends_with_the_same_bits(
    prior: str, recipe, corpus: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    config = recipe("ucdlm", prior=prior, valid_every=6, valid_samples=1, valid_sample_steps=4)
    whole = train(dataclasses.replace(config, out=tmp_path / "whole"))
    assert f"prior: {prior}" in capsys.readouterr().out
    stopped_at(6, config, monkeypatch)
    last = train(config, "auto")
    assert_same_bits(whole, last)
    saved = load_file(last / "model.safetensors")["prior"]
    expected = smoothed_frequencies(corpus) if prior == "unigram" else mixed(BYTES, 0.8).prior.tolist()
    assert saved.tolist() == pytest.approx(expected, rel=1e-12)
    assert json.loads((config.out / "run.json").read_text())["prior"] == prior
    model = cdlm.load(config.out, "cpu", "float32")
    assert torch.equal(model.denoiser.process.prior, saved)
    (sample,) = model.sample(steps=4)
    assert len(sample.token_ids) == config.seq_length
    assert max(sample.token_ids) < BYTES


def test_another_prior_is_another_run(recipe) -> None:
    config = recipe("udlm")
    train(config)
    changed = dataclasses.replace(config, prior="unigram", steps=16)
    with pytest.raises(ValueError, match="prior: auto -> unigram"):
        train(changed, "auto")
    with pytest.raises(ValueError, match="is of another network"):
        train(changed, "force")


def test_a_resumed_run_keeps_the_prior_of_its_checkpoint(recipe, corpus: Path) -> None:
    """Even if it is forced to go on with other data."""
    config = recipe("udlm", prior="unigram", steps=4)
    last = loop.checkpoint.read(train(config))
    last.tensors["model"]["prior"] = torch.arange(1, BYTES + 1).double() / sum(range(BYTES + 1))
    network, *_ = loop.build(config, BYTES, torch.device("cpu"), last)
    assert torch.equal(network.process.prior, last.tensors["model"]["prior"])


def test_a_model_with_another_prior_is_not_started_from(recipe) -> None:
    base = train(recipe("udlm", prior="mixed:0.8"))
    with pytest.raises(ValueError, match=r"its prior is not that of --prior mixed:0\.5"):
        train(recipe("ucdlm", prior="mixed:0.5", init_from=base))
    assert train(dataclasses.replace(recipe("ucdlm", prior="mixed:0.8"), init_from=base)).is_dir()
