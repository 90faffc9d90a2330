"""Where documents come from: files and datasets, read as the corpus wants it (see corpora.py).

Everything streams. A document arrives in pieces of at most `PIECE` characters, cut in front of white space, where a
byte-level tokenizer splits anyway, so that neither a file nor a single document or line has to fit into memory.
"""

import codecs
import contextlib
import dataclasses
import gzip
import importlib
import itertools
import json
import lzma
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from cdlm.data.corpora import SOURCES, Source
from cdlm.extras import install

Errors = Literal["strict", "replace"]

PIECE = 1 << 20
"""Characters in a piece, at most."""
_BLOCK = 1 << 20
_ROW = 1 << 30
_TEXT = (".txt", ".text", ".tokens", ".raw")
_KINDS = dict.fromkeys((*_TEXT, ".md"), "text") | dict.fromkeys((".tar", ".tgz", "_data"), "tar")
_KINDS |= {".jsonl": "jsonl", ".parquet": "parquet"}
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.-]+))?")
_HEADING = re.compile(r" *= (?!=).*(?<!=) = *\n?")


class SourceError(ValueError):
    """Input that cannot be read, with the place and the way out."""


class Piece(NamedTuple):
    """A stretch of a document; `last` closes the document."""

    text: str
    last: bool


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads any input into pieces of documents."""

    source: Source = SOURCES["plain"]
    separator: str = "<|endoftext|>"
    field: str | None = None
    errors: Errors = "strict"

    def pieces(self, name: str) -> Iterator[Piece]:
        """The documents of a file, a saved dataset or a hub dataset, in order."""
        return _regroup(self._fragments(name), self.source.clean)

    def _fragments(self, name: str) -> Iterator[tuple[str, bool]]:
        """Stretches of text of any size, True with the one that closes a document."""
        kind, path = kind_of(name), Path(name)
        if kind == "text" and self.source.cut == "separator":
            return _by_separator(self._lines(path), self.separator)
        if kind == "text" and self.source.cut == "line":
            return _by_line(self._lines(path))
        if kind == "text":
            return _by_article(self._lines(path))
        rows = (self._row(text, place) for text, place in self._rows(kind, name))
        if self.source.cut == "article":  # the hub's rows are lines
            return _by_article(line + "\n" for row in rows for line in row.removesuffix("\n").split("\n"))
        return ((row, True) for row in rows)

    def _rows(self, kind: str, name: str) -> Iterator[tuple[Any, str]]:
        field, path = self.field or self.source.field, Path(name)
        if kind == "tar":
            return self._tar_rows(path)
        if kind == "jsonl":
            return self._json_rows(path, field)
        return _parquet_rows(path, field) if kind == "parquet" else _dataset_rows(name, field)

    def _lines(self, path: Path) -> Iterator[str]:
        """Lines with their ends; one beyond a piece comes in several parts, of which only the last has an end."""
        rest = ""
        for block in self._text(path):
            *whole, rest = (rest + block).split("\n")
            for line in whole:
                yield line + "\n"
            while len(rest) > PIECE:
                at = _cut(rest)
                yield rest[:at]
                rest = rest[at:]
        if rest:
            yield rest

    def _text(self, path: Path) -> Iterator[str]:
        """Text of a file block by block, with plain line ends; neither a character nor a CRLF is torn."""
        rest, offset, held = b"", 0, ""
        with open_bytes(path) as stream:
            while True:
                block = stream.read(_BLOCK)
                text, used = self._decode(rest + block, path, offset, final=not block)
                rest = (rest + block)[used:]
                text = held + (text.removeprefix("\ufeff") if offset == 0 else text)
                held = "\r" if block and text.endswith("\r") else ""
                offset += used
                yield _plain(text.removesuffix(held))
                if not block:
                    return

    def _decode(self, data: bytes, path: Path | str, offset: int, final: bool = True) -> tuple[str, int]:
        try:
            return codecs.utf_8_decode(data, self.errors, final)
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{path} is not UTF-8 at byte {offset + error.start} ({data[error.start]:#04x}); convert it, or put a "
                "replacement character there with --errors replace"
            ) from None

    def _json_rows(self, path: Path, field: str) -> Iterator[tuple[Any, str]]:
        offset = 0
        with open_bytes(path) as stream:
            for number in itertools.count(1):
                line = stream.readline(_ROW)
                if not line:
                    return
                place = f"line {number} of {path}"
                if len(line) == _ROW:
                    raise SourceError(f"{place} is longer than {_ROW >> 20} MiB; break the document up")
                text = self._decode(line, path, offset)[0].removeprefix("\ufeff")
                offset += len(line)
                if not text.strip():
                    continue
                try:
                    row = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise SourceError(f"{place} is not JSON ({error}); a .jsonl holds one object a line") from None
                if not isinstance(row, dict) or field not in row:
                    have = ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}"
                    raise SourceError(f"{place} has no field {field!r}; it has {have}; choose with --field")
                yield row[field], place

    def _tar_rows(self, path: Path, stream: IO[bytes] | None = None) -> Iterator[tuple[str, str]]:
        """Every .txt in an archive is a document; archives inside it (OpenWebText's) are opened too."""
        with contextlib.ExitStack() as stack:
            stream = stream or stack.enter_context(open_bytes(path))
            try:
                archive = stack.enter_context(tarfile.open(fileobj=stream, mode="r|*"))
                for member in archive:
                    content = archive.extractfile(member)
                    if content and member.name.endswith((".xz", ".gz", ".tar")):
                        yield from self._tar_rows(path, content)
                    elif content and member.name.endswith(_TEXT):
                        place = f"{member.name} in {path}"
                        if member.size >= _ROW:
                            raise SourceError(f"{place} is longer than {_ROW >> 20} MiB; break the document up")
                        yield self._decode(content.read(), place, 0)[0].strip(), place
            except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error) as error:
                raise _damaged(path, error) from None

    def _row(self, text: Any, place: str) -> str:
        if text is None:
            return ""
        if not isinstance(text, str):
            raise SourceError(f"{place} holds a {type(text).__name__} where text is wanted; choose with --field")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            if self.errors == "strict":
                reason = f"not valid Unicode at character {error.start}"
                raise SourceError(f"{place} is {reason}; mend it, or use --errors replace") from None
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return _plain(text)


def kind_of(name: str) -> str:
    """What an input is, by its name: text, jsonl, parquet, tar, folder or hub; refuses what is not there."""
    path, bare = Path(name), re.sub(r"\.(gz|xz)$", "", name.lower())
    kind = next((kind for suffix, kind in _KINDS.items() if bare.endswith(suffix)), None)
    if path.is_dir():
        inside = next((suffix for suffix in _KINDS if any(path.glob(f"*{suffix}"))), None)
        if inside and not any((path / saved).is_file() for saved in ("state.json", "dataset_dict.json")):
            raise SourceError(f"{name} is a folder; name the files in it: {path / '*'}{inside}")
        return "folder"
    if path.is_file() and kind is None and not _is_text(path):
        raise SourceError(f"{name} is not text; give .txt, .md or .jsonl (also .gz, .xz), .parquet or .tar")
    if path.exists() and kind is None:
        raise SourceError(f"cannot tell what {name} is; rename it to .txt or .jsonl (also .gz, .xz), .parquet or .tar")
    if not path.exists() and (kind or not _HUB.fullmatch(name)):
        raise SourceError(f"there is no file {name}; a hub dataset is written as owner/name or owner/name:config@split")
    return kind or "hub"


def _is_text(path: Path) -> bool:
    """Whether a file begins like one: UTF-8 without NUL."""
    with path.open("rb") as file:
        head = file.read(4096)
    try:
        return "\0" not in codecs.utf_8_decode(head, "strict", False)[0]
    except UnicodeDecodeError:
        return False


def size_of(name: str) -> int | None:
    """Bytes on disk, or None for a dataset of the hub."""
    path = Path(name)
    if path.is_dir():
        return sum(inside.stat().st_size for inside in path.rglob("*") if inside.is_file())
    return path.stat().st_size if path.exists() else None


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked if its name ends in .gz or .xz."""
    opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix.lower(), open)
    with opener(path, "rb") as stream:
        try:
            yield stream
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
            raise _damaged(path, error) from None
        except OSError as error:  # of reading, which does not name the file
            raise OSError(error.errno, error.strerror, str(path)) from None


def _damaged(path: Path, error: Exception) -> SourceError:
    return SourceError(f"{path} is damaged or cut short ({error}); fetch it again")


def _plain(text: str) -> str:
    """Line ends as \\n, and no NUL."""
    return text.replace("\0", "").replace("\r\n", "\n").replace("\r", "\n")


def _parquet_rows(path: Path, field: str) -> Iterator[tuple[Any, str]]:
    try:
        pyarrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    except ImportError:
        raise SourceError(f"reading {path} needs pyarrow; run in the checkout: {install('data')}") from None
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(field, file.schema_arrow.names, str(path))
            for batch in file.iter_batches(batch_size=1000, columns=[field]):
                for text in batch.column(0).to_pylist():
                    yield text, str(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from None


def _dataset_rows(name: str, field: str) -> Iterator[tuple[Any, str]]:
    """Rows of a dataset: a folder written by its `save_to_disk`, or one of the hub as owner/name:config@split."""
    folder, hub = Path(name).is_dir(), _HUB.fullmatch(name)
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        what = f"the folder {name}" if folder else f"{name} (no file here, so a dataset of the hub)"
        raise SourceError(
            f"reading {what} needs the datasets library; run in the checkout: {install('data')}"
        ) from None
    try:
        if folder or not hub:
            rows = datasets.load_from_disk(name)
        else:
            rows = datasets.load_dataset(hub["name"], hub["config"], split=hub["split"] or "train")
    except Exception as error:  # the library and its network stack raise many kinds
        way = "name the files in it, such as FOLDER/*.parquet" if folder else "name files of it that you have"
        raise SourceError(f"datasets cannot load {name} ({type(error).__name__}: {error}); {way}") from None
    if isinstance(rows, dict):
        raise SourceError(
            f"{name} holds several splits; name one of them: {', '.join(f'{name}/{key}' for key in rows)}"
        )
    _check_column(field, rows.column_names, name)
    for batch in rows.select_columns([field]).iter(batch_size=1000):
        for text in batch[field]:
            yield text, name


def _check_column(field: str, columns: Iterable[str], place: str) -> None:
    if field not in columns:
        raise SourceError(f"{place} has no column {field!r}; it has {', '.join(columns)}; choose with --field")


def _by_separator(lines: Iterable[str], separator: str) -> Iterator[tuple[str, bool]]:
    """Documents between lines that hold nothing but the separator; an empty one stands for blank lines."""
    separator, line_starts, opened = separator.strip(), True, False
    for line in lines:
        if line_starts and line.strip() == separator:
            if opened or separator:
                yield "", True
            opened = False
        else:
            yield line, False
            opened = True
        line_starts = line.endswith("\n")
    if opened:
        yield "", True


def _by_line(lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
    ended = True
    for line in lines:
        ended = line.endswith("\n")
        yield line, ended
    if not ended:
        yield "", True


def _by_article(lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Articles of WikiText: each begins with a heading of level one, ` = Title = `, after a blank line."""
    gap, opened = "", False
    for line in lines:
        if not line.strip():
            gap += line
            continue
        if opened and gap and _HEADING.fullmatch(line):
            yield "", True
            opened = False
        yield gap * opened + line, False
        gap, opened = "", True
    if opened:
        yield "", True


def _regroup(fragments: Iterable[tuple[str, bool]], clean: Callable[[str], str]) -> Iterator[Piece]:
    """Join what belongs to a document, clean it, and cut what is beyond a piece; its last line end is dropped."""
    held: list[str] = []
    size, head = 0, ""
    for text, last in fragments:
        held.append(text)
        size += len(text)
        if not last and size <= PIECE:
            continue
        text = "".join(held)
        while len(text) > PIECE:
            at = _cut(text)
            yield Piece(head + clean(text[len(head) : at]), False)
            text, head = text[at:], text[at : at + 1]  # the white space at the cut is not the document's edge
        if last:
            yield Piece(head + clean(text[len(head) :].removesuffix("\n")), True)
            text, head = "", ""
        held, size = [text], len(text)


def _cut(text: str) -> int:
    """Where to end a piece: in front of the last white space that follows a word, or anywhere if there is none."""
    start = max(0, PIECE - 4096)
    found = re.match(r"(?s).*\S(?=\s)", text[start:PIECE])
    return start + found.end() if found else PIECE
