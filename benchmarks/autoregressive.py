"""Wall clock of diffusion against an autoregressive model with a cache of keys and values, same size and length.

    python -m benchmarks.autoregressive --device cuda --out docs/wallclock.json     # table, JSON, and wallclock.png

Papers count evaluations; a user waits for seconds. Both models are compiled and recorded as graphs where there is a
GPU; the autoregressive one reads its whole cache at each token. Times include everything but the first, compiling run.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch

from benchmarks.network import arguments, machine, network, timed
from cdlm.model.compile import accelerate
from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.process import masked
from cdlm.rng import seeded
from cdlm.sample.ancestral import ancestral
from cdlm.sample.autoregressive import autoregressive
from cdlm.sample.draw import Draw, last
from cdlm.sample.settings import resolve


def main() -> None:
    options = parse()
    device, l, process = options.device, options.seq_length, masked(options.vocab_size)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = NetworkConfig(options.hidden_size, options.num_layers, max(1, options.hidden_size // 64))
    print(
        f"{machine(device)}; {shape.num_layers} x {shape.hidden_size}, vocabulary {options.vocab_size:,}, {l} tokens\n"
    )
    print(f"{'model':<12}{'batch':>6}{'steps':>7}{'NFE':>9}{'seconds':>9}{'tokens/s':>12}{'GiB':>7}{'x AR':>8}")
    rows: list[dict] = []
    for b in options.batches:
        causal, denoiser = (network(shape, kind, options.vocab_size, device, dtype) for kind in (None, process))
        if options.compile:
            accelerate(causal)
            accelerate(denoiser)

        seconds, gib = timed(partial(causal_texts, causal, b, l, options.compile), device, options.repeats)
        rows.append(report("AR", b, l, l - 1, seconds, gib, seconds, options))
        for steps in options.steps:
            nfe: list[float] = []
            work = partial(texts, denoiser, b, l, steps, options.compile, nfe)
            own, gib = timed(work, device, options.repeats)
            rows.append(report("diffusion", b, steps, nfe[-1], own, gib, seconds, options))
        save(rows, options)
    if options.out:
        plot(rows, options.out.with_suffix(".png"), l)


def causal_texts(denoiser: Denoiser, b: int, l: int, compiled: bool, seed: int) -> None:
    x = torch.zeros(b, l, dtype=torch.long, device=denoiser.device)
    last(autoregressive(denoiser, None, x, resolve({}, None), seeded(seed, batch=b), draw=Draw(compiled=compiled)))


def texts(denoiser: Denoiser, b: int, l: int, steps: int, compiled: bool, nfe: list[float], seed: int) -> None:
    process, rng = denoiser.process, seeded(seed, batch=b)
    x = process.start(l, rng, denoiser.device)
    settings = resolve({"steps": steps}, process)
    state = last(ancestral(denoiser, process, x, settings, rng, draw=Draw(compiled=compiled)))
    nfe.append(sum(state.nfe) / b)


def report(
    name: str, b: int, steps: int, nfe: float, seconds: float, gib: float, ar: float, options: argparse.Namespace
) -> dict:
    speed = b * options.seq_length / seconds
    print(
        f"{name:<12}{b:>6}{steps:>7}{nfe:>9.1f}{seconds:>9.3f}{speed:>12,.0f}{gib:>7.2f}{ar / seconds:>8.2f}",
        flush=True,
    )
    row = {"model": name, "batch": b, "steps": steps, "evaluations": nfe, "seconds": seconds}
    return {**row, "tokens_per_second": speed, "gib": gib, "times_ar": ar / seconds}


def save(rows: list[dict], options: argparse.Namespace) -> None:
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        about = {"machine": machine(options.device), **vars(options), "out": str(options.out), "rows": rows}
        options.out.write_text(json.dumps(about, indent=1) + "\n")


def plot(rows: list[dict], path: Path, length: int) -> None:
    """Tokens a second over steps, one colour for each batch size; the autoregressive model is a level line."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for k, b in enumerate(sorted({row["batch"] for row in rows})):
        own = [row for row in rows if row["batch"] == b]
        line = [row for row in own if row["model"] == "diffusion"]
        speeds = [row["tokens_per_second"] for row in line]
        axes.plot([row["steps"] for row in line], speeds, "o-", color=f"C{k}", label=f"batch {b}")
        ar = next(row["tokens_per_second"] for row in own if row["model"] == "AR")
        axes.axhline(ar, color=f"C{k}", linestyle="--", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="denoising steps", ylabel="tokens a second")
    axes.set_title(f"Texts of {length} tokens: diffusion (solid), autoregressive with a cache (dashed)", fontsize=10)
    steps = sorted({row["steps"] for row in rows if row["model"] == "diffusion"})
    axes.set_xticks(steps, [str(step) for step in steps])
    axes.legend(frameon=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def parse() -> argparse.Namespace:
    parser, gpu = arguments(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32] if gpu else [1])
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--seq-length", type=int, default=1024 if gpu else 128)
    parser.add_argument("--repeats", type=int, default=3 if gpu else 1)
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_flush_denormal(True)
    main()
