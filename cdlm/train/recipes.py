"""Complete named runs. Each says what it reproduces and what it costs; `cdlm train NAME --data DIR` starts it.

Three sizes: the paper's own (110M class, length 1024, GPT-2 vocabulary), `small-` (about 30M parameters, length 256, a
16k vocabulary: one GPU for minutes) and `tiny-` (a CPU for a minute); and `zoo-`, small enough to come with a package,
trained long enough to write English. `sudoku-` recipes train on grids. Two-stage methods name the run they distil.
"""

import dataclasses
from pathlib import Path
from typing import Any

from cdlm.model.config import SIZES, NetworkConfig
from cdlm.schedules import PAPER_STEPS
from cdlm.train.config import TrainConfig

SLUGS = (
    *("ar", "mdlm", "mcdlm", "mcdlm-pplopt", "mcdlm-guided", "few-step", "joint", "sdtt"),
    *("udlm", "duo", "ucdlm", "duo-dcd"),
)
"""The rows of the table of methods, which itself needs torch; a test compares them."""
CAUSAL = ("ar",)
TIME_CONDITIONED = ("udlm", "duo", "ucdlm", "duo-dcd")
JOINT = ("joint",)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A run, what it reproduces, and what it costs."""

    config: TrainConfig
    reproduces: str
    cost: str


def run(name: str, method: str, size: str, base: str | None = None, **changes: Any) -> TrainConfig:
    """A run of a method with the network that fits it, started from the run `base` if it distils one."""
    slug = method.partition(":")[0]
    causal, time_conditioning, joint_head = slug in CAUSAL, slug in TIME_CONDITIONED, slug in JOINT
    if slug not in SLUGS:  # a method of the user's own
        from cdlm.methods.spec import parse_method

        row, _ = parse_method(method)
        causal, time_conditioning, joint_head = row.process == "none", row.time_conditioning, row.joint_head
    network = dataclasses.replace(
        SIZES[size], causal=causal, time_conditioning=time_conditioning, joint_layers=int(joint_head)
    )
    start = Path("runs") / base if base else None
    return TrainConfig(method, out=Path("runs") / name, network=network, init_from=start, **changes)


def paper(name: str, reproduces: str, *, method: str | None = None, base: str | None = None, **changes: Any) -> Recipe:
    """The paper's scale: batches of 2048 x 1024 tokens unless told otherwise, and the 12 x 768 network, optimizer and
    learning rate of MDLM and DUO."""
    steps = changes.setdefault("steps", PAPER_STEPS)
    config = run(name, method or name, "110m", base, reference_steps=steps, **changes)
    tokens = config.steps * config.batch_size * config.seq_length
    return Recipe(config, reproduces, f"{tokens / 1e9:,.0f}B tokens; many GPUs, days")


def small(method: str, base: str | None = None, name: str | None = None, steps: int | None = None) -> Recipe:
    """The paper's proportions in 2,000 steps of 65,536 tokens: half for AR, a third for a distillation."""
    steps = steps or (1000 if method == "ar" else 667 if base else 2000)
    size: dict[str, Any] = {
        "batch_size": 256,
        "seq_length": 256,
        "learning_rate": 1e-3,
        "warmup_ratio": 0.05,
        "compile": True,
    }
    intervals: dict[str, Any] = {"valid_every": 500, "save_every": 500}
    reference = round(PAPER_STEPS * steps / 2000)
    name = name or method
    config = run(
        f"small-{name}",
        method,
        "small",
        base and f"small-{base}",
        steps=steps,
        reference_steps=reference,
        **size,
        **intervals,
    )
    return Recipe(config, f"{name} in the small", f"{steps * 65_536 / 1e6:.0f}M tokens; one GPU, minutes")


def tiny(method: str, base: str | None = None, name: str | None = None) -> Recipe:
    """Enough to see the loss fall on a laptop."""
    size: dict[str, Any] = {"steps": 300, "batch_size": 16, "seq_length": 64, "learning_rate": 2e-3, "dtype": "float32"}
    intervals: dict[str, Any] = {
        "log_every": 25,
        "valid_every": 150,
        "save_every": 100,
        "valid_batches": 4,
        "valid_samples": 2,
        "valid_sample_steps": 16,
    }
    name = name or method
    config = run(f"tiny-{name}", method, "tiny", base and f"tiny-{base}", **size, **intervals)
    return Recipe(config, f"{name} on a CPU", "0.3M tokens; a laptop, a minute")


def zoo(method: str, name: str, base: str | None = None) -> Recipe:
    """Readable texts from at most 18M parameters, 36 MB in bfloat16: a vocabulary of 8k, which is the head as well, and
    1.3 billion tokens. Blocks of whole sentences and learned positions: it knows where a text begins and ends.

    One base at a held learning rate; from it, runs of a quarter of its length whose learning rate falls to zero: the
    models that come with the package differ in nothing but the objective of their last fifth.

    cdlm prepare train.txt --valid valid.txt --train-vocab-size 8192 --seq-length 256 --packing sentences --out data
    """
    size: dict[str, Any] = {
        "batch_size": 512,
        "seq_length": 256,
        "compile": True,
        "optimizer": "muon",
        "warmup_ratio": 0.02,
    }
    rate: dict[str, Any] = (
        {"steps": 2048, "learning_rate": 2e-3, "cooldown_ratio": 0.9}
        if base
        else {"steps": 8192, "learning_rate": 3e-3}
    )
    intervals = {"valid_every": rate["steps"] // 2, "save_every": rate["steps"] // 2, "valid_samples": 2}
    config = run(f"zoo-{name}", method, "18m", base and f"zoo-{base}", **size, **rate, **intervals)
    tokens, minutes = config.steps * config.batch_size * config.seq_length, 3 if base else 13
    what = f"{name}, to write English at 18M parameters"
    return Recipe(config, what, f"{tokens / 1e6:,.0f}M tokens; one H200, {minutes} minutes or so")


def sudoku(side: int, method: str, base: str | None = None) -> Recipe:
    """Grids of Sudoku, whose distribution is known exactly (docs/sudoku.md); a third of the steps for a distillation.

    cdlm prepare --source sudoku-4 --out data
    """
    full = {4: 1500, 6: 6000}[side]
    size: dict[str, Any] = {
        "steps": full // 3 if base else full,
        "batch_size": 256,
        "seq_length": side * side,
        "learning_rate": SUDOKU_DISTILLATION_RATE if base else SUDOKU_RATE,
        "optimizer": "muon",
        "warmup_ratio": 0.05,
        "cooldown_ratio": 0.3,
        "dtype": "float32",
    }
    intervals = {"valid_every": full // 2, "save_every": full // 2, "valid_samples": 2, "valid_sample_steps": side}
    name = f"sudoku-{side}-{method}"
    choices = SUDOKU_CHOICES.get(method, "")
    config = run(name, method + choices, f"sudoku-{side}", base and f"sudoku-{side}-{base}", **size, **intervals)
    tokens = config.steps * config.batch_size * config.seq_length
    minutes = {4: "minutes", 6: "an hour"}[side]
    return Recipe(config, f"{method} on Sudoku, {side} x {side}", f"{tokens / 1e6:.0f}M tokens; a laptop, {minutes}")


def ablation(name: str, reproduces: str, choices: str) -> dict[str, Recipe]:
    """A row of the paper's ablations: MCDLM-PPLOptimized with one ingredient changed. docs/ablations.md says what the
    paper leaves open."""
    return {f"ablation-{name}": paper(f"ablation-{name}", reproduces, method=f"mcdlm-pplopt:{choices}")}


BASES: dict[str, str] = {"mcdlm-guided": "mdlm", "sdtt": "mdlm", "duo-dcd": "duo"}
"""The runs that the two-stage methods start from."""

SUDOKU_RATE, SUDOKU_DISTILLATION_RATE = 5e-3, 1e-3
SUDOKU_CHOICES = {"sdtt": ":smallest=0.03125", "duo-dcd": ":smallest=0.03125"}
"""A grid has few tokens: hops double from 1/32 to 1/2."""

MODERNBERT_SIZE = NetworkConfig(num_layers=16, dropout=0.0, tie_embeddings=True)
"""For the cost alone: 16 layers of a network of cdlm have as many weights as the 22 thinner ones of ModernBERT-base,
whose own network is trained."""

UPSTREAM: dict[str, Any] = {"steps": 1_000_000, "batch_size": 512, "warmup_ratio": 0.0025}
DCD: dict[str, Any] = {"steps": 50_000, "learning_rate": 6e-5, "warmup_ratio": 0.01, "ema_decay": 0.999}
SDTT: dict[str, Any] = {"steps": 50_000, "warmup_ratio": 0.05}
BASE: dict[str, Any] = {"steps": 100_000, "warmup_ratio": 0.025}

RECIPES: dict[str, Recipe] = {
    **{f"tiny-{method}": tiny(method, BASES.get(method)) for method in SLUGS},
    "tiny-mcdlm-sdtt": tiny("sdtt", "mcdlm", "mcdlm-sdtt"),
    **{f"small-{method}": small(method, BASES.get(method)) for method in SLUGS},
    "small-mcdlm-sdtt": small("sdtt", "mcdlm", "mcdlm-sdtt"),
    "small-mcdlm-guided": small("mcdlm-guided", "mdlm", steps=500),
    "zoo-base": zoo("mdlm", "base"),
    "zoo-mdlm": zoo("mdlm", "mdlm", "base"),
    "zoo-mcdlm-guided": zoo("mcdlm-guided", "mcdlm-guided", "base"),
    **{f"sudoku-{side}-{method}": sudoku(side, method, BASES.get(method)) for side in (4, 6) for method in SLUGS},
    "ar": paper("ar", "Table 1, AR (half the steps: it has a loss at every token)", steps=75_000, warmup_ratio=1 / 30),
    "mdlm": paper("mdlm", "Table 1, MDLM"),
    "mcdlm": paper("mcdlm", "Table 1, MCDLM"),
    "mcdlm-pplopt": paper("mcdlm-pplopt", "Table 1, MCDLM-PPLOptimized"),
    "udlm": paper("udlm", "Table 2, UDLM"),
    "duo": paper("duo", "Table 2, DUO: half curriculum, half plain"),
    "ucdlm": paper("ucdlm", "Table 2, UCDLM (its greedy row is a matter of sampling)"),
    "few-step": paper("few-step", "not in the paper: the likelihood of a sampler of 8 steps"),
    "joint": paper("joint", "not in the paper: the likelihood of samplers that draw the tokens of a step jointly"),
    "mcdlm-guided": paper(
        "mcdlm-guided",
        "not in the paper, and not yet tried at this size: a guided target, a quarter of a run from MDLM",
        base="mdlm",
        steps=PAPER_STEPS // 4,
        warmup_ratio=0.05,
    ),
    "mdlm-100k": paper("mdlm-100k", "the base of MDLM+SDTT", method="mdlm", **BASE),
    "sdtt": paper("sdtt", "Table 1, MDLM+SDTT", base="mdlm-100k", **SDTT),
    "mcdlm-100k": paper("mcdlm-100k", "the base of MCDLM+SDTT", method="mcdlm", **BASE),
    "mcdlm-sdtt": paper("mcdlm-sdtt", "Table 1, MCDLM+SDTT", method="sdtt", base="mcdlm-100k", **SDTT),
    "duo-100k": paper("duo-100k", "the base of DUO+DCD", method="duo", **BASE),
    "duo-dcd": paper("duo-dcd", "Table 2, DUO+DCD (its greedy row is a matter of sampling)", base="duo-100k", **DCD),
    "mdlm-upstream": paper("mdlm-upstream", "MDLM as its authors train it", method="mdlm", **UPSTREAM),
    "duo-upstream": paper("duo-upstream", "DUO as its authors train it", method="duo", **UPSTREAM),
    "sdtt-upstream": paper(
        "sdtt-upstream",
        "SDTT as its authors train it, in 7 rounds",
        method="sdtt:rounds=7",
        base="mdlm-upstream",
        steps=70_000,
        batch_size=128,
        warmup_ratio=1 / 28,
    ),
    "dcd-upstream": paper(
        "dcd-upstream", "DUO+DCD as its authors train it", method="duo-dcd", base="duo-upstream", batch_size=128, **DCD
    ),
    **ablation("steps-random", "Table 4, steps-random", "steps=random"),
    **ablation("steps-staged", "Table 4, steps-staged", "steps=staged"),
    **ablation("steps-increasing", "Table 4, steps-increasing", "steps=increasing"),
    **ablation("steps-decreasing", "Table 4, steps-decreasing", "steps=decreasing"),
    **ablation("kappa-0", "Table 5, kappa-0", "kappa=0,kappa_end=0"),
    **ablation("kappa-0.4", "Table 5, kappa-0.4", "kappa=0.4,kappa_end=0.2"),
    **ablation("kappa-1-additive", "Table 5, kappa 1 added to the loss", "kappa=1,kappa_end=1,additive=true"),
    **ablation("kappa-1-annealed", "Table 5, kappa 1 that falls to 0.2", "kappa=1,kappa_end=0.2"),
    **ablation("jsd", "Table 6, jsd", "divergence=jsd"),
    **ablation("kl", "Table 6, kl", "divergence=kl"),
    **ablation("reverse-kl", "Table 6, reverse-kl with the floor of the peers", "divergence=reverse_kl,floor=-1e6"),
    **ablation("overshoot-conditional", "not in the paper: t of at least delta", "overshoot=conditional"),
    "modernbert-mcdlm": Recipe(
        TrainConfig(
            "mcdlm",
            out=Path("runs/modernbert-mcdlm"),
            init_from=Path("answerdotai/ModernBERT-base"),
            network=MODERNBERT_SIZE,
            steps=10_000,
            reference_steps=10_000,
            batch_size=256,
            seq_length=1024,
            learning_rate=1e-4,
            warmup_ratio=0.05,
        ),
        "not in the paper, and not yet tried: ModernBERT-base fine-tuned by MCDLM",
        "2.6B tokens; one H200, 2 hours or more (estimated)",
    ),
}
