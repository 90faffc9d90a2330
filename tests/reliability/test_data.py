"""Bad data and big data: what is wrong is named with its place, and memory stays bounded."""

import gzip
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cdlm.data.config import PrepareConfig
from cdlm.data.prepare import prepare
from cdlm.data.tokens import TokenError, open_tokens
from cdlm.train.config import to_json
from cdlm.train.loop import train

from .conftest import Ended, command, in_child
from .disk import die_at, watch

MIB = 1 << 20


def grown(work: Callable[[], object], limit: int = 60) -> tuple[Ended, int]:
    """How a child ended, and by how many bytes its memory grew at most."""

    def measured() -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = peak()
        try:
            work()
        finally:
            print(f"\ngrew {peak() - before}")

    end = in_child(measured, limit)
    return end, int(end.text.rpartition("grew ")[2].split()[0])


def peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def quiet(**settings: object) -> Callable[[], object]:
    return lambda: prepare(PrepareConfig(workers=2, **settings), Console(quiet=True))


@pytest.fixture
def folder(corpus: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(corpus, tmp_path / "tokens"))


def spoil_meta(folder: Path, **changes: object) -> None:
    path = folder / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def spoil_split(folder: Path, **changes: object) -> None:
    splits = json.loads((folder / "meta.json").read_text())["splits"]
    spoil_meta(folder, splits={**splits, "train": {**splits["train"], **changes}})


def ids(folder: Path, at: int, value: int) -> None:
    data = np.fromfile(folder / "train.bin", "<u2")
    data[at:] = value
    data.tofile(folder / "train.bin")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated by a byte": (lambda f: os.truncate(f / "train.bin", (f / "train.bin").stat().st_size - 1), "truncated"),
    "truncated to nothing": (lambda f: os.truncate(f / "train.bin", 0), "truncated"),
    "truncated validation": (lambda f: os.truncate(f / "valid.bin", 10), "valid.bin is truncated"),
    "too long": (lambda f: os.truncate(f / "train.bin", 1 << 20), "not the file that was prepared"),
    "a wider dtype in meta.json": (lambda f: spoil_meta(f, dtype="uint32"), "truncated"),
    "a dtype that is none": (lambda f: spoil_meta(f, dtype="int8"), "dtype 'int8'"),
    "ids beyond the vocabulary": (lambda f: ids(f, 0, 300), "has the id 300 at byte"),
    "a start beyond the vocabulary": (lambda f: spoil_meta(f, bos=257), "meta.json is damaged"),
    "a negative end": (lambda f: spoil_meta(f, eos=-1), "meta.json is damaged"),
    "a length of 0": (lambda f: spoil_meta(f, length=0), "meta.json is damaged"),
    "an unknown packing": (lambda f: spoil_meta(f, packing="loose"), "meta.json is damaged"),
    "a count that is a word": (lambda f: spoil_split(f, tokens="many"), "meta.json is damaged"),
    "a count that is a fraction": (lambda f: spoil_split(f, tokens=7794.0), "meta.json is damaged"),
    "a version without end": (lambda f: (f / "meta.json").write_text('{"version": 1e999}'), "meta.json is damaged"),
    "nested without end": (lambda f: (f / "meta.json").write_text("[" * 100_000), "meta.json is damaged"),
    "not UTF-8": (lambda f: (f / "meta.json").write_bytes(b"\xff{}"), "meta.json is damaged"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "there is no tokenizer at"),
    "a tokenizer nested without end": (lambda f: (f / "tokenizer.json").write_text("[" * 100_000), "tokenizer.json"),
    "a tokenizer of another version": (
        lambda f: (f / "tokenizer.json").write_text('{"format": "cdlm-bytes", "version": "x"}'),
        "tokenizer.json was written by a newer cdlm, or is damaged",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_tokens_are_named_before_or_as_they_are_read(fault: str, folder: Path, recipe, tmp_path, tried) -> None:
    break_it, message = FAULTS[fault]
    break_it(folder)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(to_json(recipe("mdlm", data=folder))))
    end = in_child(command("train", path))
    assert end.status == 1, end.text
    assert "Traceback" not in end.text
    assert message in end.text
    assert str(folder) in end.text
    tried(f"tokens: {fault}", 1, "an error that names the file")


TEXTS: dict[str, tuple[bytes, tuple[str, ...], str | list[str]]] = {
    "no documents": (b"", (), "no documents in"),
    "only blank lines": (b"\n\n \t\r\n" * 100, ("--source", "lines"), "no documents in"),
    "only NUL bytes": (b"\0" * 5000, (), "no documents in"),
    "invalid UTF-8": (b"good\n" * 10 + b"b\xffd\n", ("--source", "lines"), "is not UTF-8 at byte 51"),
    "half a character at the end": ("aé".encode()[:-1], (), "is not UTF-8 at byte 1"),
    "invalid UTF-8, replaced": (b"a\xffb\nc\n", ("--source", "lines", "--errors", "replace"), ["a\ufffdb", "c"]),
    "empty documents between": (b"a\n\n\n  \nb\n\nc", ("--source", "lines"), ["a", "b", "c"]),
    "NUL bytes inside": (b"a\0b\nc\0\nd", ("--source", "lines"), ["ab", "c", "d"]),
    "mixed line ends": (b"a\r\nb\rc\nd\r\n", ("--source", "lines"), ["a", "b", "c", "d"]),
    "a byte order mark": (b"\xef\xbb\xbfa\nb", ("--source", "lines"), ["a", "b"]),
    "UTF-16": ("text\n".encode("utf-16"), (), "is not UTF-8 at byte 0"),
    "one document": (b"alone", (), "--valid-fraction 0"),
}


@pytest.mark.parametrize("fault", TEXTS)
def test_text_that_is_not_as_it_should_be(fault: str, tmp_path: Path, tried) -> None:
    data, flags, expected = TEXTS[fault]
    source, out = tmp_path / "x.txt", tmp_path / "out"
    source.write_bytes(data)
    packing = ("--packing", "plain", "--seq-length", "2", "--workers", "1")
    split = () if fault == "one document" else ("--valid-fraction", "0")
    end = in_child(command("prepare", source, "--out", out, *packing, *split, *flags))
    assert "Traceback" not in end.text
    if isinstance(expected, str):
        assert end.status == 1, end.text
        assert expected in end.text
        assert sorted(path.name for path in tmp_path.iterdir()) == ["x.txt"]  # nothing half done
    else:
        assert end.status == 0, end.text
        ends = "".join(chr(i) if i < 256 else "\n" for i in open_tokens(out).ids)
        assert ends.encode("latin-1").decode().split("\n")[:-1] == expected
    tried(f"text: {fault}", 1, "named, or read as meant")


def endless(path: Path, size: int, kind: str) -> Path:
    """A line without an end, packed: words, or one word."""
    block = (b"word " if kind == "words" else b"aaaaa") * (MIB // 5)
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(size // len(block)):
            file.write(block)
    return path


@pytest.mark.parametrize("kind", ["words", "one word"])
@pytest.mark.parametrize("size", [96 * MIB, pytest.param(1024 * MIB, marks=pytest.mark.soak)])
def test_a_line_without_end_needs_no_memory(kind: str, size: int, tmp_path: Path, tried) -> None:
    """Two workers hold a few pieces of a mebibyte each. All ids at once would be eight times the line."""
    source = endless(tmp_path / "x.txt.gz", size, kind)
    settings = {"files": (str(source),), "out": tmp_path / "out", "source": "lines", "valid_fraction": 0.0}
    end, most = grown(quiet(**settings), limit=280)
    assert end.status == 0, end.text
    assert open_tokens(tmp_path / "out").meta.splits["train"].characters >= size - MIB
    assert most < 200 * MIB, most
    tried(f"a line of {size // MIB} MiB ({kind})", 1, f"{most / MIB:.0f} MiB of memory")


def test_a_stream_of_documents_needs_no_memory(tmp_path: Path, tried) -> None:
    line = json.dumps({"text": "some words of a document " * 40}).encode() + b"\n"
    with gzip.open(tmp_path / "x.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(50):
            file.write(line * (MIB // len(line)))
    end, most = grown(quiet(files=(str(tmp_path / "x.jsonl.gz"),), out=tmp_path / "out", valid_documents=5))
    assert end.status == 0, end.text
    assert most < 200 * MIB, most
    tried("a stream of 50 MiB of documents", 1, f"{most / MIB:.0f} MiB of memory")


def test_a_corpus_far_larger_than_memory_trains(folder: Path, recipe, tried) -> None:
    """64 GiB of tokens, sparse on the disk: opened, trained on and validated without being read."""
    tokens = 1 << 35
    os.truncate(folder / "train.bin", 2 * tokens)
    spoil_split(folder, tokens=tokens)
    end, most = grown(lambda: train(recipe("mdlm", data=folder, steps=3)))
    assert end.status == 0, end.text
    assert "34,359,738,368 tokens" in end.text
    assert most < 200 * MIB, most
    tried("train.bin of 64 GiB", 1, f"three steps in {most / MIB:.0f} MiB of memory")


def test_preparing_dies_at_every_touch_of_the_disk(tmp_path: Path, tried) -> None:
    """kill -9 while an older folder is replaced: the old one or the new one is there, or the next run mends it."""
    for name in ("old", "new"):
        (tmp_path / f"{name}.txt").write_text(f"{name} text\n" * 30)
    out = tmp_path / "tokens"

    def work(name: str) -> Callable[[], object]:
        settings = {"source": "lines", "packing": "plain", "seq_length": 4, "overwrite": True}
        return quiet(files=(str(tmp_path / f"{name}.txt"),), out=out, **settings)

    count = in_child(lambda: (work("old")(), watch(lambda event: print("touch")), work("new")()))
    total = count.text.count("touch")
    assert total > 15, count.text
    whole = 0
    for number in range(1, total + 1):
        shutil.rmtree(out, ignore_errors=True)
        work("old")()
        end = in_child(lambda number=number: (die_at(number), work("new")()))
        assert end.status == -signal.SIGKILL, end.text
        if out.exists():
            assert bytes(open_tokens(out).ids[:3].astype(np.uint8)) in (b"old", b"new")
            whole += 1
        else:  # between two renames: the old one waits under another name
            with pytest.raises(ValueError, match="exists; replace it with --overwrite"):
                prepare(PrepareConfig((str(tmp_path / "new.txt"),), out, source="lines"), Console(quiet=True))
            assert bytes(open_tokens(out).ids[:3].astype(np.uint8)) == b"old"
        work("new")()
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert whole > total - 6
    tried("kill -9 at each touch of the disk in cdlm prepare --overwrite", total, "the old folder or the new one")


def test_a_member_of_an_archive_beyond_a_gibibyte_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tarfile

    from cdlm.data import sources

    monkeypatch.setattr(sources, "_ROW", 1000)
    (tmp_path / "x.txt").write_text("a" * 1000)
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "x.txt", "x.txt")
    with pytest.raises(ValueError, match=r"x\.txt in .*x\.tar is longer than"):
        list(sources.Reader().pieces(str(tmp_path / "x.tar")))


def test_a_full_disk_leaves_nothing_half_done(tmp_path: Path, tried) -> None:
    (tmp_path / "x.txt").write_text("some words\n" * 3000)

    def work(size: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        command("prepare", tmp_path / "x.txt", "--source", "lines", "--out", tmp_path / "out", "--seq-length", "8")()

    sizes = (0, 100, 5000, 60_000)
    for size in sizes:
        end = in_child(lambda size=size: work(size))
        assert end.status == 1, end.text
        assert "make room or choose another --out" in end.text, end.text
        assert "Traceback" not in end.text
        assert sorted(path.name for path in tmp_path.iterdir()) == ["x.txt"]
    tried("full disk under cdlm prepare", len(sizes), "an error that names the file; nothing is left")


def test_ids_are_checked_where_they_are_read(folder: Path) -> None:
    """A damaged block far into the file is found when it comes up, with its byte."""
    ids(folder, 7000, 60_000)
    batches = open_tokens(folder).validation(7)
    assert next(batches).max() < 257
    with pytest.raises(TokenError, match=r"train\.bin has the id 60000 at byte 14000"):
        list(batches)
