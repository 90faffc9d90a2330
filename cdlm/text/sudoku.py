"""Sudoku grids generated step by step: models that do it, puzzles typed as strings, and which grids are valid.

A cell holds a digit from 0, or `EMPTY`. Grids are sequences of tokens as in `cdlm/data/sudoku.py`.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from cdlm import zoo
from cdlm.data.sudoku import LISTED, SIDES, ExactSudoku, digits_tokenizer, solve
from cdlm.devices import Device, Dtype
from cdlm.model.denoiser import Denoiser
from cdlm.process import masked
from cdlm.process.grid import grid_cells
from cdlm.rng import Rng
from cdlm.sample.settings import Settings
from cdlm.text.pipeline import Pipeline, load, sample_noise
from cdlm.text.template import OPEN, Template

EXACT = "exact"
"""The name of the exact denoiser among models."""
EMPTY = OPEN
UNITS = ("row", "column", "box")
_BATCH = 64
_EMPTY_CELLS = ".0_"
_IGNORED = " \t\r\n|/"

Cells = list[int]


@dataclasses.dataclass(frozen=True)
class GridSample:
    """A generated grid, and how it came about."""

    side: int
    states: list[Cells]
    """The grid at first, and after each step that evaluated the network or changed a cell."""
    nfe: int
    """Network evaluations that it took."""

    @property
    def cells(self) -> Cells:
        return self.states[-1]

    @property
    def conflicts(self) -> list[int]:
        return conflicting_cells(self.cells, self.side)

    @property
    def valid(self) -> bool:
        return EMPTY not in self.cells and not self.conflicts


def exact_model(side: int) -> Pipeline:
    """The exact denoiser of uniform grids as a model, for sides 4 and 6."""
    if side not in LISTED:
        sides = " and ".join(map(str, LISTED))
        raise ValueError(f"--size {side}: there is an exact denoiser for sizes {sides} only; name a trained model.")
    return _exact_model(side)


@functools.cache
def _exact_model(side: int) -> Pipeline:
    denoiser = Denoiser(ExactSudoku(side), masked(side + 1))
    cells = side * side
    return Pipeline(EXACT, denoiser, digits_tokenizer(side), cells, generation_config={"steps": cells // 2})


def grid_side(model: Pipeline) -> int | None:
    """The side of the grids that a model was trained on, by its vocabulary and length; None for other models."""
    tokenizer = model.tokenizer
    side = tokenizer.vocab_size - 1
    if side not in SIDES or model.max_length != side * side:
        return None
    return side if [tokenizer.decode([digit]) for digit in range(side)] == [str(d + 1) for d in range(side)] else None


def load_grid_model(
    source: str | Path, side: int | None, device: Device = "auto", dtype: Dtype | Literal["auto"] = "auto"
) -> Pipeline:
    """Open a model of Sudoku grids, or the exact denoiser by the name `exact`. A trained model must have this side, if
    one is given."""
    if source == EXACT:
        return exact_model(side or LISTED[0])
    model = load(source, device, dtype)
    found = grid_side(model)
    if found is None:
        raise ValueError(
            f"{source} was not trained on Sudoku grids; name {EXACT}, or train a model: cdlm prepare --source sudoku-4 "
            "--out data; cdlm train sudoku-4-mdlm --data data"
        )
    if side is not None and side != found:
        raise ValueError(f"{source} generates grids of size {found}, not {side}; leave it out or change the size.")
    return model


def default_models(side: int) -> list[str]:
    """What is shown where no model is named: the model that comes with the package, if any, and the exact denoiser."""
    bundled = [name for size, name in zoo.sudoku_names().items() if size == side]
    return [*bundled, EXACT] if side in LISTED else bundled


def parse_puzzle(text: str, side: int | None = None) -> Cells:
    """The cells of a puzzle, row by row: digits, and . or 0 or _ for an empty cell; spaces, | and / do not count."""
    symbols = [symbol for symbol in text if symbol not in _IGNORED]
    lengths = {size * size: size for size in SIDES}
    if len(symbols) not in lengths or (side is not None and len(symbols) != side * side):
        wanted = [side] if side is not None else SIDES
        sizes = ", ".join(f"{size * size} for size {size}" for size in wanted)
        raise ValueError(f"--puzzle must have as many cells as the grid, {sizes} (got {len(symbols)}).")
    size = lengths[len(symbols)]
    cells = []
    for number, symbol in enumerate(symbols):
        if symbol not in _EMPTY_CELLS and symbol not in "123456789"[:size]:
            raise ValueError(
                f"--puzzle must have the digits 1 to {size}, and . for an empty cell (got {symbol!r} in "
                f"{_place(number, size)})."
            )
        cells.append(EMPTY if symbol in _EMPTY_CELLS else int(symbol) - 1)
    return cells


def check_puzzle(cells: Sequence[int]) -> None:
    """Refuse puzzles with contradictory givens, without a solution, or with nothing to fill. Whether one of side 9 has
    a solution is not checked, since that may take long."""
    side = math.isqrt(len(cells))
    for unit, places in enumerate(_units(side)):
        for number, cell in enumerate(places):
            first = next((other for other in places[:number] if cells[other] == cells[cell] != EMPTY), None)
            if first is not None:
                raise ValueError(
                    f"--puzzle has the digit {cells[cell] + 1} twice in {UNITS[unit // side]} {unit % side + 1}: in "
                    f"{_place(first, side)} and {_place(cell, side)}."
                )
    if EMPTY not in cells:
        raise ValueError("--puzzle must have at least one empty cell (got a complete grid).")
    if side in LISTED and not solve(cells, 1):
        raise ValueError("--puzzle must have a solution (its givens contradict each other).")


def conflicting_cells(cells: Sequence[int], side: int) -> list[int]:
    """Cells whose digit is in the same row, column or box again, or which hold no digit but another token."""
    found = {cell for cell, value in enumerate(cells) if value >= side}
    for places in _units(side):
        digits = [cells[cell] for cell in places]
        found |= {
            cell for cell, digit in zip(places, digits, strict=True) if digit != EMPTY and digits.count(digit) > 1
        }
    return sorted(found)


def last_changes(sample: GridSample) -> list[int]:
    """For each cell, the step that gave it its last value; 0 if it had that from the start."""
    return [
        max((step for step in range(1, len(sample.states)) if _differs(sample.states, step, cell)), default=0)
        for cell in range(len(sample.cells))
    ]


def _differs(states: Sequence[Cells], step: int, cell: int) -> bool:
    return states[step][cell] != states[step - 1][cell]


def generate_grids(
    model: Pipeline, settings: Settings, seed: int, num_samples: int, puzzle: Sequence[int] | None = None
) -> Iterator[GridSample | None]:
    """Grids, of a puzzle if there is one, each as soon as its batch is finished; None after every other step."""
    side = grid_side(model)
    if side is None:
        raise ValueError(f"{model.name} was not trained on Sudoku grids.")
    if model.denoiser.process is None and puzzle is not None:
        raise ValueError(f"{model.name} is autoregressive: it cannot solve a --puzzle, only generate grids.")
    for first in range(0, num_samples, _BATCH):
        rows = range(first, min(first + _BATCH, num_samples))
        rng = sample_noise(seed, num_samples, rows)
        templates = [_template(cells) for cells in _given_cells(model, side, puzzle, rng)]
        histories: list[list[Cells]] = [[] for _ in rows]
        nfe = [-1 for _ in rows]
        for state in model.states(templates, settings, rng):
            for row, token_ids in enumerate(state.x.tolist()):
                cells, history = _cells(token_ids, model, side), histories[row]
                if state.nfe[row] > nfe[row] or cells != history[-1]:
                    history.append(cells)
            nfe = state.nfe
            yield None
        yield from (GridSample(side, history, count) for history, count in zip(histories, nfe, strict=True))


def _given_cells(model: Pipeline, side: int, puzzle: Sequence[int] | None, rng: Rng) -> list[Cells]:
    """What each sample starts from. An autoregressive model continues the first cell, which is uniform."""
    empty = [EMPTY] * (side * side)
    if model.denoiser.process is None:
        return [[digit, *empty[1:]] for digit in rng("first").integers(1, side)[:, 0].tolist()]
    return [list(puzzle or empty)] * len(rng.rows)


def _template(cells: Cells) -> Template:
    first = next(cell for cell, digit in enumerate(cells) if digit == EMPTY)
    return Template(cells, ["", ""], [(first, len(cells))])


def _cells(token_ids: Sequence[int], model: Pipeline, side: int) -> Cells:
    """Tokens as cells: those that are masked, or not there yet, are empty."""
    cells = [EMPTY if token >= model.denoiser.vocab else token for token in token_ids]
    return cells + [EMPTY] * (side * side - len(cells))


def summarize(samples: Sequence[GridSample]) -> dict[str, Any]:
    """How many grids are valid, how many different valid ones there are, and the network evaluations of a grid."""
    valid = [tuple(sample.cells) for sample in samples if sample.valid]
    nfe = sum(sample.nfe for sample in samples) / len(samples)
    return {"num_samples": len(samples), "valid": len(valid), "distinct": len(set(valid)), "nfe": round(nfe, 4)}


def describe_summary(summary: Mapping[str, Any]) -> str:
    share = summary["valid"] / summary["num_samples"]
    return (
        f"valid {summary['valid']} of {summary['num_samples']} ({share:.0%}), distinct {summary['distinct']}, "
        f"NFE {summary['nfe']:.3g}"
    )


def written(cells: Sequence[int], side: int) -> str:
    """Cells as a string, as `parse_puzzle` reads it; another token than a digit is a question mark."""
    return "".join("." if cell == EMPTY else str(cell + 1) if cell < side else "?" for cell in cells)


def _place(cell: int, side: int) -> str:
    return f"row {cell // side + 1}, column {cell % side + 1}"


@functools.cache
def _units(side: int) -> list[list[int]]:
    """The cells of every row, column and box, in this order."""
    return [
        [cell for cell, number in enumerate(unit.tolist()) if number == wanted]
        for unit in grid_cells(side)
        for wanted in range(side)
    ]
