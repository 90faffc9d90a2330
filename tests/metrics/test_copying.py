"""The copy rate against a search for every span."""

import numpy as np
import pytest

from cdlm.metrics import copying
from cdlm.metrics.copying import copy_rates


def brute_force(text: list[int], corpus: list[int], span: int) -> float:
    spans = [text[k : k + span] for k in range(len(text) - span + 1)]
    places = range(len(corpus) - span + 1)
    return float(np.mean([any(corpus[k : k + span] == own for k in places) for own in spans])) if spans else 0.0


@pytest.mark.parametrize("chunk", [7, 1000])
def test_against_brute_force(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a span crosses two chunks of the corpus."""
    monkeypatch.setattr(copying, "_CHUNK", chunk)
    generator = np.random.default_rng(0)
    corpus = generator.integers(0, 4, 60).tolist()
    texts = [generator.integers(0, 4, length).tolist() for length in (30, 12, 2, 0)] + [corpus[3:40]]
    found = copy_rates(texts, np.array(corpus, np.uint16), span=4)
    assert found == pytest.approx([brute_force(text, corpus, 4) for text in texts])
    assert found[-1] == 1
    assert 0 < found[0] < 1
