"""The joint head on text and on 4 x 4 Sudoku: the few-step bound with and without it, in nats.

    python -m studies.joint text --data tokens --device cuda --minutes 3 --out studies/results/joint
    python -m studies.joint sudoku --minutes 10 --out studies/results/joint

`text` trains heads on the frozen trunk of a bundled model: all variants on the same batches, whose trunk features are
computed once. Samplers of 1, 2, 4, ... steps in random and in dilated order are then bounded on held-out text, by the
trunk alone and by every variant on the same draws. `sudoku` trains small networks from scratch, and measures them as
`cdlm eval --tasks sudoku` does, beside the best that a factorised model can be: the exact posterior of the 288 grids.

DATA is made with `cdlm prepare ... --tokenizer mdlm --seq-length 256 --packing sentences`.
"""

import argparse
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from rich.console import Console
from rich.table import Table
from torch import Tensor

import cdlm
from cdlm.data.sudoku import ExactSudoku, all_grids
from cdlm.data.tokens import open_tokens
from cdlm.devices import autocast, pick_device, send
from cdlm.eval.sudoku import measure_grids
from cdlm.methods import METHODS
from cdlm.model.config import SIZES, NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.model.joint import EXACT_GAPS, NUM_GAPS, JointHead, conditioned, gap_bucket
from cdlm.objective import Objective, Pair, Term
from cdlm.objective.loss import split
from cdlm.process import Process, masked
from cdlm.rng import Rng, seeded
from cdlm.sample.settings import resolve
from cdlm.text.pipeline import Pipeline
from cdlm.types import Tokens

STEPS = {"text": (1, 2, 4, 8, 16, 32), "sudoku": (1, 2, 4, 8, 16)}
WEIGHT_DECAY = 0.0
CHUNK = 8192


@dataclasses.dataclass(frozen=True)
class Variant:
    """A joint head to try on a frozen trunk."""

    learning_rate: float = 1e-3
    layers: int = 1
    before_norm: bool = False
    """Add its output before the final norm of the trunk rather than after it."""
    gate: bool = False
    """Scale its output by a learned number for each distance to the previous revealed token."""
    per_token: bool = False
    """Weigh all revealed tokens alike in training, instead of by the bound."""


VARIANTS = {
    "lr 1e-3": Variant(),
    "lr 3e-4": Variant(3e-4),
    "lr 3e-3": Variant(3e-3),
    "2 blocks": Variant(layers=2),
    "before norm": Variant(before_norm=True),
    "gate": Variant(gate=True),
    "per token": Variant(per_token=True),
}


class GatedHead(JointHead):
    """A joint head whose output has a gate for each distance: 1 / distance at the start, so that tokens far apart stay
    as independent as in the trunk until there is something to learn."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__(config)
        bucket = torch.arange(NUM_GAPS)
        distance = torch.where(bucket < EXACT_GAPS, bucket + 1, EXACT_GAPS * 2.0 ** (bucket - EXACT_GAPS))
        self.gate = torch.nn.Parameter(1 / distance)

    def forward(self, hidden: Tensor, previous_token: Tensor, position: Tensor, previous: Tensor, *rest: Any) -> Tensor:
        found = super().forward(hidden, previous_token, position, previous, *rest)
        return hidden + self.gate[gap_bucket(position - previous)][..., None] * (found - hidden)


@dataclasses.dataclass
class Features:
    """What the frozen trunk says of a batch, once for all variants."""

    hidden: Float[Tensor, "b l d"]
    before_norm: Float[Tensor, "b l d"]
    condition: Float[Tensor, "b c"]
    x_s: Tokens
    revealed: Bool[Tensor, "b l"]


class Trunk:
    """A trained network whose weights stay."""

    def __init__(self, denoiser: Denoiser) -> None:
        self.denoiser = denoiser.requires_grad_(False).eval()
        self.seen: tuple[Tensor, Tensor] = (torch.zeros(0), torch.zeros(0))
        denoiser.dit.output_layer.register_forward_pre_hook(self._keep)

    def _keep(self, module: torch.nn.Module, inputs: tuple[Tensor, Tensor]) -> None:
        self.seen = inputs

    @torch.no_grad()
    def features(self, pairs: list[Pair]) -> Features:
        device = self.denoiser.device
        x_t, x_s, revealed = (
            send(torch.cat(parts), device)
            for parts in zip(*((p.x_t, p.x_s, p.positions & p.known) for p in pairs), strict=True)
        )
        hidden = self.denoiser.features(x_t, torch.cat([pair.alpha_t for pair in pairs]))
        return Features(hidden, *self.seen, x_s, revealed)

    def nats(self, found: Features, variant: Variant | None = None, head: JointHead | None = None) -> Tensor:
        """-log p of each revealed token: independent of the others, or by a head given those before it."""
        dit, hidden = self.denoiser.dit, found.hidden
        if head is not None and variant is not None and variant.before_norm:
            hidden = conditioned(head, dit.vocab_embed, found.before_norm, found.x_s, found.revealed)
            hidden = dit.output_layer(hidden, found.condition)
        elif head is not None:
            hidden = conditioned(head, dit.vocab_embed, hidden, found.x_s, found.revealed)
        rows, tokens = hidden[found.revealed], found.x_s[found.revealed]
        parts = [
            F.cross_entropy(self.denoiser.logits(part).float(), token, reduction="none")
            for part, token in zip(rows.split(CHUNK), tokens.split(CHUNK), strict=True)
        ]
        return torch.cat(parts)


def draw_pairs(objective: Objective, x0: Tokens, step: int, rng: Rng) -> list[Pair]:
    """The batch of a training step, split among the terms as in `Objective.loss`."""
    shares = [term.share(0.0) for term in objective.terms]
    pairs = []
    for term, (rows, stratum, strata) in zip(objective.terms, split(shares, rng), strict=True):
        if len(rows):
            pairs.append(term.draw(x0[rows], 0.0, stratum, strata, rng[rows], None))
    return pairs


def of_rows(pairs: list[Pair], found: Features, values: Tensor) -> Tensor:
    """A column of the sequences for each revealed token."""
    return values[found.revealed.nonzero()[:, 0]]


def train_heads(
    trunk: Trunk,
    variants: dict[str, Variant],
    batches: Callable[[int], Tokens],
    minutes: float,
    dtype: str,
    seed: int,
    max_steps: int | None = None,
) -> tuple[dict[str, JointHead], list[dict[str, Any]]]:
    """All variants on the same batches, for so many minutes; the learning rate rises over 5 % and falls to zero."""
    denoiser, device = trunk.denoiser, trunk.denoiser.device
    heads, optimizers = {}, {}
    for name, variant in variants.items():
        torch.manual_seed(seed)
        config = dataclasses.replace(denoiser.config, joint_layers=variant.layers)
        heads[name] = (GatedHead if variant.gate else JointHead)(config).to(device)
        optimizers[name] = torch.optim.AdamW(
            heads[name].parameters(), lr=variant.learning_rate, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.99)
        )
    objective = METHODS["joint"](denoiser.process, 1)
    log, recent, began, step = [], {name: [] for name in heads}, time.perf_counter(), 0
    while True:
        share = (time.perf_counter() - began) / (60 * minutes) if max_steps is None else step / max(max_steps, 1)
        if share >= 1 or step == max_steps:
            break
        x0 = batches(step)
        pairs = draw_pairs(objective, x0, step, seeded(seed, "joint", step, batch=len(x0)))
        with autocast(device, dtype):
            found = trunk.features(pairs)
            weight = send(torch.cat([1 / (pair.t - pair.s) for pair in pairs]).float(), device)
            weight = of_rows(pairs, found, weight)
            for name, variant in variants.items():
                nats = trunk.nats(found, variant, heads[name])
                own = torch.ones_like(weight) * weight.mean() if variant.per_token else weight
                loss = (nats * own).sum() / x0.numel()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(heads[name].parameters(), 1.0)
                for group in optimizers[name].param_groups:
                    group["lr"] = variant.learning_rate * min(share / 0.05 + 1e-3, (1 - share) / 0.95, 1.0)
                optimizers[name].step()
                optimizers[name].zero_grad(set_to_none=True)
                recent[name].append((nats.detach() * weight).sum() / x0.numel())
        step += 1
        if step % 50 == 0:
            means = {name: float(torch.stack(values).mean()) for name, values in recent.items()}
            log.append({"step": step, "seconds": round(time.perf_counter() - began, 1), **means})
            print(json.dumps(log[-1]), flush=True)
            recent = {name: [] for name in heads}
    return heads, [*log, {"step": step, "seconds": round(time.perf_counter() - began, 1)}]


def hops_of(process: Process, steps: int, order: str) -> Term:
    """The hops of a sampler of so many steps in random or dilated order."""
    (term,) = METHODS["joint"](process, 1, steps=steps, most=steps, dilated=float(order == "dilated")).terms
    return term


@torch.no_grad()
def bounds(
    trunk: Trunk,
    heads: dict[str, tuple[Variant, JointHead]],
    x0: Tokens,
    steps: int,
    order: str,
    dtype: str,
    hops: int,
    rows: int,
    seed: int = 0,
) -> dict[str, Tensor]:
    """The bound of a sampler for each sequence in nats per token: by the trunk alone, and by each head on the same
    `hops` hops, stratified over the steps."""
    device, count = trunk.denoiser.device, min(hops, steps)
    term = hops_of(trunk.denoiser.process, steps, order)
    n = len(x0)
    ranks = seeded(seed, "order", batch=n).uniform(count).argsort(0)
    stratum = (torch.arange(count) * n + ranks).flatten()
    many, rng = x0.repeat_interleave(count, 0), seeded(seed, "joint bound", batch=n * count)
    sums = {name: [] for name in ("factorised", *heads)}
    for part in torch.arange(n * count).split(rows):
        pair = term.draw(many[part], 0.0, stratum[part], n * count, rng[part], None)
        with autocast(device, dtype):
            found = trunk.features([pair])
            for name in sums:
                nats = trunk.nats(found, *heads.get(name, (None, None)))
                total = torch.zeros(len(part), dtype=torch.float64, device=device)
                total.index_add_(0, found.revealed.nonzero()[:, 0], nats.double())
                sums[name].append(total.cpu() / (pair.t - pair.s) / x0.shape[1])
    return {name: torch.cat(values).view(n, count).mean(-1) for name, values in sums.items()}


def standard_error(values: Tensor) -> float:
    return float(values.std() / len(values) ** 0.5)


def study_text(options: argparse.Namespace) -> None:
    device = pick_device(options.device)
    dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    pipe = cdlm.load(options.model, device=str(device))
    trunk = Trunk(pipe.denoiser)
    data, valid = open_tokens(options.data, "train"), open_tokens(options.data, "valid")
    chosen = {name: VARIANTS[name] for name in options.variants or VARIANTS}

    def batches(step: int) -> Tokens:
        return data.batch(step, options.seed, options.batch_size, torch.arange(options.batch_size), None)

    heads, log = train_heads(trunk, chosen, batches, options.minutes, dtype, options.seed, options.max_steps)
    every = torch.linspace(0, valid.blocks(None) - 1, options.sequences).long()
    x0 = valid.read(every)
    columns, table = {}, Table(title="nats per token on held-out text, and the difference to the factorised sampler")
    table.add_column("sampler")
    for name in ("factorised", *chosen):
        table.add_column(name, justify="right")
    paired = {name: (chosen[name], heads[name].eval()) for name in chosen}
    for order, steps in itertools.product(("random", "dilated"), options.steps):
        if order == "dilated" and steps == 1:
            continue
        found = bounds(trunk, paired, x0, steps, order, dtype, options.hops, options.batch_size)
        base = found["factorised"]
        cells = {
            name: {
                "nats": float(values.mean()),
                "error": standard_error(values),
                "difference": float((values - base).mean()),
                "difference_error": standard_error(values - base),
            }
            for name, values in found.items()
        }
        columns[f"{steps} steps, {order}"] = cells
        table.add_row(
            f"{steps}, {order}",
            f"{cells['factorised']['nats']:.3f} ± {cells['factorised']['error']:.3f}",
            *(f"{cells[name]['difference']:+.3f} ± {cells[name]['difference_error']:.3f}" for name in chosen),
        )
    Console(width=200).print(table)
    means = {name: sum(cells[name]["nats"] for cells in columns.values()) for name in chosen}
    best = min(means, key=lambda name: means[name])
    result = {
        "model": options.model,
        "device": str(device),
        "dtype": dtype,
        "batch_size": options.batch_size,
        "sequences": len(x0),
        "hops": options.hops,
        "variants": {name: dataclasses.asdict(variant) for name, variant in chosen.items()},
        "parameters": {name: sum(p.numel() for p in head.parameters()) for name, head in heads.items()},
        "bounds": columns,
        "best": best,
        "training": log,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "text.json").write_text(json.dumps(result, indent=1) + "\n")
    for name, variant in chosen.items():
        if not variant.before_norm and not variant.gate:
            save_model(pipe, heads[name], options.out / name.replace(" ", "-"))
    print(f"best on average: {best}; wrote {options.out}")


def save_model(pipe: Pipeline, head: JointHead, folder: Path) -> None:
    """The bundled model with a head, as a model directory."""
    trunk = pipe.denoiser
    config = dataclasses.replace(trunk.config, joint_layers=len(head.blocks))
    joined = Denoiser(config, trunk.process)
    weights = {f"joint_head.{name}": value for name, value in head.state_dict().items()}
    joined.load_state_dict(trunk.state_dict() | weights)
    dataclasses.replace(pipe, denoiser=joined, generation_config={}).save_pretrained(folder, dtype="bfloat16")


# ---------------------------------------------------------------------------------------------------------- 4 x 4 grids


def study_sudoku(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    side, process = 4, masked(5)
    every = all_grids(side)
    shape = dataclasses.replace(SIZES["sudoku-4"], num_layers=3)
    trained: dict[str, tuple[NetworkConfig, Objective]] = {
        "mdlm": (dataclasses.replace(shape, num_layers=4), METHODS["mdlm"](process, 1)),
        "joint": (
            dataclasses.replace(shape, joint_layers=1),
            METHODS["joint"](process, 1, steps=1, most=8, dilated=0.0),
        ),
    }
    networks = {"exact factorised": Denoiser(ExactSudoku(side), process)}
    training_steps = {}
    for name, (config, objective) in trained.items():
        torch.manual_seed(options.seed)
        networks[name] = Denoiser(config, process)
        training_steps[name] = train_small(networks[name], objective, every, options)
    result: dict[str, Any] = {"entropy": math.log(len(every)), "training_steps": training_steps, "rows": {}}
    for name, net in networks.items():
        result["rows"][name] = {}
        for steps in options.steps:
            settings = resolve({"steps": steps}, process, joint_head=net.joint_head is not None)
            found = measure_grids(net.eval(), side, settings, num_samples=options.samples, seed=options.seed)
            result["rows"][name][steps] = found
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "sudoku.json").write_text(json.dumps(result, indent=1) + "\n")
    table = Table(title=f"nats per grid (entropy {result['entropy']:.3f}), valid share, total variation, solved share")
    for heading in ("", *map(str, options.steps)):
        table.add_column(heading, justify="right")
    for name, row in result["rows"].items():
        table.add_row(name, *(f"{cell['nats']:.2f}" for cell in row.values()))
        for measure in ("valid", "tv", "solved"):
            table.add_row(measure, *(f"{cell[measure]:.3f}" for cell in row.values()))
    Console(width=120).print(table)


def train_small(net: Denoiser, objective: Objective, every: Tokens, options: argparse.Namespace) -> int:
    """Half of the minutes for each network."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.0)
    began, step = time.perf_counter(), 0
    while True:
        share = (time.perf_counter() - began) / (30 * options.minutes)
        if share >= 1:
            return step
        rng = seeded(options.seed, "train", step, batch=256)
        x0 = every[rng("grid").integers(1, len(every))[:, 0]]
        objective.loss(net, None, x0, 0, rng).total.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(share / 0.05 + 1e-3, (1 - share) / 0.5, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1


def bounds_table(found: dict[str, Any]) -> str:
    """The bounds of a text study as a table for docs/joint.md: the trunk alone, and by how much each head differs."""
    heads = [f"{name}" for name in found["variants"]]
    lines = [["sampler", "factorised", *heads], ["---"] * (2 + len(heads))]
    for sampler, bounds in found["bounds"].items():
        trunk = bounds["factorised"]
        differences = [f"{bounds[name]['difference']:+.3f} ± {bounds[name]['difference_error']:.3f}" for name in heads]
        lines.append([sampler, f"{trunk['nats']:.3f} ± {trunk['error']:.3f}", *differences])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("text", "sudoku"))
    parser.add_argument("--data", type=Path, default=Path("tokens"), help="directory written by cdlm prepare")
    parser.add_argument("--out", type=Path, default=Path("studies/results/joint"))
    parser.add_argument("--model", default="mdlm", help="the model whose trunk is kept")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU")
    parser.add_argument("--minutes", type=float, default=3.0, help="of training, evaluation not included")
    parser.add_argument("--max-steps", type=int, help="train for so many steps instead of --minutes")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=256, help="held-out texts to bound")
    parser.add_argument("--steps", nargs="+", type=int, help="of the samplers; default: up to 32, or 16 for grids")
    parser.add_argument("--samples", type=int, default=1000, help="grids to draw")
    parser.add_argument("--hops", type=int, default=4, help="hops of each held-out sequence at most")
    parser.add_argument("--variants", nargs="*", choices=tuple(VARIANTS), help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.steps = options.steps or STEPS[options.study]
    (study_text if options.study == "text" else study_sudoku)(options)


if __name__ == "__main__":
    main()
