"""Checkpoints: a folder of safetensors and JSON, written aside and renamed, so that it is whole or absent.

RUN/run.json                       the configuration; `cdlm train RUN/run.json` starts the identical run
RUN/metrics.jsonl                  one line for each console line and validation
RUN/step-00001000/config.json      with model.safetensors and tokenizer.json a model directory: the EMA weights
RUN/step-00001000/generation_config.json     where the run started from a model that has one: how it is best sampled
RUN/step-00001000/online.safetensors, target.safetensors, optimizer.safetensors, state.json
RUN/damaged-step-00002000/         one that could not be read, set aside when the run went on from the one before

state.json keeps a digest of every file, and of itself: what was read is what was written, or there is an error. Only
generation_config.json may be edited.
"""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from cdlm.files import digest, flush, read_object, seal_holds, sealed
from cdlm.model.pretrained import LayoutError, write_model, write_tensors
from cdlm.sample.generation_config import read_generation_config, write_generation_config

FORMAT = 2
"""1 had no digests."""
PARTS = ("model", "online", "target", "optimizer")
STATE = "state.json"
NAME = re.compile(r"step-(\d{8,})")

State = dict[str, torch.Tensor]


class DamageError(LayoutError):
    """A checkpoint of which a file is missing, cut short or changed."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to go on as if it had never stopped."""

    step: int
    """Optimiser steps done."""
    tensors: dict[str, State]
    """For each part (EMA model, online weights, target network, optimizer) its full tensors by name, on the host."""
    model_config: dict[str, Any]
    run_config: dict[str, Any]
    best: tuple[float, int] | None
    """The lowest validation NELBO so far, and its step."""
    data: dict[str, Any]
    """What it was trained on: the hash and vocabulary of the tokens."""
    tokenizer: Path | None = None
    generation_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The settings that the model it started from is best used with."""


def write(run: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint, then remove the ones that are neither among the last `keep` nor the best."""
    final = run / f"step-{checkpoint.step:08d}"
    aside = run / f".writing-{final.name}"
    try:
        _sweep(run)
        aside.mkdir(parents=True)
        _fill(aside, checkpoint)
        if final.exists():
            _remove(final)
        aside.rename(final)
        flush(run)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise OSError(
            f"could not write checkpoint {final} ({error}); {standing(run)}; free some space and use --resume auto"
        ) from error
    spare = {path for _, path in listed(run)[-keep:]}
    for step, path in listed(run):
        if path not in spare and (checkpoint.best is None or step != checkpoint.best[1]):
            _remove(path)
    return final


def _fill(folder: Path, checkpoint: Checkpoint) -> None:
    """Write every file of a checkpoint, state.json last, and wait until they are on the disk."""
    write_model(folder, checkpoint.model_config, checkpoint.tensors["model"])
    for part, tensors in checkpoint.tensors.items():
        if part != "model":
            write_tensors(tensors, folder / f"{part}.safetensors")
    if checkpoint.tokenizer is not None:
        shutil.copyfile(checkpoint.tokenizer, folder / "tokenizer.json")
    state = {
        "format": FORMAT,
        "step": checkpoint.step,
        "best": checkpoint.best,
        "run": checkpoint.run_config,
        "data": checkpoint.data,
        "parts": sorted(checkpoint.tensors),
        "files": {path.name: digest(path) for path in sorted(folder.iterdir())},
    }
    write_generation_config(folder, checkpoint.generation_config)
    (folder / STATE).write_text(json.dumps(sealed(state), indent=1) + "\n")
    for path in folder.iterdir():
        flush(path)
    flush(folder)


def _remove(path: Path) -> None:
    """Remove a checkpoint, which loses its name first: half of one is never taken for a whole."""
    gone = path.with_name(f".removing-{path.name}")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)  # what cannot be removed now is swept up later


def _sweep(run: Path) -> None:
    """Remove what a run that died was writing or removing; there is no other run, as the folder is held."""
    for pattern in (".writing-step-*", ".removing-step-*"):
        for left in run.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def standing(run: Path) -> str:
    """Words for an error: what there is to go on from."""
    last = latest(run)
    return f"the last good checkpoint is {last}" if last else "no checkpoint was written yet"


def last_good(run: Path) -> Path | None:
    """The newest checkpoint that can be read whole; None for a run without any.

    Damaged ones that are newer are set aside under another name, with a message: the steps between are computed again,
    with the same bits. If none is good, that is an error and nothing is touched: a run never starts anew by itself.
    """
    damaged: list[tuple[Path, DamageError]] = []
    for _, path in reversed(listed(run)):
        try:
            read(path)
        except DamageError as error:
            damaged.append((path, error))
            continue
        for bad, error in damaged:
            kept = _set_aside(bad)
            print(f"{error}; kept as {kept}, which you may remove; going on from {path.name}", flush=True)
        return path
    if damaged:
        raise DamageError(
            f"{damaged[0][1]}; no good checkpoint is left in {run}: put that file back from a copy, or start anew with "
            "another --out"
        )
    return None


def _set_aside(path: Path) -> Path:
    names = (path.with_name(f"damaged-{path.name}{suffix}") for suffix in ("", *(f"-{k}" for k in range(2, 1000))))
    return path.rename(next(name for name in names if not name.exists()))


def read(path: Path, check: bool = True) -> Checkpoint:
    """Read a checkpoint whole, or say which of its files is missing or damaged.

    The digests may be left out where another process has just compared them.
    """
    state = _state(path)
    if check and "seal" in state:
        _compare(path, state)
    try:
        parts = [part for part in PARTS if part in state["parts"]]
        best = None if state["best"] is None else (float(state["best"][0]), int(state["best"][1]))
        step, run_config, data = int(state["step"]), dict(state["run"]), dict(state["data"])
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise DamageError(f"{path / STATE} is incomplete ({error!r})") from None
    tensors = {part: _tensors(path / f"{part}.safetensors") for part in parts}
    tokenizer = path / "tokenizer.json"
    model_config = _json(path / "config.json")
    return Checkpoint(
        step,
        tensors,
        model_config,
        run_config,
        best,
        data,
        tokenizer if tokenizer.is_file() else None,
        read_generation_config(path, model_config),
    )


def _state(path: Path) -> dict[str, Any]:
    state = _json(path / STATE)
    version = state.get("format", 0)
    if isinstance(version, int) and version > FORMAT:
        raise LayoutError(
            f"{path / STATE} was written by a newer version (format {version}, this one reads {FORMAT}); upgrade cdlm, "
            f"or move {path} away to go on from the one before"
        )
    if (version != 1 or "seal" in state) and not seal_holds(state):
        raise DamageError(f"{path / STATE} is damaged (its digest differs)")
    return state


def _compare(path: Path, state: dict[str, Any]) -> None:
    """Every file has the digest that it was written with."""
    for name, value in state["files"].items():
        if not (path / name).is_file():
            raise DamageError(f"{path / name} is missing")
        if digest(path / name) != value:
            raise DamageError(f"{path / name} is damaged (its digest differs from that in {STATE})")


def _tensors(path: Path) -> State:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise DamageError(f"{path} is missing") from None
    except SafetensorError as error:
        raise DamageError(f"{path} is damaged ({error})") from None


def listed(run: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints of a run, oldest first; what was being written when a run died does not count."""
    found = [(NAME.fullmatch(path.name), path) for path in run.iterdir()] if run.is_dir() else []
    return sorted((int(match[1]), path) for match, path in found if match and (path / STATE).is_file())


def latest(run: Path) -> Path | None:
    found = listed(run)
    return found[-1][1] if found else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DamageError(f"{path} is missing; {path.parent} is not a checkpoint")
    try:
        return read_object(path)
    except ValueError as error:
        raise DamageError(str(error)) from None
