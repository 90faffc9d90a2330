"""The cells of an evaluation: every model with every task and every setting of the sampler that fits it."""

import dataclasses
import itertools
import re
from typing import Any

from cdlm.eval.config import EvalConfig, Task
from cdlm.eval.datasets import Set
from cdlm.sample.samplers import SAMPLERS
from cdlm.sample.settings import DEFAULTS, Settings, describe_settings, resolve
from cdlm.text.pipeline import Pipeline


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of a sweep: a model, a task, and the settings or the texts that it is measured with."""

    label: str
    model: Pipeline
    task: Task
    settings: Settings | None = None
    set: Set | None = None

    @property
    def name(self) -> str:
        parts = [
            self.label,
            self.set.name if self.set else "",
            *(describe_settings(self.settings) if self.settings else [self.task]),
        ]
        return " ".join(filter(None, parts))


def cells(config: EvalConfig, models: dict[str, Pipeline]) -> tuple[list[Cell], list[str]]:
    """Every cell that makes sense, and why the others do not."""
    found: dict[tuple[Any, ...], Cell] = {}
    skipped: dict[str, None] = {}
    for label, model in models.items():
        for task, text in _tasks(config):
            if task in ("conditional", "consistency") and model.denoiser.process is None:
                skipped[f"{label}: an autoregressive model has no {task} task"] = None
                continue
            sampled = task in ("unconditional", "conditional")
            for settings in _sweep(config, label, model, skipped) if sampled else [None]:
                found[label, task, text and text.name, settings] = Cell(label, model, task, settings, text)
    return list(found.values()), list(skipped)


def _tasks(config: EvalConfig) -> list[tuple[Task, Set | None]]:
    """The tasks, each with its texts."""
    pairs: list[tuple[Task, Set | None]] = []
    for task in config.tasks:
        if task == "unconditional":
            pairs.append((task, None))
        else:
            pairs += [(task, text) for text in [Set(*named) for named in config.named_texts()]]
    return pairs


def _sweep(config: EvalConfig, label: str, model: Pipeline, skipped: dict[str, None]) -> list[Settings]:
    """All samplers, each with all controls, without the combinations that contradict themselves.

    An autoregressive model takes the axes that its sampler reads.
    """
    controls = [{"temperature": t} for t in config.axis("temperature")] + [{"top_p": p} for p in config.axis("top_p")]
    names = [name for name in DEFAULTS if name not in ("temperature", "top_p")]
    if model.denoiser.process is None:
        names = [name for name in names if name in SAMPLERS["autoregressive"].settings]
    axes = {name: config.axis(name) for name in names if config.axis(name)}
    found = []
    for values, control in itertools.product(itertools.product(*axes.values()), controls):
        given = {**dict(zip(axes, values, strict=True)), **control}
        found += [settings for settings in [_resolved(given, label, model, skipped)] if settings is not None]
    return list(dict.fromkeys(found))


def _resolved(given: dict[str, Any], label: str, model: Pipeline, skipped: dict[str, None]) -> Settings | None:
    """The settings of a combination; None, with the reason, where it contradicts itself or does not fit the model.

    An axis of the sweep does not hold for a sampler without such a setting, as `--eta` for cells without a corrector.
    """
    if given.get("corrector", "none") == "none":
        given = {name: value for name, value in given.items() if name != "eta"}
    if given.get("order") != "entropy-bound":
        given = {name: value for name, value in given.items() if name != "entropy_bound"}
    if given.get("order") == "first-hitting":
        given = {name: value for name, value in given.items() if name != "steps"}
    try:
        return resolve(given, model.denoiser.process, model.posterior)
    except ValueError as error:
        skipped[f"{label}: {error}"] = None
        return None


def slug(words: str) -> str:
    """A name for a file."""
    return re.sub(r"[^\w.+-]+", "-", words).strip("-")
