"""The page of `cdlm demo`: one self-contained HTML file."""

import base64
import dataclasses
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cdlm.cli.sudoku import Column, step_colour

if TYPE_CHECKING:
    from cdlm.text.sudoku import GridSample


@dataclasses.dataclass(frozen=True)
class PageSample:
    """A sample as the page shows it."""

    model: str
    flags: str
    """Its settings as command-line flags."""
    cost: str
    text: str


_STYLE = """
:root{color-scheme:light dark;--paper:#faf9f6;--card:#fff;--ink:#1d1e24;--soft:#5b5d68;--line:#e2e0da}
@media (prefers-color-scheme:dark){:root{--paper:#131418;--card:#1d1f25;--ink:#f0efeb;--soft:#a6a8b3;--line:#33353e}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem 1rem 4rem;max-width:100rem;background:var(--paper);color:var(--ink)}
body{font:16px/1.55 system-ui,sans-serif}
h1{font-size:1.7rem;margin:.2em 0}h2{font-size:1.2rem;margin:2.2em 0 .4em}p{max-width:70ch;margin:.4em 0 1em}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(30rem,100%),1fr));gap:1rem}
figure{margin:0;padding:.8rem;background:var(--card);border:1px solid var(--line);border-radius:10px}
figure img{display:block;width:100%;height:auto;border-radius:6px}
figcaption{color:var(--soft);font-size:.88rem;margin-top:.5rem}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%}
td,th{text-align:left;vertical-align:top;padding:.5rem .7rem;border-bottom:1px solid var(--line)}
th{font-size:.85rem;color:var(--soft)}td:nth-child(4){min-width:24rem}td:nth-child(2){min-width:9rem}.nowrap{white-space:nowrap}
@media (max-width:40rem){
table,tbody,tr,td{display:block}tr:has(th){display:none}tr{padding:.7rem 0;border-bottom:1px solid var(--line)}
td{padding:.1rem 0;border:0}td:nth-child(4){min-width:0;margin-top:.4rem}code.nowrap,td.nowrap{white-space:normal}}
code{font:.9em ui-monospace,Menlo,Consolas,monospace}.soft{color:var(--soft);font-size:.88rem}
"""


_BOARD_STYLE = """
.boards{display:grid;grid-template-columns:repeat(2,minmax(0,10rem));gap:.8rem;justify-content:center}
.board{display:block;width:100%;height:auto}
.board text{font:bold 22px system-ui,sans-serif;text-anchor:middle;fill:#16171c}.board .conflict text{fill:#b00020}
.board .frame{fill:none;stroke:var(--soft);stroke-width:1}.board .box{stroke:var(--ink);stroke-width:2.5}
@media (prefers-reduced-motion:no-preference){.board g{animation:var(--shown) var(--time) infinite}}
"""
SHOWN_GRIDS = 4
_STEP_SECONDS, _FINAL_SECONDS = 0.7, 4.0
_CELL, _EDGE = 40, 3


def demo_page(
    columns: Sequence[Column], samples: Sequence[PageSample], pictures: Sequence[Path], commands: Mapping[str, str]
) -> str:
    """The figure of the Sudoku study and the first grids of each column, then the `pictures` of the first samples side
    by side, all samples as text, and commands to try next."""
    from cdlm.cli import demo_figure
    from cdlm.text.sudoku import describe_summary, summarize

    animated = list(zip(pictures, samples, strict=False))
    names = " and ".join(sample.model for _, sample in animated)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>CDLM: few-step samples</title><style>{_STYLE}{demo_figure.STYLE}{_BOARD_STYLE}</style></head><body>",
        "<h1>Few-step samples</h1>",
        "<h2>Sudoku: few steps with ground truth</h2>",
        "<p>There are 288 grids of 4 x 4 cells, and the exact distribution of every cell given the others is known. "
        "How many network evaluations does a method need for valid grids? A masked model draws the cells of a step "
        "independently: with the same order it needs no fewer nats than the exact denoiser, however it is trained. A "
        "better order of the cells gets further; uniform models, which can change a cell again, have more valid grids. "
        "docs/sudoku.md has the study.</p>",
        demo_figure.sudoku_figure(demo_figure.study_rows()),
        "<p>Grids fill in step by step. Colours show the step in which a cell was drawn, from yellow (first) to blue "
        "(last); red digits are in their row, column or box twice.</p>",
        '<div class="two">',
        *(
            f'<figure><div class="boards">{"".join(map(_board, column.samples[:SHOWN_GRIDS]))}</div><figcaption>'
            f"{_escape(column.model.name)} {_flags(column.flags)}: "
            f"{_escape(describe_summary(summarize(column.samples)))}; these are the first {SHOWN_GRIDS}"
            "</figcaption></figure>"
            for column in columns
        ),
        "</div>",
        "<h2>Text</h2>",
        f"<p>{_escape(names)} start from a fully masked sequence and fill in many tokens at once, anywhere in the "
        "text, step by step. Colours show in which step a token was drawn. ∎ is the EOS token: what stands among these "
        "is shown here and left out of the text below.</p>",
        '<div class="two">',
        *(_figure(picture, sample.text, _flags(sample.flags)) for picture, sample in animated),
        "</div>",
        "<h2>Fewer and more steps</h2>",
        "<p>The same models and seed, with the settings of the generation config for the nearest number of steps; the "
        "last two rows use the plain sampler: random order, no temperature, no guidance. Every step costs the same, so "
        "half the steps take half the time, and more tokens are drawn at once, independently of each other. One sample "
        "of each says little: docs/zoo.md has the scores of two judges on 64 samples.</p>",
        '<div class="wide"><table><tr><th>model</th><th>settings</th><th>cost</th><th>text</th></tr>',
        *(
            f'<tr><td class="nowrap">{_escape(sample.model)}</td><td>{_flags(sample.flags)}</td>'
            f'<td class="nowrap">{_escape(sample.cost).replace(", ", "<br>")}</td><td>{_escape(sample.text)}</td></tr>'
            for sample in samples
        ),
        "</table></div>",
    ]
    parts += ["<h2>Try next</h2>", '<div class="wide"><table>']
    parts += [
        f'<tr><td class="nowrap"><code>{_escape(command)}</code></td><td>{_escape(about)}</td></tr>'
        for command, about in commands.items()
    ]
    return "\n".join([*parts, "</table></div></body></html>", ""])


def _board(sample: "GridSample") -> str:
    """A grid as inline SVG; each cell appears in its step, again and again, unless readers prefer reduced motion."""
    from cdlm.process.grid import box_height
    from cdlm.text.sudoku import last_changes, written

    side, steps, digits = sample.side, last_changes(sample), written(sample.cells, sample.side)
    last, size = max(1, len(sample.states) - 1), side * _CELL
    seconds = last * _STEP_SECONDS + _FINAL_SECONDS
    height = box_height(side)
    rules = []
    for step in range(1, last + 1):
        begin = 100 * step * _STEP_SECONDS / seconds
        rules.append(f"@keyframes n{last}s{step}{{0%,{begin - 0.01:.2f}%{{opacity:0}}{begin:.2f}%,100%{{opacity:1}}}}")
    rows = "; ".join(digits[first : first + side] for first in range(0, len(digits), side))
    parts = [
        f'<svg class="board" viewBox="{-_EDGE} {-_EDGE} {size + 2 * _EDGE} {size + 2 * _EDGE}" role="img" '
        f'aria-label="a {side} x {side} grid: {rows}"><style>{"".join(rules)}</style>'
    ]
    for cell, (digit, step) in enumerate(zip(digits, steps, strict=True)):
        x, y = cell % side * _CELL, cell // side * _CELL
        parts.append(f'<rect class="frame" x="{x}" y="{y}" width="{_CELL}" height="{_CELL}"/>')
        conflict = ' class="conflict"' if cell in sample.conflicts else ""
        parts.append(
            f'<g{conflict} style="--shown:n{last}s{step};--time:{seconds:.1f}s"><rect x="{x + 1}" y="{y + 1}" '
            f'width="{_CELL - 2}" height="{_CELL - 2}" fill="{step_colour(step, last)}"/>'
            f'<text x="{x + _CELL / 2:g}" y="{y + _CELL / 2 + 8:g}">{digit}</text></g>'
        )
    width = side // height
    for first in range(0, side * side, height * width):
        number = first // (height * width)
        x, y = number % height * width * _CELL, number // height * height * _CELL
        parts.append(f'<rect class="frame box" x="{x}" y="{y}" width="{width * _CELL}" height="{height * _CELL}"/>')
    return "".join([*parts, "</svg>"])


def _figure(picture: Path, alt: str, caption: str) -> str:
    data = base64.b64encode(picture.read_bytes()).decode()
    image = f'<img alt="{_escape(alt)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def _flags(flags: str) -> str:
    """Code that breaks between flags only."""
    return " ".join(f'<code class="nowrap">--{_escape(flag)}</code>' for flag in flags.removeprefix("--").split(" --"))


def _escape(text: str) -> str:
    return html.escape(text, quote=True)
