"""Drafts: a text with holes, as tokens; and the text again once the holes are filled.

What is given stays, byte for byte: it is kept verbatim and put around the decoded holes, never decoded itself.
"""

import dataclasses
import operator
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cdlm.data.tokenizer import Tokenizer

HOLE = -1
MOST = 1_000_000
"""Texts of one call."""
_BLANK = re.compile(r"_{3,}|\[MASK(?::(\d+))?\]")
_WIDEST, _LONGEST = 100_000, 10_000_000

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Draft:
    """A text to be written: its tokens with a `HOLE` where one is wanted, and the given text around its holes."""

    ids: list[int]
    pieces: list[str]
    """The text before the first hole, between the holes, and after the last: one more than there are holes."""
    holes: list[Span]
    """Where each hole begins and ends."""
    lead: int = 0
    """Tokens at the start that are not part of the text: the one that begins a block."""
    words: bool = True
    """Whether a word carries the space before it, as in every vocabulary but that of bytes."""
    without: tuple[int, ...] = ()
    """Tokens that no hole may hold: a blank within a text does not end it."""
    start: int | None = None
    """The token that begins a block: where the model has written it first, it is no part of the text."""
    level: float | None = None
    """The time to which all of the text is noised before it is denoised from there (the paper's perturbation)."""
    clamp: bool = False
    """After noising, keep the tokens that the noise left alone; under masking they stay anyway."""
    evenly: bool = False
    """Noise exactly the expected number of words, not each with that probability; starts and ends of text stay."""
    tail: int = 0
    """Tokens at the end that are not part of the text: the ends of text that fill a block up."""

    @property
    def written(self) -> int:
        """Tokens that the model writes."""
        return len(self.ids) - self.lead - self.tail if self.level is not None else self.ids.count(HOLE)

    @property
    def continues(self) -> bool:
        """Whether all that is given comes first."""
        return self.level is None and HOLE not in self.ids[: len(self.ids) - self.written]

    def text(self, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
        """The text with its holes filled by `ids`, which may end early (trimmed, or on their way)."""
        if self.level is not None:
            return decode(ids[self.lead : len(self.ids) - self.tail])
        text = self.pieces[0]
        for (begin, end), piece in zip(self.holes, self.pieces[1:], strict=True):
            filled = decode(ids[self.begins(ids, begin) : end])
            text += filled.removeprefix(" ") if self.lends(text) else filled
            if len(ids) < end:
                return text
            text += piece
        return text

    def begins(self, ids: Sequence[int], begin: int) -> int:
        """Where the text of a hole begins."""
        return 1 if begin == 0 and self.start is not None and list(ids[:1]) == [self.start] else begin

    def visible(self, ids: Sequence[int], pieces: Sequence[str | None]) -> list[str | None]:
        """What the tokens show, without those that are no part of the text."""
        begins, end = self.begins(ids, self.lead), len(self.ids) - self.tail
        return ["" if not begins <= place < end else piece for place, piece in enumerate(pieces)]

    def lends(self, before: str) -> bool:
        """Where the text before a hole ends in a space already, that of the first word is one too many."""
        return self.words and before.endswith(" ")


def has_blanks(text: str) -> bool:
    return _BLANK.search(text) is not None


def continuation(
    prompt: str,
    length: int,
    tokenizer: "Tokenizer",
    framed: bool = False,
    causal: bool = False,
    own: int = 0,
    longer: bool = True,
) -> Draft:
    """A prompt and a hole up to `length` tokens. Without a prompt the model also writes the token that begins a block,
    except for a causal one, which cannot draw its first token from anything. `own` is the model's own length,
    `longer` whether it can write beyond that, in windows."""
    if not 2 <= length <= _LONGEST:
        raise ValueError(f"a text has at least 2 tokens, and at most {_LONGEST:,}; got the length {length}")
    lead = [tokenizer.bos] if causal or (framed and prompt) else []
    given = _encode(prompt, tokenizer, open_end=True)
    if len(lead + given) >= length:
        way = "shorten it or raise --length"
        if own and len(lead + given) >= own:  # which is as long as its texts get, but for windows
            more, block = len(lead + given) + own // 2, own // 2
            windows = f", or write in windows: --length {more} --block {block} (in Python length={more}, block={block})"
            way = "shorten it" + windows * (longer and not causal)
        raise ValueError(f"the prompt has {len(given)} tokens and leaves no room in a text of {length}; {way}")
    ids = lead + given
    holes = [(len(ids), length)]
    start = tokenizer.bos if framed else None
    return Draft(ids + [HOLE] * (length - len(ids)), [prompt, ""], holes, len(lead), _words(tokenizer), start=start)


def blanks(text: str, tokenizer: "Tokenizer", width: int = 4, framed: bool = False, longest: int = _LONGEST) -> Draft:
    """A text with blanks: [MASK] for one token, [MASK:5] for five, ___ for `width`; `longest` tokens in all at most."""
    ids = [tokenizer.bos] * framed
    pieces: list[str] = []
    holes: list[Span] = []
    place = 0
    for found in _BLANK.finditer(text):
        wide = width
        if found[0].startswith("["):  # a number beyond nine digits, however long, is as much too wide as the largest
            wide = int((found[1] or "1").lstrip("0")[:9] or "0")
        if not 1 <= wide <= _WIDEST:
            got = found[0][:40] if found[1] else wide
            raise ValueError(f"a blank has at least one token; got {got} (and at most {_WIDEST:,})")
        if holes and found.start() == place:  # one blank after another is one hole: a character may need both
            holes[-1] = (holes[-1][0], holes[-1][1] + wide)
        else:
            pieces.append(text[place : found.start()])
            ids += _encode(pieces[-1], tokenizer, open_end=True)
            holes.append((len(ids), len(ids) + wide))
        if len(ids) + wide > longest:  # a short text can ask for many wide blanks
            raise ValueError(f"at most {longest:,} tokens; this text with its blanks has {len(ids) + wide:,} or more")
        ids += [HOLE] * wide
        place = found.end()
    if not holes:
        raise ValueError("there is nothing to fill in: mark each gap with ___, or with one [MASK] for each token")
    pieces.append(text[place:])
    ids += _encode(pieces[-1], tokenizer)
    if len(ids) > longest:
        raise ValueError(f"at most {longest:,} tokens; this text with its blanks has {len(ids):,}")
    return Draft(ids, pieces, holes, int(framed), _words(tokenizer), (tokenizer.eos, tokenizer.bos))


def noised(text: str, tokenizer: "Tokenizer", t: float = 0.5, clamp: bool = False, framed: bool = False) -> Draft:
    """A text that is noised to time t and denoised from there."""
    if not 0 < t <= 1:
        raise ValueError(f"the noise level is a time in (0, 1]; got {t}")
    ids = _encode(text, tokenizer)
    if not ids:
        raise ValueError("there is no text to rewrite; give at least one token")
    return Draft([tokenizer.bos] * framed + ids, [text], [], int(framed), level=t, clamp=clamp)


def times(drafts: list[Draft], num: int) -> list[Draft]:
    """Each of them `num` times."""
    try:
        operator.index(num)
    except TypeError:
        raise TypeError(f"num is how many texts to write; got {num!r}; a text to continue goes with prompt=") from None
    if not 1 <= num <= MOST:
        raise ValueError(f"write at least one text, and at most {MOST:,}; got num {num}")
    if not drafts:
        raise ValueError("there is nothing to write: no prompt was given")
    return [draft for draft in drafts for _ in range(num)]


def _encode(text: str, tokenizer: "Tokenizer", open_end: bool = False) -> list[int]:
    """The tokens of given text; one space before a hole is left to the word that follows."""
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
    try:
        return tokenizer.decode(tokenizer.encode(text)).strip() == text.strip()
    except Exception:  # the library raises plain Exception for a word that it does not know
        return False


def _words(tokenizer: "Tokenizer") -> bool:
    return tokenizer.model is not None


def trimmed(ids: list[int], draft: Draft, eos: int) -> list[int]:
    """Up to the first end of text that was written; the end itself is left out."""
    return next((ids[:k] for k in range(max(draft.lead, 1), len(ids)) if ids[k] == eos and draft.ids[k] == HOLE), ids)


def ended(ids: list[int], draft: Draft, eos: int) -> list[int]:
    """Up to where ends of text prevail, for texts that are filled up with them: a sampler of few steps may put one into
    the midst of a text, or a word behind its end; either is left out."""
    ids = ids[: len(draft.ids) - draft.tail]
    free = [k >= max(draft.lead, 1) and draft.ids[k] == HOLE for k in range(len(ids))]
    ends = [one == eos and hole for one, hole in zip(ids, free, strict=True)]
    first = 1 + max((k for k, hole in enumerate(free) if not hole), default=-1)  # nothing that was given is left out
    wrong = ends[first:].count(False)  # words behind the end, and ends before it, if it were here
    least, cut = wrong, first
    for k in range(first, len(ids)):
        wrong += 1 if ends[k] else -1
        if wrong <= least:
            least, cut = wrong, k + 1
    return [one for one, end in zip(ids[:cut], ends, strict=False) if not end]
