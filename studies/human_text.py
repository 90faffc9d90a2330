"""The human text of the package: made from the held-out documents, and checked against the training text.

    python -m studies.human_text valid.txt --train train.txt

writes cdlm/data/human/human.txt.xz: the beginning of each document of the validation split, whole paragraphs of it, as
much as fits into a megabyte, without paragraphs that share a shingle of 13 words (a quotation, a formula of a genre)
with the training text. Then it counts the shared shingles of what it wrote: there must be none.
"""

import argparse
import hashlib
import lzma
from collections.abc import Iterator
from pathlib import Path

from cdlm.data import END
from cdlm.data.human import FILE

LIMIT = 1_000_000
"""Bytes of text, at most."""
SHINGLE = 13
"""Words of a span that is looked up in the training text."""


def documents(path: Path) -> Iterator[str]:
    """The documents of a file, each ended by a line of its own."""
    lines: list[str] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip() == END:
                yield "".join(lines).strip("\n")
                lines = []
            else:
                lines.append(line)
    yield "".join(lines).strip("\n")


def beginning(document: str, share: float) -> str:
    """As many paragraphs as make up a share of a document, and at least one."""
    goal, kept, size = share * len(document.encode()), [], 0
    for paragraph in document.split("\n"):
        size += len(paragraph.encode()) + 1
        if kept and size > goal:
            break
        kept.append(paragraph)
    return "\n".join(kept)


def human_text(documents: list[str]) -> str:
    """The beginnings of all documents, the largest share of each that fits."""
    for percent in range(100, 0, -1):
        text = "".join(f"{beginning(document, percent / 100)}\n{END}\n" for document in documents)
        if len(text.encode()) <= LIMIT:
            return text
    raise ValueError(f"the first paragraphs of the documents alone have more than {LIMIT:,} bytes")


def shingles(text: str) -> set[int]:
    """Hashes of all spans of that many words."""
    words = text.split()
    return {hash(tuple(words[place : place + SHINGLE])) for place in range(len(words) - SHINGLE + 1)}


def in_training_text(texts: list[str], train: Path) -> set[int]:
    """The shingles of some texts that the training text holds."""
    wanted: set[int] = set().union(*map(shingles, texts))
    return set().union(*(wanted & shingles(document) for document in documents(train)))


def without(document: str, held: set[int]) -> str:
    """A document without the paragraphs in which any of these shingles begins."""
    kept: list[str] = []
    for paragraph in reversed(document.split("\n")):
        following = " ".join(" ".join(reversed(kept)).split()[: SHINGLE - 1])
        if not held & shingles(f"{paragraph} {following}"):
            kept.append(paragraph)
    return "\n".join(reversed(kept))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the human text of the package, and check that it was held out.")
    parser.add_argument("valid", type=Path, help="the held-out documents")
    parser.add_argument("--train", type=Path, required=True, help="the documents that the models were trained on")
    options = parser.parse_args()
    found = [document for document in documents(options.valid) if document.strip()]
    held = in_training_text(found, options.train)
    text = human_text([kept for document in found if (kept := without(document, held))])
    FILE.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    parts = [part for part in text.split(END) if part.strip()]
    print(f"{len(parts)} documents, {len(text.encode()):,} bytes of text, {FILE.stat().st_size:,} on disk")
    print(f"SHA-256 of the text: {hashlib.sha256(text.encode()).hexdigest()}")
    print(f"shingles of {SHINGLE} words: {len(set().union(*map(shingles, parts))):,}")
    print(f"of these in the training text: {len(in_training_text(parts, options.train)):,}")


if __name__ == "__main__":
    main()
