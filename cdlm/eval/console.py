"""What `cdlm eval` prints: a line for each finished cell, a table of all, and a bar with the time that is left."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from cdlm.eval.cells import Cell
from cdlm.eval.config import EvalConfig
from cdlm.eval.results import Row
from cdlm.sample.settings import Settings, describe_settings


def progress(console: Console) -> Progress:
    """A bar over the work of all cells; silent where there is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    shown = console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=not shown, speed_estimate_period=3600)


JUDGING = 0.25
"""How much of the bar a judge takes, beside the sampling of the same texts."""


def work(cell: Cell, config: EvalConfig) -> float:
    """What the bar measures: passes over the network that a cell takes, and a share more for each judge."""
    length = config.max_length or cell.model.max_length
    if cell.task == "likelihood":
        return config.count * config.times
    if cell.task == "consistency":
        return config.count * 8 + 16 * 64 * 3
    causal = cell.model.denoiser.process is None
    steps = cell.settings.steps if cell.settings and not causal else None
    judges = len([name for name in config.judge if name != "none"])
    return config.count * min(steps or length, length) * (1 + JUDGING * judges)


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
    settings = ", ".join(describe_settings(Settings(**row["sampling"])))
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
                row["model"],
                row["task"] + where,
                "",
                "",
                "",
                "",
                "",
                str(row["num_samples"]),
                summary(row).partition(": ")[2],
            )
            continue
        low, high = row["ppl_interval"]
        more = [f"BLEU-2 {row['bleu2']:.1f}"] if "bleu2" in row else []
        more += [f"MAUVE {row['mauve']:.2f}"] if "mauve" in row else []
        more += [f"references {row['reference_ppl']:.1f}"] if "reference_ppl" in row else []
        shown.add_row(
            row["model"],
            row["task"] + where,
            ", ".join(describe_settings(Settings(**row["sampling"]))),
            row["judge"],
            f"{row['ppl']:.1f} [{low:.1f}, {high:.1f}]",
            f"{row['entropy']:.2f}",
            f"{row['nfe']:.4g}",
            str(row["num_samples"]),
            ", ".join(more),
        )
    return shown


def minutes(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
