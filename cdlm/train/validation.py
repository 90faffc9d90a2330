"""A look at a model while it trains: its NELBO, a few texts, and an alarm if their entropy is off."""

import math
from typing import Any

import torch

from cdlm.data.tokenizer import Tokenizer
from cdlm.data.tokens import TokenFile
from cdlm.methods import Method
from cdlm.metrics.diversity import entropy, pooled_entropy
from cdlm.metrics.likelihood import nelbo
from cdlm.model.denoiser import Denoiser
from cdlm.rng import seeded
from cdlm.sample.ancestral import ancestral
from cdlm.sample.autoregressive import autoregressive
from cdlm.sample.draw import last
from cdlm.sample.settings import resolve
from cdlm.train.config import TrainConfig
from cdlm.train.distributed import mean_over_ranks, reshard, unshard
from cdlm.train.step import Learner
from cdlm.types import Tokens, wide


@torch.no_grad()
def validate(state: Learner, method: Method, valid: TokenFile, step: int, best: float = math.inf) -> dict[str, Any]:
    """The NELBO of the EMA weights, and a few samples with their entropy beside that of the data.

    `best` is the lowest NELBO that the run has had before.
    """
    config, world, device = state.config, state.world, state.denoiser.device
    size = min(config.batch_size, 64, valid.blocks(config.seq_length))
    batches = []
    for number, x0 in enumerate(valid.validation(size, config.seq_length)):
        if number == config.valid_batches:
            break
        batches.append((number, x0.to(device)))
    unshard(state.ema)
    rows, total = (
        config.batch_size // (world.size * config.grad_accum_steps),
        torch.zeros(2, dtype=wide(device), device=device),
    )
    for number, x0 in batches[world.rank :: world.size]:
        value = nelbo(state.ema, [(number, x0)], config.seed, rows)
        total += torch.tensor([len(x0) * value, len(x0)], dtype=total.dtype).to(device)
    total = mean_over_ranks(total, world)
    found: dict[str, Any] = {"step": step + 1, "kind": "valid", "nelbo": float(total[0] / total[1])}
    if config.valid_samples:
        x = generate_samples(state.ema, method, config, step, valid.meta.bos)
        found["entropy"] = float(entropy(x.cpu()).mean())
        found["data_entropy"] = float(entropy(batches[0][1][: 4 * config.valid_samples].cpu()).mean())
        counts = pooled_entropy([row for _, x0 in batches for row in x0.tolist()])
        learned = min(best, found["nelbo"]) < counts or 2 * (step + 1) > config.steps
        found["alarm"] = alarm(found["entropy"], found["data_entropy"], config.seq_length, learned)
        found["samples"] = [Tokenizer.load(config.data / "tokenizer.json").decode(row) for row in x.tolist()]
    reshard(state.ema)
    return found


def generate_samples(denoiser: Denoiser, method: Method, config: TrainConfig, step: int, bos: int) -> Tokens:
    """A few sequences from the model, the same for every run of this seed and step."""
    rng = seeded(config.seed, "validation samples", step, batch=config.valid_samples)
    if denoiser.process is None:
        start = torch.full((config.valid_samples, config.seq_length), bos, device=denoiser.device)
        return last(autoregressive(denoiser, None, start, resolve({}, None), rng)).x
    start = denoiser.process.start(config.seq_length, rng("start"), denoiser.device)
    settings = resolve({"steps": config.valid_sample_steps}, denoiser.process, method.posterior)
    return last(ancestral(denoiser, denoiser.process, start, settings, rng)).x


def alarm(found: float, data: float, length: int, learned: bool = True) -> str | None:
    """Mode collapse: a nat below the data's entropy. Uniform drift: more than half way from it to that of noise.

    Every network writes noise at first. So drift counts only in one that has `learned`: it has once known more than how
    often each token occurs, or half of the run is over and it should.
    """
    if found < data - 1:
        return "mode collapse"
    return "uniform drift" if learned and found > (data + math.log(length)) / 2 else None


def print_validation(found: dict[str, Any], config: TrainConfig) -> None:
    line = f"step {found['step']:>7,}/{config.steps:,}  validation NELBO {found['nelbo']:.4f} nats per token"
    if "entropy" in found:
        line += f"  entropy of samples {found['entropy']:.2f} (data {found['data_entropy']:.2f})"
        line += f"  ALARM: {found['alarm']}" if found["alarm"] else ""
    print(line, flush=True)
    for text in found.get("samples", [])[:1]:
        print(f"    | {' '.join(text.split())[:200]}", flush=True)
