"""Two moons from end to end: train methods side by side, sample with few and many steps, draw the paper's Figure 1."""

import dataclasses
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Float, Int
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from cdlm.data.toy import Moons
from cdlm.devices import pick_device, weight_dtype
from cdlm.eval.config import MoonsConfig
from cdlm.files import VERSION
from cdlm.methods.spec import needs_trained_model, parse_method
from cdlm.metrics.consistency import exact_gaps, full_posterior
from cdlm.model.config import SIZES
from cdlm.model.denoiser import Denoiser
from cdlm.model.pretrained import save_denoiser
from cdlm.process import Process, masked
from cdlm.process.exact import listed, posterior
from cdlm.process.process import Posterior
from cdlm.rng import seeded
from cdlm.sample.ancestral import ancestral
from cdlm.sample.draw import last
from cdlm.sample.exact import ancestral_law, tabulate
from cdlm.sample.settings import resolve
from cdlm.sample.timesteps import timesteps
from cdlm.train.config import TrainConfig
from cdlm.train.distributed import World
from cdlm.train.plot import canvas
from cdlm.train.step import make_learner, train_step
from cdlm.types import Predictor, Tokens

EXACT_PREDICTOR = "exact"
DATA = "data"
TIMES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
"""Noise levels between which path invariance is measured."""


@dataclasses.dataclass(frozen=True)
class MoonsCell:
    """One cell of the figure: what a method draws in that many steps, from samples and from the exact distribution."""

    method: str
    steps: int
    manifold: float
    """Fraction of the drawn points on the manifold."""
    tv: float
    """Total variation between the histogram of the points and the distribution of the data; that of the data is its
    noise floor."""
    manifold_law: float
    """The same fraction under the exact distribution of the sampler, by enumeration."""
    tv_law: float
    """Total variation between the exact distribution of the sampler and that of the data."""


@dataclasses.dataclass(frozen=True)
class MoonsModel:
    """A row of the figure: a predictor, and how to sample from it."""

    predict: Predictor
    process: Process
    posterior: Posterior


def run_moons(config: MoonsConfig, console: Console | None = None) -> list[MoonsCell]:
    """Train, sample, measure, plot; returns the cells, which are also in `out` as JSON."""
    for spec in config.methods:
        method, _ = parse_method(spec)
        if method.process == "none" or needs_trained_model(spec):
            raise ValueError(
                f"{spec} does not fit two moons: choose a diffusion method that starts from random weights"
            )
    device = pick_device(config.device)
    moons = Moons(config.bins, encoding=config.encoding)
    console = console or Console()
    config.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # a network this small gains nothing from threads, and loses much where cores are busy
    began = time.perf_counter()
    truth = moons.sample(seeded(config.seed, "truth", batch=config.num_samples))
    pictures: dict[tuple[str, int], Float[Tensor, "bins bins"]] = {(DATA, 0): _histogram(moons, truth)}
    cells = [_measure(moons, DATA, 0, pictures[DATA, 0], moons.law)]
    losses: dict[str, list[float]] = {spec: [] for spec in config.methods}
    gaps: dict[str, list[list[float | None]]] = {}
    with Progress(console=console) as progress:
        num_cells = (len(config.methods) + 1) * len(config.sampling_steps)
        task = progress.add_task("two moons", total=len(config.methods) * config.train_steps + num_cells)

        def on_train_step(spec: str, loss: float) -> None:
            losses[spec].append(loss)
            progress.update(task, advance=1, description=f"training {spec}")

        for spec in (EXACT_PREDICTOR, *config.methods):
            if spec == EXACT_PREDICTOR:
                model = exact_model(moons)
            else:
                model = train_model(config, spec, moons, device, on_train_step)
            for steps in config.sampling_steps:
                progress.update(task, advance=1, description=f"sampling {spec}, {steps} steps")
                rng = seeded(config.seed, "sample", steps, batch=config.num_samples)
                start = model.process.start(moons.length, rng("start"))
                settings = resolve({"steps": steps}, model.process, model.posterior)
                drawn = last(ancestral(model.predict, model.process, start, settings, rng)).x
                law = ancestral_law(model.predict, model.process, moons.length, timesteps(settings), model.posterior)
                pictures[spec, steps] = _histogram(moons, drawn)
                cells.append(_measure(moons, spec, steps, pictures[spec, steps], law))
            progress.update(task, description=f"path invariance of {spec}")
            predict = full_posterior(model.predict, model.process) if model.posterior == "plug-in" else model.predict
            gaps[spec] = exact_gaps(predict, model.process, moons.law, moons.length, list(TIMES))
    seconds = round(time.perf_counter() - began, 1)
    result = {
        "config": {**dataclasses.asdict(config), "out": str(config.out)},
        "version": VERSION,
        "device": str(device),
        "torch": torch.__version__,
        "seconds": seconds,
        "cells": [dataclasses.asdict(cell) for cell in cells],
        "losses": losses,
        "consistency": {"times": list(TIMES), "tv": gaps},
    }
    (config.out / "moons.json").write_text(json.dumps(result, indent=1) + "\n")
    plot_samples(config, moons, pictures, cells, config.out / "moons.png")
    plot_consistency(gaps, config.out / "consistency.png")
    console.print(moons_table(config, cells))
    for name, about in (
        ("moons.png", "what each method draws"),
        ("consistency.png", "how far predictions along paths disagree"),
        ("moons.json", "all numbers, with the exact distributions of the samplers"),
    ):
        console.print(f"{config.out / name}: {about}", highlight=False, soft_wrap=True)
    console.print(f"{seconds} s on {device}", highlight=False)
    return cells


def exact_model(moons: Moons) -> MoonsModel:
    """The Bayes predictor f*: what a perfectly trained masked model would predict."""
    process = masked(moons.vocab)
    return MoonsModel(posterior(moons.law, process, moons.length), process, "plug-in")


def train_model(
    config: MoonsConfig, spec: str, moons: Moons, device: torch.device, on_train_step: Callable[[str, float], None]
) -> MoonsModel:
    """Train one method; its EMA weights go to the output directory."""
    method, choices = parse_method(spec)
    process = method.default_process(moons.vocab)
    assert process is not None
    torch.manual_seed(config.seed)
    shape = dataclasses.replace(
        SIZES["tiny"], time_conditioning=method.time_conditioning, position_embeddings=moons.length
    )
    run = TrainConfig(
        spec,
        network=shape,
        steps=config.train_steps,
        batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        seed=config.seed,
        dtype=config.dtype,
    )
    denoiser = Denoiser(shape, process).to(device, weight_dtype(device, config.dtype))
    state = make_learner(run, denoiser, method(process, config.train_steps, **choices), World())

    def batches(step: int, rows: Int[Tensor, "b"]) -> Tokens:
        return moons.sample(seeded(config.seed, "data", step, batch=config.batch_size, rows=rows))

    for step in range(config.train_steps):
        on_train_step(spec, train_step(state, batches, step)["loss"].item())
    save_denoiser(state.ema, config.out / re.sub("[:=,]", "-", spec))
    return MoonsModel(tabulate(state.ema, moons.length), process, method.posterior)


def moons_table(config: MoonsConfig, cells: list[MoonsCell]) -> Table:
    """Manifold fraction and total variation of the samples, methods by steps."""
    floor = next(cell for cell in cells if cell.method == DATA)
    shown = Table(
        title="Two moons: on / TV",
        caption=f"on: share of points on the moons, higher is better. TV: distance from the data, lower is better; of "
        f"{config.num_samples:,} points each. As many of the data itself: {floor.manifold:.3f} / {floor.tv:.3f}. "
        "exact f*: what a perfect MDLM would draw.",
    )
    shown.add_column("steps", justify="right")
    for spec in (EXACT_PREDICTOR, *config.methods):
        shown.add_column("exact f*" if spec == EXACT_PREDICTOR else spec)
    for steps in config.sampling_steps:
        row = [cell for cell in cells if cell.steps == steps]
        shown.add_row(str(steps), *(f"{cell.manifold:.3f} / {cell.tv:.3f}" for cell in row))
    return shown


def plot_samples(
    config: MoonsConfig,
    moons: Moons,
    pictures: dict[tuple[str, int], Float[Tensor, "bins bins"]],
    cells: list[MoonsCell],
    path: Path,
) -> None:
    """Methods down, steps across, the data beside them; each panel with its two numbers."""
    rows, columns = (EXACT_PREDICTOR, *config.methods), (*config.sampling_steps, 0)
    figure, axes = canvas(1.75 * len(columns) + 0.6, 1.5 * len(rows) + 0.7, len(rows), len(columns))
    (x_low, x_high), (y_low, y_high) = ((edge[0].item(), edge[-1].item()) for edge in moons.edges)
    top = float(moons.histogram.max())
    found = {(cell.method, cell.steps): cell for cell in cells}
    for i, spec in enumerate(rows):
        for j, steps in enumerate(columns):
            key = (spec, steps) if steps else (DATA, 0)
            axis, cell = axes[i][j], found[key]
            picture = pictures[key].T.numpy()
            axis.imshow(
                picture**0.5,
                origin="lower",
                extent=(x_low, x_high, y_low, y_high),
                cmap="magma_r",
                vmin=0,
                vmax=top**0.5,
                aspect="auto",
                interpolation="nearest",
            )
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_xlabel(f"on {cell.manifold:.2f}   TV {cell.tv:.2f}", fontsize=8, labelpad=2)
            if i == 0:
                axis.set_title("data" if not steps else f"{steps} step{'s' * (steps > 1)}", fontsize=10)
            if j == 0:
                name = "exact f*" if spec == EXACT_PREDICTOR else _title(spec)
                axis.set_ylabel(name, fontsize=9)
    figure.suptitle("Two moons: what each model draws in a number of steps", fontsize=11)
    figure.savefig(path, dpi=130)


def plot_consistency(gaps: dict[str, list[list[float | None]]], path: Path) -> None:
    """Path invariance by enumeration: the distance of f(x_t, t) from the mean of f(x_s, s), for every s < t."""
    figure, axes = canvas(2.6 * len(gaps) + 1.2, 3.6, 1, max(2, len(gaps)))
    grids = {spec: [[math.nan if x is None else x for x in row] for row in rows] for spec, rows in gaps.items()}
    top = max(x for grid in grids.values() for row in grid for x in row if not math.isnan(x))
    for axis, (spec, grid) in zip(axes[0], grids.items(), strict=False):
        axis.imshow(grid, origin="lower", cmap="viridis", vmin=0, vmax=top)
        axis.set_xticks(range(0, len(TIMES), 2), [f"{s:g}" for s in TIMES[::2]], fontsize=7)
        axis.set_yticks(range(0, len(TIMES), 2), [f"{t:g}" for t in TIMES[::2]], fontsize=7)
        seen = [x for row in grid for x in row if not math.isnan(x)]
        axis.set_title(
            f"{_title(spec) if spec != EXACT_PREDICTOR else 'exact f*'}\nmean {sum(seen) / len(seen):.3f}", fontsize=8
        )
        axis.set_xlabel("s", fontsize=8)
    axes[0][0].set_ylabel("t", fontsize=8)
    figure.colorbar(axes[0][0].images[0], ax=list(axes[0]), label="total variation", shrink=0.8)
    figure.suptitle("Path invariance: f(x_t, t) against the mean of f(x_s, s) over all bridges", fontsize=10)
    figure.savefig(path, dpi=130)


def _title(spec: str) -> str:
    method, choices = parse_method(spec)
    return "\n".join([method.name, *(f"{name} {value}" for name, value in choices.items())])


def _histogram(moons: Moons, tokens: Int[Tensor, "n l"]) -> Float[Tensor, "bins bins"]:
    column, row = moons.decode(tokens).unbind(-1)
    count = torch.bincount(column * moons.bins + row, minlength=moons.bins**2)
    return (count / count.sum()).double().view(moons.bins, moons.bins)


def _measure(
    moons: Moons, method: str, steps: int, drawn: Float[Tensor, "bins bins"], law: Float[Tensor, "all"]
) -> MoonsCell:
    column, row = moons.decode(listed(moons.vocab, moons.length)).unbind(-1)
    return MoonsCell(
        method=method,
        steps=steps,
        manifold=float(drawn[moons.manifold].sum()),
        tv=float((drawn - moons.histogram).abs().sum() / 2),
        manifold_law=float(law[moons.manifold[column, row]].sum()),
        tv_law=float((law - moons.law).abs().sum() / 2),
    )
