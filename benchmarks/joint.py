"""Wall clock of a joint head, which draws the tokens of a step one after the other, against independent draws and AR.

    python -m benchmarks.joint --batches 1 8 32 --out joint.json

One trunk of the size of the bundled models, with random weights, and a joint head of one block. Beside the seconds are
the passes of the trunk and of the head for a sequence, and the GFLOP of a sequence (`benchmarks.cost`).
"""

import dataclasses
import json
from functools import partial

import torch

from benchmarks.autoregressive import causal_texts
from benchmarks.cost import sampling_flops
from benchmarks.network import arguments, machine, network, timed
from cdlm.model.config import SIZES
from cdlm.model.denoiser import Denoiser
from cdlm.process import masked
from cdlm.rng import seeded
from cdlm.sample.draw import last
from cdlm.sample.generate import generate
from cdlm.sample.settings import resolve


def samples(
    denoiser: Denoiser, sampler: str, b: int, l: int, steps: int, counted: list[tuple[float, float]], seed: int
):
    """Draw a batch; appends the passes of the trunk and of the head for a sequence, on average."""
    process, rng = denoiser.process, seeded(seed, batch=b)
    settings = resolve({"steps": steps, "sampler": sampler}, process, joint_head=True)
    calls = 0

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal calls
        calls += len(inputs[0])

    hook = denoiser.joint_head.register_forward_pre_hook(count)
    state = last(generate(denoiser, process, process.start(l, rng, denoiser.device), settings, rng))
    hook.remove()
    counted.append((sum(state.nfe) / b, calls / b))


def main() -> None:
    parser, _ = arguments(__doc__)
    parser.set_defaults(vocab_size=8192, hidden_size=384, num_layers=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    device, l, process = options.device, options.seq_length, masked(options.vocab_size)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = dataclasses.replace(
        SIZES["18m"],
        hidden_size=options.hidden_size,
        num_layers=options.num_layers,
        num_heads=max(1, options.hidden_size // 64),
        position_embeddings=0,
        tie_embeddings=False,
    )
    causal = network(shape, None, options.vocab_size, device, dtype)
    denoiser = network(dataclasses.replace(shape, joint_layers=1), process, options.vocab_size, device, dtype)
    print(f"{machine(device)}; {shape.num_layers} x {shape.hidden_size}, {options.vocab_size:,} tokens, length {l}\n")
    print(f"{'sampler':<12}{'batch':>6}{'steps':>7}{'NFE':>8}{'head':>8}{'GFLOP':>8}{'seconds':>9}{'x AR':>7}")
    rows: list[dict[str, float | str]] = []
    for b in options.batches:
        autoregressive, _ = timed(partial(causal_texts, causal, b, l, False), device, options.repeats)
        runs = [("AR", l - 1, (float(l - 1), 0.0), autoregressive)]
        for steps in options.steps:
            for sampler in ("ancestral", "joint"):
                counted: list[tuple[float, float]] = []
                work = partial(samples, denoiser, sampler, b, l, steps, counted)
                seconds, _ = timed(work, device, options.repeats)
                runs.append((sampler, steps, counted[-1], seconds))
        for sampler, steps, (nfe, head), seconds in runs:
            passes = 1.0 if sampler == "AR" else nfe  # with a cache every token is computed once
            gflop = sampling_flops(denoiser.config, options.vocab_size, l, passes, head) / 1e9
            ratio = autoregressive / seconds
            print(
                f"{sampler:<12}{b:>6}{steps:>7}{nfe:>8.1f}{head:>8.1f}{gflop:>8.1f}{seconds:>9.3f}{ratio:>7.2f}",
                flush=True,
            )
            row = {"sampler": sampler, "batch": b, "steps": steps, "evaluations": nfe, "head_evaluations": head}
            rows.append({**row, "gflop": gflop, "seconds": seconds, "times_ar": ratio})
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        about = {"machine": machine(device), **vars(options), "out": str(options.out), "rows": rows}
        options.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_flush_denormal(True)
    main()
