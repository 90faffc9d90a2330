"""`cdlm prepare`: text in, a directory of tokens out, the same bytes whatever the number of workers.

The input is read twice: once to count, which settles the split and shows bad input before anything is written, and once
to encode. Documents stream through in chunks of fixed size, so memory stays bounded. The directory is written aside and
renamed at the end: under its final name it is either whole or not there.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from cdlm.data.config import PrepareConfig
from cdlm.data.corpora import SOURCES, SUDOKU, Corpus
from cdlm.data.holdout import characters_held, cut_in_two, documents_held, too_few
from cdlm.data.sentences import pack_document
from cdlm.data.sources import Piece, Reader, kind_of, size_of
from cdlm.data.sudoku import all_grids, digits_tokenizer, sample_grids
from cdlm.data.tokenizer import FILE, Tokenizer
from cdlm.data.tokens import DTYPES, FORMAT, META, Meta, Split
from cdlm.files import VERSION, flush, lock, naming

Ids = NDArray[np.unsignedinteger[Any]]

SAMPLE = 64_000_000
"""Characters that a tokenizer is trained on at most, taken evenly from the whole corpus."""
NUM_GRIDS = 100_000
"""Grids of a training split, where not all are listed."""
_CHUNK = 1 << 19
_WRITTEN = {"train.bin", "valid.bin", FILE, META}


@dataclasses.dataclass
class Count:
    """What went by: documents with text in them, their characters, and how many had none."""

    documents: int = 0
    characters: int = 0
    empty: int = 0

    def take(self, pieces: Iterator[Piece], documents: int | None = None) -> Iterator[Piece]:
        """Pass on the pieces of that many documents (None: of all), leaving out the empty ones."""
        inside = False
        while self.documents != documents and (piece := next(pieces, None)) is not None:
            if not inside and piece.last and not piece.text.strip():
                self.empty += 1
                continue
            inside = not piece.last
            self.characters += len(piece.text)
            self.documents += piece.last
            yield piece


def prepare(config: PrepareConfig, console: Console | None = None) -> Meta:
    """Read, count, split, train a tokenizer if asked to, encode, pack and write; returns what meta.json says."""
    console, began = console or Console(), time.perf_counter()
    if config.source in SUDOKU:
        return _prepare_grids(config, SUDOKU[config.source], console)
    reader = Reader(SOURCES[cast(Corpus, config.source)], config.separator, config.field, config.errors)
    for name in (*config.files, *config.valid):
        kind_of(name)
    tokenizer = None if config.train_vocab_size else Tokenizer.load(config.tokenizer)
    with _aside(config.out, config.overwrite) as folder, _bar(console) as progress, _one_thread_a_call():

        def read(title: str, files: tuple[str, ...], characters: int | None = None, held: int = 0) -> Iterator[Piece]:
            task = progress.add_task(title, total=characters)
            pieces = itertools.chain.from_iterable(map(reader.pieces, files))
            try:
                for piece in cut_in_two(pieces, characters - held, held) if characters and held else pieces:
                    yield piece
                    progress.advance(task, len(piece.text))
            finally:  # all that was wanted, which may be less than the whole
                progress.update(task, total=progress.tasks[task].completed)

        whole = _count(read("counting", config.files), config.files)
        apart, validating, held = None, 0, 0
        if config.valid:
            apart = _count(read("counting validation", config.valid), config.valid)
        elif whole.documents == 1 and not config.valid_documents:
            held = characters_held(whole.characters, config.valid_fraction)
        if held:
            validating = 1
        elif not config.valid:
            validating = documents_held(whole.documents, config.valid_documents, config.valid_fraction)
        training = whole.documents + bool(held) - validating if validating else None
        sample = Count()
        if tokenizer is None:
            pieces = Count().take(read("training the tokenizer", config.files, whole.characters, held), training)
            texts = (piece.text for piece in _evenly(pieces, whole.characters, sample))
            tokenizer = Tokenizer.train(texts, config.train_vocab_size)
        stream = read("encoding", config.files, whole.characters, held)
        splits = {"train": _write(folder / "train.bin", stream, training, tokenizer, config)}
        if apart:
            stream = read("encoding validation", config.valid, apart.characters)
        if apart or validating:
            splits["valid"] = _write(folder / "valid.bin", stream, None, tokenizer, config)
        if held and not splits["valid"].documents:  # one of its two parts is blank
            raise too_few(1, 1)
        meta = Meta(
            version=FORMAT,
            dtype=_dtype(tokenizer),
            vocab=tokenizer.vocab_size,
            eos=tokenizer.eos,
            bos=tokenizer.bos,
            packing=config.packing,
            length=config.seq_length,
            document_eos=config.document_eos,
            tokenizer=tokenizer.kind,
            trained_on=sample.characters,
            splits=splits,
            sources=[{"name": name, "bytes": size_of(name)} for name in (*config.files, *config.valid)],
            config=json.loads(json.dumps(dataclasses.asdict(config), default=str)),
            cdlm=VERSION,
        )
        with naming(folder, _advice(config)):
            tokenizer.save(folder)
            meta.write(folder)
    console.print(split_table(meta))
    if held:
        console.print(
            f"the input is one document: its last {splits['valid'].characters:,} characters are for validation, the "
            "rest is for training; --valid-fraction changes how many, --valid FILE takes other text"
        )
    if meta.vocab < config.train_vocab_size:
        console.print(
            f"the vocabulary has {meta.vocab:,} tokens, not the {config.train_vocab_size:,} of --train-vocab-size: no "
            "other pair of tokens occurs twice in this text; give more text for more"
        )
    console.print(f"{time.perf_counter() - began:.1f} s; wrote {config.out}")
    return meta


def _prepare_grids(config: PrepareConfig, side: int, console: Console) -> Meta:
    """Grids of Sudoku, one after the other; `cdlm/data/sudoku.py` says how they are drawn and split."""
    began = time.perf_counter()
    if side == 4:
        grids = {"train": all_grids(4), "valid": all_grids(4)}
    else:
        count = NUM_GRIDS if config.num_grids is None else config.num_grids
        grids = {"train": sample_grids(side, count, config.seed)}
        grids["valid"] = sample_grids(side, count // 100, config.seed, valid=True)
    tokenizer = digits_tokenizer(side)
    with _aside(config.out, config.overwrite) as folder, naming(folder, _advice(config)):
        splits = {}
        for name, tokens in grids.items():
            data = tokens.numpy().astype(DTYPES["uint16"]).tobytes()
            (folder / f"{name}.bin").write_bytes(data)
            digest = hashlib.sha256(data).hexdigest()
            splits[name] = Split(len(tokens), tokens.numel(), tokens.numel(), empty=0, unused=0, sha256=digest)
        meta = Meta(
            version=FORMAT,
            dtype="uint16",
            vocab=tokenizer.vocab_size,
            eos=tokenizer.eos,
            bos=tokenizer.bos,
            packing="plain",
            length=side * side,
            document_eos=False,
            tokenizer=tokenizer.kind,
            trained_on=0,
            splits=splits,
            sources=[],
            config=json.loads(json.dumps(dataclasses.asdict(config), default=str)),
            cdlm=VERSION,
        )
        tokenizer.save(folder)
        meta.write(folder)
    console.print(split_table(meta))
    if side == 4:
        console.print("both splits are all 288 grids, so that the validation loss is that of the whole distribution")
    console.print(f"{time.perf_counter() - began:.1f} s; wrote {config.out}")
    return meta


def split_table(meta: Meta) -> Table:
    """The counts of every split."""
    title = (
        f"{meta.tokenizer} tokenizer, {meta.vocab:,} tokens, {meta.dtype}; {meta.packing} packing, length {meta.length}"
    )
    shown = Table(title=title)
    for heading in ("split", "documents", "empty", "characters", "tokens", "characters a token", "blocks"):
        shown.add_column(heading, justify="left" if heading == "split" else "right")
    for name, split in meta.splits.items():
        counts = (split.documents, split.empty, split.characters, split.tokens)
        ratio = f"{split.characters / max(1, split.tokens):.2f}"
        shown.add_row(name, *(f"{n:,}" for n in counts), ratio, f"{split.tokens // meta.length:,}")
    return shown


def _count(pieces: Iterator[Piece], files: tuple[str, ...]) -> Count:
    seen = Count()
    deque(seen.take(pieces), maxlen=0)
    if not seen.documents and not seen.empty:
        raise ValueError(f"no documents in {', '.join(files)}: {'it is' if len(files) == 1 else 'they are'} empty")
    if not seen.documents:
        raise ValueError(f"no documents in {', '.join(files)} ({seen.empty} empty ones); see --source and --field")
    return seen


def _evenly(pieces: Iterable[Piece], total: int, taken: Count) -> Iterator[Piece]:
    """About SAMPLE characters out of `total`, spread over all of them."""
    share, seen = min(1.0, SAMPLE / total), 0
    for piece in pieces:
        if taken.characters <= share * seen:
            taken.characters += len(piece.text)
            yield piece
        seen += len(piece.text)


def _dtype(tokenizer: Tokenizer) -> str:
    return "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"


def _write(
    path: Path, pieces: Iterator[Piece], documents: int | None, tokenizer: Tokenizer, config: PrepareConfig
) -> Split:
    """Encode, pack and write the next so many documents (None: all that are left)."""
    dtype = np.dtype(DTYPES[_dtype(tokenizer)])
    end = np.array([tokenizer.eos] if config.document_eos else [], dtype)

    def encode(chunk: list[Piece]) -> Ids:
        if config.packing == "sentences":
            blocks = [block for piece in chunk for block in pack_document(piece.text, tokenizer, config.seq_length)]
            return np.concatenate([np.empty(0, dtype), *blocks]).astype(dtype)
        ids = tokenizer.encode_batch([piece.text for piece in chunk])
        parts = ((one, end) if piece.last else (one,) for one, piece in zip(ids, chunk, strict=True))
        return np.concatenate(list(itertools.chain.from_iterable(parts))).astype(dtype)

    seen, workers = Count(), config.workers or os.cpu_count() or 1
    digest, tokens, made, rest = hashlib.sha256(), 0, 0, np.empty(0, dtype)
    with naming(path, _advice(config)), path.open("wb") as file:
        for ids in _in_order(encode, _chunks(seen.take(pieces, documents)), workers):
            made += len(ids)
            if config.packing == "wrapped":
                ids, rest = wrap(np.concatenate([rest, ids]), config.seq_length, tokenizer.bos, tokenizer.eos)
            data = ids.tobytes()
            file.write(data)
            digest.update(data)
            tokens += ids.size
    if config.packing != "plain" and not tokens:
        shorter = f", or a --seq-length of at most {made + 2}" if made else ""
        larger = ", or a larger --valid-fraction" if path.stem == "valid" and not config.valid else ""
        raise ValueError(
            f"the {path.stem} split has {made} tokens, which fill no block; give it more text{shorter}{larger}"
        )
    return Split(seen.documents, seen.characters, tokens, seen.empty, len(rest), digest.hexdigest())


def _advice(config: PrepareConfig) -> str:
    return f"make room or choose another --out; nothing new is left under {config.out}"


def wrap(ids: Ids, length: int, bos: int, eos: int) -> tuple[Ids, Ids]:
    """Blocks of start + (length - 2) ids + end, and the ids that are left over."""
    body = length - 2
    n = len(ids) // body
    blocks = np.empty((n, length), ids.dtype)
    blocks[:, 0], blocks[:, -1] = bos, eos
    blocks[:, 1:-1] = ids[: n * body].reshape(n, body)
    return blocks, ids[n * body :]


def _chunks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Work for one call of the tokenizer: whole pieces, about as many characters each time."""
    chunk: list[Piece] = []
    size = 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece.text)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _in_order(work: Callable[[list[Piece]], Ids], chunks: Iterable[list[Piece]], workers: int) -> Iterator[Ids]:
    """Map over threads, results in the order of the chunks, only a few chunks ahead. The tokenizer frees the GIL."""
    waiting: deque[Future[Ids]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for chunk in chunks:
                waiting.append(pool.submit(work, chunk))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _one_thread_a_call() -> Iterator[None]:
    """Keep the tokenizer from starting threads of its own beside the workers."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


@contextlib.contextmanager
def _aside(out: Path, overwrite: bool) -> Iterator[Path]:
    """A directory to write into that takes the name `out` at the end, and goes away if anything fails before.

    What a killed run has left of it is removed by the next. Two runs at a time are told apart by a lock.
    """
    _check_free(out, overwrite)
    partial, old = (out.with_name(f".{out.name}.{what}") for what in ("partial", "old"))
    partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        lock(handle, f"another run is writing {out}; wait for it, or choose another --out")
        if old.exists() and not out.exists():  # a run died between the two renames below
            old.rename(out)
            _check_free(out, overwrite)
        for left in partial.iterdir():
            left.unlink()
        try:
            yield partial
            for path in partial.iterdir():
                flush(path)
            flush(partial)
            if out.exists():
                shutil.rmtree(old, ignore_errors=True)
                out.rename(old)
            partial.rename(out)
            flush(out.parent)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(handle)


def _check_free(out: Path, overwrite: bool) -> None:
    if not out.name:
        raise ValueError(f"--out {out} has no name of its own; give a directory to make, such as {out / 'tokens'}")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; give a directory to make")
    inside = {path.name for path in out.iterdir()} if out.exists() else set()
    if inside and not overwrite:
        raise ValueError(f"{out} exists; replace it with --overwrite, or choose another --out")
    if inside and (META not in inside or inside - _WRITTEN):
        other = ", ".join(sorted(inside - _WRITTEN)[:3]) or f"no {META}"
        raise ValueError(
            f"{out} is not only a directory of tokens ({other}), so --overwrite leaves it; choose another --out"
        )


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)
