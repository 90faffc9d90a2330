"""The judges that install by name, on text that people wrote: figures measured with other code (llama.cpp, and the
library's own loss) come out again, and word order matters to them.

Needs the packages, and a folder of texts named by CDLM_TEXTS: valid.txt and eval/openwebtext_sample.txt, documents
between lines <|endoftext|>, and gpt2/tokenizer.json.
"""

import math
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from cdlm.data import END
from cdlm.data.tokenizer import Tokenizer
from cdlm.eval.measure import stack_features
from cdlm.eval.scorer import Judge, open_judge
from cdlm.metrics.mauve import mauve

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif("CDLM_TEXTS" not in os.environ, reason="CDLM_TEXTS names no folder of texts"),
    pytest.mark.filterwarnings("default"),
]

WINDOWS, LENGTH = 24, 256
PUBLISHED = {
    ("smollm2", "valid"): 29.7,
    ("smollm2", "openwebtext"): 31.7,
    ("smollm2", "swapped"): 192.0,
    ("smollm2", "shuffled"): 689.0,
    ("gemma3-270m", "valid"): 26.2,
    ("gemma3-270m", "openwebtext"): 22.0,
    ("gemma3-270m", "swapped"): 158.0,
    ("gemma3-270m", "shuffled"): 558.0,
}
"""Perplexity per GPT-2 token on windows of 256 tokens, some 3,000 tokens a number."""


def windows(file: str, count: int = WINDOWS) -> list[str]:
    """Fixed windows, evenly over a file."""
    folder = Path(os.environ["CDLM_TEXTS"])
    words = Tokenizer.load(folder / "gpt2")
    ids = words.encode((folder / file).read_text().replace(END, "\n"))
    places = [k * (len(ids) - LENGTH) // count for k in range(count)]
    return [words.decode(ids[place : place + LENGTH]) for place in places]


def swapped(text: str) -> str:
    """Every sixth pair of words the other way round."""
    words = text.split(" ")
    for k in range(0, len(words) - 1, 6):
        words[k], words[k + 1] = words[k + 1], words[k]
    return " ".join(words)


def shuffled(text: str) -> str:
    words = text.split(" ")
    random.Random(0).shuffle(words)
    return " ".join(words)


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def judge(request: pytest.FixtureRequest) -> Judge:
    return open_judge(request.param, "cpu")


def perplexity(judge: Judge, texts: list[str]) -> float:
    return math.exp(sum(reading.nats for reading in judge.score(texts)) / (LENGTH * len(texts)))


def test_people_score_as_measured_elsewhere(judge: Judge) -> None:
    changes: dict[str, tuple[str, Callable[[str], str]]] = {
        "valid": ("valid.txt", str),
        "openwebtext": ("eval/openwebtext_sample.txt", str),
        "swapped": ("valid.txt", swapped),
        "shuffled": ("valid.txt", shuffled),
    }
    found = {}
    for name, (file, change) in changes.items():
        found[name] = perplexity(judge, [change(text) for text in windows(file)])
        print(f"{judge.name} {name}: {found[name]:.1f}, measured elsewhere {PUBLISHED[judge.name, name]:.1f}")
    assert found["valid"] < found["swapped"] / 3 < found["shuffled"] / 6
    for name, value in found.items():
        assert value == pytest.approx(PUBLISHED[judge.name, name], rel=0.2), name


def test_mauve_tells_word_order(judge: Judge) -> None:
    """Two halves of the same texts look alike; the shuffled half does not."""
    texts = windows("valid.txt", 120)
    one, two = ([text[:400] for text in texts[k::2]] for k in range(2))
    human = stack_features(judge.score(one, features=True))
    alike = mauve(stack_features(judge.score(two, features=True)), human)
    apart = mauve(stack_features(judge.score([shuffled(text) for text in two], features=True)), human)
    print(f"{judge.name}: same {alike:.2f}, shuffled {apart:.2f}")
    assert alike > 0.8 > 0.5 > apart
