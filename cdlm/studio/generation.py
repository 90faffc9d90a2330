"""From a request to the events of its samples."""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cdlm.metrics.diversity import entropy
from cdlm.sample.settings import Settings
from cdlm.studio.schema import Choice, Completion, Infill, Limits, Usage
from cdlm.studio.settings import given_settings, message_in_fields, resolve_within
from cdlm.text.pipeline import Frame, Pipeline
from cdlm.text.template import OPEN, Template, infilling


@dataclasses.dataclass(frozen=True)
class CheckedRequest:
    """A request that can be carried out."""

    model: Pipeline
    templates: list[Template]
    settings: Settings
    seed: int
    from_tokens: bool
    """Whether the text of a sample is that of all its tokens, not a given text around what was generated."""
    stream: bool
    """Whether the states on the way are sent, too."""


@dataclasses.dataclass(frozen=True)
class Event:
    """A server-sent event."""

    kind: str
    data: dict[str, Any]


def check_request(request: Completion | Infill, model: Pipeline, limits: Limits) -> CheckedRequest:
    """Check a request against the limits and the model; a ValueError says what is wrong, in the fields of a request."""
    try:
        return _checked(request, model, limits)
    except ValueError as error:
        raise ValueError(message_in_fields(str(error))) from None


def _checked(request: Completion | Infill, model: Pipeline, limits: Limits) -> CheckedRequest:
    if request.n > limits.max_samples:
        raise ValueError(f"n must be at most {limits.max_samples} (got {request.n}).")
    if request.steps is not None and request.steps > limits.max_steps:
        raise ValueError(f"steps must be at most {limits.max_steps} (got {request.steps}).")
    text = request.prompt if isinstance(request, Completion) else request.text or ""
    if len(text) > limits.max_characters:
        raise ValueError(f"at most {limits.max_characters:,} characters are possible (got {len(text):,}).")
    template = _template(request, model, limits)
    length = len(template.token_ids) - template.suffix
    if length > limits.max_length:
        raise ValueError(f"at most {limits.max_length} tokens are possible (got {length}).")
    settings = resolve_within(model, given_settings(request), limits)
    templates = [template] * request.n
    model.check(templates, settings)
    _check_windows(length, model, settings, limits)
    from_tokens = isinstance(request, Infill) and request.text is None
    return CheckedRequest(model, templates, settings, request.seed, from_tokens, request.stream)


def _template(request: Completion | Infill, model: Pipeline, limits: Limits) -> Template:
    if isinstance(request, Infill):
        if request.text is None:
            return _masked_again(model, request.token_ids or [], request.masked_positions or [])
        tokenizer, span_length = model.tokenizer, request.span_length
        return model.padded(infilling(request.text, tokenizer, span_length, model.bos_framed, limits.max_length))
    length = request.max_tokens
    if length is None:
        length = min(model.max_length or limits.max_length, limits.max_length)
    if length > limits.max_length:
        raise ValueError(f"max_tokens must be at most {limits.max_length} (got {length}).")
    return model.continuations([request.prompt], 1, length)[0]


def _check_windows(length: int, model: Pipeline, settings: Settings, limits: Limits) -> None:
    """Limit the steps of all windows together."""
    if not settings.block_length or settings.steps is None or length <= model.max_length:
        return
    windows = 1 + math.ceil((length - model.max_length) / settings.block_length)
    if windows * settings.steps > limits.max_steps:
        raise ValueError(
            f"at most {limits.max_steps} steps are possible in all windows together (got {settings.steps} steps in "
            f"each of {windows} windows); raise block_length or lower steps."
        )


def _masked_again(model: Pipeline, token_ids: list[int], masked_positions: list[int]) -> Template:
    """The tokens of an earlier sample, some of which are generated again."""
    vocab_size, length = model.tokenizer.vocab_size, len(token_ids)
    if length < 2 or not masked_positions:
        raise ValueError("give at least two token_ids, and at least one of masked_positions.")
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token_ids must be between 0 and {vocab_size - 1} for this model (got {token}).")
    for position in masked_positions:
        if not 0 <= position < length:
            raise ValueError(f"masked_positions must be between 0 and {length - 1} (got {position}).")
    masked = set(masked_positions)
    token_ids = [OPEN if position in masked else token for position, token in enumerate(token_ids)]
    runs = [list(run) for _, run in itertools.groupby(range(length), lambda position: position in masked)]
    spans = [(run[0], run[-1] + 1) for run in runs if run[0] in masked]
    banned = (model.tokenizer.eos, model.tokenizer.bos)
    return Template(token_ids, [""] * (len(spans) + 1), spans, banned=banned)


def generation_events(request: CheckedRequest) -> Iterator[Event]:
    """A frame for each state, empty unless it is sent, and the finished samples."""
    began = time.perf_counter()
    previous: Frame | None = None
    for frame in request.model.frames(request.templates, request.settings, request.seed):
        data = _frame_data(request, frame, previous) if request.stream else {}
        yield Event("frame", {**data, "seconds": round(time.perf_counter() - began, 4)})
        previous = frame
    assert previous is not None
    seconds = time.perf_counter() - began
    samples = [_choice(request, previous, index) for index in range(len(request.templates))]
    generated = sum(template.num_generated for template in request.templates)
    given = sum(len(template.token_ids) - template.suffix for template in request.templates) - generated
    usage = Usage(prompt_tokens=given, completion_tokens=generated, seconds=round(seconds, 4))
    yield Event("done", {"choices": samples, "usage": usage})


def _frame_data(request: CheckedRequest, frame: Frame, previous: Frame | None) -> dict[str, Any]:
    samples: list[dict[str, Any]] = []
    for index, token_ids in enumerate(frame.token_ids):
        before = token_ids if previous is None else previous.token_ids[index]
        probs = [] if frame.token_probs is None else frame.token_probs[index]
        changed = [
            position for position, token in enumerate(token_ids) if position >= len(before) or token != before[position]
        ]
        sample = {
            "pieces": _pieces(request, token_ids, index),
            "changed": changed,
            "token_probs": [_probability(probs, position) for position in changed],
        }
        if previous is None:
            template_ids = request.templates[index].token_ids
            sample["given"] = [position for position, token in enumerate(template_ids) if token != OPEN]
        samples.append(sample)
    return {"step": frame.step, "num_steps": frame.num_steps, "nfe": frame.nfe, "samples": samples}


def _pieces(request: CheckedRequest, token_ids: Sequence[int], index: int) -> list[str | None]:
    """The text of each token, empty for those that are not part of the text; EOS is shown as a mark."""
    tokenizer = request.model.tokenizer
    pieces = [
        "∎" if token == tokenizer.eos else piece
        for token, piece in zip(token_ids, tokenizer.pieces(token_ids), strict=True)
    ]
    return request.templates[index].visible(token_ids, pieces)


def _probability(probs: Sequence[float], position: int) -> float | None:
    value = probs[position] if position < len(probs) else math.nan
    return None if math.isnan(value) else round(value, 4)


def _choice(request: CheckedRequest, frame: Frame, index: int) -> Choice:
    model = request.model
    token_ids = frame.token_ids[index]
    finished = model.finished(token_ids, request.templates[index]) if model.eos_padded else token_ids
    return Choice(
        index=index,
        text=model.decode(finished) if request.from_tokens else frame.texts[index],
        token_ids=token_ids,
        pieces=[piece or "" for piece in _pieces(request, token_ids, index)],
        nfe=frame.nfe[index],
        entropy=round(float(entropy(torch.tensor([finished or token_ids]))), 4),
    )
