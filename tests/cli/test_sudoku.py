"""`cdlm sudoku`: the picture in a terminal and elsewhere, the summary, JSON, and refusals."""

import io
import json
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from cdlm import zoo
from cdlm.cli import sudoku
from cdlm.cli.sudoku import Column, SudokuConfig, step_colour, watch_grids
from cdlm.text.sudoku import EXACT, last_changes, summarize

from .test_main import cdlm

PUZZLE = "1..4 .... ..2. ...."
Watch = Callable[..., tuple[list[Column], str]]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    monkeypatch.setattr(sudoku.time, "sleep", lambda seconds: None)
    monkeypatch.delenv("NO_COLOR", raising=False)

    def run(width: int = 80, terminal: bool = False, **options: object) -> tuple[list[Column], str]:
        screen = io.StringIO()
        colours = "truecolor" if terminal else None
        console = Console(file=screen, width=width, force_terminal=terminal, color_system=colours)
        return watch_grids(SudokuConfig(**{"num_samples": 4, **options}), console), screen.getvalue()

    return run


def test_where_there_is_no_terminal_the_finished_grids_are_printed(watch: Watch) -> None:
    columns, out = watch(models=(EXACT,), steps=(16, 2), step_size=("equal",))
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    good, bad = (column.samples[0] for column in columns)
    assert good.valid
    assert not bad.valid
    shown = re.findall(r" ([1-4])([ !])", out.split("step 16")[0].split("step-size")[-1])
    marks = [mark == "!" for _, mark in shown]
    assert len(shown) == 32
    rows = [digit for digit, _ in shown]
    pairs = zip(rows[0::8], rows[4::8], strict=True)  # the first cells of the rows of both grids
    assert [(int(a) - 1, int(b) - 1) for a, b in pairs] == [(good.cells[k], bad.cells[k]) for k in (0, 4, 8, 12)]
    assert sum(marks) == len(bad.conflicts) > 0
    assert f"step 2 of 2, {len(bad.conflicts)} cells in conflict" in out
    assert "step 16 of 16, valid" in out
    for column in columns:
        found = summarize(column.samples)
        line = f"valid {found['valid']} of 4 ({found['valid'] / 4:.0%}), distinct {found['distinct']}, NFE"
        assert line in " ".join(out.split())


def test_in_a_terminal_the_cells_of_every_step_have_its_colour(watch: Watch) -> None:
    (column,), out = watch(models=(EXACT,), terminal=True, steps=(4,), step_size=("equal",), puzzle=PUZZLE)
    assert out.count("step 0 of 4") == 1
    steps = last_changes(column.samples[0])
    last = out[: out.rindex("first step")]
    last = last[last.rindex(column.flags) :]
    for step in range(1, 5):
        red, green, blue = (int(step_colour(step, 4)[k : k + 2], 16) for k in (1, 3, 5))
        cells = re.findall(rf"48;2;{red};{green};{blue}m ([1-4])", last)
        assert cells == [str(d + 1) for d, s in zip(column.samples[0].cells, steps, strict=True) if s == step]
    assert step_colour(1, 4) != step_colour(4, 4)


def test_columns_that_do_not_fit_go_below(watch: Watch) -> None:
    _, out = watch(models=(EXACT,), size=6, num_samples=1, order=("random", "grid", "margin", "dilated"), steps=(3,))
    assert max(map(len, out.splitlines())) <= 80
    titles = [line for line in out.splitlines() if re.match(EXACT, line) and "valid" not in line]
    assert [line.split() for line in titles] == [[EXACT] * 3, [EXACT]]


def test_without_a_model_it_is_the_exact_denoiser_and_says_so(
    watch: Watch, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(zoo, "HERE", tmp_path)
    columns, _ = watch(num_samples=1)
    assert [column.model.name for column in columns] == [EXACT]
    assert "no model was named, and none of size 4 is bundled: this is the exact denoiser" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"no model of size 9 is bundled.*name one"):
        watch(size=9)


def test_the_bundled_model_and_the_exact_denoiser_have_the_same_settings(watch: Watch) -> None:
    columns, _ = watch(num_samples=1)
    assert [column.model.name for column in columns] == ["sudoku-4", EXACT]
    assert columns[0].settings == columns[1].settings
    assert (columns[1].settings.order, columns[1].settings.step_size) == ("grid", "equal")


def test_every_grid_as_json(watch: Watch, capsys: pytest.CaptureFixture[str]) -> None:
    (column,), screen = watch(models=(EXACT,), puzzle=PUZZLE, seed=2, order=("first-hitting",), json=True)
    assert screen == ""
    out, err = capsys.readouterr()
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["index"] for record in records] == [0, 1, 2, 3]
    for record, sample in zip(records, column.samples, strict=True):
        assert (record["valid"], record["conflicts"], record["nfe"], record["size"]) == (True, [], 13, 4)
        assert [int(digit) - 1 for digit in record["grid"]] == sample.cells
        assert all(given in (".", digit) for given, digit in zip(PUZZLE.replace(" ", ""), record["grid"], strict=True))
        assert sorted(record["steps"])[3:] == list(range(1, 14))
        assert record["sampling"]["order"] == "first-hitting"
    assert "valid 4 of 4 (100%)" in err


def test_colours_can_be_off(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    _, out = watch(models=(EXACT,), terminal=True, steps=(2,))
    assert "!" in out
    assert "first step" not in out
    assert not re.search(r"\x1b\[[\d;]*(3[0-7]|[34]8;)", out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 5}, r"--size must be 4, 6 or 9 \(got 5\)"),
        ({"num_samples": 0}, r"--num-samples must be between 1 and 10,000 \(got 0\)"),
        ({"steps": (4, 0)}, r"--steps must be between 1"),
        ({"steps": (1, 2, 4, 8, 16)}, r"at most 4 models or values of a setting fit side by side \(got 5\)"),
        ({"models": (EXACT, EXACT), "steps": (1, 2, 3)}, r"models has 2 values for 3 columns"),
        ({"puzzle": PUZZLE, "size": 6}, r"--puzzle must have as many cells as the grid, 36 for size 6 \(got 16\)"),
        ({"puzzle": "11.." + "." * 12}, r"--puzzle has the digit 1 twice in row 1"),
        ({"models": (EXACT,), "corrector": ("cap",), "order": ("margin",)}, r"no sampler takes"),
    ],
)
def test_wrong_options_are_refused(watch: Watch, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        watch(**options)


def test_a_model_of_text_is_refused_in_a_line(folder: str) -> None:
    done = cdlm("sudoku", folder)
    assert done.returncode == 1
    assert re.fullmatch(r"cdlm: \S+ was not trained on Sudoku grids; .*\n", done.stderr)
