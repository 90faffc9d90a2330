"""Simple features of a text: counted by hand, and what they tell apart."""

import numpy as np
import pytest

from cdlm.metrics.text_features import FEATURES, text_features


def of(text: str) -> dict[str, float]:
    return dict(zip(FEATURES, text_features([text])[0].tolist(), strict=True))


def test_a_text_by_hand() -> None:
    """The old house of the sea fell, and fell. Who saw it?"""
    found = of("The old house of the sea fell, and fell. Who saw it?")
    assert found["mean length of words"] == pytest.approx((3 + 3 + 5 + 2 + 3 + 3 + 4 + 3 + 4 + 3 + 3 + 2) / 12)
    assert found["mean length of sentences, in words"] == pytest.approx((9 + 3) / 2)
    assert found["standard deviation of the length of sentences"] == pytest.approx(3)
    assert found["share of different words"] == pytest.approx(10 / 12)
    assert found["share of function words"] == pytest.approx(6 / 12)  # The of the and Who it
    assert found["share of 'the' among words"] == pytest.approx(2 / 12)
    assert found["share of function words after a function word"] == pytest.approx(1 / 5)  # the, after of
    assert found["share of capitalised words"] == pytest.approx(2 / 12)
    assert found["share of capitalised function words"] == pytest.approx(2 / 6)
    assert found["rate of commas"] == found["rate of full stops"] == pytest.approx(1 / 15)
    assert found["standard deviation of the gap between function words"] == pytest.approx(np.std([3, 1, 3, 2, 2]))


def test_texts_without_words_have_features() -> None:
    assert np.isfinite(text_features(["", "...", "7", " \n", "a"])).all()


def test_word_order_shows() -> None:
    text = "The king of the island was not in the city, but she saw him at the gate. He had a letter from his mother."
    words = text.split(" ")
    mixed = " ".join(np.random.default_rng(0).permutation(words))
    changed = {name for name, value in of(text).items() if value != pytest.approx(of(mixed)[name])}
    assert "share of function words after a function word" in changed
    assert "share of function words" not in changed
