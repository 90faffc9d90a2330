"""Templates: a text with masked spans, as tokens; and the text again once the spans are filled.

What is given stays, byte for byte: it is kept verbatim and put around the decoded spans, never decoded itself.
"""

import dataclasses
import operator
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cdlm.data.tokenizer import Tokenizer

OPEN = -1
"""Stands in a template for a token that the model generates."""
MAX_SAMPLES = 1_000_000
"""Samples of one call."""
_BLANK = re.compile(r"_{3,}|\[MASK(?::(\d+))?\]")
_MAX_SPAN, _MAX_LENGTH = 100_000, 10_000_000

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Template:
    """A text to be completed: its token ids with `OPEN` where one is wanted, and the given text around the spans."""

    token_ids: list[int]
    pieces: list[str]
    """The text before the first masked span, between the spans, and after the last: one more than there are spans."""
    spans: list[Span]
    """Where each masked span begins and ends."""
    prefix: int = 0
    """Tokens at the start that are not part of the text: the BOS token of a block."""
    words: bool = True
    """Whether a word carries the space before it, as in every vocabulary but that of bytes."""
    banned: tuple[int, ...] = ()
    """Tokens that no span may hold: a span within a text does not end it."""
    bos: int | None = None
    """The BOS token: where the model has generated it first, it is not part of the text."""
    noise_level: float | None = None
    """The time to which the whole text is noised before it is denoised from there (the paper's perturbation)."""
    clamp: bool = False
    """After noising, keep the tokens that the noise left alone; under masking they stay anyway."""
    exact_share: bool = False
    """Noise exactly the expected number of words, not each with that probability; BOS and EOS stay."""
    suffix: int = 0
    """Tokens at the end that are not part of the text: EOS padding, or the EOS token of a frame."""
    in_context: bool = False
    """Whether the text of a token depends on the tokens before it, as with WordPiece."""

    @property
    def num_generated(self) -> int:
        """Tokens that the model generates."""
        if self.noise_level is not None:
            return len(self.token_ids) - self.prefix - self.suffix
        return self.token_ids.count(OPEN)

    @property
    def is_continuation(self) -> bool:
        """Whether all that is given comes first."""
        return self.noise_level is None and OPEN not in self.token_ids[: len(self.token_ids) - self.num_generated]

    def text(self, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
        """The text with its spans filled by `token_ids`, which may end early."""
        if self.noise_level is not None:
            return decode(token_ids[self.prefix : len(self.token_ids) - self.suffix])
        text = self.pieces[0]
        for infill, (_, end), piece in zip(self.infills(token_ids, decode), self.spans, self.pieces[1:], strict=True):
            text += infill
            if len(token_ids) < end:
                return text
            text += piece
        return text

    def infills(self, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
        """The text of each masked span, filled by `token_ids`, which may end early."""
        found = []
        for (begin, end), before in zip(self.spans, self.pieces, strict=False):
            first = self.first_of_text(token_ids, begin)
            filled = decode(token_ids[first:end])
            if self.in_context:
                filled = decode(token_ids[self.prefix : end]).removeprefix(decode(token_ids[self.prefix : first]))
            found.append(filled.removeprefix(" ") if self.ends_in_space(before) else filled)
        return found

    def first_of_text(self, token_ids: Sequence[int], begin: int) -> int:
        """Where the text of a span begins: behind a BOS token that the model has generated."""
        return 1 if begin == 0 and self.bos is not None and list(token_ids[:1]) == [self.bos] else begin

    def visible(self, token_ids: Sequence[int], pieces: Sequence[str | None]) -> list[str | None]:
        """What the tokens show, without those that are not part of the text."""
        begin, end = self.first_of_text(token_ids, self.prefix), len(self.token_ids) - self.suffix
        return ["" if not begin <= place < end else piece for place, piece in enumerate(pieces)]

    def ends_in_space(self, before: str) -> bool:
        """Whether the text before a span ends in a space already: that of the first word is then one too many."""
        return self.words and before.endswith(" ")


def has_blanks(text: str) -> bool:
    return _BLANK.search(text) is not None


def continuation(
    prompt: str | Sequence[int],
    length: int,
    tokenizer: "Tokenizer",
    bos_framed: bool = False,
    causal: bool = False,
    max_length: int = 0,
    windows: bool = True,
    new_tokens: bool = False,
    framed: bool = False,
) -> Template:
    """A prompt (a text, or its tokens) and a masked span up to `length` tokens; with `new_tokens`, of that length.

    Without a prompt the model also generates the BOS token, except for a causal one, which cannot draw its first token
    from anything, and one that is always `framed`. `max_length` is the model's own, `windows` whether it can generate
    beyond that.
    """
    from_tokens = not isinstance(prompt, str)
    prompt, prefix, given = _beginning(prompt, tokenizer, causal or framed or (bos_framed and len(prompt) > 0))
    length += len(prefix + given) if new_tokens else 0
    if not 2 <= length <= _MAX_LENGTH:
        raise ValueError(f"--max-length must be between 2 and {_MAX_LENGTH:,} (got {length}).")
    if len(prefix + given) >= length:
        advice = "shorten it or raise --max-length"
        if max_length and len(prefix + given) >= max_length:  # only windows go beyond that
            advice = "shorten it"
            if windows and not causal:
                longer, block = len(prefix + given) + max_length // 2, max_length // 2
                advice += (
                    f", or generate in windows: --max-length {longer} --block-length {block} "
                    f"(in Python max_length={longer}, block_length={block})"
                )
        raise ValueError(f"the prompt has {len(given)} tokens and leaves no room in {length} tokens; {advice}.")
    token_ids = prefix + given
    return Template(
        token_ids + [OPEN] * (length - len(token_ids)),
        [prompt, ""],
        [(len(token_ids), length)],
        len(prefix),
        _words(tokenizer) and not from_tokens,
        bos=tokenizer.bos if bos_framed else None,
        in_context=tokenizer.in_context,
    )


def insertion(
    prompt: str | Sequence[int], suffix: str, length: int, tokenizer: "Tokenizer", bos_framed: bool = False
) -> Template:
    """A masked span of `length` tokens between a prompt (a text, or its tokens) and a suffix."""
    from_tokens = not isinstance(prompt, str)
    prompt, prefix, given = _beginning(prompt, tokenizer, bos_framed)
    begin = len(prefix + given)
    return Template(
        prefix + given + [OPEN] * length + _encode(suffix, tokenizer),
        [prompt, suffix],
        [(begin, begin + length)],
        len(prefix),
        _words(tokenizer) and not from_tokens,
        (tokenizer.eos, tokenizer.bos),
        in_context=tokenizer.in_context,
    )


def infilling(
    text: str, tokenizer: "Tokenizer", span_length: int = 4, bos_framed: bool = False, max_length: int = _MAX_LENGTH
) -> Template:
    """A text with blanks: [MASK] for one token, [MASK:5] for five, ___ for `span_length`."""
    token_ids = [tokenizer.bos] if bos_framed else []
    pieces: list[str] = []
    spans: list[Span] = []
    place = 0
    for blank in _BLANK.finditer(text):
        length = span_length
        if blank[0].startswith("["):  # a number of more than nine digits is as much too long as the largest of nine
            length = int((blank[1] or "1").lstrip("0")[:9] or "0")
        if not 1 <= length <= _MAX_SPAN:
            got = blank[0][:40] if blank[1] else length
            raise ValueError(f"a blank must have between 1 and {_MAX_SPAN:,} tokens (got {got}).")
        if spans and blank.start() == place:  # adjacent blanks are one span: a character may need both
            spans[-1] = (spans[-1][0], spans[-1][1] + length)
        else:
            pieces.append(text[place : blank.start()])
            token_ids += _encode(pieces[-1], tokenizer, open_end=True)
            spans.append((len(token_ids), len(token_ids) + length))
        if len(token_ids) + length > max_length:  # a short text can ask for many long blanks
            raise ValueError(
                f"at most {max_length:,} tokens are possible; this text with its blanks has "
                f"{len(token_ids) + length:,} or more."
            )
        token_ids += [OPEN] * length
        place = blank.end()
    if not spans:
        raise ValueError("the text has no blanks; mark each with ___, or with one [MASK] for each token.")
    pieces.append(text[place:])
    token_ids += _encode(pieces[-1], tokenizer)
    if len(token_ids) > max_length:
        raise ValueError(
            f"at most {max_length:,} tokens are possible; this text with its blanks has {len(token_ids):,}."
        )
    banned = (tokenizer.eos, tokenizer.bos)
    words = _words(tokenizer)
    return Template(token_ids, pieces, spans, int(bos_framed), words, banned, in_context=tokenizer.in_context)


def fill(
    text: str, infills: Sequence[str], tokenizer: "Tokenizer", bos_framed: bool = False
) -> tuple[list[int], list[Span]]:
    """The tokens of a text whose blanks are filled, and where those of each infill begin and end.

    A blank only marks a place: its infill may have any number of tokens.
    """
    template = infilling(text, tokenizer, 1, bos_framed)
    if len(infills) != len(template.spans):
        raise ValueError(
            f"the text has {len(template.spans)} blanks (adjacent ones count as one), and {list(infills)!r} fills "
            f"{len(infills)}; give one string for each blank."
        )
    token_ids: list[int] = []
    spans: list[Span] = []
    place = 0
    for (begin, end), before, infill in zip(template.spans, template.pieces, infills, strict=False):
        token_ids += template.token_ids[place:begin]
        own = _encode((" " if template.ends_in_space(before) else "") + infill, tokenizer)
        if not infill or not own:
            raise ValueError("an infill is empty; give at least one token for each blank.")
        spans.append((len(token_ids), len(token_ids) + len(own)))
        token_ids += own
        place = end
    return token_ids + template.token_ids[place:], spans


def rewriting(
    text: str, tokenizer: "Tokenizer", noise_level: float = 0.5, clamp: bool = False, bos_framed: bool = False
) -> Template:
    """A text that is noised to time `noise_level` and denoised from there."""
    if not 0 < noise_level <= 1:
        raise ValueError(f"--noise-level must be above 0 and at most 1 (got {noise_level}).")
    token_ids = _encode(text, tokenizer)
    if not token_ids:
        raise ValueError("there is no text to rewrite; give at least one token.")
    prefix = [tokenizer.bos] if bos_framed else []
    return Template(prefix + token_ids, [text], [], len(prefix), noise_level=noise_level, clamp=clamp)


def repeat(templates: list[Template], num_samples: int) -> list[Template]:
    """Each of them `num_samples` times."""
    try:
        operator.index(num_samples)
    except TypeError:
        raise TypeError(
            f"num_samples must be an integer (got {num_samples!r}); a text to continue goes with prompt=."
        ) from None
    if not 1 <= num_samples <= MAX_SAMPLES:
        raise ValueError(f"--num-samples must be between 1 and {MAX_SAMPLES:,} (got {num_samples}).")
    if not templates:
        raise ValueError("no prompt was given; give at least one.")
    return [template for template in templates for _ in range(num_samples)]


def _beginning(prompt: str | Sequence[int], tokenizer: "Tokenizer", bos: bool) -> tuple[str, list[int], list[int]]:
    """The text of a prompt, the BOS token if there is one before it, and its tokens."""
    prefix = [tokenizer.bos] if bos else []
    if isinstance(prompt, str):
        return prompt, prefix, _encode(prompt, tokenizer, open_end=True)
    given = list(prompt)
    for token in given:
        if not 0 <= token < tokenizer.vocab_size:
            raise ValueError(f"a token of this model is between 0 and {tokenizer.vocab_size - 1} (got {token}).")
    given = given[1:] if bos and given[:1] == prefix else given
    return tokenizer.decode(given), prefix, given


def _encode(text: str, tokenizer: "Tokenizer", open_end: bool = False) -> list[int]:
    """The tokens of given text; one space before a span is left to the word that follows."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{text!r} is not valid UTF-8 (at character {error.start}); save it as UTF-8") from None
    if open_end and _words(tokenizer):
        text = text.removesuffix(" ")
    if not _can_write(text, tokenizer):
        lost = next((word for word in text.split() if not _can_write(word, tokenizer)), text)
        raise ValueError(f"the tokenizer of this model cannot write {lost!r}; leave it out or replace it")
    return tokenizer.encode(text)


def _can_write(text: str, tokenizer: "Tokenizer") -> bool:
    if tokenizer.in_context:  # such tokenizers also change case and spaces: only unknown words are lost
        return tokenizer.unknown not in tokenizer.encode(text)
    try:
        return tokenizer.decode(tokenizer.encode(text)).strip() == text.strip()
    except Exception:  # the library raises plain Exception for a word that it does not know
        return False


def _words(tokenizer: "Tokenizer") -> bool:
    return tokenizer.model is not None


def until_eos(token_ids: list[int], template: Template, eos: int) -> list[int]:
    """Up to the first EOS that was generated, which is left out."""
    for place in range(max(template.prefix, 1), len(token_ids)):
        if token_ids[place] == eos and template.token_ids[place] == OPEN:
            return token_ids[:place]
    return token_ids


def without_padding(token_ids: list[int], template: Template, eos: int) -> list[int]:
    """Up to where EOS tokens prevail, for EOS-padded models: a sampler of few steps may put one into the middle of a
    text, or a word behind its end; either is left out."""
    token_ids = token_ids[: len(template.token_ids) - template.suffix]
    first = max(template.prefix, 1)
    free = [place >= first and template.token_ids[place] == OPEN for place in range(len(token_ids))]
    ends = [token == eos and is_free for token, is_free in zip(token_ids, free, strict=True)]
    begin = 1 + max((place for place, is_free in enumerate(free) if not is_free), default=-1)  # given tokens stay
    errors = ends[begin:].count(False)  # words behind the end, and EOS tokens before it, if it were here
    fewest, cut = errors, begin
    for place in range(begin, len(token_ids)):
        errors += 1 if ends[place] else -1
        if errors <= fewest:
            fewest, cut = errors, place + 1
    return [token for token, end in zip(token_ids[:cut], ends, strict=False) if not end]
