"""Sudoku grids for the page: which models generate them, and from a request to the states of its grids."""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache

from cdlm import zoo
from cdlm.data.sudoku import LISTED
from cdlm.sample.settings import Settings, describe_settings
from cdlm.studio.generation import Progress, random_seed
from cdlm.studio.schema import Grid, GridModel, Limits, SudokuRequest
from cdlm.studio.settings import RequestError, given_settings, request_error, resolve_within
from cdlm.text.pipeline import Pipeline, load
from cdlm.text.sudoku import (
    EXACT,
    Cells,
    GridSample,
    check_puzzle,
    conflicting_cells,
    exact_model,
    generate_grids,
    grid_side,
    last_changes,
    parse_puzzle,
    written,
)


@dataclasses.dataclass(frozen=True)
class CheckedSudoku:
    """A request that can be carried out."""

    label: str
    model: Pipeline
    settings: Settings
    side: int
    seed: int
    num_samples: int
    puzzle: Cells | None

    @property
    def summary(self) -> str:
        return ", ".join(describe_settings(self.settings))


def grid_models(models: Mapping[str, Pipeline]) -> list[GridModel]:
    """The models of grids: those of the service, those that come with the package, and the exact denoiser."""
    own = [(label, grid_side(model)) for label, model in models.items()]
    found = [GridModel(model=label, size=side) for label, side in own if side is not None]
    labels = {model.model for model in found}
    found += [GridModel(model=name, size=side) for side, name in zoo.sudoku_names().items() if name not in labels]
    return found + [GridModel(model=EXACT, size=side) for side in LISTED]


def check_sudoku(request: SudokuRequest, models: Mapping[str, Pipeline], limits: Limits) -> CheckedSudoku:
    """Check a request against the limits and the model; a `RequestError` says what is wrong, and with which field."""
    try:
        puzzle = None if request.puzzle is None else parse_puzzle(request.puzzle, request.size)
        if puzzle is not None:
            check_puzzle(puzzle)
        side = request.size if puzzle is None else int(len(puzzle) ** 0.5)
        label, model = _find(request.model, side, models)
        if request.n is not None and request.n > limits.max_samples:
            raise RequestError(f"n must be at most {limits.max_samples} (got {request.n}).", "n")
        if puzzle is not None and model.denoiser.process is None:
            raise RequestError(f"{label} is autoregressive: it cannot solve a puzzle; leave out puzzle.", "puzzle")
        settings = resolve_within(model, given_settings(request), limits)
    except ValueError as error:
        raise request_error(error) from None
    seed = random_seed() if request.seed is None else request.seed
    found = grid_side(model)
    assert found is not None
    return CheckedSudoku(label, model, settings, found, seed, request.n or 1, puzzle)


def _find(label: str | None, side: int | None, models: Mapping[str, Pipeline]) -> tuple[str, Pipeline]:
    """The model of a request: the first of this size, unless it names one."""
    known = grid_models(models)
    fitting = [each for each in known if label in (None, each.model) and side in (None, each.size)]
    if not fitting:
        there = ", ".join(f"{each.model} (size {each.size})" for each in known)
        what = f"model {label!r}" if label is not None else "model"
        size = f" of size {side}" if side is not None else ""
        raise RequestError(f"there is no {what}{size} that generates Sudoku grids; there are: {there}", "model")
    chosen = fitting[0]
    if chosen.model in models and grid_side(models[chosen.model]) is not None:
        return chosen.model, models[chosen.model]
    return chosen.model, exact_model(chosen.size) if chosen.model == EXACT else _bundled(chosen.model)


@cache
def _bundled(name: str) -> Pipeline:
    return load(zoo.HERE / name, "cpu")


def sudoku_events(request: CheckedSudoku) -> Iterator[Progress | list[GridSample]]:
    """Nothing to report after each step, and the finished grids."""
    samples = []
    for sample in generate_grids(request.model, request.settings, request.seed, request.num_samples, request.puzzle):
        if sample is None:
            yield Progress()
        else:
            samples.append(sample)
    yield samples


def grid_of(index: int, sample: GridSample) -> Grid:
    states = [written(cells, sample.side) for cells in sample.states]
    conflicts = [conflicting_cells(cells, sample.side) for cells in sample.states]
    return Grid(
        index=index, states=states, conflicts=conflicts, steps=last_changes(sample), valid=sample.valid, nfe=sample.nfe
    )
