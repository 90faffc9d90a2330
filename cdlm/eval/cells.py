"""The cells of an evaluation: every model with every task and every setting of the sampler that fits it."""

import dataclasses
import itertools
import re
from typing import Any

from cdlm.eval.config import EvalConfig, Task
from cdlm.eval.datasets import Set
from cdlm.sample.settings import Sampling
from cdlm.text.pipeline import Model


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of the grid: a model, a task, and how it writes or what it reads."""

    label: str
    model: Model
    task: Task
    how: Sampling | None = None
    set: Set | None = None

    @property
    def name(self) -> str:
        parts = [self.label, self.set.name if self.set else "", *(describe(self.how) if self.how else [self.task])]
        return " ".join(filter(None, parts))


def cells(config: EvalConfig, models: dict[str, Model]) -> tuple[list[Cell], list[str]]:
    """Every cell that makes sense, and why the others do not."""
    found: dict[tuple[Any, ...], Cell] = {}
    skipped: dict[str, None] = {}
    for label, model in models.items():
        for task, text in _tasks(config):
            for how in _settings(config, model, skipped) if task in ("unconditional", "conditional") else [None]:
                try:
                    if how is not None:
                        how.check(model.denoiser.process, model.posterior)
                    if task in ("conditional", "consistency") and model.denoiser.process is None:
                        raise ValueError(f"an autoregressive model has no {task} task")
                    found[label, task, text and text.name, how] = Cell(label, model, task, how, text)
                except ValueError as error:
                    skipped[f"{label}: {error}"] = None
    return list(found.values()), list(skipped)


def describe(how: Sampling) -> list[str]:
    """Settings in words: the steps, the precision, and whatever is not the default."""
    words = [f"{how.steps} steps"] if how.steps else []
    words.append(how.precision)
    for name in ("order", "tail", "corrector", "eta", "grid", "guidance", "cool", "temperature", "top_p"):
        if getattr(how, name) != getattr(Sampling, name):
            words.append(f"{name.replace('_', '-')} {getattr(how, name)}")
    return words


def _tasks(config: EvalConfig) -> list[tuple[Task, Set | None]]:
    """The tasks, each with its texts."""
    pairs: list[tuple[Task, Set | None]] = []
    for task in config.tasks:
        if task == "unconditional":
            pairs.append((task, None))
        else:
            pairs += [(task, text) for text in [Set(*named) for named in config.named_texts()]]
    return pairs


def _settings(config: EvalConfig, model: Model, skipped: dict[str, None]) -> list[Sampling]:
    """All samplers, each with all controls, without the combinations that contradict themselves."""
    controls = [(t, 1.0) for t in config.temperature] + [(1.0, p) for p in config.top_p]
    causal, found = model.denoiser.process is None, []
    names = ("steps", "grid", "order", "tail", "corrector", "guidance")
    axes = [*(getattr(config, name) for name in names), config.eta or (None,), config.cool or (None,)]
    for precision, (*sampler, eta, cool), (temperature, top_p) in itertools.product(
        config.precision, itertools.product(*axes), dict.fromkeys(controls)
    ):
        shape: dict[str, Any] = {"precision": precision, "temperature": temperature, "top_p": top_p}
        if not causal:
            shape |= dict(zip(names, sampler, strict=True)) | {"cool": cool}
            shape |= {} if shape["corrector"] == "none" else {"eta": eta}
            shape |= {"steps": None} if shape["order"] == "first-hitting" else {}
        try:
            found.append(Sampling(**shape))
        except ValueError as error:
            skipped[str(error)] = None
    return list(dict.fromkeys(found))


def slug(words: str) -> str:
    """A name for a file."""
    return re.sub(r"[^\w.+-]+", "-", words).strip("-")
