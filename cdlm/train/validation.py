"""A look at a model while it trains: its NELBO, a few samples, and a warning if their entropy is off."""

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
from cdlm.sample.autoregressive import autoregressive
from cdlm.sample.draw import last
from cdlm.sample.generate import generate
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
        x = generate_samples(state.ema, method, config, step, valid.meta.bos, valid.meta.eos)
        found["entropy"] = float(entropy(x.cpu()).mean())
        found["data_entropy"] = float(entropy(batches[0][1][: 4 * config.valid_samples].cpu()).mean())
        tokens = torch.cat([x0.cpu() for _, x0 in batches])
        learned = min(best, found["nelbo"]) < pooled_entropy(tokens.tolist())
        words = [x.cpu(), batches[0][1][: 4 * config.valid_samples].cpu(), shuffled(tokens, config.seed)]
        own, data, by_frequency = (entropy_of_words(rows[: 4 * config.valid_samples], valid.meta.eos) for rows in words)
        noise = math.log(min(config.seq_length, state.ema.vocab))
        found["alarm"] = alarm(own, data, by_frequency, noise, learned)
        found["samples"] = [Tokenizer.load(config.data / "tokenizer.json").decode(row) for row in x.tolist()]
    reshard(state.ema)
    return found


def generate_samples(denoiser: Denoiser, method: Method, config: TrainConfig, step: int, bos: int, eos: int) -> Tokens:
    """A few sequences from the model, the same for every run of this seed and step."""
    rng = seeded(config.seed, "validation samples", step, batch=config.valid_samples)
    if denoiser.process is None:
        start = torch.full((config.valid_samples, config.seq_length), bos, device=denoiser.device)
        return last(autoregressive(denoiser, None, start, resolve({}, None), rng)).x
    start = denoiser.process.start(config.seq_length, rng("start"), denoiser.device)
    if bos in denoiser.process.special:  # a frame that is never generated
        start[:, 0], start[:, -1] = bos, eos
    given, joint_head = {"steps": config.valid_sample_steps}, denoiser.joint_head is not None
    settings = resolve(given, denoiser.process, method.posterior, joint_head=joint_head)
    return last(generate(denoiser, denoiser.process, start, settings, rng)).x


def entropy_of_words(tokens: Tokens, eos: int) -> float:
    """The mean unigram entropy without EOS: how much of a sequence is padding must not pass for diversity."""
    values = [float(entropy(words[None])) for row in tokens if len(words := row[row != eos])]
    return math.fsum(values) / len(values) if values else 0.0


def shuffled(tokens: Tokens, seed: int) -> Tokens:
    """Sequences of the same tokens in a random order: what a model generates that knows only how frequent each is."""
    order = seeded(seed, "shuffled", batch=1).uniform(tokens.numel())[0].argsort()
    return tokens.flatten()[order].view_as(tokens)


def alarm(samples: float, data: float, by_frequency: float, noise: float, learned: bool = True) -> str | None:
    """What is wrong with samples of this entropy, if anything.

    Mode collapse: a nat below the entropy of the data. Uniform drift: more than half way from the entropy of tokens
    drawn by their frequency to that of uniform noise. A network that has not trained for long generates noise, and that
    is no failure: drift counts only once the model has `learned`, that is, its NELBO has been below the entropy of the
    token frequencies.
    """
    if samples < data - 1:
        return "mode collapse"
    return "uniform drift" if learned and samples > (by_frequency + noise) / 2 else None


ALARMS = {
    "mode collapse": "samples are much less diverse than the data",
    "uniform drift": "samples are close to uniform noise",
}


def print_validation(found: dict[str, Any], config: TrainConfig) -> None:
    line = f"step {found['step']:>7,}/{config.steps:,}  validation NELBO {found['nelbo']:.4f} nats per token"
    if "entropy" in found:
        line += f"  entropy of samples {found['entropy']:.2f} (data {found['data_entropy']:.2f})"
        line += f"  WARNING: {found['alarm']}, {ALARMS[found['alarm']]}" if found["alarm"] else ""
    print(line, flush=True)
    for text in found.get("samples", [])[:1]:
        print(f"    | {' '.join(text.split())[:200]}", flush=True)
