"""The tables and the figure of docs/sudoku.md, from the rows of studies/results/sudoku.

Between `<!-- sudoku NAME -->` and `<!-- end -->` on the page stands a table of `TABLES`; what stands outside is written
by hand. Only finished rows count.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cdlm.eval.results import ResultRow, read_rows
from cdlm.extras import require
from cdlm.methods import METHODS
from cdlm.sample.settings import DEFAULTS
from cdlm.train.plot import canvas
from studies.sudoku import CONTROLS, DONE, EXACT, EXTRA, ROWS, STEPS, TIMES, register

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "sudoku.md"
FIGURE = ROOT / "docs" / "sudoku.png"
DEMO_ROWS = ROOT / "cdlm" / "cli" / "sudoku_rows.json"
"""What the figure of `cdlm demo` shows, in the package."""
BLOCK = re.compile(r"(<!-- sudoku ([a-z0-9-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PLAIN = "plain"
MEASURES = {"nats": 2, "valid": 3, "tv": 3, "pair_tv": 3, "distinct": 3, "solved": 3}
"""The measures, and how many decimals are shown."""
LOWEST = {4: math.log(288), 6: math.log(28_200_960)}
"""The entropy of a uniform grid: no sampler needs fewer nats."""


def finished_rows(out: Path, side: int) -> list[ResultRow]:
    return [row for done in sorted(out.glob(f"{side}-*/{DONE}")) for row in read_rows(done.parent)]


def sampler_of(row: ResultRow) -> str:
    """Which control a row was sampled with."""
    found = [
        name
        for name, control in CONTROLS.items()
        if all(row["sampling"][key] == values[0] for key, values in control.items())
    ]
    return max(found, key=lambda name: len(CONTROLS[name]), default=PLAIN)


def column_of(row: ResultRow, side: int) -> int:
    """The number of steps; an autoregressive model has one number of evaluations, and stands in the last column."""
    steps: int | None = row["sampling"]["steps"]
    return STEPS[side][-1] if steps is None else steps


Cells = dict[tuple[str, str, int], list[ResultRow]]


def cells_of(out: Path, side: int) -> Cells:
    """The rows of all seeds by model, sampler and steps."""
    cells: Cells = defaultdict(list)
    for row in finished_rows(out, side):
        cells[row["model"], sampler_of(row), column_of(row, side)].append(row)
    return cells


def value_text(rows: Sequence[ResultRow], measure: str) -> str:
    """The mean over seeds with Student's 95 % interval; of a single seed, the interval over samples."""
    digits = MEASURES[measure]
    values = [row[measure] for row in rows if row.get(measure) is not None]
    if not values:
        return ""
    mean = f"{np.mean(values):.{digits}f}"
    if len(values) > 1:
        stats = require("scipy.stats", "eval", "an interval over seeds", "scipy")
        scale = stats.sem(values)
        low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), scale) if scale else (values[0],) * 2
        return f"{mean} [{low:.{digits}f}, {high:.{digits}f}]"
    interval = rows[0].get(f"{measure}_interval")
    return f"{mean} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]" if interval else mean


def model_name(model: str) -> str:
    return "exact denoiser" if model == EXACT else METHODS[model].name


def steps_head(side: int) -> list[str]:
    return [f"{steps} step{'' if steps == 1 else 's'}" for steps in STEPS[side]]


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "No results yet."
    lines = [list(head), ["---"] * len(head), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def exact_table(out: Path, side: int) -> str:
    """What our samplers make of the exact denoiser."""
    cells, head = cells_of(out, side), [f"{side} x {side}, exact denoiser", *steps_head(side)]
    if not any(model == EXACT for model, _, _ in cells):
        return "No results yet."
    names = {PLAIN: "ancestral, random order", "equal steps": "equal steps, random order"}
    names |= {"grid order": "equal steps, cells of a step in different rows, columns and boxes"}
    names |= {"most certain first": "equal steps, most certain first"}
    lines = []
    for measure in ("valid", "nats"):
        for sampler, name in names.items():
            found = [cells.get((EXACT, sampler, steps), []) for steps in STEPS[side]]
            texts = [f"{rows[0][measure]:.{MEASURES[measure]}f}" if rows else "" for rows in found]
            lines.append([f"{measure}: {name}", *texts])
    return markdown_table(head, lines)


def methods_table(out: Path, side: int, measure: str) -> str:
    """A measure of every method at every number of steps, by the plain sampler."""
    cells, lines, shown = cells_of(out, side), list[list[str]](), list[ResultRow]()
    for model in (EXACT, *ROWS[side], *EXTRA[side]):
        found = [cells.get((model, PLAIN, steps), []) for steps in STEPS[side]]
        texts = [value_text(rows, measure) for rows in found]
        if any(texts):
            seeds = max(len(rows) for rows in found)
            lines.append([model_name(model), "" if model == EXACT else str(seeds), *texts])
            shown += [row for rows in found for row in rows]
    return markdown_table(["model", "seeds", *steps_head(side)], lines) + null_text(shown, measure)


def null_text(rows: Sequence[ResultRow], measure: str) -> str:
    """What uniform grids would have: it depends on how many samples there are."""
    nulls = {row["num_samples"]: row[f"{measure}_null"] for row in rows if f"{measure}_null" in row}
    texts = [f"{nulls[count]:.3f} ({count:,} samples)" for count in sorted(nulls, reverse=True)]
    return f"\n\nUniform grids: {', '.join(texts)}." if texts else ""


def controls_table(out: Path, side: int) -> str:
    """Validity and coverage under other samplers, first seed, beside the plain one."""
    cells, measure = cells_of(out, side), "tv" if side == 4 else "pair_tv"
    lines, shown = list[list[str]](), list[ResultRow]()
    for model in (*ROWS[side], *EXTRA[side]):
        for sampler in (PLAIN, *CONTROLS):
            found = [cells.get((model, sampler, steps), []) for steps in STEPS[side]]
            first = [next((row for row in rows if row["seed"] == 0), None) for rows in found]
            if any(first):
                texts = [f"{row['valid']:.3f} / {row[measure]:.3f}" if row else "" for row in first]
                lines.append([model_name(model), sampler, *texts])
                shown += [row for row in first if row]
    return markdown_table(["model", "sampler", *steps_head(side)], lines) + null_text(shown, measure)


TABLES: dict[str, Callable[[Path], str]] = {
    **{f"exact-{side}": lambda out, side=side: exact_table(out, side) for side in STEPS},  # type: ignore[misc]
    **{
        f"{measure.replace('_', '-')}-{side}": lambda out, side=side, measure=measure: methods_table(out, side, measure)  # type: ignore[misc]
        for side in STEPS
        for measure in MEASURES
    },
    **{f"controls-{side}": lambda out, side=side: controls_table(out, side) for side in STEPS},  # type: ignore[misc]
}


def fill_page(page: str, out: Path) -> str:
    """The page with its tables made anew."""
    return BLOCK.sub(lambda block: f"{block[1]}{TABLES[block[2]](out)}\n{block[4]}", page)


def plot_methods(out: Path, path: Path, side: int = 4) -> None:
    """Nats per grid and valid grids over network evaluations, with the exact references."""
    cells = cells_of(out, side)
    figure, axes = canvas(11, 3.8, 1, 2)
    left, right = axes[0]
    for number, model in enumerate((EXACT, *ROWS[side], *EXTRA[side])):
        style: dict[str, Any] = {"color": f"C{number % 10}", "linestyle": "--" if number > 10 else "-"}
        style |= {"color": "black", "linewidth": 2, "zorder": 3} if model == EXACT else {}
        for panel, measure in ((left, "nats"), (right, "valid")):
            points = []
            for steps in STEPS[side]:
                rows = [row for row in cells.get((model, PLAIN, steps), []) if row.get(measure) is not None]
                if rows:
                    points.append((np.mean([row["nfe"] for row in rows]), np.mean([row[measure] for row in rows])))
            if points:
                panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=model_name(model), **style)
    left.axhline(LOWEST[side], color="black", linestyle=":", linewidth=1)
    left.set_ylabel("nats per grid (dotted: entropy of a uniform grid)")
    right.set_ylabel("share of valid grids")
    for panel in (left, right):
        panel.set_xscale("log", base=2)
        panel.set_xticks(STEPS[side], [str(steps) for steps in STEPS[side]])
        panel.set_xlabel("network evaluations")
        panel.grid(alpha=0.3)
    right.legend(fontsize=7, handlelength=3.5, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.suptitle(f"Sudoku {side} x {side}", fontsize=11)
    figure.savefig(path, dpi=130)


def demo_rows(out: Path, side: int = 4) -> list[dict[str, Any]]:
    """The rows of the figure of `cdlm demo`, with what it needs of them: the methods of the package by the plain
    sampler, and the exact denoiser by all samplers."""
    found = []
    for row in finished_rows(out, side):
        if row["model"] == EXACT or (
            sampler_of(row) == PLAIN and row["model"] in METHODS and row["model"] not in TIMES
        ):
            about = {name: row[name] for name in ("task", "model", "max_length", "seed")}
            sampling = {name: value for name, value in row["sampling"].items() if value != DEFAULTS.get(name)}
            numbers = {
                name: np.round(row[name], 5).tolist()
                for name in ("nfe", "nats", "nats_interval", "valid", "valid_interval")
                if row.get(name) is not None
            }
            found.append({**about, "sampling": {"steps": None, **sampling}, **numbers})
    return found


def write_demo_rows(out: Path, path: Path = DEMO_ROWS) -> None:
    path.write_text("[\n" + ",\n".join(map(json.dumps, demo_rows(out))) + "\n]\n")


def write_page(out: Path, page: Path = PAGE, figure: Path = FIGURE) -> None:
    register()
    page.write_text(fill_page(page.read_text(), out))
    plot_methods(out, figure)
    write_demo_rows(out)
    print(f"filled {page}, drew {figure}, wrote {DEMO_ROWS}")
