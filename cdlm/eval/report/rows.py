"""Result rows, sorted into what can be compared: one judge, one protocol, one length, one vocabulary."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from cdlm.eval.config import ROBUST
from cdlm.eval.results import Row, read_rows
from cdlm.methods import METHODS
from cdlm.methods.spec import SEARCH, split_method
from cdlm.sample.settings import DEFAULTS, SPECS

KNOWN = {
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
    rows: list[Row]

    @property
    def title(self) -> str:
        return f"{self.judge}, protocol {self.protocol}, {self.length} tokens"

    @property
    def slug(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in f"{self.judge}-{self.protocol}-{self.length}").strip("-")

    def note(self, rows: Sequence[Row]) -> str:
        """What is behind the numbers of these rows."""
        counts = sorted({row["num_samples"] for row in rows})
        texts = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        few = "" if counts[0] >= ROBUST else ", which are few"
        return f"{texts} texts of {self.length} tokens a cell{few}, judged by {self.judge}."


def gather(folders: Iterable[Path]) -> tuple[list[Section], list[Row]]:
    """Sections of judged rows, and the rows that have no judge. Of one cell, the row with the most texts counts."""
    cells: dict[str, Row] = {}
    for row in (row for folder in folders for row in read_rows(folder)):
        same = ("task", "model", "hash", "length", "seed", "dtype", "set", "sampling", "clamp", "judge", "protocol")
        key = json.dumps([row.get(part) for part in same], sort_keys=True)
        if key not in cells or row["num_samples"] >= cells[key]["num_samples"]:
            cells[key] = row
    rows = list(cells.values())
    if not rows:
        raise ValueError("there is no finished cell yet: run cdlm eval MODEL... --judge JUDGE first")
    _one_vocabulary(rows)
    _one_judge(rows)
    _one_meaning(rows)
    sections: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        if "ppl" in row:
            sections.setdefault((row["judge"], row["protocol"], row["length"]), []).append(row)
    return [Section(*key, rows=found) for key, found in sections.items()], [row for row in rows if "ppl" not in row]


def _one_vocabulary(rows: Iterable[Row]) -> None:
    """The entropy of a text is that of its model's own tokens: with another vocabulary it is another number."""
    seen: dict[int, list[str]] = {}
    for row in rows:
        names = seen.setdefault(row["vocab"], [])
        if row["model"] not in names:
            names.append(row["model"])
    if len(seen) > 1:
        parts = "; ".join(f"{vocab:,} tokens: {', '.join(names)}" for vocab, names in seen.items())
        raise ValueError(
            f"these models have different vocabularies ({parts}), so their entropies and step counts cannot be "
            "compared; report each vocabulary from a results folder of its own"
        )


def _one_judge(rows: Iterable[Row]) -> None:
    """A judge that was trained again under its old name is another judge."""
    seen: dict[str, Row] = {}
    for row in (row for row in rows if "judge_hash" in row):
        other = seen.setdefault(row["judge"], row)
        if other["judge_hash"] != row["judge_hash"]:
            raise ValueError(
                f"two judges are called {row['judge']}: one (hash {other['judge_hash']}) read {other['model']}, "
                f"another ({row['judge_hash']}) read {row['model']}; perplexities of theirs cannot be compared, "
                "so report them apart"
            )


def _one_meaning(rows: Iterable[Row]) -> None:
    """A label stands for one model, drawn in one way: else one number would silently hide another."""
    seen: dict[str, Row] = {}
    for row in rows:
        judged = ("judge", "protocol", "length") if "ppl" in row else ()
        place = ("task", "model", "set", "sampling", "clamp", *judged)
        other = seen.setdefault(json.dumps([row.get(part) for part in place], sort_keys=True), row)
        for part in ("hash", "length", "seed", "dtype"):
            if other.get(part) != row.get(part):
                raise ValueError(
                    f"{row['model']} stands for two things, with the {part} {other.get(part)} and {row.get(part)}; "
                    "evaluate each under a label of its own (NAME=MODEL), or report them apart"
                )


def unconditional(rows: Sequence[Row], precision: str = "fp64") -> list[Row]:
    """Texts from nothing, drawn in that precision."""
    return [row for row in rows if row["task"] == "unconditional" and row["sampling"]["precision"] == precision]


def plain(rows: Sequence[Row]) -> list[Row]:
    """Without temperature or top-p."""
    return [row for row in rows if control(row) == "plain"]


def control(row: Row) -> str:
    """How the predicted law is sharpened."""
    how = row["sampling"]
    parts = [f"T {how['temperature']:g}"] if how["temperature"] != 1 else []
    parts += [f"top-p {how['top_p']:g}"] if how["top_p"] != 1 else []
    parts += [f"top-k {how['top_k']}"] if how["top_k"] else []
    return ", ".join(parts) or "plain"


def name(row: Row) -> str:
    """The model with its sampler, where that is not the ancestral one."""
    words = [_in_words(setting, row["sampling"][setting]) for setting in _shown(row)]
    words += ["clamped"] if row.get("clamp") else []
    words += ["the judge itself"] if row.get("own_judge") else []
    return row["model"] + (f" ({', '.join(words)})" if words else "")


def _shown(row: Row) -> list[str]:
    """The settings that make another sampler than the ancestral one: all but the steps, precision and controls."""
    how, known = row["sampling"], METHODS.get(method(row))
    usual = known.posterior if known is not None and row["process"] != "masked" else "plug-in"
    apart = ("sampler", "steps", "precision", "temperature", "top_k", "top_p", "block_length")
    return [
        setting
        for setting in SPECS
        if (setting not in apart and how[setting] != (usual if setting == "posterior" else DEFAULTS[setting]))
        or (setting == "eta" and how["corrector"] != "none")
    ]


def _in_words(setting: str, value: object) -> str:
    if setting == "final_step":
        return "greedy" if value == "argmax" else "final step sampled"
    if setting == "step_size":
        return f"{value} steps"
    return (
        str(value)
        if SPECS[setting].choices or setting in ("order", "timesteps")
        else f"{setting.replace('_', '-')} {value:g}"
    )


def method(row: Row) -> str:
    """By the name that the table of methods has for it, without its choices."""
    return _slug(row.get("training") or {})


def stem(label: str) -> str:
    """A name without the seed of its run: `NAME, seed N` is another run of NAME."""
    return re.sub(r", seed \d+", "", label)


def canonical(row: Row) -> str:
    """What the paper calls it; the label itself where its folder does not say how it was trained."""
    own, parent = method(row), _slug((row.get("training") or {}).get("from") or {})
    found = KNOWN.get((own, parent)) or (METHODS[own].name if own in METHODS else row["model"])
    return f"{found} (greedy)" if row.get("sampling", {}).get("final_step") == "argmax" else found


def choices(row: Row) -> dict[str, str] | None:
    """What a CDLM run changes of its method; None if it is no CDLM run."""
    if method(row) not in ("mcdlm", "mcdlm-pplopt", "ucdlm"):
        return None
    return split_method(row["training"]["method"])[1]


def schooling(row: Row) -> tuple[str, str]:
    """Steps of training, and of distillation after it."""
    trained = row.get("training") or {}
    base = trained.get("from")
    if not trained:
        return "", ""
    if base and not distilled(row):
        return f"{_thousands(base['steps'])} + {_thousands(trained['steps'])}", "0"
    return (_thousands((base or trained)["steps"]), _thousands(trained["steps"]) if base else "0")


def steps(row: Row) -> int | None:
    """Denoising steps; None for a model without any, which stands in the last column."""
    how = row["sampling"]
    return None if row["process"] == "none" else how["steps"] or round(row["nfe"])


def distilled(row: Row) -> bool:
    """By a method that needs a trained model; others may start from one."""
    found = METHODS.get(method(row))
    return bool(found and found.starts_from)


def _slug(trained: Row) -> str:
    spec = str(trained.get("method", ""))
    with contextlib.suppress(ValueError):
        return split_method(spec)[0].removesuffix(SEARCH)
    return spec.partition(":")[0]


def _thousands(n: int) -> str:
    return f"{n / 1000:g}K" if n >= 1000 else str(n)
