"""What `cdlm eval`, `cdlm report` and `cdlm moons` are asked for: plain values, checked without importing torch."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, get_args

import tyro

from cdlm import zoo
from cdlm.data.sources import kind_of
from cdlm.devices import Device, Dtype
from cdlm.hub import parse_models
from cdlm.sample.settings import SPECS, check_value, flag
from cdlm.text.options import setting_axes

Protocol = Literal["paper", "robust", "distributional"]
Task = Literal["unconditional", "conditional", "likelihood", "infilling", "consistency", "sudoku"]
PAPER_SAMPLES = 32
ROBUST_SAMPLES = 256
DISTRIBUTIONAL_SAMPLES = 32
"""Samples per cell of the protocols."""
MIN_DISTRIBUTIONAL_SAMPLES = 8

Axes = dict[str, tuple[Any, ...]]
SWEPT_BY_DEFAULT: Axes = {"steps": (8, 32, 128), "temperature": (1.0,)}
SWEPT_BY_DISTRIBUTIONAL: Axes = {
    "steps": (8,),
    "order": ("random", "dilated"),
    "temperature": (1.0, 0.8),
    "log_frequency_penalty": (0.0, 1.0),
}
"""The axes of a sweep where none are given: the second one is the declared shaping of the distributional protocol."""


def _axis_hints() -> dict[str, str]:
    """The default of each axis in words, with that of the distributional protocol where it has one of its own."""
    hints = {}
    for name in {**SWEPT_BY_DEFAULT, **SWEPT_BY_DISTRIBUTIONAL}:
        usual, other = (axes.get(name, (SPECS[name].default,)) for axes in (SWEPT_BY_DEFAULT, SWEPT_BY_DISTRIBUTIONAL))
        words = [" ".join(map(str, values)) for values in (usual, other)]
        hints[name] = f"{words[0]}; {words[1]} for --protocol distributional"
    return hints


_SweepOptions = setting_axes(_axis_hints())


@dataclasses.dataclass(frozen=True)
class EvalConfig(_SweepOptions):
    """Measure models over a sweep of settings: one row of results.jsonl for each cell, and its samples beside it.

    Every setting of the sampler takes several values. Each --temperature is tried at top-p 1 and each --top-p at
    temperature 1: together they draw the frontier. A finished cell is never computed again: run the same command after
    a crash, or with more settings.
    """

    models: tyro.conf.Positional[tuple[str, ...]] = ()
    """Model directories, runs or hub ids; LABEL=MODEL gives one a label. None: score the samples in --out again, or,
    with --protocol distributional, evaluate the models that come with cdlm."""
    judge: tuple[str, ...] = ()
    """Language models that score samples: a hub id or directory (gpt2-large is the paper's), smollm2, gemma3-270m, or a
    run of ar. none: samples are generated and kept, to be scored later or elsewhere. [for --protocol distributional
    smollm2 if it is installed, else none]"""
    protocol: Protocol = "robust"
    """paper: 32 samples, counted as published numbers are. robust: 256 samples, every token that has a context.
    distributional: 32 samples, each metric beside its value for human text and for naive samplers, with a report."""
    num_samples: int | None = None
    """Samples per cell. [32 for paper and distributional, 256 for robust]"""
    tasks: tuple[Task, ...] = ("unconditional",)
    """unconditional: samples from scratch. conditional: recover texts half of whose words are noise. likelihood: the
    NELBO of --texts, and the bound of each masked sampler itself. infilling: accuracy at 15, 50 and 85 % masked tokens
    of --texts. consistency: how far the model is from itself over hops. sudoku: validity, coverage, likelihood and
    solved puzzles of a model of Sudoku grids."""
    texts: tuple[str, ...] = ()
    """NAME=FILE of evaluation texts for all tasks but unconditional and sudoku; openwebtext, lambada, wikitext103 and
    ptb are cut and cleaned as is usual for them."""
    reference: Path | None = None
    """Human text, to compare unconditional samples with. [for --protocol distributional that which comes with cdlm]"""
    corpus: Path | None = None
    """The tokens that the models were trained on, a directory of cdlm prepare: with --protocol distributional, how much
    of the samples is copied from it."""
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
    trust_remote_code: bool = False
    """Run the code that a model of transformers comes with, such as LLaDA."""
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
        if self.protocol == "distributional":
            self._check_distributional()
        elif self.corpus is not None:
            raise ValueError("--corpus is for --protocol distributional; leave it out, or add that.")
        self._check_axes()
        for task in self.tasks:
            if task not in get_args(Task):
                raise ValueError(f"--tasks must be among {', '.join(get_args(Task))} (got {task!r}).")
            if task not in ("unconditional", "sudoku") and self.models and not self.texts:
                raise ValueError(f"the task {task} needs texts; add --texts NAME=FILE, such as ptb=ptb_test.txt.")
        if "none" in self.judge and (len(self.judge) > 1 or not self.sources()):
            raise ValueError("--judge none only generates samples; name models, and no other judge.")
        if self.needs_judge and not self.judge and self.protocol != "distributional":
            wanted = "a judge" if self.models else "models and a judge"
            raise ValueError(
                f"name {wanted}: --judge gpt2-large (the paper's, from the model hub), --judge smollm2 or gemma3-270m "
                "(make judges), or a run of ar; --judge none only generates samples; cdlm eval --protocol "
                "distributional needs neither and evaluates the models that come with cdlm."
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
            if name in SWEPT_BY_DEFAULT and getattr(self, name) == ():
                raise ValueError(f"{flag(name)} needs at least one value.")
            for value in self.axis(name):
                check_value(name, value)

    def _check_distributional(self) -> None:
        if self.tasks != ("unconditional",):
            raise ValueError(
                "--protocol distributional has the task unconditional alone; evaluate others without it (got --tasks "
                f"{' '.join(self.tasks)})."
            )
        if self.samples_per_cell < MIN_DISTRIBUTIONAL_SAMPLES:
            raise ValueError(
                f"--num-samples must be at least {MIN_DISTRIBUTIONAL_SAMPLES} for --protocol distributional (got "
                f"{self.samples_per_cell})."
            )

    def axis(self, name: str) -> tuple[Any, ...]:
        """The values of a setting that are swept over; empty if it keeps its default."""
        usual = SWEPT_BY_DISTRIBUTIONAL if self.protocol == "distributional" else SWEPT_BY_DEFAULT
        values: tuple[Any, ...] | None = getattr(self, name)
        return usual.get(name, ()) if values is None else values

    @property
    def needs_judge(self) -> bool:
        """Whether any task has samples to score."""
        return not self.models or "unconditional" in self.tasks or "conditional" in self.tasks

    @property
    def samples_per_cell(self) -> int:
        usual = {"paper": PAPER_SAMPLES, "robust": ROBUST_SAMPLES, "distributional": DISTRIBUTIONAL_SAMPLES}
        return self.num_samples or usual[self.protocol]

    def named_texts(self) -> list[tuple[str, Path]]:
        """The evaluation texts by name."""
        return [named_text(word) for word in self.texts]

    def sources(self) -> list[tuple[str, str]]:
        """The models by label: those that are named, or those that come with cdlm."""
        bundled = zoo.names() if self.protocol == "distributional" else ()
        return parse_models(self.models or tuple(bundled))


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
    claims: tuple[str, ...] = ()
    """Claims to test on results of --protocol distributional: the columns that each rests on, such as ppl,h1,h2.
    [several of the usual ones]"""

    def claim_columns(self) -> list[tuple[str, ...]]:
        """The columns of each claim."""
        return [tuple(claim.split(",")) for claim in self.claims]

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
