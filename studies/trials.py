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
from scipy.stats import ttest_1samp

from cdlm.eval.report.frontier import Point, FrontierRatio, match_entropies, frontier_points, compare_frontiers
from cdlm.eval.report.rows import Section, control_label, read_sections, display_name, uncontrolled, unconditional_rows
from cdlm.eval.results import Row, read_samples
from cdlm.metrics.gen_ppl import Interval
from cdlm.sample.settings import Sampling
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
    "UDLM (sample tail)": ("a tail that draws from the predicted law", "as without"),
    "UDLM (constant, eta 0.1)": ("a corrector", "no gain"),
    "UDLM (constant, eta 0.3)": ("a corrector", "no gain"),
    "ucdlm": ("UCDLM", "far behind"),
    "ucdlm (greedy)": ("its greedy tail, the paper's best row", "as without"),
    "ucdlm (sample tail)": ("a tail that draws", "as without"),
    "ucdlm (constant, eta 0.1)": ("a corrector", "no gain"),
    "ucdlm (constant, eta 0.3)": ("a corrector", "no gain"),
    "ucdlm-kl": ("UCDLM with forward KL", "better than with JSD, far behind UDLM"),
    "ucdlm-kl (greedy)": ("its greedy tail", "as without"),
    "ucdlm-kl (sample tail)": ("a tail that draws", "as without"),
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
    "cool 0.8": "a little",
    "cool 0.5": "a little",
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
READ: dict[str, dict[str, Any]] = {
    "Plain": {},
    "Top-p 0.8": {"top_p": 0.8},
    "Dilated": {"order": "dilated"},
    "Dilated, guidance 0.5": {"order": "dilated", "guidance": 0.5},
    "Dilated, guidance 1, top-p 0.9": {"order": "dilated", "guidance": 1.0, "top_p": 0.9},
}
CUT = 700
"""Letters of a text that are shown."""
BEST = {8: STRONG, 32: GUIDED}
"""The best sampler for MDLM at so many steps."""


@cache
def rows_of(study: str) -> tuple[list[Section], list[Row]]:
    return read_sections(sorted((RESULTS / study).iterdir()))


@cache
def sections() -> dict[str, Section]:
    """Of the search, by judge: `in-domain`, `smollm2`."""
    found, _ = rows_of("search")
    return {"in-domain" if "in-domain" in section.judge else section.judge: section for section in found}


def bounds(study: str) -> dict[str, str]:
    """The NELBO of each model on held-out texts, as a perplexity per token."""
    return {row["model"]: f"{row['nelbo_ppl']:.0f}" for row in rows_of(study)[1]}


@cache
def curve(judge: str, label: str) -> tuple[Row, ...]:
    """The cells of a model and its sampler."""
    return tuple(row for row in unconditional_rows(sections()[judge].rows) if display_name(row) == label)


@cache
def ratio(judge: str, steps: int, label: str, baseline: str, axis: str = "entropy") -> FrontierRatio | None:
    """Frontier against frontier over the entropies, or the shares of distinct pairs, that both reach."""
    rows = alike(curve(judge, label), curve(judge, baseline))
    found = frontier_points(dataclasses.replace(sections()[judge], rows=rows))
    if axis != "entropy":
        found = [_at(point, row[axis]) for point, row in zip(found, rows, strict=True)]
    return next((span for span in compare_frontiers(found, baseline) if span.steps == steps), None)


def alike(own: Sequence[Row], base: Sequence[Row]) -> list[Row]:
    """Of each control the values that both have, if those say enough: a line through more cells lies lower."""
    rows = []
    for kind in ("T", "top-p"):
        mine, theirs = ({control_label(row) for row in side if control_label(row).startswith(kind)} for side in (own, base))
        shared = mine & theirs
        kept = shared if len(shared) > 1 or shared == mine else mine | theirs
        rows += [row for row in (*own, *base) if control_label(row) in kept]
    return [row for row in (*own, *base) if control_label(row) == "plain"] + rows


def _at(point: Point, value: float) -> Point:
    return dataclasses.replace(point, entropy=np.full_like(point.entropy, value))


def called(model: str, sampler: str) -> str:
    return f"{model} ({sampler})" if sampler else model


def bare(judge: str, label: str, steps: int) -> str:
    """Perplexity (entropy, distinct-2) without temperature or top-p."""
    for row in curve(judge, label):
        if row["sampling"]["steps"] == steps and control_label(row) == "plain":
            return f"{row['ppl']:.0f} ({row['entropy']:.2f}, {row['distinct_2']:.2f})"
    return ""


def said(span: FrontierRatio | None, interval: bool = True) -> str:
    if span is None:
        return ""
    return spoken(span.ratio) if interval else f"{span.ratio.value:.2f}"


def spoken(found: Interval | None) -> str:
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]" if found else "beyond its frontier"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


HEAD = [
    part
    for steps in STEPS
    for part in (f"{steps} steps: perplexity (entropy, distinct-2)", "at equal entropy", "at equal distinct-2")
]


def against(label: str, baseline: str, judge: str = "in-domain") -> list[str]:
    cells = []
    for steps in STEPS:
        cells += [bare(judge, label, steps), said(ratio(judge, steps, label, baseline))]
        cells.append(said(ratio(judge, steps, label, baseline, "distinct_2"), interval=False))
    return cells


def trials() -> str:
    bound = bounds("search")
    rows = [["MDLM, the control", "trains on as it was", bound["MDLM"], *against("MDLM", "MDLM"), ""]]
    for trial, (idea, verdict) in TRIALS.items():
        rows.append([f"`{trial}`", idea, bound[trial], *against(trial, "MDLM"), verdict])
    return grid(["Trial", "idea", "NELBO", *HEAD, "verdict"], rows)


def samplers() -> str:
    rows = [["plain", *against("MDLM", "MDLM"), ""]]
    rows += [[how, *against(called("MDLM", how), "MDLM"), verdict] for how, verdict in SAMPLERS.items()]
    return grid(["Sampler", *HEAD, "verdict"], rows)


def uniform() -> str:
    rows = [[label, idea, *against(label, "MDLM"), verdict] for label, (idea, verdict) in UNIFORM.items()]
    return grid(["Row", "idea", *HEAD, "verdict"], rows)


def same() -> str:
    """Trials and MDLM, both with the dilated order and guidance."""
    rows = [["MDLM", *against(called("MDLM", GUIDED), "MDLM"), "", ""]]
    for trial in TRIALS:
        label, base = called(trial, GUIDED), called("MDLM", GUIDED)
        beside = [said(ratio("in-domain", steps, label, base, "distinct_2"), interval=False) for steps in STEPS]
        rows.append([f"`{trial}`", *against(label, "MDLM"), *beside])
    return grid(["Trial, so sampled", *HEAD, *(f"beside MDLM so sampled, {steps} steps" for steps in STEPS)], rows)


def seeds() -> str:
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
                        ratio(judge, steps, called(model + seed, how[steps]), f"MDLM{seed}", axis) for seed in SEEDS
                    ]
                    values = [span.ratio.value for span in found if span]
                    cells += [", ".join(f"{value:.2f}" for value in values), over(values)]
                if cells[3]:
                    rows.append(cells)
    each = ("at equal entropy", "mean [95 %]", "at equal distinct-2", "mean [95 %]")
    return grid(["Configuration", "steps", "judge", *each], rows)


def questions() -> str:
    """The paper's open questions: the bound, and each model without control beside MDLM at some temperature."""
    (section,), _ = rows_of("ablations")
    bound = bounds("ablations")
    bare_rows = uncontrolled(unconditional_rows(section.rows))
    cells = [point for point in frontier_points(section) if "top-p" not in point.control]
    beside = {(match.steps, match.name): match.ratio for match in match_entropies(cells, "MDLM")}
    rows = []
    for model, what in QUESTIONS.items():
        line = [what, bound[model]]
        for steps in (8, 64, 256):
            (row,) = (r for r in bare_rows if r["model"] == model and r["sampling"]["steps"] == steps)
            line.append(f"{row['ppl']:.0f} ({row['entropy']:.2f})")
            line.append("" if model == "MDLM" else spoken(beside.get((steps, model))))
        rows.append(line)
    heads = (part for steps in (8, 64, 256) for part in (f"{steps} steps: perplexity (entropy)", "beside MDLM"))
    return grid(["Row", "NELBO", *heads], rows)


def texts() -> str:
    """The first text of some ways to take 8 steps; nothing where the texts are not at hand."""
    asked = {name: vars(Sampling(8, **how)) for name, how in READ.items()}
    found = {}
    for path in (RESULTS / "search").glob("mdlm/samples/*-8-steps-*.jsonl"):
        samples = read_samples(path)
        for key, how in asked.items():
            if samples.about["sampling"] == how:
                text = " ".join(samples.lines[0]["text"][:CUT].split()).replace("<", "&lt;")
                found[key] = f"**{key}**\n\n> {text}\n"
    return "\n".join(found[key] for key in asked) if len(found) == len(asked) else ""


def over(values: Sequence[float]) -> str:
    """The geometric mean over seeds, with Student's interval."""
    if len(values) < len(SEEDS):
        return ""
    logs = np.log(values)
    low, high = ttest_1samp(logs, 0.0).confidence_interval(0.95)
    return f"**{math.exp(logs.mean()):.2f}** [{math.exp(low):.2f}, {math.exp(high):.2f}]"


def draw(out: Path) -> None:
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
                        r for r in curve("in-domain", called(model + seed, sampler)) if r["sampling"]["steps"] == steps
                    ]
                    for kind in ("temperature", "top_p"):
                        other = "top_p" if kind == "temperature" else "temperature"
                        path = sorted((r[axis], r["ppl"]) for r in cells if r["sampling"][other] == 1)
                        label = called(model, sampler) if not number and kind == "temperature" else None
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
    "trials": trials,
    "samplers": samplers,
    "uniform": uniform,
    "same": same,
    "seeds": seeds,
    "questions": questions,
    "texts": texts,
}
