"""Evaluation texts: cut and cleaned as `cdlm prepare` does, into blocks that belong to a seed."""

import gzip
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from cdlm.data import END
from cdlm.data.config import PrepareConfig
from cdlm.data.prepare import prepare
from cdlm.eval.config import named_text
from cdlm.eval.datasets import Dataset

from ..writers import BPE, BYTES

PTB = [" no it was n't black monday ", " but <unk> said N shares rose $ N to N ", " the company 's chairman agreed "]
WIKITEXT = """ = Robert = 

 Robert , a well @-@ known actor , earned 1 @,@ 000 pounds . 

 = = Early life = = 

 He said " hello " . 

 = Valkyria = 

 A game ( for two ) . 
"""
LAMBADA = "\u201c yes , \u201d she said . \u2018 it \u2019s late \u2019\n<|endoftext|>\nhe went home\n"
PLAIN = "The first document.\nIts second line.\n<|endoftext|>\n\n<|endoftext|>\nAnother one.\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def lines(path: Path, n: int = 400) -> Path:
    """Documents of nothing but their own number, so that no two blocks are the same."""
    return write(path, "\n<|endoftext|>\n".join(f"{k} " * 6 for k in range(n)))


def test_documents_of_a_plain_file(tmp_path: Path) -> None:
    """Cut at separator lines; empty ones are left out."""
    found = Dataset("mine", write(tmp_path / "a.txt", PLAIN)).documents()
    assert found == ["The first document.\nIts second line.", "Another one."]


def test_documents_of_known_corpora(tmp_path: Path) -> None:
    ptb = Dataset("ptb", write(tmp_path / "ptb.txt", "\n".join(PTB) + "\n")).documents()
    assert ptb == ["no it wasn't black monday", "but ? said 1 shares rose $1 to 1", "the company's chairman agreed"]
    first, second = Dataset("wikitext103", write(tmp_path / "w.txt", WIKITEXT)).documents()
    assert "Robert, a well-known actor, earned 1,000 pounds." in first
    assert 'He said "hello".' in first
    assert "A game (for two)." in second
    yes, home = Dataset("lambada", write(tmp_path / "l.txt", LAMBADA)).documents()
    assert yes == "\n\" yes , \" she said . ' it 's late '"
    assert home == "\nhe went home"
    web = Dataset("openwebtext", write(tmp_path / "o.txt", "one\n\n\n\n\ntwo\n<|endoftext|>\nthree\n")).documents()
    assert web == ["one\n\ntwo", "three"]


@pytest.mark.parametrize("name", ["plain", "openwebtext", "wikitext103", "ptb", "lambada"])
@pytest.mark.parametrize("framed", [True, False])
def test_blocks_are_those_of_prepare(name: Any, framed: bool, tmp_path: Path) -> None:
    """The same ids that training would see, in another order; what fills no block is left over."""
    texts = {"wikitext103": WIKITEXT, "ptb": "\n".join(PTB) + "\n", "lambada": LAMBADA}
    path, length = write(tmp_path / "text.txt", texts.get(name, PLAIN) * 20), 16
    packing = "wrapped" if framed else "plain"
    config = PrepareConfig(
        (str(path),), tmp_path / "tokens", name, packing=packing, seq_length=length, valid_fraction=0, workers=1
    )
    prepare(config, Console(quiet=True))
    ids = np.fromfile(tmp_path / "tokens" / "train.bin", np.uint16)
    wanted = ids[: len(ids) // length * length].reshape(-1, length).astype(np.int64)
    found = Dataset(name, path).blocks(BYTES, length, framed, len(wanted))
    assert sorted(found.tolist()) == sorted(wanted.tolist())


def test_framed_blocks_begin_and_end(tmp_path: Path) -> None:
    texts = Dataset("mine", lines(tmp_path / "a.txt"))
    framed, bare = (texts.blocks(BPE, 24, framed, 20) for framed in (True, False))
    assert framed.shape == bare.shape == (20, 24)
    assert framed.dtype == torch.int64
    assert (framed[:, 0] == BPE.bos).all()
    assert (framed[:, -1] == BPE.eos).all()
    assert not (bare[:, 0] == BPE.bos).all()
    assert (framed[:, 1:-1] == BPE.eos).any()  # documents end within blocks


def test_blocks_belong_to_the_seed_and_are_all_different(tmp_path: Path) -> None:
    texts = Dataset("mine", lines(tmp_path / "a.txt"))
    found = texts.blocks(BPE, 24, True, 60, seed=1)
    assert torch.equal(found, Dataset("mine", tmp_path / "a.txt").blocks(BPE, 24, True, 60, seed=1))
    assert not torch.equal(found, texts.blocks(BPE, 24, True, 60, seed=2))
    assert len({tuple(row) for row in found.tolist()}) == 60
    assert torch.equal(texts.blocks(BPE, 24, True, 25, seed=1), found[:25])  # the first of many are the few


def test_blocks_are_drawn_from_all_over_the_file(tmp_path: Path) -> None:
    found = Dataset("mine", lines(tmp_path / "a.txt")).blocks(BPE, 24, False, 40)
    where = [int(BPE.decode(row).replace(END, " ").split()[1]) for row in found.tolist()]
    assert min(where) < 100
    assert max(where) > 300
    assert where != sorted(where)


def test_too_little_text_says_how_much_there_is(tmp_path: Path) -> None:
    """ANCHORS 1.2: the few sentences of PTB fill about 80 blocks of 1024, and not 256."""
    sentences = ["the company said it will not pay a dividend of N <unk> shares this year"] * 300
    texts = Dataset("ptb", write(tmp_path / "ptb_valid.txt", "\n".join(sentences) + "\n"))
    tokens = sum(len(BYTES.encode(one)) + 1 for one in texts.documents())
    with pytest.raises(ValueError, match=r"ptb_valid\.txt has") as error:
        texts.blocks(BYTES, 1024, True, 256)
    message = str(error.value)
    assert f"{tokens:,} tokens, which make {tokens // 1022} blocks of 1024 of the 256" in message
    assert "a longer text, or a smaller --num-samples" in message
    assert len(texts.blocks(BYTES, 1024, True, tokens // 1022)) == tokens // 1022


@pytest.mark.parametrize("content", ["", "\n\n<|endoftext|>\n \n"])
def test_a_file_without_text_is_named(content: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"empty\.txt"):
        Dataset("empty", write(tmp_path / "empty.txt", content)).blocks(BYTES, 16, False, 1)


def test_parsing(tmp_path: Path) -> None:
    path = write(tmp_path / "ptb_test.txt", "a line\n")
    assert Dataset(*named_text(f"ptb={path}")) == Dataset("ptb", path)
    assert Dataset(*named_text(str(path))) == Dataset("ptb_test", path)
    assert Dataset(*named_text(f"my texts={path}")).name == "my texts"
    for word in (f"ptb={tmp_path / 'none.txt'}", str(tmp_path / "none.txt")):
        with pytest.raises(ValueError, match=r"there is no file .*none\.txt"):
            Dataset(*named_text(word))
    with pytest.raises(ValueError, match=r"NAME=FILE, such as ptb=ptb_test\.txt"):
        Dataset(*named_text("ptb=owner/name"))
    with pytest.raises(ValueError, match="cannot tell what"):
        Dataset(*named_text(str(write(tmp_path / "text.doc", "x"))))


def test_other_kinds_of_files(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"text": "one"}\n{"text": "  "}\n{"text": "two"}\n')
    assert Dataset(*named_text(f"mine={tmp_path / 'a.jsonl.gz'}")).documents() == ["one", "two"]


def test_a_folder_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="file"):
        Dataset(*named_text(f"mine={tmp_path}"))


def test_a_fingerprint_is_of_the_bytes(tmp_path: Path) -> None:
    one, same, other = (write(tmp_path / f"{k}.txt", text) for k, text in enumerate(("a", "a", "b")))
    assert Dataset("x", one).fingerprint == Dataset("y", same).fingerprint == hashlib.sha256(b"a").hexdigest()[:16]
    assert Dataset("x", other).fingerprint != Dataset("x", one).fingerprint


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    """In one process; its fingerprint is that of the new bytes."""
    texts = Dataset("mine", write(tmp_path / "a.txt", "a" * 100))
    assert texts.blocks(BYTES, 8, False, 1).unique().tolist() == [ord("a")]
    write(tmp_path / "a.txt", "b" * 100)
    assert texts.blocks(BYTES, 8, False, 1).unique().tolist() == [ord("b")]
