"""How the cost of a step grows with length, vocabulary and batch, one of them at a time, beside the model of cost.py.

    python -m benchmarks.growth --device cuda --out docs/growth.json     # table, JSON, and growth.png
    python -m benchmarks.growth --redraw docs/growth.json

How sampling grows with steps is in benchmarks.autoregressive.
"""

import argparse
import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.cost import estimate
from benchmarks.network import arguments, machine, timed
from benchmarks.training import HEADLINE, build, tokens, training
from cdlm.train.recipes import RECIPES


def main() -> None:
    options = parse()
    if options.redraw:
        plot(json.loads(options.redraw.read_text())["rows"], options.redraw.with_suffix(".png"))
        return
    gpu = options.device == "cuda"
    print(f"{machine(options.device)}; {options.method}, {options.num_layers} x {options.hidden_size}")
    print(f"{'varied':<8}{'length':>8}{'vocab':>9}{'batch':>7}{'seconds':>10}{'tokens/s':>11}{'GiB':>7}", end="")
    print(f"{'model: s':>11}{'GiB':>7}" if gpu else "")
    rows: list[dict[str, Any]] = []
    for varied, length, vocab, batch in points(options):
        options.seq_length, options.vocab_size, options.batch_size = length, vocab, batch
        try:
            rows.append({"varied": varied, **measure(varied, options)})
        except torch.OutOfMemoryError:
            print(f"{varied:<8}{length:>8}{vocab:>9,}{batch:>7}  does not fit")
            continue
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            about = {"machine": machine(options.device), "method": options.method, "rows": rows}
            options.out.write_text(json.dumps(about, indent=1) + "\n")
    if options.out:
        plot(rows, options.out.with_suffix(".png"))


def points(options: argparse.Namespace) -> list[tuple[str, int, int, int]]:
    """The base, then each of the others; texts of another length fill as many tokens as before."""
    l, v, b = options.seq_length, options.vocab_size, options.batch_size
    found = [("base", l, v, b)]
    found += [("length", n, v, max(1, b * l // n)) for n in options.lengths]
    found += [("vocab", l, n, b) for n in options.vocabs]
    return found + [("batch", l, v, n) for n in options.batches]


def measure(varied: str, options: argparse.Namespace) -> dict[str, Any]:
    torch._dynamo.reset()
    gpu, l, v, b = options.device == "cuda", options.seq_length, options.vocab_size, options.batch_size
    state, several = build(options.method, "ours", b, options), 5 if options.device == "cuda" else 1
    seconds, gib = timed(training(state, tokens(b, options), several), options.device, options.repeats)
    seconds /= several
    row = {"length": l, "vocab": v, "batch": b, "seconds": seconds, "tokens_per_second": b * l / seconds, "gib": gib}
    line = f"{varied:<8}{l:>8}{v:>9,}{b:>7}{seconds:>10.4f}{b * l / seconds:>11,.0f}{gib:>7.1f}"
    if gpu:
        run = dataclasses.replace(
            RECIPES[options.method].config, batch_size=b, seq_length=l, network=state.config.network
        )
        found = estimate(run, micro=b, vocab=v)
        row |= {"model_seconds": found.seconds, "model_gib": found.gib}
        line += f"{found.seconds:>11.4f}{found.gib:>7.1f}"
    print(line, flush=True)
    return row


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Tokens a second and memory over each that was varied; the model's lines are dashed."""
    import matplotlib.pyplot as plt

    kinds = [kind for kind in ("length", "vocab", "batch") if any(row["varied"] == kind for row in rows)]
    size = 1 + 3 * len(kinds), 5
    figure, axes = plt.subplots(2, len(kinds), figsize=size, layout="constrained", sharey="row", squeeze=False)
    for k, kind in enumerate(kinds):
        own = sorted((row for row in rows if row["varied"] in ("base", kind)), key=lambda row: row[kind])
        places = [row[kind] for row in own]
        axes[0][k].plot(places, [row["tokens_per_second"] / 1e3 for row in own], "o-", label="measured")
        axes[1][k].plot(places, [row["gib"] for row in own], "o-", label="measured")
        if "model_seconds" in own[0]:
            speeds = [row["batch"] * row["length"] / row["model_seconds"] / 1e3 for row in own]
            axes[0][k].plot(places, speeds, "--", color="0.5", label="cost model")
            axes[1][k].plot(places, [row["model_gib"] for row in own], "--", color="0.5", label="cost model")
        for row in range(2):
            axes[row][k].set(xscale="log")
            axes[row][k].set_xticks(places, [f"{place:,}" for place in places], fontsize=8)
            axes[row][k].minorticks_off()
            axes[row][k].grid(alpha=0.3)
        axes[1][k].set_xlabel({"length": "length (tokens a step kept)", "vocab": "vocabulary"}.get(kind, kind))
    for row in axes:
        row[0].set_ylim(bottom=0)
    axes[0][0].set_ylabel("thousand tokens a second")
    axes[1][0].set_ylabel("GiB")
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def parse() -> argparse.Namespace:
    parser, gpu = arguments(__doc__)
    parser.set_defaults(
        vocab_size=50257 if gpu else 16384, hidden_size=768 if gpu else 384, num_layers=12 if gpu else 8
    )
    parser.add_argument("--method", default=HEADLINE)
    parser.add_argument("--seq-length", type=int, default=1024 if gpu else 256)
    parser.add_argument("--batch-size", type=int, default=64 if gpu else 8)
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 2048, 4096] if gpu else [64, 128, 512])
    parser.add_argument("--vocabs", type=int, nargs="*", default=[16384, 100352] if gpu else [4096, 50257])
    parser.add_argument("--batches", type=int, nargs="*", default=[8, 128] if gpu else [2, 16])
    parser.add_argument("--repeats", type=int, default=3 if gpu else 1)
    parser.add_argument("--redraw", type=Path, help="draw the figure of an earlier run again")
    return parser.parse_args()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
