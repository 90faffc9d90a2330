"""What was measured of the models that come with the package, as tables and a picture, for docs/zoo.md and cards."""

import json
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path

from cdlm.eval.results import ResultRow, read_rows, read_samples
from cdlm.files import read_object
from cdlm.sample.generation_config import read_generation_config
from cdlm.sample.settings import Settings, explicit, flags, resolve
from cdlm.train.plot import canvas
from cdlm.zoo import HERE
from studies.trials import markdown_table
from studies.zoo import FRESH_SEED, FRESH_SUFFIX, HUMAN, MODELS, WORDS

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PICTURES = ROOT / "studies" / "results" / "zoo", ROOT / "docs" / "study"
STEPS = (8, 16, 32, 64, 128)
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


def sample_texts() -> str:
    """The first text of each model at few and at many steps, as each writes best there; nothing without the texts."""
    parts = []
    for name in MODELS:
        for steps in (8, 64):
            config = read_generation_config(HERE / name, read_object(HERE / name / "config.json"))
            settings = resolve({"steps": steps}, generation_config=config)
            (best,) = (
                each["smollm2"]
                for each in cells_by_both_judges(name)
                if Settings(**each["smollm2"]["sampling"]) == settings
            )
            path = RESULTS / name / "samples" / best["file"]
            if not path.is_file():
                return ""
            whole = read_samples(path).lines[0]["text"].partition("<|endoftext|>")[0]
            text = textwrap.shorten(whole, MAX_CHARACTERS, placeholder=" …")
            parts.append(f"**{name}**, {settings_text(best, steps=True)}\n\n> {text}\n")
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
    "texts": sample_texts,
    **{f"card-{name}": lambda name=name: card_table(name) for name in MODELS},  # type: ignore[misc]
}
