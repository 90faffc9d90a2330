"""The page of the distributional protocol: every number beside human text and the naive samplers."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table

from cdlm.eval.claims import Entry, Score, faked_columns, refuting_samplers
from cdlm.eval.columns import COLUMNS
from cdlm.eval.naive import NAIVE_SAMPLERS
from cdlm.eval.report.tables import ReportTable, TableCell, TableRow
from cdlm.eval.results import ResultRow, read_rows
from cdlm.metrics.mauve import MIN_UNBIASED
from cdlm.sample.settings import Settings, describe_settings

PROTOCOL = "distributional"
CLAIMS = (("ppl", "h1"), ("ppl", "h1", "h2"), ("ppl", "h1", "h2", "rep_4", "overlap_3", "energy"), ("h1", "h2"))
"""Claims that every model is tested for: that it is close to human text in all of these columns."""
ON_CONSOLE = ("ppl", "h1", "h2", "rep_4", "overlap_3", "energy", "mauve")
"""The columns that fit into a terminal."""
SHORT = {"order ": "", "temperature ": "T ", "log-frequency-penalty": "penalty", "top-p ": "top-p "}
"""Settings in row labels: words of `describe_settings`, and what stands for them."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Rows with one reference: one judge, one length, one number of samples."""

    judge: str
    length: int
    num_samples: int
    rows: list[ResultRow]

    @property
    def title(self) -> str:
        judge = "no judge" if self.judge == "none" else f"judge {self.judge}"
        return f"Against human text: {judge}, {self.num_samples} samples of {self.length} tokens"

    @property
    def slug(self) -> str:
        words = f"{self.judge}-{self.length}-{self.num_samples}"
        return "".join(c if c.isalnum() else "-" for c in words).strip("-")

    @property
    def columns(self) -> list[str]:
        return [name for name in COLUMNS if any(name in row["columns"] for row in self.rows)]

    def of_kind(self, kind: str) -> list[ResultRow]:
        return [row for row in self.rows if row["kind"] == kind]


def comparisons(folders: Iterable[Path]) -> list[Comparison]:
    """All rows of the protocol; of a row that was measured twice, the last one counts."""
    rows = [row for folder in folders for row in read_rows(folder) if row.get("protocol") == PROTOCOL]
    groups: dict[tuple[object, ...], dict[str, ResultRow]] = {}
    for row in rows:
        key = (row["judge"], row["max_length"], row["num_samples"], row["reference_hash"], row.get("corpus_hash"))
        groups.setdefault(key, {})[json.dumps([row["model"], row["sampling"], row["seed"]], sort_keys=True)] = row
    return [
        Comparison(found[0]["judge"], found[0]["max_length"], found[0]["num_samples"], found)
        for found in (list(group.values()) for group in groups.values())
    ]


def row_label(row: ResultRow) -> str:
    """The model with its settings, or the name of a row without a model."""
    if row["sampling"] is None:
        return row["model"] if row["kind"] == "human" else f"naive: {row['model']}"
    words = [word for word in describe_settings(Settings(**row["sampling"])) if word != "fp64"]
    for long, short in SHORT.items():
        words = [word.replace(long, short) for word in words]
    return ", ".join([row["model"], *words])


def entry_of(row: ResultRow) -> Entry:
    """A row for flags and claims."""
    return Entry(
        row["model"] if row["sampling"] is None else row_label(row),
        {name: Score(each["z"], each["error"]) for name, each in row["columns"].items()},
    )


def flags_of(comparison: Comparison) -> dict[str, list[str]]:
    """The columns that a naive sampler wins, with these samplers."""
    models, naive = ([entry_of(row) for row in comparison.of_kind(kind)] for kind in ("model", "naive"))
    return faked_columns(models, naive) if models else {}


def column_title(name: str, flagged: Iterable[str]) -> str:
    return COLUMNS[name].title + ("\N{DAGGER}" if name in flagged else "")


def z_text(z: float) -> str:
    """A z-score in at most five characters."""
    return f"{z:+.1f}" if abs(z) < 9.95 else f"{z:+.0f}" if abs(z) < 999.5 else f"{'-' if z < 0 else '+'}>999"


def distributional_table(rows: Sequence[ResultRow]) -> Table:
    """z of the most telling columns, in 80 characters."""
    shown = [name for name in ON_CONSOLE if any(name in row["columns"] for row in rows)]
    several = len({row["judge"] for row in rows}) > 1
    table = Table(box=None, padding=(0, 1, 0, 0), title="z: distance from human text", title_justify="left")
    table.add_column("", max_width=30)
    has_ppl = "ppl" in shown
    if has_ppl:
        table.add_column("PPL", justify="right")
    for name in shown:
        table.add_column(f"z {COLUMNS[name].title}" if name == "ppl" else COLUMNS[name].title, justify="right")
    for row in rows:
        label = row_label(row) + (f" ({row['judge']})" if several else "")
        ppl = [f"{row['columns']['ppl']['value']:.0f}" if "ppl" in row["columns"] else ""] if has_ppl else []
        table.add_row(label, *ppl, *(z_text(row["columns"][n]["z"]) if n in row["columns"] else "" for n in shown))
    return table


def value_table(comparison: Comparison) -> ReportTable:
    """Every column with its z-score, and human text at the top."""
    names, flagged = comparison.columns, flags_of(comparison)
    heads = ("", *(column_title(name, flagged) for name in names))
    target = next(row["columns"] for row in comparison.rows)
    lines = [TableRow("human value", tuple(TableCell(_value(name, target[name]["human"])) for name in names))]
    for row in comparison.rows:
        cells = [row["columns"].get(name) for name in names]
        texts = [
            "" if cell is None else f"{_value(name, cell['value'])} ({z_text(cell['z'])})"
            for name, cell in zip(names, cells, strict=True)
        ]
        lines.append(TableRow(row_label(row), tuple(map(TableCell, texts))))
    marks = "; ".join(f"{COLUMNS[name].title} by {', '.join(by)}" for name, by in flagged.items())
    caption = (
        "Each value with its z-score: the difference from the human value in units of the null distribution, from "
        f"{comparison.rows[0]['splits']} random splits of {comparison.rows[0]['pool']} human texts. Better than human "
        "is not better: the distance counts. The row *human text* has texts that are not among these. "
    )
    caption += f"\N{DAGGER} won by a naive sampler: {marks}." if marks else "No naive sampler wins a column."
    if "mauve" in names and comparison.num_samples < MIN_UNBIASED:
        caption += f" MAUVE with fewer than {MIN_UNBIASED:,} samples is biased and tells little apart."
    return _table(f"distributional-{comparison.slug}", "Values (z)", caption, heads, lines)


def cost_table(comparison: Comparison) -> ReportTable:
    """What a sample costs."""
    heads = ("", "NFE", "Tokens per forward pass", "Seconds per sample")
    lines = []
    for row in comparison.of_kind("model"):
        seconds = row["seconds_per_sample"]
        cells = (f"{row['nfe']:.4g}", f"{row['tokens_per_pass']:.1f}", "" if seconds is None else f"{seconds:.2f}")
        lines.append(TableRow(row_label(row), tuple(map(TableCell, cells))))
    device = ", ".join(sorted({row["device"] for row in comparison.rows}))
    caption = f"NFE is the mean number of network evaluations of a sample; wall clock in batches, on {device}."
    return _table(f"cost-{comparison.slug}", "Cost", caption, heads, lines)


def claims_table(comparison: Comparison, claims: Sequence[Sequence[str]]) -> ReportTable | None:
    """For every model and every claim: whether it stands, or which naive sampler matches it."""
    naive = [entry_of(row) for row in comparison.of_kind("naive")]
    known = [claim for claim in claims if set(claim) <= set(comparison.columns)]
    models = comparison.of_kind("model")
    if not known or not models:
        return None
    lines = []
    for row in models:
        model = entry_of(row)
        verdicts = [", ".join(refuting_samplers(model, claim, naive)) for claim in known]
        lines.append(TableRow(row_label(row), tuple(TableCell(f"rejected: {v}" if v else "stands") for v in verdicts)))
    heads = ("", *(" + ".join(COLUMNS[name].title for name in claim) for claim in known))
    caption = (
        "A claim that a model is close to human text in some columns is rejected when one naive sampler matches it in "
        "all of them: when that sampler is not farther from human text, beyond the 95 % interval."
    )
    return _table(f"claims-{comparison.slug}", "Claims", caption, heads, lines)


def column_lines(comparison: Comparison) -> list[str]:
    """What each column and each naive sampler is."""
    lines = [f"- **{COLUMNS[name].title}**: {COLUMNS[name].about}." for name in comparison.columns]
    return [*lines, *(f"- *naive: {name}*: {naive.about}." for name, naive in NAIVE_SAMPLERS.items()), ""]


def _value(name: str, value: float) -> str:
    return f"{value:.{COLUMNS[name].digits}f}"


def _table(slug: str, title: str, caption: str, heads: Sequence[str], lines: Sequence[TableRow]) -> ReportTable:
    return ReportTable(slug, title, caption, (tuple((head, 1) for head in heads),), tuple(lines))
