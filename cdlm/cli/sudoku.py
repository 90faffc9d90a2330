"""`cdlm sudoku`: grids of Sudoku fill in step by step, several models or samplers side by side."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import tyro
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cdlm.cli.common import console as make_console
from cdlm.cli.common import parse, prepare_torch
from cdlm.devices import Device, Dtype, few_threads
from cdlm.sample.settings import SPECS, Settings, check_value, explicit, flag, flags
from cdlm.text.options import by_model, setting_axes

if TYPE_CHECKING:
    from cdlm.text.pipeline import Pipeline
    from cdlm.text.sudoku import GridSample

MAX_COLUMNS, MAX_SAMPLES = 4, 10_000
SIZES, DEFAULT_SIZE = (4, 6, 9), 4
SECONDS = 6.0
"""How long the grids take to fill in, at most."""
FIRST_COLOUR, LAST_COLOUR = (245, 220, 90), (120, 150, 250)
"""Backgrounds of the cells that were drawn in the first step and in the last."""
_MIDDLE_COLOUR = (95, 205, 150)

_Axes = setting_axes({name: by_model(name) for name in SPECS})


@dataclasses.dataclass(frozen=True)
class SudokuConfig(_Axes):
    """Watch Sudoku grids fill in, step by step, with models or sampler settings side by side.

    Several models, or several values of a setting, make one column each: `cdlm sudoku exact --order random grid`.
    Colours show the step in which a cell was drawn, and ! marks a digit that is in its row, column or box twice. Below
    the first grid of each column stands how many of all samples are valid, and how many different ones these are.
    """

    models: tyro.conf.Positional[tuple[str, ...]] = ()
    """Models that were trained on Sudoku grids: directories, runs, bundled models, or hub ids; `exact` is the exact
    denoiser (sizes 4 and 6). [the bundled model, if there is one, and exact]"""
    puzzle: str | None = None
    """Givens of a puzzle, row by row, with . for an empty cell: "1..4 .... ..2. ....". Spaces do not count."""
    size: int | None = None
    """Side of the grid: 4, 6 or 9. [that of the puzzle or of the model, else 4]"""
    num_samples: int = 16
    """Grids to generate in each column; the first is shown."""
    seed: int = 0
    """The same seed generates the same grids."""
    json: bool = False
    """Print one JSON object per grid instead of the picture; the summary goes to standard error."""
    device: Device = "auto"
    """Where to compute."""
    dtype: Literal["auto", Dtype] = "auto"
    """Precision of the network: bfloat16 on a GPU and float32 elsewhere unless given."""

    def __post_init__(self) -> None:
        for name in SPECS:
            for value in self.axis(name):
                check_value(name, value)
        if self.size not in (None, *SIZES):
            raise ValueError(f"--size must be 4, 6 or 9 (got {self.size}).")
        if not 1 <= self.num_samples <= MAX_SAMPLES:
            raise ValueError(f"--num-samples must be between 1 and {MAX_SAMPLES:,} (got {self.num_samples}).")
        columns = self.num_columns
        if columns > MAX_COLUMNS:
            raise ValueError(f"at most {MAX_COLUMNS} models or values of a setting fit side by side (got {columns}).")
        counts = {"models": len(self.models)} | {flag(name): len(self.axis(name)) for name in SPECS}
        for name, count in counts.items():
            if count not in (0, 1, columns):
                raise ValueError(f"{name} has {count} values for {columns} columns; give one for all, or one for each.")

    def axis(self, name: str) -> tuple[Any, ...]:
        """The values of a setting; none if it is not given."""
        return getattr(self, name) or ()

    @property
    def num_columns(self) -> int:
        """How many columns the arguments ask for; 1 if they do not say."""
        return max(1, len(self.models), *(len(self.axis(name)) for name in SPECS))

    def given(self, column: int) -> dict[str, Any]:
        """The settings of a column."""
        axes = {name: self.axis(name) for name in SPECS if self.axis(name)}
        return {name: values[min(column, len(values) - 1)] for name, values in axes.items()}


@dataclasses.dataclass(frozen=True)
class Column:
    """A model with its settings, and what it generated."""

    model: "Pipeline"
    settings: Settings
    samples: "list[GridSample]" = dataclasses.field(default_factory=list)

    @property
    def flags(self) -> str:
        return flags(explicit(self.settings, self.model.generation_config, self.model.posterior))


def main(arguments: list[str]) -> None:
    config = parse(SudokuConfig, "sudoku", arguments)
    prepare_torch()
    watch_grids(config, make_console())


def watch_grids(config: SudokuConfig, console: Console) -> list[Column]:
    """Generate all grids, then play the first of each column back, and print how many are valid."""
    from cdlm.text.sudoku import check_puzzle, describe_summary, generate_grids, parse_puzzle, summarize

    puzzle = None if config.puzzle is None else parse_puzzle(config.puzzle, config.size)
    if puzzle is not None:
        check_puzzle(puzzle)
    aside = Console(stderr=True, soft_wrap=True, markup=False, emoji=False, highlight=False)
    columns = _columns(config, puzzle, aside)
    with aside.status("generating") if aside.is_terminal else contextlib.nullcontext():
        for column in columns:
            device, parameters = column.model.device, column.model.denoiser.count()
            with few_threads(device, parameters):
                grids = generate_grids(column.model, column.settings, config.seed, config.num_samples, puzzle)
                column.samples.extend(sample for sample in grids if sample is not None)
    if config.json:
        for column in columns:
            for record in _records(column, config):
                print(json.dumps(record), flush=True)
    else:
        play(columns, puzzle, console)
    for column in columns:
        label = f"{column.model.name} {column.flags}".strip()
        line = f"{label}: {describe_summary(summarize(column.samples))}"
        (aside if config.json else console).print(line, highlight=False, markup=False, emoji=False)
    return columns


def _columns(config: SudokuConfig, puzzle: list[int] | None, aside: Console) -> list[Column]:
    """The models with their settings, all for grids of one size."""
    from cdlm import zoo
    from cdlm.data.sudoku import LISTED
    from cdlm.text.sudoku import EXACT, default_models, grid_side, load_grid_model

    side = config.size if puzzle is None else int(len(puzzle) ** 0.5)
    names = list(config.models)
    if not names:
        side = side or DEFAULT_SIZE
        names = default_models(side)
        if not names:
            sizes = " and ".join(map(str, LISTED))
            raise ValueError(f"no model of size {side} is bundled, and the exact denoiser has sizes {sizes}: name one.")
        if side not in zoo.sudoku_names():
            aside.print(f"no model was named, and none of size {side} is bundled: this is the exact denoiser")
        names = names[:1] if config.num_columns > 1 else names
    loaded: dict[str, Pipeline] = {}
    for name in sorted(set(names), key=lambda name: name == EXACT):  # the exact denoiser has the size of the others
        loaded[name] = load_grid_model(name, side, config.device, config.dtype)
        side = side or grid_side(loaded[name])
    if not config.models and len(names) > 1:  # side by side with the bundled model: the same settings
        loaded[EXACT] = dataclasses.replace(loaded[EXACT], generation_config=loaded[names[0]].generation_config)
    names = names * config.num_columns if len(names) == 1 else names
    models = [loaded[name] for name in names]
    if puzzle is not None:
        causal = next((model.name for model in models if model.denoiser.process is None), None)
        if causal is not None:
            raise ValueError(f"{causal} is autoregressive: it cannot solve a --puzzle; leave it out.")
    return [Column(model, model.resolve(config.given(number))) for number, model in enumerate(models)]


def _records(column: Column, config: SudokuConfig) -> Iterator[dict[str, Any]]:
    """Everything about each grid, and the complete settings that generate it again."""
    from cdlm.text.sudoku import last_changes, written

    for index, sample in enumerate(column.samples):
        yield {
            "model": column.model.name,
            "index": index,
            "seed": config.seed,
            "puzzle": config.puzzle,
            "size": sample.side,
            "grid": written(sample.cells, sample.side),
            "valid": sample.valid,
            "conflicts": sample.conflicts,
            "steps": last_changes(sample),
            "nfe": sample.nfe,
            "sampling": dataclasses.asdict(column.settings),
        }


def play(columns: Sequence[Column], puzzle: list[int] | None, console: Console) -> None:
    """Show the first grid of each column filling in; where there is no terminal, the finished ones."""
    num_frames = max(len(column.samples[0].states) for column in columns)
    if not console.is_terminal:
        console.print(picture(columns, num_frames - 1, puzzle, console))
        return
    with Live(console=console, auto_refresh=False) as live:
        for frame in range(num_frames):
            live.update(picture(columns, frame, puzzle, console), refresh=True)
            time.sleep(min(0.6, SECONDS / num_frames))


def picture(columns: Sequence[Column], frame: int, puzzle: list[int] | None, console: Console) -> Group:
    """The first grid of every column after some steps, as many side by side as fit."""
    ascii_only = console.options.ascii_only
    boards = [_board(column.samples[0], frame, puzzle, ascii_only) for column in columns]
    width = max(max(map(len, board.plain.splitlines())) for board in boards)
    gap = 3
    across = max(1, min(len(columns), (console.width + gap) // (max(width, 24) + gap)))
    room = (console.width + gap) // across - gap
    parts: list[Table | Text] = []
    for first in range(0, len(columns), across):
        shown = columns[first : first + across]
        table = Table.grid(padding=(0, gap, 1, 0))
        for _ in shown:
            table.add_column(width=min(room, max(width, 36)))
        table.add_row(*map(_title, shown))
        table.add_row(*boards[first : first + across])
        table.add_row(*(_state(column, frame) for column in shown))
        parts.append(table)
    return Group(*parts, _legend(puzzle, console))


def _title(column: Column) -> Text:
    return Text.assemble((column.model.name, "bold"), f"\n{column.flags}")


def _state(column: Column, frame: int) -> Text:
    """Which step is shown, and what is wrong with the grid so far."""
    from cdlm.text.sudoku import EMPTY, conflicting_cells

    sample = column.samples[0]
    last = len(sample.states) - 1
    cells = sample.states[min(frame, last)]
    conflicts = len(conflicting_cells(cells, sample.side))
    verdict = f"{conflicts} cells in conflict" if conflicts else "" if EMPTY in cells else "valid"
    style = "bold red" if conflicts else "bold green"
    line = Text(f"step {min(frame, last)} of {last}")
    return line.append(", ").append(verdict, style) if verdict else line


def _board(sample: "GridSample", frame: int, puzzle: list[int] | None, ascii_only: bool) -> Text:
    """A grid with its boxes: the background of a cell says in which step it was drawn."""
    from cdlm.process.grid import box_height
    from cdlm.text.sudoku import EMPTY, conflicting_cells

    side, last = sample.side, len(sample.states) - 1
    frame = min(frame, last)
    height = box_height(side)
    width = side // height
    bar, line, cross, empty = ("|", "-", "+", ".") if ascii_only else ("│", "─", "┼", "·")
    states = sample.states[: frame + 1]
    cells, conflicts = states[-1], set(conflicting_cells(states[-1], side))
    board = Text()
    for cell, digit in enumerate(cells):
        row, column = divmod(cell, side)
        if column == 0 and row > 0:
            board.append("\n")
        if column == 0 and row > 0 and row % height == 0:
            board.append(cross.join([line * (3 * width)] * height) + "\n", "dim")
        if column > 0 and column % width == 0:
            board.append(bar, "dim")
        since = next(step for step in range(frame, -1, -1) if step == 0 or states[step - 1][cell] != digit)
        given = puzzle is not None and puzzle[cell] != EMPTY
        symbol = empty if digit == EMPTY else str(digit + 1) if digit < side else "?"
        mark = "!" if cell in conflicts else " "
        board.append(f" {symbol}{mark}", _cell_style(digit == EMPTY, given, cell in conflicts, since, frame, last))
    return board


def _cell_style(empty: bool, given: bool, conflict: bool, since: int, frame: int, last: int) -> str:
    if empty:
        return "dim"
    text = "bold #b00020" if conflict else "bold" if given or since == frame else ""
    if given or since == 0:  # given, or noise that is still there
        return text if conflict or given else "dim"
    return f"{text or 'not bold'} {'' if conflict else '#000000 '}on {step_colour(since, last)}"


def step_colour(step: int, num_steps: int) -> str:
    """From yellow for the first step over green to blue for the last."""
    place = (step - 1) / max(1, num_steps - 1) * 2
    ends = (FIRST_COLOUR, _MIDDLE_COLOUR) if place < 1 else (_MIDDLE_COLOUR, LAST_COLOUR)
    part = place if place < 1 else place - 1
    return "#" + "".join(f"{round(a + part * (b - a)):02x}" for a, b in zip(*ends, strict=True))


def _legend(puzzle: list[int] | None, console: Console) -> Text:
    legend = Text()
    if console.is_terminal and not console.no_color:
        legend.append("first step ")
        for step in range(1, 9):
            legend.append("  ", f"on {step_colour(step, 8)}")
        legend.append(" last step   ")
    legend.append("! ", "bold red").append("in conflict")
    return legend.append("   1 ", "bold").append("given") if puzzle is not None else legend
