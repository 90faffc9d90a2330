"""Infilling accuracy against counting by hand."""

import re

import pytest
import torch

from cdlm.metrics.infilling import infilling_accuracy, masked_evenly
from cdlm.rng import seeded


def test_tokens_and_spans_are_counted() -> None:
    """Rows as strings: the text, the masks (#), what was found."""
    rows = [
        ("abcdefgh", "##..###.", "abcdeXgh"),  # a span of two is right, one of three is not
        ("abcdefgh", "#......#", "Xbcdefgh"),  # at the edges
        ("abcdefgh", "########", "abcdefgh"),
        ("abcdefgh", "........", "Xbcdefgh"),  # nothing was masked
    ]
    x0, mask, found = (torch.tensor([[ord(c) for c in row[k]] for row in rows]) for k in range(3))
    accuracy = infilling_accuracy(found, x0, mask == ord("#"))
    assert (accuracy.num_tokens, accuracy.num_spans) == (15, 5)
    assert accuracy.token_match.value == pytest.approx(13 / 15)
    assert accuracy.span_match.value == pytest.approx(3 / 5)


def test_spans_of_random_masks() -> None:
    generator = torch.Generator().manual_seed(0)
    x0, found = torch.randint(2, (2, 60, 40), generator=generator)
    mask = torch.rand((60, 40), generator=generator) < 0.6
    accuracy = infilling_accuracy(found, x0, mask)
    spans = [
        bool((found[row, run.start() : run.end()] == x0[row, run.start() : run.end()]).all())
        for row in range(60)
        for run in re.finditer("#+", "".join(".#"[int(one)] for one in mask[row]))
    ]
    assert accuracy.num_spans == len(spans)
    assert accuracy.span_match.value == pytest.approx(sum(spans) / len(spans))
    assert accuracy.token_match.low < accuracy.token_match.value < accuracy.token_match.high


@pytest.mark.parametrize("rate", [0.15, 0.5, 0.85])
def test_masks_are_a_share_of_the_words_and_nested(rate: float) -> None:
    words = torch.ones(50, 40, dtype=torch.bool)
    words[:, 0], words[10, 20:] = False, False
    rng = seeded(0, batch=50)
    mask = masked_evenly(rate, words, rng)
    assert not bool((mask & ~words).any())
    assert mask.sum(-1).tolist() == [round(rate * (19 if row == 10 else 39)) for row in range(50)]
    assert not bool((mask & ~masked_evenly(0.9, words, rng)).any())
    assert len({tuple(row) for row in mask.tolist()}) == 50
