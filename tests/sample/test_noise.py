"""A text belongs to (seed, index) and to nothing else: not to the batch in which it is drawn."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cdlm.model.denoiser import Denoiser
from cdlm.process import Process, masked, uniform, unigram
from cdlm.rng import Rng, categorical, seeded
from cdlm.sample import plan as passes
from cdlm.sample.ancestral import ancestral
from cdlm.sample.autoregressive import autoregressive
from cdlm.sample.confidence import confident
from cdlm.sample.corrector import Corrector
from cdlm.sample.logits import Shape
from cdlm.sample.naive import race
from cdlm.sample.order import first_hitting, ordered
from cdlm.sample.plan import Drawing
from cdlm.sample.timesteps import loop_times, uniform_times

from .truth import text, tiny

VOCAB, LENGTH = 7, 20
Sampler = Callable[[Denoiser, Process, Tensor, Rng, Drawing], Tensor]
GRID, SHORT = uniform_times(6), uniform_times(6, end=0.2)
UNIGRAM = unigram(torch.tensor([0.3, 0.1, 0.0, 0.2, 0.1, 0.1, 0.2]))

MASKED: dict[str, Sampler] = {
    "ancestral": lambda net, p, x, rng, how: text(ancestral(net, p, x, GRID, rng, how)),
    "with a tail": lambda net, p, x, rng, how: text(ancestral(net, p, x, SHORT, rng, how, tail="argmax")),
    "drawn tail": lambda net, p, x, rng, how: text(ancestral(net, p, x, SHORT, rng, how, tail="sample")),
    "remdm": lambda net, p, x, rng, how: text(
        ancestral(net, p, x, loop_times(10), rng, how, corrector=Corrector("rescale", 0.4))
    ),
    "dilated": lambda net, p, x, rng, how: text(ordered(net, p, x, GRID, rng, "dilated", how)),
    "bit-reversed": lambda net, p, x, rng, how: text(ordered(net, p, x, GRID, rng, "bit-reversed", how)),
    "first hitting": lambda net, p, x, rng, how: text(first_hitting(net, p, x, rng, drawing=how)),
    "probability": lambda net, p, x, rng, how: text(confident(net, p, x, GRID, rng, "probability", how)),
    "margin": lambda net, p, x, rng, how: text(confident(net, p, x, GRID, rng, "margin", how)),
    "entropy-bound": lambda net, p, x, rng, how: text(confident(net, p, x, GRID, rng, "entropy-bound", how, 1.0)),
    "race": lambda net, p, x, rng, how: text(race(net, p, x, GRID, rng, "naive-fp64")),
}
OTHER: dict[str, Sampler] = {
    "ancestral": MASKED["ancestral"],
    "with a tail": MASKED["with a tail"],
    "psi": lambda net, p, x, rng, how: text(ancestral(net, p, x, GRID, rng, how, corrector=Corrector("constant", 0.3))),
    "race": MASKED["race"],
}
CASES = [
    *(pytest.param(masked(VOCAB), sampler, id=f"masked, {name}") for name, sampler in MASKED.items()),
    *(pytest.param(uniform(VOCAB), sampler, id=f"uniform, {name}") for name, sampler in OTHER.items()),
    *(pytest.param(UNIGRAM, sampler, id=f"unigram, {name}") for name, sampler in OTHER.items()),
]


def texts(process: Process, sampler: Sampler, rows: Tensor, drawing: Drawing | None = None) -> Tensor:
    net = tiny(process, time_conditioning=process.name != "masked")
    rng = seeded(3, "texts", batch=32, rows=rows)
    return sampler(net, process, process.start(LENGTH, rng("start")), rng, drawing or Drawing())


@pytest.mark.parametrize(("process", "sampler"), CASES)
def test_a_text_does_not_depend_on_its_batch(process: Process, sampler: Sampler) -> None:
    """Alone, among seven in any order, or among 32."""
    all_of_them = texts(process, sampler, torch.arange(32))
    assert len(all_of_them.unique(dim=0)) > 16
    for rows in ([0], [13], [31], [5, 31, 0, 17, 2, 3, 8]):
        assert torch.equal(texts(process, sampler, torch.tensor(rows)), all_of_them[rows])


@pytest.mark.parametrize(("process", "sampler"), [case for case in CASES if "race" not in case.id])
def test_running_the_whole_batch_changes_no_text(
    process: Process, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a compiled network, but without the compiler."""
    monkeypatch.setattr(passes, "_compiled_categorical", lambda: categorical)
    rows = torch.arange(9)
    whole = texts(process, sampler, rows, Drawing(Shape(0.8, 5), compiled=True))
    assert torch.equal(whole, texts(process, sampler, rows, Drawing(Shape(0.8, 5))))


@pytest.mark.parametrize("sampler", MASKED.values(), ids=MASKED)
def test_a_text_does_not_depend_on_the_blanks_of_others(sampler: Sampler) -> None:
    """Fully masked texts next to halves of texts, and alone."""
    process = masked(VOCAB)
    net, x = tiny(process), torch.full((8, LENGTH), VOCAB)
    x[1::2, :6] = torch.arange(6)
    together = sampler(net, process, x, seeded(0, batch=8), Drawing())
    assert bool((together[1::2, :6] == torch.arange(6)).all())
    for row in (0, 1, 6):
        alone = sampler(net, process, x[row][None], seeded(0, batch=8, rows=torch.tensor([row])), Drawing())
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("naive", [False, True])
@pytest.mark.parametrize("prompt", [1, 3])
def test_an_autoregressive_text_does_not_depend_on_its_batch(prompt: int, naive: bool) -> None:
    net = tiny(None, VOCAB)
    prompts = seeded(1, "prompts", batch=32).integers(prompt, VOCAB)

    def drawn(rows: list[int]) -> Tensor:
        rng = seeded(3, "texts", batch=32, rows=torch.tensor(rows))
        return text(autoregressive(net, prompts[rows], LENGTH, rng, naive=naive))

    everything = drawn(list(range(32)))
    for rows in ([0], [31], [5, 31, 0, 17, 2, 3, 8]):
        assert torch.equal(drawn(rows), everything[rows])


def test_another_seed_draws_another_text() -> None:
    for process, samplers in ((masked(VOCAB), MASKED), (uniform(VOCAB), OTHER)):
        net, x = tiny(process), process.start(LENGTH, seeded(0, batch=4))
        for sampler in samplers.values():
            first, second = (sampler(net, process, x, seeded(seed, batch=4), Drawing()) for seed in (1, 2))
            assert not torch.equal(first, second)
