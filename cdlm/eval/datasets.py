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
class Set:
    """A named file. The name of a known corpus (openwebtext, lambada, wikitext103, ptb) says how to cut and
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

    def blocks(self, tokenizer: Tokenizer, length: int, framed: bool, n: int, seed: int = 0) -> Int[Tensor, "n length"]:
        """n different blocks, drawn at random: documents end to end, framed by start and end where the model's were."""
        ids = _stream(self, tokenizer, self.fingerprint)
        if framed:
            found, _ = wrap(ids, length, tokenizer.bos, tokenizer.eos)
        else:
            found = ids[: len(ids) // length * length].reshape(-1, length)
        if len(found) < n:
            raise ValueError(
                f"{self.file} has {len(ids):,} tokens: {len(found)} blocks of {length}, and {n} are asked for; give a "
                f"longer text, or a smaller --num"
            )
        chosen = shuffled(torch.arange(n), len(found), seed, 0)
        return torch.from_numpy(found[chosen.numpy()].astype(np.int64))


@functools.lru_cache(maxsize=8)
def _stream(texts: Set, tokenizer: Tokenizer, fingerprint: str) -> NDArray[np.unsignedinteger[Any]]:
    """All documents as ids, an end after each; remembered for as long as the file does not change."""
    ends, documents = np.array([tokenizer.eos]), texts.documents()
    if not documents:
        raise ValueError(f"{texts.file} has no text in it; give a file with documents")
    parts = [part for ids in tokenizer.encode_batch(documents) for part in (ids, ends)]
    return np.concatenate(parts).astype(np.uint32)
