"""Checkpoints: a folder of safetensors and JSON, written aside and renamed, so that it is whole or absent.

RUN/run.json                       the configuration; `cdlm train RUN/run.json` starts the identical run
RUN/metrics.jsonl                  one line for each console line and validation
RUN/step-00001000/config.json      with model.safetensors and tokenizer.json a model folder: the averaged weights
RUN/step-00001000/online.safetensors, target.safetensors, optimizer.safetensors, state.json
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

from cdlm.files import flush, read_object
from cdlm.model.pretrained import LayoutError, write_model, write_tensors

FORMAT = 1
NAME = re.compile(r"step-(\d{8,})")

State = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to go on as if it had never stopped."""

    step: int
    """Optimiser steps done."""
    tensors: dict[str, State]
    """For each part (averaged model, online weights, target, optimiser) its tensors by name, whole and on the host."""
    model_config: dict[str, Any]
    run_config: dict[str, Any]
    best: tuple[float, int] | None
    """The lowest validation NELBO so far, and its step."""
    data: dict[str, Any]
    """What it was trained on: the hash and vocabulary of the tokens."""
    tokenizer: Path | None = None


def write(run: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint, then remove the ones that are neither among the last `keep` nor the best."""
    final = run / f"step-{checkpoint.step:08d}"
    aside = run / f".writing-{final.name}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        write_model(aside, checkpoint.model_config, checkpoint.tensors["model"])
        for part, tensors in checkpoint.tensors.items():
            if part != "model":
                write_tensors(tensors, aside / f"{part}.safetensors")
        if checkpoint.tokenizer is not None:
            shutil.copyfile(checkpoint.tokenizer, aside / "tokenizer.json")
        state: dict[str, Any] = {
            "format": FORMAT,
            "step": checkpoint.step,
            "best": checkpoint.best,
            "run": checkpoint.run_config,
            "data": checkpoint.data,
        }
        state["parts"] = sorted(checkpoint.tensors)
        (aside / "state.json").write_text(json.dumps(state, indent=1) + "\n")
        for path in aside.iterdir():
            flush(path)
        flush(aside)
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        flush(run)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        last = latest(run)
        good = f"the last good checkpoint is {last}" if last else "there is no earlier checkpoint"
        raise OSError(
            f"could not write checkpoint {final} ({error}); {good}; free some space and use --resume auto"
        ) from error
    spare = {path for _, path in listed(run)[-keep:]}
    for step, path in listed(run):
        if path not in spare and (checkpoint.best is None or step != checkpoint.best[1]):
            shutil.rmtree(path)
    return final


def read(path: Path) -> Checkpoint:
    """Read a checkpoint whole, or say which of its files is missing or damaged."""
    state = _json(path / "state.json")
    if state.get("format", 0) > FORMAT:
        raise LayoutError(f"{path} was written by a newer version (format {state['format']}); upgrade cdlm")
    tensors = {}
    try:
        for part in state["parts"]:
            tensors[part] = load_file(path / f"{part}.safetensors")
        best = None if state["best"] is None else (float(state["best"][0]), int(state["best"][1]))
        step, run_config, data = int(state["step"]), state["run"], state["data"]
    except FileNotFoundError:
        lost = path / f"{next(part for part in state['parts'] if part not in tensors)}.safetensors"
        raise LayoutError(f"{lost} is missing; remove the folder {path} to resume from the one before") from None
    except SafetensorError as error:
        broken = next(part for part in state["parts"] if part not in tensors)
        raise LayoutError(
            f"{path / broken}.safetensors is damaged ({error}); remove the folder {path} to resume from the one before"
        ) from None
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise LayoutError(f"{path / 'state.json'} is incomplete ({error!r})") from None
    tokenizer = path / "tokenizer.json"
    return Checkpoint(
        step, tensors, _json(path / "config.json"), run_config, best, data, tokenizer if tokenizer.is_file() else None
    )


def listed(run: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints of a run, oldest first; what was being written when a run died does not count."""
    found = [(NAME.fullmatch(path.name), path) for path in run.iterdir()] if run.is_dir() else []
    return sorted((int(match[1]), path) for match, path in found if match and (path / "state.json").is_file())


def latest(run: Path) -> Path | None:
    found = listed(run)
    return found[-1][1] if found else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise LayoutError(f"{path} is missing; {path.parent} is not a checkpoint")
    try:
        return read_object(path)
    except ValueError as error:
        raise LayoutError(str(error)) from None
