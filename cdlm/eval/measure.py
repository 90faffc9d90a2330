"""The measures of one cell: texts under a judge, the NELBO of a set, path invariance."""

import contextlib
import dataclasses
import datetime
import functools
import math
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cdlm.data import END
from cdlm.eval.cells import Cell
from cdlm.eval.config import EvalConfig, Protocol
from cdlm.eval.results import Row, Samples
from cdlm.eval.scorer import Judge, Reading, counted
from cdlm.files import VERSION
from cdlm.metrics.bleu import TOKENISATION, bleu2, token_bleu2
from cdlm.metrics.consistency import own_chain, reliability
from cdlm.metrics.diversity import distinct, entropy, pooled_entropy, repetition
from cdlm.metrics.gen_ppl import mean, perplexity
from cdlm.metrics.likelihood import few_step, repeated
from cdlm.metrics.mauve import FEW, mauve
from cdlm.rng import seeded
from cdlm.sample.samplers import ORDERS
from cdlm.text.pipeline import Pipeline
from cdlm.types import Tokens

PAIRS = ((0.5, 0.0), (0.5, 0.25), (1.0, 0.5), (1.0, 0.75))
"""(t, s) of the consistency task."""


def judged(
    samples: Samples, judge: Judge, config: EvalConfig, key: str, show: Callable[[int], None] | None = None
) -> Row:
    """What one judge finds in the texts of a cell, and what needs no judge."""
    about, lines = samples.about, samples.lines
    matched = "reference" in lines[0]
    began = time.perf_counter()
    readings = judge.read([_clean(line["text"], about) for line in lines], config.protocol, matched, show)
    seconds = time.perf_counter() - began
    tokens = [line["token_ids"] for line in lines]
    own = [round(len(counted(ids, about["eos"])) * r.share) for ids, r in zip(tokens, readings, strict=True)]
    nats, entropies = [r.nats for r in readings], [float(entropy(torch.tensor([ids]))) for ids in tokens]
    scored, varied = perplexity(nats, [r.tokens for r in readings]), mean(entropies)
    row: Row = {
        **about,
        "key": key,
        "num_samples": len(lines),
        "nfe": sum(line["nfe"] for line in lines) / len(lines),
        "judge": judge.label,
        "judge_hash": judge.fingerprint,
        "own_judge": judge.fingerprint == about["hash"],
        "protocol": config.protocol,
        "window": judge.window,
        "ppl": scored.value,
        "ppl_interval": [scored.low, scored.high],
        "ppl_model_token": perplexity(nats, own).value,
        "entropy": varied.value,
        "entropy_interval": [varied.low, varied.high],
        "entropy_pooled": pooled_entropy(tokens),
        **{f"distinct_{n}": distinct(tokens, n) for n in (1, 2, 3)},
        "repetition_4": repetition(tokens),
        "read": sum(r.share for r in readings) / len(readings),
        "judge_seconds": round(seconds, 3),
        "judge_tokens_per_second": round(sum(r.tokens for r in readings) / seconds, 1),
        "per_text": {
            "nats": [round(x, 4) for x in nats],
            "tokens": [r.tokens for r in readings],
            "entropy": [round(x, 5) for x in entropies],
        },
    }
    return {**row, **(_against(samples, readings, judge, config) if matched else {}), **circumstances(config)}


def _against(samples: Samples, readings: Sequence[Reading], judge: Judge, config: EvalConfig) -> Row:
    """Beside what people wrote: MAUVE, and for recovered texts BLEU-2 and the originals' own perplexity."""
    about, lines = samples.about, samples.lines
    theirs = _originals(judge, tuple(_clean(line["reference"], about) for line in lines), config.protocol)
    row: Row = {
        "reference_ppl": perplexity([r.nats for r in theirs], [r.tokens for r in theirs]).value,
        "reference_entropy": float(np.mean([float(entropy(torch.tensor([x["reference_token_ids"]]))) for x in lines])),
        "mauve": mauve(features_of(readings), features_of(theirs)),
        "mauve_warning": f"{len(lines)} texts; below {FEW} it is biased upwards" if len(lines) < FEW else None,
    }
    if about["task"] == "conditional":
        row["bleu2"] = bleu2([line["text"] for line in lines], [line["reference"] for line in lines])
        row["bleu2_tokens"] = token_bleu2(
            [line["token_ids"] for line in lines], [line["reference_token_ids"] for line in lines]
        )
        row["bleu2_how"] = TOKENISATION
    return row


@functools.lru_cache(maxsize=8)
def _originals(judge: Judge, texts: tuple[str, ...], protocol: Protocol) -> list[Reading]:
    """What people wrote is the same beside every cell: it is read once."""
    return judge.read(texts, protocol, features=True)


def likelihood(cell: Cell, config: EvalConfig) -> Row:
    """The NELBO of a set, with its interval over texts and its spread over times."""
    assert cell.set is not None
    model, length = cell.model, config.max_length or cell.model.max_length
    began = time.perf_counter()
    blocks = cell.set.blocks(model.tokenizer, length, model.bos_framed, config.count, config.seed)
    x0 = blocks.to(model.denoiser.device)
    found = repeated(model.denoiser, x0, config.times, config.seed, config.batch_size)
    bound = mean(found.mean(-1).tolist())
    special = (model.tokenizer.eos, model.tokenizer.bos)
    texts = (model.tokenizer.decode([i for i in block if i not in special]) for block in blocks.tolist())
    exact = model.denoiser.process is None
    predicted = blocks[:, 1:] if exact else blocks  # an autoregressive model is given the first token
    characters = sum(map(len, texts)) / predicted.numel()
    return {
        "nelbo": bound.value,
        "nelbo_interval": [bound.low, bound.high],
        "nelbo_ppl": math.exp(bound.value),
        "nelbo_std_over_times": None if found.shape[1] < 2 else float(found.std(-1).mean()),
        "nelbo_std_over_texts": float(found.mean(-1).std()) if len(found) > 1 else None,
        "bits_per_character": bound.value / characters / math.log(2),
        "times": found.shape[1],
        "exact": exact,
        "samplers": _samplers(model, x0, config),
        "seconds": round(time.perf_counter() - began, 3),
    }


def _samplers(model: Pipeline, x0: Tokens, config: EvalConfig) -> list[Row]:
    """The bounds of samplers of few steps, under masking."""
    if model.denoiser.process is None or not model.denoiser.process.absorbing:
        return []
    rows: list[Row] = []
    for order in config.order or ("random",):
        if order in ORDERS:
            for steps in config.steps:
                term = few_step(model.denoiser, steps, order)
                found = repeated(model.denoiser, x0, config.times, config.seed, config.batch_size, term)
                bound = mean(found.mean(-1).tolist())
                rows.append({"steps": steps, "order": order, "nelbo": bound.value, "interval": [bound.low, bound.high]})
    return rows


def consistency(cell: Cell, config: EvalConfig) -> Row:
    """Both stand-ins for path invariance on text, at a few pairs of noise levels."""
    assert cell.set is not None
    model, length = cell.model, config.max_length or cell.model.max_length
    began = time.perf_counter()
    x0 = cell.set.blocks(model.tokenizer, length, model.bos_framed, config.count, config.seed).to(model.denoiser.device)
    rows, how = [], model.posterior
    without = how == "plug-in" and model.denoiser.process is not None and not model.denoiser.process.absorbing
    for t, s in PAIRS:
        rng = seeded(config.seed, "consistency", batch=len(x0))
        curve = reliability(model.denoiser, x0, s, t, rng("reliability"), rows=config.batch_size, leave_one_out=without)
        row: Row = {"t": t, "s": s, "reliability": dataclasses.asdict(curve), "reliability_error": curve.error}
        if s > 0:  # at s = 0 the chain ends: its mean is f(x_t, t) by construction
            few = torch.arange(min(16, len(x0)))
            gap = own_chain(
                model.denoiser, x0[: len(few)], s, t, rng("chain")[few], posterior=how, leave_one_out=without
            )
            row |= {"own_chain_tv": gap.tv, "own_chain_floor": gap.floor}
        rows.append(row)
    return {"pairs": rows, "seconds": round(time.perf_counter() - began, 3)}


def _clean(text: str, about: Row) -> str:
    """The model's own name for the end of a text, by the one that judges know."""
    return text.replace(about["end"], END)


def features_of(readings: Sequence[Reading]) -> NDArray[np.float32]:
    return np.stack([r.feature for r in readings if r.feature is not None])


def circumstances(config: EvalConfig) -> Row:
    """When, where and with what."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and config.device != "cpu" else "cpu"
    return {"time": now, "device": device, "torch": torch.__version__, "cdlm": VERSION, "commit": _commit()}


def _commit() -> str | None:
    """The commit of a clone; None for an installed package."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        here = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(here, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    return None
