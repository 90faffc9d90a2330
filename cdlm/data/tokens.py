"""Token files: what `cdlm prepare` writes and training reads, memory-mapped, in an order that needs no state.

A directory holds `train.bin` and `valid.bin` (ids, little-endian, nothing else), `tokenizer.json`, and `meta.json`,
which says how to read them. The global batch is a pure function of (seed, step): each epoch is a permutation of the
blocks that is computed entry by entry and never stored, so resuming needs nothing, and ranks read only their own rows.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from cdlm.data import Packing
from cdlm.rng import seeded

FORMAT = 1
META = "meta.json"
DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_ROUNDS = 6
_CHUNK = 1 << 24

SplitName = Literal["train", "valid"]


class TokenError(ValueError):
    """A directory that does not hold the tokens asked for."""


@dataclasses.dataclass(frozen=True)
class Split:
    """What one .bin file holds."""

    documents: int
    characters: int
    tokens: int
    """Ids in the file, those that end documents and frame blocks included."""
    empty: int
    """Documents left out because nothing but white space was in them."""
    unused: int
    """Ids at the end that filled no block."""
    sha256: str


@dataclasses.dataclass(frozen=True)
class Meta:
    """The contents of `meta.json`."""

    version: int
    dtype: str
    vocab: int
    eos: int
    bos: int
    packing: Packing
    length: int
    """Ids in a block; for plain packing only what to use when nothing else is asked for."""
    document_eos: bool
    tokenizer: str
    """bytes, gpt2, json, or trained."""
    trained_on: int
    """Characters that the tokenizer was trained on here; 0 where it came ready."""
    splits: dict[str, Split]
    sources: list[dict[str, Any]]
    """Every input with its size in bytes, where it has one."""
    config: dict[str, Any]
    cdlm: str
    """The version of this package that wrote the directory."""

    def write(self, folder: Path) -> None:
        (folder / META).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def read_meta(folder: str | Path) -> Meta:
    """Read and check `meta.json`."""
    path = Path(folder) / META
    if not Path(folder).exists():
        raise TokenError(f"there is no directory {folder}; make it first, with: cdlm prepare FILE --out {folder}")
    if not path.is_file():
        raise TokenError(
            f"{folder} is not a directory of tokens: {META} is missing; make one with: cdlm prepare FILE --out data"
        )
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        version = int(fields["version"])
        if version > FORMAT:
            raise TokenError(f"{path} was written by a newer cdlm (format {version}, this one reads {FORMAT}); upgrade")
        fields["splits"] = {name: Split(**split) for name, split in fields["splits"].items()}
        meta = Meta(**fields)
        _check_fields(meta)
        if meta.dtype not in DTYPES or meta.vocab > 2 ** (8 * np.dtype(DTYPES[meta.dtype]).itemsize):
            raise TokenError(
                f"{path} says dtype {meta.dtype!r}, which cannot hold a vocabulary of {meta.vocab} as "
                f"{' or '.join(DTYPES)}; run cdlm prepare again"
            )
    except TokenError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise TokenError(f"{path} is damaged ({type(error).__name__}: {error}); run cdlm prepare again") from None
    return meta


def _check_fields(meta: Meta) -> None:
    """Counts are counts, and special ids are in the vocabulary: what is wrong here shows up far away otherwise."""
    counts = {"vocab": meta.vocab, "eos": meta.eos, "bos": meta.bos, "length": meta.length}
    for name, split in meta.splits.items():
        counts |= {f"{name}.{count}": getattr(split, count) for count in ("documents", "tokens", "empty", "unused")}
    for name, value in counts.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} is {value!r}, not a count")
    if max(meta.eos, meta.bos) >= meta.vocab or meta.length < 1:
        raise ValueError(f"eos {meta.eos} and bos {meta.bos} are not in a vocabulary of {meta.vocab}, or length is 0")
    if meta.packing not in get_args(Packing):
        raise ValueError(f"packing is {meta.packing!r}, none of {', '.join(get_args(Packing))}")


def open_tokens(folder: str | Path, split: SplitName = "train") -> "TokenFile":
    """Open one split of a prepared directory, checked against its `meta.json`; nothing is read into memory."""
    meta, path = read_meta(folder), Path(folder) / f"{split}.bin"
    if split not in meta.splits:
        raise TokenError(
            f"{folder} was prepared without a {split} split (it has {', '.join(meta.splits)}); run cdlm prepare again, "
            "with --valid-fraction 0.01 or --valid FILE"
        )
    if not path.is_file():
        raise TokenError(f"{path} is missing; copy it beside {META}, or run cdlm prepare again")
    dtype = np.dtype(DTYPES[meta.dtype])
    have, want = path.stat().st_size, meta.splits[split].tokens * dtype.itemsize
    if have != want:
        how = "truncated" if have < want else "not the file that was prepared"
        raise TokenError(f"{path} is {how}: {have} bytes, but {META} says {want}; copy it again or run cdlm prepare")
    ids = np.memmap(path, dtype=dtype, mode="r") if have else np.empty(0, dtype)
    return TokenFile(path, split, meta, ids)


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFile:
    """One split: a long row of ids on disk, seen as blocks of equal length."""

    path: Path
    split: SplitName
    meta: Meta
    ids: NDArray[np.unsignedinteger[Any]]

    def check_vocabulary(self, vocab: int, what: str = "the model") -> None:
        """Refuse a model or tokenizer whose vocabulary is not the one that the tokens were made with."""
        if vocab != self.meta.vocab:
            raise TokenError(
                f"{self.path} holds tokens of a vocabulary of {self.meta.vocab}, but {what} has {vocab}; "
                f"use {what} of {self.meta.vocab} tokens, or run cdlm prepare with its tokenizer.json"
            )

    def length(self, length: int | None = None) -> int:
        """The length of a block: any for plain packing, that of the packing for the others."""
        if length is None:
            return self.meta.length
        if length < 1:
            raise TokenError(f"--seq-length must be at least 1; got {length}")
        if self.meta.packing != "plain" and length != self.meta.length:
            raise TokenError(
                f"{self.path} is packed into blocks of {self.meta.length} ids, each with its own start and end; "
                f"use --seq-length {self.meta.length}, or prepare again with --seq-length {length} or --packing plain"
            )
        return length

    def blocks(self, length: int | None = None) -> int:
        """The number of whole blocks, which is at least one."""
        length = self.length(length)
        if len(self.ids) < length:
            raise TokenError(
                f"{self.path} holds {len(self.ids)} tokens, not one block of {length}; use a --seq-length of at most "
                f"{len(self.ids)}, or prepare more text"
            )
        return len(self.ids) // length

    def read(self, index: Int[Tensor, "b"], length: int | None = None) -> Int[Tensor, "b l"]:
        """The blocks of these numbers, from 0 to blocks - 1."""
        n, length = self.blocks(length), self.length(length)
        tokens = self.ids[: n * length].reshape(n, length)[index.numpy()].astype(np.int64)
        if tokens.size and tokens.max() >= self.meta.vocab:
            row, column = np.argwhere(tokens >= self.meta.vocab)[0]
            offset = (int(index[row]) * length + int(column)) * self.ids.itemsize
            raise TokenError(
                f"{self.path} has the id {tokens[row, column]} at byte {offset}, outside the vocabulary of "
                f"{self.meta.vocab}: the file is damaged or belongs to another {META}; run cdlm prepare again"
            )
        return torch.from_numpy(tokens)

    def token_counts(self) -> Int[Tensor, "v"]:
        """How often each token of the vocabulary occurs in the split."""
        counts = np.zeros(self.meta.vocab, np.int64)
        for start in range(0, len(self.ids), _CHUNK):
            found = np.bincount(self.ids[start : start + _CHUNK], minlength=len(counts))
            if len(found) > len(counts):
                raise TokenError(
                    f"{self.path} has the id {len(found) - 1}, outside the vocabulary of {self.meta.vocab}: the file "
                    f"is damaged or belongs to another {META}; run cdlm prepare again"
                )
            counts += found
        return torch.from_numpy(counts)

    def batch(
        self, step: int, seed: int, batch: int, rows: Int[Tensor, "b"] | None = None, length: int | None = None
    ) -> Int[Tensor, "b l"]:
        """The global batch of a step, or the `rows` of it that are wanted here.

        Row r of step k is entry k * batch + r of an endless row of epochs, each of which holds every block once.
        """
        n = self.blocks(length)
        place = step * batch + (torch.arange(batch) if rows is None else rows.cpu().long())
        epochs, index = place // n, torch.empty_like(place)
        for epoch in epochs.unique().tolist():
            here = epochs == epoch
            index[here] = shuffled(place[here] % n, n, seed, epoch)
        return self.read(index, length)

    def validation(self, batch: int, length: int | None = None) -> Iterator[Int[Tensor, "b l"]]:
        """All blocks in order, in batches; the last batch may be smaller."""
        for index in torch.arange(self.blocks(length)).split(batch):
            yield self.read(index, length)


def shuffled(index: Int[Tensor, "b"], n: int, seed: int, epoch: int) -> Int[Tensor, "b"]:
    """Entries of a permutation of 0..n-1 that belongs to (seed, epoch), without building it.

    A Feistel network permutes the pairs (left, right) of digits in base m, m * m >= n, whatever its round function;
    the few entries that land outside 0..n-1 walk on along their cycle until they come back inside.
    """
    base = math.isqrt(n - 1) + 1
    index, outside = index.clone(), torch.ones_like(index, dtype=torch.bool)
    while outside.any():
        left, right = index[outside] // base, index[outside] % base
        for number in range(_ROUNDS):
            noise = seeded(seed, "epoch", epoch, number, batch=n, rows=right).integers(1, base)[:, 0]
            left, right = right, (left + noise) % base
        index[outside] = left * base + right
        outside = index >= n
    return index
