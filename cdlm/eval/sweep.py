"""`cdlm eval`: a grid of cells, each written, judged and kept; whatever stops it, finished cells are not lost."""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import Progress, TaskID

from cdlm.devices import few_threads
from cdlm.eval.cells import Cell, cells
from cdlm.eval.config import PAPER, ROBUST, EvalConfig
from cdlm.eval.console import JUDGING, minutes, progress, summary, table, work
from cdlm.eval.datasets import Set
from cdlm.eval.measure import circumstances, consistency, judged, likelihood
from cdlm.eval.results import (
    FORMAT,
    RESULTS,
    Row,
    Samples,
    append_row,
    cell_key,
    key_of,
    read_rows,
    read_samples,
    samples_path,
    write_samples,
)
from cdlm.eval.scorer import Judge, fingerprint, open_judge
from cdlm.files import alone_in
from cdlm.sample.draw import State
from cdlm.text.pipeline import load


def evaluate(config: EvalConfig, console: Console | None = None) -> list[Row]:
    """Every cell of the grid that is not finished yet; returns the rows of all that were asked for."""
    console = console or Console()
    models = {
        label: load(source, config.device, config.dtype, config.compile, config.tokenizer)
        for label, source in config.sources()
    }
    wanted, skipped = cells(config, models)
    if models and not wanted:
        raise ValueError("no cell of this grid can be computed: " + "; ".join(skipped))
    for why in skipped:
        console.print(f"left out: {why}", markup=False, highlight=False)
    for cell in wanted:
        _check(cell, config)
    judges = [open_judge(name, config.device) for name in config.judge if name != "none"]
    if judges and config.count < ROBUST and config.protocol == "robust":
        console.print(f"{config.count} texts a cell are few: intervals will be wide (robust numbers have {ROBUST})")
    config.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with alone_in(config.out):
        finished = {row["key"]: row for row in read_rows(config.out)} if (config.out / RESULTS).exists() else {}
        again = _again(config, judges, finished, console)
        try:
            for row in _rows(wanted, config, judges, finished, console) if models else again:
                rows.append(row)
        except KeyboardInterrupt:
            kept = len(read_rows(config.out)) if (config.out / RESULTS).exists() else 0
            console.print(f"interrupted; {config.out} keeps {kept} finished rows: run the same command to go on")
            sys.exit(130)
    if config.judge == ("none",):
        told = f"texts in {config.out / 'samples'}; next: cdlm eval --out {config.out} --judge JUDGE"
        console.print(told, highlight=False, markup=False)
    if rows:
        console.print(table(rows))
        console.print(f"{len(rows)} cells in {config.out / RESULTS}; next: cdlm report {config.out}", highlight=False)
    return rows


def _rows(
    wanted: Sequence[Cell], config: EvalConfig, judges: Sequence[Judge], finished: dict[str, Row], console: Console
) -> Iterator[Row]:
    """The rows of every cell, with an estimate of the time left on the way."""
    keys = {cell: _keys(cell, config, judges) for cell in wanted}
    missing = [cell for cell in wanted if not keys[cell] or any(key not in finished for key in keys[cell])]
    console.print(f"{len(wanted)} cells, {len(wanted) - len(missing)} of them finished before", highlight=False)
    total, done = sum(work(cell, config) for cell in missing), 0.0
    with progress(console) as bar:
        task = bar.add_task("", total=total)
        for cell in wanted:
            if cell in missing:
                bar.update(task, description=cell.name)
                judges_share = JUDGING * len(judges) / (1 + JUDGING * len(judges)) if cell.settings is not None else 0.0
                each = work(cell, config) / config.count
                sampled = _mover(bar, task, each * (1 - judges_share))
                read = functools.partial(_advance, bar, task, each * judges_share / max(1, len(judges)))
                for row in _cell(cell, config, judges, keys[cell], finished, sampled, read):
                    append_row(config.out, row)
                    finished[row["key"]] = row
                    console.print(summary(row), highlight=False, markup=False)
                done += work(cell, config)
                bar.update(task, completed=done)
                left = bar.tasks[0].time_remaining
                if left and not console.is_terminal:  # without a terminal there is no progress bar
                    console.print(f"    about {minutes(left)} left", highlight=False)
            yield from (finished[key] for key in keys[cell])


def _mover(bar: Progress, task: TaskID, each: float) -> Callable[[State, int], None]:
    """Advances the bar with the steps of each batch; every sample counts for `each`."""

    def show(state: State, batch: int) -> None:
        if state.step and state.num_steps:
            bar.advance(task, batch * each / state.num_steps)

    return show


def _advance(bar: Progress, task: TaskID, each: float, texts: int) -> None:
    bar.advance(task, texts * each)


def _check(cell: Cell, config: EvalConfig) -> None:
    """Refuse what cannot be measured, before a judge is opened."""
    model, length = cell.model, config.max_length or cell.model.max_length
    if not length:
        raise ValueError(f"{model.name} does not say how long its texts are: give a --length")
    if model.max_length and length > model.max_length:
        raise ValueError(
            f"--length {length} is more than the {model.max_length} tokens that {cell.label} was trained on"
        )
    texts = cell.set or _reference(cell, config)
    if texts is not None:
        texts.blocks(model.tokenizer, length, model.bos_framed, config.count, config.seed)
    if cell.settings is None:
        return
    if texts is not None and config.count < 2:
        raise ValueError("MAUVE compares two sets of texts: --num must be at least 2")
    if cell.task == "unconditional":
        model.check(model.continuations([""], 1, length), cell.settings)
    else:
        model.check(model.perturbations([[0] * length], clamp=_clamps(cell, config)), cell.settings)


def _keys(cell: Cell, config: EvalConfig, judges: Sequence[Judge]) -> list[str]:
    """The keys of a cell's rows: one for each judge, or one alone."""
    if cell.settings is None:
        about = {**about_model(cell, config), "times": config.times, "training": None}
        samplers = {"steps": config.steps, "order": config.order} if cell.task == "likelihood" else {}
        return [key_of({**about, **samplers})]
    return [row_key(about_cell(cell, config), judge, config) for judge in judges]


def _cell(
    cell: Cell,
    config: EvalConfig,
    judges: Sequence[Judge],
    keys: Sequence[str],
    finished: dict[str, Row],
    sampled: Callable[[State, int], None],
    read: Callable[[int], None],
) -> Iterator[Row]:
    """The rows of one cell that are not finished."""
    if cell.settings is None:
        measure = likelihood if cell.task == "likelihood" else consistency
        yield {**about_model(cell, config), "key": keys[0], **measure(cell, config), **circumstances(config)}
        return
    samples = _samples(cell, config, sampled)
    for key, judge in zip(keys, judges, strict=True):
        if key not in finished:
            yield judged(samples, judge, config, key, read)


def about_model(cell: Cell, config: EvalConfig) -> Row:
    """What a cell's numbers depend on: the model by its weights, the task, the texts and the seed."""
    model = cell.model
    process = model.denoiser.process
    about: Row = {
        "task": cell.task,
        "model": cell.label,
        "hash": fingerprint(model.directory) if model.directory else "",
        "training": model.training,
        "process": process.name if process else "none",
        "vocab": model.tokenizer.vocab_size,
        "length": config.max_length or model.max_length,
        "num_samples": config.count,
        "seed": config.seed,
        "dtype": str(model.denoiser.backbone.vocab_embed.embedding.dtype).removeprefix("torch."),
    }
    if cell.set is not None:
        about |= {"set": cell.set.name, "set_hash": cell.set.fingerprint}
    return about


def about_cell(cell: Cell, config: EvalConfig) -> Row:
    """The same for texts that a model writes; their number is not part of the key: the first of many are the few."""
    assert cell.settings is not None
    about = about_model(cell, config)
    num = about.pop("num_samples")
    about |= {"format": FORMAT, "sampling": dataclasses.asdict(cell.settings), "clamp": _clamps(cell, config)}
    about["key"] = cell_key(about)
    words, texts = cell.model.tokenizer, _reference(cell, config)
    if texts is not None:
        about |= {"reference": texts.file.name, "reference_hash": texts.fingerprint}
    return {**about, "num_samples": num, "eos": words.eos, "end": words.decode([words.eos])}


def _reference(cell: Cell, config: EvalConfig) -> Set | None:
    """What unconditional texts are compared with."""
    wanted = cell.task == "unconditional" and config.reference is not None
    return Set("reference", config.reference) if wanted and config.reference else None


def _clamps(cell: Cell, config: EvalConfig) -> bool:
    """Masked models keep what the noise left alone anyway."""
    process = cell.model.denoiser.process
    return config.clamp and cell.task == "conditional" and process is not None and not process.absorbing


def _samples(cell: Cell, config: EvalConfig, show: Callable[[State, int], None]) -> Samples:
    """The texts of a cell: kept ones if there are enough of them, else written now, and kept."""
    assert cell.settings is not None
    about, n = about_cell(cell, config), config.count
    path = samples_path(config.out, cell.name, about["key"])
    path = next(iter((config.out / "samples").glob(f"*-{about['key']}.jsonl")), path)
    kept = read_samples(path) if path.exists() else None
    model, length, texts = cell.model, about["length"], cell.set or _reference(cell, config)
    if kept is not None and len(kept.lines) >= n and kept.about.get("reference_hash") == about.get("reference_hash"):
        return Samples({**kept.about, **about, "file": path.name}, kept.lines[:n])
    blocks = texts.blocks(model.tokenizer, length, model.bos_framed, n, config.seed).tolist() if texts else None
    if kept is not None and len(kept.lines) >= n:  # the same texts beside another reference, or beside none
        whole = len(kept.lines) == n
        about, lines = {**kept.about, "reference": None, "reference_hash": None, **about}, kept.lines[:n]
    else:
        whole, lines = True, []
        if cell.task == "conditional":
            templates = model.perturbations(blocks or [], clamp=about["clamp"])
        else:
            templates = model.continuations([""], n, length)
        began = time.perf_counter()
        with few_threads(model.denoiser.device, model.denoiser.count()):
            found = model.complete(templates, cell.settings, config.seed, batch_size=config.batch_size, on_state=show)
            lines = [dataclasses.asdict(text) for text in sorted(found, key=lambda text: text.index)]
        about |= {"sample_seconds": round(time.perf_counter() - began, 3), **circumstances(config)}
    lines = [{key: line[key] for key in line if not key.startswith("reference")} for line in lines]
    for line, block in zip(lines, blocks or [], strict=False):
        line |= {"reference": model.tokenizer.decode(block[int(model.bos_framed) :]), "reference_token_ids": block}
    if whole:
        write_samples(path, Samples(about, lines))
    return Samples({**about, "file": path.name}, lines)


def _again(config: EvalConfig, judges: Sequence[Judge], finished: dict[str, Row], console: Console) -> Iterator[Row]:
    """Score kept texts without their models: another judge, or another protocol."""
    paths = sorted((config.out / "samples").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    if not paths:
        raise ValueError(f"{config.out} holds no texts to judge; name models first: cdlm eval MODEL... --judge JUDGE")
    for path in paths if config.protocol == "paper" else ():
        n = len(read_samples(path).lines)
        if n < PAPER:
            raise ValueError(f"{path} holds {n} texts, and the paper's protocol has {PAPER}; use --protocol robust")
    began = time.perf_counter()
    for number, path in enumerate(paths, 1):
        samples = read_samples(path)
        most = PAPER if config.protocol == "paper" else config.num_samples or len(samples.lines)
        n = min(len(samples.lines), most)
        samples = Samples({**samples.about, "num_samples": n, "file": path.name}, samples.lines[:n])
        for judge in judges:
            key = row_key(samples.about, judge, config)
            if key not in finished:
                finished[key] = judged(samples, judge, config, key)
                append_row(config.out, finished[key])
                left = (time.perf_counter() - began) / number * (len(paths) - number)
                console.print(f"{summary(finished[key])}; {minutes(left)} left", highlight=False, markup=False)
            yield finished[key]


def row_key(about: Row, judge: Judge, config: EvalConfig) -> str:
    which = {"samples": about["key"], "num": about["num_samples"], "model": about["model"]}
    beside = {"judge": judge.fingerprint, "protocol": config.protocol, "reference": about.get("reference_hash")}
    return key_of({**which, **beside})
