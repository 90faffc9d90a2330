"""A prior that mixes the mask with tokens: what a mask makes possible, and what only absorbing noise does."""

from pathlib import Path

import pytest
import torch

import cdlm
from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.model.pretrained import save_denoiser
from cdlm.process import Process, masked, unigram
from cdlm.process.process import bridge_law, transition
from cdlm.rng import seeded
from cdlm.sample.draw import last, unconditional_log_probs
from cdlm.sample.generate import generate
from cdlm.sample.settings import resolve
from cdlm.studio.app import model_card
from cdlm.text.pipeline import Pipeline
from cdlm.types import wide

from ..writers import BYTES

V = BYTES.vocab_size


def mixed(vocab: int) -> Process:
    """Three times out of five the mask, else a uniform token."""
    return unigram(torch.cat([torch.full((vocab,), 0.4 / vocab), torch.tensor([0.6])]), vocab)


@pytest.fixture
def model(tmp_path: Path) -> Pipeline:
    torch.manual_seed(1)
    denoiser = Denoiser(NetworkConfig(16, 2, 2, 8, 0.0, time_conditioning=True), mixed(V))
    for parameter in denoiser.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    save_denoiser(denoiser, tmp_path / "mixed")
    BYTES.save(tmp_path / "mixed")
    return cdlm.load(tmp_path / "mixed", "cpu", "float64")


def test_its_capabilities() -> None:
    process = mixed(V)
    assert (process.has_mask, process.absorbing, process.flat, process.full) == (True, False, False, True)
    process = masked(V)
    assert (process.has_mask, process.absorbing, process.flat, process.full) == (True, True, False, False)


def test_it_samples_infills_and_rewrites_with_guidance(model: Pipeline) -> None:
    texts = model.sample(2, max_length=16, steps=4, guidance=0.5)
    assert all(max(text.token_ids) < V for text in texts)
    filled = model.infill("a ___ b", steps=4, guidance=0.5)[0].text
    assert filled.startswith("a ")
    assert filled.endswith(" b")
    assert max(model.rewrite("some words", steps=4, guidance=0.5)[0].token_ids) < V


def test_guidance_divides_by_the_prediction_for_a_fully_masked_text(model: Pipeline) -> None:
    """One hop to t = 0 takes every token from f^(1 + g) / b^g; counted against that very distribution."""
    process, n = model.denoiser.process, 4000
    assert process is not None
    x = torch.full((1, 2), V)
    law = model.denoiser(x, 1.0)[0, 0].double()
    blank = unconditional_log_probs(model.denoiser, process, x).double()
    assert torch.allclose(blank, law.log_softmax(-1), atol=1e-6)  # here the text itself is fully masked
    x = torch.tensor([[V, 65]])
    law = model.denoiser(x, 1.0)[0].double()
    guided = (law + 1.0 * (law - blank)).softmax(-1)
    q_s, q_ts = transition(process, 0.0, 0.0), transition(process, 0.0, 1.0)
    clean = torch.nn.functional.pad(guided, (0, 1))
    truth = bridge_law(clean, x[0], q_s, q_ts)
    drawn = last(
        generate(model.denoiser, process, x.expand(n, -1), resolve({"steps": 1, "guidance": 1.0}), seeded(0, batch=n))
    ).x
    for place in range(2):
        counts = torch.bincount(drawn[:, place], minlength=V + 1).to(wide("cpu")) / n
        floor = float((truth[place] * (1 - truth[place]) / n).sqrt().sum()) / 2
        assert float((counts - truth[place]).abs().sum()) / 2 < 2 * floor


def test_an_order_of_unmasking_needs_absorbing_noise(model: Pipeline) -> None:
    with pytest.raises(ValueError, match="--order dilated"):
        model.sample(1, max_length=16, steps=4, order="dilated")


def test_the_studio_offers_guidance_and_no_order(model: Pipeline) -> None:
    found = model_card("mixed", model)
    assert (found.has_mask, found.absorbing) == (True, False)
