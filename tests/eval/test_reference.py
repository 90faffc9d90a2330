"""Unconditional texts beside what people wrote."""

from pathlib import Path
from typing import Any

import pytest

from cdlm.eval.results import read_rows
from cdlm.eval.sweep import evaluate

from .suites import LENGTH, NUM, QUIET, again, columns, config, samples

pytestmark = pytest.mark.usefixtures("compared")


def test_texts_beside_a_reference(work: Path, tmp_path: Path) -> None:
    plain = evaluate(config(work, tmp_path), QUIET)
    assert "mauve" not in plain[0]
    rows = evaluate(config(work, tmp_path, reference=work / "one.txt"), QUIET)  # kept texts get theirs
    for row in rows:
        assert 0 <= row["mauve"] <= 1
        assert "bleu2" not in row
        assert columns(samples(tmp_path, row), "reference_token_ids").shape == (NUM, LENGTH)
    assert [row["ppl"] for row in plain] == pytest.approx([row["ppl"] for row in rows])  # the texts are the same


def test_another_reference_is_another_comparison(work: Path, tmp_path: Path) -> None:
    one: dict[str, Any] = {"models": (str(work / "masked"),), "steps": (2,)}
    evaluate(config(work, tmp_path, reference=work / "one.txt", **one), QUIET)
    (row,) = evaluate(config(work, tmp_path, reference=work / "two.txt", **one), QUIET)
    (fresh,) = evaluate(config(work, tmp_path / "fresh", reference=work / "two.txt", **one), QUIET)
    assert row["reference_ppl"] == pytest.approx(fresh["reference_ppl"])


def test_a_row_names_its_reference(work: Path, tmp_path: Path) -> None:
    row, *_ = evaluate(config(work, tmp_path, reference=work / "one.txt"), QUIET)
    assert any("one.txt" in str(value) for name, value in row.items() if "reference" in name)


def test_judging_again_finds_the_rows_with_a_reference(work: Path, tmp_path: Path) -> None:
    evaluate(config(work, tmp_path, reference=work / "one.txt"), QUIET)
    evaluate(config(work, tmp_path, **again(work)), QUIET)
    assert len(read_rows(tmp_path)) == 4
