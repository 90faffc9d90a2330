"""`cdlm demo`: what few steps buy, in one look: the two models that come with the package, and two moons.

Both models write one text side by side in the same few steps, as they write best; then in fewer and in more, and MDLM
with the plain sampler; then two moons are learned and drawn. At the end all of it is on one page.
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
from rich.text import Text as Line

from cdlm import zoo
from cdlm.cli.common import console as make_console
from cdlm.cli.common import parse, prepare_torch
from cdlm.cli.demo_page import page
from cdlm.cli.sample import picture
from cdlm.devices import Device, few_threads
from cdlm.eval.config import MoonsConfig
from cdlm.sample.settings import Settings, check_value, explicit, flags
from cdlm.text.animation import animation
from cdlm.text.template import Template

if TYPE_CHECKING:
    from cdlm.text.pipeline import Frame, Pipeline

FEW, LADDER, PLAIN = 8, (4, 32), (8, 64)
"""Steps of the texts that are watched; of further ones; and of those by the plain sampler."""
MOONS = 600
"""Training steps on two moons: enough for the shape of the picture, which `cdlm moons` draws with 1,000."""
NEXT = {
    "cdlm sample": "four texts, as the best model writes best",
    "cdlm sample --steps 8 --watch --num-samples 1": "one text that resolves, in as many steps as you like",
    'cdlm sample --prompt "The old house by the sea"': "continue a text",
    'cdlm sample --infill "She opened the ___ and saw ___."': "fill blanks",
    "cdlm zoo": "the models, and how they write best",
    "cdlm studio": 'all of that in a browser; first: pip install -c constraints.txt -e ".[studio]"',
    "cdlm train tiny-mcdlm --data data": "a model of your own: docs/tutorial.md",
}


@dataclasses.dataclass(frozen=True)
class DemoConfig:
    """Show what few steps buy: both models of the zoo side by side, two moons, and a page with all of it."""

    steps: int = FEW
    """Denoising steps of the texts that are watched."""
    seed: int = 0
    """Fixes the texts and the moons."""
    moons: bool = True
    """Learn and draw two moons as well, the paper's first figure: a minute."""
    device: Device = "auto"
    """Where to compute."""
    out: Path = Path("runs/demo")
    """Folder for index.html, the texts as pictures that move, and the moons."""

    def __post_init__(self) -> None:
        check_value("steps", self.steps)
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"--out {self.out} is a file; give a folder to make")


@dataclasses.dataclass(frozen=True)
class Take:
    """A text of a model, and what it took."""

    model: "Pipeline"
    how: Settings
    template: Template
    frames: "list[Frame]"
    seconds: float
    """Of the model alone, without drawing."""

    @property
    def tokens(self) -> list[int]:
        return self.model.finished(self.frames[-1].token_ids[0], self.template)

    @property
    def text(self) -> str:
        return self.template.text(self.tokens, self.model.decode).strip()

    @property
    def settings(self) -> str:
        return flags(explicit(self.how, self.model.generation_config, self.model.posterior))

    @property
    def cost(self) -> str:
        import torch

        from cdlm.metrics.diversity import entropy

        nats = float(entropy(torch.tensor([self.tokens])))
        return f"{self.frames[-1].nfe[0]} NFE, {self.seconds:.1f} s, entropy {nats:.2f} nats"


def main(arguments: list[str]) -> None:
    config = parse(DemoConfig, "demo", arguments)
    prepare_torch()
    run_demo(config, make_console())


def run_demo(config: DemoConfig, console: Console | None = None) -> list[Take]:
    """Write, watch, learn and draw; returns the texts, the watched ones first."""
    from cdlm.eval.moons import run_moons
    from cdlm.text.pipeline import load

    console, began = console or Console(), time.perf_counter()
    config.out.mkdir(parents=True, exist_ok=True)
    models = [load(zoo.HERE / name, config.device) for name in reversed(zoo.names())]
    first = models[0].denoiser
    with few_threads(first.device, first.count()):
        for model in models:
            model.sample(max_length=8, steps=2)  # the first call of a network is slow
        takes = watched(models, config, console)
        takes += [take(model, {"steps": steps}, config.seed) for steps in LADDER for model in models]
        takes += [take(models[0], {"steps": steps, "order": "random"}, config.seed) for steps in PLAIN]
    console.print(table(takes))
    for one in takes[: len(models)]:
        states, caption = [frame.token_ids[0] for frame in one.frames], f"{one.model.name}: {one.cost}"
        drawn = animation(one.model, one.template, states, caption)
        (config.out / f"{one.model.name}.svg").write_text(drawn, encoding="utf-8")
    shown = [(one.model.name, one.settings, one.cost, one.text) for one in takes]
    pictures, index = [config.out / f"{model.name}.svg" for model in models], config.out / "index.html"
    index.write_text(page(shown, pictures, None, NEXT), encoding="utf-8")  # moons take longer: it is there before them
    if config.moons:
        learnt = MoonsConfig(train_steps=MOONS, seed=config.seed, device=config.device, out=config.out / "moons")
        run_moons(learnt, console)
        index.write_text(page(shown, pictures, learnt.out / "moons.png", NEXT), encoding="utf-8")
    told = f"\n{index}: all of it on one page; open it in a browser"
    console.print(told, highlight=False, markup=False, soft_wrap=True)
    console.print(f"{time.perf_counter() - began:.0f} s in all. Next, after  . .venv/bin/activate :", highlight=False)
    for command, about in NEXT.items():
        console.print(f"  {command:<55} {about}", highlight=False, markup=False, soft_wrap=True)
    return takes


def take(model: "Pipeline", asked: dict[str, Any], seed: int) -> Take:
    """One text, as the model writes best where nothing else is asked for."""
    how, templates = model.resolve(asked), model.continuations([""])
    began = time.perf_counter()
    frames = list(model.frames(templates, how, seed))
    return Take(model, how, templates[0], frames, time.perf_counter() - began)


def watched(models: "list[Pipeline]", config: DemoConfig, console: Console) -> list[Take]:
    """All models step by step, side by side; where there is no terminal, the beginning, the middle and the end."""
    hows = [model.resolve({"steps": config.steps}) for model in models]
    templates = [model.continuations([""])[0] for model in models]
    ways = [
        model.frames([template], how, config.seed) for model, template, how in zip(models, templates, hows, strict=True)
    ]
    frames: list[list[Frame]] = [[] for _ in models]
    seconds = [0.0 for _ in models]
    takes: list[Take] = []
    drawn: Any = Live(console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext()
    with drawn as live:
        for number in range(config.steps + 1):
            for k, way in enumerate(ways):
                began = time.perf_counter()
                frames[k] += itertools.islice(way, 1)  # none once a text is finished
                seconds[k] += time.perf_counter() - began
            takes = [Take(*each) for each in zip(models, hows, templates, frames, seconds, strict=True)]
            if live is not None:
                live.update(beside(takes), refresh=True)
                time.sleep(min(0.3, 5 / config.steps))  # too fast to be seen otherwise
            elif number in (0, config.steps // 2, config.steps):
                console.print(beside(takes))
    return takes


def beside(takes: list[Take]) -> Table:
    """The newest state of each text in a column of its own, and under it what it has taken so far."""
    shown = Table(expand=True, show_footer=True)
    for one in takes:
        about = f"{one.model.name}, {one.model.denoiser.count() / 1e6:.0f}M parameters: {one.settings}"
        shown.add_column(about, footer=one.cost, ratio=1)
    states = []
    for one in takes:
        before = one.frames[-2] if len(one.frames) > 1 else None
        states.append(Group(picture(one.model, [one.template], one.frames[-1], before)))
    shown.add_row(*states)
    return shown


def table(takes: list[Take]) -> Table:
    """How the same models fare with fewer and with more steps: what each took, and how it begins."""
    shown = Table(title="In fewer steps, and in more; the last two by the plain sampler", show_lines=True)
    for heading in ("model", "settings", "took", "begins"):
        shown.add_column(heading, ratio=3 if heading == "begins" else 1)
    for one in takes:
        begins = Line(textwrap.shorten(one.text, 240, placeholder=" …"))
        shown.add_row(one.model.name, one.settings, one.cost.replace(", ", "\n"), begins)
    return shown
