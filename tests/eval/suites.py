"""What the tests of whole evaluations share."""

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from cdlm.eval.config import EvalConfig
from cdlm.eval.results import ResultRow, Samples, read_samples

LENGTH, NUM = 16, 6
QUIET = Console(quiet=True)


def config(work: Path, out: Path, **changes: Any) -> EvalConfig:
    """Two models, one judge, two numbers of steps; with changes."""
    asked: dict[str, Any] = {
        "models": (str(work / "masked"), f"U={work / 'uniform'}"),
        "judge": (str(work / "judge"),),
        "num_samples": NUM,
        "steps": (2, 4),
        "device": "cpu",
        "out": out,
    }
    return EvalConfig(**{**asked, **changes})


def again(work: Path, **changes: Any) -> dict[str, Any]:
    """The changes for judging kept texts, without models."""
    return {"models": (), "judge": (str(work / "judge"),), "num_samples": None, **changes}


def nothing(*_: object, **__: object) -> None:
    raise AssertionError("this was computed before")


def timeless(row: ResultRow) -> ResultRow:
    """The numbers of a row, without when and how fast."""
    clock = ("time", "judge_seconds", "judge_tokens_per_second", "sample_seconds", "seconds", "device", "torch", "file")
    return {name: value for name, value in row.items() if name not in clock}


def samples(out: Path, row: ResultRow) -> Samples:
    """The kept texts of a row."""
    return read_samples(out / "samples" / row["file"])


def columns(found: Samples, name: str) -> Tensor:
    return torch.tensor([line[name] for line in found.lines])
