"""Check that the working tree trains, samples and measures bit by bit as an earlier commit does.

    python -m benchmarks.same_bits                      # against fef84f3; a few minutes on two cores
    python -m benchmarks.same_bits --quick              # a subset, about a minute
    python -m benchmarks.same_bits --base HEAD~1

A temporary git worktree of the base commit is added, the same probe runs under the base and under the working tree (on
this machine, with this interpreter; PYTHONPATH selects the tree), and the results are compared:

- data: the files that ``cdlm prepare`` writes;
- weights: all tensors of the last checkpoint (model, online, target, optimizer) after a few steps of every method, with
  gradient accumulation, Muon, dropout, tied embeddings and other options, and of a run that was resumed halfway;
- metrics: the training losses, validation NELBO and validation texts in metrics.jsonl;
- tokens: samplers and controls of ``tests/fixtures/fef84f3/samples.json`` for the bundled models of the base commit,
  with its generation configs, and those that suit uniform and autoregressive models for the runs just trained;
- evaluation: likelihood, consistency and judged texts from ``cdlm eval``, without the bounds of few-step samplers,
  whose estimator is another one since then (tests/metrics/test_sampler_likelihood.py compares it by enumeration).

One line is printed per item, and the exit status is 1 if anything differs. Only the command line and ``cdlm.load`` are
used, so the internal layout of the package does not matter. What is run is written down once, in the names of fef84f3.
If a flag, recipe, keyword or field is renamed in the working tree, map it in ``WORKING``; ``BASE`` stays empty. A base
commit after the renaming needs the same mapping: add ``--renamed-base``.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests" / "fixtures" / "fef84f3"


@dataclasses.dataclass(frozen=True)
class Dialect:
    """How a tree spells what this file names as fef84f3 does. An empty mapping means: in the same way."""

    commands: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Commands and recipes, such as {"tiny-mcdlm-guided": "tiny-cdlm-guided"}."""
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Flags of the command line, such as {"--average": "--ema-decay"}."""
    methods: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Methods of a model, such as {"rewrite": "edit"}."""
    keywords: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Keywords of these methods, such as {"cool": "final_temperature"}."""
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of flags and keywords, such as {"bit-reversed": "bit_reversed"}; also method strings of training."""
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Fields of metrics.jsonl and results.jsonl, such as {"nelbo": "nll"}."""
    attributes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Attributes of a sample, such as {"tokens": "token_ids"}."""

    def command(self, words: Sequence[str]) -> list[str]:
        """A command line. Its first word is the command, and for ``train`` the second one the recipe."""
        names = 2 if words[0] == "train" else 1
        rest = [self.flags.get(word, word) if word[:2] == "--" else self.value(word) for word in words[names:]]
        return [self.commands.get(word, word) for word in words[:names]] + rest

    def call(self, method: str, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """A call of a method of a model."""
        named = {self.keywords.get(name, name): self.value(value) for name, value in arguments.items()}
        return self.methods.get(method, method), named

    def value(self, value: Any) -> Any:
        return self.values.get(value, value) if isinstance(value, str) else value

    def field(self, row: Mapping[str, Any], name: str) -> Any:
        """A field of a row by its name in fef84f3; None if there is none."""
        return row.get(self.fields.get(name, name))


BASE = Dialect()
"""The spelling of fef84f3 itself; never changed."""

WORKING = Dialect(
    flags={
        "--num": "--num-samples",
        "--accumulate": "--grad-accum-steps",
        "--average": "--ema-decay",
        "--batch": "--batch-size",
        "--clip": "--max-grad-norm",
        "--cooldown": "--cooldown-ratio",
        "--keep": "--keep-checkpoints",
        "--length": "--seq-length",
        "--lr": "--learning-rate",
        "--network.absolute": "--network.position-embeddings",
        "--network.blocks": "--network.num-layers",
        "--network.cond": "--network.cond-dim",
        "--network.heads": "--network.num-heads",
        "--network.hidden": "--network.hidden-size",
        "--network.tied": "--network.tie-embeddings",
        "--noise": "--noise-schedule",
        "--reference": "--reference-steps",
        "--sample-steps": "--valid-sample-steps",
        "--samples": "--valid-samples",
        "--times": "--likelihood-samples",
        "--train-vocab": "--train-vocab-size",
        "--valid-share": "--valid-fraction",
    },
    fields={
        "gradient": "grad_norm",
        "lr": "learning_rate",
        "texts": "samples",
        "num": "num_samples",
        "set": "dataset",
    },
    keywords={
        "num": "num_samples",
        "length": "max_length",
        "t": "noise_level",
        "grid": "timesteps",
        "tail": "final_step",
        "cool": "temperature_end",
        "bound": "entropy_bound",
        "block": "block_length",
    },
    attributes={"tokens": "token_ids", "evaluations": "nfe"},
)
"""The spelling of the working tree: map here what it has renamed."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A tiny training run: a recipe, the flags beyond ``TINY``, and the run that it starts from."""

    name: str
    recipe: str
    flags: str = ""
    start: str = ""
    quick: bool = False

    def words(self) -> list[str]:
        start = ["--init-from", f"trained/{self.start}"] if self.start else []
        return ["train", self.recipe, *start, *TINY, *shlex.split(self.flags), "--out", f"trained/{self.name}"]


STEPS, HALF = 8, 4
TINY = shlex.split(
    f"--data data/bytes --steps {STEPS} --batch 8 --length 32 --reference {STEPS} --average 0.8 --lr 0.02 "
    "--network.hidden 16 --network.blocks 2 --network.heads 2 --network.cond 8 --device cpu --dtype float32 "
    f"--log-every 2 --valid-every {HALF} --valid-batches 2 --samples 2 --sample-steps 4 --save-every {HALF} --keep 9"
)
"""Averages and decays are quoted for the length of the run itself, so that they span several of its steps."""

PREPARED = {
    "bytes": "--length 32 --valid-documents 8",
    "plain": "--length 32 --packing plain --valid-share 0.2",
    "sentences": "--length 64 --packing sentences --valid-documents 8",
    "bpe": "--length 32 --train-vocab 300 --valid-documents 8",
}

RUNS = (
    Run("ar", "tiny-ar", quick=True),
    Run("mdlm", "tiny-mdlm", quick=True),
    Run("mcdlm", "tiny-mcdlm", quick=True),
    Run("mcdlm-pplopt", "tiny-mcdlm-pplopt", "--method mcdlm-pplopt:copies=4"),
    Run("few-step", "tiny-few-step"),
    Run("sdtt", "tiny-sdtt", start="mdlm"),
    Run("udlm", "tiny-udlm", quick=True),
    Run("duo", "tiny-duo"),
    Run("ucdlm", "tiny-ucdlm"),
    Run("duo-dcd", "tiny-duo-dcd", start="duo"),
    Run("mcdlm-guided", "tiny-mcdlm-guided", start="mdlm", quick=True),
    Run("mcdlm-sdtt", "tiny-mcdlm-sdtt", start="mcdlm"),
    Run("mcdlm, accumulate", "tiny-mcdlm", "--accumulate 2"),
    Run("ucdlm, accumulate", "tiny-ucdlm", "--accumulate 4"),
    Run("mdlm, muon", "tiny-mdlm", "--optimizer muon --cooldown 0.5 --weight-decay 0.01"),
    Run("mcdlm, seed and dropout", "tiny-mcdlm", "--seed 1 --network.dropout 0.1 --clip 0.1 --weight-decay 0.1"),
    Run("mdlm, tied", "tiny-mdlm", "--network.tied --network.absolute 32 --noise cosine"),
    Run("mdlm, time conditioning", "tiny-mdlm", "--network.time-conditioning"),
    Run("mdlm, sentences", "tiny-mdlm", "--data data/sentences --length 64"),
    Run("mdlm, bpe", "tiny-mdlm", "--data data/bpe"),
    Run("mcdlm, plain packing", "tiny-mcdlm", "--data data/plain"),
    Run("mcdlm, staged", "tiny-mcdlm", "--method mcdlm:steps=staged,divergence=reverse_kl,overshoot=shift"),
    Run("few-step, ordered", "tiny-few-step", "--method few-step:steps=4,most=8,order=bit-reversed"),
)
RESUMED = ("mdlm", "mcdlm", "mcdlm-pplopt", "mdlm, muon")
"""Runs that are also cut after half of their steps and resumed."""

PLAIN = {"num": 2, "length": 32, "steps": 4, "seed": 0}
CONTROLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp32": {"precision": "fp32"},
    "temperature": {"temperature": 0.8},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20},
    "prompt": {"prompt": "the cat"},
}
DIFFUSION: dict[str, dict[str, Any]] = {
    **CONTROLS,
    "naive-fp32": {"precision": "naive-fp32"},
    "grid cosine": {"grid": "cosine"},
    "grid custom": {"grid": "1,0.6,0.3,0.1,0"},
    "tail sample": {"tail": "sample"},
    "tail argmax": {"tail": "argmax"},
    "cool": {"cool": 0.5},
    "block": {"length": 48, "block": 16},
    **{f"corrector {kind}": {"corrector": kind, "eta": 0.5} for kind in ("constant", "cap", "rescale", "loop")},
}
UNIFORM: dict[str, dict[str, Any]] = {
    **DIFFUSION,
    "naive-fp32": {"precision": "naive-fp32", "posterior": "plug-in"},
    "posterior plug-in": {"posterior": "plug-in"},
    "posterior mixture": {"posterior": "mixture"},
    "mixture, corrector": {"posterior": "mixture", "corrector": "rescale", "eta": 0.5},
}
MASKED: dict[str, dict[str, Any]] = {
    **DIFFUSION,
    **{f"order {order}": {"order": order} for order in ("dilated", "bit-reversed", "probability", "margin")},
    "order entropy-bound": {"order": "entropy-bound", "bound": 0.5},
    "order first-hitting": {"order": "first-hitting", "steps": None},
    "guidance": {"guidance": 0.5},
}
TEXT = {"num": 2, "steps": 4, "seed": 0}
OTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "infill": ("infill", {"text": "the ___ sees [MASK:3].", **TEXT}),
    "rewrite": ("rewrite", {"text": "the cat sees the moon.", "t": 0.5, **TEXT}),
    "stream": ("stream", {"text": "the cat", **PLAIN}),
}
CLAMP = {"rewrite, clamp": ("rewrite", {"text": "the cat sees the moon.", "t": 0.5, "clamp": True, **TEXT})}
NO_STEPS = {"num": 2, "length": 32, "seed": 0}
SAMPLED: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "ar": {name: ("sample", {**NO_STEPS, **how}) for name, how in CONTROLS.items()},
    "mdlm": {**{name: ("sample", {**PLAIN, **how}) for name, how in MASKED.items()}, **OTHER},
    **{
        run: {**{name: ("sample", {**PLAIN, **how}) for name, how in UNIFORM.items()}, **OTHER, **CLAMP}
        for run in ("udlm", "duo", "ucdlm")
    },
}
"""For each run, the calls of its methods. Runs without settings of their own need no explicit order."""

EVALUATIONS = {
    "tiny": (
        "eval MDLM=trained/mdlm MCDLM=trained/mcdlm UDLM=trained/udlm DUO=trained/duo UCDLM=trained/ucdlm "
        "AR=trained/ar --judge trained/ar --tasks unconditional likelihood consistency --texts held=texts.txt "
        "--num 4 --times 4 --steps 4 --order random dilated bit-reversed --device cpu --dtype float32"
    ),
    "bundled": (
        "eval mdlm mcdlm-guided --tasks likelihood --texts corpus=corpus.txt --num 2 --times 2 --steps 4 "
        "--order random dilated --device cpu --dtype float32"
    ),
}
QUICK_EVALUATIONS = {
    "tiny": (
        "eval MDLM=trained/mdlm MCDLM=trained/mcdlm UDLM=trained/udlm AR=trained/ar --tasks likelihood "
        "--texts held=texts.txt --num 4 --times 4 --steps 4 --device cpu --dtype float32"
    )
}
IDENTITY = ("model", "task", "set")
MEASURES = (
    *("nelbo", "nelbo_interval", "nelbo_ppl", "nelbo_std_over_times", "nelbo_std_over_texts", "bits_per_character"),
    *(
        "pairs",
        "ppl",
        "ppl_interval",
        "ppl_model_token",
        "entropy",
        "entropy_interval",
        "nfe",
        "distinct_2",
    ),
)
"""Fields of results.jsonl that are compared, bit by bit."""
METRICS = (
    *("step", "kind", "loss", "gradient", "lr", "lambda", "nelbo", "entropy", "data_entropy", "texts"),
    *("next token", "consistency", "anchor", "hop", "distillation", "curriculum"),
)
"""Fields of metrics.jsonl that are compared, bit by bit; which of them there are depends on the method."""

Results = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Probe:
    """Runs everything under one tree, in a folder of its own."""

    tree: Path
    dialect: Dialect
    folder: Path
    quick: bool
    jobs: int
    models: Path
    """The bundled models."""

    def results(self) -> Results:
        """A digest, or the reason for failure, for each item."""
        self.folder.mkdir(parents=True)
        for name in ("corpus.txt", "texts.txt"):
            shutil.copyfile(FIXTURES / name, self.folder / name)
        self.check_tree()
        found: Results = {}
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            for part in pool.map(self.prepared, ["bytes"] if self.quick else PREPARED):
                found |= part
            runs = [run for run in RUNS if run.quick or not self.quick]
            for stage in ([run for run in runs if not run.start], [run for run in runs if run.start]):
                for part in pool.map(self.trained, stage):
                    found |= part
            resumed = [name for name in RESUMED if any(run.name == name for run in runs)]
            sampled = [name for name in SAMPLED if any(run.name == name for run in runs)]
            bundled = json.loads((FIXTURES / "samples.json").read_text())
            evaluations = QUICK_EVALUATIONS if self.quick else EVALUATIONS
            for part in (
                *pool.map(self.resumed, resumed[:1] if self.quick else resumed),
                *pool.map(self.sampled, sampled),
                *pool.map(lambda name: self.bundled(name, bundled[name]), bundled),
                *pool.map(lambda name: self.evaluated(name, evaluations[name]), evaluations),
            ):
                found |= part
        return found

    def run(self, command: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run this interpreter with the packages of the tree; -P keeps the current folder off the path."""
        env = {**os.environ, "PYTHONPATH": str(self.tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, "-P", *command], cwd=self.folder, env=env, input=text, capture_output=True, text=True
        )

    def cdlm(self, words: Sequence[str]) -> str | None:
        """Run ``cdlm ...``; returns the reason if it fails."""
        done = self.run(["-m", "cdlm", *self.dialect.command(words)])
        return None if done.returncode == 0 else failure(done)

    def check_tree(self) -> None:
        """Make sure that it is the tree which runs, and not another installation of the package."""
        found = self.run(["-c", "import cdlm; print(cdlm.__file__)"]).stdout.strip()
        if not Path(found).resolve().is_relative_to(self.tree.resolve()):
            sys.exit(f"the package that runs is {found}, which is not in {self.tree}")

    def prepared(self, name: str) -> Results:
        words = ["prepare", "corpus.txt", *shlex.split(PREPARED[name]), "--out", f"data/{name}"]
        item = f"data     {name}"
        if reason := self.cdlm(words):
            return {item: reason}
        digest = hashlib.sha256()
        for file in ("train.bin", "valid.bin"):
            digest.update((self.folder / "data" / name / file).read_bytes())
        return {item: digest.hexdigest()}

    def trained(self, run: Run) -> Results:
        reason = self.cdlm(run.words())
        return self.outcome(run.name, reason)

    def resumed(self, name: str) -> Results:
        """Cut a finished run after half of its steps, as if it had been killed there, and resume the copy."""
        run = next(run for run in RUNS if run.name == name)
        title = f"{name}, resumed"
        out = self.folder / "trained" / title
        if not (self.folder / "trained" / name / f"step-{STEPS:08d}").is_dir():
            return self.outcome(title, f"failed: there is no finished run {name}")
        shutil.copytree(self.folder / "trained" / name, out)
        shutil.rmtree(out / f"step-{STEPS:08d}")
        words = [*run.words()[:-1], f"trained/{title}", "--resume", "auto"]
        return self.outcome(title, self.cdlm(words))

    def outcome(self, name: str, reason: str | None) -> Results:
        """Digests of the last checkpoint and of the metrics of a run."""
        weights, metrics = f"weights  {name}", f"metrics  {name}"
        if reason:
            return {weights: reason, metrics: reason}
        run = self.folder / "trained" / name
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        kept = [{key: self.dialect.field(line, key) for key in METRICS} for line in lines]
        return {weights: checkpoint_digest(run / f"step-{STEPS:08d}"), metrics: digest_of(kept)}

    def sampled(self, run: str) -> Results:
        calls = [(title, *SAMPLED[run][title]) for title in SAMPLED[run]]
        return self.tokens(f"trained/{run}", f"tiny {run}", calls)

    def bundled(self, model: str, samples: Mapping[str, Any]) -> Results:
        calls = [(title, about["method"], about["arguments"]) for title, about in samples.items()]
        return self.tokens(str(self.models / model), model, calls[::4] if self.quick else calls)

    def tokens(self, source: str, label: str, calls: Sequence[tuple[str, str, Mapping[str, Any]]]) -> Results:
        """The token ids of several calls, drawn in one process."""
        spelled = [(title, *self.dialect.call(method, arguments)) for title, method, arguments in calls]
        attributes = [self.dialect.attributes.get(name, name) for name in ("tokens", "evaluations")]
        done = self.run([__file__, "--worker"], json.dumps([source, attributes, spelled]))
        if done.returncode:
            return {f"tokens   {label}: {title}": failure(done) for title, *_ in calls}
        return {f"tokens   {label}: {title}": value for title, value in json.loads(done.stdout).items()}

    def evaluated(self, name: str, command: str) -> Results:
        if reason := self.cdlm([*shlex.split(command), "--out", f"results-{name}"]):
            return {f"eval     {name}": reason}
        lines = (self.folder / f"results-{name}" / "results.jsonl").read_text().splitlines()
        found: Results = {}
        for row in map(json.loads, lines):
            field = self.dialect.field
            settings = (field(row, "sampling") or {}).get(self.dialect.keywords.get("order", "order"), "")
            title = " ".join(filter(None, [*(field(row, key) or "" for key in IDENTITY), settings]))
            found[f"eval     {title}"] = digest_of({key: field(row, key) for key in MEASURES})
        return found


def failure(done: subprocess.CompletedProcess[str]) -> str:
    """The last line that a failed command printed."""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return f"failed: {lines[-1] if lines else done.returncode}"


def digest_of(value: Any) -> str:
    """SHA-256 of a value as JSON; floats are written with all their digits."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def checkpoint_digest(folder: Path) -> str:
    """SHA-256 over all tensors of a checkpoint: the part, and names, types, shapes and bytes in sorted order."""
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.name.encode())
        for name, tensor in sorted(load_file(path).items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def worker() -> None:
    """In a process of a tree: read a model and calls from standard input, print the digests of the token ids."""
    import torch

    import cdlm

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as the command line does
    source, attributes, calls = json.load(sys.stdin)
    model = cdlm.load(source, "cpu", "float32")
    found: Results = {}
    for title, method, arguments in calls:
        try:
            samples = list(getattr(model, method)(**arguments))
        except Exception as error:
            found[title] = f"failed: {error!r}"
            continue
        found[title] = digest_of([[getattr(sample, name) for name in attributes] for sample in samples])
    print(json.dumps(found))


@contextlib.contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """A temporary checkout of a commit."""
    git = ["git", "-C", str(ROOT)]
    added = subprocess.run([*git, "worktree", "add", "--detach", str(folder), commit], capture_output=True, text=True)
    if added.returncode:
        sys.exit(f"cannot check out {commit}: {added.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(folder)], capture_output=True)
        subprocess.run([*git, "worktree", "prune"], capture_output=True)


def compare(before: Results, after: Results) -> tuple[list[str], int]:
    """A line for each item, and how many differ. What fails under the base as well proves nothing, and counts."""
    lines, different = [], 0
    for item in dict.fromkeys([*before, *after]):
        one, other = before.get(item, "missing"), after.get(item, "missing")
        same = one == other and not one.startswith(("failed", "missing"))
        lines.append(f"{item:<56} {'identical' if same else 'DIFFERENT'}  {other[:8] if same else ''}".rstrip())
        if not same:
            different += 1
            lines += [f"    {label}: {value[:200]}" for label, value in (("base", one), ("working tree", other))]
    return lines, different


def main() -> int:
    options = parse()
    if options.worker:
        worker()
        return 0
    found: list[Results] = []
    with tempfile.TemporaryDirectory(prefix="same-bits-") as name:
        folder = Path(name)
        with worktree(options.base, folder / "base") as base:
            base_dialect = WORKING if options.renamed_base else BASE
            models = base / "cdlm" / "zoo"
            for label, tree, dialect in ((options.base, base, base_dialect), ("working tree", ROOT, WORKING)):
                began = time.perf_counter()
                probe = Probe(tree, dialect, folder / f"probe-{len(found)}", options.quick, options.jobs, models)
                found.append(probe.results())
                print(f"{label}: {len(found[-1])} items in {time.perf_counter() - began:.0f} s", flush=True)
    lines, different = compare(*found)
    print("\n".join(lines))
    total = len(found[0] | found[1])
    print(f"{total - different} of {total} identical to {options.base}" + f", {different} DIFFERENT" * bool(different))
    return int(different > 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="fef84f3", help="commit to compare with [fef84f3]")
    parser.add_argument("--quick", action="store_true", help="only a subset of the runs and samplers")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time, of one thread each [2]")
    parser.add_argument("--renamed-base", action="store_true", help="the base has the names of the working tree")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
