"""The samples of a cell: kept ones, or new ones that are kept, with all that is needed to generate them again."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from cdlm.devices import few_threads
from cdlm.eval.cells import EvalCell
from cdlm.eval.config import EvalConfig
from cdlm.eval.datasets import Dataset
from cdlm.eval.measure import provenance
from cdlm.eval.results import FORMAT, ResultRow, Samples, read_samples, samples_key, samples_path, write_samples
from cdlm.eval.scorer import fingerprint
from cdlm.model.pretrained import read_model_config
from cdlm.sample.draw import State
from cdlm.text.pipeline import Pipeline


def model_fields(cell: EvalCell, config: EvalConfig) -> ResultRow:
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


def samples_header(cell: EvalCell, config: EvalConfig) -> ResultRow:
    """The header of the samples of a cell: all that is needed to generate them again."""
    assert cell.settings is not None
    settings = {"sampling": dataclasses.asdict(cell.settings), "clamp": is_clamped(cell, config)}
    header = model_fields(cell, config) | settings
    header["key"] = samples_key(header)
    tokenizer, reference = cell.model.tokenizer, reference_of(cell, config)
    if reference is not None:
        header |= {"reference": reference.file.name, "reference_hash": reference.fingerprint}
    return {**header, "eos_token_id": tokenizer.eos, "eos_token": tokenizer.decode([tokenizer.eos])}


def reference_of(cell: EvalCell, config: EvalConfig) -> Dataset | None:
    """What unconditional samples are compared with, one text for each; a protocol of its own chooses its own."""
    if cell.task != "unconditional" or config.reference is None or config.protocol == "distributional":
        return None
    return Dataset("reference", config.reference)


def is_clamped(cell: EvalCell, config: EvalConfig) -> bool:
    """Whether the sampler has to keep what the noise left alone; masked models do so anyway."""
    process = cell.model.denoiser.process
    return config.clamp and cell.task == "conditional" and process is not None and not process.absorbing


def cell_samples(
    cell: EvalCell, config: EvalConfig, files: dict[str, Path], on_state: Callable[[State, int], None]
) -> Samples:
    """The samples of a cell: kept ones if there are enough of them, else generated now, and kept."""
    header, num_samples = samples_header(cell, config), config.samples_per_cell
    path = files.get(header["key"], samples_path(config.out, cell.name, header["key"]))
    kept = read_samples(path) if path.exists() else None
    enough = kept is not None and len(kept.lines) >= num_samples
    if kept is not None and "sample_seconds" in kept.header and len(kept.lines) > num_samples:
        kept.header["sample_seconds"] = round(kept.header["sample_seconds"] * num_samples / len(kept.lines), 3)
    if kept is not None and enough and kept.header.get("reference_hash") == header.get("reference_hash"):
        return Samples({**kept.header, **header, "file": path.name}, kept.lines[:num_samples])
    model, dataset = cell.model, cell.dataset or reference_of(cell, config)
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
        templates = model.perturbations(blocks, clamp=is_clamped(cell, config))
    else:
        templates = model.continuations([""], config.samples_per_cell, config.max_length or model.max_length)
    with few_threads(model.denoiser.device, model.denoiser.count()):
        samples = model.complete(templates, cell.settings, config.seed, batch_size=config.batch_size, on_state=on_state)
        return [dataclasses.asdict(sample) for sample in sorted(samples, key=lambda sample: sample.index)]
