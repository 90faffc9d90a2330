"""The files of an evaluation: results.jsonl with one row for each finished cell, and samples/ with their samples.

Rows are appended whole; a last line that a crash has cut short is skipped, and overwritten by the next row. A file of
samples is written under another name and renamed, so that it is complete or absent. Its first line has everything that
is needed to generate the samples again, or to score them without the model.

A row has the complete resolved settings of its sampler and the version of its format. Its key is a hash of what its
numbers depend on, computed from the row alone: a default that changes gives new cells new keys, and old rows keep their
meaning. `migrate` brings rows of older versions to today's format.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdlm.files import flush
from cdlm.methods import METHODS
from cdlm.sample.settings import SPECS, custom_timesteps

RESULTS = "results.jsonl"
FORMAT = 2
"""The version of rows and samples. Version 1 was written up to version 0.1 of the package."""

ResultRow = dict[str, Any]

SAMPLES_KEY = (
    *("task", "model_hash", "process", "vocab_size", "max_length", "seed", "dtype"),
    *("dataset", "dataset_hash", "sampling", "clamp"),
)
"""What samples depend on. Not their number: the first of many are the few."""
ROW_KEY = (
    *SAMPLES_KEY,
    *("model", "num_samples", "judge_hash", "protocol", "reference_hash", "likelihood_samples"),
)
"""What the numbers of a row depend on, besides the samplers whose likelihood it bounds."""


@dataclass(frozen=True)
class Samples:
    """The samples of a cell."""

    header: ResultRow
    """Model, settings, seed and cost."""
    lines: list[ResultRow]
    """index, text, token_ids, nfe; and reference and reference_token_ids, where a sample has one."""


def hash_values(values: Mapping[str, Any]) -> str:
    """A short hash of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def samples_key(header: ResultRow) -> str:
    """The key of samples, from the header of their file."""
    return hash_values({name: header.get(name) for name in SAMPLES_KEY} | _framing(header))


def row_key(row: ResultRow) -> str:
    """The key of a row, from the row itself or from what is known of it before it is measured."""
    few_step = [_bound_key(bound) for bound in row.get("few_step") or []]
    values = {name: row.get(name) for name in ROW_KEY} | {"few_step": few_step}
    return hash_values(values | _framing(row) | _corpus(row))


def _bound_key(bound: ResultRow) -> Any:
    """What the bound of a sampler depends on; where nothing but steps and order was chosen, as it was once written."""
    sampling = bound.get("sampling")
    if sampling is None or all(sampling[name] == value for name, value in _ANCESTRAL.items()):
        values = sampling or bound
        return [values["steps"], values["order"]]
    return sampling


def _framing(row: ResultRow) -> ResultRow:
    """Whether texts were BOS-framed, where the model's config.json does not say so: rows without it keep their key."""
    return {"bos_framed": row["bos_framed"]} if "bos_framed" in row else {}


def _corpus(row: ResultRow) -> ResultRow:
    """The corpus that copies were looked for in: rows without one keep their key."""
    return {"corpus_hash": row["corpus_hash"]} if row.get("corpus_hash") else {}


def file_name(words: str) -> str:
    """Words as a part of a file name."""
    return re.sub(r"[^\w.+-]+", "-", words).strip("-")


def samples_path(out: Path, name: str, key: str) -> Path:
    return out / "samples" / f"{file_name(name)}-{key}.jsonl"


def samples_by_key(out: Path) -> dict[str, Path]:
    """The files of samples in a directory of results, by the key of their samples."""
    found = {}
    for path in sorted((out / "samples").glob("*.jsonl")):
        with path.open(encoding="utf-8") as file, _named_damage(path):
            found[samples_key(migrate(json.loads(file.readline())["cell"]))] = path
    return found


def write_samples(path: Path, samples: Samples) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    with partial.open("w", encoding="utf-8") as file:
        for line in ({"cell": samples.header}, *samples.lines):
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    flush(partial)
    partial.replace(path)


def read_samples(path: Path) -> Samples:
    with _named_damage(path):
        first, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line)
        header = migrate(first["cell"])
        return Samples({**header, "key": samples_key(header)}, [_rename_fields(line, _LINE_FIELDS) for line in lines])


@contextlib.contextmanager
def _named_damage(path: Path) -> Any:
    """Name the file of samples that cannot be read."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it and run the same command again.") from None


def read_rows(out: Path) -> list[ResultRow]:
    """The finished rows of a directory of results, or of a results.jsonl itself."""
    path = out / RESULTS if out.is_dir() else out
    if not path.is_file():
        raise ValueError(f"{out} has no {RESULTS}; make one with: cdlm eval MODEL... --judge JUDGE --out {out}")
    rows = []
    whole, newline, rest = path.read_text(encoding="utf-8").rpartition("\n")
    for number, line in enumerate((whole + newline).splitlines(), 1):
        try:
            rows.append(_read_row(line))
        except ValueError as error:
            what = "is damaged" if isinstance(error, json.JSONDecodeError) else f"cannot be read ({error})"
            raise ValueError(f"line {number} of {path} {what}; remove that line and run cdlm eval again.") from None
    with contextlib.suppress(json.JSONDecodeError):  # a last line without its end: whole if it parses, else cut short
        rows += [_read_row(rest)] if rest else []
    return rows


def _read_row(line: str) -> ResultRow:
    row = migrate(json.loads(line))
    return {**row, "key": row_key(row)}


def append_row(out: Path, row: ResultRow) -> None:
    """Add a row, in place of a line that a crash has cut short."""
    path = out / RESULTS
    line = (json.dumps(row) + "\n").encode()
    with path.open("a+b") as file:
        file.seek(0)
        data = file.read()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            try:
                json.loads(data[end:])
                line = b"\n" + line
            except ValueError:
                file.truncate(end)
        file.write(line)
    flush(path)


def migrate(row: ResultRow) -> ResultRow:
    """A row, or the header of samples, in today's format. Unknown or missing settings are errors."""
    if not isinstance(row, dict):
        raise ValueError(f"a row is an object (got {row!r})")
    version = row.get("format", 1)
    if version not in (1, FORMAT):
        raise ValueError(f"it has format {version!r}, and this version reads {FORMAT}; upgrade cdlm")
    row = row if version == FORMAT else _from_version_1(row)
    if row.get("sampling") is not None:
        row = _with_all_settings(row)
    if any("sampling" in bound for bound in row.get("few_step") or []):
        row = {**row, "few_step": [_with_all_settings(bound) for bound in row["few_step"]]}
    return row


def _with_all_settings(row: ResultRow) -> ResultRow:
    """A row whose settings are complete, with those that it may lack."""
    if not _ADDED_SETTINGS.keys() <= row["sampling"].keys():
        row = {**row, "sampling": {**_ADDED_SETTINGS, **row["sampling"]}}
    _check_names(row["sampling"], SPECS, SPECS)
    return row


_ADDED_SETTINGS = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "log_frequency_penalty": 0.0,
    "guidance_end": None,
}
"""Settings that rows of version 2 may lack, and the values by which these were sampled."""
_ROW_FIELDS = {
    "hash": "model_hash",
    "trained": "training",
    "vocab": "vocab_size",
    "length": "max_length",
    "num": "num_samples",
    "set": "dataset",
    "set_hash": "dataset_hash",
    "eos": "eos_token_id",
    "end": "eos_token",
    "read": "judged_fraction",
    "per_text": "per_sample",
    "bleu2_how": "bleu2_tokenization",
    "times": "likelihood_samples",
    "samplers": "few_step",
}
_LINE_FIELDS = {"tokens": "token_ids", "evaluations": "nfe", "reference_tokens": "reference_token_ids"}
_TRAINING_FIELDS = {"batch": "batch_size", "length": "seq_length"}
_SETTINGS = {
    "grid": "timesteps",
    "tail": "final_step",
    "cool": "temperature_end",
    "bound": "entropy_bound",
    "block": "block_length",
}
"""Names of version 1, and what they are called now."""

_REQUIRED = (
    *("steps", "grid", "order", "bound", "tail", "corrector", "eta", "temperature", "top_k", "top_p", "precision"),
    "posterior",
)
_OPTIONAL = ("cool", "guidance", "block")
"""The settings that a row of version 1 has, and those that some have."""
_VERSION_1_DEFAULTS: dict[str, Any] = {
    "steps": 32,
    "timesteps": "uniform",
    "step_size": "random",
    "entropy_bound": 0.5,
    "eta": 0.05,
    "temperature_end": None,
    "guidance": 0.0,
    "block_length": 0,
}
"""The values by which version 1 sampled where a row says nothing."""


_ANCESTRAL: dict[str, Any] = {
    "sampler": "ancestral",
    "timesteps": "uniform",
    "step_size": "random",
    "final_step": "none",
    "corrector": "none",
    "temperature": 1.0,
    "temperature_end": None,
    "guidance": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "precision": "fp64",
    "block_length": 0,
    **_ADDED_SETTINGS,
}
"""The settings, besides steps and order, of samplers whose likelihood a row bounds without saying more of them."""


def _from_version_1(row: ResultRow) -> ResultRow:
    row = {**_rename_fields(row, _ROW_FIELDS), "format": FORMAT}
    row["training"] = _migrate_training(row.get("training"))
    if row.get("sampling") is not None:
        row["sampling"] = _migrate_settings(row["sampling"], row)
    return row


def _migrate_training(training: ResultRow | None) -> ResultRow:
    """How a model was trained, and the model that it started from."""
    if not training:
        return {}
    renamed = _rename_fields(training, _TRAINING_FIELDS)
    return {**renamed, "from": _migrate_training(renamed["from"]) or None} if "from" in renamed else renamed


def _migrate_settings(sampling: ResultRow, row: ResultRow) -> ResultRow | None:
    """The complete settings that those of version 1 stood for; None for human text, whose rows have no process."""
    _check_names(sampling, {*_REQUIRED, *_OPTIONAL}, _REQUIRED)
    if "process" not in row:
        return None
    given = {name: value for name, value in _rename_fields(sampling, _SETTINGS).items() if value is not None}
    values = {**_ADDED_SETTINGS, **_VERSION_1_DEFAULTS, **given}
    values["sampler"] = _version_1_sampler(values, row["process"])
    if values["posterior"] == "auto":
        method = METHODS.get(str((row.get("training") or {}).get("method", "")).partition(":")[0])
        values["posterior"] = method.posterior if method else "plug-in"
    times = custom_timesteps(values["timesteps"])
    values["steps"] = len(times) - 1 if times else values["steps"]
    if values["sampler"] in ("autoregressive", "first-hitting"):
        values["steps"] = None
    return {name: values[name] for name in SPECS}


def _version_1_sampler(values: ResultRow, process: str) -> str:
    """The sampler that version 1 chose for these settings."""
    if process == "none":
        return "autoregressive"
    if values["precision"] == "naive-fp32":
        return "naive"
    if values["corrector"] != "none":
        return "corrector"
    orders = {"probability": "confidence", "margin": "confidence"}
    orders |= {"entropy-bound": "entropy-bound", "first-hitting": "first-hitting"}
    return orders.get(values["order"], "ancestral")


def _rename_fields(values: ResultRow, names: Mapping[str, str]) -> ResultRow:
    return {names.get(name, name): value for name, value in values.items()}


def _check_names(settings: ResultRow, known: Iterable[str], required: Iterable[str]) -> None:
    if unknown := sorted(settings.keys() - set(known)):
        raise ValueError(f"unknown settings of the sampler: {', '.join(unknown)}")
    if missing := sorted(set(required) - settings.keys()):
        raise ValueError(f"settings of the sampler are missing: {', '.join(missing)}")
