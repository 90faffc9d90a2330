"""What was measured of the models that come with the package, as tables and a picture, for docs/zoo.md and cards."""

import json
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from cdlm.eval.results import Row, read_rows, read_samples
from cdlm.files import read_object
from cdlm.sample.settings import Sampling, flags, sampling_of
from cdlm.train.plot import canvas
from cdlm.zoo import HERE
from studies.zoo import AGAIN, FRESH, MODELS, PEOPLE, WORDS

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PICTURES = ROOT / "studies" / "results" / "zoo", ROOT / "docs" / "study"
STEPS = (8, 16, 32, 64, 128)
JUDGES = {"smollm2": "SmolLM2", "gemma3-270m": "Gemma"}
BOTH, ONE = 64, 32
"""Texts of a cell that both judges have read, and of one that only SmolLM2 has."""
CUT = 600
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
def rows(name: str) -> list[Row]:
    """The cells of a model that a judge has read, with what `studies.zoo read` found in their words."""
    words = json.loads((RESULTS / WORDS).read_text())[name]
    return [{**row, **words[row["file"]], "num": row["num"]} for row in read_rows(RESULTS / name)]


def cells(name: str) -> list[dict[str, Row]]:
    """Of each cell that both judges have read, the row of either; by steps, then plain before controlled."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows(name):
        if row["num"] == BOTH:
            found.setdefault(row["file"], {})[row["judge"]] = row
    kept = [each for each in found.values() if len(each) == len(JUDGES)]
    return sorted(kept, key=lambda each: (each["smollm2"]["sampling"]["steps"] or 0, -each["smollm2"]["entropy"]))


def measured(each: dict[str, Row]) -> list[str]:
    """Perplexity by both judges with its interval, entropy, distinct-2, English words, words said again."""
    row = each["smollm2"]
    judged = [
        f"{each[judge]['ppl']:.0f} [{', '.join(f'{x:.0f}' for x in each[judge]['ppl_interval'])}]" for judge in JUDGES
    ]
    shares = [f"{row['distinct_2']:.2f}", f"{row['english']:.1%}", f"{row['again']:.1%}"]
    return [*judged, f"{row['entropy']:.2f}", *shares]


HEAD = [*JUDGES.values(), "entropy", "distinct-2", "English words", "said again"]


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def settings(row: Row, steps: bool = False) -> str:
    """As flags, without the steps where these have a column."""
    how = Sampling(**{**row["sampling"], **({} if steps else {"steps": None})})
    return f"`{flags(how)}`" if flags(how) else "plain"


def people() -> list[str]:
    (each,) = cells(PEOPLE)
    return measured(each)


def results() -> str:
    """Both models at every number of steps, and people."""
    lines = [["", "people, held out", "", *people()]]
    for steps in STEPS:
        for name in MODELS:
            some = [each for each in cells(name) if each["smollm2"]["sampling"]["steps"] == steps]
            lines += [[str(steps), name, settings(each["smollm2"]), *measured(each)] for each in some]
    return table(["steps", "model", "sampler", *HEAD], lines)


def fresh() -> str:
    """Both models as they write best, in texts of another seed."""
    lines = []
    for name in MODELS:
        for each in cells(f"{name}{AGAIN}"):
            row = each["smollm2"]
            lines.append([str(row["sampling"]["steps"]), name, settings(row), *measured(each)])
    return table(["steps", "model", "sampler", *HEAD], sorted(lines, key=lambda line: int(line[0])))


def card(name: str) -> str:
    """Of the first seed, then of the other one, then people's."""
    lines = [
        [str(each["smollm2"]["sampling"]["steps"]), seed, settings(each["smollm2"]), *measured(each)]
        for seed, row in (("0", name), (str(FRESH), f"{name}{AGAIN}"))
        for each in cells(row)
    ]
    return table(["steps", "seed", "sampler", *HEAD], [*lines, ["", "", "people, held out", *people()]])


def texts() -> str:
    """The first text of each model at few and at many steps, as each writes best there; nothing without the texts."""
    parts = []
    for name in MODELS:
        for steps in (8, 64):
            own = read_object(HERE / name / "config.json")["sampling"]
            how = sampling_of({"steps": steps}, own)
            (best,) = (each["smollm2"] for each in cells(name) if Sampling(**each["smollm2"]["sampling"]) == how)
            path = RESULTS / name / "samples" / best["file"]
            if not path.is_file():
                return ""
            whole = read_samples(path).lines[0]["text"].partition("<|endoftext|>")[0]
            text = textwrap.shorten(whole, CUT, placeholder=" …")
            parts.append(f"**{name}**, {settings(best, steps=True)}\n\n> {text}\n")
    return "\n".join(parts)


def draw(out: Path) -> None:
    """Perplexity against entropy, along temperatures, for three numbers of steps."""
    figure, first = canvas(11, 4)
    first.remove()
    for panel, steps in zip(figure.subplots(1, 3, sharey=True), (8, 16, 64), strict=True):
        for (name, order, guidance), style in CURVES.items():
            line = [
                (row["entropy"], row["ppl"])
                for row in rows(name)
                if (row["num"], row["judge"]) == (ONE, "smollm2")
                and (row["sampling"]["steps"], row["sampling"]["order"]) == (steps, order)
                and row["sampling"]["guidance"] == guidance
            ]
            if line:
                label = f"{name}, {order}" + (f", guidance {guidance:g}" if guidance else "")
                panel.plot(*zip(*sorted(line), strict=True), label=label, markersize=4, linewidth=1, **style)
        (each,) = cells(PEOPLE)
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
    "results": results,
    "fresh": fresh,
    "texts": texts,
    **{f"card-{name}": lambda name=name: card(name) for name in MODELS},  # type: ignore[misc]
}
