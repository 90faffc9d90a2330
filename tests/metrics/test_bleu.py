"""BLEU-2 against clipped precisions counted here, against sacrebleu itself, and by hand."""

import collections
import math
import random
import sys

import pytest

from cdlm.metrics.bleu import TOKENIZATION, bleu2, token_bleu2

sacrebleu = pytest.importorskip("sacrebleu")

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "sea", ",", "."]


def by_counting(texts: list[list[str]], references: list[list[str]]) -> float:
    """Corpus BLEU with weights (1/2, 1/2): clipped matches of all texts, one brevity penalty; no smoothing."""
    precisions = []
    for n in (1, 2):
        matched = total = 0
        for text, reference in zip(texts, references, strict=True):
            ours, theirs = (
                collections.Counter(tuple(words[k : k + n]) for k in range(len(words) - n + 1))
                for words in (text, reference)
            )
            matched += sum(min(count, theirs[gram]) for gram, count in ours.items())
            total += sum(ours.values())
        precisions.append(matched / total)
    long, wanted = sum(map(len, texts)), sum(map(len, references))
    penalty = 1.0 if long >= wanted else math.exp(1 - wanted / long)
    return 100 * penalty * math.sqrt(precisions[0] * precisions[1])


def corpus(seed: int, shorter: int = 0) -> tuple[list[list[str]], list[list[str]]]:
    """References, and texts that keep about two of three words."""
    draw = random.Random(seed)
    references = [[draw.choice(WORDS) for _ in range(draw.randint(8, 40))] for _ in range(6)]
    texts = [[word if draw.random() < 0.66 else draw.choice(WORDS) for word in words] for words in references]
    return [words[: len(words) - shorter] for words in texts], references


def joined(texts: list[list[str]]) -> list[str]:
    return [" ".join(words) for words in texts]


@pytest.mark.parametrize("shorter", [0, 3, -1])
@pytest.mark.parametrize("seed", range(4))
def test_equals_clipped_precisions(seed: int, shorter: int) -> None:
    texts, references = corpus(seed, max(0, shorter))
    if shorter < 0:  # longer than the references: no reward and no penalty
        texts = [[*words, "extra"] for words in texts]
    found = bleu2(joined(texts), joined(references))
    assert found == pytest.approx(by_counting(texts, references), rel=1e-9)
    assert 0 < found < 100


def test_by_hand() -> None:
    """the cat sat / the cat ran: 2 of 3 words, 1 of 2 pairs. A repeated word counts as often as the reference's."""
    assert bleu2(["the cat sat"], ["the cat ran"]) == pytest.approx(100 * math.sqrt(2 / 3 * 1 / 2))
    assert bleu2(["the the the cat"], ["the cat on mat"]) == pytest.approx(100 * math.sqrt(2 / 4 * 1 / 3))
    assert bleu2(["a b c"], ["a b c d e f"]) == pytest.approx(100 * math.exp(1 - 6 / 3))


def test_it_is_of_the_corpus_not_a_mean_over_texts() -> None:
    texts, references = ["a b c d", "x"], ["a b c d", "y"]
    assert bleu2(texts, references) == pytest.approx(100 * math.sqrt(4 / 5 * 3 / 3))


def test_the_level_of_the_papers_table() -> None:
    """ANCHORS 1.20: with unigram precision 0.7 and bigram precision 0.52 the score is about 60."""
    assert 100 * math.sqrt(0.7 * 0.52) == pytest.approx(60, abs=1)
    draw = random.Random(0)
    references = [[str(draw.randrange(50_000)) for _ in range(1000)] for _ in range(4)]
    texts = [[word if draw.random() < 0.7 else "wrong" for word in words] for words in references]
    assert bleu2(joined(texts), joined(references)) == pytest.approx(100 * math.sqrt(0.7 * 0.49), abs=2)


@pytest.mark.parametrize("seed", range(3))
def test_equals_sacrebleu_of_order_two(seed: int) -> None:
    texts, references = (joined(side) for side in corpus(seed))
    score = sacrebleu.corpus_bleu(texts, [references], tokenize="none", force=True, use_effective_order=False)
    wanted = math.sqrt(score.precisions[0] * score.precisions[1]) * score.bp  # of its first two orders alone
    assert bleu2(texts, references) == pytest.approx(wanted)


def test_nothing_in_common_is_smoothed_not_zero() -> None:
    """As `TOKENIZATION` says: exponential smoothing, so that a set without any pair in common still has a number."""
    assert "exponential smoothing" in TOKENIZATION
    found = bleu2(["a x b y"], ["b q a r"])
    assert found == pytest.approx(100 * math.sqrt(2 / 4 * (1 / 2) / 3))
    assert bleu2(["x y"], ["a b"]) < bleu2(["a y"], ["a b"])


def test_identical_texts() -> None:
    texts = joined(corpus(0)[1])
    assert bleu2(texts, texts) == pytest.approx(100)
    assert bleu2(["A sentence, with marks.\nAnd a line."], ["A sentence, with marks.\nAnd a line."]) == pytest.approx(
        100
    )


def test_words_stand_between_white_space() -> None:
    """Line ends, tabs and runs of spaces are the same; marks belong to their word; case counts."""
    assert bleu2([" the  cat\nsat\ton "], ["the cat sat on"]) == pytest.approx(100)
    assert bleu2(["the cat ."], ["the cat."]) < 100
    assert bleu2(["The cat sat"], ["the cat sat"]) == pytest.approx(100 * math.sqrt(2 / 3 * 1 / 2))


def test_texts_of_different_order_matter() -> None:
    texts, references = (joined(side) for side in corpus(1))
    assert bleu2(texts, references[::-1]) < bleu2(texts, references)


def test_of_tokens() -> None:
    """The same over ids: 12 is one token, not the digits 1 and 2."""
    assert token_bleu2([[1, 2, 3]], [[1, 2, 4]]) == pytest.approx(100 * math.sqrt(2 / 3 * 1 / 2))
    assert token_bleu2([[12, 3]], [[12, 3]]) == pytest.approx(100)
    texts, references = [[12, 3, 4, 12]], [[1, 23, 4, 12]]
    wanted = by_counting(*([[str(i) for i in row] for row in side] for side in (texts, references)))
    assert token_bleu2(texts, references) == pytest.approx(wanted)
    assert token_bleu2([[50_256, 0, 7]] * 2, [[50_256, 0, 7]] * 2) == pytest.approx(100)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ValueError, match=r'BLEU needs sacrebleu; run in the checkout: pip install .* -e "\.\[eval\]"'):
        bleu2(["a"], ["a"])
