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
from cdlm.sample.settings import Sampling

RESULTS = "results.jsonl"
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Samples:
    """The texts of a cell."""

    about: Row
    """Model, settings, seed and cost."""
    lines: list[Row]
    """index, text, tokens, evaluations; and reference, where a text has one."""


_SETTINGS = {field.name for field in dataclasses.fields(Sampling)}
_ADDED: Row = {"block": 0, "guidance": 0.0, "cool": None}
"""Settings that were added later, with the values that reproduce the versions without them."""


def migrate(row: Row) -> Row:
    """A row of any version with today's settings of the sampler; settings that no version knew are errors."""
    if not isinstance(row, dict):
        raise ValueError(f"a result is an object; got {row!r}")
    if row.get("sampling") is None:
        return row
    sampling = {**_ADDED, **row["sampling"]}
    if unknown := sorted(sampling.keys() - _SETTINGS):
        raise ValueError(f"unknown settings of the sampler: {', '.join(unknown)}")
    if missing := sorted(_SETTINGS - sampling.keys()):
        raise ValueError(f"settings of the sampler are missing: {', '.join(missing)}")
    return {**row, "sampling": sampling}


def key_of(values: Row) -> str:
    """A name for what a cell depends on."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


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
        return Samples(migrate(first["cell"]), lines)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, and run the same command again") from None


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
