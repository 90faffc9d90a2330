"""Training steps of every method: ours, and the same step written plainly, in one process on the same network.

The plain version takes the whole law over the vocabulary at every position of every sequence, of student and target
alike, in float32, and leaves the gradient to autograd: the public code of MDLM, DUO and SDTT works like this. Both see
the same noise, and their losses are compared. A step is everything: noise, loss, gradient, its norm, AdamW, and the
averages of weights.

    python -m benchmarks.training --device cuda --out training.json
"""

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.network import arguments, machine, timed
from cdlm.devices import autocast
from cdlm.methods import METHODS, Method
from cdlm.model.config import SIZES, NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.model.ema import frozen_copy
from cdlm.objective import Objective
from cdlm.objective.loss import Loss, split, stack
from cdlm.objective.target import Network
from cdlm.rng import Rng, seeded
from cdlm.train.config import TrainConfig
from cdlm.train.distributed import World
from cdlm.train.step import Learner, make_learner, train_step
from cdlm.types import Tokens

HEADLINE = "mcdlm"


@dataclasses.dataclass(frozen=True)
class Plain(Objective):
    """Eq. (8) with [b, l, v] laws in float32 everywhere."""

    def loss(
        self, student: Denoiser, target: Denoiser | None, x0: Tokens, step: int, rng: Rng, *, plain: bool = True
    ) -> Loss:
        progress = step / self.total
        shares = [term.share(progress) for term in self.terms]
        x0 = x0.to(student.device)
        batch = []
        for term, (rows, stratum, strata) in zip(self.terms, split(shares, rng), strict=True):
            if len(rows):
                data = x0[rows.to(x0.device)]
                batch.append((term, term.draw(data, progress, stratum, strata, rng[rows], target)))
        inputs = [pair.student_input for _, pair in batch]
        hidden = student.features(stack(inputs), torch.cat([pair.alpha_t for _, pair in batch]))
        law = student.head(hidden)  # [b, l, v], float32
        if target is not None:  # Algorithm 1: a target for every sequence, those with s = 0 among them
            with torch.no_grad():
                ends = target.features(stack([pair.x_s for _, pair in batch]), torch.cat([p.alpha_s for _, p in batch]))
                other = target.head(ends)  # [b, l, v] again
        total, tokens, means, first = law.new_zeros(()), 0, {}, 0
        for term, pair in batch:
            b, l = pair.x0.shape
            here = slice(first, first + b)
            f = law[here].flatten(0, 1)
            first, tokens = first + b, tokens + b * l
            at = pair.at(torch.arange(b * l, device=f.device)).to(f.device)
            clean = at.x0 if not isinstance(term.target, Network) else at.x_s.clamp(max=student.vocab - 1)
            d = term.divergence(target=clean.to(f.device), student=f, pair=at)
            if isinstance(term.target, Network):
                assert target is not None
                if pair.drawn_from is not None:
                    with torch.no_grad():
                        seen = target.head(pair.drawn_from).flatten(0, 1)
                    d = term.divergence(target=seen, student=f, pair=at)
                dense = term.divergence(target=other[here].flatten(0, 1), student=f, pair=at)
                d = torch.where(pair.known.flatten().to(f.device), d, dense)
            d = torch.where(pair.positions.flatten().to(f.device), d, 0.0)
            value = (term.weight(at).to(d.device, d.dtype) * d).sum()
            total, means[term.name] = total + value, value.detach() / (b * l)
        return Loss(sum(shares) * total / tokens, means)


def main() -> None:
    parser, gpu = arguments(__doc__)
    parser.set_defaults(
        vocab_size=50257 if gpu else 16384, hidden_size=768 if gpu else 384, num_layers=12 if gpu else 8
    )
    parser.add_argument("--seq-length", type=int, default=1024 if gpu else 256)
    parser.add_argument("--batch-size", type=int, default=64 if gpu else 8)
    parser.add_argument("--plain-batch", type=int, default=16 if gpu else 8, help="the plain version needs the memory")
    parser.add_argument(
        "--methods", nargs="+", default=["mdlm", "mcdlm", "udlm", "duo", "sdtt", "duo-dcd", "ucdlm", "ar"]
    )
    parser.add_argument("--repeats", type=int, default=5 if gpu else 2)
    parser.add_argument(
        "--columns", nargs="+", default=["plain", "plain-compiled", "ours"] if gpu else ["plain", "ours"]
    )
    chosen = parser.parse_args()
    print(machine(chosen.device))
    rate = matrix_rate(chosen.device) if gpu else None
    if rate:
        print(f"matrix rate: {rate / 1e12:.0f} TFLOP/s in bfloat16")
    rows: list[dict[str, Any]] = []
    for name in chosen.methods:
        rows += method_rows(name, chosen, rate)
        if chosen.out:
            chosen.out.write_text(json.dumps({"machine": machine(chosen.device), "rows": rows}, indent=1) + "\n")
    headline = {row["column"]: row for row in rows if row["method"] == HEADLINE}
    if "plain" in headline and "ours" in headline:
        print(f"speed-up {headline['ours']['tokens_per_second'] / headline['plain']['tokens_per_second']:.1f} x")


def method_rows(name: str, chosen: argparse.Namespace, rate: float | None) -> list[dict[str, Any]]:
    """One method, each way of computing it."""
    rows: list[dict[str, Any]] = []
    for column in chosen.columns:
        torch._dynamo.reset()
        batch = chosen.batch_size if column == "ours" else min(chosen.batch_size, chosen.plain_batch)
        try:
            state = build(name, column, batch, chosen)
            data = tokens(batch, chosen)
            several = 5 if chosen.device == "cuda" else 1  # the host prepares a step while the GPU computes the last
            seconds, memory = timed(training(state, data, several), chosen.device, chosen.repeats)
            seconds /= several
        except torch.OutOfMemoryError:
            print(f"{name:>12} {column:>15}: does not fit")
            continue
        speed = batch * chosen.seq_length / seconds
        row = {
            "method": name,
            "column": column,
            "batch": batch,
            "length": chosen.seq_length,
            "vocab": chosen.vocab_size,
        }
        row |= {"seconds": seconds, "tokens_per_second": speed, "gib": memory}
        row |= {"loss": float(loss_of(state, data[: chosen.plain_batch], chosen))}
        if column == "ours":
            row |= shares(state, data, seconds, chosen)
            if rate:
                row["mfu"] = work(state, row, chosen) / seconds / rate
        rows.append(row)
        against = next((r for r in rows if r["column"] == "plain"), None)
        ratio = f"  {speed / against['tokens_per_second']:.2f} x" if against and column != "plain" else ""
        off = f"  loss off by {abs(row['loss'] / against['loss'] - 1):.1e}" if against and column != "plain" else ""
        more = (
            f"  trunk {row['trunk']:.0%} head {row['head']:.0%} MFU {row.get('mfu', 0):.0%}" if "trunk" in row else ""
        )
        print(
            f"{name:>12} {column:>15}: {seconds:.4f} s, {speed:,.0f} tokens/s, {memory:.1f} GiB{ratio}{off}{more}",
            flush=True,
        )
        del state
    return rows


def training(state: Learner, data: Tokens, several: int) -> Callable[[int], None]:
    def steps(k: int) -> None:
        for number in range(several):
            train_step(state, lambda _, rows: data[rows], k * several + number)

    return steps


def build(name: str, column: str, batch: int, chosen: argparse.Namespace) -> Learner:
    """Networks and optimiser as in training; a distilled student has moved a little away from its teacher."""
    method: Method = METHODS[name]
    process = method.default_process(chosen.vocab_size)
    causal = method.process == "none"
    size = {768: SIZES["110m"], 64: SIZES["tiny"]}.get(chosen.hidden_size, SIZES["small"])
    shape: NetworkConfig = dataclasses.replace(
        size,
        hidden_size=chosen.hidden_size,
        num_layers=chosen.num_layers,
        causal=causal,
        time_conditioning=method.time_conditioning,
    )
    dtype: Any = "bfloat16" if chosen.device == "cuda" else "float32"
    config = TrainConfig(name, network=shape, steps=1000, batch_size=batch, seq_length=chosen.seq_length, dtype=dtype,
                       init_from="teacher" if method.starts_from else None,  # type: ignore[arg-type]
                       compile=chosen.device == "cuda" and column != "plain")  # fmt: skip
    torch.manual_seed(0)
    denoiser = Denoiser(shape, process, vocab=chosen.vocab_size).to(chosen.device)
    objective = method(process, 1000)
    if column != "ours":
        objective = Plain(objective.terms, objective.total, objective.reference)
    state = make_learner(config, denoiser, objective, World())
    for parameter in denoiser.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return state


def tokens(batch: int, chosen: argparse.Namespace) -> Tokens:
    """Tokens as frequent as those of text (Zipf), the same for every column."""
    u = seeded(0, "tokens", batch=batch).uniform(chosen.seq_length)
    return (chosen.vocab_size**u - 1).long().clamp(max=chosen.vocab_size - 1)


def loss_of(state: Learner, data: Tokens, chosen: argparse.Namespace) -> Tensor:
    """The loss of one batch without dropout, for comparison. Weights have moved apart by now: build them anew."""
    torch.manual_seed(0)
    fresh = Denoiser(state.denoiser.config, state.denoiser.process, vocab=chosen.vocab_size).to(chosen.device).eval()
    target = frozen_copy(fresh) if state.objective.network else None
    for parameter in fresh.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    dtype: Any = "bfloat16" if chosen.device == "cuda" else "float32"
    with torch.no_grad(), autocast(fresh.device, dtype):
        return state.objective.loss(fresh, target, data, 0, seeded(0, "compare", batch=len(data))).total


def shares(state: Learner, data: Tokens, seconds: float, chosen: argparse.Namespace) -> dict[str, float]:
    """The trunk's part of a step (student forward and backward, target forward), and that of head and divergence."""
    device, net = state.denoiser.device, state.denoiser
    alpha = torch.full((len(data),), 0.5, dtype=torch.float64)
    dtype: Any = "bfloat16" if chosen.device == "cuda" else "float32"

    def trunk(_: int) -> None:
        with autocast(device, dtype):
            hidden = net.features(data, alpha)
        hidden.sum().backward()

    def step(k: int) -> None:
        with autocast(device, dtype):
            loss = state.objective.loss(net, state.target, data, k, seeded(0, k, batch=len(data)))
        loss.total.backward()

    alone, _ = timed(trunk, chosen.device, chosen.repeats)
    whole, _ = timed(step, chosen.device, chosen.repeats)
    other = 0.0
    if state.target is not None:
        share = state.objective.terms[0].share(0.0) / sum(term.share(0.0) for term in state.objective.terms)
        rows = max(1, round(share * len(data)))
        with torch.no_grad(), autocast(device, dtype):
            other, _ = timed(lambda _: state.target.features(data[:rows], alpha[:rows]), chosen.device, chosen.repeats)
    net.zero_grad(set_to_none=True)
    return {"trunk": (alone + other) / seconds, "head": max(0.0, whole - alone - other) / seconds,
            "rest": max(0.0, seconds - whole) / seconds}  # fmt: skip


def work(state: Learner, row: dict[str, Any], chosen: argparse.Namespace) -> float:
    """Arithmetic of a step: what the method asks for, however it is computed."""
    shape, n = state.denoiser.config, row["batch"] * row["length"]
    block = 12 * shape.hidden_size**2 * shape.num_layers
    attention = 2 * shape.num_layers * row["length"] * shape.hidden_size * (0.5 if shape.causal else 1.0)
    noisy = 0.5 if state.denoiser.process is not None and state.denoiser.process.name == "masked" else 1.0
    total = 6.0 * n * (block + attention + noisy * shape.hidden_size * chosen.vocab_size)
    if state.target is not None:
        share = state.objective.terms[0].share(0.0) / sum(term.share(0.0) for term in state.objective.terms)
        total += 2.0 * n * share * (block + attention + noisy / 2 * shape.hidden_size * chosen.vocab_size)
    return total


def matrix_rate(device: str) -> float:
    """The chip's own rate, on large square matrices."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds, _ = timed(lambda _: [a @ b for _ in range(10)], device, 5)
    return 10 * 2 * 8192**3 / seconds


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
