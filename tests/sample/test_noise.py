"""A text belongs to (seed, index) and to nothing else: not to the batch in which it is drawn."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from cdlm.model.denoiser import Denoiser
from cdlm.process import Process, masked, uniform, unigram
from cdlm.rng import Rng, categorical, seeded
from cdlm.sample import draw
from cdlm.sample.generate import generate
from cdlm.sample.naive import naive_ancestral
from cdlm.sample.settings import resolve
from cdlm.sample.timesteps import uniform_times

from .truth import along, text, tiny

VOCAB, LENGTH = 7, 20
Chosen = dict[str, Any]
UNIGRAM = unigram(torch.tensor([0.3, 0.1, 0.0, 0.2, 0.1, 0.1, 0.2]))

MASKED: dict[str, Chosen] = {
    "ancestral": {"steps": 6},
    "greedy final step": {"steps": 6, "final_step": "argmax"},
    "sampled final step": {"steps": 6, "final_step": "sample"},
    "equal steps": {"steps": 6, "step_size": "equal"},
    "remdm": {"steps": 10, "corrector": "loop", "eta": 0.4},
    "dilated": {"steps": 6, "order": "dilated"},
    "bit-reversed": {"steps": 6, "order": "bit-reversed"},
    "first hitting": {"order": "first-hitting"},
    "probability": {"steps": 6, "order": "probability"},
    "margin": {"steps": 6, "order": "margin"},
    "entropy-bound": {"steps": 6, "order": "entropy-bound", "entropy_bound": 1.0},
    "plain": {"steps": 6, "sampler": "plain"},
    "race": {"steps": 6, "precision": "naive-fp32"},
}
OTHER: dict[str, Chosen] = {
    "ancestral": MASKED["ancestral"],
    "greedy final step": MASKED["greedy final step"],
    "psi": {"steps": 6, "corrector": "constant", "eta": 0.3},
    "plain": MASKED["plain"],
    "race": MASKED["race"],
}
CASES = [
    *(pytest.param(masked(VOCAB), chosen, id=f"masked, {name}") for name, chosen in MASKED.items()),
    *(pytest.param(uniform(VOCAB), chosen, id=f"uniform, {name}") for name, chosen in OTHER.items()),
    *(pytest.param(UNIGRAM, chosen, id=f"unigram, {name}") for name, chosen in OTHER.items()),
]


def sampled(net: Denoiser, process: Process, x: Tensor, rng: Rng, chosen: Chosen, compiled: bool = False) -> Tensor:
    """The samples that the settings choose. A race takes place in double precision, whose draws do not depend on the
    last bits of a network; before a final step, the steps end where it still has work to do."""
    settings = resolve(chosen, process)
    if settings.sampler == "naive":
        return text(naive_ancestral(net, process, x, settings, rng, dtype=torch.float64))
    with along(uniform_times(6, end=0.2)) if settings.final_step != "none" else contextlib.nullcontext():
        return text(generate(net, process, x, settings, rng, compiled=compiled))


def texts(process: Process, chosen: Chosen, rows: Tensor, compiled: bool = False) -> Tensor:
    net = tiny(process, time_conditioning=process.name != "masked")
    rng = seeded(3, "texts", batch=32, rows=rows)
    return sampled(net, process, process.start(LENGTH, rng("start")), rng, chosen, compiled)


@pytest.mark.parametrize(("process", "chosen"), CASES)
def test_a_text_does_not_depend_on_its_batch(process: Process, chosen: Chosen) -> None:
    """Alone, among seven in any order, or among 32."""
    all_of_them = texts(process, chosen, torch.arange(32))
    assert len(all_of_them.unique(dim=0)) > 16
    for rows in ([0], [13], [31], [5, 31, 0, 17, 2, 3, 8]):
        assert torch.equal(texts(process, chosen, torch.tensor(rows)), all_of_them[rows])


@pytest.mark.parametrize(
    ("process", "chosen"), [case for case in CASES if "race" not in case.id and "plain" not in case.id]
)
def test_running_the_whole_batch_changes_no_text(
    process: Process, chosen: Chosen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a compiled network, but without the compiler."""
    monkeypatch.setattr(draw, "_compiled_categorical", lambda: categorical)
    rows = torch.arange(9)
    shaped = {**chosen, "temperature": 0.8, "top_k": 5}
    assert torch.equal(texts(process, shaped, rows, compiled=True), texts(process, shaped, rows))


@pytest.mark.parametrize("chosen", MASKED.values(), ids=MASKED)
def test_a_text_does_not_depend_on_the_blanks_of_others(chosen: Chosen) -> None:
    """Fully masked texts next to halves of texts, and alone."""
    process = masked(VOCAB)
    net, x = tiny(process), torch.full((8, LENGTH), VOCAB)
    x[1::2, :6] = torch.arange(6)
    together = sampled(net, process, x, seeded(0, batch=8), chosen)
    assert bool((together[1::2, :6] == torch.arange(6)).all())
    for row in (0, 1, 6):
        alone = sampled(net, process, x[row][None], seeded(0, batch=8, rows=torch.tensor([row])), chosen)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("precision", ["fp64", "naive-fp32"])
@pytest.mark.parametrize("prompt", [1, 3])
def test_an_autoregressive_text_does_not_depend_on_its_batch(prompt: int, precision: str) -> None:
    net = tiny(None, VOCAB)
    prompts = torch.nn.functional.pad(seeded(1, "prompts", batch=32).integers(prompt, VOCAB), (0, LENGTH - prompt))
    given = (torch.arange(LENGTH) < prompt).expand(32, -1)
    settings = resolve({"precision": precision}, None)

    def drawn(rows: list[int]) -> Tensor:
        rng = seeded(3, "texts", batch=32, rows=torch.tensor(rows))
        return text(generate(net, None, prompts[rows], settings, rng, given=given[rows]))

    everything = drawn(list(range(32)))
    for rows in ([0], [31], [5, 31, 0, 17, 2, 3, 8]):
        assert torch.equal(drawn(rows), everything[rows])


def test_another_seed_draws_another_text() -> None:
    for process, samplers in ((masked(VOCAB), MASKED), (uniform(VOCAB), OTHER)):
        net, x = tiny(process), process.start(LENGTH, seeded(0, batch=4))
        for chosen in samplers.values():
            first, second = (sampled(net, process, x, seeded(seed, batch=4), chosen) for seed in (1, 2))
            assert not torch.equal(first, second)
