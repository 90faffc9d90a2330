"""The cells of an evaluation: every model with every task, and with all settings of the sampler that fit it."""

import dataclasses
import itertools
from typing import Any

from cdlm.eval.config import EvalConfig, Task
from cdlm.eval.datasets import Dataset
from cdlm.sample.samplers import ORDERS, SAMPLERS
from cdlm.sample.settings import SPECS, Settings, describe_settings, resolve
from cdlm.text.pipeline import Pipeline

CONTROLS = ("temperature", "top_p")
"""Settings that are swept one at a time, each with the others off."""


@dataclasses.dataclass(frozen=True)
class EvalCell:
    """One cell: a model, a task, and the settings or the dataset that it is measured with."""

    label: str
    model: Pipeline
    task: Task
    settings: Settings | None = None
    dataset: Dataset | None = None

    @property
    def name(self) -> str:
        dataset = [self.dataset.name] if self.dataset else []
        return " ".join([self.label, *dataset, *(describe_settings(self.settings) if self.settings else [self.task])])


def make_cells(config: EvalConfig, models: dict[str, Pipeline]) -> tuple[list[EvalCell], list[str]]:
    """Every cell that makes sense, and why the others do not."""
    cells: dict[tuple[Any, ...], EvalCell] = {}
    skipped: dict[str, None] = {}
    for label, model in models.items():
        sweep, reasons = sweep_settings(config, model)
        for task, dataset in _tasks(config):
            generates = task in ("unconditional", "conditional")
            if task in ("conditional", "consistency") and model.denoiser.process is None:
                skipped[f"{label}: an autoregressive model has no {task} task"] = None
                continue
            if generates:
                skipped |= dict.fromkeys(f"{label}: {reason}" for reason in reasons)
            for settings in sweep if generates else [None]:
                key = (label, task, dataset.name if dataset else "", settings)
                cells[key] = EvalCell(label, model, task, settings, dataset)
    return list(cells.values()), list(skipped)


def _tasks(config: EvalConfig) -> list[tuple[Task, Dataset | None]]:
    """The tasks, each with its dataset."""
    datasets = [Dataset(name, file) for name, file in config.named_texts()]
    pairs: list[tuple[Task, Dataset | None]] = []
    for task in config.tasks:
        pairs += [(task, None)] if task == "unconditional" else [(task, dataset) for dataset in datasets]
    return pairs


def sweep_settings(config: EvalConfig, model: Pipeline) -> tuple[list[Settings], list[str]]:
    """The settings of every combination of the axes that makes sense for a model, and why the others do not.

    Each temperature is tried at top-p 1 and each top-p at temperature 1; all other axes are multiplied. An
    autoregressive model takes only the axes that its sampler reads.
    """
    known = SPECS if model.denoiser.process is not None else SAMPLERS["autoregressive"].settings
    axes = {name: config.axis(name) for name in SPECS if name in known and name not in CONTROLS and config.axis(name)}
    controls = [{name: value} for name in CONTROLS for value in config.axis(name)]
    sweep: dict[Settings, None] = {}
    reasons: dict[str, None] = {}
    for values, control in itertools.product(itertools.product(*axes.values()), controls):
        try:
            sweep[_combine({**dict(zip(axes, values, strict=True)), **control}, model)] = None
        except ValueError as error:
            reasons[str(error)] = None
    return list(sweep), list(reasons)


def _combine(given: dict[str, Any], model: Pipeline) -> Settings:
    """The settings of one combination.

    Numbers that only some samplers read hold for those alone: --steps not for first-hitting, --eta only for correctors,
    --entropy-bound only for that order. So the sampler is found without them first.
    """
    process, posterior, joint_head = model.denoiser.process, model.posterior, model.denoiser.joint_head is not None
    partial = [name for name, spec in SPECS.items() if spec.explicit and spec.choices is None]
    others = {name: value for name, value in given.items() if name not in partial}
    read = SAMPLERS[resolve(others, process, posterior, joint_head=joint_head).sampler].settings
    values = {name: value for name, value in given.items() if name in others or name in read}
    return resolve(values, process, posterior, joint_head=joint_head)


def few_step_samplers(cell: EvalCell, config: EvalConfig) -> list[tuple[int, str]]:
    """The samplers, as (steps, order), whose own likelihood bounds the likelihood task has: of masked models alone."""
    process = cell.model.denoiser.process
    if cell.task != "likelihood" or process is None or not process.absorbing:
        return []
    orders = [order for order in config.axis("order") or ("random",) if order in ORDERS]
    return [(steps, order) for order in orders for steps in config.axis("steps")]
