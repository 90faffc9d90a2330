"""The sampler against the published one, on the same weights: time, memory, evaluations, and whether the laws agree.

    python -m benchmarks.sampling                                      # 2 CPU cores: 12 x 768, 256 tokens, 4 texts
    python -m benchmarks.sampling --device cuda --batch-size 32 --steps 32  # a GPU: 1,024 tokens
    python -m benchmarks.sampling --process uniform

reference   the full law over the vocabulary and a race in double precision at every position and step
            (cdlm.sample.naive); on a GPU under bfloat16 autocast, as the public code of MDLM and DUO runs
ours        cdlm.sample.ancestral: positions first, head and draw only there; the same law. Compiled, the weights are
            bfloat16 and the network is recorded as a graph.
"""

import argparse
import contextlib
import json
import math
from collections.abc import Callable

import torch

from benchmarks.network import arguments, machine, network, timed
from cdlm.metrics.diversity import entropy
from cdlm.model.compile import accelerate
from cdlm.model.config import NetworkConfig
from cdlm.process import masked, uniform
from cdlm.rng import seeded
from cdlm.sample.ancestral import ancestral
from cdlm.sample.draw import Draw, State, last
from cdlm.sample.naive import naive_ancestral
from cdlm.sample.settings import resolve


def main() -> None:
    options = parse()
    device, b, l = options.device, options.batch_size, options.seq_length
    process = (masked if options.process == "masked" else uniform)(options.vocab_size)
    shape = NetworkConfig(
        options.hidden_size,
        options.num_layers,
        max(1, options.hidden_size // 64),
        time_conditioning=process.name == "uniform",
    )
    settings = resolve({"steps": options.steps}, process)
    plain = network(shape, process, options.vocab_size, device, torch.float32)
    low = torch.bfloat16 if device == "cuda" else torch.float32
    fast = network(shape, process, options.vocab_size, device, low)

    def half() -> contextlib.AbstractContextManager:
        return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else contextlib.nullcontext()

    def reference(repeat: int) -> State:
        rng = seeded(repeat, "reference", batch=b)
        with half():
            x = process.start(l, rng, device)
            return last(naive_ancestral(plain, process, x, settings, rng, dtype=torch.float64))

    def ours(repeat: int, compiled: bool = False) -> State:
        rng = seeded(repeat, "ours", batch=b)
        with contextlib.nullcontext() if compiled else half():
            x, draw = process.start(l, rng, device), Draw(compiled=compiled)
            return last(ancestral(fast if compiled else plain, process, x, settings, rng, draw=draw))

    size = f"{shape.num_layers} x {shape.hidden_size}"
    print(f"{machine(device)}; {options.process}, {size}, vocabulary {options.vocab_size:,}")
    print(f"{b} texts of {l} tokens in {options.steps} steps, median of {options.repeats}\n")
    print(f"{'sampler':<34}{'seconds':>9}{'tokens/s':>12}{'NFE':>7}{'GiB':>7}{'entropy':>16}")
    rows = [row("reference", reference, options)]
    rows.append(row("ours", ours, options))
    if options.compile:
        plain.backbone.compile()
        rows.append(row("reference, trunk compiled", reference, options))
        accelerate(fast)
        rows.append(row("ours, compiled", lambda repeat: ours(repeat, compiled=True), options))
    gap = abs(rows[0]["entropy"] - rows[1]["entropy"]) / math.hypot(rows[0]["error"], rows[1]["error"])
    print(f"\nreference and ours, same network: entropies of the samples differ by {gap:.1f} standard errors", end="")
    print(f"; tokens by frequency: chi-square p = {same_tokens(rows[0]['tokens'], rows[1]['tokens']):.2g}")
    for one in rows:
        one.pop("tokens")
    if options.out:
        about = {"machine": machine(device), **vars(options), "out": str(options.out), "rows": rows}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(about, indent=1) + "\n")
    print(f"memory {rows[0]['gib'] / rows[-1]['gib']:.1f} x less")
    print(f"speed-up {rows[0]['seconds'] / rows[-1]['seconds']:.1f} x")


def row(name: str, work: Callable[[int], State], options: argparse.Namespace) -> dict:
    """Measure one sampler, print its line; texts come from the timed runs and one more."""
    states: list[State] = []
    seconds, gib = timed(lambda repeat: states.append(work(repeat)), options.device, options.repeats)
    x = torch.cat([state.x for state in states]).cpu()
    nats = torch.cat([entropy(part) for part in x.split(8)])
    evaluations = sum(sum(state.nfe) for state in states) / len(x)
    error = float(nats.std() / math.sqrt(len(nats)))
    speed = options.batch_size * options.seq_length / seconds
    print(f"{name:<34}{seconds:>9.3f}{speed:>12,.0f}{evaluations:>7.1f}{gib:>7.2f}{nats.mean():>9.3f} ± {error:.3f}")
    values = {"name": name, "seconds": seconds, "tokens_per_second": speed, "evaluations": evaluations, "gib": gib}
    return {**values, "entropy": float(nats.mean()), "error": error, "tokens": x}


def same_tokens(one: torch.Tensor, other: torch.Tensor) -> float:
    """Chi-square of two samples over twenty classes of tokens of equal size."""
    counts = torch.stack([x.flatten().bincount(minlength=int(max(one.max(), other.max())) + 1) for x in (one, other)])
    order = counts.sum(0).argsort(descending=True)
    share = counts.sum(0)[order].cumsum(0) / counts.sum()
    kind = (share * 20).clamp(max=19.999).long()
    table = torch.zeros(2, 20, dtype=torch.float64).index_add_(1, kind, counts[:, order].double())
    table = table[:, table.sum(0) > 0]
    expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
    value = ((table - expected) ** 2 / expected).sum()
    half = torch.tensor((table.shape[1] - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, value / 2))


def parse() -> argparse.Namespace:
    parser, gpu = arguments(__doc__)
    parser.add_argument("--process", choices=["masked", "uniform"], default="masked")
    parser.add_argument("--batch-size", type=int, default=32 if gpu else 4)
    parser.add_argument("--steps", type=int, default=32 if gpu else 16)
    parser.add_argument("--seq-length", type=int, default=1024 if gpu else 256)
    parser.add_argument("--repeats", type=int, default=5 if gpu else 1)
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_flush_denormal(True)
    main()
