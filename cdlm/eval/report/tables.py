"""A table on its way to Markdown, LaTeX or a picture."""

import dataclasses
import re
from pathlib import Path
from typing import Literal

from cdlm.train.plot import canvas


@dataclasses.dataclass(frozen=True)
class TableCell:
    """One cell: its text, how it ranks in its column, and a star for an entropy below the threshold."""

    text: str = ""
    rank: Literal[0, 1, 2] = 0
    star: bool = False


@dataclasses.dataclass(frozen=True)
class TableRow:
    """A row of the table; without entries it is the heading of those that follow."""

    name: str
    entries: tuple[TableCell, ...] = ()
    quoted: bool = False
    """Numbers of somebody else, such as the paper's."""


@dataclasses.dataclass(frozen=True)
class ReportTable:
    """A table: head rows as (text, columns that it spans), then lines."""

    slug: str
    title: str
    caption: str
    heads: tuple[tuple[tuple[str, int], ...], ...]
    lines: tuple[TableRow, ...]

    def markdown(self) -> str:
        """For a page."""
        width = sum(span for _, span in self.heads[-1])
        top = []
        for head in self.heads:
            cells = [text if k == 0 else "" for text, span in head for k in range(span)]
            top.append("| " + " | ".join(cells) + " |")
        out = [f"**{self.title}**", "", top[0], "|" + " --- |" * width, *(_bold_row(row) for row in top[1:])]
        for line in self.lines:
            if not line.entries:
                out.append(f"| *{line.name}* |" + " |" * (width - 1))
                continue
            title = f"*{line.name}*" if line.quoted else line.name
            out.append(
                "| " + " | ".join([title, *(_markdown_cell(entry, line.quoted) for entry in line.entries)]) + " |"
            )
        return "\n".join([*out, "", self.caption, ""])

    def latex(self) -> str:
        """As the paper sets it; needs the package booktabs."""
        width = sum(span for _, span in self.heads[-1])
        out = [r"\begin{table}[t]", r"\centering", r"\scriptsize", rf"\begin{{tabular}}{{l*{{{width - 1}}}{{c}}}}"]
        out.append(r"\toprule")
        for head in self.heads:
            cells = [_latex_span(rf"\textbf{{{_escape_latex(text)}}}" if text else "", span) for text, span in head]
            out.append(" & ".join(cells) + r" \\")
        out.append(r"\midrule")
        for number, line in enumerate(self.lines):
            if not line.entries:
                rule = [] if number == 0 else [r"\midrule"]
                out += [
                    *rule,
                    rf"\multicolumn{{{width}}}{{c}}{{\textit{{{_escape_latex(line.name)}}}}} \\",
                    r"\midrule",
                ]
                continue
            title = rf"\textit{{{_escape_latex(line.name)}}}" if line.quoted else _escape_latex(line.name)
            out.append(" & ".join([title, *(_latex_cell(entry, line.quoted) for entry in line.entries)]) + r" \\")
        caption = _escape_latex(f"{re.sub(r'^Table [0-9]+[.,] ', '', self.title)}. {self.caption}")
        out += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{caption}}}", rf"\label{{tab:{self.slug}}}"]
        return "\n".join([*out, r"\end{table}", ""])

    def picture(self, path: Path) -> Path:
        """The same drawn."""
        rows: list[list[tuple[str, str]]] = []
        for head in self.heads:
            rows.append([(text if k == 0 else "", "head") for text, span in head for k in range(span)])
        for line in self.lines:
            style = "quoted" if line.quoted else "plain"
            ranks = {0: style, 1: "best", 2: "second"}
            cells = [(e.text + "*" * e.star, style if line.quoted else ranks[e.rank]) for e in line.entries]
            rows.append([(line.name, style if line.entries else "section"), *cells])
        widths = [
            max(len(row[k][0]) for row in rows if len(row) > k > 0 or (k == 0 and len(row) > 1))
            for k in range(max(map(len, rows)))
        ]
        left = [1.1 * sum(widths[:k]) + 3 * k for k in range(len(widths) + 1)]
        left[-1] = max(left[-1], 1.15 * len(self.title))
        figure, axis = canvas(max(5.0, left[-1] * 0.075 + 0.3), 0.24 * (len(rows) + 2.2))
        axis.set_xlim(-1, left[-1])
        axis.set_ylim(-len(rows) - 0.3, 1.6)
        axis.axis("off")
        axis.text(0, 0.9, self.title, fontsize=9, weight="bold", va="center")
        for y, row in enumerate(rows):
            if row[0][1] == "section":
                axis.text(left[-1] / 2, -y - 0.5, row[0][0], fontsize=8, style="italic", ha="center", va="center")
                continue
            for k, (text, style) in enumerate(row):
                x = left[k] if k == 0 else left[k] + widths[k] / 2
                axis.text(
                    x,
                    -y - 0.5,
                    text,
                    fontsize=8,
                    ha="left" if k == 0 else "center",
                    va="center",
                    weight="bold" if style in ("best", "head") else "normal",
                    color="0.45" if style == "quoted" else "black",
                    style="italic" if style == "quoted" else "normal",
                )
                if style == "second":
                    half = len(text) * 0.42
                    axis.plot([x - half, x + half], [-y - 0.86] * 2, color="black", linewidth=0.7)
        for place in (0, len(self.heads), len(rows)):
            axis.axhline(-place, color="black", linewidth=0.9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        return path


def rank_column(values: list[float | None], digits: int = 1, smaller: bool = True) -> list[Literal[0, 1, 2]]:
    """Best and second best of a column; numbers that print alike share a rank, and a lone one has none."""
    shown = [None if value is None else round(value, digits) for value in values]
    there = sorted({value for value in shown if value is not None}, reverse=not smaller)
    if sum(value is not None for value in values) < 2:
        return [0] * len(values)
    first, second = there[0], there[1] if len(there) > 1 else None
    return [0 if value is None else 1 if value == first else 2 if value == second else 0 for value in shown]


def _markdown_cell(entry: TableCell, quoted: bool) -> str:
    text = entry.text + ("\\*" if entry.star else "")
    if quoted:
        return f"*{text}*" if text else ""
    return {0: text, 1: f"**{text}**", 2: f"<u>{text}</u>"}[entry.rank]


def _latex_cell(entry: TableCell, quoted: bool) -> str:
    text = _escape_latex(entry.text) + ("$^{*}$" if entry.star else "")
    if quoted:
        return rf"\textit{{{text}}}" if text else ""
    return {0: text, 1: rf"\textbf{{{text}}}", 2: rf"\underline{{{text}}}"}[entry.rank]


def _bold_row(row: str) -> str:
    return "| " + " | ".join(f"**{cell}**" if cell else "" for cell in row[2:-2].split(" | ")) + " |"


def _latex_span(text: str, span: int) -> str:
    return text if span == 1 else rf"\multicolumn{{{span}}}{{c}}{{{text}}}"


def _escape_latex(text: str) -> str:
    for symbol in "&%#_":
        text = text.replace(symbol, f"\\{symbol}")
    return text
