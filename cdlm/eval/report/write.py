"""`cdlm report`: result rows in, a page of tables and pictures out, with LaTeX and JSON beside it."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

from rich.console import Console

from cdlm.eval.config import ReportConfig
from cdlm.eval.report import figures, scorecard
from cdlm.eval.report.distributional import (
    CLAIMS,
    Comparison,
    claims_table,
    column_lines,
    comparisons,
    cost_table,
    value_table,
)
from cdlm.eval.report.frontier import (
    FrontierRatio,
    Match,
    Point,
    StepsToMatch,
    choose_baseline,
    compare_frontiers,
    frontier_points,
    match_entropies,
    steps_to_match,
)
from cdlm.eval.report.layouts import (
    TableStyle,
    ablation_tables,
    conditional_tables,
    consistency_table,
    few_step_table,
    infilling_table,
    likelihood_table,
    unconditional_tables,
)
from cdlm.eval.report.rows import Section, display_name, read_sections, unconditional_rows, uncontrolled
from cdlm.eval.report.seeds import SeedRuns, compare_seeds
from cdlm.eval.report.tables import ReportTable, TableCell, TableRow
from cdlm.eval.results import ResultRow
from cdlm.metrics.gen_ppl import Interval

PAPER_LENGTH, PAPER_THRESHOLD, BELOW_DATA = 1024, 5.0, 0.44
"""The paper stars entropies below 5 at 1024 tokens, which is 0.44 nats below those of people (5.44)."""

HOW_TO_READ = (
    "How to read this. *Perplexity* is that of the texts under the judge named in each heading, lower is better; "
    "*entropy* that of each text's own tokens in nats, and a low one means repetition. *Plain* is without control; "
    "*T* a temperature, *top-p* the share of the law drawn from. *Steps* are denoising steps, *NFE* evaluations of the "
    "network for each text, fewer where a step had nothing to reveal. An *in-domain* judge has seen the corpus that "
    "the models were trained on. Protocol *robust* scores every token that has a context, *paper* counts as published "
    "numbers do (docs/evaluation.md). Intervals are 95 %, over resampled texts of "
    "the same runs; another seed of the training can differ by more."
)


def write_report(config: ReportConfig, console: Console | None = None) -> Path:
    """Everything that the rows allow."""
    console = console or Console()
    sections, rest = read_sections(config.results)
    compared = comparisons(config.results)
    if not sections and not rest and not compared:
        raise ValueError("there is no finished cell yet: run cdlm eval MODEL... --judge JUDGE first")
    known = [name for comparison in compared for name in comparison.columns]
    for name in (name for claim in config.claim_columns() for name in claim):
        if name not in known:
            raise ValueError(f"there is no column {name!r} to claim something of; there are: {', '.join(known)}")
    names = dict.fromkeys(display_name(row) for section in sections for row in unconditional_rows(section.rows))
    if config.baseline is not None and config.baseline not in names:
        raise ValueError(f"there is no model {config.baseline!r} to compare with; there are: {', '.join(names)}")
    page = ["# Results", "", f"From {', '.join(f'`{folder}`' for folder in config.results)}.", ""]
    page += [HOW_TO_READ, ""] if sections else []
    data: dict[str, list[ResultRow]] = {"matched": [], "frontiers": [], "seeds": [], "speed-ups": []}
    pictures = config.out / "figures"
    if config.moons is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(config.moons / "moons.png", pictures / "moons.png")
        page += ["## Figure 1. Two moons", "", "![two moons](figures/moons.png)", ""]
    for comparison in compared:
        page += _comparison_page(comparison, config)
    for section in sections:
        style = TableStyle(_star_threshold(section, config), config.compare == "paper")
        page += [f"## {section.title}", ""]
        for table in [
            *unconditional_tables(section, style),
            *conditional_tables(section, style),
            *ablation_tables(section, style, rest),
        ]:
            page += _write_table(table, config.out)
        found = frontier_points(section)
        page += _figure_lines(
            figures.plot_bars(section, pictures / f"bars-{section.slug}.png"), "Figure 2. Perplexity over steps"
        )
        page += _figure_lines(
            figures.plot_curves(section, pictures / f"curves-{section.slug}.png"), "Perplexity and entropy"
        )
        baseline = choose_baseline(section, config.baseline)
        if baseline is not None:
            page += _frontier_page(section, found, baseline, config, data)
    page += ["## Without a judge", ""] if rest else []
    for other in (likelihood_table(rest), few_step_table(rest), infilling_table(rest), consistency_table(rest)):
        page += _write_table(other, config.out) if other else []
    page += _figure_lines(
        figures.plot_reliability(rest, pictures / "reliability.png"), "Reliability over hops of the true bridge"
    )
    config.out.mkdir(parents=True, exist_ok=True)
    (config.out / "report.json").write_text(json.dumps(data, indent=1) + "\n")
    path = config.out / "report.md"
    path.write_text("\n".join(page) + "\n")
    tables = len(list((config.out / "tables").glob("*.tex"))) if (config.out / "tables").is_dir() else 0
    console.print(f"wrote {path}: {tables} tables, {len(list(pictures.glob('*.png')))} figures", highlight=False)
    return path


def _comparison_page(comparison: Comparison, config: ReportConfig) -> list[str]:
    """Human text, naive samplers and models side by side."""
    pictures = config.out / "figures"
    card = scorecard.plot_scorecard(comparison, pictures / f"scorecard-{comparison.slug}.png")
    shaping = scorecard.plot_shaping(comparison, pictures / f"shaping-{comparison.slug}.png")
    claims = claims_table(comparison, config.claim_columns() or CLAIMS)
    page = [f"## {comparison.title}", "", *_figure_lines(card, "z-scores: 0 is human text")]
    page += _figure_lines(shaping, "Perplexity against unigram and bigram entropy")
    for table in (value_table(comparison), claims, cost_table(comparison)):
        page += _write_table(table, config.out) if table and table.lines else []
    return [*page, "**Columns**", "", *column_lines(comparison)]


def _frontier_page(
    section: Section, found: list[Point], baseline: str, config: ReportConfig, data: dict[str, list[ResultRow]]
) -> list[str]:
    """The picture, the two tables at matched entropy, the seeds and the speed-ups."""
    drawn = figures.plot_frontiers(found, section, config.out / "figures" / f"frontier-{section.slug}.png")
    page = _figure_lines(drawn, "Perplexity against entropy")
    matches, ranges = match_entropies(found, baseline), compare_frontiers(found, baseline)
    rivals = [row for row in uncontrolled(unconditional_rows(section.rows)) if row["process"] == "none"]
    causal = [display_name(row) for row in rivals if not row.get("own_judge")]
    faster = steps_to_match(found, list(dict.fromkeys([*causal, baseline])))
    again = compare_seeds(found, baseline)
    page += _write_table(_matched_table(matches, section), config.out) if matches else []
    page += _advice(matches, baseline, bool(again))
    page += _write_table(_frontier_table(ranges, section), config.out) if ranges else []
    page += _write_table(_seeds_table(again, section), config.out) if again else []
    page += _write_table(_speed_table(faster, section), config.out) if faster else []
    for kind, rows in (("matched", matches), ("frontiers", ranges), ("seeds", again), ("speed-ups", faster)):
        data[kind] += [{"section": section.title, **dataclasses.asdict(row)} for row in rows]
    return page


def _advice(rows: list[Match], baseline: str, seeds: bool) -> list[str]:
    """What the table at matched entropy cannot tell, and how to find out."""
    page = []
    others = [row for row in rows if row.name != baseline]
    if any(row.baseline_ppl is None for row in others):
        page += [
            f"*Beyond its frontier*: no temperature and no top-p of {baseline} gave that entropy. Evaluate it at more, "
            "such as `--temperature 1 0.9 0.8 0.7 0.6 0.5`.",
            "",
        ]
    if others and not seeds:
        page += [
            "One run of each model: a ratio may be the luck of a seed, whatever its interval. Train each again with "
            "`--seed 1` and `--seed 2`, and name the runs `NAME, seed 1`: then there is a table over seeds.",
            "",
        ]
    return page


def _matched_table(rows: list[Match], section: Section) -> ReportTable:
    heads = ("Steps", "Model", "Control", "Entropy", "Perplexity", f"{rows[0].baseline} there", "Ratio [95 %]")
    lines = []
    for row in rows:
        there = "beyond its frontier" if row.baseline_ppl is None else f"{row.baseline_ppl:.1f}"
        cells = [row.name, row.control, f"{row.entropy:.2f}", f"{row.ppl:.1f}", there, _interval_text(row.ratio)]
        lines.append(TableRow(str(row.steps), tuple(map(TableCell, cells))))
    base = rows[0].baseline
    own = [abs(math.log(row.ratio.value)) for row in rows if row.name == base and row.ratio]
    error = f", here up to {math.expm1(max(own)):.0%}" if own else ""
    caption = (
        f"Each model without control beside the best control (temperature or top-p) of {base} at the same entropy and "
        "steps: a ratio below 1 is a gain that sharpening does not explain, if it exceeds the error of interpolation"
        f"{error}. That error is what the cells of {base} itself show beside the line through its others. "
        f"{section.note(unconditional_rows(section.rows))} Intervals from paired resamples of the texts, without "
        "those in which the frontier does not reach so far."
    )
    return ReportTable(
        f"matched-{section.slug}", "At matched entropy", caption, (tuple((h, 1) for h in heads),), tuple(lines)
    )


def _frontier_table(rows: list[FrontierRatio], section: Section) -> ReportTable:
    heads = ("Steps", "Model", "Entropies", f"Ratio to {rows[0].baseline} [95 %]")
    lines = [
        TableRow(
            str(r.steps),
            (TableCell(r.name), TableCell(f"{r.low:.2f} to {r.high:.2f}"), TableCell(_interval_text(r.ratio))),
        )
        for r in rows
    ]
    caption = (
        "The geometric mean of the ratio of perplexities over all entropies that both reach, temperatures beside "
        "temperatures and top-p beside top-p."
    )
    heads_ = (tuple((h, 1) for h in heads),)
    return ReportTable(f"frontiers-{section.slug}", "Frontier against frontier", caption, heads_, tuple(lines))


def _seeds_table(rows: list[SeedRuns], section: Section) -> ReportTable:
    heads = ("Steps", "Model", "Perplexity of each run", "Their mean", "Entropy", f"Ratio to {rows[0].baseline} [95 %]")
    lines = []
    for row in rows:
        cells = (row.name, ", ".join(f"{ppl:.1f}" for ppl in row.ppls), f"{row.ppl:.1f}", f"{row.entropy:.2f}")
        lines.append(TableRow(str(row.steps), tuple(map(TableCell, (*cells, _interval_text(row.ratio))))))
    caption = "Runs of other seeds: geometric means, and Welch's interval over the runs, not over their texts."
    return ReportTable(f"seeds-{section.slug}", "Over seeds", caption, (tuple((h, 1) for h in heads),), tuple(lines))


def _speed_table(rows: list[StepsToMatch], section: Section) -> ReportTable:
    heads = ("Model", "Target (perplexity)", "Steps needed [95 %]", "Evaluations saved", "Entropy there", "Target's")
    lines = []
    for row in rows:
        at = f"{row.target}, {row.target_steps} steps" if row.target_steps else row.target
        needed, saved, there = "not within the steps measured", "", ""
        if row.steps is not None and row.factor is not None and row.entropy is not None:
            least = "at most " * row.at_most
            high = f"{row.steps.high:.3g}" if math.isfinite(row.steps.high) else "never"
            needed = f"{least}{row.steps.value:.3g} [{row.steps.low:.3g}, {high}]"
            saved, there = f"{row.factor:.3g} x", f"{row.entropy:.2f}"
        cells = (f"{at} ({row.target_ppl:.1f})", needed, saved, there, f"{row.target_entropy:.2f}")
        lines.append(TableRow(row.name, tuple(map(TableCell, cells))))
    caption = (
        "Steps at which a model reaches the target's perplexity at its most steps, log-log linear between those "
        "measured. At a lower entropy than the target's the comparison flatters: see the tables at matched entropy."
    )
    heads_ = (tuple((h, 1) for h in heads),)
    return ReportTable(f"speed-{section.slug}", "Steps needed to match", caption, heads_, tuple(lines))


def _star_threshold(section: Section, config: ReportConfig) -> float | None:
    if config.threshold is not None:
        return config.threshold
    if section.length == PAPER_LENGTH:
        return PAPER_THRESHOLD
    human = [r["reference_entropy"] for r in section.rows if r["task"] == "unconditional" and "reference_entropy" in r]
    return human[0] - BELOW_DATA if human else None


def _write_table(table: ReportTable, out: Path) -> list[str]:
    """Write a table in its three forms; returns its lines for the page."""
    folder = out / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    text = table.markdown()
    (folder / f"{table.slug}.md").write_text(text)
    (folder / f"{table.slug}.tex").write_text(table.latex())
    table.picture(folder / f"{table.slug}.png")
    return [text]


def _figure_lines(path: Path | None, caption: str) -> list[str]:
    return [f"**{caption}**", "", f"![{caption}](figures/{path.name})", ""] if path else []


def _interval_text(found: Interval | None) -> str:
    return "" if found is None else f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"
