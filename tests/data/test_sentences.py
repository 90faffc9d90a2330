"""Packing by sentences: where sentences end, what a block holds, and that nothing is lost."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cdlm.data.config import PrepareConfig
from cdlm.data.prepare import prepare
from cdlm.data.sentences import pack_document, sentences
from cdlm.data.tokenizer import Tokenizer
from cdlm.data.tokens import TokenError, open_tokens

BYTES = Tokenizer.load("bytes")
CAPITALS = [letter for letter in map(chr, range(0x100, 0x180)) if letter.isupper()]
WORDS = Tokenizer.train(["The cat sat. A dog ran! It rained on the old sea, and the cat slept."] * 20, 300)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("One. Two! Three? Four", ["One.", " Two!", " Three?", " Four"]),
        ('"Go." She went. "Why?" he said.', ['"Go."', " She went.", ' "Why?" he said.']),
        ("Mr. Smith met Dr. No. He ran.", ["Mr. Smith met Dr. No. He ran."]),
        ("J. R. Green and A. Bell. They met.", ["J. R. Green and A. Bell.", " They met."]),
        ("It cost 3.5 dollars, e.g. here. Yes.", ["It cost 3.5 dollars, e.g. here.", " Yes."]),
        ("A line\nand another. End", ["A line", "\nand another.", " End"]),
        ("Él vino. Ática.", ["Él vino.", " Ática."]),
        ("", [""]),
    ],
)
def test_where_sentences_end(text: str, wanted: list[str]) -> None:
    assert sentences(text) == wanted


@given(st.text("Ab.?! \n\"'", max_size=60))
def test_sentences_joined_are_the_text(text: str) -> None:
    assert "".join(sentences(text)) == text


def texts(document: str, length: int, words: Tokenizer = BYTES) -> list[str]:
    """What the blocks of a document say, between the start and the end."""
    found = []
    for block in pack_document(document, words, length):
        ids = block.tolist()
        assert len(ids) == length
        assert ids[0] == words.bos
        assert ids[-1] == words.eos
        body = ids[1 : ids.index(words.eos, 1)]
        assert ids[1 + len(body) :] == [words.eos] * (length - 1 - len(body))
        found.append(words.decode(body))
    return found


def test_blocks_by_hand() -> None:
    assert texts("Aa. Bb. Cc.", 13) == ["Aa. Bb. Cc."]
    assert texts("Aa. Bb. Cc.", 12) == ["Aa. Bb.", "Bb. Cc."]  # the last one begins earlier
    assert texts("Aa. Bb. Cccc. Ddddddd.", 13) == [
        "Aa. Bb.",
        "Bb. Cccc.",
        "Ddddddd.",
    ]  # so does one that is filled better
    assert texts("Aa.\nBb.", 30) == ["Aa.\nBb."]
    assert texts("  \n ", 9) == []


def test_a_sentence_longer_than_a_block_is_cut() -> None:
    assert texts("Abcdefghij. Kl.", 6) == ["Abcd", "efgh", "ij.", "Kl."]


@pytest.mark.parametrize("words", [BYTES, WORDS], ids=["bytes", "bpe"])
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), length=st.integers(20, 60))
def test_every_sentence_is_there_and_begins_a_block_or_follows_its_own(
    words: Tokenizer, lengths: list[int], length: int
) -> None:
    parts = [f"{capital}{'x' * n}." for capital, n in zip(CAPITALS, lengths, strict=False)]  # each is a sentence
    found = texts(" ".join(parts), length, words)
    whole = [part for part in parts if len(words.encode(" " + part)) <= length - 2]
    for part in whole:
        assert any(part in text for text in found)
    if len(whole) == len(parts):
        for text in found:
            assert text in " ".join(parts)
            assert any(text.startswith(part) for part in parts)
            assert any(text.endswith(part) for part in parts)


def test_prepared_blocks_are_framed_and_have_their_length(tmp_path: Path) -> None:
    documents = [" ".join(f"Word {k} of {n} here." for k in range(n)) for n in range(3, 40)]
    (tmp_path / "x.txt").write_text("\n<|endoftext|>\n".join(documents))
    folders = []
    for workers in (1, 3):
        folder = tmp_path / f"tokens{workers}"
        settings = {"packing": "sentences", "seq_length": 64, "valid_documents": 3, "workers": workers}
        prepare(PrepareConfig((str(tmp_path / "x.txt"),), folder, **settings), Console(quiet=True))
        folders.append(folder)
    one, other = ((folder / "train.bin").read_bytes() for folder in folders)
    assert one == other
    blocks = np.frombuffer(one, "<u2").reshape(-1, 64)
    assert (blocks[:, 0] == 256).all()
    assert (blocks[:, -1] == 256).all()
    assert {chr(first) for first in blocks[:, 1]} == {"W"}
    with pytest.raises(TokenError, match="use --seq-length 64"):
        open_tokens(folders[0]).batch(0, 0, 1, length=32)
    with pytest.raises(ValueError, match="leave out --no-document-eos"):
        PrepareConfig(("x.txt",), tmp_path / "other", packing="sentences", document_eos=False)
