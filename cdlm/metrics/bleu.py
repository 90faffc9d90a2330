"""BLEU-2: how much of a reference, word by word and pair by pair, is left in what a model made of it."""

from collections.abc import Sequence

from cdlm.extras import require

TOKENIZATION = "words between white space; sacrebleu, order 2, exponential smoothing, one reference"


def bleu2(texts: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU with weights (1/2, 1/2), from 0 to 100."""
    sacrebleu = require("sacrebleu", "eval", "BLEU")
    score = sacrebleu.BLEU(max_ngram_order=2, tokenize="none", force=True)
    return float(score.corpus_score([_plain(text) for text in texts], [[_plain(text) for text in references]]).score)


def token_bleu2(texts: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> float:
    """The same over token ids."""
    return bleu2([" ".join(map(str, text)) for text in texts], [" ".join(map(str, text)) for text in references])


def _plain(text: str) -> str:
    return " ".join(text.split())
