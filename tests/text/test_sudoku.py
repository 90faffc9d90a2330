"""Sudoku grids step by step: puzzles as strings, conflicts, and samples of models that were trained on grids."""

import itertools
import random
from pathlib import Path

import pytest
import torch

import cdlm
from cdlm import zoo
from cdlm.data.sudoku import all_grids, digits_tokenizer, sample_grids, solve, valid_grids
from cdlm.text.sudoku import (
    EMPTY,
    EXACT,
    GridSample,
    check_puzzle,
    conflicting_cells,
    default_models,
    exact_model,
    generate_grids,
    grid_side,
    last_changes,
    load_grid_model,
    parse_puzzle,
    summarize,
    written,
)

from ..writers import write_model

PUZZLE = "1..4 .... ..2. ...."


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Untrained models of 4 x 4 grids, and one of bytes."""
    folder, digits = tmp_path_factory.mktemp("grids"), digits_tokenizer(4)
    kinds = {kind: write_model(folder / kind, kind, digits, length=16) for kind in ("masked", "uniform", "causal")}
    return kinds | {"bytes": write_model(folder / "bytes", "masked", length=16)}


def grids(model, count: int, puzzle: list[int] | None = None, seed: int = 0, **settings) -> list[GridSample]:
    found = generate_grids(model, model.resolve(settings), seed, count, puzzle)
    return [sample for sample in found if sample is not None]


def test_conflicts_are_the_pairs_of_equal_digits_in_a_unit() -> None:
    source = random.Random(0)
    for grid in (*all_grids(4)[::40].tolist(), *sample_grids(6, 3, 0).tolist()):
        side = int(len(grid) ** 0.5)
        height = 2
        for changes in range(4):
            cells = grid.copy()
            for _ in range(changes):
                cells[source.randrange(len(cells))] = source.choice([EMPTY, *range(side)])
            expected = set()
            for a, b in itertools.combinations(range(len(cells)), 2):
                rows, columns = (a // side, b // side), (a % side, b % side)
                width = side // height
                same_box = rows[0] // height == rows[1] // height and columns[0] // width == columns[1] // width
                together = rows[0] == rows[1] or columns[0] == columns[1] or same_box
                if together and cells[a] == cells[b] != EMPTY:
                    expected |= {a, b}
            assert conflicting_cells(cells, side) == sorted(expected)
            sample = GridSample(side, [cells], 0)
            assert sample.valid == bool(valid_grids(torch.tensor([[c if c != EMPTY else side for c in cells]])))


def test_a_puzzle_is_read_from_a_string() -> None:
    cells = parse_puzzle(PUZZLE)
    assert cells == [0, EMPTY, EMPTY, 3, *[EMPTY] * 4, EMPTY, EMPTY, 1, EMPTY, *[EMPTY] * 4]
    assert written(cells, 4) == PUZZLE.replace(" ", "")
    assert parse_puzzle("10|_4/....\n..2. ....", 4) == cells
    assert parse_puzzle("." * 36) == [EMPTY] * 36
    assert parse_puzzle("9" + "." * 80)[0] == 8


@pytest.mark.parametrize(
    ("puzzle", "side", "message"),
    [
        ("1..4", None, r"16 for size 4, 36 for size 6, 81 for size 9 \(got 4\)"),
        ("." * 16, 6, r"36 for size 6 \(got 16\)"),
        ("1..5" + "." * 12, None, r"digits 1 to 4.*got '5' in row 1, column 4"),
        ("1..x" + "." * 12, None, r"got 'x' in row 1"),
        ("1..1" + "." * 12, None, r"digit 1 twice in row 1: in row 1, column 1 and row 1, column 4"),
        ("1......." + "1......." * 1, None, r"digit 1 twice in column 1"),
        ("1....1.." + "." * 8, None, r"digit 1 twice in box 1"),
        ("123....4" + "." * 8, None, r"must have a solution"),
        ("1234341221434321", None, r"at least one empty cell"),
    ],
)
def test_a_puzzle_that_makes_no_sense_is_refused(puzzle: str, side: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_puzzle(parse_puzzle(puzzle, side))


def test_the_exact_model_solves_every_puzzle_one_cell_at_a_time() -> None:
    puzzle = parse_puzzle(PUZZLE)
    solutions = {tuple(solution) for solution in solve(puzzle, 100)}
    samples = grids(exact_model(4), 70, puzzle, order="first-hitting")
    assert {tuple(sample.cells) for sample in samples} == solutions
    assert all(sample.valid and sample.nfe == len(sample.states) - 1 == 13 for sample in samples)
    summary = summarize(samples)
    assert summary == {"num_samples": 70, "valid": 70, "distinct": len(solutions), "nfe": 13}
    for sample in samples[:5]:
        steps = last_changes(sample)
        assert sorted(step for step in steps if step) == list(range(1, 14))
        assert [step == 0 for step in steps] == [digit != EMPTY for digit in puzzle]
        for step, state in enumerate(sample.states):
            assert [digit != EMPTY for digit in state] == [drawn <= step for drawn in steps]


@pytest.mark.parametrize("kind", ["masked", "uniform", "causal"])
def test_grids_are_the_samples_of_the_model(kind: str, folders: dict[str, Path]) -> None:
    model = cdlm.load(folders[kind], "cpu", "float64")
    assert grid_side(model) == 4
    settings = {} if kind == "causal" else {"steps": 5}
    found = grids(model, 66, seed=3, **settings)
    assert all(len(sample.cells) == 16 and EMPTY not in sample.cells for sample in found)
    if kind == "causal":  # it continues the first cell
        assert [sample.nfe for sample in found] == [15] * 66
        assert {sample.cells[0] for sample in found} == {0, 1, 2, 3}
        greedy = grids(model, 8, top_k=1)
        for sample in greedy:
            tokens = torch.tensor([sample.cells])
            assert sample.cells[1:] == model.logits(tokens)[0, :-1].argmax(-1).tolist()
    else:
        samples = model.sample(66, seed=3, batch_size=66, **settings)
        assert [sample.cells for sample in found] == [sample.token_ids for sample in samples]
        assert [sample.nfe for sample in found] == [sample.nfe for sample in samples]
    puzzle = parse_puzzle(PUZZLE)
    if kind == "causal":
        with pytest.raises(ValueError, match="autoregressive: it cannot solve"):
            grids(model, 1, puzzle)
        return
    for sample in grids(model, 3, puzzle, steps=5):
        assert all(state[cell] == digit for state in sample.states for cell, digit in enumerate(puzzle) if digit >= 0)


def test_other_models_are_refused(folders: dict[str, Path]) -> None:
    assert grid_side(cdlm.load(folders["bytes"], "cpu")) is None
    with pytest.raises(ValueError, match=r"bytes was not trained on Sudoku grids; name exact, or train"):
        load_grid_model(folders["bytes"], None, "cpu")
    with pytest.raises(ValueError, match=r"masked generates grids of size 4, not 6"):
        load_grid_model(folders["masked"], 6, "cpu")
    with pytest.raises(ValueError, match=r"exact denoiser for sizes 4 and 6 only"):
        load_grid_model(EXACT, 9)


def test_a_bundled_model_is_the_default_once_its_folder_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = zoo.names()
    monkeypatch.setattr(zoo, "HERE", tmp_path)
    assert [default_models(side) for side in (4, 6, 9)] == [[EXACT], [EXACT], []]
    write_model(tmp_path / "sudoku-4", "masked", digits_tokenizer(4), length=16)
    write_model(tmp_path / zoo.BEST, "masked", length=16)
    assert [default_models(side) for side in (4, 6, 9)] == [["sudoku-4", EXACT], [EXACT], []]
    assert zoo.names() == [zoo.BEST]
    assert before[0] == zoo.BEST
    assert load_grid_model("sudoku-4", 4, "cpu").name == "sudoku-4"
    assert cdlm.load(device="cpu").name == zoo.BEST
    with pytest.raises(ValueError, match="did you mean sudoku-4"):
        cdlm.load("sudoku-5")
