"""What the studies share: a row is trained, writes, and is read; then its weights may go.

Rows that others need (a judge, a base to start from) only train, and their weights stay.

Every row has a folder of its own under --out with run.json, metrics.jsonl, results.jsonl and samples/. A row that is
finished is not computed again, so a study that was stopped goes on; and several processes may share a GPU, each with
other rows.
"""

import argparse
import contextlib
import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from cdlm.eval.config import EvalConfig
from cdlm.eval.sweep import evaluate
from cdlm.train.config import TrainConfig
from cdlm.train.loop import train
from cdlm.train.recipes import RECIPES

FULL = 2000
"""Steps of a `small-` recipe."""
DONE = "done.json"
EXTRA = 0.25
"""Of the steps of a whole run: what a trial trains on from a base."""


@dataclasses.dataclass(frozen=True)
class StudyRow:
    """A model of a study: its recipe, what it is distilled from, and what it is asked to do."""

    label: str
    recipe: str
    base: str | None = None
    """The recipe of the first two thirds of the run, where this one is the last third."""
    start: str | None = None
    """A kept row that this one starts from."""
    share: float = 1.0
    """Of the steps of the recipe."""
    data: str | None = None
    """A folder of tokens in --scratch, in options of --data."""
    kept: bool = False
    """Only train, and keep the weights for others."""
    method: str | None = None
    """Another choice of the recipe's method, such as mcdlm:anchor=jsd."""
    seed: int = 0
    network: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Changes of the recipe's network."""
    tasks: tuple[dict[str, Any], ...] = ()
    """Sweeps for `evaluate`."""


JUDGE = StudyRow("judge", "small-ar", seed=1, kept=True)
BASES = {
    "base": StudyRow("base", "small-mdlm", kept=True),
    "base-1": StudyRow("base-1", "small-mdlm", seed=1, kept=True),
    "base-2": StudyRow("base-2", "small-mdlm", seed=2, kept=True),
    "base-u": StudyRow("base-u", "small-udlm", kept=True),
}
"""Rows of the study's main table that trials start from: MDLM, twice more from other seeds, and UDLM."""


@dataclasses.dataclass(frozen=True)
class StudyOptions:
    """The options of a study: where it finds and leaves things, and how large it is."""

    data: Path
    texts: Path
    out: Path
    scratch: Path
    judge: Path
    steps: int
    num_samples: int
    device: str
    small: bool


def parse_arguments(about: str | None, rows: Sequence[str], out: str) -> tuple[list[str], StudyOptions]:
    """The options of every study."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder written by cdlm prepare")
    parser.add_argument("--texts", type=Path, required=True, help="folder with valid.txt and the evaluation sets")
    parser.add_argument("--out", type=Path, default=Path(out), help="directory for a directory per row")
    parser.add_argument("--scratch", type=Path, default=Path("runs/studies"), help="folder for weights")
    parser.add_argument(
        "--judge", type=Path, help="a run of ar of another seed [trained in --scratch by the row judge]"
    )
    parser.add_argument(
        "--rows", nargs="+", default=list(rows), choices=list(rows), metavar="ROW", help=", ".join(rows)
    )
    parser.add_argument("--steps", type=int, default=FULL, help="of a whole run, of 65,536 tokens each; half for ar")
    parser.add_argument("--num-samples", type=int, default=128, help="samples per cell")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="try the script: a tiny network, tiny batches")
    args = parser.parse_args()
    for folder in (args.data, args.texts):
        if not folder.is_dir():
            parser.error(f"there is no folder {folder}")
    judge = args.judge or args.scratch / "judge"
    options = StudyOptions(
        args.data, args.texts, args.out, args.scratch, judge, args.steps, args.num_samples, args.device, args.small
    )
    return args.rows, options


def run_row(name: str, row: StudyRow, options: StudyOptions) -> None:
    """Train a row, have it do its tasks, keep the numbers, drop the weights; nothing if that was done before."""
    out = options.out / name
    if (out / DONE).is_file():
        print(f"{name}: done before", flush=True)
        return
    began = time.perf_counter()
    run = train_row(name, row, options)
    between = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    for file in ("run.json", "metrics.jsonl"):
        shutil.copyfile(run / file, out / file)
    console = Console(width=160, highlight=False)
    for task in row.tasks:
        needed = task.get("judge", ()) != ("none",) and task.get("tasks") != ("likelihood",)
        sweep: dict[str, Any] = {
            "judge": (str(wait_for(options.judge)),) if needed else (),
            "num_samples": options.num_samples,
            "batch_size": min(64, options.num_samples),
            **task,
        }
        models = (f"{row.label}={run}",)
        evaluate(EvalConfig(models=models, out=out, device=options.device, **sweep), console)
    seconds = {"train": round(between - began, 1), "evaluate": round(time.perf_counter() - between, 1)}
    (out / DONE).write_text(json.dumps({"row": name, "label": row.label, "steps": options.steps, **seconds}) + "\n")
    for folder in (run, scratch_path(f"{name}-base", options)):
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{name}: {seconds['train']} s of training, {seconds['evaluate']} s of evaluation", flush=True)


def train_row(name: str, row: StudyRow, options: StudyOptions) -> Path:
    """The run of a row; two stages have two thirds and one third of the steps."""
    config = train_config(row, options, scratch_path(name, options), row.share)
    if row.start:
        wait_for(options.scratch / row.start)
    if row.base:
        first = dataclasses.replace(row, recipe=row.base, base=None, method=None)
        base = train_config(first, options, scratch_path(f"{name}-base", options), share=2 / 3)
        train(base, "auto")
        config = dataclasses.replace(config, init_from=base.out)
    train(config, "auto")
    return config.out


def scratch_path(name: str, options: StudyOptions) -> Path:
    """The weights of a row; studies that run beside each other may have rows of the same name."""
    return options.scratch / options.out.name / name


def train_config(row: StudyRow, options: StudyOptions, out: Path, share: float = 1.0) -> TrainConfig:
    """A recipe, in its proportion of the study's steps: decays and schedules keep their share of the run."""
    config = RECIPES[row.recipe].config
    config = dataclasses.replace(config, network=dataclasses.replace(config.network, **row.network))
    steps = max(1, round(config.steps * share * options.steps / FULL))
    changes: dict[str, Any] = {
        "steps": steps,
        "reference_steps": round(config.reference_steps * share),
        "seed": row.seed,
    }
    changes |= {
        "data": options.scratch / row.data if row.data else options.data,
        "out": out,
        "device": options.device,
        "method": row.method or config.method,
    }
    changes |= {"init_from": options.scratch / row.start} if row.start else {}
    changes |= {"valid_every": 0, "valid_samples": 0, "save_every": steps, "keep_checkpoints": 1, "log_every": 50}
    if options.small:
        network = dataclasses.replace(config.network, hidden_size=64, num_layers=2, num_heads=2, cond_dim=32)
        changes |= {
            "network": network,
            "batch_size": 4,
            "seq_length": 32,
            "dtype": "float32",
            "compile": False,
            "valid_batches": 1,
        }
    return dataclasses.replace(config, **changes)


def wait_for(run: Path, minutes: float = 15) -> Path:
    """A judge or a base, which another process may still be training."""
    until = time.monotonic() + 60 * minutes
    while not (run / DONE).is_file():
        if not run.is_dir() or time.monotonic() > until:
            other = ", or give --judge" if run.name == "judge" else ""
            raise SystemExit(f"there is no {run.name} in {run} yet: run --rows {run.name} first{other}")
        time.sleep(1)
    return run


def train_kept_row(name: str, row: StudyRow, options: StudyOptions) -> None:
    """Train a row whose weights stay."""
    out = options.judge if name == "judge" else options.scratch / name
    if not (out / DONE).is_file():
        train(train_config(row, options, out, row.share), "auto")
        (out / DONE).write_text("{}\n")


def run_rows(rows: dict[str, StudyRow], names: Sequence[str], options: StudyOptions) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        for name in names:
            (train_kept_row if rows[name].kept else run_row)(name, rows[name], options)


def run_study(about: str | None, rows: Callable[[Path], dict[str, StudyRow]], out: str) -> None:
    """A study as a command."""
    names, options = parse_arguments(about, list(rows(Path())), out)
    run_rows(rows(options.texts), names, options)
