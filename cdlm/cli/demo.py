"""`cdlm demo`: the bundled models at few steps: Sudoku grids beside the exact denoiser, then text.

A Sudoku grid fills in step by step. Then both models of text generate one sample side by side in the same few steps,
with their generation configs; then in fewer and in more steps, and MDLM with the plain sampler. One page shows all of
it, and the figure of the Sudoku study.
"""

import contextlib
import dataclasses
import itertools
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cdlm import zoo
from cdlm.cli.common import console as make_console
from cdlm.cli.common import parse, prepare_torch
from cdlm.cli.demo_page import PageSample, demo_page
from cdlm.cli.sample import picture
from cdlm.cli.sudoku import SudokuConfig, watch_grids
from cdlm.devices import Device, few_threads
from cdlm.sample.settings import Settings, check_value, explicit, flags
from cdlm.text.animation import animation
from cdlm.text.template import Template

if TYPE_CHECKING:
    from cdlm.text.pipeline import Frame, Pipeline

DEFAULT_STEPS = 8
COMPARED_STEPS = (4, 32)
"""Steps of the further samples of each model."""
PLAIN_STEPS = (8, 64)
"""Steps of the samples with the plain sampler."""
NUM_GRIDS = 64
"""Sudoku grids of each model; the page shows the first four."""
NEXT_COMMANDS = {
    "cdlm sample": "four samples of the best bundled model",
    "cdlm sample --steps 8 --watch --num-samples 1": "one sample resolving, in as many steps as you like",
    'cdlm sample --prompt "The old house by the sea"': "continue a text",
    'cdlm sample --infill "She opened the ___ and saw ___."': "fill blanks",
    "cdlm sudoku --steps 4": "Sudoku grids in fewer steps; --puzzle solves your own",
    "cdlm zoo": "the bundled models and their generation configs",
    "cdlm studio": 'all of that in a browser; first: pip install -c constraints.txt -e ".[studio]"',
    "cdlm train tiny-mcdlm --data data": "train a model of your own: docs/tutorial.md",
}


@dataclasses.dataclass(frozen=True)
class DemoConfig:
    """Show the bundled models at few steps, on Sudoku grids and on text, and write all of it to one page."""

    steps: int = DEFAULT_STEPS
    """Denoising steps of the texts that are shown step by step."""
    seed: int = 1
    """Seed of the grids and of the texts."""
    device: Device = "auto"
    """Where to compute."""
    out: Path = Path("runs/demo")
    """Directory for index.html and the animated samples."""

    def __post_init__(self) -> None:
        check_value("steps", self.steps)
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"--out must be a directory (got the file {self.out}).")


@dataclasses.dataclass(frozen=True)
class DemoSample:
    """A sample with its states and its cost."""

    model: "Pipeline"
    settings: Settings
    template: Template
    frames: "list[Frame]"
    seconds: float
    """Of the model alone, without drawing."""

    @property
    def token_ids(self) -> list[int]:
        return self.model.finished(self.frames[-1].token_ids[0], self.template)

    @property
    def text(self) -> str:
        return self.template.text(self.token_ids, self.model.decode).strip()

    @property
    def flags(self) -> str:
        return flags(explicit(self.settings, self.model.generation_config, self.model.posterior))

    @property
    def cost(self) -> str:
        import torch

        from cdlm.metrics.diversity import entropy

        nats = float(entropy(torch.tensor([self.token_ids])))
        return f"{self.frames[-1].nfe[0]} NFE, {self.seconds:.1f} s, entropy {nats:.2f} nats"


def main(arguments: list[str]) -> None:
    config = parse(DemoConfig, "demo", arguments)
    prepare_torch()
    run_demo(config, make_console())


def run_demo(config: DemoConfig, console: Console | None = None) -> list[DemoSample]:
    """Generate, compare and draw; returns the texts, those shown step by step first."""
    from cdlm.text.pipeline import load

    console = console or Console()
    began = time.perf_counter()
    config.out.mkdir(parents=True, exist_ok=True)
    columns = watch_grids(SudokuConfig(num_samples=NUM_GRIDS, seed=config.seed, device=config.device), console)
    models = [load(zoo.HERE / name, config.device) for name in reversed(zoo.names())]
    with few_threads(models[0].denoiser.device, models[0].denoiser.count()):
        for model in models:
            model.sample(max_length=8, steps=2)  # the first call of a network is slow
        samples = generate_side_by_side(models, config, console)
        samples += [
            generate_sample(model, {"steps": steps}, config.seed) for steps in COMPARED_STEPS for model in models
        ]
        plain = [{"steps": steps, "order": "random"} for steps in PLAIN_STEPS]
        samples += [generate_sample(models[0], settings, config.seed) for settings in plain]
    console.print(comparison_table(samples))
    pictures = [write_animation(sample, config.out) for sample in samples[: len(models)]]
    shown = [PageSample(sample.model.name, sample.flags, sample.cost, sample.text) for sample in samples]
    index = config.out / "index.html"
    index.write_text(demo_page(columns, shown, pictures, NEXT_COMMANDS), encoding="utf-8")
    console.print(f"\n{index} shows all of it; open it in a browser", highlight=False, markup=False, soft_wrap=True)
    seconds = time.perf_counter() - began
    console.print(f"{seconds:.0f} s in total. Next, after  . .venv/bin/activate :", highlight=False)
    for command, about in NEXT_COMMANDS.items():
        console.print(f"  {command:<55} {about}", highlight=False, markup=False, soft_wrap=True)
    return samples


def generate_sample(model: "Pipeline", given: dict[str, Any], seed: int) -> DemoSample:
    """One sample with these settings, and the generation config of the model for all others."""
    settings = model.resolve(given)
    templates = model.continuations([""])
    began = time.perf_counter()
    frames = list(model.frames(templates, settings, seed))
    return DemoSample(model, settings, templates[0], frames, time.perf_counter() - began)


def generate_side_by_side(models: "list[Pipeline]", config: DemoConfig, console: Console) -> list[DemoSample]:
    """All models step by step, side by side; without a terminal, the first, the middle and the last state."""
    settings = [model.resolve({"steps": config.steps}) for model in models]
    templates = [model.continuations([""])[0] for model in models]
    streams = [
        model.frames([template], resolved, config.seed)
        for model, template, resolved in zip(models, templates, settings, strict=True)
    ]
    frames: list[list[Frame]] = [[] for _ in models]
    seconds = [0.0 for _ in models]
    samples: list[DemoSample] = []
    display: Any = Live(console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext()
    with display as live:
        for step in range(config.steps + 1):
            for number, stream in enumerate(streams):
                began = time.perf_counter()
                frames[number] += itertools.islice(stream, 1)  # none once a sample is finished
                seconds[number] += time.perf_counter() - began
            samples = [DemoSample(*fields) for fields in zip(models, settings, templates, frames, seconds, strict=True)]
            if live is not None:
                live.update(side_by_side_table(samples), refresh=True)
                time.sleep(min(0.3, 5 / config.steps))  # too fast to be seen otherwise
            elif step in (0, config.steps // 2, config.steps):
                console.print(side_by_side_table(samples))
    return samples


def side_by_side_table(samples: list[DemoSample]) -> Table:
    """The newest state of each sample in its own column, and its cost so far."""
    table = Table(expand=True, show_footer=True)
    for sample in samples:
        header = f"{sample.model.name}, {sample.model.denoiser.count() / 1e6:.0f}M parameters: {sample.flags}"
        table.add_column(header, footer=sample.cost, ratio=1)
    states = []
    for sample in samples:
        before = sample.frames[-2] if len(sample.frames) > 1 else None
        states.append(Group(picture(sample.model, [sample.template], sample.frames[-1], before)))
    table.add_row(*states)
    return table


def comparison_table(samples: list[DemoSample]) -> Table:
    """All samples: their settings, their cost and their beginning."""
    table = Table(title="Fewer and more steps; the last two rows use the plain sampler", show_lines=True)
    for heading in ("model", "settings", "cost", "beginning"):
        table.add_column(heading, ratio=3 if heading == "beginning" else 1)
    for sample in samples:
        beginning = Text(textwrap.shorten(sample.text, 240, placeholder=" …"))
        table.add_row(sample.model.name, sample.flags, sample.cost.replace(", ", "\n"), beginning)
    return table


def write_animation(sample: DemoSample, directory: Path) -> Path:
    """The sample resolving, as an SVG file."""
    path = directory / f"{sample.model.name}.svg"
    states = [frame.token_ids[0] for frame in sample.frames]
    caption = f"{sample.model.name}: {sample.cost}"
    path.write_text(animation(sample.model, sample.template, states, caption), encoding="utf-8")
    return path
