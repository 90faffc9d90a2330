"""Metrics: one JSON line each in metrics.jsonl, always; TensorBoard and Weights & Biases if asked."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdlm.extras import require
from cdlm.files import naming, write_whole
from cdlm.train.config import RunConfig, to_json
from cdlm.train.distributed import mean
from cdlm.train.optim import learning_rate
from cdlm.train.step import Learner

Sink = Callable[[dict[str, Any]], None]


def summarise(state: Learner, recent: list[dict[str, Tensor]], step: int, speed: float) -> dict[str, Any]:
    """The means since the last line, and where the schedules stand."""
    objective, progress = state.objective, step / state.config.steps
    values: dict[str, Any] = {"step": step + 1, "kind": "train", "tokens_per_second": round(speed, 1)}
    names = ["loss", *(term.name for term in objective.terms), "gradient"]
    none = torch.zeros((), device=state.denoiser.device)
    sums = [sum((line[name].float() for line in recent if name in line), none) for name in names]
    counts = [none + sum(name in line for line in recent) for name in names]  # a term may have no row in a process
    total, count = mean(torch.stack([*sums, *counts]), state.world).cpu().chunk(2)
    values |= {name: float(t / c) for name, t, c in zip(names, total, count, strict=True) if c > 0}
    values["lr"] = learning_rate(state.config, step)
    for term in objective.terms:
        values[f"share {term.name}"] = term.share(progress)
        values[f"delta {term.name}"] = [term.times.low(progress), term.times.high(progress)]
    if objective.network is not None:
        values["lambda"] = objective.lam(step)
    if state.denoiser.device.type == "cuda":
        values["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return values


def console_line(line: dict[str, Any], config: RunConfig) -> str:
    """One plain line that reads well in a log."""
    parts = [f"step {line['step']:>7,}/{config.steps:,}", f"loss {line['loss']:.4f}"]
    terms = [name.removeprefix("share ") for name in line if name.startswith("share ")]
    if len(terms) > 1:
        parts += [f"{name} {line[name]:.4f} (share {line[f'share {name}']:.2f})" for name in terms if name in line]
    low, high = line[f"delta {terms[0]}"]
    if low < 1:
        parts.append(f"delta {low:.3g}" if low == high else f"delta {low:.3g}-{high:.3g}")
    parts += [f"lambda {line['lambda']:.4g}"] if "lambda" in line else []
    parts += [f"grad {line['gradient']:.2f}", f"lr {line['lr']:.2e}", f"{line['tokens_per_second']:,.0f} tokens/s"]
    parts += [f"{line['memory_gib']:.1f} GiB"] if "memory_gib" in line else []
    return "  ".join(parts)


def open_log(config: RunConfig, from_step: int) -> Sink:
    """A function that records a line of metrics; lines of a run's lost future are dropped when it resumes."""
    path = config.out / "metrics.jsonl"
    if path.is_file():
        kept = [line for line in read_metrics(config.out) if line["step"] <= from_step]
        write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
    else:
        path.touch()
    sinks = [{"tensorboard": _tensorboard, "wandb": _wandb}[name](config, from_step) for name in config.track]

    def record(line: dict[str, Any]) -> None:
        with naming(path), path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        for sink in sinks:
            sink(line)

    return record


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics; a last line cut short by a crash is passed over, and others too, with a word."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run} has no metrics.jsonl; is it the folder of a run?")
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = [(number, _line(text)) for number, text in enumerate(texts, 1)]
    lost = [str(number) for number, line in found if line is None and number < len(texts)]
    if lost:
        print(f"{path}: damaged and left out: line {', '.join(lost[:5])}{' ...' * (len(lost) > 5)}", flush=True)
    return [line for _, line in found if line is not None]


def _line(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in line.items() if isinstance(value, int | float) and name != "step"}


def _tensorboard(config: RunConfig, from_step: int) -> Sink:
    tensorboard = require("torch.utils.tensorboard", "track", "--track tensorboard", "tensorboard")
    writer = tensorboard.SummaryWriter(str(config.out / "tensorboard"), purge_step=from_step + 1)

    def write(line: dict[str, Any]) -> None:
        for name, value in _numbers(line).items():
            writer.add_scalar(name, value, line["step"])
        writer.flush()

    return write


def _wandb(config: RunConfig, from_step: int) -> Sink:
    wandb = require("wandb", "track", "--track wandb")
    name = hashlib.blake2b(
        str(config.out.resolve()).encode(), digest_size=6
    ).hexdigest()  # one run, however often resumed
    wandb.init(
        id=name, project="cdlm", name=config.out.name, config=to_json(config), dir=str(config.out), resume="allow"
    )
    return lambda line: wandb.log(_numbers(line), step=line["step"])
