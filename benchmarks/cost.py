"""What a run costs before it is started: `python -m benchmarks.cost RECIPE --gpus 64 --gpu h100`.

The model adds what a step must do: matrix products at a share of the chip's own rate (another one for the network that
trains and for the one that only predicts), and passes over the vocabulary at so many elements a second. Its five
constants were fitted to two measured steps, those of MDLM and UDLM, and to the target's pass and the dense rows of
MCDLM and SDTT; docs/benchmarks.md has the points, and how far the model is from each. Between GPUs gradients travel at
a bandwidth that is an assumption, stated in the table.
"""

import dataclasses
import sys
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from cdlm.cli.common import console, parse, recipe
from cdlm.methods.spec import parse_method
from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.objective.coupling import Rollout
from cdlm.objective.divergence import rate_kl
from cdlm.objective.fused import GPU_CHUNK
from cdlm.objective.target import Network, Revealed
from cdlm.process import SCHEDULES, Process
from cdlm.rng import seeded
from cdlm.train.config import TrainConfig

TRAINED, PREDICTED, HEAD = 0.455, 0.585, 0.85
"""Shares of the matrix rate: a network forward and backward, forward alone, and the head."""
POINT, LAW, RATES = 10.8e-12, 13e-12, 24.3e-12
"""Seconds for each row and token of the vocabulary, on an H200: point masses, dense targets, reverse rates."""
ACTIVATIONS = 37
"""Bytes kept for each token, block and unit of width."""
HOST = 0.04
"""Seconds below which a pass waits for its host."""
NODE, INSIDE, BETWEEN = 8, 300e9, 40e9
"""GPUs in a node, and the bytes a second at which each takes part in an all-reduce within it and across nodes."""
OVERLAP = 0.5
"""The share of a step behind which communication hides."""

GPUS = {
    "h200": (780e12, 4.8e12, 139.0),
    "h100": (780e12, 3.35e12, 79.0),
    "a100": (250e12, 2.0e12, 79.0),
}
"""Matrix rate in bfloat16, memory bandwidth, memory in GiB. The H200's rate is measured, the others are assumed."""


@dataclasses.dataclass(frozen=True)
class CostConfig:
    """Estimate what a recipe takes: FLOPs, memory, step time and days."""

    recipe: tyro.conf.Positional[str]
    """A recipe, or the run.json of a run."""
    gpus: int = 1
    """How many, each with its own replica of the network."""
    gpu: Literal["h200", "h100", "a100"] = "h200"
    """Which kind."""
    micro_batch_size: int | None = None
    """Sequences that a GPU computes at a time. [the most that fit]"""
    vocab_size: int | None = None
    """Size of the vocabulary. [GPT-2's for texts of 1024 tokens, else 16,384]"""

    def __post_init__(self) -> None:
        if (
            self.gpus < 1
            or (self.micro_batch_size is not None and self.micro_batch_size < 1)
            or (self.vocab_size is not None and self.vocab_size < 2)
        ):
            raise ValueError("--gpus and --micro-batch-size must be at least 1, and --vocab-size at least 2")


@dataclasses.dataclass(frozen=True)
class Cost:
    """The estimate. Times are of one optimiser step, unless they say otherwise."""

    parameters: int
    vocab: int
    tokens: int
    """Of the whole run."""
    flops: float
    """Of the whole run."""
    micro: int
    passes: int
    """Micro-batches of each GPU in a step."""
    gib: float
    trunk: float
    head: float
    waiting: float
    """For gradients of other GPUs, beyond what hides behind the computation."""
    seconds: float
    days: float
    speed: float
    """Tokens a second, all GPUs together."""


@dataclasses.dataclass(frozen=True)
class _Work:
    """What one token asks for, on average."""

    trained: float = 0.0
    """Matrix FLOPs, forward and backward."""
    predicted: float = 0.0
    head: float = 0.0
    point: float = 0.0
    """Rows of the vocabulary."""
    law: float = 0.0
    rates: float = 0.0


def estimate(
    config: TrainConfig, gpus: int = 1, gpu: str = "h200", micro: int | None = None, vocab: int | None = None
) -> Cost:
    """The cost of a run; a layout that does not fit is refused."""
    rate, bandwidth, room = GPUS[gpu]
    if config.batch_size % gpus:
        raise ValueError(
            f"a batch of {config.batch_size} sequences does not divide among {gpus} GPUs; use a divisor of it"
        )
    own = config.batch_size // gpus
    method, choices = parse_method(config.method)
    vocab = vocab or (50_257 if config.seq_length >= 1024 else 16_384)
    process = method.default_process(vocab)
    if process is not None:
        process = dataclasses.replace(process, noise=SCHEDULES[config.noise_schedule]())
    with torch.device("meta"):
        parameters = Denoiser(config.network, process, vocab=vocab).count()
    target = method(process, config.steps, **choices).network is not None

    def memory(sequences: int) -> float:
        copies = 5 + target + (gpus > 1)  # weights, gradients, two moments, average; target; buckets that travel
        width = config.network.num_layers * config.network.hidden_size
        kept = ACTIVATIONS * width * sequences * config.seq_length + 3 * GPU_CHUNK * 2 * vocab
        return (4 * copies * parameters + kept) / 2**30

    fitting = [n for n in range(1, own + 1) if own % n == 0 and memory(n) <= 0.95 * room]
    if micro is None:
        if not fitting:
            raise ValueError(f"not even one sequence fits a {gpu}: {memory(1):.0f} GiB are needed, and it has {room:g}")
        micro = fitting[-1]
    elif own % micro:
        raise ValueError(f"{own} sequences a GPU do not divide into micro-batches of {micro}")
    elif micro not in fitting:
        most = f"use --micro-batch-size {fitting[-1]}" if fitting else "nothing fits"
        raise ValueError(f"{micro} sequences need {memory(micro):.0f} GiB, and a {gpu} has {room:g}; {most}")
    work, tokens = _work(config, process, vocab), own * config.seq_length
    scale = GPUS["h200"][1] / bandwidth
    trunk = tokens * (work.trained / TRAINED + work.predicted / PREDICTED) / rate
    rows = (work.point * POINT + work.law * LAW + work.rates * RATES) * vocab * scale
    head = tokens * (work.head / (HEAD * rate) + rows)
    passes = own // micro
    busy = max(trunk + head, passes * HOST)
    across = INSIDE if gpus <= NODE else BETWEEN
    travel = 0.0 if gpus == 1 else 2 * (gpus - 1) / gpus * 4 * parameters / across
    waiting = max(0.0, travel - OVERLAP * busy / passes)
    seconds = busy + waiting
    total = config.steps * config.batch_size * config.seq_length
    flops = total * (work.trained + work.predicted + work.head)
    days = seconds * config.steps / 86_400
    speed = config.batch_size * config.seq_length / seconds
    return Cost(
        parameters, vocab, total, flops, micro, passes, memory(micro), trunk, head, waiting, seconds, days, speed
    )


def _work(config: TrainConfig, process: Process | None, vocab: int) -> _Work:
    """Read off the terms of the method: how often each network runs, and at how many rows its head."""
    method, choices = parse_method(config.method)
    objective, shape = method(process, config.steps, **choices), config.network
    attention = 2 * config.seq_length * shape.hidden_size * (0.5 if shape.causal else 1.0)
    block, column = shape.num_layers * (12 * shape.hidden_size**2 + attention), shape.hidden_size * vocab
    sums = dict.fromkeys(("trained", "predicted", "head", "point", "law", "rates"), 0.0)
    sums["predicted" if config.freeze_trunk else "trained"] = (2 if config.freeze_trunk else 6) * block
    shares = [sum(term.share(k / 8) for k in range(8)) for term in objective.terms]  # they may change on the way
    for term, part in zip(objective.terms, shares, strict=True):
        share = part / sum(shares)
        s, t = term.times(0.5, torch.arange(4096), 4096, seeded(0, batch=4096))
        masks = process is not None and process.absorbing
        noisy, later = 1.0, 0.0
        if process is not None:
            noisy = float((1 - process.noise.alpha(t)).mean()) if masks else 1.0
        if isinstance(term.target, Revealed) and process is not None:
            noisy = float((process.noise.alpha(s) - process.noise.alpha(t)).mean())
        if term.reduction == "sequence":
            sums["trained"] += share * 6 * noisy * _joint_weights(shape)
        if isinstance(term.target, Network) and process is not None:
            live = float((s > 0).double().mean())
            later = float((1 - process.noise.alpha(s)).mean()) if masks else live
            rollout = isinstance(term.coupling, Rollout)
            sums["predicted"] += share * 2 * block * (live + rollout)
            later = noisy if rollout else later
            sums["head"] += share * 2 * later * column
        sums["head"] += share * 6 * noisy * column
        rates = term.divergence is rate_kl and not masks
        sums["rates" if rates else "point"] += share * (noisy - later)
        sums["law"] += share * later
    return _Work(**sums)


def _joint_weights(shape: NetworkConfig) -> int:
    """Matrix entries of a joint head."""
    return (12 * shape.joint_layers + 3) * shape.hidden_size**2


def sampling_flops(shape: NetworkConfig, vocab: int, length: int, nfe: float, head_evaluations: float) -> float:
    """What a sample costs: `nfe` passes of the trunk, `head_evaluations` of the joint head, and the logits of every
    token once. Caches make the attention of the joint head small; it is left out."""
    block = shape.num_layers * (12 * shape.hidden_size**2 + 2 * length * shape.hidden_size)
    joint = head_evaluations * _joint_weights(shape) if shape.joint_layers else 0
    return 2 * (nfe * length * block + joint + length * shape.hidden_size * vocab)


def show_cost(config: CostConfig, run: TrainConfig, console: Console) -> None:
    """A table for people."""
    found = estimate(run, config.gpus, config.gpu, config.micro_batch_size, config.vocab_size)
    table = Table(title=f"{config.recipe} on {config.gpus} x {config.gpu}", show_header=False)
    step = f"{found.seconds:.3f} s: trunk {found.trunk:.3f}, head {found.head:.3f}, waiting {found.waiting:.3f}"
    hours = found.days * 24
    time = (
        f"{found.days:.2f} days" if hours >= 24 else f"{hours:.2f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"
    )
    layout = f"{config.gpus} GPUs x {found.passes} passes x {found.micro} sequences of {run.seq_length} tokens"
    for name, value in (
        ("parameters", f"{found.parameters / 1e6:,.1f}M, with a vocabulary of {found.vocab:,}"),
        ("tokens", f"{found.tokens / 1e6:,.1f}M in {run.steps:,} steps of {run.batch_size} x {run.seq_length}"),
        ("arithmetic", f"{found.flops:.2e} FLOP"),
        ("layout", layout),
        ("memory", f"{found.gib:.1f} of {GPUS[config.gpu][2]:g} GiB on each GPU"),
        ("a step", step),
        ("speed", f"{found.speed:,.0f} tokens/s"),
        ("time", f"{time}; {found.days * 24 * config.gpus:,.0f} GPU hours"),
    ):
        table.add_row(name, value)
    console.print(table)
    notes = (
        "Fitted to steps measured on one H200 (docs/benchmarks.md). Validation, checkpoints and compiling come on top."
    )
    if config.gpu != "h200":
        notes += f" The rates of a {config.gpu} are assumed."
    if config.gpus > 1:
        across = INSIDE if config.gpus <= NODE else BETWEEN
        notes += f" Gradients travel at {across / 1e9:.0f} GB/s a GPU, behind half of a step: assumed."
    console.print(notes, highlight=False)


def main() -> None:
    """`python -m benchmarks.cost RECIPE`."""
    try:
        config = parse(CostConfig, "cost", sys.argv[1:], prog="python -m benchmarks.cost")
        show_cost(config, recipe(config.recipe), console())
    except ValueError as error:
        sys.exit(f"cost: {error}")


if __name__ == "__main__":
    main()
