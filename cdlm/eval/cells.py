"""The cells of an evaluation: every model with every task, and with all settings of the sampler that fit it."""

import dataclasses
import itertools
from typing import Any

from cdlm.eval.config import EvalConfig, Task
from cdlm.eval.datasets import Dataset
from cdlm.metrics.sampler_likelihood import check_has_likelihood
from cdlm.sample.samplers import SAMPLERS
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
    def is_judged(self) -> bool:
        """Whether it has samples for a judge to score."""
        return self.task in ("unconditional", "conditional")

    @property
    def name(self) -> str:
        dataset = [self.dataset.name] if self.dataset else []
        settings = describe_settings(self.settings) if self.settings else []
        task = [self.task] if self.task == "sudoku" or not self.settings else []
        return " ".join([self.label, *dataset, *task, *settings])


def make_cells(config: EvalConfig, models: dict[str, Pipeline]) -> tuple[list[EvalCell], list[str]]:
    """Every cell that makes sense, and why the others do not."""
    cells: dict[tuple[Any, ...], EvalCell] = {}
    skipped: dict[str, None] = {}
    for label, model in models.items():
        sweep, reasons = sweep_settings(config, model)
        if config.protocol == "distributional":
            sweep += _generation_config_settings(config, model)
        for task, dataset in _tasks(config):
            generates = task in ("unconditional", "conditional", "infilling", "sudoku")
            if task in ("conditional", "consistency", "infilling") and model.denoiser.process is None:
                skipped[f"{label}: an autoregressive model has no {task} task"] = None
                continue
            if generates:
                skipped |= dict.fromkeys(f"{label}: {reason}" for reason in reasons)
            if task == "likelihood":
                skipped |= dict.fromkeys(f"{label}: {reason}" for reason in bounded_samplers(config, model)[1])
            for settings in sweep if generates else [None]:
                key = (label, task, dataset.name if dataset else "", settings)
                cells[key] = EvalCell(label, model, task, settings, dataset)
    return list(cells.values()), list(skipped)


def _tasks(config: EvalConfig) -> list[tuple[Task, Dataset | None]]:
    """The tasks, each with its dataset."""
    datasets = [Dataset(name, file) for name, file in config.named_texts()]
    pairs: list[tuple[Task, Dataset | None]] = []
    for task in config.tasks:
        no_texts = task in ("unconditional", "sudoku")
        pairs += [(task, None)] if no_texts else [(task, dataset) for dataset in datasets]
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


def _generation_config_settings(config: EvalConfig, model: Pipeline) -> list[Settings]:
    """The settings of the model's generation config at each number of steps, if it has one."""
    if not model.generation_config:
        return []
    process, posterior, joint_head = model.denoiser.process, model.posterior, model.denoiser.joint_head is not None
    counts = [{"steps": steps} for steps in config.axis("steps")] if process is not None else [{}]
    return [resolve(given, process, posterior, model.generation_config, joint_head) for given in counts]


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


def bounded_samplers(config: EvalConfig, model: Pipeline) -> tuple[list[Settings], list[str]]:
    """The samplers of the sweep whose own likelihood the likelihood task bounds, each with its numbers of steps, and
    why the others have no bound."""
    if model.denoiser.process is None or not model.denoiser.process.absorbing:
        return [], []
    sweep, _ = sweep_settings(config, model)
    found, reasons = [], []
    for settings in sweep:
        try:
            check_has_likelihood(settings, model.denoiser.process)
            found.append(settings)
        except ValueError as error:
            reasons.append(str(error))
    samplers = [dataclasses.replace(settings, steps=None) for settings in found]
    first = {sampler: number for number, sampler in reversed(list(enumerate(samplers)))}
    return sorted(found, key=lambda settings: first[dataclasses.replace(settings, steps=None)]), reasons
