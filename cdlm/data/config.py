"""What `cdlm prepare` is asked for: plain values, checked without importing numpy."""

import dataclasses
from pathlib import Path

import tyro

from cdlm.data import BYTES, Packing
from cdlm.data.corpora import SOURCES, SUDOKU, Corpus, Puzzle
from cdlm.data.sources import Errors
from cdlm.sample.settings import flag


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """Turn text into a directory of tokens that training reads."""

    files: tyro.conf.Positional[tuple[str, ...]]
    """.txt, .md, .jsonl (also .gz, .xz), .parquet, .tar, a directory of `datasets`, or owner/name:config@split of the
    hub. None for Sudoku grids, which are generated."""
    out: Path
    """Directory to write: train.bin, valid.bin, tokenizer.json, meta.json."""
    source: Corpus | Puzzle = "plain"
    """How documents are cut and cleaned: at separator lines, at every line, or as is usual for a known corpus; or the
    Sudoku grids to generate."""
    tokenizer: str = BYTES
    """`bytes` (257 ids, nothing to download), a tokenizer.json, a directory with GPT-2's vocab.json and merges.txt, or
    the name of a bundled model (cdlm zoo), which has its own."""
    train_vocab_size: int = 0
    """Train a byte-level BPE of this many tokens on the training documents instead, such as 16384; 0: do not."""
    packing: Packing = "wrapped"
    """wrapped: blocks of start + (length - 2) tokens + end, as MDLM and DUO; plain: one stream, cut when training;
    sentences: start + whole sentences of one document, filled up with ends, so that texts begin and end as such."""
    seq_length: int = 1024
    """Ids in a block; for plain packing only the default of training."""
    document_eos: bool = True
    """Put the end-of-text id after every document; DUO's zero-shot sets do without."""
    valid: tuple[str, ...] = ()
    """Separate inputs for the validation split."""
    valid_documents: int = 0
    """Use the last so many documents for validation."""
    valid_fraction: float | None = None
    """Use this share of the documents, the last ones, for validation, or of a single document its last part; 0: none.
    [0.01, unless the above are given]"""
    separator: str = "<|endoftext|>"
    """The line between documents of a .txt; empty: blank lines. Without any such line the file is one document."""
    field: str | None = None
    """Field or column that holds the text. [`text`, for ptb `sentence`]"""
    errors: Errors = "strict"
    """Bytes that are not UTF-8: stop, or put a replacement character."""
    workers: int = 0
    """Threads that encode; 0: one for each core. The result does not depend on it."""
    overwrite: bool = False
    """Replace an existing directory of tokens."""
    num_grids: int | None = None
    """Sudoku grids to draw for training, and a hundredth of them for validation. [100,000; sudoku-4 has all 288]"""
    seed: int = 0
    """Random seed of the Sudoku grids."""

    def __post_init__(self) -> None:
        if self.source not in (*SOURCES, *SUDOKU):
            raise ValueError(f"unknown --source {self.source!r}; choose from {', '.join((*SOURCES, *SUDOKU))}")
        if self.source in SUDOKU:
            self._check_grids()
            return
        if not self.files:
            raise ValueError("name at least one input: cdlm prepare FILE... --out DIR")
        for name in ("num_grids", "seed"):
            if getattr(self, name) != _DEFAULTS[name]:
                raise ValueError(f"{flag(name)} is for grids of Sudoku: leave it out, or add --source sudoku-6")
        if self.packing != "plain" and self.seq_length < 3:
            raise ValueError(f"--seq-length must be at least 3, for a start, a token and an end; got {self.seq_length}")
        if self.packing == "sentences" and not self.document_eos:
            raise ValueError("--packing sentences ends every block by itself: leave out --no-document-eos")
        if self.seq_length < 1:
            raise ValueError(f"--seq-length must be at least 1; got {self.seq_length}")
        if self.train_vocab_size and not 257 <= self.train_vocab_size <= 2**24:
            raise ValueError(
                f"--train-vocab-size must be at least 257 (all bytes and an end of text) and at most {2**24}; "
                f"got {self.train_vocab_size}; for plain bytes leave it out"
            )
        if self.train_vocab_size and self.tokenizer != BYTES:
            raise ValueError("--train-vocab-size trains a tokenizer, --tokenizer names one; give only one of the two")
        if sum(map(bool, (self.valid, self.valid_documents, self.valid_fraction is not None))) > 1:
            raise ValueError("give only one of --valid, --valid-documents and --valid-fraction")
        if self.valid_documents < 0 or not 0 <= (self.valid_fraction or 0) < 1:
            raise ValueError(
                "--valid-documents must be at least 0, and --valid-fraction from 0 up to, not including, 1"
            )
        if "\n" in self.separator or "\r" in self.separator:
            raise ValueError("--separator is the text of one line; it cannot hold a line end")
        if self.workers < 0:
            raise ValueError(f"--workers must be at least 0; got {self.workers}")

    def _check_grids(self) -> None:
        """Refuse options that say how text is read."""
        if self.files:
            raise ValueError(f"--source {self.source} generates its grids: leave out {self.files[0]}")
        for name, default in _DEFAULTS.items():
            if name not in ("out", "source", "overwrite", "num_grids", "seed") and getattr(self, name) != default:
                raise ValueError(f"{flag(name)} is for text, and --source {self.source} generates grids: leave it out")
        if self.source == "sudoku-4" and self.num_grids is not None:
            raise ValueError("--source sudoku-4 has all 288 grids: leave out --num-grids")
        if self.num_grids is not None and self.num_grids < 100:
            raise ValueError(f"--num-grids must be at least 100 (got {self.num_grids})")


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(PrepareConfig) if field.name != "files"}
