"""Result rows, sorted into what can be compared: one judge, one protocol, one length, one vocabulary."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from cdlm.eval.config import ROBUST_SAMPLES
from cdlm.eval.results import ResultRow, read_rows
from cdlm.methods import METHODS
from cdlm.methods.spec import SEARCH, split_method
from cdlm.sample.settings import DEFAULTS, SPECS, Settings, implied_sampler

DISTILLED_NAMES = {
    ("sdtt", "mdlm"): "MDLM+SDTT",
    ("sdtt", "mcdlm"): "MCDLM+SDTT",
    ("sdtt", "mcdlm-pplopt"): "MCDLM-PPLOptimized+SDTT",
}


@dataclasses.dataclass(frozen=True)
class Section:
    """Rows that may stand in one table."""

    judge: str
    protocol: str
    length: int
    rows: list[ResultRow]

    @property
    def title(self) -> str:
        return f"{self.judge}, protocol {self.protocol}, {self.length} tokens"

    @property
    def slug(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in f"{self.judge}-{self.protocol}-{self.length}").strip("-")

    def note(self, rows: Sequence[ResultRow]) -> str:
        """What is behind the numbers of these rows."""
        counts = sorted({row["num_samples"] for row in rows})
        texts = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        few = "" if counts[0] >= ROBUST_SAMPLES else ", which are few"
        return f"{texts} texts of {self.length} tokens a cell{few}, judged by {self.judge}."


def read_sections(folders: Iterable[Path]) -> tuple[list[Section], list[ResultRow]]:
    """Sections of judged rows, and the rows that have no judge. Of one cell, the row with the most texts counts."""
    cells: dict[str, ResultRow] = {}
    for row in (row for folder in folders for row in read_rows(folder) if row.get("protocol") != "distributional"):
        same = (
            "task",
            "model",
            "model_hash",
            "max_length",
            "seed",
            "dtype",
            "dataset",
            "sampling",
            "clamp",
            "judge",
            "protocol",
        )
        key = json.dumps([row.get(part) for part in same], sort_keys=True)
        if key not in cells or row["num_samples"] >= cells[key]["num_samples"]:
            cells[key] = row
    rows = list(cells.values())
    _one_vocabulary(rows)
    _one_judge(rows)
    _one_meaning(rows)
    sections: dict[tuple[str, str, int], list[ResultRow]] = {}
    for row in rows:
        if "ppl" in row:
            sections.setdefault((row["judge"], row["protocol"], row["max_length"]), []).append(row)
    return [Section(*key, rows=found) for key, found in sections.items()], [row for row in rows if "ppl" not in row]


def _one_vocabulary(rows: Iterable[ResultRow]) -> None:
    """The entropy of a text is that of its model's own tokens: with another vocabulary it is another number."""
    seen: dict[int, list[str]] = {}
    for row in rows:
        names = seen.setdefault(row["vocab_size"], [])
        if row["model"] not in names:
            names.append(row["model"])
    if len(seen) > 1:
        parts = "; ".join(f"{vocab:,} tokens: {', '.join(names)}" for vocab, names in seen.items())
        raise ValueError(
            f"these models have different vocabularies ({parts}), so their entropies and step counts cannot be "
            "compared; report each vocabulary from a results folder of its own"
        )


def _one_judge(rows: Iterable[ResultRow]) -> None:
    """A judge that was trained again under its old name is another judge."""
    seen: dict[str, ResultRow] = {}
    for row in (row for row in rows if "judge_hash" in row):
        other = seen.setdefault(row["judge"], row)
        if other["judge_hash"] != row["judge_hash"]:
            raise ValueError(
                f"two judges are called {row['judge']}: one (hash {other['judge_hash']}) read {other['model']}, "
                f"another ({row['judge_hash']}) read {row['model']}; perplexities of theirs cannot be compared, "
                "so report them apart"
            )


def _one_meaning(rows: Iterable[ResultRow]) -> None:
    """A label stands for one model, drawn in one way: else one number would silently hide another."""
    seen: dict[str, ResultRow] = {}
    for row in rows:
        judged = ("judge", "protocol", "max_length") if "ppl" in row else ()
        place = ("task", "model", "dataset", "sampling", "clamp", *judged)
        other = seen.setdefault(json.dumps([row.get(part) for part in place], sort_keys=True), row)
        for part in ("model_hash", "max_length", "seed", "dtype"):
            if other.get(part) != row.get(part):
                raise ValueError(
                    f"{row['model']} stands for two things, with the {part} {other.get(part)} and {row.get(part)}; "
                    "evaluate each under a label of its own (NAME=MODEL), or report them apart"
                )


CONTROLS = {"temperature": "T", "top_p": "top-p", "top_k": "top-k"}
"""Settings that sharpen what a model predicts, and how tables call them: along these a model has a frontier."""


def unconditional_rows(rows: Sequence[ResultRow], precision: str = "fp64") -> list[ResultRow]:
    """Unconditional samples drawn in that precision."""
    return [row for row in rows if row["task"] == "unconditional" and row["sampling"]["precision"] == precision]


def uncontrolled(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Without temperature, top-p or top-k."""
    return [row for row in rows if control_label(row) == "plain"]


def control_label(row: ResultRow) -> str:
    """How the predicted distribution is sharpened."""
    values = {name: row["sampling"][name] for name in CONTROLS}
    labels = [f"{CONTROLS[name]} {value:g}" for name, value in values.items() if value != DEFAULTS[name]]
    return ", ".join(labels) or "plain"


def display_name(row: ResultRow) -> str:
    """The model, with its sampler where that is not the plain ancestral one."""
    words = [_setting_in_words(name, value) for name, value in _other_sampler(row).items()]
    words += ["clamped"] if row.get("clamp") else []
    words += ["the judge itself"] if row.get("own_judge") else []
    return row["model"] + (f" ({', '.join(words)})" if words else "")


def _other_sampler(row: ResultRow) -> dict[str, object]:
    """The settings that make another sampler than the ancestral one.

    Steps, precision and controls have places of their own in the tables, and eta says nothing without a corrector.
    """
    settings = Settings(**row["sampling"])
    method = METHODS.get(method_slug(row))
    usual = {**DEFAULTS, "sampler": implied_sampler(settings), "posterior": method.posterior if method else "plug-in"}
    elsewhere = ("steps", "precision", "block_length", *CONTROLS)
    shown = {name: value for name, value in row["sampling"].items() if name not in elsewhere and value != usual[name]}
    if settings.corrector != "none":
        shown["eta"] = settings.eta
    return {name: shown[name] for name in SPECS if name in shown}


def _setting_in_words(name: str, value: object) -> str:
    if name == "final_step":
        return "greedy" if value == "argmax" else "final step sampled"
    if isinstance(value, str):
        return {"step_size": f"{value} step sizes", "sampler": f"{value} sampler"}.get(name, value)
    return f"{name.replace('_', '-')} {value:g}"


def method_slug(row: ResultRow) -> str:
    """The key of its method in the table of methods, without choices."""
    return _slug(row.get("training") or {})


def without_seed(label: str) -> str:
    """A name without the seed of its run: `NAME, seed N` is another run of NAME."""
    return re.sub(r", seed \d+", "", label)


def paper_name(row: ResultRow) -> str:
    """What the paper calls it; the label itself where its folder does not say how it was trained."""
    own, parent = method_slug(row), _slug((row.get("training") or {}).get("from") or {})
    found = DISTILLED_NAMES.get((own, parent)) or (METHODS[own].name if own in METHODS else row["model"])
    return f"{found} (greedy)" if row.get("sampling", {}).get("final_step") == "argmax" else found


def cdlm_choices(row: ResultRow) -> dict[str, str] | None:
    """What a CDLM run changes of its method; None if it is no CDLM run."""
    if method_slug(row) not in ("mcdlm", "mcdlm-pplopt", "ucdlm"):
        return None
    return split_method(row["training"]["method"])[1]


def training_steps(row: ResultRow) -> tuple[str, str]:
    """Steps of training, and of distillation after it."""
    training = row.get("training") or {}
    base = training.get("from")
    if not training:
        return "", ""
    if base and not is_distilled(row):
        return f"{_thousands(base['steps'])} + {_thousands(training['steps'])}", "0"
    return (_thousands((base or training)["steps"]), _thousands(training["steps"]) if base else "0")


def num_steps(row: ResultRow) -> int | None:
    """Denoising steps; None for a model without any, which stands in the last column."""
    return None if row["process"] == "none" else row["sampling"]["steps"] or round(row["nfe"])


def is_distilled(row: ResultRow) -> bool:
    """By a method that needs a trained model; others may start from one."""
    method = METHODS.get(method_slug(row))
    return bool(method and method.starts_from)


def _slug(training: ResultRow) -> str:
    spec = str(training.get("method", ""))
    with contextlib.suppress(ValueError):
        return split_method(spec)[0].removesuffix(SEARCH)
    return spec.partition(":")[0]


def _thousands(n: int) -> str:
    return f"{n / 1000:g}K" if n >= 1000 else str(n)
