"""`cdlm eval`: every cell of a sweep is sampled, scored and kept; whatever stops it, finished cells are not lost."""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from cdlm.eval.cells import EvalCell, bounded_samplers, make_cells
from cdlm.eval.config import PAPER_SAMPLES, ROBUST_SAMPLES, EvalConfig, ReportConfig
from cdlm.eval.console import (
    CellProgress,
    cell_cost,
    format_duration,
    num_judges,
    results_table,
    sampler_bounds_table,
    summarize_row,
)
from cdlm.eval.distributional import distributional_rows, with_installed_judge
from cdlm.eval.measure import (
    infilling_templates,
    judge_fields,
    likelihood_samples,
    measure_consistency,
    measure_infilling,
    measure_likelihood,
    provenance,
    score_samples,
)
from cdlm.eval.report.distributional import distributional_table
from cdlm.eval.report.write import write_report
from cdlm.eval.results import (
    RESULTS,
    ResultRow,
    Samples,
    append_row,
    read_rows,
    read_samples,
    row_key,
    samples_by_key,
)
from cdlm.eval.sampling import cell_samples, is_clamped, model_fields, reference_of, samples_header
from cdlm.eval.scorer import Judge, open_judge
from cdlm.eval.sudoku import check_sudoku, measure_sudoku
from cdlm.files import alone_in
from cdlm.sample.draw import State
from cdlm.text.pipeline import load

UNJUDGED: dict[str, Callable[[EvalCell, EvalConfig], ResultRow]] = {
    "likelihood": measure_likelihood,
    "infilling": measure_infilling,
    "consistency": measure_consistency,
    "sudoku": measure_sudoku,
}
"""Tasks whose rows need no judge."""


def evaluate(config: EvalConfig, console: Console | None = None) -> list[ResultRow]:
    """Measure every cell of the sweep that is not finished yet; returns the rows of all its cells."""
    console = console or Console()
    models = {
        label: load(
            source,
            config.device,
            config.dtype,
            config.compile,
            config.tokenizer,
            bos_framed=config.bos_framed,
            trust_remote_code=config.trust_remote_code,
        )
        for label, source in config.sources()
    }
    cells, skipped = make_cells(config, models)
    if models and not cells:
        raise ValueError("no cell of this sweep can be computed: " + "; ".join(skipped))
    for reason in skipped:
        console.print(f"left out: {reason}", markup=False, highlight=False)
    for cell in cells:
        _check(cell, config)
    if config.protocol == "distributional":
        config = with_installed_judge(config, console)
    judges = [open_judge(name, config.device) for name in config.judge if name != "none"]
    if judges and config.samples_per_cell < ROBUST_SAMPLES and config.protocol == "robust":
        console.print(
            f"{config.samples_per_cell} samples per cell are few: intervals will be wide (robust numbers have "
            f"{ROBUST_SAMPLES})"
        )
    config.out.mkdir(parents=True, exist_ok=True)
    rows: list[ResultRow] = []
    with alone_in(config.out):
        finished = {row["key"]: row for row in _kept_rows(config.out)}
        try:
            if config.protocol == "distributional":
                rows.extend(distributional_rows(cells, config, judges or [None], finished, console))
            elif models:
                rows.extend(_evaluate_cells(cells, config, judges, finished, console))
            else:
                rows.extend(_score_again(config, judges, finished, console))
        except KeyboardInterrupt:
            kept = len(_kept_rows(config.out))
            console.print(f"interrupted; {config.out} keeps {kept} finished rows: run the same command to go on")
            sys.exit(130)
    if config.protocol == "distributional":
        console.print(distributional_table(rows))
        write_report(ReportConfig((config.out,), config.out / "report"), console)
        return rows
    if config.judge == ("none",):
        message = f"samples in {config.out / 'samples'}; next: cdlm eval --out {config.out} --judge JUDGE"
        console.print(message, highlight=False, markup=False)
    if rows:
        console.print(results_table(rows))
        bounds = sampler_bounds_table(rows)
        if bounds is not None:
            console.print(bounds)
        console.print(f"{len(rows)} cells in {config.out / RESULTS}; next: cdlm report {config.out}", highlight=False)
    return rows


def _kept_rows(out: Path) -> list[ResultRow]:
    return read_rows(out) if (out / RESULTS).exists() else []


def _check(cell: EvalCell, config: EvalConfig) -> None:
    """Refuse what cannot be measured, before a judge is opened."""
    model, length = cell.model, config.max_length or cell.model.max_length
    if not length:
        raise ValueError(f"{model.name} does not say how long its sequences are; give --max-length.")
    if model.max_length and length > model.max_length:
        raise ValueError(
            f"--max-length must be at most the {model.max_length} tokens that {cell.label} was trained on "
            f"(got {length})."
        )
    dataset = cell.dataset or reference_of(cell, config)
    if dataset is not None:
        dataset.blocks(model.tokenizer, length, model.bos_framed, config.samples_per_cell, config.seed)
    if cell.task == "sudoku":
        check_sudoku(cell, config)
        return
    if cell.settings is None:
        return
    if cell.is_judged and dataset is not None and config.samples_per_cell < 2:
        raise ValueError("--num-samples must be at least 2 for MAUVE, which compares two sets (got 1).")
    if cell.task == "infilling":
        model.check(infilling_templates([[0] * length]), cell.settings)
    elif cell.task == "unconditional":
        model.check(model.continuations([""], 1, length), cell.settings)
    else:
        model.check(model.perturbations([[0] * length], clamp=is_clamped(cell, config)), cell.settings)


def _evaluate_cells(
    cells: Sequence[EvalCell],
    config: EvalConfig,
    judges: Sequence[Judge],
    finished: dict[str, ResultRow],
    console: Console,
) -> Iterator[ResultRow]:
    """The rows of every cell, with the remaining time on the way."""
    keys = {cell: _row_keys(cell, config, judges) for cell in cells}
    missing = [cell for cell in cells if not keys[cell] or any(key not in finished for key in keys[cell])]
    files = samples_by_key(config.out)
    console.print(f"{len(cells)} cells, {len(cells) - len(missing)} of them finished before", highlight=False)
    with CellProgress(console, sum(cell_cost(cell, config) for cell in missing)) as progress:
        for cell in cells:
            if cell in missing:
                progress.begin(cell.name, cell_cost(cell, config))
                judges_here = num_judges(config) if cell.is_judged else 0
                callbacks = progress.callbacks(config.samples_per_cell, judges_here)
                for row in _measure(cell, config, judges, finished, files, *callbacks):
                    append_row(config.out, row)
                    finished[row["key"]] = row
                    console.print(summarize_row(row), highlight=False, markup=False)
                progress.finish()
            yield from (finished[key] for key in keys[cell])


def _measure(
    cell: EvalCell,
    config: EvalConfig,
    judges: Sequence[Judge],
    finished: dict[str, ResultRow],
    files: dict[str, Path],
    on_state: Callable[[State, int], None],
    on_score: Callable[[int], None],
) -> Iterator[ResultRow]:
    """The rows of one cell that are not finished."""
    if not cell.is_judged:
        fields = _unjudged_fields(cell, config)
        yield {**fields, **UNJUDGED[cell.task](cell, config), "key": row_key(fields), **provenance(config)}
        return
    samples = cell_samples(cell, config, files, on_state)
    for key, judge in zip(_row_keys(cell, config, judges), judges, strict=True):
        if key not in finished:
            yield score_samples(samples, judge, config, on_score)


def _row_keys(cell: EvalCell, config: EvalConfig, judges: Sequence[Judge]) -> list[str]:
    """The keys of a cell's rows: one for each judge, or a single one for a task without judges."""
    if not cell.is_judged:
        return [row_key(_unjudged_fields(cell, config))]
    return [row_key({**samples_header(cell, config), **judge_fields(judge, config)}) for judge in judges]


def _unjudged_fields(cell: EvalCell, config: EvalConfig) -> ResultRow:
    """What is known of the row of a task without judges before it is measured."""
    fields = model_fields(cell, config)
    if cell.task == "likelihood":
        fields["likelihood_samples"] = likelihood_samples(cell, config)
        samplers, _ = bounded_samplers(config, cell.model)
        fields["few_step"] = [{"sampling": dataclasses.asdict(settings)} for settings in samplers]
    if cell.task == "sudoku":
        fields["likelihood_samples"] = config.likelihood_samples
    if cell.settings is not None:
        fields["sampling"] = dataclasses.asdict(cell.settings)
    return fields


def _score_again(
    config: EvalConfig, judges: Sequence[Judge], finished: dict[str, ResultRow], console: Console
) -> Iterator[ResultRow]:
    """Score kept samples without their models: by another judge, or in another protocol."""
    paths = sorted((config.out / "samples").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    if not paths:
        raise ValueError(f"{config.out} has no samples to score; name models: cdlm eval MODEL... --judge JUDGE")
    for path in paths if config.protocol == "paper" else ():
        count = len(read_samples(path).lines)
        if count < PAPER_SAMPLES:
            raise ValueError(
                f"{path} has {count} samples, and --protocol paper needs {PAPER_SAMPLES}; use --protocol robust."
            )
    began = time.perf_counter()
    for number, path in enumerate(paths, 1):
        limit = PAPER_SAMPLES if config.protocol == "paper" else config.num_samples
        samples = first_samples(path, limit)
        for judge in judges:
            key = row_key({**samples.header, **judge_fields(judge, config)})
            if key not in finished:
                finished[key] = score_samples(samples, judge, config)
                append_row(config.out, finished[key])
                remaining = (time.perf_counter() - began) / number * (len(paths) - number)
                message = f"{summarize_row(finished[key])}; {format_duration(remaining)} left"
                console.print(message, highlight=False, markup=False)
            yield finished[key]


def first_samples(path: Path, limit: int | None) -> Samples:
    """The first samples of a file, at most `limit` of them, to be scored again."""
    samples = read_samples(path)
    lines = samples.lines[:limit]
    return Samples({**samples.header, "num_samples": len(lines), "file": path.name}, lines)
