"""The columns of the distributional protocol on real text: human text passes, naive samplers do not."""

import lzma

import numpy as np
import pytest

from cdlm.data import END
from cdlm.data.human import FILE
from cdlm.data.tokenizer import Tokenizer
from cdlm.eval.columns import COLUMNS, Baseline, Texts, human_baseline, measure_columns
from cdlm.eval.naive import draw_naive
from cdlm.zoo import HERE

N = 24


def as_texts(tokenizer: Tokenizer, texts: list[list[int]]) -> Texts:
    return Texts(texts, [tokenizer.decode(text) for text in texts])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(HERE / "mdlm" / "tokenizer.json")


@pytest.fixture(scope="module")
def human(tokenizer: Tokenizer) -> list[list[int]]:
    """Spans of the human text, in random order."""
    ids = tokenizer.encode(lzma.decompress(FILE.read_bytes()).decode().replace(END, ""))[: 240 * 200]
    order = np.random.default_rng(0).permutation(200)
    return [ids[240 * k : 240 * (k + 1)] for k in order]


@pytest.fixture(scope="module")
def baseline(tokenizer: Tokenizer, human: list[list[int]]) -> Baseline:
    return human_baseline(as_texts(tokenizer, human[: 3 * N]), N)


def test_without_a_judge_or_a_corpus(baseline: Baseline) -> None:
    assert set(COLUMNS) - set(baseline.nulls) == {"ppl", "mauve", "copied"}


def test_human_text_is_human(tokenizer: Tokenizer, human: list[list[int]], baseline: Baseline) -> None:
    found = measure_columns(as_texts(tokenizer, human[3 * N : 4 * N]), baseline)
    assert all(abs(each["z"]) < 4 for each in found.values()), found


@pytest.mark.parametrize(
    ("name", "far", "near"),
    [
        ("unigrams", ("rep_2", "distinct_2", "energy"), ()),
        ("periodic", ("h1", "h2", "rep_4", "longest", "energy"), ()),
        ("shuffled", ("h2", "rep_2", "energy"), ("h1",)),
        ("phrases", ("h1", "rep_3", "overlap_3", "energy"), ()),
    ],
)
def test_what_naive_samplers_fake(
    name: str,
    far: tuple[str, ...],
    near: tuple[str, ...],
    tokenizer: Tokenizer,
    human: list[list[int]],
    baseline: Baseline,
) -> None:
    found = measure_columns(as_texts(tokenizer, draw_naive(name, human[4 * N :], N, 0)), baseline)
    assert all(abs(found[column]["z"]) > 4 for column in far), found
    assert all(abs(found[column]["z"]) < 4 for column in near), found


def test_the_number_of_samples_must_be_that_of_the_null(
    tokenizer: Tokenizer, human: list[list[int]], baseline: Baseline
) -> None:
    with pytest.raises(ValueError, match=r"for 24 samples \(got 3\)"):
        measure_columns(as_texts(tokenizer, human[:3]), baseline)


def test_perplexity_is_compared_by_its_logarithm() -> None:
    """Two nats per token more are e squared times the perplexity, and as many units of the scale."""
    generator = np.random.default_rng(0)
    nats, tokens = generator.normal(300, 20, 3 * N), np.full(3 * N, 100.0)
    words = [[k, k + 1, k] for k in range(3 * N)]
    texts = Texts(words, ["a b a"] * (3 * N), nats, tokens)
    baseline = human_baseline(texts[: 2 * N], N)
    worse = Texts(words[:N], ["a b a"] * N, nats[2 * N :] + 200, tokens[:N])
    found = measure_columns(worse, baseline)["ppl"]
    assert found["value"] == pytest.approx(np.exp(worse.nats.sum() / (100 * N)))  # type: ignore[union-attr]
    assert found["human"] == pytest.approx(np.exp(3), rel=0.05)
    assert found["z"] == pytest.approx(2 / baseline.nulls["ppl"].scale, rel=0.1)
