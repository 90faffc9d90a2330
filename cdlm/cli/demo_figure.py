"""The figure of the Sudoku task for the page of `cdlm demo`: nats per grid and valid grids over NFE, as inline SVG."""

import dataclasses
import html
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cdlm.methods import METHODS
from cdlm.sample.settings import DEFAULTS, flags
from cdlm.text.sudoku import EXACT

NUM_GRIDS = {4: 288, 6: 28_200_960}
PLAIN = ""
STUDY_ROWS = Path(__file__).with_name("sudoku_rows.json")
"""Rows of the study in docs/sudoku.md, written by `python -m studies.sudoku --page`."""
WIDTH, HEIGHT = 360, 260
LEFT, RIGHT, TOP, BOTTOM = 38, 352, 12, 222
COLOURS, REFERENCES = 10, 4
STYLE = """
.chart{display:block;width:100%;height:auto;max-width:34rem}.chart text{font:11px system-ui,sans-serif;fill:var(--soft)}
.chart .grid{stroke:var(--line)}.chart .line{fill:none;stroke:var(--c);stroke-width:2}
.chart .mark{fill:var(--c)}.chart .whisker{stroke:var(--c);stroke-width:1;opacity:.6}
.chart .lowest{stroke:var(--ink);stroke-dasharray:1 3}
.keys{display:flex;flex-wrap:wrap;gap:.2rem 1rem;margin:.6rem 0 1.2rem;padding:0;list-style:none;font-size:.88rem}
.keys svg.chart{display:inline-block;width:1.8rem;height:.75rem;margin-right:.35rem;vertical-align:-.05rem}
.c0{--c:#3a6fd8}.c1{--c:#d1641f}.c2{--c:#2a8f62}.c3{--c:#b8448f}.c4{--c:#8a7a12}
.c5{--c:#2490a8}.c6{--c:#8458d6}.c7{--c:#b33a3a}.c8{--c:#6b8e23}.c9{--c:#a0724a}
.ref0{--c:var(--ink)}.ref1,.ref2,.ref3{--c:var(--soft)}
.ref0 .line{stroke-dasharray:6 4}.ref1 .line{stroke-dasharray:2 3}.ref2 .line{stroke-dasharray:9 3 2 3}
.ref3 .line{stroke-dasharray:1 6;stroke-linecap:round}
"""


@dataclasses.dataclass(frozen=True)
class Point:
    """A mean over seeds at one number of network evaluations, and its range over seeds, or the interval of one seed."""

    nfe: float
    value: float
    low: float
    high: float


Series = dict[str, list[Point]]


def study_rows() -> list[dict[str, Any]]:
    """The rows of the study for 4 x 4 grids: all methods with the plain sampler, and the exact denoiser."""
    return list(json.loads(STUDY_ROWS.read_text(encoding="utf-8")))


def sudoku_figure(rows: Iterable[Mapping[str, Any]], side: int = 4) -> str:
    """Two charts with a legend, from the result rows of the task `sudoku` for one size, as HTML with inline SVG.

    Trained models are shown with the plain sampler, and the exact denoiser with every order that the rows have. The
    page needs `STYLE`. It is an error if there is no row of this size.
    """
    chosen = [row for row in rows if row["task"] == "sudoku" and row["max_length"] == side * side]
    chosen = [row for row in chosen if row["model"] == EXACT or _controls(row) == PLAIN]
    if not chosen:
        raise ValueError(f"there are no rows of the task sudoku for size {side}; run cdlm eval --tasks sudoku first")
    names = list(dict.fromkeys(map(_name, sorted(chosen, key=lambda row: row["model"] == EXACT))))
    models = [name for name in names if not _is_exact(name)]
    references = [name for name in names if _is_exact(name)]
    classes = {name: f"c{number % COLOURS}" for number, name in enumerate(models)}
    classes |= {name: f"ref{number % REFERENCES}" for number, name in enumerate(references)}
    nats, valid = series(chosen, "nats"), series(chosen, "valid")
    lowest = math.log(NUM_GRIDS[side])
    highest = max([point.value for points in nats.values() for point in points], default=2 * lowest)
    return "\n".join(
        [
            '<div class="two">',
            "<figure>",
            _chart(nats, classes, (lowest // 5 * 5, highest), "nats per grid", lowest),
            f"<figcaption>Nats per grid over network evaluations: lower is better, and no model needs fewer than "
            f"{lowest:.2f}, the entropy of all {NUM_GRIDS[side]:,} grids (dotted). Those of "
            "uniform models (level lines) hold for infinitely many steps.</figcaption>",
            "</figure>",
            "<figure>",
            _chart(valid, classes, (0, 1), "valid grids", None),
            "<figcaption>Share of samples that are valid grids: higher is better, as long as the grids are diverse. "
            "Dashed: the exact denoiser, whose mistakes are those of drawing several cells at once.</figcaption>",
            "</figure>",
            "</div>",
            f'<ul class="keys">{"".join(_key(name, classes[name]) for name in names)}</ul>',
        ]
    )


def series(rows: Sequence[Mapping[str, Any]], measure: str) -> Series:
    """The points of every model, by network evaluations; those of several seeds are averaged."""
    found: dict[str, dict[Any, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.get(measure) is not None:
            found[_name(row)][row["sampling"]["steps"]].append(row)
    return {
        name: sorted((_point(group, measure) for group in groups.values()), key=lambda point: point.nfe)
        for name, groups in found.items()
    }


def _point(rows: Sequence[Mapping[str, Any]], measure: str) -> Point:
    values = [row[measure] for row in rows]
    low, high = (min(values), max(values)) if len(rows) > 1 else rows[0][f"{measure}_interval"]
    return Point(sum(row["nfe"] for row in rows) / len(rows), sum(values) / len(values), low, high)


def _name(row: Mapping[str, Any]) -> str:
    """The label of a line: the method, or the exact denoiser with its order."""
    if row["model"] == EXACT:
        return " ".join(["exact denoiser", _controls(row)]).strip()
    return METHODS[row["model"]].name if row["model"] in METHODS else str(row["model"])


def _is_exact(name: str) -> bool:
    return name.startswith("exact denoiser")


def _controls(row: Mapping[str, Any]) -> str:
    """The settings that are not the plain sampler's, as flags."""
    changed = {
        name: value
        for name, value in row["sampling"].items()
        if name not in ("sampler", "steps", "posterior") and value is not None and value != DEFAULTS[name]
    }
    return flags(changed) or PLAIN


def _chart(
    lines: Series, classes: Mapping[str, str], y_range: tuple[float, float], title: str, lowest: float | None
) -> str:
    """Lines over network evaluations on a logarithmic axis."""
    ticks = sorted({point.nfe for points in lines.values() for point in points})
    first, last = math.log2(ticks[0]), math.log2(max(ticks[-1], 2 * ticks[0]))

    def x(nfe: float) -> float:
        return LEFT + 8 + (math.log2(nfe) - first) / (last - first) * (RIGHT - LEFT - 16)

    def y(value: float) -> float:
        low, high = y_range
        return max(TOP, BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP))

    label = _escape(_described(lines, title))
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">']
    for value in _round_values(*y_range):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for power in range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1):
        parts.append(f'<text x="{x(2**power):.1f}" y="{BOTTOM + 16}" text-anchor="middle">{2**power:g}</text>')
    parts.append(
        f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">network evaluations (NFE)</text>'
    )
    if lowest is not None:
        parts.append(f'<line class="lowest" x1="{LEFT}" x2="{RIGHT}" y1="{y(lowest):.1f}" y2="{y(lowest):.1f}"/>')
    for name, points in lines.items():
        path = "L".join(f"{x(point.nfe):.1f} {y(point.value):.1f}" for point in points)
        group = [f'<path class="line" d="M{path}"/>'] if len(points) > 1 else []
        for point in points:
            where = f"{x(point.nfe):.1f}"
            group.append(
                f'<line class="whisker" x1="{where}" x2="{where}" y1="{y(point.low):.1f}" y2="{y(point.high):.1f}"/>'
            )
            group.append(f'<circle class="mark" cx="{where}" cy="{y(point.value):.1f}" r="3"/>')
        parts.append(f'<g class="{classes[name]}">{"".join(group)}</g>')
    return "".join([*parts, "</svg>"])


def _key(name: str, classes: str) -> str:
    line = '<path class="line" d="M0 6H24"/><circle class="mark" cx="12" cy="6" r="3"/>'
    return f'<li><svg class="chart {classes}" viewBox="0 0 24 12" aria-hidden="true">{line}</svg>{_escape(name)}</li>'


def _described(lines: Series, title: str) -> str:
    """The values in words, for those who do not see the chart."""
    parts = [f"{name} {', '.join(f'{point.value:.3g} at {point.nfe:.3g}' for point in lines[name])}" for name in lines]
    return f"{title} by network evaluations: {'; '.join(parts)}"


def _round_values(low: float, high: float) -> list[float]:
    """Up to six round numbers of an axis that begins at one."""
    rough = (high - low) / 5
    unit = 10 ** math.floor(math.log10(rough))
    step = unit * next(factor for factor in (1, 2, 5, 10) if factor * unit >= rough)
    return [low + number * step for number in range(math.floor((high - low) / step + 1e-9) + 1)]


def _escape(text: str) -> str:
    return html.escape(text, quote=True)
