"""Sudoku: every method at equal tokens beside exact references (docs/sudoku.md).

    python -m studies.sudoku --side 4 --device cuda --jobs 16 --minutes 5
    python -m studies.sudoku --page

Rows run in processes of their own, `--jobs` at a time. A row trains (in two stages where a method distils a base: two
thirds of the steps, then one third), is evaluated, and is finished as soon as its directory under --out has done.json.
Rows that are finished are not computed again; what still runs when the minutes are over is stopped, and the next call
starts it anew, or only evaluates it if it was trained. `--page` fills docs/sudoku.md from the finished rows.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from rich.console import Console
from torch import Tensor

from cdlm.data.config import PrepareConfig
from cdlm.data.prepare import prepare
from cdlm.data.sudoku import ExactSudoku, sample_grids
from cdlm.eval.config import EvalConfig
from cdlm.eval.results import FORMAT, append_row, row_key
from cdlm.eval.sudoku import measure_grids
from cdlm.eval.sweep import evaluate
from cdlm.methods import METHODS, Method
from cdlm.model.denoiser import Denoiser
from cdlm.objective.coupling import Bridge
from cdlm.objective.divergence import rate_kl
from cdlm.objective.loss import Objective, Term
from cdlm.objective.target import Data
from cdlm.objective.times import MAX_STEP
from cdlm.process import Process, masked
from cdlm.rng import Rng, seeded
from cdlm.sample.settings import resolve
from cdlm.schedules import PAPER_STEPS, Schedule
from cdlm.train.config import TrainConfig
from cdlm.train.loop import train
from cdlm.train.recipes import BASES, RECIPES, SUDOKU_RATE
from cdlm.types import Pair, Time

DONE = "done.json"
STEPS = {4: (1, 2, 4, 8, 16), 6: (2, 4, 8, 12, 18, 36)}
TRAIN_STEPS = {4: 1500, 6: 6000}
NUM_SAMPLES = {4: 4096, 6: 1024}
SEEDS = {4: (0, 1, 2), 6: (0, 1)}
EXACT = "exact"
ROWS = {
    4: ("ar", "mdlm", "udlm", "duo", "mcdlm", "mcdlm-pplopt", "ucdlm", "sdtt", "duo-dcd"),
    6: ("mdlm", "mcdlm"),
}
"""Methods that are trained from every seed."""
EXTRA = {4: ("mcdlm-guided", "mdlm-bell", "mdlm-adaptive"), 6: ("mcdlm-guided",)}
"""Rows of the first seed alone."""
CONTROLS: dict[str, dict[str, Any]] = {
    "temperature 0.7": {"temperature": (0.7,)},
    "greedy": {"top_k": (1,)},
    "greedy final step": {"final_step": ("argmax",)},
    "equal steps": {"step_size": ("equal",)},
    "grid order": {"order": ("grid",), "step_size": ("equal",)},
    "most certain first": {"order": ("margin",)},
}
"""Samplers besides the plain ancestral one, for the first seed."""
MASKED_ONLY = ("equal steps", "grid order", "most certain first")
BINS = 50
UNIFORM_SHARE = 0.25
"""Of the densities of times: it bounds the weights, which are their inverse, by 4."""


@dataclasses.dataclass(frozen=True)
class DensityTimes:
    """Times t with a density other than uniform, for the max-step boundary (s = 0): `edges` are its quantiles."""

    edges: tuple[float, ...]
    low: Schedule = MAX_STEP.low
    high: Schedule = MAX_STEP.high

    def __call__(self, progress: float, stratum: Int[Tensor, "b"], strata: int, rng: Rng) -> tuple[Time, Time]:
        _, u = MAX_STEP(progress, stratum, strata, rng)
        edges, place = torch.tensor(self.edges, dtype=torch.float64), u * (len(self.edges) - 1)
        first = place.floor().long().clamp(max=len(edges) - 2)
        t = edges[first] + (place - first) * (edges[first + 1] - edges[first])
        return torch.zeros_like(t), t.clamp(min=MAX_STEP.floor)

    def weight(self, pair: Pair) -> Float[Tensor, "n"]:
        """1 / density: the objective stays what it is, only its variance changes."""
        edges = torch.tensor(self.edges, dtype=torch.float64, device=pair.t.device)
        first = (torch.searchsorted(edges, pair.t, right=True) - 1).clamp(0, len(edges) - 2)
        return (edges[first + 1] - edges[first]) * (len(edges) - 1)

    def __str__(self) -> str:
        return "max step, at times of another density"


def quantiles(density: Float[Tensor, "bins"]) -> tuple[float, ...]:
    """Quantiles of a density given on equal bins of [0, 1], mixed with the uniform one."""
    mixed = UNIFORM_SHARE + (1 - UNIFORM_SHARE) * density / density.mean()
    cdf = torch.cat([torch.zeros(1, dtype=torch.float64), (mixed / mixed.sum()).cumsum(0)])
    grid = torch.linspace(0, 1, len(cdf), dtype=torch.float64)
    u = torch.linspace(0, 1, 2 * len(density) + 1, dtype=torch.float64)
    after = torch.searchsorted(cdf, u).clamp(1, len(cdf) - 1)
    share = (u - cdf[after - 1]) / (cdf[after] - cdf[after - 1])
    inner = (grid[after - 1] + share * (grid[after] - grid[after - 1]))[1:-1]
    return (0.0, *inner.tolist(), 1.0)


@functools.cache
def bell_quantiles() -> tuple[float, ...]:
    """Mid-heavy: a Beta(2, 2) density."""
    t = (torch.arange(BINS, dtype=torch.float64) + 0.5) / BINS
    return quantiles(6 * t * (1 - t))


@functools.cache
def adaptive_quantiles(side: int = 4, num_grids: int = 288) -> tuple[float, ...]:
    """Proportional to the slope of the loss over t, where it rises: here of the exact denoiser, known beforehand."""
    exact, process = Denoiser(ExactSudoku(side), masked(side + 1)), masked(side + 1)
    x0 = sample_grids(side, num_grids, seed=0, valid=True)
    losses = []
    for number, t in enumerate(torch.linspace(0.01, 1, BINS + 1, dtype=torch.float64)):
        x = process.corrupt(x0, t.expand(num_grids), seeded(0, "profile", number, batch=num_grids))
        nats = -exact(x, float(t)).gather(-1, x0[..., None])[..., 0][x == process.vocab]
        losses.append(nats.mean())
    smooth = torch.nn.functional.avg_pool1d(torch.stack(losses)[None, None], 5, 1, 2, count_include_pad=False)[0, 0]
    return quantiles(smooth.diff().clamp(min=0))


def at_times(process: Process, total: int, edges: tuple[float, ...]) -> Objective:
    """MDLM at times of another density."""
    times = DensityTimes(edges)
    return Objective((Term("nelbo", times, Bridge(process), Data(), rate_kl, times.weight),), total)


def register() -> None:
    """Add the methods of this study to the table."""

    def bell(process: Process, total: int = PAPER_STEPS) -> Objective:
        return at_times(process, total, bell_quantiles())

    def adaptive(process: Process, total: int = PAPER_STEPS) -> Objective:
        return at_times(process, total, adaptive_quantiles())

    METHODS["mdlm-bell"] = Method("MDLM, bell-shaped times", bell, "masked")
    METHODS["mdlm-adaptive"] = Method("MDLM, adaptive times", adaptive, "masked")


@dataclasses.dataclass(frozen=True)
class Row:
    side: int
    method: str
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.side}-{self.method}" + (f"-{self.seed}" if self.seed else "")


def study_rows(side: int) -> dict[str, Row]:
    """The exact denoiser, then every method from the first seed, and so on: what is left out last is least missed."""
    rows = [Row(side, EXACT)]
    for seed in SEEDS[side]:
        rows += [Row(side, method, seed) for method in ROWS[side]]
        rows += [Row(side, method) for method in EXTRA[side] if not seed]
    return {row.name: row for row in rows}


def train_row(row: Row, options: argparse.Namespace) -> Path:
    """Train the stages of a row that are not trained yet; returns the last run directory."""
    base = BASES.get(row.method)
    stages = [(base, round(options.steps * 2 / 3)), (row.method, options.steps - round(options.steps * 2 / 3))]
    previous: Path | None = None
    for method, steps in stages if base else [(row.method, options.steps)]:
        assert method is not None
        config = train_config(row, method, steps, previous, options)
        train(config, resume="auto")
        previous = config.out
    assert previous is not None
    return previous


def train_config(row: Row, method: str, steps: int, start: Path | None, options: argparse.Namespace) -> TrainConfig:
    """The recipe of a method, at the size of the study."""
    recipe = RECIPES[f"sudoku-{row.side}-{'mdlm' if method.startswith('mdlm-') else method}"].config
    return dataclasses.replace(
        recipe,
        method=method if method.startswith("mdlm-") else recipe.method,
        data=options.scratch / f"data-{row.side}",
        out=options.scratch / row.name / f"{method}-{steps}",
        init_from=start,
        steps=steps,
        learning_rate=recipe.learning_rate * options.learning_rate / SUDOKU_RATE,
        seed=row.seed,
        device=options.device,
        log_every=max(1, steps // 10),
        valid_every=0,
        valid_samples=1,
        save_every=steps,
    )


def sweeps(row: Row, num_samples: int) -> list[dict[str, Any]]:
    """The plain sampler; from the first seed also the controls, with a quarter of the samples."""
    process = METHODS[row.method].process
    found: list[dict[str, Any]] = [{"num_samples": num_samples}]
    for name, control in CONTROLS.items() if not row.seed else ():
        if process == "none" and name not in ("temperature 0.7", "greedy"):
            continue
        if process == "uniform" and name in MASKED_ONLY:
            continue
        found.append({**control, "num_samples": max(2, num_samples // 4)})
    return found


def run_row(row: Row, options: argparse.Namespace) -> None:
    """Train and evaluate one row; done.json comes last."""
    register()
    torch.manual_seed(0)
    out, began = options.out / row.name, time.perf_counter()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    if row.method == EXACT:
        measure_exact(row, out, options)
    else:
        run = train_row(row, options)
        for name in ("run.json", "metrics.jsonl"):
            shutil.copyfile(run / name, out / name)
        trained = time.perf_counter() - began
        for sweep in sweeps(row, options.num_samples):
            likelihood = {"likelihood_samples": options.likelihood_samples, "steps": STEPS[row.side]}
            about = {"tasks": ("sudoku",), "batch_size": 4096, "device": options.device, "seed": row.seed}
            evaluate(EvalConfig(models=(f"{row.method}={run}",), out=out, **{**likelihood, **about, **sweep}))
        print(f"{row.name}: trained in {trained:.0f} s, {time.perf_counter() - began:.0f} s in all")
    seconds = round(time.perf_counter() - began, 1)
    (out / DONE).write_text(json.dumps({"steps": options.steps, "seed": row.seed, "seconds": seconds}) + "\n")


def measure_exact(row: Row, out: Path, options: argparse.Namespace) -> None:
    """The references, by our samplers with the exact denoiser."""
    process = masked(row.side + 1)
    denoiser = Denoiser(ExactSudoku(row.side), process)
    num_samples = options.num_samples if row.side == 4 else options.num_samples // 2
    for given in ({}, *({name: values[0] for name, values in CONTROLS[key].items()} for key in MASKED_ONLY)):
        for steps in STEPS[row.side]:
            settings = resolve({"steps": steps, **given}, process)
            found = measure_grids(
                denoiser,
                row.side,
                settings,
                num_samples=num_samples,
                likelihood_samples=options.likelihood_samples if row.side == 4 else 2,
            )
            fields = {
                "format": FORMAT,
                "task": "sudoku",
                "model": EXACT,
                "model_hash": row.name,
                "process": process.name,
                "vocab_size": row.side + 1,
                "max_length": row.side**2,
                "num_samples": num_samples,
                "seed": 0,
                "dtype": "float64",
                "likelihood_samples": options.likelihood_samples,
                "sampling": dataclasses.asdict(settings),
            }
            append_row(out, {**fields, **found, "key": row_key(fields)})


def run_all(rows: Sequence[Row], options: argparse.Namespace) -> bool:
    """Run rows in processes until all are finished or the time is over; whether all are."""
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else math.inf
    waiting = [row for row in rows if not (options.out / row.name / DONE).is_file()]
    print(f"{len(rows) - len(waiting)} of {len(rows)} rows are finished; {options.jobs} at a time", flush=True)
    data = options.scratch / f"data-{options.side}"
    if waiting and not (data / "meta.json").is_file():
        prepare(PrepareConfig((), data, source=f"sudoku-{options.side}"), Console(quiet=True))  # type: ignore[arg-type]
    running: dict[subprocess.Popen[bytes], Row] = {}
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < options.jobs:
                row = waiting.pop(0)
                running[start(row, options)] = row
            time.sleep(0.2)
            for process in [process for process in running if process.poll() is not None]:
                row = running.pop(process)
                ended = "finished" if process.returncode == 0 else f"failed, see {log_of(row, options)}"
                print(f"{row.name} {ended}; {len(waiting) + len(running)} rows left", flush=True)
    finally:
        for process in running:
            process.kill()
        for process, row in running.items():
            process.wait()
            shutil.rmtree(options.out / row.name, ignore_errors=True)
    left = [row.name for row in rows if not (options.out / row.name / DONE).is_file()]
    if left:
        print(f"not finished: {', '.join(left)}; run the same command again", flush=True)
    return not left


def start(row: Row, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """A process for one row; what it prints goes to a file."""
    command = [sys.executable, "-m", "studies.sudoku", "--row", row.name]
    for name in ("side", "out", "scratch", "device", "steps", "num_samples", "likelihood_samples", "learning_rate"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    path = log_of(row, options)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )


def log_of(row: Row, options: argparse.Namespace) -> Path:
    path: Path = options.scratch / f"{row.name}.log"
    return path


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=4, choices=(4, 6))
    parser.add_argument("--out", type=Path, default=Path("studies/results/sudoku"), help="a directory for every row")
    parser.add_argument("--scratch", type=Path, default=Path("runs/sudoku"), help="data, weights and logs")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time")
    parser.add_argument("--minutes", type=float, default=0, help="stop after so many minutes; 0: when all is done")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="some rows only, such as 4-mdlm 4-mdlm-1")
    parser.add_argument("--steps", type=int, help="of training, both stages together, of 256 grids each [1500; 6000]")
    parser.add_argument("--num-samples", type=int, help="samples per cell [4096; 1024]")
    parser.add_argument("--likelihood-samples", type=int, default=32, help="noise levels per grid")
    parser.add_argument("--learning-rate", type=float, default=SUDOKU_RATE)
    parser.add_argument("--page", action="store_true", help="fill docs/sudoku.md instead")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.steps = options.steps or TRAIN_STEPS[options.side]
    options.num_samples = options.num_samples or NUM_SAMPLES[options.side]
    known = study_rows(options.side)
    for name in options.rows or ():
        if name not in known:
            parser.error(f"unknown row {name!r}; choose from {', '.join(known)}")
    return options


def main() -> None:
    options = parse()
    rows = study_rows(options.side)
    if options.page:
        from studies.sudoku_page import write_page

        write_page(options.out)
    elif options.row:
        run_row(rows[options.row], options)
    else:
        finished = run_all([rows[name] for name in options.rows or rows], options)
        sys.exit(0 if finished else 3)


if __name__ == "__main__":
    main()
