"""Tables for people: the methods, one step of each, the recipes, the models that come with the package."""

import dataclasses
import time
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from cdlm import zoo
from cdlm.devices import Device, Dtype, autocast, pick_device, weight_dtype
from cdlm.files import read_object
from cdlm.methods import METHODS, parse_method
from cdlm.model import SIZES, Architecture, Denoiser, frozen_copy, pretrained
from cdlm.objective.divergence import describe
from cdlm.recipes import RECIPES
from cdlm.rng import seeded
from cdlm.sample import flags, sampling_of

GPT2_VOCAB = 50_257


@dataclasses.dataclass(frozen=True)
class MethodsConfig:
    """Print the table of methods, read off the objects themselves; with --run, train each for one step as well."""

    run: Literal["no", "tiny", "small", "110m"] = "no"
    """Also build this network, print its parameters, and run one training step of every method."""
    vocab: int = GPT2_VOCAB
    """Tokens without the mask."""
    batch: int = 2
    """Sequences in the step."""
    length: int = 64
    """Tokens in a sequence of the step."""
    seed: int = 0
    """Fixes weights, data and noise of the step."""
    device: Device = "auto"
    """Where to compute the step."""
    dtype: Dtype = "float32"
    """Precision of the step."""

    def __post_init__(self) -> None:
        if self.vocab < 2 or self.batch < 1 or self.length < 2:
            raise ValueError("--vocab and --length must be at least 2, --batch at least 1")


def show_methods(config: MethodsConfig, console: Console) -> None:
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
        for i, term in enumerate(method(method.default_process(config.vocab)).terms):
            network = "causal" if method.process == "none" else "bidirectional"
            network += ", time-conditioned" * method.time_conditioning
            network += f", from {method.starts_from}" if method.starts_from else ""
            table.add_row(
                f"{method.name} [{slug}]".replace("[", "\\[") if i == 0 else "",
                method.process if i == 0 else "",
                str(term.times),
                str(term.coupling),
                str(term.target),
                describe(term.divergence),
                term.weight.__name__,
                str(term.share),
                network if i == 0 else "",
            )
    console.print(table)
    if config.run != "no":
        run_steps(config, SIZES[config.run], console)


def run_steps(config: MethodsConfig, size: Architecture, console: Console) -> None:
    """One forward, backward and optimiser step of every method on one network."""
    device = pick_device(config.device)
    table = Table(title=f"One step of {config.batch} x {config.length} tokens on {device}, {config.dtype}")
    for heading in ("method", "parameters", "loss (nats per token)", "gradient norm", "seconds"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    x0 = seeded(config.seed, "tokens", batch=config.batch).integers(config.length, config.vocab).to(device)
    with console.status("running one step of every method") as status:
        for method in METHODS.values():
            status.update(f"one step of {method.name}")
            torch.manual_seed(config.seed)
            causal = method.process == "none"
            shape = dataclasses.replace(size, causal=causal, time_conditioning=method.time_conditioning)
            denoiser = Denoiser(shape, method.default_process(config.vocab), vocab=config.vocab)
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
                loss = objective.loss(denoiser, target, x0, 0, seeded(config.seed, "step", batch=config.batch))
            loss.total.backward()
            norm = torch.nn.utils.clip_grad_norm_(denoiser.parameters(), 1.0)
            optimizer.step()
            cells = f"{denoiser.count():,}", f"{loss.total.item():.4f}", f"{norm.item():.3g}"
            table.add_row(method.name, *cells, f"{time.perf_counter() - began:.2f}")
    console.print(table)


def show_recipes(console: Console) -> None:
    """Every recipe with what it reproduces, its command and its cost."""
    table = Table(title="Every setting can be changed: cdlm train RECIPE --help")
    for heading in ("recipe", "reproduces", "command", "steps x batch x length", "cost"):
        table.add_column(heading)
    for name, recipe in RECIPES.items():
        config = recipe.config
        size = f"{config.steps:,} x {config.batch} x {config.length}"
        command = f"cdlm train {name} --data DIR" + (f" --init-from {config.init_from}" if config.init_from else "")
        table.add_row(name, recipe.reproduces, command, size, recipe.cost)
    console.print(table)


def show_zoo(console: Console) -> None:
    """The models that come with the package: what they are, how they write best, and where they lie."""
    table = Table(title="Models that come with cdlm", show_lines=True)
    for heading in ("model", "trained by", "parameters", "on disk", "tokens seen"):
        table.add_column(heading, justify="right" if heading in ("parameters", "on disk", "tokens seen") else "left")
    best: list[str] = []
    for name in zoo.names():
        folder = zoo.HERE / name
        config = read_object(folder / "config.json")
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        numbers = pretrained.count(folder)
        trained, chain, seen = config["trained"], dict[str, None](), 0
        while trained:
            chain[parse_method(trained["method"])[0].name] = None
            seen += trained["steps"] * trained["batch"] * trained["length"]
            trained = trained["from"]
        table.add_row(
            name, ", after ".join(chain), f"{numbers / 1e6:.1f}M", f"{size / 1e6:.0f} MB", f"{seen / 1e9:.2f}B"
        )
        best += [f"{name} writes best with", *(f"  {flags(sampling_of(one))}" for one in config["sampling"])]
    console.print(table)
    for line in best:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"{zoo.HERE} has them, each with a card. Use them by name:", highlight=False, soft_wrap=True)
    for command, about in (
        ("cdlm sample", "the first of them writes four texts"),
        ('cdlm sample mdlm --prompt "The sea was"', "the other one continues a text"),
        ("cdlm sample --steps 32 --watch --num 1", "a text resolves; settings follow the number of steps"),
        ("cdlm studio", "both side by side, in a browser"),
    ):
        console.print(f"  {command:<40} {about}", highlight=False, markup=False)
