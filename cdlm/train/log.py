"""Metrics: one JSON line each in metrics.jsonl, always; TensorBoard and Weights & Biases if asked."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdlm.data.tokens import TokenFile
from cdlm.extras import require
from cdlm.files import naming, write_whole
from cdlm.methods import Method
from cdlm.model.denoiser import Denoiser
from cdlm.objective import Objective
from cdlm.schedules import scaled_decay
from cdlm.train.config import TrainConfig, to_json
from cdlm.train.distributed import World, mean_over_ranks
from cdlm.train.optim import learning_rate
from cdlm.train.step import Learner

Sink = Callable[[dict[str, Any]], None]
RENAMED = {"lr": "learning_rate", "gradient": "grad_norm", "texts": "samples"}
"""Keys of metrics.jsonl in earlier versions and their present names."""


def announce(
    config: TrainConfig,
    network: Denoiser,
    method: Method,
    objective: Objective,
    data: TokenFile,
    device: torch.device,
    world: World,
) -> None:
    """What is about to run, with the decays as they are scaled to it."""
    corpus = data.meta.splits["train"].tokens
    seen = config.steps * config.batch_size * config.seq_length
    print(
        f"{method.name} ({config.method}), {network.count():,} parameters, on {world.size} x {device}, {config.dtype}"
    )
    batch = f"{config.batch_size} x {config.seq_length}"
    print(f"{config.steps:,} steps of {batch}: {seen / corpus:.2f} times {corpus:,} tokens")
    if network.process is not None:
        print(f"prior: {config.prior} ({network.process.name}), noise schedule: {config.noise_schedule}")
    decays = [("EMA", config.ema_decay)]
    if objective.network is not None and (decay := objective.network.decay(0)) < 1:
        decays.append(("target", decay))
    for name, decay in decays:
        print(describe_decay(name, decay, config.steps, config.reference_steps))


def describe_decay(name: str, decay: float, steps: int, reference_steps: int) -> str:
    """The decay of a weight average, and what it becomes in a run of this length."""
    scaled = scaled_decay(decay, steps, reference_steps)
    line = f"{name} decay: {decay:g} at {reference_steps:,} steps, "
    if scaled >= 1:
        return line + "which keeps the initial weights"
    if scaled <= 0:
        return line + f"no averaging in a run of {steps:,} steps"
    return line + f"{scaled:.6g} at {steps:,} steps (averages about {1 / (1 - scaled):,.0f} steps)"


def summarise(state: Learner, recent: list[dict[str, Tensor]], step: int, speed: float) -> dict[str, Any]:
    """The means since the last line, and where the schedules stand."""
    objective, progress = state.objective, step / state.config.steps
    values: dict[str, Any] = {"step": step + 1, "kind": "train", "tokens_per_second": round(speed, 1)}
    names = ["loss", *(term.name for term in objective.terms), "grad_norm"]
    none = torch.zeros((), device=state.denoiser.device)
    sums = [sum((line[name].float() for line in recent if name in line), none) for name in names]
    counts = [none + sum(name in line for line in recent) for name in names]  # a term may have no row in a process
    total, count = mean_over_ranks(torch.stack([*sums, *counts]), state.world).cpu().chunk(2)
    values |= {name: float(t / c) for name, t, c in zip(names, total, count, strict=True) if c > 0}
    values["learning_rate"] = learning_rate(state.config, step)
    for term in objective.terms:
        values[f"share {term.name}"] = term.share(progress)
        values[f"delta {term.name}"] = [term.times.low(progress), term.times.high(progress)]
    if objective.network is not None:
        values["lambda"] = objective.lam(step)
    if state.denoiser.device.type == "cuda":
        values["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return values


def console_line(line: dict[str, Any], config: TrainConfig) -> str:
    """One plain line that reads well in a log."""
    parts = [f"step {line['step']:>7,}/{config.steps:,}", f"loss {line['loss']:.4f}"]
    terms = [name.removeprefix("share ") for name in line if name.startswith("share ")]
    if len(terms) > 1:
        parts += [f"{name} {line[name]:.4f} (share {line[f'share {name}']:.2f})" for name in terms if name in line]
    low, high = line[f"delta {terms[0]}"]
    if low < 1:
        parts.append(f"delta {low:.3g}" if low == high else f"delta {low:.3g}-{high:.3g}")
    parts += [f"lambda {line['lambda']:.4g}"] if "lambda" in line else []
    parts += [
        f"grad {line['grad_norm']:.2f}",
        f"lr {line['learning_rate']:.2e}",
        f"{line['tokens_per_second']:,.0f} tokens/s",
    ]
    parts += [f"{line['memory_gib']:.1f} GiB"] if "memory_gib" in line else []
    return "  ".join(parts)


def open_log(config: TrainConfig, from_step: int) -> Sink:
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
    """The lines of a run's metrics, of any version, under the present names.

    A last line that a crash has cut short is skipped; other damaged lines are skipped with a message.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run} has no metrics.jsonl; is it a run directory?")
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
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return None
    return {RENAMED.get(name, name): value for name, value in line.items()}


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in line.items() if isinstance(value, int | float) and name != "step"}


def _tensorboard(config: TrainConfig, from_step: int) -> Sink:
    tensorboard = require("torch.utils.tensorboard", "track", "--track tensorboard", "tensorboard")
    writer = tensorboard.SummaryWriter(str(config.out / "tensorboard"), purge_step=from_step + 1)

    def write(line: dict[str, Any]) -> None:
        for name, value in _numbers(line).items():
            writer.add_scalar(name, value, line["step"])
        writer.flush()

    return write


def _wandb(config: TrainConfig, from_step: int) -> Sink:
    wandb = require("wandb", "track", "--track wandb")
    name = hashlib.blake2b(
        str(config.out.resolve()).encode(), digest_size=6
    ).hexdigest()  # one run, however often resumed
    wandb.init(
        id=name, project="cdlm", name=config.out.name, config=to_json(config), dir=str(config.out), resume="allow"
    )
    return lambda line: wandb.log(_numbers(line), step=line["step"])
