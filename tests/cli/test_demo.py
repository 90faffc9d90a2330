"""The demo: Sudoku grids, the bundled models of text side by side, and one page with all of it."""

import html
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import cdlm
from cdlm import zoo
from cdlm.cli import demo
from cdlm.cli.demo import DemoConfig, run_demo
from cdlm.cli.demo_figure import study_rows, sudoku_figure
from cdlm.cli.demo_page import SHOWN_GRIDS
from cdlm.sample.settings import Settings
from cdlm.text.pipeline import Pipeline
from cdlm.text.sudoku import exact_model, generate_grids, last_changes

from ..writers import BPE, write_model

NAMES = zoo.names()


def shown() -> list[tuple[Pipeline, Settings]]:
    """The bundled Sudoku model, and the exact denoiser with the same settings."""
    bundled = cdlm.load("sudoku-4", "cpu")
    settings = bundled.resolve({})
    return [(bundled, settings), (exact_model(4), settings)]


def grid_of(board: ElementTree.Element) -> tuple[list[int], list[int]]:
    """The digits of a board on the page, and the steps in which they appear."""
    digits = [int(group.findtext("text", "")) - 1 for group in board.iter("g")]
    return digits, [int(re.findall(r"--shown:n\d+s(\d+);", group.get("style", ""))[0]) for group in board.iter("g")]


def test_the_demo_shows_both_models_on_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "demo"
    monkeypatch.setattr(demo, "COMPARED_STEPS", (2, 3))
    monkeypatch.setattr(demo, "PLAIN_STEPS", (2, 5))
    samples = run_demo(DemoConfig(steps=4, device="cpu", out=out))
    assert [sample.model.name for sample in samples[:2]] == list(reversed(NAMES))
    assert [sample.settings.steps for sample in samples] == [4, 4, 2, 2, 3, 3, 2, 5]
    assert [sample.settings.order for sample in samples[-2:]] == ["random"] * 2
    page = (out / "index.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 2
    for sample in samples:
        assert re.fullmatch(r"\d+ NFE, \d+\.\d s, entropy \d\.\d\d nats", sample.cost)
        assert html.escape(sample.text) in page
        settings = {"order": sample.settings.order, "steps": sample.settings.steps}
        assert sample.text == sample.model.sample(seed=1, **settings)[0].text.strip()
    assert "<code>cdlm sample</code>" in page
    boards = [ElementTree.fromstring(part) for part in re.findall(r'<svg class="board".*?</svg>', page)]
    expected = []
    for model, settings in shown():
        found = [grid for grid in generate_grids(model, settings, 1, demo.NUM_GRIDS) if grid is not None]
        expected += found[:SHOWN_GRIDS]
    assert [grid_of(board) for board in boards] == [(grid.cells, last_changes(grid)) for grid in expected]
    for board, grid in zip(boards, expected, strict=True):
        assert sum(group.get("class") == "conflict" for group in board.iter("g")) == len(grid.conflicts)
    assert sudoku_figure(study_rows()) in page
    assert page.index("Sudoku") < page.index("data:image")
    without_pictures = re.sub(r"base64,[^\"]+", "", page)
    assert "http" not in without_pictures
    assert "<script" not in without_pictures
    with pytest.raises(ValueError, match=r"--out must be a directory.*index\.html"):
        DemoConfig(out=out / "index.html")


def test_a_demo_of_more_steps_than_tokens_shows_finished_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [{"steps": 4, "order": "dilated", "temperature": 0.5}]
    for name in NAMES:
        write_model(tmp_path / name, "masked", BPE, own=own, length=8, framed=True, padded=True)
    monkeypatch.setattr(zoo, "HERE", tmp_path)
    samples = run_demo(DemoConfig(steps=40, device="cpu", out=tmp_path / "demo"))
    assert len(samples[0].frames) <= 9
    assert all(max(sample.frames[-1].token_ids[0]) < sample.model.denoiser.vocab for sample in samples)
    assert samples[-1].flags == "--steps 64 --order random --temperature 1"
    assert (tmp_path / "demo" / "index.html").read_text().count('<svg class="board"') == SHOWN_GRIDS  # of the exact one
