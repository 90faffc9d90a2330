"""Evaluation texts: files cut into blocks as the models saw them in training."""

import dataclasses
import functools
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from cdlm.data.corpora import SOURCES
from cdlm.data.prepare import wrap
from cdlm.data.sources import Reader
from cdlm.data.tokenizer import Tokenizer
from cdlm.data.tokens import shuffled


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A named file of text. The name of a known corpus (openwebtext, lambada, wikitext103, ptb) says how to cut and
    clean it."""

    name: str
    file: Path

    @property
    def fingerprint(self) -> str:
        with self.file.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]

    def documents(self) -> list[str]:
        """The documents with text in them."""
        source = next((SOURCES[name] for name in SOURCES if name == self.name), SOURCES["plain"])
        documents, pieces = [], []
        for piece in Reader(source).pieces(str(self.file)):
            pieces.append(piece.text)
            if piece.last:
                documents.append("".join(pieces))
                pieces = []
        return [document for document in documents if document.strip()]

    def blocks(
        self, tokenizer: Tokenizer, length: int, bos_framed: bool, num_blocks: int, seed: int = 0
    ) -> Int[Tensor, "n length"]:
        """Different blocks, drawn at random: documents end to end, framed by BOS and EOS where the model's were."""
        ids = _all_ids(self, tokenizer, self.fingerprint)
        if bos_framed:
            blocks, _ = wrap(ids, length, tokenizer.bos, tokenizer.eos)
        else:
            blocks = ids[: len(ids) // length * length].reshape(-1, length)
        if len(blocks) < num_blocks:
            raise ValueError(
                f"{self.file} has {len(ids):,} tokens, which make {len(blocks)} blocks of {length} of the {num_blocks} "
                "that are needed; give a longer text, or a smaller --num-samples."
            )
        chosen = shuffled(torch.arange(num_blocks), len(blocks), seed, 0)
        return torch.from_numpy(blocks[chosen.numpy()].astype(np.int64))


@functools.lru_cache(maxsize=8)
def _all_ids(dataset: Dataset, tokenizer: Tokenizer, fingerprint: str) -> NDArray[np.unsignedinteger[Any]]:
    """The token ids of all documents, EOS after each; cached while the file does not change."""
    ends, documents = np.array([tokenizer.eos]), dataset.documents()
    if not documents:
        raise ValueError(f"{dataset.file} has no text in it; give a file with documents.")
    parts = [part for ids in tokenizer.encode_batch(documents) for part in (ids, ends)]
    return np.concatenate(parts).astype(np.uint32)
