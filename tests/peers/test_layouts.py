"""The layouts of the public checkpoints, rebuilt small: the peers' own arithmetic, their samplers, and our evaluation.

Names, shapes and fields are those that the peers publish; weights are random. What a folder must predict is computed
here from its tensors, by a forward pass of its own that agrees with the outputs stored in `fixtures/peers`.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import cdlm
from cdlm.eval.config import EvalConfig
from cdlm.eval.datasets import Dataset
from cdlm.eval.sweep import evaluate
from cdlm.metrics.likelihood import repeated_nelbo
from cdlm.model import pretrained
from cdlm.model.pretrained import LayoutError
from cdlm.sample.timesteps import NEAR_ZERO

from ..eval.suites import QUIET
from ..writers import BYTES, write_model
from .layouts import HEADS, IDS, LAYOUTS, LENGTH, SDTT, Layout, peers_logits, weights, write_peer


def peers_law(layout: Layout, x: Tensor, t: float) -> Tensor:
    """What a peer makes of its logits: SUBS without a time under masking, a softmax over all ids at sigma(t) else."""
    sigma = 0.0 if layout.masks else -math.log(1 - (1 - 1e-3) * t)
    logits = peers_logits(weights(layout), HEADS, x, torch.full((len(x),), sigma))
    if not layout.masks:
        return logits.log_softmax(-1)
    law = logits[..., : IDS - 1].log_softmax(-1)
    carried = F.one_hot(x.clamp(max=IDS - 2), IDS - 1).double().log()
    return torch.where((x == IDS - 1)[..., None], law, carried)


def likeliest(layout: Layout, x: Tensor, t: float) -> Tensor:
    """By the peer's law; what stands for no token is not drawn."""
    return peers_law(layout, x, t)[..., : BYTES.vocab_size].argmax(-1)


def test_the_plain_forward_pass_gives_the_stored_logits(peers: Path) -> None:
    stored = {name: torch.from_numpy(value) for name, value in np.load(peers / "dit.npz").items()}
    tensors = load_file(peers / "mdlm-hf-tiny" / "model.safetensors")
    w = {name.removeprefix("backbone."): tensor for name, tensor in tensors.items()}
    for sigma, name in ((stored["sigma"], "logits"), (torch.zeros(2), "logits_sigma0")):
        assert torch.allclose(peers_logits(w, 4, stored["x_t"], sigma), stored[name].double(), atol=1e-5, rtol=0)


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS.keys())
def layout(request: pytest.FixtureRequest) -> Layout:
    return request.param


@pytest.fixture
def folder(layout: Layout, tmp_path: Path) -> Path:
    return write_peer(tmp_path / "peer", layout)


def test_its_law_is_the_peers(layout: Layout, folder: Path) -> None:
    net = cdlm.load(folder, "cpu", "float64", tokenizer="bytes").denoiser
    assert net.process is not None
    assert (net.process.name, net.process.states) == ("masked" if layout.masks else "uniform", IDS)
    x = torch.randint(0, IDS, (2, LENGTH))
    x[:, ::3] = IDS - 1
    for t in (0.2, 0.9):
        assert torch.allclose(net(x, t).exp(), peers_law(layout, x, t).exp(), atol=1e-6, rtol=0)
    told = float((peers_law(layout, x, 0.2).exp() - peers_law(layout, x, 0.9).exp()).abs().max())
    assert told == 0 if layout.masks else told > 1e-3


def test_it_writes_by_the_peers_law(layout: Layout, folder: Path) -> None:
    """Two steps with the likeliest tokens: the last is what the peer predicts at t = 1/2 for what the first left."""
    model = cdlm.load(folder, "cpu", tokenizer="bytes")
    start, left, last = (torch.tensor(frame.token_ids) for frame in model.stream(num_samples=8, steps=2, top_k=1))
    assert bool((start == IDS - 1).all()) == layout.masks
    assert torch.equal(last, likeliest(layout, left, 0.5))
    assert not torch.equal(last, left)
    assert layout.masks or not torch.equal(last, likeliest(layout, left, 1.0))


def test_it_samples_by_the_plug_in_posterior(layout: Layout, folder: Path) -> None:
    model = cdlm.load(folder, "cpu", tokenizer="bytes")
    texts = [text.token_ids for text in model.sample(8, steps=4)]
    assert max(map(max, texts)) < BYTES.vocab_size
    if layout.masks:
        with pytest.raises(ValueError, match="--posterior"):
            model.sample(posterior="mixture")
        return
    assert texts == [text.token_ids for text in model.sample(8, steps=4, posterior="plug-in")]
    assert texts != [text.token_ids for text in model.sample(8, steps=4, posterior="mixture")]
    frames = model.stream(num_samples=8, steps=4, final_step="argmax")
    *_, left, last = (torch.tensor(frame.token_ids) for frame in frames)
    assert torch.equal(last, likeliest(layout, left, NEAR_ZERO))  # DUO's greedy tail


def test_it_is_evaluated(layout: Layout, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = write_model(tmp_path / "judge", "causal", length=64)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n<|endoftext|>\n".join(f"a text, number {k}, of some length " for k in range(20)))
    asked = EvalConfig(
        models=(str(folder),),
        judge=(str(judge),),
        tasks=("unconditional", "likelihood"),
        texts=(f"some={texts}",),
        num_samples=4,
        steps=(2,),
        likelihood_samples=4,
        device="cpu",
        tokenizer=Path("bytes"),
        out=tmp_path / "out",
    )
    written, bound = evaluate(asked, QUIET)
    kind = "masked" if layout.masks else "uniform"
    assert {(row["process"], row["max_length"], row["num_samples"]) for row in (written, bound)} == {(kind, LENGTH, 4)}
    assert 1 < written["ppl"] < math.inf
    assert 0 < written["entropy"] < math.log(LENGTH) + 1e-9
    assert 0 < bound["nelbo"] < math.inf


def test_its_texts_are_framed_as_its_training_data_was(layout: Layout, folder: Path, tmp_path: Path) -> None:
    """MDLM, DUO and SDTT know blocks from BOS to EOS; the public UDLM was trained on padded sentences."""
    framed = layout.config.get("model_type") != "udlm"
    model = cdlm.load(folder, "cpu", tokenizer="bytes")
    assert model.bos_framed == framed
    assert cdlm.load(folder, "cpu", tokenizer="bytes", bos_framed=not framed).bos_framed != framed
    assert cdlm.load(model.save_pretrained(tmp_path / "copy"), "cpu").bos_framed == framed
    texts = tmp_path / "texts.txt"
    texts.write_text("\n<|endoftext|>\n".join(f"a text, number {k}, of some length " for k in range(20)))
    common = {"models": (str(folder),), "tasks": ("likelihood",), "texts": (f"some={texts}",), "num_samples": 4}
    common |= {"steps": (2,), "likelihood_samples": 4, "device": "cpu", "tokenizer": Path("bytes")}
    rows = [
        *evaluate(EvalConfig(**common, out=tmp_path / "out"), QUIET),
        *evaluate(EvalConfig(**common, out=tmp_path / "out", bos_framed=not framed), QUIET),
    ]
    dataset = Dataset("some", texts)
    for row, is_framed in zip(rows, (framed, not framed), strict=True):
        blocks = dataset.blocks(BYTES, LENGTH, is_framed, 4)
        assert bool((blocks[:, [0, -1]] == BYTES.eos).all()) == is_framed
        bound = repeated_nelbo(model.denoiser, blocks, 4, rows=32).mean()
        assert row["nelbo"] == pytest.approx(float(bound), rel=1e-6)
    assert len({row["key"] for row in rows}) == 2  # neither is taken for the other when a sweep goes on
    assert evaluate(EvalConfig(**common, out=tmp_path / "out"), QUIET)[0]["time"] == rows[0]["time"]


def test_it_is_saved_as_ours(layout: Layout, folder: Path, tmp_path: Path) -> None:
    one = cdlm.load(folder, "cpu", tokenizer="bytes")
    other = cdlm.load(one.save_pretrained(tmp_path / "copy"), "cpu")
    x = torch.randint(0, IDS, (2, LENGTH))
    x[:, ::3] = IDS - 1
    assert torch.equal(other.denoiser(x, 0.4), one.denoiser(x, 0.4))
    assert torch.allclose(other.denoiser(x, 0.4).exp().double(), peers_law(layout, x, 0.4).exp(), atol=1e-4)
    assert (other.max_length, other.posterior) == (LENGTH, "plug-in")
    assert [text.text for text in other.sample(2, steps=3)] == [text.text for text in one.sample(2, steps=3)]


def test_a_udlm_that_is_not_told_the_time(tmp_path: Path) -> None:
    net = pretrained.load_denoiser(write_peer(tmp_path / "peer", LAYOUTS["udlm"], time_conditioning=False))
    x = torch.randint(0, IDS, (1, LENGTH))
    assert torch.equal(net(x, 0.2), net(x, 0.9))


def test_a_class_guided_udlm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="guided by classes"):
        pretrained.load_denoiser(write_peer(tmp_path / "peer", LAYOUTS["udlm"], cfg=True))


def test_an_sdtt_without_its_width_is_named(tmp_path: Path) -> None:
    model = {name: value for name, value in SDTT["model"].items() if name != "hidden_size"}
    with pytest.raises(LayoutError, match=r"config.json lacks 'hidden_size'"):
        pretrained.load_denoiser(write_peer(tmp_path / "peer", LAYOUTS["sdtt"], model=model))
