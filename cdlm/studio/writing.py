"""From a request to the events of a text that is being written."""

import dataclasses
import itertools
import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cdlm.metrics.diversity import entropy
from cdlm.sample.settings import Sampling
from cdlm.studio.schema import Choice, Completion, Infill, Limits, Settings, Usage
from cdlm.text.pipeline import Frame, Pipeline
from cdlm.text.template import OPEN, Template, blanks


@dataclasses.dataclass(frozen=True)
class Order:
    """A checked request."""

    model: Pipeline
    templates: list[Template]
    how: Sampling
    seed: int
    whole: bool
    """Whether a text is all of its tokens, not a given text around what was written."""
    watched: bool
    """Whether anybody looks at the states on the way."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing to tell the reader."""

    kind: str
    data: dict[str, Any]


def order(asked: Completion | Infill, model: Pipeline, limits: Limits) -> Order:
    """Check a request against the limits and the model; a ValueError says what is wrong, in the words of a request."""
    try:
        return _checked(asked, model, limits)
    except ValueError as error:
        raise ValueError(in_fields(str(error))) from None


def in_fields(message: str) -> str:
    """What the command line says, with fields instead of flags; there are no windows here."""
    message = re.sub(r"[,;] (or )?write (them )?in windows: .*", "", message).replace("--length", "max_tokens")
    return re.sub(r"--([a-z][a-z-]*)", lambda flag: flag[1].replace("-", "_"), message)


def _checked(asked: Completion | Infill, model: Pipeline, limits: Limits) -> Order:
    if asked.n > limits.n:
        raise ValueError(f"at most {limits.n} texts at a time; got n = {asked.n}")
    if asked.steps is not None and asked.steps > limits.steps:
        raise ValueError(f"at most {limits.steps} steps; got {asked.steps}")
    given = asked.prompt if isinstance(asked, Completion) else asked.text or ""
    if len(given) > limits.characters:
        raise ValueError(f"at most {limits.characters:,} characters; got {len(given):,}")
    if isinstance(asked, Completion):
        length = min(model.max_length or limits.length, limits.length) if asked.max_tokens is None else asked.max_tokens
        if length > limits.length:
            raise ValueError(f"at most {limits.length} tokens; got {length}")
        templates = model.continuations([asked.prompt], asked.n, length)
    elif asked.text is not None:
        templates = [model.filled(blanks(asked.text, model.tokenizer, asked.width, model.bos_framed, limits.length))] * asked.n
    else:
        templates = [remasked(model, asked.tokens or [], asked.masked or [])] * asked.n
    if (size := len(templates[0].ids) - templates[0].tail) > limits.length:
        raise ValueError(f"at most {limits.length} tokens; got {size}")
    how = model.resolve(sampling(asked))
    if how.steps is not None and how.steps > limits.steps:  # its own, where the request says nothing
        how = dataclasses.replace(how, steps=limits.steps)
    model.check(templates, how)
    return Order(model, templates, how, asked.seed, isinstance(asked, Infill) and asked.text is None, asked.stream)


def sampling(asked: Settings) -> dict[str, Any]:
    """The settings of the sampler that a request names; the model may have its own for the others."""
    names = {field.name for field in dataclasses.fields(Sampling)}
    return {name: getattr(asked, name) for name in asked.model_fields_set if name in names}


def remasked(model: Pipeline, tokens: list[int], masked: list[int]) -> Template:
    """Tokens of an earlier text, some of which are to be written anew."""
    states = model.tokenizer.vocab_size
    if len(tokens) < 2 or not masked:
        raise ValueError("give at least two tokens, and at least one position to write anew")
    if not all(0 <= token < states for token in tokens):
        raise ValueError(f"tokens are numbers from 0 to {states - 1} for this model")
    if not all(0 <= place < len(tokens) for place in masked):
        raise ValueError(f"masked positions lie between 0 and {len(tokens) - 1}")
    places = set(masked)
    ids = [OPEN if place in places else token for place, token in enumerate(tokens)]
    runs = [list(run) for _, run in itertools.groupby(range(len(ids)), lambda place: ids[place] == OPEN)]
    holes = [(run[0], run[-1] + 1) for run in runs if ids[run[0]] == OPEN]
    return Template(ids, [""] * (len(holes) + 1), holes, without=(model.tokenizer.eos, model.tokenizer.bos))


def events(asked: Order) -> Iterator[Event]:
    """A frame for each state, empty unless it is looked at, and the finished texts."""
    began, before, last = time.perf_counter(), None, None
    for last in asked.model.frames(asked.templates, asked.how, asked.seed):
        shown = _frame(asked, last, before) if asked.watched else {}
        yield Event("frame", {**shown, "seconds": round(time.perf_counter() - began, 4)})
        before = last
    assert last is not None
    seconds = time.perf_counter() - began
    choices = [_choice(asked, last, number) for number in range(len(asked.templates))]
    written = sum(template.num_generated for template in asked.templates)
    given = sum(len(template.token_ids) - template.suffix for template in asked.templates) - written
    usage = Usage(prompt_tokens=given, completion_tokens=written, seconds=round(seconds, 4))
    yield Event("done", {"choices": choices, "usage": usage})


def _frame(asked: Order, frame: Frame, before: Frame | None) -> dict[str, Any]:
    texts: list[dict[str, Any]] = []
    for number, ids in enumerate(frame.token_ids):
        old = before.token_ids[number] if before is not None else ids
        chances = frame.token_probs[number] if frame.token_probs is not None else []
        changed = [
            [place, _probability(chances, place)]
            for place, token in enumerate(ids)
            if place >= len(old) or token != old[place]
        ]
        texts.append({"pieces": _visible(asked, ids, number), "changed": changed})
        if before is None:
            texts[-1]["given"] = [place for place, token in enumerate(asked.templates[number].ids) if token != OPEN]
    return {"step": frame.step, "steps": frame.num_steps, "evaluations": frame.nfe, "texts": texts}


def _visible(asked: Order, ids: Sequence[int], number: int) -> list[str | None]:
    """Its pieces, without those of tokens that are no part of it; an end of text shows as a mark."""
    words = asked.model.tokenizer
    pieces = ["∎" if one == words.eos else piece for one, piece in zip(ids, words.pieces(ids), strict=True)]
    return asked.templates[number].visible(ids, pieces)


def _probability(chances: Sequence[float], place: int) -> float | None:
    value = chances[place] if place < len(chances) else math.nan
    return None if math.isnan(value) else round(value, 4)


def _choice(asked: Order, frame: Frame, number: int) -> Choice:
    ids, model = frame.token_ids[number], asked.model
    said = model.finished(ids, asked.templates[number]) if model.eos_padded else ids
    return Choice(
        index=number,
        text=model.decode(said) if asked.whole else frame.texts[number],
        tokens=ids,
        pieces=[piece or "" for piece in _visible(asked, ids, number)],
        evaluations=frame.nfe[number],
        entropy=round(float(entropy(torch.tensor([said or ids]))), 4),
    )
