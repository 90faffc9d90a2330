"""Logits processors: each against its formula in numpy, one row after the other, and the order in which they act."""

import numpy as np
import pytest
import torch
from torch import Tensor

from cdlm.sample.draw import Draw
from cdlm.sample.logits import LogitsRows, ban, guide, keep_top_k, keep_top_p, logits_processors, temper
from cdlm.sample.settings import resolve

VOCAB, N = 9, 40
RANDOM = np.random.default_rng(0)
LOGITS = 2 * RANDOM.normal(size=(N, VOCAB)) + 1
TIMES = RANDOM.uniform(size=N)
UNCONDITIONAL = np.log(RANDOM.dirichlet(np.ones(VOCAB)))
ROWS = LogitsRows(torch.tensor(TIMES), torch.zeros(4, 10, dtype=torch.long), torch.arange(N))


def probs(logits: Tensor) -> np.ndarray:
    return logits.softmax(-1).numpy()


def normalised(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum(-1, keepdims=True)


def given(logits: np.ndarray = LOGITS) -> Tensor:
    return torch.tensor(logits)


@pytest.mark.parametrize("guidance", [0.3, 1.0, 2.5])
def test_guidance_is_a_power_of_the_prediction_over_one_of_the_unconditional(guidance: float) -> None:
    """f^(1 + g) / b^g: 1 + g is the scale of classifier-free guidance."""
    f, b = normalised(np.exp(LOGITS)), np.exp(UNCONDITIONAL)
    found = guide(given(), ROWS, guidance=guidance, unconditional=torch.tensor(UNCONDITIONAL))
    assert np.allclose(probs(found), normalised(f ** (1 + guidance) / b**guidance), atol=1e-12)


def test_guidance_leaves_the_unconditional_prediction_alone() -> None:
    """And scales the log-ratio of everything else to it by 1 + g."""
    b = torch.tensor(UNCONDITIONAL)
    found = guide(b[None], ROWS, guidance=2.0, unconditional=b)
    assert torch.allclose(found.softmax(-1), b.exp()[None])
    before = given() - b
    after = guide(given(), ROWS, guidance=2.0, unconditional=b) - b
    assert torch.allclose(after.var(-1), 9 * before.var(-1))


@pytest.mark.parametrize("temperature", [0.3, 0.9, 2.0])
def test_temperature_is_a_power(temperature: float) -> None:
    assert np.allclose(
        probs(temper(given(), ROWS, start=temperature)), normalised(np.exp(LOGITS) ** (1 / temperature)), atol=1e-12
    )


def test_temperature_moves_linearly_in_t() -> None:
    heat = 0.4 + (1.2 - 0.4) * TIMES
    found = temper(given(), ROWS, start=1.2, end=0.4)
    assert np.allclose(probs(found), normalised(np.exp(LOGITS / heat[:, None])), atol=1e-12)
    ends = LogitsRows(torch.tensor([1.0, 0.0]), ROWS.x, torch.arange(2))
    assert torch.allclose(temper(given()[:2], ends, start=1.2, end=0.4), given()[:2] / torch.tensor([[1.2], [0.4]]))


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_top_k_keeps_the_k_most_probable(k: int) -> None:
    found = keep_top_k(given(), ROWS, k=k).numpy()
    for row, kept in zip(LOGITS, found, strict=True):
        best = np.argsort(row)[-k:]
        assert set(np.flatnonzero(np.isfinite(kept))) == set(best)
        assert np.array_equal(kept[best], row[best])


@pytest.mark.parametrize("among", [1024, 2])
@pytest.mark.parametrize("p", [1e-9, 0.3, 0.7, 0.95, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p: float, among: int) -> None:
    """Also where the set is larger than the number of tokens that it is first sought among."""
    found = keep_top_p(given(), ROWS, p=p, among=among).numpy()
    for row, kept in zip(LOGITS, found, strict=True):
        law = normalised(np.exp(row))
        best = np.argsort(-law)
        size = 1 + int(np.searchsorted(np.cumsum(law[best]), p))
        assert set(np.flatnonzero(np.isfinite(kept))) == set(best[:size])
        assert np.array_equal(kept[best[:size]], row[best[:size]])


def test_banned_tokens_have_no_probability_and_the_others_keep_their_ratio() -> None:
    weights = np.exp(LOGITS)
    weights[:, [2, 5]] = 0
    assert np.allclose(probs(ban(given(), ROWS, tokens=(2, 5))), normalised(weights), atol=1e-12)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0}])
def test_nothing_is_done_where_nothing_is_asked_for(settings: dict) -> None:
    assert logits_processors(resolve(settings)) == ()


@pytest.mark.parametrize("settings", [{"top_k": VOCAB}, {"top_k": 100}])
def test_a_top_k_of_the_whole_vocabulary_changes_nothing(settings: dict) -> None:
    assert torch.equal(Draw(logits_processors(resolve(settings))).process(given(), ROWS), given())


def test_processors_act_in_order() -> None:
    """Guidance, banned tokens, those of the caller, temperature, top-k, top-p: all steps in numpy."""
    seen: list[Tensor] = []

    def halve_the_first(logits: Tensor, rows: LogitsRows) -> Tensor:
        seen.append(logits)
        assert rows is ROWS
        return torch.cat([logits[:, :1] - np.log(2), logits[:, 1:]], -1)

    settings = resolve({"guidance": 0.5, "temperature": 0.7, "temperature_end": 1.4, "top_k": 5, "top_p": 0.8})
    stages = logits_processors(settings, torch.tensor(UNCONDITIONAL), (3,), (halve_the_first,))
    found = probs(Draw(stages).process(given(), ROWS))

    guided = LOGITS + 0.5 * (LOGITS - UNCONDITIONAL)
    guided[:, 3] = -np.inf
    assert np.allclose(seen[0].numpy(), guided)
    guided[:, 0] -= np.log(2)
    heat = 1.4 + (0.7 - 1.4) * TIMES
    for row, t, law in zip(guided, heat, found, strict=True):
        weights = normalised(np.exp(row / t))
        weights[np.argsort(weights)[:-5]] = 0
        weights = normalised(weights)
        best = np.argsort(-weights)
        weights[best[1 + int(np.searchsorted(np.cumsum(weights[best]), 0.8)) :]] = 0
        assert np.allclose(law, normalised(weights), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_raised_before_arithmetic(dtype: torch.dtype) -> None:
    logits = given().to(dtype)
    assert torch.equal(temper(logits, ROWS, start=0.7), logits.float() / 0.7)
    guided = guide(logits, ROWS, guidance=0.5, unconditional=torch.tensor(UNCONDITIONAL))
    assert guided.dtype == torch.float32
