"""Samplers on a language whose denoiser is exact: what few steps cost, and which sampler pays least for them.

    python -m studies.bigram --data tokens --out studies/bigram.json

The language is the chain of neighbouring tokens of a corpus, restricted to its commonest ones. Given what is visible,
the law of a masked token depends on its nearest visible neighbours alone, P^d(a, x) P^e(x, b), so there is nothing to
learn, the judge is the chain itself, and all that differs is the sampler. Texts are compared with those of plain
sampling at a temperature with the same entropy, and with those that have as many different pairs of tokens: entropy
alone does not see a sampler that varies its words and repeats its phrases.
"""

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cdlm.data.tokens import open_tokens
from cdlm.metrics.diversity import distinct, entropy
from cdlm.process import masked
from cdlm.rng import seeded
from cdlm.sample.draw import last
from cdlm.sample.generate import generate
from cdlm.sample.settings import resolve
from cdlm.types import Tokens

MAX_DISTANCE = 40
"""Tokens further apart than this tell nothing of each other."""
TEMPERATURES = (1.0, 0.9, 0.8, 0.7, 0.6)
SAMPLER_TRIALS: list[dict[str, Any]] = [
    *({"temperature": t} for t in TEMPERATURES),
    *({"top_p": p} for p in (0.95, 0.9, 0.8, 0.7)),
    *({"order": order, "temperature": t} for order in ("dilated", "bit-reversed") for t in (1.0, 0.8)),
    *({"order": "probability", "temperature": t} for t in (1.6, 1.3)),
    *({"timesteps": "cosine", "temperature": t} for t in (1.0, 0.8)),
    *({"corrector": "rescale", "eta": eta, "temperature": t} for eta in (0.05, 0.2) for t in (1.0, 0.8)),
    *({"temperature_end": 0.5, "temperature": t} for t in (1.3, 1.0)),
    *({"guidance": g, "temperature": t} for g, t in ((0.5, 1.0), (0.5, 0.85), (1.0, 1.0), (1.0, 0.85), (2.0, 0.75))),
    *({"guidance": g, "order": "dilated", "temperature": t} for g, t in ((0.5, 0.85), (1.0, 0.85), (2.0, 0.75))),
]


class Chain:
    """A chain over v tokens with its powers, as a predictor for the samplers."""

    def __init__(self, counts: Float[Tensor, "v v"], smoothing: float = 0.02) -> None:
        self.step = (counts + smoothing) / (counts + smoothing).sum(-1, keepdim=True)
        self.vocab = len(counts)
        self.law = torch.linalg.matrix_power(self.step, 1024)[0]
        powers = list(
            itertools.accumulate([self.step] * MAX_DISTANCE, torch.matmul, initial=torch.eye(self.vocab).double())
        )
        self.powers = torch.stack(powers).float()
        self.back = self.powers.transpose(1, 2).contiguous()

    def __call__(self, x: Tokens, t: float) -> Float[Tensor, "b l v"]:
        """log p(x_i | what is visible) at every position."""
        l, place, seen = x.shape[1], torch.arange(x.shape[1]), x < self.vocab
        left = torch.where(seen, place, -1).cummax(1).values
        right = torch.where(seen, place, l).flip(1).cummin(1).values.flip(1)
        before = self.powers[
            (place - left).clamp(max=MAX_DISTANCE), x.gather(1, left.clamp(min=0)).clamp(max=self.vocab - 1)
        ]
        after = self.back[
            (right - place).clamp(max=MAX_DISTANCE), x.gather(1, right.clamp(max=l - 1)).clamp(max=self.vocab - 1)
        ]
        before = torch.where((left >= 0)[..., None], before, self.law.float())
        after = torch.where((right < l)[..., None], after, torch.ones(()))
        return (before * after).clamp(min=1e-30).log()

    def perplexity(self, samples: Tokens) -> float:
        return math.exp(-float(self.step.log()[samples[:, :-1], samples[:, 1:]].mean()))

    def sample(self, n: int, length: int) -> Tokens:
        """Samples of the language itself."""
        rng = torch.Generator().manual_seed(0)
        x = torch.multinomial(self.law, n, True, generator=rng)[:, None]
        while x.shape[1] < length:
            x = torch.cat([x, torch.multinomial(self.step[x[:, -1]], 1, generator=rng)], 1)
        return x


def read_chain(data: Path, vocab: int, tokens: int = 8_000_000) -> Chain:
    """The chain of the commonest tokens of a prepared corpus; the others are passed over."""
    ids = torch.from_numpy(open_tokens(data).ids[:tokens].astype(np.int64))
    common = torch.bincount(ids).argsort(descending=True)[:vocab]
    names = torch.full((int(ids.max()) + 1,), -1).scatter(0, common, torch.arange(len(common)))
    kept = names[ids][names[ids] >= 0]
    pairs = torch.bincount(kept[:-1] * vocab + kept[1:], minlength=vocab**2)
    return Chain(pairs.view(vocab, vocab).double())


def measure_samples(chain: Chain, samples: Tokens) -> dict[str, float]:
    return {
        "ppl": chain.perplexity(samples),
        "entropy": float(entropy(samples).mean()),
        "distinct_2": distinct(samples.tolist(), 2),
    }


def ppl_ratio(found: dict[str, float], line: list[dict[str, float]], by: str) -> float | None:
    """The perplexity as a share of that of plain sampling at a temperature with the same entropy or distinct-2."""
    places, values = zip(*sorted((one[by], math.log(one["ppl"])) for one in line), strict=True)
    if len(line) < len(TEMPERATURES) or not places[0] <= found[by] <= places[-1]:
        return None
    return found["ppl"] / math.exp(float(np.interp(found[by], places, values)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder written by cdlm prepare")
    parser.add_argument("--out", type=Path, default=Path("studies/bigram.json"))
    parser.add_argument("--vocab", type=int, default=600, help="how many of the commonest tokens")
    parser.add_argument("--steps", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--num-samples", type=int, default=48)
    parser.add_argument("--max-length", type=int, default=256)
    args = parser.parse_args()
    chain, process = read_chain(args.data, args.vocab), masked(args.vocab)
    rows = [{"what": "the language itself", **measure_samples(chain, chain.sample(args.num_samples, args.max_length))}]
    table = Table(
        "steps", "sampler", "perplexity", "entropy", "distinct-2", "ratio at that entropy", "at that distinct-2"
    )
    table.add_row("", rows[0]["what"], *(f"{rows[0][name]:.4g}" for name in ("ppl", "entropy", "distinct_2")), "", "")
    for steps in args.steps:
        line: list[dict[str, float]] = []
        for trial in SAMPLER_TRIALS:
            rng = seeded(0, batch=args.num_samples)
            x = process.start(args.max_length, rng("start"))
            settings = resolve({"steps": steps, **trial}, process)
            found = measure_samples(chain, last(generate(chain, process, x, settings, rng)).x)
            if set(trial) == {"temperature"}:
                line.append(found)
            ratios = {f"ratio_{by}": ppl_ratio(found, line, by) for by in ("entropy", "distinct_2")}
            rows.append({"steps": steps, **trial, **found, **ratios})
            trial_label = ", ".join(f"{name} {value}" for name, value in trial.items())
            numbers = (f"{found['ppl']:.1f}", f"{found['entropy']:.2f}", f"{found['distinct_2']:.3f}")
            table.add_row(
                str(steps), trial_label, *numbers, *("" if r is None else f"{r:.2f}" for r in ratios.values())
            )
            print(steps, trial_label, *numbers, *ratios.values(), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
