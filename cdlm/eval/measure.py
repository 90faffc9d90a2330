"""The measures of one cell: samples under a judge, the NELBO of a dataset, path invariance."""

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
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from cdlm.data import END
from cdlm.eval.cells import EvalCell, bounded_samplers
from cdlm.eval.config import EvalConfig, Protocol
from cdlm.eval.results import ResultRow, Samples, row_key
from cdlm.eval.scorer import Judge, JudgeScore, scored_positions
from cdlm.files import VERSION
from cdlm.metrics.bleu import TOKENIZATION, bleu2, token_bleu2
from cdlm.metrics.consistency import own_chain_gap, reliability_curve
from cdlm.metrics.diversity import SAMPLE_METRICS, entropy
from cdlm.metrics.gen_ppl import bootstrap_mean, perplexity
from cdlm.metrics.infilling import infilling_accuracy, masked_evenly
from cdlm.metrics.likelihood import monte_carlo_error, repeated_nelbo
from cdlm.metrics.mauve import MIN_UNBIASED, mauve
from cdlm.metrics.sampler_likelihood import repeated_sampler_nats
from cdlm.rng import seeded
from cdlm.sample.settings import Settings
from cdlm.text.template import OPEN, Template
from cdlm.types import Tokens

PAIRS = ((0.5, 0.0), (0.5, 0.25), (1.0, 0.5), (1.0, 0.75))
"""(t, s) of the consistency task."""
MASK_RATES = (0.15, 0.5, 0.85)
"""The shares of masked tokens of the infilling task."""


def score_samples(
    samples: Samples, judge: Judge, config: EvalConfig, on_progress: Callable[[int], None] | None = None
) -> ResultRow:
    """The row of some samples under a judge, with the measures that need no judge."""
    header, lines = samples.header, samples.lines
    has_references = "reference" in lines[0]
    began = time.perf_counter()
    texts = [_with_common_eos(line["text"], header) for line in lines]
    scores = judge.score(texts, config.protocol, has_references, on_progress)
    seconds = time.perf_counter() - began
    token_ids = [line["token_ids"] for line in lines]
    model_tokens = [
        round(len(scored_positions(ids, header["eos_token_id"])) * score.scored_fraction)
        for ids, score in zip(token_ids, scores, strict=True)
    ]
    nats = [score.nats for score in scores]
    num_tokens = [score.num_tokens for score in scores]
    entropies = [float(entropy(torch.tensor([ids]))) for ids in token_ids]
    ppl = perplexity(nats, num_tokens)
    mean_entropy = bootstrap_mean(entropies)
    row: ResultRow = {
        **header,
        **judge_fields(judge, config),
        "num_samples": len(lines),
        "nfe": sum(line["nfe"] for line in lines) / len(lines),
        "judge": judge.label,
        "own_judge": judge.fingerprint == header["model_hash"],
        "window": judge.window,
        "ppl": ppl.value,
        "ppl_interval": [ppl.low, ppl.high],
        "ppl_model_token": perplexity(nats, model_tokens).value,
        "entropy": mean_entropy.value,
        "entropy_interval": [mean_entropy.low, mean_entropy.high],
        **{name: metric(token_ids) for name, metric in SAMPLE_METRICS.items()},
        "judged_fraction": sum(score.scored_fraction for score in scores) / len(scores),
        "judge_seconds": round(seconds, 3),
        "judge_tokens_per_second": round(sum(num_tokens) / seconds, 1),
        "per_sample": {
            "nats": [round(value, 4) for value in nats],
            "tokens": num_tokens,
            "entropy": [round(value, 5) for value in entropies],
        },
    }
    row["key"] = row_key(row)
    comparison = _compare_with_references(samples, scores, judge, config) if has_references else {}
    return {**row, **comparison, **provenance(config)}


def judge_fields(judge: Judge, config: EvalConfig) -> ResultRow:
    """What a row depends on besides its samples."""
    return {"judge_hash": judge.fingerprint, "protocol": config.protocol}


def _compare_with_references(
    samples: Samples, scores: Sequence[JudgeScore], judge: Judge, config: EvalConfig
) -> ResultRow:
    """Samples beside human text: MAUVE, and in the conditional task BLEU-2 and the perplexity of the originals."""
    header, lines = samples.header, samples.lines
    references = tuple(_with_common_eos(line["reference"], header) for line in lines)
    reference_scores = _score_references(judge, references, config.protocol)
    reference_ids = [line["reference_token_ids"] for line in lines]
    row: ResultRow = {
        "reference_ppl": perplexity(
            [score.nats for score in reference_scores], [score.num_tokens for score in reference_scores]
        ).value,
        "reference_entropy": float(np.mean([float(entropy(torch.tensor([ids]))) for ids in reference_ids])),
        "mauve": mauve(stack_features(scores), stack_features(reference_scores)),
        "mauve_warning": f"{len(lines)} texts; below {MIN_UNBIASED} it is biased upwards"
        if len(lines) < MIN_UNBIASED
        else None,
    }
    if header["task"] == "conditional":
        row["bleu2"] = bleu2([line["text"] for line in lines], [line["reference"] for line in lines])
        row["bleu2_tokens"] = token_bleu2([line["token_ids"] for line in lines], reference_ids)
        row["bleu2_tokenization"] = TOKENIZATION
    return row


@functools.lru_cache(maxsize=8)
def _score_references(judge: Judge, texts: tuple[str, ...], protocol: Protocol) -> list[JudgeScore]:
    """Human text is the same beside every cell: it is scored once."""
    return judge.score(texts, protocol, features=True)


def measure_likelihood(cell: EvalCell, config: EvalConfig) -> ResultRow:
    """The NELBO of a dataset, with its interval over texts and its spread over times; and the bounds of samplers."""
    began = time.perf_counter()
    blocks, x0 = _dataset_tokens(cell, config)
    model = cell.model
    num_times = likelihood_samples(cell, config)
    estimates = repeated_nelbo(model.denoiser, x0, num_times, config.seed, config.batch_size)
    bound = bootstrap_mean(estimates.mean(-1).tolist())
    samplers, _ = bounded_samplers(config, model)
    special = (model.tokenizer.eos, model.tokenizer.bos)
    texts = (model.tokenizer.decode([token for token in block if token not in special]) for block in blocks.tolist())
    exact = model.denoiser.process is None
    predicted = blocks[:, 1:] if exact else blocks  # an autoregressive model is given the first token
    characters = sum(map(len, texts)) / predicted.numel()
    return {
        "nelbo": bound.value,
        "nelbo_interval": [bound.low, bound.high],
        "nelbo_ppl": math.exp(bound.value),
        "nelbo_std_over_times": None if num_times < 2 else float(estimates.std(-1).mean()),
        "nelbo_std_over_texts": float(estimates.mean(-1).std()) if len(estimates) > 1 else None,
        "nelbo_monte_carlo_error": monte_carlo_error(estimates),
        "bits_per_character": bound.value / characters / math.log(2),
        "exact": exact,
        "few_step": [_sampler_bound(cell, config, settings, x0, estimates.mean(-1)) for settings in samplers],
        "seconds": round(time.perf_counter() - began, 3),
    }


def _sampler_bound(
    cell: EvalCell, config: EvalConfig, settings: Settings, x0: Tokens, nelbo: Float[Tensor, "n"]
) -> ResultRow:
    """The bound of a sampler in nats per token, and by how much it exceeds the NELBO; None where it is infinite."""
    model, process = cell.model, cell.model.denoiser.process
    assert process is not None
    estimates = repeated_sampler_nats(
        model.denoiser, process, x0, settings, config.likelihood_samples, config.seed, rows=config.batch_size,
        banned=range(model.tokenizer.vocab_size, model.denoiser.vocab),
        special=(model.tokenizer.eos, model.tokenizer.bos),
    )  # fmt: skip
    nats = estimates / x0.shape[1]
    row: ResultRow = {"sampling": dataclasses.asdict(settings), "steps": settings.steps, "order": settings.order}
    if not bool(nats.isfinite().all()):
        return row | dict.fromkeys(("nelbo", "interval", "monte_carlo_error", "gap", "gap_interval"))
    bound, gap = bootstrap_mean(nats.mean(-1).tolist()), bootstrap_mean((nats.mean(-1) - nelbo).tolist())
    return row | {
        "nelbo": bound.value,
        "interval": [bound.low, bound.high],
        "monte_carlo_error": monte_carlo_error(nats) if settings.steps != 1 else 0.0,
        "gap": gap.value,
        "gap_interval": [gap.low, gap.high],
    }


def infilling_templates(blocks: Sequence[list[int]], banned: tuple[int, ...] = ()) -> list[Template]:
    """Blocks of tokens in which `OPEN` stands for those to be generated."""
    return [Template(block, ["", ""], [(0, len(block))], banned=banned) for block in blocks]


def measure_infilling(cell: EvalCell, config: EvalConfig) -> ResultRow:
    """How much of the masked tokens of a dataset a sampler recovers, and its NFE, at several shares of masked tokens.

    BOS and EOS tokens are never masked.
    """
    began = time.perf_counter()
    assert cell.settings is not None
    x0, _ = _dataset_tokens(cell, config)
    model, special = cell.model, (cell.model.tokenizer.eos, cell.model.tokenizer.bos)
    words = ~torch.isin(x0, torch.tensor(special))
    rng = seeded(config.seed, "infilling", batch=len(x0))
    found = []
    for rate in MASK_RATES:
        masked = masked_evenly(rate, words, rng)
        templates = infilling_templates(x0.masked_fill(masked, OPEN).tolist(), special)
        complete = model.complete(templates, cell.settings, config.seed, batch_size=config.batch_size)
        samples = sorted(complete, key=lambda sample: sample.index)
        accuracy = infilling_accuracy(torch.tensor([sample.token_ids for sample in samples]), x0, masked)
        token, span = accuracy.token_match, accuracy.span_match
        found.append(
            {
                "mask_rate": rate,
                "token_match": token.value,
                "token_match_interval": [token.low, token.high],
                "span_match": span.value,
                "span_match_interval": [span.low, span.high],
                "num_tokens": accuracy.num_tokens,
                "num_spans": accuracy.num_spans,
                "nfe": sum(sample.nfe for sample in samples) / len(samples),
            }
        )
    return {"infilling": found, "seconds": round(time.perf_counter() - began, 3)}


def likelihood_samples(cell: EvalCell, config: EvalConfig) -> int:
    """Noise levels per text; the likelihood of an autoregressive model is exact."""
    return 1 if cell.model.denoiser.process is None else config.likelihood_samples


def _dataset_tokens(cell: EvalCell, config: EvalConfig) -> tuple[Int[Tensor, "n length"], Tokens]:
    """The blocks of a dataset, on the host and on the device."""
    assert cell.dataset is not None
    model, length = cell.model, config.max_length or cell.model.max_length
    blocks = cell.dataset.blocks(model.tokenizer, length, model.bos_framed, config.samples_per_cell, config.seed)
    return blocks, blocks.to(model.denoiser.device)


def measure_consistency(cell: EvalCell, config: EvalConfig) -> ResultRow:
    """Both stand-ins for path invariance on text, at a few pairs of noise levels."""
    began = time.perf_counter()
    _, x0 = _dataset_tokens(cell, config)
    denoiser, posterior = cell.model.denoiser, cell.model.posterior
    leave_one_out = posterior == "plug-in" and denoiser.process is not None and not denoiser.process.absorbing
    pairs = []
    for t, s in PAIRS:
        rng = seeded(config.seed, "consistency", batch=len(x0))
        curve = reliability_curve(
            denoiser, x0, s, t, rng("reliability"), rows=config.batch_size, leave_one_out=leave_one_out
        )
        pair: ResultRow = {"t": t, "s": s, "reliability": dataclasses.asdict(curve), "reliability_error": curve.error}
        if s > 0:  # at s = 0 the chain ends: its mean is f(x_t, t) by construction
            few = torch.arange(min(16, len(x0)))
            gap = own_chain_gap(
                denoiser, x0[: len(few)], s, t, rng("chain")[few], posterior=posterior, leave_one_out=leave_one_out
            )
            pair |= {"own_chain_tv": gap.tv, "own_chain_floor": gap.floor}
        pairs.append(pair)
    return {"pairs": pairs, "seconds": round(time.perf_counter() - began, 3)}


def _with_common_eos(text: str, header: ResultRow) -> str:
    """A text with the EOS token that judges know, in place of the model's own."""
    return text.replace(header["eos_token"], END)


def stack_features(scores: Sequence[JudgeScore]) -> NDArray[np.float32]:
    return np.stack([score.feature for score in scores if score.feature is not None])


def provenance(config: EvalConfig) -> ResultRow:
    """When, where and with what something was computed."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and config.device != "cpu" else "cpu"
    return {"time": now, "device": device, "torch": torch.__version__, "cdlm": VERSION, "commit": _commit()}


def _commit() -> str | None:
    """The commit of a clone; None for an installed package."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    return None
