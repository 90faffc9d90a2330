"""Human text for the distributional protocol, cut as the model under test was trained on it."""

import dataclasses
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from cdlm.data.human import FILE
from cdlm.data.sentences import pack_document
from cdlm.data.tokenizer import Tokenizer
from cdlm.eval.columns import Texts
from cdlm.eval.datasets import Dataset
from cdlm.text.pipeline import Pipeline

FIT_EVERY = 5
"""Every fifth document is for naive samplers to be fitted to."""
POOL = 4
"""Texts of the pool for each sample of a cell, at most; at least half as many are needed."""
_SHARED = 12
"""Tokens of a span by which two texts of a document are known to overlap."""

Text = list[int]


@dataclasses.dataclass(frozen=True)
class HumanText:
    """Human texts without special tokens, in three parts. Those to fit to share no document with the others."""

    name: str
    fingerprint: str
    fit: list[Text]
    held: list[Text]
    """As many as there are samples in a cell: a row of the table."""
    pool: list[Text]
    """The reference, whose splits give the null distributions."""


def read_human_text(file: Path | None, model: Pipeline, length: int, num_samples: int) -> HumanText:
    """The texts of a file, or of the one that comes with the package, in the tokens of a model."""
    dataset = Dataset("human", file or FILE)
    documents = dataset.documents()
    fit = _cut(documents[::FIT_EVERY], model, length)
    rest = _cut([document for number, document in enumerate(documents) if number % FIT_EVERY], model, length)
    if len(rest) < 3 * num_samples or not fit:
        raise ValueError(
            f"{dataset.file} makes {len(rest)} different texts of {length} tokens, enough for --num-samples "
            f"{len(rest) // 3} (got {num_samples}); give a longer --reference of several documents."
        )
    order = np.random.default_rng(0).permutation(len(rest))
    shuffled = [rest[place] for place in order]
    pool = shuffled[num_samples : (POOL + 1) * num_samples]
    return HumanText(dataset.file.name, dataset.fingerprint, fit, shuffled[:num_samples], pool)


def as_texts(samples: Sequence[Sequence[int]], tokenizer: Tokenizer) -> Texts:
    """Samples without their special tokens; between documents of one sample the text has a line end."""
    special = (tokenizer.eos, tokenizer.bos)
    strings = []
    for ids in samples:
        parts: list[Text] = [[]]
        for token in ids:
            if token in special:
                parts.append([])
            else:
                parts[-1].append(token)
        strings.append("\n".join(tokenizer.decode(part) for part in parts if part))
    return Texts([[token for token in ids if token not in special] for ids in samples], strings)


def _cut(documents: Sequence[str], model: Pipeline, length: int) -> list[Text]:
    """Texts of one document each for a model of padded samples, else whole blocks of documents end to end."""
    if model.eos_padded:
        return [text for document in documents for text in _different(document, model, length)]
    body = length - 2 * model.bos_framed
    ids = np.concatenate([np.empty(0, np.int64), *model.tokenizer.encode_batch(documents)])
    return [ids[start : start + body].tolist() for start in range(0, len(ids) - body + 1, body)]


def _different(document: str, model: Pipeline, length: int) -> list[Text]:
    """The blocks of a document that share no sentence with one that was kept."""
    special = (model.tokenizer.eos, model.tokenizer.bos)
    kept: list[Text] = []
    held: set[tuple[int, ...]] = set()
    for block in pack_document(document, model.tokenizer, length):
        text = [token for token in block.tolist() if token not in special]
        spans = set(zip(*(islice(text, k, None) for k in range(_SHARED)), strict=False))
        if not spans & held:
            kept.append(text)
            held |= spans
    return kept
