"""Packing by sentences: every block begins where a sentence begins and ends where one ends.

A model writes what its blocks look like. Blocks cut out of a stream begin and end anywhere, and so do its texts; these
are a start, whole sentences of one document, and the end of text up to the length. So that little of it is padding, a
block may begin up to `BACK` sentences before the one where the last block ended, and at the end of a document still
earlier, wherever it is filled best: some sentences are seen twice.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdlm.data.tokenizer import Tokenizer

Ids = NDArray[np.integer[Any]]

BACK = 3
_STOP = re.compile("""([.!?…]["'”\u2019)\\]]*)(?=\\s+["'“\u2018(\\[]*([^\\W\\d_]))|(?=\n)""")
_LAST_WORD = re.compile(r"\w{1,9}\Z")
_SHORT = {
    *("Mr", "Mrs", "Ms", "Dr", "St", "No", "Nos", "vs", "ca", "Capt", "Col", "Gen", "Lt", "Maj", "Sgt", "Prof", "Rev"),
    *("Hon", "Jr", "Sr", "Mt", "Ft", "Fig", "Vol", "vol", "pp", "Messrs"),
}
"""Words whose full stop ends no sentence; nor does that of a single letter."""


def sentences(text: str) -> list[str]:
    """The sentences of a text, each with the white space before it; joined they are the text. A line ends one, too."""
    cuts = [0]
    for found in _STOP.finditer(text):
        mark, follows = found[1], found[2]
        before = _LAST_WORD.search(text, max(0, found.start() - 10), found.start()) if mark == "." else None
        short = before is not None and (len(before[0]) == 1 or before[0] in _SHORT)
        if (mark is None or (follows.isupper() and not short)) and found.end() > cuts[-1]:
            cuts.append(found.end())
    return [text[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def pack_document(text: str, tokenizer: Tokenizer, length: int) -> Iterator[Ids]:
    """The blocks of a document. A sentence that is longer than a block is cut."""
    parts = [part for part in sentences(text) if part.strip()]
    joined, first = (tokenizer.encode_batch(list(each)) for each in (parts, map(str.strip, parts)))
    body = length - 2
    whole: list[tuple[Ids, Ids]] = []  # each sentence twice: as it follows another, and as it begins a block
    for after, bare in zip(joined, first, strict=True):
        pieces = np.split(bare, range(body, len(bare), body))
        whole += [(after, bare)] if len(bare) <= body else [(piece, piece) for piece in pieces]
    before = begin = 0
    while begin < len(whole):
        fits = [(*_filled(whole, begin, body), begin)]
        ending = fits[0][0] == len(whole)
        for earlier in range(begin - 1, before if ending else max(before, begin - BACK - 1), -1):
            end, used = _filled(whole, earlier, body)
            if end <= begin or (ending and end < len(whole)):
                break
            fits.append((end, used, earlier))
        end, _, before = max(fits, key=lambda fit: fit[1])
        ids = np.concatenate([[tokenizer.bos], whole[before][1], *(after for after, _ in whole[before + 1 : end])])
        yield np.pad(ids, (0, length - len(ids)), constant_values=tokenizer.eos)
        begin = end


def _filled(whole: Sequence[tuple[Ids, Ids]], begin: int, room: int) -> tuple[int, int]:
    """The sentence after the last one that a block has room for, and the ids in it."""
    end, used = begin + 1, len(whole[begin][1])
    while end < len(whole) and used + len(whole[end][0]) <= room:
        used += len(whole[end][0])
        end += 1
    return end, used
