"""Naive samplers: what each keeps of human text, and nothing else."""

import collections

import pytest

from cdlm.eval import naive
from cdlm.eval.naive import NAIVE_SAMPLERS, PERIOD, PHRASE, draw_naive

TEXTS = [[100 * k + j % 50 for j in range(200 + k)] for k in range(8)]


@pytest.mark.parametrize("name", NAIVE_SAMPLERS)
def test_lengths_and_tokens_are_those_of_human_text(name: str) -> None:
    drawn = draw_naive(name, TEXTS, 20, seed=0)
    assert {len(text) for text in drawn} <= {len(text) for text in TEXTS}
    assert {token for text in drawn for token in text} <= {token for text in TEXTS for token in text}
    assert draw_naive(name, TEXTS, 5, seed=0) == drawn[:5]
    assert draw_naive(name, TEXTS, 5, seed=1) != drawn[:5]


def test_each_keeps_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naive, "TOP_K", 60)
    counts = collections.Counter(token for text in TEXTS for token in text)
    sixtieth = sorted(counts.values())[-60]
    assert all(counts[token] >= sixtieth for text in draw_naive("top unigrams", TEXTS, 5, 0) for token in text)
    for text in draw_naive("periodic", TEXTS, 5, 0):
        assert text[PERIOD:] == text[: len(text) - PERIOD]
        assert any(text[:PERIOD] == human[:PERIOD] for human in TEXTS)
    for text in draw_naive("shuffled", TEXTS, 5, 0):
        assert any(sorted(text) == sorted(human) for human in TEXTS)
        assert text not in TEXTS
    held = {tuple(text[k : k + PHRASE]) for text in TEXTS for k in range(len(text))}
    for text in draw_naive("phrases", TEXTS, 5, 0):
        assert {tuple(text[k : k + PHRASE]) for k in range(0, len(text) - PHRASE, PHRASE)} <= held
