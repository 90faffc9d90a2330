"""The paper's tables in its own layout, from result rows."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from cdlm.eval.report import paper
from cdlm.eval.report.paper import SETS, TABLES, TITLES, Column
from cdlm.eval.report.rows import (
    Section,
    cdlm_choices,
    display_name,
    is_distilled,
    method_slug,
    num_steps,
    paper_name,
    training_steps,
    unconditional_rows,
    uncontrolled,
    without_seed,
)
from cdlm.eval.report.tables import ReportTable, TableCell, TableRow, rank_column
from cdlm.eval.results import ResultRow
from cdlm.methods import METHODS
from cdlm.objective.divergence import FLOOR
from cdlm.sample.settings import Settings, describe_settings

BASE, DISTILLED = "Base models (trained from scratch)", "Distilled models"


@dataclasses.dataclass(frozen=True)
class TableStyle:
    """What applies to all tables of a report."""

    threshold: float | None
    """A star marks an entropy below it."""
    compare: bool = False
    """Show the paper's numbers beneath ours."""

    def note(self, section: Section) -> str:
        star = "" if self.threshold is None else f" * entropy below {self.threshold:.2f}."
        text = f"Best bold, second best underlined, whatever their intervals.{star}"
        if not self.compare:
            return text
        text += " In italics: the paper's own numbers"
        other = [] if section.judge == "gpt2-large" else ["another judge (gpt2-large)"]
        other += [] if section.length == 1024 else ["other lengths (1024 tokens)"]
        other += [] if section.rows[0]["vocab_size"] in (50257, 50258) else ["another vocabulary (GPT-2's)"]
        return text + (f", which have {', '.join(other)}: not comparable with ours." if other else ".")


def unconditional_tables(section: Section, style: TableStyle) -> list[ReportTable]:
    """Tables 1, 2 and 7: perplexity (entropy) over sampling steps."""
    tables = []
    uniform = ("uniform", "unigram")
    for number, own, precision in ((1, ("masked",), "fp64"), (2, uniform, "fp64"), (7, (), "naive-fp32")):
        rows = uncontrolled(unconditional_rows(section.rows, precision))
        rows = [row for row in rows if not own or row["process"] in (*own, "none")]
        if any(row["process"] != "none" for row in rows):
            tables += [_over_steps(number, rows, section, style), _interval_table(number, rows, section)]
    return tables


def _over_steps(number: int, rows: list[ResultRow], section: Section, style: TableStyle) -> ReportTable:
    columns = sorted({found for row in rows if (found := num_steps(row))})
    last = columns[-1]

    def place(row: ResultRow) -> Column:
        return num_steps(row) or last

    named = _by_name(rows)
    heads = ("Model", "Pretrain steps", "Distill steps", *map(str, columns))
    values = {key: {place(row): row for row in found} for key, found in named.items()}
    ranks = {c: rank_column([_rank_value(values[key].get(c), "ppl") for key in named]) for c in columns}
    lines: list[TableRow] = []
    for title, late in ((BASE, False), (DISTILLED, True)):
        part = [key for key in named if is_distilled(named[key][0]) == late]
        if part and any(is_distilled(found[0]) for found in named.values()):
            lines.append(TableRow(title))
        for key in part:
            entries = [TableCell(text) for text in training_steps(named[key][0])]
            for column in columns:
                row = values[key].get(column)
                rank = ranks[column][list(named).index(key)]
                entries.append(
                    TableCell() if row is None else TableCell(_ppl_entropy(row), rank, _is_starred(row, style))
                )
            lines.append(TableRow(key, tuple(entries)))
            quote = _paper_cells(number, named[key][0], list(columns))
            if style.compare and quote:
                lines.append(TableRow("paper", (TableCell(), TableCell(), *quote), quoted=True))
    caption = f"{section.note(rows)} {style.note(section)}"
    caption += " A model without steps stands in the last column." * any(num_steps(row) is None for row in rows)
    return ReportTable(
        _table_slug(section, number), _table_title(number), caption, (tuple((h, 1) for h in heads),), tuple(lines)
    )


def _interval_table(number: int, rows: list[ResultRow], section: Section) -> ReportTable:
    """The same cells with their 95 % intervals."""
    columns = sorted({found for row in rows if (found := num_steps(row))})
    lines = []
    for key, own in _by_name(rows).items():
        cells = {num_steps(row) or columns[-1]: row for row in own}
        text = (_bracketed(cells[c]) if c in cells else "" for c in columns)
        lines.append(TableRow(key, tuple(TableCell(one) for one in text)))
    heads = (("Model", 1), *((str(c), 1) for c in columns))
    slug, title = f"{_table_slug(section, number)}-intervals", f"Table {number}, with 95 % intervals of the perplexity"
    return ReportTable(slug, title, f"{section.note(rows)} The texts are resampled.", (heads,), tuple(lines))


def _bracketed(row: ResultRow) -> str:
    low, high = row["ppl_interval"]
    return f"{row['ppl']:.1f} [{low:.1f}, {high:.1f}]"


def conditional_tables(section: Section, style: TableStyle) -> list[ReportTable]:
    """Tables 3 and 8: recovery of texts half of whose words are noise, by evaluation set and steps."""
    rows = [row for row in uncontrolled(section.rows) if row["task"] == "conditional"]
    if not rows:
        return []
    known = [text for text in SETS if any(row["dataset"] == text for row in rows)]
    sets = known + sorted({row["dataset"] for row in rows} - set(known))
    columns = [
        (text, n) for text in sets for n in sorted({num_steps(row) or 0 for row in rows if row["dataset"] == text})
    ]
    named = _by_name(rows)
    values = {key: {(row["dataset"], num_steps(row) or 0): row for row in found} for key, found in named.items()}
    first = [("Model", 1), *((text, sum(c[0] == text for c in columns)) for text in sets)]
    heads = (tuple(first), (("", 1), *((f"{n} steps", 1) for _, n in columns)))
    small = section.note(rows)
    tables = []
    for number, show, digits, measure in (
        (3, lambda row: f"{row['ppl']:.1f} / {row['bleu2']:.1f}", 1, "ppl"),
        (8, lambda row: f"{row['mauve']:.2f}", 2, "mauve"),
    ):
        ranks = {
            c: rank_column([_rank_value(values[key].get(c), measure) for key in named], digits, smaller=number == 3)
            for c in columns
        }
        lines = []
        for index, key in enumerate(named):
            found = [values[key].get(column) for column in columns]
            cells = zip(found, columns, strict=True)
            entries = [TableCell() if row is None else TableCell(show(row), ranks[c][index]) for row, c in cells]
            lines.append(TableRow(key, tuple(entries)))
            quote = _paper_cells(number, named[key][0], list(columns))
            if style.compare and quote:
                lines.append(TableRow("paper", tuple(quote), quoted=True))
        if number == 3:
            own = [next((row for row in rows if (row["dataset"], num_steps(row) or 0) == c), None) for c in columns]
            entries = [TableCell(f"{row['reference_ppl']:.1f} / 100" if row else "") for row in own]
            lines.append(TableRow("the originals themselves", tuple(entries), quoted=True))
            how = f" BLEU-2: {rows[0]['bleu2_tokenization']}."
        else:
            warning = rows[0].get("mauve_warning")
            how = f" MAUVE of {warning}." if warning else ""
        tables.append(ReportTable(_table_slug(section, number), _table_title(number), small + how, heads, tuple(lines)))
    return tables


def ablation_tables(section: Section, style: TableStyle, unjudged: Sequence[ResultRow] = ()) -> list[ReportTable]:
    """Tables 4 to 6: CDLM runs that differ in one ingredient; the run without changes stands in each.

    Beside them, which the paper does not have, the NELBO where it was measured.
    """
    rows = [
        row
        for row in uncontrolled(unconditional_rows(section.rows))
        if cdlm_choices(row) is not None and display_name(row) == row["model"]
    ]
    tables = []
    for number, keys, title in (
        (4, ("steps",), "CDLM w. {} scheduler"),
        (5, ("kappa", "kappa_end", "additive"), "CDLM w. {} for max-step scheduler"),
        (6, ("divergence", "floor"), "CDLM w. {}"),
    ):
        own = [row for row in rows if set(cdlm_choices(row) or {}) <= set(keys)]
        changed = [method_slug(row) for row in own if cdlm_choices(row)]
        own = [row for row in own if method_slug(row) in changed[:1]]  # variants of one method
        if own:
            tables.append(_ablation_table(number, own, keys[0], title, section, style, _nelbo_by_model(unjudged)))
    return tables


def _ablation_table(
    number: int,
    rows: list[ResultRow],
    choice: str,
    title: str,
    section: Section,
    style: TableStyle,
    bounds: dict[str, str],
) -> ReportTable:
    columns: list[Column] = sorted({num_steps(row) or 0 for row in rows})
    found: dict[str, dict[Column, ResultRow]] = {}
    for row in rows:
        known = _ablation_row(choice, {**METHODS[method_slug(row)].choices, **(cdlm_choices(row) or {})})
        found.setdefault(known, {})[num_steps(row) or 0] = row
    names = [*TABLES[number], *(_paper_key(key) for key in found)]
    lines = []
    for key in sorted(found, key=lambda key: names.index(_paper_key(key))):
        cells = [found[key].get(column) for column in columns]
        text = [
            TableCell(f"{row['ppl']:.1f} / {row['entropy']:.1f}", 0, _is_starred(row, style)) if row else TableCell()
            for row in cells
        ]
        model = next(iter(found[key].values()))["model"]
        bound = [TableCell(bounds.get(model, ""))] if bounds else []
        lines.append(TableRow(title.format(key), (*text, *bound)))
        quote = _paper_row(number, _paper_key(key), columns)
        if style.compare and quote:
            lines.append(TableRow("paper", (*quote, *([TableCell()] if bounds else [])), quoted=True))
    heads = (("Model", 1), *((str(column), 1) for column in columns), *([("NELBO", 1)] if bounds else []))
    caption = f"{section.note(rows)} {style.note(section)}"
    caption += " The paper's own rows look like FP32 sampling (docs/ablations.md)." if style.compare else ""
    caption += " NELBO: the bound as a perplexity per token, on held-out texts." if bounds else ""
    return ReportTable(_table_slug(section, number), _table_title(number), caption, (heads,), tuple(lines))


def _nelbo_by_model(unjudged: Sequence[ResultRow]) -> dict[str, str]:
    """Of each model, the NELBO on the first set, as a perplexity."""
    found = [row for row in unjudged if row["task"] == "likelihood"]
    return {row["model"]: f"{row['nelbo_ppl']:.1f}" for row in found if row["dataset"] == found[0]["dataset"]}


def likelihood_table(rows: Sequence[ResultRow]) -> ReportTable | None:
    """Perplexity by the NELBO on each set: what sharpening costs."""
    found = [row for row in rows if row["task"] == "likelihood"]
    if not found:
        return None
    sets, models = list(dict.fromkeys(r["dataset"] for r in found)), list(dict.fromkeys(r["model"] for r in found))
    value = {(row["model"], row["dataset"]): row for row in found}
    ranks = {
        text: rank_column([_rank_value(value.get((model, text)), "nelbo_ppl") for model in models], 2) for text in sets
    }
    lines = []
    for index, model in enumerate(models):
        entries = []
        for text in sets:
            row = value.get((model, text))
            shown = "" if row is None else f"{row['nelbo_ppl']:.2f} [{_nelbo_end(row, 0)}, {_nelbo_end(row, 1)}]"
            entries.append(TableCell(shown, ranks[text][index]))
        exact = all(row["exact"] for row in found if row["model"] == model)
        lines.append(TableRow(f"{model} (exact)" if exact else model, tuple(entries)))
    times = next((row["likelihood_samples"] for row in found if not row["exact"]), 1)
    caption = (
        f"Perplexity per model token from the NELBO (an upper bound unless exact), {found[0]['num_samples']} texts of "
        f"{found[0]['max_length']} tokens, {times} noise levels each, 95 % intervals over texts."
    )
    heads = ((("Model", 1), *((text, 1) for text in sets)),)
    return ReportTable("likelihood", "Likelihood", caption, heads, tuple(lines))


def few_step_table(rows: Sequence[ResultRow]) -> ReportTable | None:
    """Perplexity by the NELBO of the sampler itself: what drawing many tokens at once costs."""
    value = {
        (row["model"], row["dataset"], _without_steps(one), one["steps"] or math.inf): one
        for row in rows
        for one in row.get("few_step") or []
    }
    if not value:
        return None
    columns = sorted({key[3] for key in value})
    lines = []
    for model, text, sampler in dict.fromkeys(key[:3] for key in value):
        cells = [value.get((model, text, sampler, steps)) for steps in columns]
        entries = [TableCell("" if one is None else _bound_perplexity(one)) for one in cells]
        name = f"{model} ({sampler})" if sampler else model
        lines.append(TableRow(f"{name}, {text}", tuple(entries)))
    caption = (
        "Perplexity per model token from the NELBO of a sampler with so many steps: each step draws its tokens "
        "independently of each other, so that few steps cost likelihood, whatever a judge says of the texts. It tends "
        "to the NELBO of the model."
    )
    heads = ((("Model", 1), *(("any steps" if steps == math.inf else f"{steps} steps", 1) for steps in columns)),)
    return ReportTable("few-step", "Likelihood in few steps", caption, heads, tuple(lines))


def _without_steps(bound: ResultRow) -> str:
    """The sampler of a bound in words, but for its steps; nothing for the ancestral one."""
    if "sampling" not in bound:
        return "" if bound["order"] == "random" else str(bound["order"])
    settings = dataclasses.replace(Settings(**bound["sampling"]), steps=None)
    words = [word for word in describe_settings(settings) if word != "fp64"]
    return ", ".join(word.removeprefix("order ") for word in words)


def _bound_perplexity(bound: ResultRow) -> str:
    return "infinite" if bound["nelbo"] is None else f"{math.exp(bound['nelbo']):.1f}"


def infilling_table(rows: Sequence[ResultRow]) -> ReportTable | None:
    """Tokens and spans of held-out texts that a sampler recovers, beside its NFE."""
    found = [row for row in rows if row["task"] == "infilling"]
    if not found:
        return None
    rates = [part["mask_rate"] for part in found[0]["infilling"]]
    lines = []
    for row in found:
        entries = [
            TableCell(text)
            for part in row["infilling"]
            for text in (
                f"{part['nfe']:.3g}",
                *(
                    f"{100 * part[name]:.1f} [{100 * part[f'{name}_interval'][0]:.1f}, "
                    f"{100 * part[f'{name}_interval'][1]:.1f}]"
                    for name in ("token_match", "span_match")
                ),
            )
        ]
        words = [word for word in describe_settings(Settings(**row["sampling"])) if word != "fp64"]
        lines.append(TableRow(", ".join([row["model"], row["dataset"], *words]), tuple(entries)))
    heads = (
        (("Model, texts, sampler", 1), *((f"{rate:.0%} masked", 3) for rate in rates)),
        (("", 1), *((text, 1) for _ in rates for text in ("NFE", "tokens (%)", "spans (%)"))),
    )
    caption = (
        f"Masked tokens, and whole runs of them, of {found[0]['num_samples']} texts of {found[0]['max_length']} tokens "
        "that are recovered exactly, with 95 % intervals over texts."
    )
    return ReportTable("infilling", "Infilling accuracy", caption, heads, tuple(lines))


def consistency_table(rows: Sequence[ResultRow]) -> ReportTable | None:
    """Path invariance: total variation under the model's own chain, and the error of the reliability curve."""
    found = [row for row in rows if row["task"] == "consistency"]
    if not found:
        return None
    pairs = [(pair["t"], pair["s"]) for pair in found[0]["pairs"]]
    lines = []
    for row in found:
        entries = []
        for pair in row["pairs"]:
            own = f"{pair['own_chain_tv']:.4f} ({pair['own_chain_floor']:.4f})" if "own_chain_tv" in pair else "-"
            entries += [TableCell(own), TableCell(f"{pair['reliability_error']:.4f}")]
        lines.append(TableRow(f"{row['model']}, {row['dataset']}", tuple(entries)))
    heads = (
        (("Model, texts", 1), *((f"t {t:g} to s {s:g}", 2) for t, s in pairs)),
        (("", 1), *((text, 1) for _ in pairs for text in ("own chain TV (floor)", "reliability error"))),
    )
    caption = (
        "Own chain: total variation between f(x_t, t) and the mean of f(x_s, s) over hops of the model's own reverse "
        "chain (in brackets what so many hops show by chance). Reliability: mean |E f(x_s, s) - f(x_t, t)| over bins "
        "of f(x_t, t), x_s from the true bridge; at s = 0 it is calibration."
    )
    return ReportTable("consistency", "Path invariance on text", caption, heads, tuple(lines))


def _by_name(rows: Sequence[ResultRow]) -> dict[str, list[ResultRow]]:
    named: dict[str, list[ResultRow]] = {}
    for row in rows:
        named.setdefault(display_name(row), []).append(row)
    return named


def _paper_cells(number: int, row: ResultRow, columns: list[Column]) -> list[TableCell]:
    """The paper's numbers beneath a model as the paper has it; not beneath its variants, nor its other seeds."""
    other = cdlm_choices(row) or row["model"] != without_seed(row["model"])
    return [] if other else _paper_row(number, paper_name(row), columns)


def _ablation_row(choice: str, choices: dict[str, Any]) -> str:
    """What a run chooses, in the words of the paper's row, and then how it reads that row."""
    if choice != "kappa":
        floor = float(choices["floor"]) if choice == "divergence" else FLOOR
        return str(choices[choice]) + (f", floor {floor:g}" if floor != FLOOR else "")
    kappa, end = float(choices["kappa"]), float(choices.get("kappa_end", choices["kappa"]))
    reading = ", additive" if str(choices["additive"]).lower() == "true" else ", annealed" if end < kappa == 1 else ""
    return f"{kappa:g}{reading}"


def _paper_key(known: str) -> str:
    """The paper's row that a reading is of."""
    return known.partition(",")[0]


def _paper_row(number: int, known: str, columns: list[Column]) -> list[TableCell]:
    """The paper's numbers of that row at these columns; empty if it has none."""
    row = paper.TABLES[number].get(known, {})
    return [TableCell(row.get(column, "")) for column in columns] if any(column in row for column in columns) else []


def _table_title(number: int) -> str:
    return f"Table {number}. {TITLES[number]}"


def _table_slug(section: Section, number: int) -> str:
    return f"table-{number}-{section.slug}"


def _rank_value(row: ResultRow | None, measure: str) -> float | None:
    """What a cell is ranked by; a model that is its own judge is not ranked."""
    return None if row is None or row.get("own_judge") else float(row[measure])


def _ppl_entropy(row: ResultRow) -> str:
    return f"{row['ppl']:.1f} ({row['entropy']:.1f})"


def _is_starred(row: ResultRow, style: TableStyle) -> bool:
    return style.threshold is not None and row["entropy"] < style.threshold


def _nelbo_end(row: ResultRow, side: int) -> str:
    return f"{math.exp(row['nelbo_interval'][side]):.2f}"
