"""`cdlm eval`: every cell of a sweep is sampled, scored and kept; whatever stops it, finished cells are not lost."""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID

from cdlm.devices import few_threads
from cdlm.eval.cells import EvalCell, few_step_samplers, make_cells
from cdlm.eval.config import PAPER_SAMPLES, ROBUST_SAMPLES, EvalConfig
from cdlm.eval.console import JUDGE_COST, cell_cost, format_duration, progress_bar, results_table, summarize_row
from cdlm.eval.datasets import Dataset
from cdlm.eval.measure import (
    judge_fields,
    likelihood_samples,
    measure_consistency,
    measure_likelihood,
    provenance,
    score_samples,
)
from cdlm.eval.results import (
    FORMAT,
    RESULTS,
    ResultRow,
    Samples,
    append_row,
    read_rows,
    read_samples,
    row_key,
    samples_by_key,
    samples_key,
    samples_path,
    write_samples,
)
from cdlm.eval.scorer import Judge, fingerprint, open_judge
from cdlm.eval.sudoku import check_sudoku, measure_sudoku
from cdlm.files import alone_in
from cdlm.model.pretrained import read_model_config
from cdlm.sample.draw import State
from cdlm.text.pipeline import Pipeline, load

UNJUDGED: dict[str, Callable[[EvalCell, EvalConfig], ResultRow]] = {
    "likelihood": measure_likelihood,
    "consistency": measure_consistency,
    "sudoku": measure_sudoku,
}
"""Tasks whose rows need no judge."""


def evaluate(config: EvalConfig, console: Console | None = None) -> list[ResultRow]:
    """Measure every cell of the sweep that is not finished yet; returns the rows of all its cells."""
    console = console or Console()
    models = {
        label: load(source, config.device, config.dtype, config.compile, config.tokenizer, bos_framed=config.bos_framed)
        for label, source in config.sources()
    }
    cells, skipped = make_cells(config, models)
    if models and not cells:
        raise ValueError("no cell of this sweep can be computed: " + "; ".join(skipped))
    for reason in skipped:
        console.print(f"left out: {reason}", markup=False, highlight=False)
    for cell in cells:
        _check(cell, config)
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
            if models:
                rows.extend(_evaluate_cells(cells, config, judges, finished, console))
            else:
                rows.extend(_score_again(config, judges, finished, console))
        except KeyboardInterrupt:
            kept = len(_kept_rows(config.out))
            console.print(f"interrupted; {config.out} keeps {kept} finished rows: run the same command to go on")
            sys.exit(130)
    if config.judge == ("none",):
        message = f"samples in {config.out / 'samples'}; next: cdlm eval --out {config.out} --judge JUDGE"
        console.print(message, highlight=False, markup=False)
    if rows:
        console.print(results_table(rows))
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
    dataset = cell.dataset or _reference(cell, config)
    if dataset is not None:
        dataset.blocks(model.tokenizer, length, model.bos_framed, config.samples_per_cell, config.seed)
    if cell.task == "sudoku":
        check_sudoku(cell, config)
        return
    if cell.settings is None:
        return
    if dataset is not None and config.samples_per_cell < 2:
        raise ValueError("--num-samples must be at least 2 for MAUVE, which compares two sets (got 1).")
    if cell.task == "unconditional":
        model.check(model.continuations([""], 1, length), cell.settings)
    else:
        model.check(model.perturbations([[0] * length], clamp=_is_clamped(cell, config)), cell.settings)


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
    total, done = sum(cell_cost(cell, config) for cell in missing), 0.0
    with progress_bar(console) as progress:
        task = progress.add_task("", total=total)
        for cell in cells:
            if cell in missing:
                progress.update(task, description=cell.name)
                callbacks = _progress_callbacks(progress, task, cell, config)
                for row in _measure(cell, config, judges, finished, files, *callbacks):
                    append_row(config.out, row)
                    finished[row["key"]] = row
                    console.print(summarize_row(row), highlight=False, markup=False)
                done += cell_cost(cell, config)
                progress.update(task, completed=done)
                remaining = progress.tasks[0].time_remaining
                if remaining and not console.is_terminal:  # without a terminal there is no progress bar
                    console.print(f"    about {format_duration(remaining)} left", highlight=False)
            yield from (finished[key] for key in keys[cell])


def _progress_callbacks(
    progress: Progress, task: TaskID, cell: EvalCell, config: EvalConfig
) -> tuple[Callable[[State, int], None], Callable[[int], None]]:
    """Callbacks that advance the bar after a step of a batch, and after the scoring of some samples."""
    judges = sum(name != "none" for name in config.judge) if cell.task not in UNJUDGED else 0
    judging = JUDGE_COST * judges / (1 + JUDGE_COST * judges)
    per_sample = cell_cost(cell, config) / config.samples_per_cell

    def on_state(state: State, batch_size: int) -> None:
        if state.step and state.num_steps:
            progress.advance(task, batch_size * per_sample * (1 - judging) / state.num_steps)

    def on_score(num_samples: int) -> None:
        progress.advance(task, num_samples * per_sample * judging / max(1, judges))

    return on_state, on_score


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
    if cell.task in UNJUDGED:
        fields = _unjudged_fields(cell, config)
        yield {**fields, **UNJUDGED[cell.task](cell, config), "key": row_key(fields), **provenance(config)}
        return
    samples = _samples(cell, config, files, on_state)
    for key, judge in zip(_row_keys(cell, config, judges), judges, strict=True):
        if key not in finished:
            yield score_samples(samples, judge, config, on_score)


def _row_keys(cell: EvalCell, config: EvalConfig, judges: Sequence[Judge]) -> list[str]:
    """The keys of a cell's rows: one for each judge, or a single one for a task without judges."""
    if cell.task in UNJUDGED:
        return [row_key(_unjudged_fields(cell, config))]
    return [row_key({**samples_header(cell, config), **judge_fields(judge, config)}) for judge in judges]


def _model_fields(cell: EvalCell, config: EvalConfig) -> ResultRow:
    """What the numbers of any cell depend on: the model by its weights, the task, the dataset and the seed."""
    model = cell.model
    process = model.denoiser.process
    fields: ResultRow = {
        "format": FORMAT,
        "task": cell.task,
        "model": cell.label,
        "model_hash": fingerprint(model.directory) if model.directory else "",
        "training": model.training,
        "process": process.name if process else "none",
        "vocab_size": model.tokenizer.vocab_size,
        "max_length": config.max_length or model.max_length,
        "num_samples": config.samples_per_cell,
        "seed": config.seed,
        "dtype": str(model.denoiser.dtype).removeprefix("torch."),
    }
    if cell.dataset is not None:
        fields |= {"dataset": cell.dataset.name, "dataset_hash": cell.dataset.fingerprint}
    if model.bos_framed != _states_bos_framed(model):
        fields["bos_framed"] = model.bos_framed
    return fields


def _states_bos_framed(model: Pipeline) -> bool:
    """What the config.json of a model says, which is in its hash; an override, or what a layout implies, is not."""
    config = read_model_config(model.directory) if model.directory else {}
    return bool((config.get("text") or {}).get("bos_framed"))


def _unjudged_fields(cell: EvalCell, config: EvalConfig) -> ResultRow:
    """What is known of the row of a task without judges before it is measured."""
    fields = _model_fields(cell, config)
    if cell.task == "likelihood":
        fields["likelihood_samples"] = likelihood_samples(cell, config)
        fields["few_step"] = [{"steps": steps, "order": order} for steps, order in few_step_samplers(cell, config)]
    if cell.settings is not None:  # sudoku
        fields["likelihood_samples"] = likelihood_samples(cell, config)
        fields["sampling"] = dataclasses.asdict(cell.settings)
    return fields


def samples_header(cell: EvalCell, config: EvalConfig) -> ResultRow:
    """The header of the samples of a cell: all that is needed to generate them again."""
    assert cell.settings is not None
    settings = {"sampling": dataclasses.asdict(cell.settings), "clamp": _is_clamped(cell, config)}
    header = _model_fields(cell, config) | settings
    header["key"] = samples_key(header)
    tokenizer, reference = cell.model.tokenizer, _reference(cell, config)
    if reference is not None:
        header |= {"reference": reference.file.name, "reference_hash": reference.fingerprint}
    return {**header, "eos_token_id": tokenizer.eos, "eos_token": tokenizer.decode([tokenizer.eos])}


def _reference(cell: EvalCell, config: EvalConfig) -> Dataset | None:
    """What unconditional samples are compared with."""
    if cell.task != "unconditional" or config.reference is None:
        return None
    return Dataset("reference", config.reference)


def _is_clamped(cell: EvalCell, config: EvalConfig) -> bool:
    """Whether the sampler has to keep what the noise left alone; masked models do so anyway."""
    process = cell.model.denoiser.process
    return config.clamp and cell.task == "conditional" and process is not None and not process.absorbing


def _samples(
    cell: EvalCell, config: EvalConfig, files: dict[str, Path], on_state: Callable[[State, int], None]
) -> Samples:
    """The samples of a cell: kept ones if there are enough of them, else generated now, and kept."""
    header, num_samples = samples_header(cell, config), config.samples_per_cell
    path = files.get(header["key"], samples_path(config.out, cell.name, header["key"]))
    kept = read_samples(path) if path.exists() else None
    enough = kept is not None and len(kept.lines) >= num_samples
    if kept is not None and enough and kept.header.get("reference_hash") == header.get("reference_hash"):
        return Samples({**kept.header, **header, "file": path.name}, kept.lines[:num_samples])
    model, dataset = cell.model, cell.dataset or _reference(cell, config)
    length, seed = header["max_length"], config.seed
    blocks = dataset.blocks(model.tokenizer, length, model.bos_framed, num_samples, seed).tolist() if dataset else []
    if kept is not None and enough:  # the same samples beside another reference, or beside none
        is_complete = len(kept.lines) == num_samples
        header = {**kept.header, "reference": None, "reference_hash": None, **header}
        lines = kept.lines[:num_samples]
    else:
        is_complete = True
        began = time.perf_counter()
        lines = _generate(cell, config, blocks, on_state)
        header |= {"sample_seconds": round(time.perf_counter() - began, 3), **provenance(config)}
    lines = [{name: line[name] for name in line if not name.startswith("reference")} for line in lines]
    for line, block in zip(lines, blocks, strict=False):
        text = model.tokenizer.decode(block[int(model.bos_framed) :])
        line |= {"reference": text, "reference_token_ids": block}
    if is_complete:
        write_samples(path, Samples(header, lines))
    return Samples({**header, "file": path.name}, lines)


def _generate(
    cell: EvalCell, config: EvalConfig, blocks: list[list[int]], on_state: Callable[[State, int], None]
) -> list[ResultRow]:
    """New samples of a cell; the conditional task starts from the blocks."""
    assert cell.settings is not None
    model = cell.model
    if cell.task == "conditional":
        templates = model.perturbations(blocks, clamp=_is_clamped(cell, config))
    else:
        templates = model.continuations([""], config.samples_per_cell, config.max_length or model.max_length)
    with few_threads(model.denoiser.device, model.denoiser.count()):
        samples = model.complete(templates, cell.settings, config.seed, batch_size=config.batch_size, on_state=on_state)
        return [dataclasses.asdict(sample) for sample in sorted(samples, key=lambda sample: sample.index)]


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
