"""A single document: its end is for validation."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cdlm.data.config import PrepareConfig
from cdlm.data.prepare import prepare

from .test_prepare import END, ids, run


def book(lines: int = 200) -> str:
    return "".join(f"Line {k} of a book without separators.\n" for k in range(lines))


def test_the_end_of_a_single_document_is_for_validation(tmp_path: Path) -> None:
    """A tenth of its characters, from the line on in which that tenth begins; the line end at the cut is left out."""
    console = Console(record=True, quiet=False, file=io.StringIO(), width=200)
    (tmp_path / "x.txt").write_text(book())
    settings = {"packing": "plain", "valid_fraction": 0.1}
    meta = prepare(PrepareConfig((str(tmp_path / "x.txt"),), tmp_path / "tokens", **settings), console)
    train, valid = (bytes(i for i in ids(tmp_path, split) if i != END).decode() for split in ("train", "valid"))
    whole = book().removesuffix("\n")
    assert train + "\n" + valid == whole
    assert 0.1 * len(whole) <= len(valid) + 1 < 0.1 * len(whole) + 40
    assert valid.startswith("Line 1")
    assert [meta.splits[split].documents for split in ("train", "valid")] == [1, 1]
    assert f"one document: its last {len(valid):,} characters are for validation" in console.export_text()


@pytest.mark.parametrize(
    ("text", "share", "parts"),
    [
        ("some words in a row", 0.3, ["some words", "in a row"]),
        ("one\ntwo three", 0.5, ["one", "two three"]),
        ("one\ntwo four three", 0.2, ["one\ntwo four", "three"]),  # the line end is too far away
        ("abcdefghij", 0.3, ["abcdefg", "hij"]),
        ("some words in a row", 0.9, ["so", "me words in a row"]),
    ],
)
def test_where_a_single_document_is_cut(text: str, share: float, parts: list[str], tmp_path: Path) -> None:
    run(tmp_path, text, packing="plain", valid_fraction=share)
    assert [bytes(ids(tmp_path, split)[:-1]).decode() for split in ("train", "valid")] == parts


def test_a_single_document_of_many_pieces_is_cut_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a long document end in front of white space; the cut is found wherever it lies among them."""
    text = book(2000).removesuffix("\n")
    monkeypatch.setattr("cdlm.data.sources.PIECE", 5000)
    for share in (0.01, 0.3, 0.93):
        run(tmp_path, text, packing="plain", valid_fraction=share, overwrite=True)
        train, valid = (bytes(ids(tmp_path, split)[:-1]).decode() for split in ("train", "valid"))
        assert train + "\n" + valid == text
        assert abs(len(valid) - share * len(text)) < 80


def test_a_tokenizer_does_not_see_the_held_out_end(tmp_path: Path) -> None:
    meta = run(tmp_path, "ab " * 300 + "\n" + "zq " * 100, train_vocab_size=300, packing="plain", valid_fraction=0.25)
    assert meta.trained_on == meta.splits["train"].characters == 900
    vocabulary = json.loads((tmp_path / "tokens" / "tokenizer.json").read_text())["model"]["vocab"]
    assert "Ġab" in vocabulary
    assert not any("zq" in word for word in vocabulary)


@pytest.mark.parametrize(
    ("text", "settings", "advice"),
    [
        ("alone", {"valid_fraction": 0.01}, "would leave none to train on"),
        ("words" + " " * 100, {"valid_fraction": 0.1}, "would leave none to train on"),
        ("alone and one document", {"valid_documents": 1, "valid_fraction": None}, "would leave none to train on"),
        (
            book(),
            {"valid_fraction": 0.01, "packing": "wrapped", "seq_length": 512},
            "no block; .*or a larger --valid-fraction",
        ),
    ],
)
def test_a_single_document_too_short_to_hold_out_an_end(
    text: str, settings: dict[str, Any], advice: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=advice):
        run(tmp_path, text, **{"packing": "plain", **settings})
    assert not (tmp_path / "tokens").exists()
