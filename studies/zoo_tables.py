"""What was measured of the models that come with the package, as tables and a picture, for docs/zoo.md and cards."""

import itertools
import json
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from cdlm.eval.columns import COLUMNS
from cdlm.eval.results import ResultRow, read_rows
from cdlm.sample.settings import Settings, explicit, flags
from cdlm.train.plot import canvas
from studies import bundled
from studies.trials import markdown_table
from studies.zoo import FRESH_SEED, FRESH_SUFFIX, HUMAN, MODELS, WORDS

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PICTURES = ROOT / "studies" / "results" / "zoo", ROOT / "docs" / "study"
STEPS = (8, 16, 32, 64, 128)
BUNDLED = ROOT / "studies" / "results" / "bundled"
REPORTED = ("h1", "h2", "rep_2", "rep_4", "energy", "mauve")
"""Columns of the report that are shown besides perplexity."""
JUDGES = {"smollm2": "SmolLM2", "gemma3-270m": "Gemma"}
NUM_BY_BOTH, NUM_BY_SMOLLM2 = 64, 32
"""Texts of a cell that both judges have read, and of one that only SmolLM2 has."""
MAX_CHARACTERS = 600
"""Letters of a text that are shown."""
CURVES: dict[tuple[str, str, float], dict[str, str]] = {
    ("mdlm", "random", 0.0): {"color": "#b2182b", "marker": "o", "linestyle": ":"},
    ("mcdlm-guided", "random", 0.0): {"color": "#1b7837", "marker": "o", "linestyle": ":"},
    ("mdlm", "dilated", 0.25): {"color": "#b2182b", "marker": "^"},
    ("mdlm", "dilated", 0.5): {"color": "#b2182b", "marker": "s"},
    ("mcdlm-guided", "dilated", 0.0): {"color": "#1b7837", "marker": "v"},
    ("mcdlm-guided", "dilated", 0.25): {"color": "#1b7837", "marker": "^"},
}
"""Lines of the picture: model, order, guidance; along each the temperature."""


@cache
def judged_rows(name: str) -> list[ResultRow]:
    """The cells of a model that a judge has read, with what `studies.zoo read` found in their words."""
    words = json.loads((RESULTS / WORDS).read_text())[name]
    return [
        {**row, "english": found["english"], "repeated": found["again"]}
        for row in read_rows(RESULTS / name)
        for found in [words[row["file"]]]
    ]


def cells_by_both_judges(name: str) -> list[dict[str, ResultRow]]:
    """Of each cell that both judges have read, the row of either; by steps, then plain before controlled."""
    found: dict[str, dict[str, ResultRow]] = {}
    for row in judged_rows(name):
        if row["num_samples"] == NUM_BY_BOTH:
            found.setdefault(row["file"], {})[row["judge"]] = row
    kept = [each for each in found.values() if len(each) == len(JUDGES)]
    return sorted(kept, key=lambda each: (steps_of(each["smollm2"]) or 0, -each["smollm2"]["entropy"]))


def measured_cells(each: dict[str, ResultRow]) -> list[str]:
    """Perplexity by both judges with its interval, entropy, distinct-2, English words, words said again."""
    row = each["smollm2"]
    judged = [
        f"{each[judge]['ppl']:.0f} [{', '.join(f'{x:.0f}' for x in each[judge]['ppl_interval'])}]" for judge in JUDGES
    ]
    shares = [f"{row['distinct_2']:.2f}", f"{row['english']:.1%}", f"{row['repeated']:.1%}"]
    return [*judged, f"{row['entropy']:.2f}", *shares]


HEAD = [*JUDGES.values(), "entropy", "distinct-2", "English words", "said again"]


def steps_of(row: ResultRow) -> int | None:
    """Human text has none."""
    return row["sampling"]["steps"] if row["sampling"] else None


def settings_text(row: ResultRow, steps: bool = False) -> str:
    """The settings as flags, without the steps where these have a column."""
    given = explicit(Settings(**row["sampling"]))
    words = flags({name: value for name, value in given.items() if steps or name != "steps"})
    return f"`{words}`" if words else "plain"


def human_cells() -> list[str]:
    (each,) = cells_by_both_judges(HUMAN)
    return measured_cells(each)


def results_table() -> str:
    """Both models at every number of steps, and people."""
    lines = [["", "people, held out", "", *human_cells()]]
    for steps in STEPS:
        for name in MODELS:
            some = [each for each in cells_by_both_judges(name) if each["smollm2"]["sampling"]["steps"] == steps]
            lines += [[str(steps), name, settings_text(each["smollm2"]), *measured_cells(each)] for each in some]
    return markdown_table(["steps", "model", "sampler", *HEAD], lines)


def fresh_table() -> str:
    """Both models as they write best, in texts of another seed."""
    lines = []
    for name in MODELS:
        for each in cells_by_both_judges(f"{name}{FRESH_SUFFIX}"):
            row = each["smollm2"]
            lines.append([str(row["sampling"]["steps"]), name, settings_text(row), *measured_cells(each)])
    return markdown_table(["steps", "model", "sampler", *HEAD], sorted(lines, key=lambda line: int(line[0])))


def card_table(name: str) -> str:
    """Of the first seed, then of the other one, then people's."""
    lines = [
        [str(each["smollm2"]["sampling"]["steps"]), seed, settings_text(each["smollm2"]), *measured_cells(each)]
        for seed, row in (("0", name), (str(FRESH_SEED), f"{name}{FRESH_SUFFIX}"))
        for each in cells_by_both_judges(row)
    ]
    return markdown_table(["steps", "seed", "sampler", *HEAD], [*lines, ["", "", "people, held out", *human_cells()]])


def screen_table() -> str:
    """The lowest perplexity of each kind of sampler among settings that the rule of studies/bundled.py admits."""
    cells = json.loads((BUNDLED / "cells.json").read_text())
    kinds = itertools.product(bundled.STEPS, bundled.GUIDANCE, (False, True), (False, True))
    lines = []
    for steps, order, guided, penalised in kinds:
        words = [order, *["guidance"] * guided, *["penalty"] * penalised]
        line = [str(steps), ", ".join(words)]
        for name in bundled.MODELS:
            some = [
                cell
                for cell in cells[name]
                if (cell["steps"], cell["order"]) == (steps, order)
                and (bool(cell["guidance"]), bool(cell["log_frequency_penalty"])) == (guided, penalised)
            ]
            line.append(_best_in_words(some))
        lines.append(line)
    return markdown_table(["steps", "sampler", *bundled.MODELS], lines)


def _best_in_words(cells: list[dict[str, Any]]) -> str:
    best = bundled.best(cells)
    given = {name: best[name] for name in ("temperature", "guidance", "log_frequency_penalty")}
    values = [f"T {given['temperature']:g}"]
    values += [f"g {given['guidance']:g}"] if given["guidance"] else []
    values += [f"p {given['log_frequency_penalty']:g}"] if given["log_frequency_penalty"] else []
    z = ", ".join(f"{best['z'][name]:+.1f}" for name in bundled.RULE)
    if bundled.largest_z(best) <= bundled.TOLERANCE:
        return f"**{best['ppl']:.0f}** at {', '.join(values)} ({z})"
    return f"none; nearest {best['ppl']:.0f} at {', '.join(values)} ({z})"


def report_table() -> str:
    """The decisive cells under both judges, with human text and naive samplers: values, and z in brackets."""
    rows: dict[tuple[str, str], dict[str, ResultRow]] = {}
    for folder in sorted(path.parent for path in (BUNDLED / "report").glob("*/results.jsonl")):
        for row in read_rows(folder):
            sampler = settings_text(row) if row["sampling"] else ""
            rows.setdefault((row["model"], sampler), {})[row["judge"]] = row
    kinds = ["human", "naive", "model"]
    order = sorted(rows, key=lambda key: (kinds.index(next(iter(rows[key].values()))["kind"]), key[0]))
    lines = []
    for key in order:
        judged = rows[key]
        columns = {name: judged[name]["columns"] for name in JUDGES if name in judged}
        any_columns = next(iter(columns.values()))
        ppl = [f"{columns[name]['ppl']['value']:.0f}" if name in columns else "" for name in JUDGES]
        others = [
            f"{any_columns[name]['value']:.{COLUMNS[name].digits}f} ({any_columns[name]['z']:+.1f})"
            for name in REPORTED
        ]
        lines.append([*key, *ppl, *others])
    titles = [COLUMNS[name].title for name in REPORTED]
    return markdown_table(["model", "sampler, 8 steps", *JUDGES.values(), *titles], lines)


def sample_texts() -> str:
    """The first text of each model at few and at more steps, with its generation config."""
    parts = []
    for kept in json.loads((BUNDLED / "texts.json").read_text()):
        text = textwrap.shorten(kept["text"], MAX_CHARACTERS, placeholder=" …").replace("<", "&lt;")
        parts.append(f"**{kept['model']}**, `{kept['settings']}`\n\n> {text}\n")
    return "\n".join(parts)


def plot_zoo(out: Path) -> None:
    """Perplexity against entropy, along temperatures, for three numbers of steps."""
    figure, first = canvas(11, 4)
    first.remove()
    for panel, steps in zip(figure.subplots(1, 3, sharey=True), (8, 16, 64), strict=True):
        for (name, order, guidance), style in CURVES.items():
            line = [
                (row["entropy"], row["ppl"])
                for row in judged_rows(name)
                if (row["num_samples"], row["judge"]) == (NUM_BY_SMOLLM2, "smollm2")
                and (row["sampling"]["steps"], row["sampling"]["order"]) == (steps, order)
                and row["sampling"]["guidance"] == guidance
            ]
            if line:
                label = f"{name}, {order}" + (f", guidance {guidance:g}" if guidance else "")
                panel.plot(*zip(*sorted(line), strict=True), label=label, markersize=4, linewidth=1, **style)
        (each,) = cells_by_both_judges(HUMAN)
        panel.plot(each["smollm2"]["entropy"], each["smollm2"]["ppl"], "k*", label="people", linestyle="none")
        panel.set_yscale("log")
        panel.set_yticks([30, 50, 100, 200, 500], ["30", "50", "100", "200", "500"])
        panel.minorticks_off()
        panel.set_title(f"{steps} steps")
        panel.set_xlabel("entropy (nats)")
        panel.grid(alpha=0.3)
        if steps == STEPS[0]:
            panel.set_ylabel("perplexity, SmolLM2")
    panel.legend(fontsize=7, loc="upper left")
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, dpi=130)


TABLES: dict[str, Callable[[], str]] = {
    "results": results_table,
    "fresh": fresh_table,
    "screen": screen_table,
    "report": report_table,
    "texts": sample_texts,
    **{f"card-{name}": lambda name=name: card_table(name) for name in MODELS},  # type: ignore[misc]
}
