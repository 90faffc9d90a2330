"""Completing templates in batches: which ones are refused, which ones go together, and where the sampler starts."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from cdlm.data.tokenizer import Tokenizer
from cdlm.model.denoiser import Denoiser
from cdlm.process.process import Process
from cdlm.rng import Rng
from cdlm.sample.draw import State
from cdlm.sample.generate import generate
from cdlm.sample.logits import LogitsProcessor
from cdlm.sample.settings import Settings
from cdlm.sample.timesteps import NEAR_ZERO
from cdlm.text.template import OPEN, Template
from cdlm.text.windows import windows
from cdlm.types import Tokens


def check_templates(
    templates: Sequence[Template],
    settings: Settings,
    name: str,
    process: Process | None,
    max_length: int,
    eos_padded: bool,
) -> None:
    """Refuse templates that the model or the settings cannot complete, before anything is computed."""
    longest = max(len(template.token_ids) for template in templates)
    if process is None and not all(template.is_continuation and template.prefix for template in templates):
        raise ValueError(f"{name} is autoregressive: it continues a prompt, and cannot infill or rewrite.")
    if process is not None and process.absorbing and any(template.clamp for template in templates):
        raise ValueError("a masked model keeps the tokens that the noise left alone anyway; leave out --clamp.")
    if settings.block_length and not max_length:
        raise ValueError(f"{name} does not say how long its sequences are; leave out --block-length.")
    if settings.block_length and not settings.block_length < max_length < longest:
        raise ValueError(
            f"--block-length must be below the model's length of {max_length}, and the sample longer than "
            f"that (got a block of {settings.block_length} for {longest} tokens)."
        )
    least = min((template.noise_level for template in templates if template.noise_level is not None), default=1.0)
    if settings.final_step != "none" and least <= NEAR_ZERO:
        raise ValueError(f"--noise-level must be above {NEAR_ZERO} with a final step (got {least:g}).")
    if max_length and longest > max_length:
        _check_windows(templates, longest, settings, name, process, max_length, eos_padded)


def _check_windows(
    templates: Sequence[Template],
    longest: int,
    settings: Settings,
    name: str,
    process: Process | None,
    max_length: int,
    eos_padded: bool,
) -> None:
    """Refuse sequences longer than the model's own that windows cannot generate."""
    reason = f"{longest} tokens are more than the {max_length} that {name} was trained on"
    continuing = all(template.is_continuation for template in templates)
    if process is None or eos_padded or not continuing:
        over = next(template for template in templates if len(template.token_ids) == longest)
        room = max_length - longest + over.num_generated
        advice = ""
        if over.noise_level is None and not over.is_continuation and room > 0:
            advice = f"; beside its words, its blanks have room for {room} tokens at most"
        elif eos_padded:
            advice = "; its samples are EOS-padded, so that it generates no longer ones in windows"
        raise ValueError(reason + advice)
    if not settings.block_length:
        block = max_length // 2
        raise ValueError(f"{reason}; generate in windows: --block-length {block} (in Python block_length={block})")


def batches(templates: Sequence[Template], size: int, causal: bool) -> list[list[int]]:
    """Templates that can be completed together, by number: of one length and noise; for causal models of one prompt."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for number, template in enumerate(templates):
        prompt = template.num_generated if causal else 0
        noise = (template.noise_level, template.clamp, template.exact_share)
        kind = (len(template.token_ids), template.suffix, *noise, template.banned, prompt)
        kinds.setdefault(kind, []).append(number)
    return [rows[k : k + size] for rows in kinds.values() for k in range(0, len(rows), size)]


def complete_batch(
    denoiser: Denoiser,
    tokenizer: Tokenizer,
    templates: Sequence[Template],
    settings: Settings,
    rng: Rng,
    *,
    max_length: int = 0,
    compiled: bool = False,
    logits_processors: Sequence[LogitsProcessor] = (),
    watch: bool = False,
) -> Iterator[State]:
    """Complete templates of one kind and length together, in windows of `max_length` where that is shorter."""
    process, first = denoiser.process, templates[0]
    unused = tuple(range(tokenizer.vocab_size, denoiser.vocab))  # outputs of the network that stand for no token
    x = torch.tensor([template.token_ids for template in templates], device=denoiser.device)
    given, start = x != OPEN, 1.0
    if process is not None:
        x, given, start = _noised(process, x, given, first, tokenizer, rng)

    total, window = x.shape[1], max_length or x.shape[1]
    block = settings.block_length or window
    prompt = given if process is None else x < process.vocab

    def fill(x: Tokens, given: Bool[Tensor, "b l"], number: int) -> Iterator[State]:
        end = min(window + number * block, total)
        return generate(
            denoiser, process, x, settings, rng if process is None else rng("window", number), given=given,
            start=start, banned=first.banned + unused, logits_processors=logits_processors,
            prompt=prompt[:, end - x.shape[1] : end], special=(tokenizer.eos, tokenizer.bos), compiled=compiled,
            watch=watch,
        )  # fmt: skip

    if process is None:
        return fill(x, given, 0)
    return windows(fill, x, given, window, block)


def _noised(
    process: Process, x: Tokens, given: Bool[Tensor, "b l"], template: Template, tokenizer: Tokenizer, rng: Rng
) -> tuple[Tokens, Bool[Tensor, "b l"], float]:
    """Where the sampler starts: the tokens, those that are given, and the time."""
    if template.noise_level is None:
        return torch.where(given, x, process.start(x.shape[1], rng("start"), x.device)), given, 1.0
    places, noise = torch.arange(x.shape[1], device=x.device), rng("noise")
    edge = (places < template.prefix) | (places >= x.shape[1] - template.suffix)
    if template.exact_share:
        words = (x != tokenizer.eos) & (x != tokenizer.bos) & ~edge
        kept = process.kept_evenly(x, template.noise_level, noise, words)
    else:
        kept = process.kept(x, template.noise_level, noise)
    noised = torch.where(edge | kept, x, process.start(x.shape[1], noise, x.device))
    return noised, edge | (kept & template.clamp), template.noise_level
