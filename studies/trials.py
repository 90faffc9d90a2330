"""Tables of docs/search.md and docs/ablations.md from the rows of those studies, and frontiers as a picture.

`studies.page` puts them in. Ideas and verdicts are written by hand. A ratio is frontier against frontier: the mean log
ratio of perplexities over all entropies (or shares of distinct pairs of tokens) that both reach by temperature, and by
top-p; against MDLM of the same seed.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cdlm.eval.report.frontier import FrontierRatio, Point, compare_frontiers, frontier_points, match_entropies
from cdlm.eval.report.rows import Section, control_label, display_name, read_sections, unconditional_rows, uncontrolled
from cdlm.eval.results import ResultRow, read_samples
from cdlm.extras import require
from cdlm.metrics.gen_ppl import Interval
from cdlm.sample.settings import resolve
from cdlm.train.plot import canvas

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "studies" / "results"
STEPS = (8, 32)
SEEDS = ("", ", seed 1", ", seed 2")
PLAIN, SPREAD, GUIDED, STRONG = "", "dilated", "dilated, guidance 0.5", "dilated, guidance 1"

TRIALS = {
    "jsd": ("MCDLM as in the paper", "sharper, and worse for it"),
    "jsd-revealed-kl": (
        "KL where the hop reveals a token, JSD where it stays masked",
        "undoes the harm of JSD, no more",
    ),
    "bridges": ("targets averaged over 4 bridges", "as JSD: noise of the target is not what hurts"),
    "kl": ("forward KL: hops as targets of less variance", "MDLM again, as theory says"),
    "weight-noise": ("weight 1 / t, instead of 1 / delta", "no gain"),
    "weight-unit": ("weight 1, instead of 1 / delta", "no gain"),
    "short-hops": ("delta from 1/32 to 1/8", "no gain"),
    "long-hops": ("delta from 1/2 to 1", "no gain"),
    "sharp-teacher": ("KL to MDLM at temperature 0.8", "a sharper MDLM, and no better"),
    "guided-teacher": ("KL to MDLM with guidance 1 at temperature 0.85", "**wins**, at no cost to the sampler"),
    "guided-self": ("KL to its own average, with guidance 0.5 at temperature 0.9", "wins, by less"),
    "rollouts": ("16,384 texts of its own, in 64 steps at temperature 0.9", "loses: few texts, and its own faults"),
    "rollouts-guided": (
        "16,384 texts of its own, in 64 dilated steps with guidance 0.5 at temperature 0.85",
        "gains at equal entropy, loses at equal distinct-2",
    ),
    "sdtt": ("SDTT with the paper's hops, 1/1024 to 1/64", "worse, in likelihood too"),
}
"""Trials that train: the idea, and the verdict."""
UNIFORM = {
    "UDLM": ("the control", "a little behind MDLM"),
    "UDLM (greedy)": ("a tail that takes the likeliest tokens", "repeats itself"),
    "UDLM (final step sampled)": ("a tail that draws from the predicted law", "as without"),
    "UDLM (constant, eta 0.1)": ("a corrector", "no gain"),
    "UDLM (constant, eta 0.3)": ("a corrector", "no gain"),
    "ucdlm": ("UCDLM", "far behind"),
    "ucdlm (greedy)": ("its greedy tail, the paper's best row", "as without"),
    "ucdlm (final step sampled)": ("a tail that draws", "as without"),
    "ucdlm (constant, eta 0.1)": ("a corrector", "no gain"),
    "ucdlm (constant, eta 0.3)": ("a corrector", "no gain"),
    "ucdlm-kl": ("UCDLM with forward KL", "better than with JSD, far behind UDLM"),
    "ucdlm-kl (greedy)": ("its greedy tail", "as without"),
    "ucdlm-kl (final step sampled)": ("a tail that draws", "as without"),
    "ucdlm-kl (constant, eta 0.1)": ("a corrector", "no gain"),
    "ucdlm-kl (constant, eta 0.3)": ("a corrector", "no gain"),
}
"""From UDLM; a tail is one evaluation more."""
SAMPLERS = {
    "dilated": "**wins at 8 steps**, a little at 32",
    "bit-reversed": "as dilated",
    "probability": "certainty first: collapses",
    "margin": "worse than random order",
    "cosine": "no gain",
    "constant, eta 0.05": "re-masking: no gain",
    "constant, eta 0.2": "no gain",
    "rescale, eta 0.05": "no gain",
    "rescale, eta 0.2": "no gain",
    "loop, eta 0.1": "worse: steps spent on correcting are missing elsewhere",
    "guidance 0.25": "wins",
    "guidance 0.5": "wins",
    "guidance 1": "wins at 8 steps; at 32 only at equal distinct-2",
    "guidance 2": "wins at 8 steps, by less than guidance 1; too much at 32",
    "dilated, guidance 0.25": "wins",
    "dilated, guidance 0.5": "**wins: the best at 32 steps**",
    "dilated, guidance 1": "**wins: the best at 8 steps**",
    "dilated, guidance 2": "wins at 8 steps, by less at equal entropy; too much at 32",
    "temperature-end 0.8": "a little",
    "temperature-end 0.5": "a little",
}
"""Samplers on MDLM: the verdict."""
CURVES = {
    ("MDLM", PLAIN): {"color": "#b2182b", "marker": "o"},
    ("MDLM", SPREAD): {"color": "#ef8a62", "marker": "s"},
    ("MDLM", "best"): {"color": "#053061", "marker": "D"},
    ("guided-teacher", PLAIN): {"color": "#1b7837", "marker": "^"},
    ("guided-teacher", GUIDED): {"color": "#7fbf7b", "marker": "v"},
}
QUESTIONS = {
    "MDLM": "the control: no consistency",
    "MCDLM": "kappa 0.4, JSD, KL anchor, convex, lambda 0.999, delta in [1/8, 5/8]",
    "MCDLM additive true": "the KL anchor is added, not mixed in",
    "MCDLM anchor jsd": "a JSD anchor, mixed in",
    "MCDLM anchor jsd, additive true": "a JSD anchor, added",
    "MCDLM anneal 0.5": "kappa falls from 1 to 0.4 over half the run",
    "MCDLM lam 0": "lambda 0: the target is the network itself",
    "MCDLM lam 0.9999": "lambda 0.9999",
    "MCDLM low 0.03125, high 0.125": "delta in [1/32, 1/8]",
    "MCDLM low 0.5, high 1": "delta in [1/2, 1]",
    "MCDLM after MDLM": "867 steps as MDLM, 433 as MCDLM: the tokens of the study's MCDLM",
}
"""Rows of the ablations that the paper does not have: what each changes."""
SHOWN_SAMPLERS: dict[str, dict[str, Any]] = {
    "Plain": {},
    "Top-p 0.8": {"top_p": 0.8},
    "Dilated": {"order": "dilated"},
    "Dilated, guidance 0.5": {"order": "dilated", "guidance": 0.5},
    "Dilated, guidance 1, top-p 0.9": {"order": "dilated", "guidance": 1.0, "top_p": 0.9},
}
MAX_CHARACTERS = 700
"""Letters of a text that are shown."""
BEST = {8: STRONG, 32: GUIDED}
"""The best sampler for MDLM at so many steps."""


@cache
def read_study(study: str) -> tuple[list[Section], list[ResultRow]]:
    return read_sections(sorted((RESULTS / study).iterdir()))


@cache
def search_sections() -> dict[str, Section]:
    """Of the search, by judge: `in-domain`, `smollm2`."""
    found, _ = read_study("search")
    return {"in-domain" if "in-domain" in section.judge else section.judge: section for section in found}


def nelbo_by_model(study: str) -> dict[str, str]:
    """The NELBO of each model on held-out texts, as a perplexity per token."""
    return {row["model"]: f"{row['nelbo_ppl']:.0f}" for row in read_study(study)[1]}


@cache
def curve_rows(judge: str, label: str) -> tuple[ResultRow, ...]:
    """The cells of a model and its sampler."""
    return tuple(row for row in unconditional_rows(search_sections()[judge].rows) if display_name(row) == label)


@cache
def frontier_ratio(judge: str, steps: int, label: str, baseline: str, axis: str = "entropy") -> FrontierRatio | None:
    """Frontier against frontier over the entropies, or the shares of distinct pairs, that both reach."""
    rows = with_shared_controls(curve_rows(judge, label), curve_rows(judge, baseline))
    found = frontier_points(dataclasses.replace(search_sections()[judge], rows=rows))
    if axis != "entropy":
        found = [_at_value(point, row[axis]) for point, row in zip(found, rows, strict=True)]
    return next((span for span in compare_frontiers(found, baseline) if span.steps == steps), None)


def with_shared_controls(own: Sequence[ResultRow], base: Sequence[ResultRow]) -> list[ResultRow]:
    """Of each control the values that both have, if those say enough: a line through more cells lies lower."""
    rows = []
    for kind in ("T", "top-p"):
        mine, theirs = (
            {control_label(row) for row in side if control_label(row).startswith(kind)} for side in (own, base)
        )
        shared = mine & theirs
        kept = shared if len(shared) > 1 or shared == mine else mine | theirs
        rows += [row for row in (*own, *base) if control_label(row) in kept]
    return [row for row in (*own, *base) if control_label(row) == "plain"] + rows


def _at_value(point: Point, value: float) -> Point:
    return dataclasses.replace(point, entropy=np.full_like(point.entropy, value))


def row_label(model: str, sampler: str) -> str:
    return f"{model} ({sampler})" if sampler else model


def plain_cell(judge: str, label: str, steps: int) -> str:
    """Perplexity (entropy, distinct-2) without temperature or top-p."""
    for row in curve_rows(judge, label):
        if row["sampling"]["steps"] == steps and control_label(row) == "plain":
            return f"{row['ppl']:.0f} ({row['entropy']:.2f}, {row['distinct_2']:.2f})"
    return ""


def ratio_text(span: FrontierRatio | None, interval: bool = True) -> str:
    if span is None:
        return ""
    return interval_text(span.ratio) if interval else f"{span.ratio.value:.2f}"


def interval_text(found: Interval | None) -> str:
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]" if found else "beyond its frontier"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


HEAD = [
    part
    for steps in STEPS
    for part in (f"{steps} steps: perplexity (entropy, distinct-2)", "at equal entropy", "at equal distinct-2")
]


def comparison_cells(label: str, baseline: str, judge: str = "in-domain") -> list[str]:
    cells = []
    for steps in STEPS:
        cells += [plain_cell(judge, label, steps), ratio_text(frontier_ratio(judge, steps, label, baseline))]
        cells.append(ratio_text(frontier_ratio(judge, steps, label, baseline, "distinct_2"), interval=False))
    return cells


def trials_table() -> str:
    bound = nelbo_by_model("search")
    rows = [["MDLM, the control", "trains on as it was", bound["MDLM"], *comparison_cells("MDLM", "MDLM"), ""]]
    for trial, (idea, verdict) in TRIALS.items():
        rows.append([f"`{trial}`", idea, bound[trial], *comparison_cells(trial, "MDLM"), verdict])
    return markdown_table(["Trial", "idea", "NELBO", *HEAD, "verdict"], rows)


def samplers_table() -> str:
    rows = [["plain", *comparison_cells("MDLM", "MDLM"), ""]]
    rows += [[how, *comparison_cells(row_label("MDLM", how), "MDLM"), verdict] for how, verdict in SAMPLERS.items()]
    return markdown_table(["Sampler", *HEAD, "verdict"], rows)


def uniform_table() -> str:
    rows = [[label, idea, *comparison_cells(label, "MDLM"), verdict] for label, (idea, verdict) in UNIFORM.items()]
    return markdown_table(["Row", "idea", *HEAD, "verdict"], rows)


def same_sampler_table() -> str:
    """Trials and MDLM, both with the dilated order and guidance."""
    rows = [["MDLM", *comparison_cells(row_label("MDLM", GUIDED), "MDLM"), "", ""]]
    for trial in TRIALS:
        label, base = row_label(trial, GUIDED), row_label("MDLM", GUIDED)
        beside = [
            ratio_text(frontier_ratio("in-domain", steps, label, base, "distinct_2"), interval=False) for steps in STEPS
        ]
        rows.append([f"`{trial}`", *comparison_cells(label, "MDLM"), *beside])
    return markdown_table(
        ["Trial, so sampled", *HEAD, *(f"beside MDLM so sampled, {steps} steps" for steps in STEPS)], rows
    )


def seeds_table() -> str:
    """The winners from three runs of MDLM, by two judges."""
    shown = [
        ("guided-teacher", dict.fromkeys(STEPS, PLAIN)),
        ("guided-teacher", dict.fromkeys(STEPS, GUIDED)),
        ("kl", dict.fromkeys(STEPS, PLAIN)),
        ("MDLM", dict.fromkeys(STEPS, SPREAD)),
        ("MDLM", BEST),
    ]
    rows = []
    for model, how in shown:
        for steps in STEPS:
            for judge in ("in-domain", "smollm2"):
                cells = [f"{model}, {how[steps] or 'plain'}", str(steps), judge]
                for axis in ("entropy", "distinct_2"):
                    found = [
                        frontier_ratio(judge, steps, row_label(model + seed, how[steps]), f"MDLM{seed}", axis)
                        for seed in SEEDS
                    ]
                    values = [span.ratio.value for span in found if span]
                    cells += [", ".join(f"{value:.2f}" for value in values), mean_over_seeds(values)]
                if cells[3]:
                    rows.append(cells)
    each = ("at equal entropy", "mean [95 %]", "at equal distinct-2", "mean [95 %]")
    return markdown_table(["Configuration", "steps", "judge", *each], rows)


def questions_table() -> str:
    """The paper's open questions: the bound, and each model without control beside MDLM at some temperature."""
    (section,), _ = read_study("ablations")
    bound = nelbo_by_model("ablations")
    bare_rows = uncontrolled(unconditional_rows(section.rows))
    cells = [point for point in frontier_points(section) if "top-p" not in point.control]
    beside = {(match.steps, match.name): match.ratio for match in match_entropies(cells, "MDLM")}
    rows = []
    for model, what in QUESTIONS.items():
        line = [what, bound[model]]
        for steps in (8, 64, 256):
            (row,) = (r for r in bare_rows if r["model"] == model and r["sampling"]["steps"] == steps)
            line.append(f"{row['ppl']:.0f} ({row['entropy']:.2f})")
            line.append("" if model == "MDLM" else interval_text(beside.get((steps, model))))
        rows.append(line)
    heads = (part for steps in (8, 64, 256) for part in (f"{steps} steps: perplexity (entropy)", "beside MDLM"))
    return markdown_table(["Row", "NELBO", *heads], rows)


def sample_texts() -> str:
    """The first text of some ways to take 8 steps; nothing where the texts are not at hand."""
    wanted = {name: dataclasses.asdict(resolve({"steps": 8, **given})) for name, given in SHOWN_SAMPLERS.items()}
    found = {}
    for path in (RESULTS / "search").glob("mdlm/samples/*-8-steps-*.jsonl"):
        samples = read_samples(path)
        for key, settings in wanted.items():
            if samples.header["sampling"] == settings:
                text = " ".join(samples.lines[0]["text"][:MAX_CHARACTERS].split()).replace("<", "&lt;")
                found[key] = f"**{key}**\n\n> {text}\n"
    return "\n".join(found[key] for key in wanted) if len(found) == len(wanted) else ""


def mean_over_seeds(values: Sequence[float]) -> str:
    """The geometric mean over seeds, with Student's interval."""
    if len(values) < len(SEEDS):
        return ""
    logs = np.log(values)
    stats = require("scipy.stats", "eval", "an interval over trials", "scipy")
    low, high = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    return f"**{math.exp(logs.mean()):.2f}** [{math.exp(low):.2f}, {math.exp(high):.2f}]"


def plot_search(out: Path) -> None:
    """Frontiers at equal entropy and at equal distinct-2, of three seeds."""
    figure, first = canvas(10, 8)
    first.remove()
    panels = figure.subplots(2, 2)
    for line, axis in zip(panels, ("entropy", "distinct_2"), strict=True):
        for panel, steps in zip(line, STEPS, strict=True):
            for (model, how), style in CURVES.items():
                for number, seed in enumerate(SEEDS):
                    sampler = BEST[steps] if how == "best" else how
                    cells = [
                        r
                        for r in curve_rows("in-domain", row_label(model + seed, sampler))
                        if r["sampling"]["steps"] == steps
                    ]
                    for kind in ("temperature", "top_p"):
                        other = "top_p" if kind == "temperature" else "temperature"
                        path = sorted((r[axis], r["ppl"]) for r in cells if r["sampling"][other] == 1)
                        label = row_label(model, sampler) if not number and kind == "temperature" else None
                        dash = "-" if kind == "temperature" else ":"
                        panel.plot(
                            *zip(*path, strict=True), linestyle=dash, markersize=4, linewidth=1, label=label, **style
                        )
            panel.set_yscale("log")
            panel.set_yticks([50, 100, 200, 500, 1000], ["50", "100", "200", "500", "1000"])
            panel.minorticks_off()
            panel.set_title(f"{steps} steps")
            panel.set_xlabel("entropy (nats)" if axis == "entropy" else "distinct-2")
            panel.set_ylabel("generative perplexity, in-domain judge")
            panel.grid(alpha=0.3)
            panel.legend(fontsize=7)
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, dpi=130)


TABLES: dict[str, Callable[[], str]] = {
    "trials": trials_table,
    "samplers": samplers_table,
    "uniform": uniform_table,
    "same": same_sampler_table,
    "seeds": seeds_table,
    "questions": questions_table,
    "texts": sample_texts,
}
