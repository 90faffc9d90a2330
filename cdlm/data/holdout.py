"""What is held out for validation: the last documents, or the end of a single one."""

from collections.abc import Iterable, Iterator

from cdlm.data.sources import Piece

SHARE = 0.01
_REACH = 4096


def documents_held(documents: int, asked: int | None, share: float | None) -> int:
    """How many of the documents: as many as are asked for, else their share; never all."""
    share = SHARE if share is None else share
    wanted = asked or (max(1, round(share * documents)) if share else 0)
    if wanted >= documents:
        raise too_few(documents, wanted)
    return wanted


def characters_held(characters: int, share: float | None) -> int:
    """About how many at the end of a single document, such as a book; 0: it stays whole."""
    return round((SHARE if share is None else share) * characters)


def too_few(documents: int, wanted: int) -> ValueError:
    return ValueError(
        f"the input has {documents} document(s), so {wanted} for validation would leave none to train on; give "
        'more documents (--source lines takes each line as one, --separator "" cuts at blank lines), a --valid '
        "FILE, or --valid-fraction 0 for no validation"
    )


def cut_in_two(pieces: Iterable[Piece], at: int, reach: int) -> Iterator[Piece]:
    """A document as two: the cut is at the last line end before character `at`, or else at the last white space, at
    most `reach` before it; or right there. The white space at the cut is left out."""
    seen, whole = 0, True
    for text, last in pieces:
        if whole and seen + len(text) > at:
            end = at - seen
            start = max(0, end - min(reach, _REACH))
            line = text.rfind("\n", start, end)
            gap = line if line >= 0 else max((k for k in range(start, end) if text[k].isspace()), default=-1)
            yield Piece(text[:gap] if gap >= 0 else text[:end], True)
            text, whole = text[gap + 1 :] if gap >= 0 else text[end:], False
        yield Piece(text, last)
        seen += len(text)
