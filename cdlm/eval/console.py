"""What `cdlm eval` prints: a line for each finished cell, a table of all rows, and a bar with the remaining time."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from cdlm.eval.cells import EvalCell
from cdlm.eval.config import EvalConfig
from cdlm.eval.results import ResultRow
from cdlm.sample.settings import Settings, describe_settings

JUDGE_COST = 0.25
"""The cost of scoring samples by a judge, relative to that of generating them."""


def progress_bar(console: Console) -> Progress:
    """A bar over the cost of all cells; silent where there is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, speed_estimate_period=3600
    )


def cell_cost(cell: EvalCell, config: EvalConfig) -> float:
    """Network evaluations that a cell takes, and a share of them for each judge: what the bar measures."""
    length = config.max_length or cell.model.max_length
    if cell.task == "likelihood":
        return config.samples_per_cell * config.likelihood_samples
    if cell.task == "consistency":
        return config.samples_per_cell * 8 + 16 * 64 * 3
    steps = cell.settings.steps if cell.settings else None
    judges = sum(name != "none" for name in config.judge)
    return config.samples_per_cell * min(steps or length, length) * (1 + JUDGE_COST * judges)


def summarize_row(row: ResultRow) -> str:
    """A row in one line."""
    name = row["model"] + (f" on {row['dataset']}" if "dataset" in row else "")
    if row["task"] == "likelihood":
        low, high = row["nelbo_interval"]
        kind = "NLL (exact)" if row["exact"] else "NELBO"
        text = f"{name}: {kind} {row['nelbo']:.4f} [{low:.4f}, {high:.4f}] nats a token"
        return f"{text}, perplexity {row['nelbo_ppl']:.2f}"
    if row["task"] == "consistency":
        tv = "; ".join(f"({p['t']:g} to {p['s']:g}) {p['own_chain_tv']:.4f}" for p in row["pairs"] if p["s"])
        return f"{name}: TV from its own chain {tv}"
    if row["task"] == "sudoku":
        return _summarize_sudoku(row)
    low, high = row["ppl_interval"]
    text = ", ".join([name, *_settings_in_words(row)])
    text += f": {row['judge']} {row['ppl']:.1f} [{low:.1f}, {high:.1f}], entropy {row['entropy']:.2f}"
    text += f", BLEU-2 {row['bleu2']:.1f}" if "bleu2" in row else ""
    few = f" ({row['num_samples']} samples: too few)" if row.get("mauve_warning") else ""
    text += f", MAUVE {row['mauve']:.2f}{few}" if "mauve" in row else ""
    text += " (the judge itself: not comparable)" if row.get("own_judge") else ""
    return f"{text}; scored at {row['judge_tokens_per_second']:,.0f} tokens/s"


def _summarize_sudoku(row: ResultRow) -> str:
    low, high = row["valid_interval"]
    text = f"{', '.join([row['model'], *_settings_in_words(row)])}: {row['valid']:.3f} valid [{low:.3f}, {high:.3f}]"
    if "tv" in row:
        text += f", TV {row['tv']:.3f} (uniform grids: {row['tv_null']:.3f})"
    elif "pair_tv" in row:
        text += f", pair TV {row['pair_tv']:.3f} (uniform grids: {row['pair_tv_null']:.3f})"
    text += f", {row['solved']:.3f} of the puzzles solved" if row["solved"] is not None else ""
    text += f", {row['nats']:.2f} nats a grid" if row["nats"] is not None else ""
    return text


def results_table(rows: Sequence[ResultRow]) -> Table:
    """All rows."""
    table = Table("model", "task", "settings", "judge", "perplexity [95 %]", "entropy", "NFE", "samples", "more")
    for row in rows:
        task = row["task"] + (f" on {row['dataset']}" if "dataset" in row else "")
        num_samples = str(row["num_samples"])
        if "ppl" not in row:
            settings = ", ".join(_settings_in_words(row)) if "sampling" in row else ""
            nfe = f"{row['nfe']:.4g}" if "nfe" in row else ""
            found = summarize_row(row).partition(": ")[2]
            table.add_row(row["model"], task, settings, "", "", "", nfe, num_samples, found)
            continue
        low, high = row["ppl_interval"]
        more = [f"BLEU-2 {row['bleu2']:.1f}"] if "bleu2" in row else []
        more += [f"MAUVE {row['mauve']:.2f}"] if "mauve" in row else []
        more += [f"references {row['reference_ppl']:.1f}"] if "reference_ppl" in row else []
        table.add_row(
            row["model"],
            task,
            ", ".join(_settings_in_words(row)),
            row["judge"],
            f"{row['ppl']:.1f} [{low:.1f}, {high:.1f}]",
            f"{row['entropy']:.2f}",
            f"{row['nfe']:.4g}",
            num_samples,
            ", ".join(more),
        )
    return table


def _settings_in_words(row: ResultRow) -> list[str]:
    """The settings of a row; human text has none."""
    return describe_settings(Settings(**row["sampling"])) if row["sampling"] else []


def format_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
