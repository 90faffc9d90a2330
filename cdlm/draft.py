"""Drafts: a text with holes, as tokens; and the text again once the holes are filled.

What is given stays, byte for byte: it is kept verbatim and put around the decoded holes, never decoded itself.
"""

import dataclasses
import re
from collections.abc import Sequence

from cdlm.data.tokenizer import Tokenizer

HOLE = -1
_BLANK = re.compile(r"_{3,}|\[MASK(?::(\d+))?\]")


@dataclasses.dataclass(frozen=True)
class Draft:
    """A text to be written: its tokens with a `HOLE` where one is wanted, and the given text around its holes."""

    ids: list[int]
    pieces: list[str]
    """The text before the first hole, between the holes, and after the last: one more than there are holes."""
    lead: int = 0
    """Tokens at the start that are not part of the text: the one that begins a block."""
    level: float = 1.0
    """The time at which denoising starts; below 1, all of the text is noised to it first (the paper's perturbation)."""
    without: tuple[int, ...] = ()
    """Tokens that no hole may hold: a blank within a text does not end it."""
    clamp: bool = False
    """After noising, keep the tokens that the noise left alone; under masking they stay anyway."""

    @property
    def continues(self) -> bool:
        """Whether all that is given comes first."""
        return HOLE in self.ids and HOLE not in self.ids[: -self.ids.count(HOLE)]

    @property
    def holes(self) -> list[tuple[int, int]]:
        """Where each hole begins and ends."""
        inside = [i == HOLE for i in self.ids]
        edges = [
            k for k in range(len(inside) + 1) if (inside[k - 1] if k else False) != (k < len(inside) and inside[k])
        ]
        return list(zip(edges[::2], edges[1::2], strict=True))

    def text(self, ids: Sequence[int], tokenizer: Tokenizer) -> str:
        """The text with its holes filled by `ids`, which may end early (trimmed)."""
        if self.level < 1:
            return tokenizer.decode(ids[self.lead :])
        text = self.pieces[0]
        for (begin, end), piece in zip(self.holes, self.pieces[1:], strict=True):
            filled = tokenizer.decode(ids[begin:end])
            # A word carries the space before it; where the given text ends in one already, one of them is enough.
            text += filled.removeprefix(" ") if _lends_space(text, tokenizer) else filled
            if len(ids) < end:
                return text
            text += piece
        return text


def has_blanks(text: str) -> bool:
    return _BLANK.search(text) is not None


def continuation(prompt: str, length: int, tokenizer: Tokenizer, framed: bool = False, causal: bool = False) -> Draft:
    """A prompt and a hole up to `length` tokens. Without a prompt, a hole alone: the model writes the token that begins
    a block as well, except for a causal one, which cannot draw the first token from anything."""
    ids = [tokenizer.bos] if causal or (framed and prompt) else []
    lead = len(ids)
    ids += _encode(prompt, tokenizer, open_end=True)
    if len(ids) >= length:
        raise ValueError(
            f"the prompt has {len(ids)} tokens and leaves no room in a text of {length}; shorten it or raise --length"
        )
    return Draft(ids + [HOLE] * (length - len(ids)), [prompt, ""], lead)


def blanks(text: str, tokenizer: Tokenizer, width: int = 4) -> Draft:
    """A text with blanks: [MASK] for one token, [MASK:5] for five, ___ for `width` of them."""
    ids: list[int] = []
    pieces, place = [], 0
    for found in _BLANK.finditer(text):
        piece = text[place : found.start()]
        if piece or not ids:
            pieces.append(piece)
            ids += _encode(piece, tokenizer, open_end=True)
        wide = int(found[1] or 1) if found[0].startswith("[") else width
        if wide < 1:
            raise ValueError(f"a blank has at least one token; got {found[0] if found[1] else width}")
        ids += [HOLE] * wide
        place = found.end()
    if HOLE not in ids:
        raise ValueError("there is nothing to fill in: mark each gap with ___, or with one [MASK] for each token")
    pieces.append(text[place:])
    return Draft(ids + _encode(text[place:], tokenizer), pieces, without=(tokenizer.eos, tokenizer.bos))


def noised(text: str, tokenizer: Tokenizer, t: float = 0.5, clamp: bool = False) -> Draft:
    """A text that is noised to time t and denoised from there."""
    if not 0 < t <= 1:
        raise ValueError(f"the noise level is a time in (0, 1]; got {t}")
    ids = _encode(text, tokenizer)
    if not ids:
        raise ValueError("there is no text to rewrite; give at least one token")
    return Draft(ids, [text], level=t, clamp=clamp)


def _encode(text: str, tokenizer: Tokenizer, open_end: bool = False) -> list[int]:
    """The tokens of given text; one space before a hole is left to the word that follows."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{text!r} is not valid UTF-8 (at character {error.start}); save it as UTF-8") from None
    if open_end and _lends_space(text, tokenizer):
        text = text[:-1]
    ids = tokenizer.encode(text)
    if tokenizer.decode(ids).strip() != text.strip():
        lost = next((c for c in text if c.strip() and tokenizer.decode(tokenizer.encode(c)).strip() != c), text)
        raise ValueError(f"the tokenizer of this model cannot write {lost!r}; leave it out or replace it")
    return ids


def _lends_space(text: str, tokenizer: Tokenizer) -> bool:
    return tokenizer.model is not None and text.endswith(" ")
