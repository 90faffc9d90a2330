"""From a request to its samples, and to the pieces of text that a stream sends on the way."""

import dataclasses
import functools
import itertools
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from cdlm.metrics.diversity import entropy
from cdlm.sample.draw import State
from cdlm.sample.logits import LogitsProcessor, LogitsRows
from cdlm.sample.samplers import SAMPLERS
from cdlm.sample.settings import Settings
from cdlm.studio.schema import MAX_SEED, Choice, Completion, Infill, Limits, Usage
from cdlm.studio.settings import RequestError, given_settings, request_error, resolve_within
from cdlm.text.completion import batches
from cdlm.text.pipeline import Pipeline, sample_noise
from cdlm.text.template import OPEN, Template, infilling, insertion
from cdlm.types import LogLaw

DEFAULT_MAX_TOKENS = 16
_BROKEN = "\ufffd"


@dataclasses.dataclass(frozen=True)
class CheckedRequest:
    """A request that can be carried out."""

    model: Pipeline
    templates: list[Template]
    """One for each choice."""
    settings: Settings
    seed: int
    prompt_tokens: int
    kind: Literal["completion", "infill", "tokens"]
    """What the text of a choice is: what was generated, a text with its blanks filled, or the text of all tokens."""
    stop: tuple[str, ...] = ()
    echo: bool = False
    logits_processors: tuple[LogitsProcessor, ...] = ()
    stream: bool = False
    """Whether text is sent as soon as it is final."""
    drafts: bool = False
    """Whether the states on the way are sent, too."""

    @functools.cached_property
    def tokens_stay(self) -> bool:
        """Whether a token that is drawn stays as it is: then the beginning of a text is final before its end."""
        process = self.model.denoiser.process
        return process is None or (process.absorbing and SAMPLERS[self.settings.sampler].keeps_tokens)


@dataclasses.dataclass(frozen=True)
class Progress:
    """What has become known of some choices, as a stream sends it; nothing if nobody looks."""

    choices: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Result:
    """The finished samples."""

    choices: list[Choice]
    usage: Usage


def check_request(request: Completion | Infill, model: Pipeline, limits: Limits) -> CheckedRequest:
    """Check a request against the limits and the model; a `RequestError` says what is wrong, and with which field."""
    try:
        return _checked(request, model, limits)
    except ValueError as error:
        raise request_error(error) from None


def _checked(request: Completion | Infill, model: Pipeline, limits: Limits) -> CheckedRequest:
    n = request.n or 1
    if request.steps is not None and request.steps > limits.max_steps:
        raise RequestError(f"steps must be at most {limits.max_steps} (got {request.steps}).", "steps")
    if n > limits.max_samples:
        raise RequestError(f"n must be at most {limits.max_samples} (got {n}).", "n")
    prompts: list[str | list[int]] = _prompts(request) if isinstance(request, Completion) else [""]
    if n * len(prompts) > limits.max_samples:
        raise RequestError(
            f"at most {limits.max_samples} samples are possible in one request (got {len(prompts)} prompts with "
            f"{n} samples each).",
            "prompt",
        )
    if isinstance(request, Completion):
        _check_completion(request, n)
        given = [_completion_template(request, prompt, model, limits) for prompt in prompts]
    else:
        given = [_infill_template(request, model, limits)]
    for template in given:
        length = len(template.token_ids) - template.suffix
        if length > limits.max_length:
            raise ValueError(f"at most {limits.max_length} tokens are possible in a sample (got {length}).")
    settings = resolve_within(model, given_settings(request), limits)
    templates = [template for template in given for _ in range(n)]
    model.check(templates, settings)
    _check_windows(max(len(template.token_ids) for template in given), model, settings, limits)
    checked = CheckedRequest(
        model,
        templates,
        settings,
        seed=random_seed() if request.seed is None else request.seed,
        prompt_tokens=sum(_num_given(template) for template in given),
        kind="completion",
        stream=bool(request.stream),
        drafts=bool(request.stream_drafts),
    )
    if isinstance(request, Infill):
        return dataclasses.replace(checked, kind="tokens" if request.text is None else "infill")
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    processors = _logit_bias(request.logit_bias, model) if request.logit_bias else ()
    return dataclasses.replace(checked, stop=stop, echo=bool(request.echo), logits_processors=processors)


def random_seed() -> int:
    return secrets.randbelow(MAX_SEED + 1)


def _prompts(request: Completion) -> list[str | list[int]]:
    prompt = request.prompt
    if prompt is None or isinstance(prompt, str):
        return [prompt or ""]
    tokens = [each for each in prompt if isinstance(each, int)]
    return [tokens] if tokens else [each for each in prompt if isinstance(each, str | list)]


def _check_completion(request: Completion, n: int) -> None:
    if request.logprobs is not None:
        raise RequestError(
            "logprobs is not supported: a diffusion model does not draw tokens from left to right, so that none has a "
            "probability given those before it; leave it out.",
            "logprobs",
        )
    if request.best_of not in (None, n):
        raise RequestError(f"best_of must be n, which is {n} (got {request.best_of}); leave it out.", "best_of")
    if request.max_tokens is not None and request.max_length is not None:
        raise RequestError("give max_tokens or max_length, not both.", "max_length")
    if request.suffix and request.max_length is not None:
        raise RequestError("with a suffix, max_tokens is the length of the gap; leave out max_length.", "max_length")


def _completion_template(request: Completion, prompt: str | list[int], model: Pipeline, limits: Limits) -> Template:
    characters = len(request.suffix or "") + (len(prompt) if isinstance(prompt, str) else 0)
    if characters > limits.max_characters:
        raise RequestError(f"at most {limits.max_characters:,} characters are possible (got {characters:,}).", "prompt")
    length = request.max_length or request.max_tokens or DEFAULT_MAX_TOKENS
    if length > limits.max_length:
        name = "max_length" if request.max_length else "max_tokens"
        raise RequestError(f"{name} must be at most {limits.max_length} (got {length}).", name)
    if request.suffix:
        return model.padded(insertion(prompt, request.suffix, length, model.tokenizer, model.bos_framed))
    return model.continuations([prompt], 1, length, new_tokens=request.max_length is None)[0]


def _infill_template(request: Infill, model: Pipeline, limits: Limits) -> Template:
    if request.text is None:
        return _masked_again(model, request.token_ids or [], request.masked_positions or [])
    if len(request.text) > limits.max_characters:
        raise RequestError(
            f"at most {limits.max_characters:,} characters are possible (got {len(request.text):,}).", "text"
        )
    tokenizer, span_length = model.tokenizer, request.span_length
    return model.padded(infilling(request.text, tokenizer, span_length, model.bos_framed, limits.max_length))


def _check_windows(length: int, model: Pipeline, settings: Settings, limits: Limits) -> None:
    """Limit the steps of all windows together."""
    if not settings.block_length or settings.steps is None or length <= model.max_length:
        return
    windows = 1 + math.ceil((length - model.max_length) / settings.block_length)
    if windows * settings.steps > limits.max_steps:
        raise RequestError(
            f"at most {limits.max_steps} steps are possible in all windows together (got {settings.steps} steps in "
            f"each of {windows} windows); raise block_length or lower steps.",
            "block_length",
        )


def _masked_again(model: Pipeline, token_ids: list[int], masked_positions: list[int]) -> Template:
    """The tokens of an earlier sample, some of which are generated again."""
    vocab_size, length = model.tokenizer.vocab_size, len(token_ids)
    if length < 2 or not masked_positions:
        raise RequestError(
            "give at least two token_ids, and at least one of masked_positions.",
            "token_ids" if length < 2 else "masked_positions",
        )
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"token_ids must be between 0 and {vocab_size - 1} for this model (got {token}).", "token_ids"
            )
    for position in masked_positions:
        if not 0 <= position < length:
            raise RequestError(
                f"masked_positions must be between 0 and {length - 1} (got {position}).", "masked_positions"
            )
    masked = set(masked_positions)
    token_ids = [OPEN if position in masked else token for position, token in enumerate(token_ids)]
    runs = [list(run) for _, run in itertools.groupby(range(length), lambda position: position in masked)]
    spans = [(run[0], run[-1] + 1) for run in runs if run[0] in masked]
    banned = (model.tokenizer.eos, model.tokenizer.bos)
    return Template(token_ids, [""] * (len(spans) + 1), spans, banned=banned)


def _num_given(template: Template) -> int:
    return len(template.token_ids) - template.suffix - template.num_generated


def _logit_bias(bias: dict[str, float], model: Pipeline) -> tuple[LogitsProcessor, ...]:
    """A processor that adds to the logits of some tokens."""
    added = torch.zeros(model.denoiser.vocab, device=model.device)
    for name, value in bias.items():
        if not name.isdecimal() or int(name) >= model.tokenizer.vocab_size:
            raise RequestError(
                f"logit_bias must be by token id, between 0 and {model.tokenizer.vocab_size - 1} (got {name!r}).",
                "logit_bias",
            )
        added[int(name)] = value

    def add(logits: LogLaw, rows: LogitsRows) -> LogLaw:
        return logits + added

    return (add,)


def generation_events(request: CheckedRequest) -> Iterator[Progress | Result]:
    """The progress after each state, and the finished samples. Samples of one length are generated together."""
    model, templates = request.model, request.templates
    began = time.perf_counter()
    choices: list[Choice] = []
    for rows in batches(templates, len(templates), model.denoiser.process is None):
        noise = sample_noise(request.seed, len(templates), rows)
        streams = [_ChoiceStream(request, row) for row in rows]
        state: State | None = None
        for state in model.states(
            [templates[row] for row in rows],
            request.settings,
            noise,
            request.logits_processors,
            watch=request.drafts,
        ):
            seconds = round(time.perf_counter() - began, 4)
            news = [stream.news(state, place, seconds) for place, stream in enumerate(streams) if request.stream]
            yield Progress([choice for choice in news if choice is not None])
        assert state is not None
        finished = [_choice(request, state, place, row) for place, row in enumerate(rows)]
        if request.stream:
            yield Progress([stream.end(choice) for stream, choice in zip(streams, finished, strict=True)])
        choices += finished
    generated = sum(template.num_generated for template in templates)
    usage = Usage(
        prompt_tokens=request.prompt_tokens,
        completion_tokens=generated,
        total_tokens=request.prompt_tokens + generated,
        seconds=round(time.perf_counter() - began, 4),
    )
    yield Result(sorted(choices, key=lambda choice: choice.index), usage)


class _ChoiceStream:
    """What has been sent of a choice."""

    def __init__(self, request: CheckedRequest, index: int) -> None:
        self.request, self.index = request, index
        self.sent = ""
        self.token_ids: list[int] = []

    def news(self, state: State, place: int, seconds: float) -> dict[str, Any] | None:
        """The text that is final since the last state; and the state itself, if drafts are sent."""
        token_ids = state.x[place].tolist()
        text = _final_text(self.request, token_ids, self.index) if token_ids != self.token_ids else self.sent
        delta = text[len(self.sent) :] if text.startswith(self.sent) else ""
        self.sent += delta
        choice: dict[str, Any] = {"index": self.index, "text": delta, "logprobs": None, "finish_reason": None}
        if self.request.drafts:
            choice["draft"] = _draft(self.request, state, place, self.index, self.token_ids, seconds)
        self.token_ids = token_ids
        return choice if delta or self.request.drafts else None

    def end(self, choice: Choice) -> dict[str, Any]:
        """The rest of the text, and how it ended."""
        data = choice.model_dump()
        data["text"] = choice.text[len(self.sent) :]
        kept = data if self.request.drafts else ("index", "text", "logprobs", "finish_reason")
        return {name: data[name] for name in kept}


def _final_text(request: CheckedRequest, token_ids: list[int], index: int) -> str:
    """The beginning of the text of a choice that no later step can change.

    It ends before the first mask, an EOS token, a character whose bytes are not complete, and what may become a stop
    string. It is empty where tokens may still be replaced.
    """
    if request.kind != "completion" or not request.tokens_stay:
        return ""
    model, template = request.model, request.templates[index]
    place, end = template.spans[0]
    while place < min(end, len(token_ids)) and token_ids[place] < model.tokenizer.vocab_size:
        if token_ids[place] == model.tokenizer.eos and place > 0:  # a text may begin with the token that ends another
            break
        place += 1
    filled = template.infills(token_ids[:place], model.decode)[0]
    text, stopped = _before_stop(filled.rstrip(_BROKEN), request.stop)
    if not stopped:
        beginnings = {stop[:length] for stop in request.stop for length in range(1, len(stop))}
        text = text[: len(text) - max((len(part) for part in beginnings if text.endswith(part)), default=0)]
    return template.pieces[0] + text if request.echo else text


def _before_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """A text up to the first of the stop strings, and whether there is one."""
    places = [place for place in (text.find(each) for each in stop) if place >= 0]
    return (text[: min(places)], True) if places else (text, False)


def _text(request: CheckedRequest, token_ids: list[int], index: int) -> str:
    """The text of a choice without what `echo` puts before it; masks show as shaded blocks."""
    model, template = request.model, request.templates[index]
    if request.kind == "tokens":
        return model.decode(token_ids)
    if request.kind == "infill":
        return template.text(token_ids, model.decode)
    return template.infills(token_ids, model.decode)[0]


def _choice(request: CheckedRequest, state: State, place: int, index: int) -> Choice:
    """A finished sample."""
    model, template, token_ids = request.model, request.templates[index], state.x[place].tolist()
    ended = model.finished(token_ids, template)
    text, stopped = _before_stop(_text(request, ended, index), request.stop)
    stopped |= len(ended) < len(token_ids) - template.suffix
    return Choice(
        index=index,
        text=template.pieces[0] + text if request.echo else text,
        finish_reason="stop" if stopped else "length",
        token_ids=token_ids,
        pieces=[piece or "" for piece in _pieces(request, token_ids, index)],
        nfe=state.nfe[place],
        entropy=round(float(entropy(torch.tensor([(ended if model.eos_padded else token_ids) or token_ids]))), 4),
    )


def _draft(
    request: CheckedRequest, state: State, place: int, index: int, before: list[int], seconds: float
) -> dict[str, Any]:
    """The state of a sample after a step, and what has changed."""
    template, token_ids = request.templates[index], state.x[place].tolist()
    probs = [] if state.token_probs is None else state.token_probs[place].tolist()
    changed = [
        position
        for position, token in enumerate(token_ids)
        if before and (position >= len(before) or token != before[position])
    ]
    draft: dict[str, Any] = {
        "text": _text(request, token_ids, index),
        "step": state.step,
        "num_steps": state.num_steps,
        "nfe": state.nfe[place],
        "seconds": seconds,
        "pieces": _pieces(request, token_ids, index),
        "changed": changed,
        "token_probs": [_probability(probs, position) for position in changed],
    }
    if not before:
        draft["given"] = [position for position, token in enumerate(template.token_ids) if token != OPEN]
    return draft


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
