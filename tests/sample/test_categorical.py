"""`categorical` in two levels is the inverse distribution function, whatever the vocabulary."""

import math

import pytest
import torch
from torch import Tensor

from cdlm.rng import categorical, seeded

SIZES = [1, 3, 255, 256, 257, 1000, 50257]


def laws(vocab: int, kind: str) -> Tensor:
    """Logits of one law: rough and unnormalised, with holes, or with all mass at the end."""
    generator = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(vocab, generator=generator, dtype=torch.float64) + 5
    if kind == "holes" and vocab > 1:
        logits[torch.rand(vocab, generator=generator) < 0.6] = -torch.inf
        logits[: vocab // 3] = -torch.inf  # whole stretches, where there are several
        logits[-1] = -torch.inf
        logits[vocab // 2] = 0.0
    if kind == "steep":
        logits = logits - 40 * torch.arange(vocab, dtype=torch.float64) / vocab
    return logits


def plain(logits: Tensor, u: Tensor) -> Tensor:
    """One cumulative sum over the whole vocabulary in double precision."""
    cdf = (logits.double() - logits.double().max()).exp().cumsum(0)
    return torch.searchsorted(cdf, u.double() * cdf[-1], right=True)


def drawn(logits: Tensor, u: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """In batches small enough for memory."""
    size = max(1, 2**22 // len(logits))
    return torch.cat([categorical(logits.expand(len(part), -1), part, dtype) for part in u.split(size)])


@pytest.mark.parametrize("kind", ["rough", "holes", "steep"])
@pytest.mark.parametrize("vocab", SIZES)
def test_two_levels_equal_one_cumulative_sum(vocab: int, kind: str) -> None:
    """In single precision some draws fall on the other side of an edge: more of them, the more edges there are."""
    u = seeded(0, "u", batch=1).uniform(256 if vocab > 10_000 else 4000)[0]
    logits = laws(vocab, kind)
    tokens = drawn(logits, u)
    assert torch.equal(tokens, plain(logits, u))
    assert bool((logits[tokens] > -torch.inf).all())
    single = drawn(logits, u, torch.float32)
    assert float((single == tokens).double().mean()) >= (0.98 if vocab > 10_000 else 0.999)
    assert int((plain(logits, u - 1e-6) > single).sum()) == int((plain(logits, u + 1e-6) < single).sum()) == 0
    assert bool((logits[single] > -torch.inf).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("vocab", SIZES)
def test_the_ends_of_the_unit_interval(vocab: int, dtype: torch.dtype) -> None:
    """The first and the last token that are possible, with empty stretches on either side."""
    u = torch.tensor([1e-300, 2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    logits = torch.full((vocab,), -torch.inf, dtype=torch.float64)
    first, end = vocab // 3, max(vocab // 3, 2 * vocab // 3)
    logits[first], logits[end] = 0.3, 0.2
    assert drawn(logits, u, dtype).tolist() == [first, first, end]


def test_a_draw_on_an_edge_goes_to_the_next_token_that_is_possible() -> None:
    """u = 1/2 between two halves of the mass, in one stretch or in two, with impossible tokens in between."""
    for first, second in ((0, 1), (3, 200), (255, 300), (0, 511)):
        logits = torch.full((512,), -torch.inf, dtype=torch.float64)
        logits[[first, second]] = 0.0
        below, edge = 0.5 - 2.0**-53, 0.5
        assert drawn(logits, torch.tensor([below, edge], dtype=torch.float64)).tolist() == [first, second]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_law_for_each_draw(dtype: torch.dtype) -> None:
    """Over several leading axes, logits in half precision included."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(5, 7, 600, generator=generator)
    u = seeded(1, batch=5).uniform(7)
    for kind in (torch.float64, torch.float32, torch.bfloat16):
        tokens = categorical(logits.to(kind), u, dtype)
        for i in range(5):
            for j in range(7):
                assert int(tokens[i, j]) == int(plain(logits[i, j].to(kind), u[i, j][None]))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("vocab", [3, 255, 256, 257, 1000, 50257])
def test_the_law_that_is_drawn_from(vocab: int, dtype: torch.dtype, limit: float) -> None:
    """Where the drawn token changes, to the last digit by bisection in u: the distance of the law, without a draw.

    Of the large vocabulary the law of its stretches of 256 tokens, in which alone rounding can differ.
    """
    logits = laws(vocab, "rough").log_softmax(0)
    law = logits.exp()
    ends = torch.arange(0, vocab - 1, 256 if vocab > 10_000 else 1)
    ends = ends + 255 if vocab > 10_000 else ends
    ends = ends[ends < vocab - 1]
    truth = torch.cat([law.cumsum(0)[ends], torch.ones(1, dtype=torch.float64)])
    low, high = truth[:-1] - 1e-5, truth[:-1] + 1e-5
    inside = (low > 0) & (high < 1)
    assert bool((drawn(logits, low[inside], dtype) <= ends[inside]).all())
    assert bool((drawn(logits, high[inside], dtype) > ends[inside]).all())
    low, high = low.clamp(min=0), high.clamp(max=1 - 2.0**-53)
    for _ in range(math.ceil(math.log2(1e-5 / limit)) + 8):
        middle = (low + high) / 2
        above = drawn(logits, middle, dtype) > ends
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    found = torch.cat([(low + high) / 2, torch.ones(1, dtype=torch.float64)])
    zero = torch.zeros(1, dtype=torch.float64)
    assert float((found.diff(prepend=zero) - truth.diff(prepend=zero)).abs().sum() / 2) < limit
