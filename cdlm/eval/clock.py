"""How long an evaluation takes: an estimate before it starts, the time left while it runs, a line for each cell."""

import time
from collections.abc import Sequence
from types import TracebackType

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from cdlm.eval.grid import Cell, EvalConfig, describe
from cdlm.eval.judge import Judge, pace
from cdlm.eval.results import Row
from cdlm.sample import Sampling, State
from cdlm.sample.generate import STEPS
from cdlm.text import Model


class Clock:
    """Knows what each cell should take, and learns from what the finished ones took."""

    def __init__(self, missing: Sequence[Cell], config: EvalConfig, judges: Sequence[Judge], console: Console) -> None:
        self.console, self.config = console, config
        with console.status("measuring how fast models and judges are"):
            lengths = {id(cell.model): config.length or cell.model.length for cell in missing}
            models = {id(cell.model): cell.model for cell in missing}
            passes = {key: evaluation(model, lengths[key], config) for key, model in models.items()}
            speed = [pace(judge, min(judge.window, max(lengths.values()))) for judge in judges] if missing else []
        reading = sum(1 / tokens for tokens in speed)
        self.estimate = {
            cell: _seconds(cell, config, passes[id(cell.model)], lengths[id(cell.model)], reading) for cell in missing
        }
        for judge, tokens in zip(judges, speed, strict=False):
            console.print(f"judge {judge.label}: {tokens:,.0f} tokens/s", highlight=False, markup=False)
        if missing:
            total = minutes(sum(self.estimate.values()))
            console.print(f"{len(missing)} cells to compute, about {total}", highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.progress.add_task("", total=max(1e-9, sum(self.estimate.values())), left="")
        self.spent = self.planned = 0.0
        self.finished = self.size = 0

    def __enter__(self) -> "Clock":
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def begin(self, cell: Cell) -> None:
        self.began, self.finished, self.size, self.current = time.perf_counter(), 0, 0, cell
        self.progress.update(self.task, description=cell.name, left=self.left())

    def show(self, state: State, batch: int) -> None:
        """The bar moves with the steps of each batch of texts."""
        if not state.step:
            self.finished, self.size = self.finished + self.size, batch
        part = (self.finished + self.size * state.step / max(1, state.steps or 0, state.step)) / self.config.count
        done = self.planned + 0.8 * min(1.0, part) * self.estimate[self.current]
        self.progress.update(self.task, completed=done)

    def read(self, texts: int) -> None:
        """The rest of the bar is the judges'."""
        share = 0.2 * self.estimate[self.current] / (self.config.count * max(1, len(self.config.judge)))
        self.progress.advance(self.task, texts * share)

    def tell(self, row: Row) -> None:
        self.console.print(summary(row), highlight=False, markup=False)

    def end(self, cell: Cell) -> None:
        self.spent += time.perf_counter() - self.began
        self.planned += self.estimate[cell]
        rest = sum(self.estimate.values()) - self.planned
        if rest > 1e-9:
            self.console.print(f"    {self.left()}", highlight=False)
        self.progress.update(self.task, completed=self.planned)

    def left(self) -> str:
        """The estimate of what is to come, corrected by how wrong it was so far."""
        rest = sum(self.estimate.values()) - self.planned
        return f"{minutes(rest * (self.spent / self.planned if self.planned else 1.0))} left"


@torch.no_grad()
def evaluation(model: Model, length: int, config: EvalConfig) -> float:
    """Seconds that one evaluation of one text takes, in batches as large as they will be."""
    batch = min(config.batch, config.count)
    began = time.perf_counter()
    if model.denoiser.process is None:  # a token after the cached ones
        list(model.write(model.continuations([""], batch, min(length, 9)), Sampling(), batch=batch))
        return (time.perf_counter() - began) / batch / 8
    hidden = model.denoiser.features(
        torch.zeros(batch, length, dtype=torch.long), torch.full((batch,), 0.5, dtype=torch.float64)
    )
    float(hidden.flatten()[0])  # waits for it
    return (time.perf_counter() - began) / batch


def _seconds(cell: Cell, config: EvalConfig, one: float, length: int, reading: float) -> float:
    if cell.task == "likelihood":
        return one * config.count * config.times
    if cell.task == "consistency":
        return one * (config.count * 8 + 16 * 64 * 3)
    causal = cell.model.denoiser.process is None
    steps = length if causal or (cell.how and cell.how.order == "first-hitting") else cell.how and cell.how.steps
    texts = 2 if cell.task == "conditional" or config.reference else 1
    return config.count * (one * min(steps or STEPS, length) + texts * length * reading)


def summary(row: Row) -> str:
    """A finished cell in one line."""
    where = f" on {row['set']}" if "set" in row else ""
    name = f"{row['model']}{where}"
    if row["task"] == "likelihood":
        low, high = row["nelbo_interval"]
        kind = "NLL (exact)" if row["exact"] else "NELBO"
        text = f"{name}: {kind} {row['nelbo']:.4f} [{low:.4f}, {high:.4f}] nats a token"
        return f"{text}, perplexity {row['nelbo_ppl']:.2f}"
    if row["task"] == "consistency":
        tv = "; ".join(f"({p['t']:g} to {p['s']:g}) {p['own_chain_tv']:.4f}" for p in row["pairs"] if p["s"])
        return f"{name}: TV from its own chain {tv}"
    low, high = row["ppl_interval"]
    settings = ", ".join(describe(Sampling(**row["sampling"])))
    text = f"{name}, {settings}: {row['judge']} {row['ppl']:.1f} [{low:.1f}, {high:.1f}], entropy {row['entropy']:.2f}"
    text += f", BLEU-2 {row['bleu2']:.1f}" if "bleu2" in row else ""
    few = f" ({row['num']} texts: too few)" if row.get("mauve_warning") else ""
    text += f", MAUVE {row['mauve']:.2f}{few}" if "mauve" in row else ""
    text += " (the judge itself: not comparable)" if row.get("own_judge") else ""
    return f"{text}; read at {row['judge_tokens_per_second']:,.0f} tokens/s"


def table(rows: Sequence[Row]) -> Table:
    """All cells."""
    shown = Table()
    for heading in ("model", "task", "settings", "judge", "perplexity [95 %]", "entropy", "NFE", "texts", "more"):
        shown.add_column(heading)
    for row in rows:
        where = f" on {row['set']}" if "set" in row else ""
        if "ppl" not in row:
            shown.add_row(
                row["model"], row["task"] + where, "", "", "", "", "", str(row["num"]), summary(row).partition(": ")[2]
            )
            continue
        low, high = row["ppl_interval"]
        more = [f"BLEU-2 {row['bleu2']:.1f}"] if "bleu2" in row else []
        more += [f"MAUVE {row['mauve']:.2f}"] if "mauve" in row else []
        more += [f"references {row['reference_ppl']:.1f}"] if "reference_ppl" in row else []
        shown.add_row(
            row["model"],
            row["task"] + where,
            ", ".join(describe(Sampling(**row["sampling"]))),
            row["judge"],
            f"{row['ppl']:.1f} [{low:.1f}, {high:.1f}]",
            f"{row['entropy']:.2f}",
            f"{row['nfe']:.4g}",
            str(row["num"]),
            ", ".join(more),
        )
    return shown


def minutes(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
