"""`cdlm methods`: the table of methods, and a training step of each."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from cdlm.cli.common import console, parse, prepare_torch
from cdlm.devices import Device, Dtype, autocast, pick_device, weight_dtype
from cdlm.model.config import SIZES, NetworkConfig

GPT2_VOCAB = 50_257


@dataclasses.dataclass(frozen=True)
class MethodsConfig:
    """Print the table of methods, read off the objects themselves; with --run, train each for one step as well."""

    run: Literal["no", "tiny", "small", "110m"] = "no"
    """Also build this network, print its parameters, and run one training step of every method."""
    vocab_size: int = GPT2_VOCAB
    """Tokens without the mask."""
    batch_size: int = 2
    """Sequences in the step."""
    seq_length: int = 64
    """Tokens in a sequence of the step."""
    seed: int = 0
    """Fixes weights, data and noise of the step."""
    device: Device = "auto"
    """Where to compute the step."""
    dtype: Dtype = "float32"
    """Precision of the step."""

    def __post_init__(self) -> None:
        for name, least in (("vocab_size", 2), ("batch_size", 1), ("seq_length", 2)):
            if getattr(self, name) < least:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} must be at least {least} (got {getattr(self, name)})")


def main(arguments: list[str]) -> None:
    config = parse(MethodsConfig, "methods", arguments)
    prepare_torch()
    show_methods(config, console())


def show_methods(config: MethodsConfig, console: Console) -> None:
    """Every term of every method, read off the objects that train."""
    from cdlm.methods import METHODS
    from cdlm.objective.divergence import describe

    table = Table(title="Every method is a choice of ingredients for Eq. (8)", show_lines=True)
    for heading in (
        "method",
        "process",
        "times (s, t)",
        "coupling",
        "target",
        "D(target, student)",
        "w",
        "share",
        "network",
    ):
        table.add_column(heading)
    for slug, method in METHODS.items():
        for i, term in enumerate(method(method.default_process(config.vocab_size)).terms):
            network = "causal" if method.process == "none" else "bidirectional"
            network += ", time-conditioned" * method.time_conditioning
            network += ", joint head" * method.joint_head
            network += f", from {method.starts_from}" if method.starts_from else ""
            table.add_row(
                f"{method.name} [{slug}]".replace("[", "\\[") if i == 0 else "",
                method.process if i == 0 else "",
                str(term.times),
                str(term.coupling),
                str(term.target),
                describe(term.divergence),
                describe_callable(term.weight),
                str(term.share),
                network if i == 0 else "",
            )
    console.print(table)
    if config.run != "no":
        run_steps(config, SIZES[config.run], console)


def run_steps(config: MethodsConfig, size: NetworkConfig, console: Console) -> None:
    """One forward, backward and optimizer step of every method on one network."""
    import torch

    from cdlm.methods import METHODS
    from cdlm.model.denoiser import Denoiser
    from cdlm.model.ema import frozen_copy
    from cdlm.rng import seeded

    device = pick_device(config.device)
    table = Table(title=f"One step of {config.batch_size} x {config.seq_length} tokens on {device}, {config.dtype}")
    for heading in ("method", "parameters", "loss (nats per token)", "gradient norm", "seconds"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    rng = seeded(config.seed, "tokens", batch=config.batch_size)
    x0 = rng.integers(config.seq_length, config.vocab_size).to(device)
    with console.status("running one step of every method") as status:
        for method in METHODS.values():
            status.update(f"one step of {method.name}")
            torch.manual_seed(config.seed)
            causal = method.process == "none"
            network = dataclasses.replace(
                size, causal=causal, time_conditioning=method.time_conditioning, joint_layers=int(method.joint_head)
            )
            denoiser = Denoiser(network, method.default_process(config.vocab_size), vocab=config.vocab_size)
            denoiser = denoiser.to(device, weight_dtype(device, config.dtype))
            objective = method(denoiser.process)
            target = frozen_copy(denoiser) if objective.network else None
            if method.starts_from:  # a student that has moved a little away from its teacher
                for parameter in denoiser.parameters():
                    parameter.data += 0.02 * torch.randn_like(parameter)
            optimizer = torch.optim.AdamW(denoiser.parameters(), lr=3e-4)
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            with autocast(device, config.dtype):
                rng = seeded(config.seed, "step", batch=config.batch_size)
                loss = objective.loss(denoiser, target, x0, 0, rng, plain=True)
            loss.total.backward()
            norm = torch.nn.utils.clip_grad_norm_(denoiser.parameters(), 1.0)
            optimizer.step()
            cells = f"{denoiser.count():,}", f"{loss.total.item():.4f}", f"{norm.item():.3g}"
            table.add_row(method.name, *cells, f"{time.perf_counter() - began:.2f}")
    console.print(table)


def describe_callable(function: Callable[..., Any]) -> str:
    """The name of a function, with what a `functools.partial` fixes, or of an object's class."""
    if isinstance(function, functools.partial):
        fixed = [*map(str, function.args), *(f"{name}={value}" for name, value in function.keywords.items())]
        return f"{describe_callable(function.func)}({', '.join(fixed)})"
    return getattr(function, "__name__", type(function).__name__)
