"""What `cdlm eval` prints: a line for each finished cell, a table of all rows, and a bar with the remaining time."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from cdlm.eval.cells import EvalCell, bounded_samplers
from cdlm.eval.config import EvalConfig
from cdlm.eval.results import ResultRow
from cdlm.sample.draw import State
from cdlm.sample.settings import Settings, describe_settings

JUDGE_COST = 0.25
"""The cost of scoring samples by a judge, relative to that of generating them."""


class CellProgress:
    """A bar over the cost of all rows; where there is no terminal, the remaining time after each."""

    def __init__(self, console: Console, total: float) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self.console = console
        self.bar = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal, speed_estimate_period=3600
        )
        self.task = self.bar.add_task("", total=total)
        self.done = self.cost = 0.0

    def __enter__(self) -> "CellProgress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def begin(self, name: str, cost: float) -> None:
        self.cost = cost
        self.bar.update(self.task, description=name)

    def finish(self) -> None:
        self.done += self.cost
        self.bar.update(self.task, completed=self.done)
        remaining = self.bar.tasks[0].time_remaining
        if remaining and not self.console.is_terminal:
            self.console.print(f"    about {format_duration(remaining)} left", highlight=False)

    def callbacks(
        self, num_samples: int, judges: int, generated: bool = True
    ) -> tuple[Callable[[State, int], None], Callable[[int], None]]:
        """Callbacks that advance the bar after a step of a batch, and after the scoring of some samples."""
        judging = JUDGE_COST * judges / (1 + JUDGE_COST * judges) if generated else 1.0
        per_sample = self.cost / num_samples

        def on_state(state: State, batch_size: int) -> None:
            if state.step and state.num_steps:
                self.bar.advance(self.task, batch_size * per_sample * (1 - judging) / state.num_steps)

        def on_score(num_scored: int) -> None:
            self.bar.advance(self.task, num_scored * per_sample * judging / max(1, judges))

        return on_state, on_score


def cell_cost(cell: EvalCell, config: EvalConfig) -> float:
    """Network evaluations that a cell takes, and a share of them for each judge: what the bar measures."""
    length = config.max_length or cell.model.max_length
    if cell.task == "likelihood":
        bounds = len(bounded_samplers(config, cell.model)[0])
        return config.samples_per_cell * config.likelihood_samples * (1 + bounds)
    if cell.task == "infilling":
        assert cell.settings is not None
        return config.samples_per_cell * 3 * min(cell.settings.steps or length, length)
    if cell.task == "consistency":
        return config.samples_per_cell * 8 + 16 * 64 * 3
    steps = cell.settings.steps if cell.settings else None
    return config.samples_per_cell * min(steps or length, length) * (1 + JUDGE_COST * num_judges(config))


def num_judges(config: EvalConfig) -> int:
    return sum(name != "none" for name in config.judge)


def summarize_row(row: ResultRow) -> str:
    """A row in one line."""
    name = row["model"] + (f" on {row['dataset']}" if "dataset" in row else "")
    if row["task"] == "likelihood":
        low, high = row["nelbo_interval"]
        kind = "NLL (exact)" if row["exact"] else "NELBO"
        text = f"{name}: {kind} {row['nelbo']:.4f} [{low:.4f}, {high:.4f}] nats a token"
        return f"{text}, perplexity {row['nelbo_ppl']:.2f}"
    if row["task"] == "infilling":
        parts = [
            f"{part['mask_rate']:.0%} masked: tokens {part['token_match']:.1%}, spans {part['span_match']:.1%}, NFE "
            f"{part['nfe']:.3g}"
            for part in row["infilling"]
        ]
        return f"{', '.join([name, *_settings_in_words(row)])}: {'; '.join(parts)}"
    if row["task"] == "consistency":
        tv = "; ".join(f"({p['t']:g} to {p['s']:g}) {p['own_chain_tv']:.4f}" for p in row["pairs"] if p["s"])
        return f"{name}: TV from its own chain {tv}"
    if row["task"] == "sudoku":
        return _summarize_sudoku(row)
    if row["protocol"] == "distributional":
        scores = ", ".join(f"{column} {found['z']:+.1f}" for column, found in row["columns"].items())
        return f"{', '.join([name, *_settings_in_words(row)])}: z {scores}"
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
            words = ", ".join(_settings_in_words(row)) if "sampling" in row else ""
            nfe = f"{row['nfe']:.4g}" if row["task"] == "sudoku" else ""
            found = summarize_row(row).partition(": ")[2]
            table.add_row(row["model"], task, words, "", "", "", nfe, num_samples, found)
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


def sampler_bounds_table(rows: Sequence[ResultRow]) -> Table | None:
    """The bounds of samplers of few steps, and by how much they exceed the NELBO of the model."""
    bounds = [(row, bound) for row in rows for bound in row.get("few_step") or []]
    if not bounds:
        return None
    table = Table("model", "texts", "sampler", "nats per token [95 %]", "MC error", "gap to the NELBO [95 %]")
    for row, bound in bounds:
        sampling = bound.get("sampling")
        words = describe_settings(Settings(**sampling)) if sampling else [f"{bound['steps']} steps", bound["order"]]
        table.add_row(row["model"], row["dataset"], ", ".join(words), *_bound_cells(bound))
    return table


def _bound_cells(bound: ResultRow) -> tuple[str, str, str]:
    """A bound, its Monte Carlo error and its gap; older rows have neither of the last two."""
    if bound["nelbo"] is None:
        return "infinite", "", ""
    error, gap = bound.get("monte_carlo_error"), bound.get("gap")
    low, high = bound["interval"]
    value = f"{bound['nelbo']:.3f} [{low:.3f}, {high:.3f}]"
    if gap is None:
        return value, "", ""
    low, high = bound["gap_interval"]
    return value, "" if error is None else f"{error:.3f}", f"{gap:+.3f} [{low:+.3f}, {high:+.3f}]"


def _settings_in_words(row: ResultRow) -> list[str]:
    """The settings of a row; human text has none."""
    return describe_settings(Settings(**row["sampling"])) if row["sampling"] else []


def format_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
