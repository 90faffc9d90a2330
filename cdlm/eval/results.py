"""What an evaluation leaves behind: results.jsonl, one line a cell, and the texts of each cell.

Lines are appended whole; one cut short by a crash is passed over and overwritten. The texts of a cell are written aside
and renamed, so that a file of them is complete or not there. It begins with everything that is needed to write them
again, or to judge them without the model.
"""

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from cdlm.eval.cells import slug
from cdlm.files import flush
from cdlm.methods import METHODS
from cdlm.sample.settings import DEFAULTS, resolve

RESULTS = "results.jsonl"
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Samples:
    """The texts of a cell."""

    about: Row
    """Model, settings, seed and cost."""
    lines: list[Row]
    """index, text, token_ids, nfe; and reference, where a text has one."""


FORMAT = 2
"""Of rows and samples. Version 1 was written up to version 0.1 of the package."""

_RENAMED = {"grid": "timesteps", "tail": "final_step", "cool": "temperature_end", "bound": "entropy_bound"}
_RENAMED |= {"block": "block_length"}
_REQUIRED = {
    *("steps", "grid", "order", "bound", "tail", "corrector", "eta", "temperature", "top_k", "top_p", "precision"),
    "posterior",
}
"""The settings that every row of version 1 has."""


def migrate(row: Row) -> Row:
    """A row of any version as today's version writes it; settings that no version knew are errors."""
    if not isinstance(row, dict):
        raise ValueError(f"a result is an object; got {row!r}")
    if row.get("format", 1) not in (1, FORMAT):
        raise ValueError(f"it has format {row['format']!r}, and this version reads {FORMAT}; upgrade cdlm")
    if row.get("format") == FORMAT:
        if row.get("sampling") is not None:
            _check_names(row["sampling"], set(DEFAULTS), set(DEFAULTS))
        return row
    row = {**row, "format": FORMAT}
    if "trained" in row:
        row["training"] = _migrated_training(row.pop("trained"))
    if "num" in row:
        row["num_samples"] = row.pop("num")
    if row.get("sampling") is not None:
        row["sampling"] = _migrated_settings(row["sampling"], row)
    return row


def _migrated_settings(sampling: Row, row: Row) -> Row:
    """The complete settings that those of version 1 were resolved to."""
    _check_names(sampling, {*_REQUIRED, "block", "guidance", "cool"}, _REQUIRED)
    given = {_RENAMED.get(name, name): value for name, value in sampling.items() if value is not None}
    if row.get("process") == "none":
        given.pop("steps", None)
    settings = dataclasses.asdict(resolve(given, "any", _posterior(row)))
    return {**settings, "sampler": "autoregressive", "steps": None} if row.get("process") == "none" else settings


def _posterior(row: Row) -> Any:
    """The posterior that the method of a row uses."""
    slug = str((row.get("training") or {}).get("method", "")).partition(":")[0]
    return METHODS[slug].posterior if slug in METHODS and row.get("process") != "masked" else "plug-in"


def _migrated_training(training: Row | None) -> Row | None:
    """How a model was trained, in today's names."""
    if not training:
        return training
    renamed = {"batch": "batch_size", "length": "seq_length"}
    named = {renamed.get(name, name): value for name, value in training.items()}
    return {**named, "from": _migrated_training(named["from"])} if "from" in named else named


def _check_names(settings: Row, known: set[str], required: set[str]) -> None:
    if unknown := sorted(settings.keys() - known):
        raise ValueError(f"unknown settings of the sampler: {', '.join(unknown)}")
    if missing := sorted(required - settings.keys()):
        raise ValueError(f"settings of the sampler are missing: {', '.join(missing)}")


def key_of(values: Row) -> str:
    """A name for what a cell depends on."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def cell_key(about: Row) -> str:
    """The name of the samples of a cell: the model by its weights, the task, and the complete settings."""
    depends = (
        "format",
        "task",
        "hash",
        "process",
        "vocab",
        "length",
        "seed",
        "dtype",
        "set",
        "set_hash",
        "sampling",
        "clamp",
    )
    return key_of({name: about[name] for name in depends if name in about})


def samples_path(out: Path, name: str, key: str) -> Path:
    return out / "samples" / f"{slug(name)}-{key}.jsonl"


def write_samples(path: Path, samples: Samples) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    with aside.open("w", encoding="utf-8") as file:
        for line in ({"cell": samples.about}, *samples.lines):
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    flush(aside)
    aside.replace(path)


def read_samples(path: Path) -> Samples:
    try:
        first, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line)
        return Samples(migrate(first["cell"]), [_migrated_sample(line) for line in lines])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, and run the same command again") from None


def _migrated_sample(line: Row) -> Row:
    """A sample of any version."""
    renamed = {"tokens": "token_ids", "evaluations": "nfe", "reference_tokens": "reference_token_ids"}
    return {renamed.get(name, name): value for name, value in line.items()}


def read_rows(out: Path) -> list[Row]:
    """The finished cells of a folder (or of a results.jsonl itself)."""
    path = out / RESULTS if out.is_dir() else out
    if not path.is_file():
        raise ValueError(f"{out} has no {RESULTS}; make one with: cdlm eval MODEL... --judge JUDGE --out {out}")
    rows = []
    whole, newline, rest = path.read_text(encoding="utf-8").rpartition("\n")
    for number, line in enumerate((whole + newline).splitlines(), 1):
        try:
            rows.append(migrate(json.loads(line)))
        except ValueError as error:
            why = "is damaged" if isinstance(error, json.JSONDecodeError) else f"cannot be read ({error})"
            raise ValueError(f"line {number} of {path} {why}; remove that line, and run cdlm eval again") from None
    with contextlib.suppress(json.JSONDecodeError):  # a last line without its end: whole if it parses, else cut short
        rows += [migrate(json.loads(rest))] if rest else []
    return rows


def append_row(out: Path, row: Row) -> None:
    """Add a line, in place of one that a crash has cut short."""
    path = out / RESULTS
    line = (json.dumps(row) + "\n").encode()
    with path.open("a+b") as file:
        file.seek(0)
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            try:
                json.loads(data[whole:])
                line = b"\n" + line
            except ValueError:
                file.truncate(whole)
        file.write(line)
    flush(path)
