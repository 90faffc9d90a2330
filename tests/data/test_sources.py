"""Inputs: every format gives the same documents, streams in bounded pieces, and names the place of what is wrong."""

import gzip
import io
import json
import lzma
import sys
import tarfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdlm.data import sources
from cdlm.data.corpora import SOURCES, detokenise_lambada, detokenise_ptb, detokenise_wikitext
from cdlm.data.sources import Reader, SourceError, kind_of
from cdlm.data.tokenizer import Tokenizer

DOCUMENTS = ["One line.", "Two\nlines, naïve 東京.", "  indented\n\nwith a gap"]


def documents(reader: Reader, path: Path | str) -> list[str]:
    """Whole documents, put together from their pieces."""
    found, text = [], ""
    for piece in reader.pieces(str(path)):
        text += piece.text
        if piece.last:
            found.append(text)
            text = ""
    assert not text
    return found


def as_text(folder: Path, suffix: str = "") -> Path:
    data = "".join(f"{document}\n<|endoftext|>\n" for document in DOCUMENTS).encode()
    path = folder / f"corpus.txt{suffix}"
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix](data))
    return path


def as_jsonl(folder: Path, suffix: str = "") -> Path:
    data = "".join(json.dumps({"id": 1, "text": document}) + "\n" for document in DOCUMENTS).encode()
    path = folder / f"corpus.jsonl{suffix}"
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix](data))
    return path


def as_parquet(folder: Path) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": DOCUMENTS, "n": [1, 2, 3]}), folder / "corpus.parquet")
    return folder / "corpus.parquet"


@pytest.mark.parametrize(
    "write",
    [
        as_text,
        lambda folder: as_text(folder, ".gz"),
        lambda folder: as_text(folder, ".xz"),
        as_jsonl,
        lambda folder: as_jsonl(folder, ".gz"),
        as_parquet,
    ],
)
def test_every_format_gives_the_same_documents(write: Callable[[Path], Path], tmp_path: Path) -> None:
    assert documents(Reader(), write(tmp_path)) == DOCUMENTS


@pytest.mark.parametrize(
    ("text", "separator", "expected"),
    [
        ("a\nb", "<|endoftext|>", ["a\nb"]),
        ("a\n<|endoftext|>\nb\n", "<|endoftext|>", ["a", "b"]),
        ("a\n  <|endoftext|> \nb", "<|endoftext|>", ["a", "b"]),
        ("a <|endoftext|>\nb", "<|endoftext|>", ["a <|endoftext|>\nb"]),
        ("a\n<|endoftext|>\n<|endoftext|>\nb", "<|endoftext|>", ["a", "", "b"]),
        ("a\n--\nb\n--\n", "--", ["a", "b"]),
        ("a\nb\n\n\n  \nc\n\n", "", ["a\nb", "c"]),
        ("", "--", []),
    ],
)
def test_separator_lines(text: str, separator: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(text)
    assert documents(Reader(separator=separator), tmp_path / "x.txt") == expected


def test_line_ends_nul_and_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\rc\nd\0e\r\n<|endoftext|>\r\nf\r")
    assert documents(Reader(), tmp_path / "x.txt") == ["a\nb\nc\nde", "f"]
    (tmp_path / "x.jsonl").write_text('\ufeff{"text": "a\\r\\nb\\u0000"}\r\n\r\n{"text": null}\n')
    assert documents(Reader(), tmp_path / "x.jsonl") == ["a\nb", ""]


def test_blocks_tear_neither_characters_nor_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.txt").write_bytes("é東😀\r\nnaïve\r\n".encode() * 5)
    whole = documents(Reader(), tmp_path / "x.txt")
    for block in range(1, 12):
        monkeypatch.setattr(sources, "_BLOCK", block)
        assert documents(Reader(), tmp_path / "x.txt") == whole


def test_endless_lines_come_in_pieces_cut_at_white_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE", 40)
    monkeypatch.setattr(sources, "_BLOCK", 16)
    text = "some words and then <|endoftext|> " * 30 + "\n" + "x" * 100
    (tmp_path / "x.txt").write_text(text)
    pieces = list(Reader().pieces(str(tmp_path / "x.txt")))
    assert "".join(piece.text for piece in pieces) == text
    assert all(len(piece.text) <= 40 for piece in pieces)
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(piece.text[0].isspace() for piece in pieces[1:25])
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": text}))
    assert documents(Reader(), tmp_path / "x.jsonl") == [text]


@given(st.lists(st.sampled_from(["a", "word", "don't", " ", "\n", "\n\n", "  ", "\t", "12", ".", "東京"]), max_size=80))
def test_cuts_do_not_change_the_tokens(words: list[str]) -> None:
    tokenizer, text = BPE, "".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE", 64)
        pieces = list(sources._regroup([(text, True)], lambda text: text))
    cut = [i for piece in pieces for i in tokenizer.encode(piece.text)]
    if all(piece.text[0].isspace() for piece in pieces[1:]):  # words shorter than a piece
        assert cut == tokenizer.encode(text.removesuffix("\n"))


BPE = Tokenizer.train(["word don't a 12 . 東京\n\n word\n\n\nword  a\t12"] * 9, 290)


def test_cleaning_keeps_the_space_at_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE", 32)
    text = "alpha beta " * 20
    pieces = sources._regroup([(text, True)], str.strip)
    assert "".join(piece.text for piece in pieces).strip() == text.strip()


def test_openwebtext_archives_are_opened_inside_out(tmp_path: Path) -> None:
    def packed(files: dict[str, bytes], mode: str) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode=mode) as archive:
            for name, data in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        return buffer.getvalue()

    first = packed({"1.txt": b"one\n\n\n\nmore\n", "skip.md": b"no"}, "w:xz")
    second = packed({"2.txt": "zwei ü".encode()}, "w:xz")
    (tmp_path / "openwebtext.tar").write_bytes(
        packed({"o/urlsf_subset00-1_data.xz": first, "o/urlsf_subset00-2_data.xz": second}, "w")
    )
    reader = Reader(SOURCES["openwebtext"])
    assert documents(reader, tmp_path / "openwebtext.tar") == ["one\n\nmore", "zwei ü"]
    (tmp_path / "urlsf_subset00-1_data.xz").write_bytes(first)
    assert documents(reader, tmp_path / "urlsf_subset00-1_data.xz") == ["one\n\nmore"]
    (tmp_path / "cut.tar.xz").write_bytes(first[:-20])
    with pytest.raises(SourceError, match=r"cut.tar.xz is damaged or cut short"):
        documents(reader, tmp_path / "cut.tar.xz")


RAW = (
    " \n = First Title = \n \n Text of it , well @-@ known ( really ) . \n \n = = Part = = \n \n 1 @,@ 000 men . \n \n"
    " = Second = \n \n Its text : x = 2 = \n"
)
ARTICLES = [
    "= First Title =\n\nText of it, well-known (really).\n\n== Part ==\n\n1,000 men.",
    "= Second =\n\nIts text: x = 2 =",
]


def test_wikitext_is_cut_at_titles_from_text_and_from_rows(tmp_path: Path) -> None:
    reader = Reader(SOURCES["wikitext103"])
    (tmp_path / "wiki.valid.raw").write_text(RAW)
    assert documents(reader, tmp_path / "wiki.valid.raw") == ARTICLES
    rows = ["" if not line.strip() else line + "\n" for line in RAW.removesuffix("\n").split("\n")]
    (tmp_path / "wiki.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    assert documents(reader, tmp_path / "wiki.jsonl") == ARTICLES


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("the dogs ' house , it 's", "the dogs' house, it's"),
        ('he said " well , yes " ; so', 'he said "well, yes"; so'),
        ("3 @.@ 5 [ sic ] at 20 ° C !", "3.5 [sic] at 20°C!"),
        ("a film ' of note ' , it 's", "a film 'of note', it's"),
        (" = = = Deep = = = ", "=== Deep ==="),
        ("one line\n two lines ?", "one line\ntwo lines?"),
    ],
)
def test_wikitext_detokeniser(raw: str, clean: str) -> None:
    assert detokenise_wikitext(raw) == clean
    assert detokenise_wikitext(clean) == clean


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        (" it was n't N N points ", "it wasn't 1 1 points"),
        ("mr. <unk> 's stock fell $ N to N", "mr. ?'s stock fell $1 to 1"),
        ("traders ' fears of a # N and\\/or", "traders' fears of a #1 and/or"),
    ],
)
def test_ptb_detokeniser(raw: str, clean: str) -> None:
    assert detokenise_ptb(raw) == clean


def test_ptb_and_lines_make_every_line_a_document(tmp_path: Path) -> None:
    (tmp_path / "ptb.test.txt").write_text(" no it was n't \n N points\n")
    assert documents(Reader(SOURCES["ptb"]), tmp_path / "ptb.test.txt") == ["no it wasn't", "1 points"]
    (tmp_path / "x.txt").write_text("a b\nc")
    assert documents(Reader(SOURCES["lines"]), tmp_path / "x.txt") == ["a b", "c"]
    (tmp_path / "x.jsonl").write_text('{"sentence": "N <unk>"}')
    assert documents(Reader(SOURCES["ptb"]), tmp_path / "x.jsonl") == ["1 ?"]


def test_lambada_quotes_become_ascii() -> None:
    assert detokenise_lambada(" \u201cIt\u2019s \u2018here\u2019,\u201d she said ") == "\n\"It's 'here',\" she said"


class Rows:
    """What of a dataset of the `datasets` library is used."""

    def __init__(self, rows: dict[str, list[str]]) -> None:
        self.rows, self.column_names = rows, list(rows)

    def select_columns(self, names: list[str]) -> "Rows":
        return Rows({name: self.rows[name] for name in names})

    def iter(self, batch_size: int) -> Iterator[dict[str, list[str]]]:
        yield self.rows


def test_datasets_of_the_hub_and_saved_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    library = types.ModuleType("datasets")

    def load_dataset(name: str, config: str | None, split: str) -> Rows:
        if name == "no/such":
            raise ConnectionError("unreachable")
        asked.append((name, config, split))
        return Rows({"text": DOCUMENTS, "url": [""] * 3})

    monkeypatch.setattr(library, "load_dataset", load_dataset, raising=False)
    monkeypatch.setattr(library, "load_from_disk", lambda name: Rows({"text": DOCUMENTS[:1]}), raising=False)
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert documents(Reader(), "Skylion007/openwebtext") == DOCUMENTS
    assert documents(Reader(), "Salesforce/wikitext:wikitext-103-raw-v1@validation") == DOCUMENTS
    assert asked == [
        ("Skylion007/openwebtext", None, "train"),
        ("Salesforce/wikitext", "wikitext-103-raw-v1", "validation"),
    ]
    assert documents(Reader(), tmp_path) == DOCUMENTS[:1]
    with pytest.raises(SourceError, match=r"no column 'story'; it has text, url; choose with --field"):
        documents(Reader(field="story"), "a/b")
    with pytest.raises(SourceError, match=r"cannot load no/such \(ConnectionError: unreachable\)"):
        documents(Reader(), "no/such")
    monkeypatch.setattr(library, "load_from_disk", lambda name: {"train": None, "test": None})
    with pytest.raises(SourceError, match=r"several splits; name one of them: .*/train"):
        documents(Reader(), tmp_path)


def test_a_dataset_saved_by_the_library_itself(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": DOCUMENTS}).save_to_disk(str(tmp_path / "saved"))
    assert documents(Reader(), tmp_path / "saved") == DOCUMENTS


@pytest.mark.parametrize(("library", "name"), [("pyarrow", "x.parquet"), ("datasets", "saved"), ("datasets", "a/b")])
def test_a_missing_library_is_named(library: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    (tmp_path / "saved").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=rf'needs .*{library}.* pip install -c constraints.txt -e "\.\[data\]"'):
        documents(Reader(), name)


def test_bad_parquet(tmp_path: Path) -> None:
    path = as_parquet(tmp_path)
    with pytest.raises(SourceError, match="no column 'body'; it has text, n"):
        documents(Reader(field="body"), path)
    with pytest.raises(SourceError, match="holds a int where text is wanted"):
        documents(Reader(field="n"), path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(SourceError, match=r"corpus.parquet is damaged or cut short"):
        documents(Reader(), path)


def test_text_that_is_not_utf8_is_named_by_its_byte(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"fine " * 300_000 + b"\xff bad")
    with pytest.raises(SourceError, match=r"x.txt is not UTF-8 at byte 1500000 \(0xff\)") as caught:
        documents(Reader(), tmp_path / "x.txt")
    assert "--errors replace" in str(caught.value)
    assert documents(Reader(errors="replace"), tmp_path / "x.txt")[0].endswith("fine \ufffd bad")
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "\xe9"}\n')
    with pytest.raises(SourceError, match="not UTF-8 at byte 25"):
        documents(Reader(), tmp_path / "x.jsonl")
    (tmp_path / "x.txt").write_bytes("tokyo 東".encode()[:-1])
    with pytest.raises(SourceError, match="not UTF-8 at byte 6"):
        documents(Reader(), tmp_path / "x.txt")


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        ('{"text": "a"}\n{"text": ', "line 2 of .* is not JSON"),
        ('{"body": "a"}', "line 1 of .* no field 'text'; it has body; choose with --field"),
        ('["a"]', "it has a list"),
        ('{"text": 3}', "line 1 of .* holds a int"),
        ('{"text": "\\ud800"}', "not valid Unicode at character 0"),
    ],
)
def test_bad_json_lines_are_named(content: str, advice: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(SourceError, match=advice):
        documents(Reader(), tmp_path / "x.jsonl")


def test_half_a_surrogate_pair_can_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a\\ud800b \\ud83d\\ude00"}')
    assert documents(Reader(errors="replace"), tmp_path / "x.jsonl") == ["a\ufffdb 😀"]


def test_an_endless_json_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_ROW", 1 << 20)
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "a" * (1 << 20)}))
    with pytest.raises(SourceError, match=r"line 1 of .* longer than 1 MiB"):
        documents(Reader(), tmp_path / "x.jsonl")


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_compressed_files_cut_short_are_named(suffix: str, tmp_path: Path) -> None:
    path = as_text(tmp_path, suffix)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(SourceError, match=rf"corpus.txt{suffix} is damaged or cut short"):
        documents(Reader(), path)
    path.write_bytes(b"plain text under a wrong name")
    with pytest.raises(SourceError, match="damaged"):
        documents(Reader(), path)


@pytest.mark.parametrize("name", ["nowhere.txt", "data/nowhere.jsonl", "data/x.txt.xz", "./a/b/c", "just-a-word"])
def test_files_that_are_not_there(name: str) -> None:
    with pytest.raises(SourceError, match=f"there is no file {name}; a hub dataset is written as owner/name"):
        kind_of(name)


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n\0", b"\x7fELF\x02\x01\x01\0"])
def test_a_file_that_is_not_text(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(SourceError, match=r"x.bin is not text; give .txt, .md or .jsonl"):
        kind_of(str(tmp_path / "x.bin"))


def test_half_a_character_at_the_end_of_the_look_is_still_text(tmp_path: Path) -> None:
    (tmp_path / "x.doc").write_bytes(b"a" * 4095 + "é".encode())
    with pytest.raises(SourceError, match=r"cannot tell what .*x.doc is; rename it"):
        kind_of(str(tmp_path / "x.doc"))


def test_markdown_is_text(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# A title\n\nSome text\n")
    assert documents(Reader(), tmp_path / "notes.md") == ["# A title\n\nSome text"]


def test_a_folder_of_texts_is_told_to_name_them(tmp_path: Path) -> None:
    books = tmp_path / "books"
    books.mkdir()
    assert kind_of(str(books)) == "folder"
    (books / "a.txt").write_text("a")
    with pytest.raises(SourceError, match=r"books is a folder; name the files in it: .*books/\*.txt$"):
        kind_of(str(books))
    (books / "state.json").write_text("{}")  # as a saved dataset has
    assert kind_of(str(books)) == "folder"


def test_a_file_of_unknown_kind(tmp_path: Path) -> None:
    (tmp_path / "x.pdf").write_bytes(b"%PDF")
    with pytest.raises(SourceError, match=r"cannot tell what .*x.pdf is; rename it"):
        kind_of(str(tmp_path / "x.pdf"))
