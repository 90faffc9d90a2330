"""Known corpora: how each is cut into documents, and how text that was split into tokens is put together again."""

import dataclasses
import re
from collections.abc import Callable
from typing import Literal

Cut = Literal["separator", "line", "article"]
Corpus = Literal["plain", "lines", "openwebtext", "wikitext103", "ptb", "lambada"]
Puzzle = Literal["sudoku-4", "sudoku-6", "sudoku-9"]
SUDOKU: dict[str, int] = {"sudoku-4": 4, "sudoku-6": 6, "sudoku-9": 9}
"""Sources that are generated, not read (`cdlm/data/sudoku.py`), by the side of their grids."""


def _as_it_is(text: str) -> str:
    return text


def _rules(*rules: tuple[str, str]) -> Callable[[str], str]:
    """A function that applies regular expressions one after the other."""
    compiled = [(re.compile(pattern, re.MULTILINE), replacement) for pattern, replacement in rules]

    def clean(text: str) -> str:
        for pattern, replacement in compiled:
            text = pattern.sub(replacement, text)
        return text

    return clean


detokenise_wikitext = _rules(
    (r"s '", "s'"),
    (r" @([-,.])@ ", r"\1"),  # well @-@ known, 1 @,@ 000, 3 @.@ 5
    (r" ([:;.!?,])(?=\s|$)", r"\1"),
    (r"\( *([^)\n]*?) *\)", r"(\1)"),
    (r"\[ *([^]\n]*?) *\]", r"[\1]"),
    (r"\{ *([^}\n]*?) *\}", r"{\1}"),
    (r'" *([^"\n]*?) *"', r'"\1"'),
    (r"(?<!\S)' ([^'\n]+?) '(?!\w)", r"'\1'"),
    (r"(?<==) (?==)", ""),  # = = Heading = =
    (r" ° ", "°"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
    (r"^ +| +$", ""),
)

detokenise_ptb = _rules(
    (r"(?<!\S)N(?!\S)", "1"),
    (r" 's", "'s"),
    (r"s '(?= )", "s'"),
    (r" n't", "n't"),
    (r"\\/", "/"),
    (r"([$#]) 1", r"\g<1>1"),
    (r"<unk>", "?"),
    (r"^ +| +$", ""),
)


def detokenise_lambada(text: str) -> str:
    """Curly quotes to straight ones, and the leading line end that is customary."""
    return "\n" + text.translate({0x201C: '"', 0x201D: '"', 0x2018: "'", 0x2019: "'"}).strip()


@dataclasses.dataclass(frozen=True)
class Source:
    """How a corpus is cut into documents, and what is done to their text."""

    cut: Cut
    """Of text files: at separator lines, at every line, or at the level-one headings of WikiText."""
    clean: Callable[[str], str] = _as_it_is
    field: str = "text"
    """The column of JSON lines, parquet and datasets that holds the text."""


SOURCES: dict[Corpus, Source] = {
    "plain": Source("separator"),
    "lines": Source("line"),
    "openwebtext": Source("separator", _rules((r"\n{3,}", "\n\n"))),
    "wikitext103": Source("article", detokenise_wikitext),
    "ptb": Source("line", detokenise_ptb, "sentence"),
    "lambada": Source("separator", detokenise_lambada),
}
