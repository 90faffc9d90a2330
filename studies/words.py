"""Which words sampled texts are made of: what a perplexity at some entropy does not say.

    python -m studies.words studies/results/search --texts corpus/valid.txt --match "^mdlm/.*-8-steps-fp64-order"

The share of COMMON words, which sharpening raises and guidance lowers; the share of the commonest longer word of a
text, which is high where a text circles about one thing; and pairs of words said twice at once ("of the of the").
Further, how many are English: english.txt.xz lists what people used at least five times in the corpus of the studies,
85,223 words; and how many longer words were among the five longer words before ("the lake and the lakes of the lake").
"""

import argparse
import functools
import lzma
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cdlm.eval.results import read_samples
from studies.second_opinion import regex_argument, sample_files

COMMON = frozenset(["the", "of", "and", "to", "in", "a", "is", "was", "that", "for", "it", "with", "as", "he", "his"])
LONG = 4
"""Letters of a longer word."""
WINDOW = 5
"""Longer words, of at least so many letters, that are looked back at."""
WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")
PIECE_LENGTH = 170
"""Words of a piece of the reference: about 256 tokens."""


def measure_words(texts: Sequence[str]) -> tuple[float, float, float]:
    """The share of common words; of the commonest longer word of a text, on average; of pairs said twice at once."""
    common = total = twice = 0
    most = []
    for text in texts:
        words = re.findall(r"\w+", text.lower())
        total += len(words)
        common += sum(word in COMMON for word in words)
        twice += sum(words[k : k + 2] == words[k + 2 : k + 4] for k in range(len(words) - 3))
        longer = Counter(word for word in words if len(word) >= LONG)
        most.append(max(longer.values(), default=0) / max(1, len(words)))
    return common / max(1, total), sum(most) / max(1, len(most)), twice / max(1, total)


@functools.cache
def known_words() -> frozenset[str]:
    return frozenset(lzma.decompress((Path(__file__).parent / "english.txt.xz").read_bytes()).decode().split())


def words_of(text: str) -> list[str]:
    """The words of a text without numbers, up to its end."""
    return WORD.findall(text.partition("<|endoftext|>")[0].replace("\u2019", "'").lower())


def english_share(texts: Sequence[str]) -> float:
    """The share of words that people use."""
    words = [word for text in texts for word in words_of(text)]
    return sum(word in known_words() for word in words) / max(1, len(words))


def repeated_share(texts: Sequence[str]) -> float:
    """The share of longer words that were said just before; of a text, on average."""
    shares = []
    for text in texts:
        longer = [word for word in words_of(text) if len(word) >= WINDOW]
        said = sum(word in longer[max(0, k - WINDOW) : k] for k, word in enumerate(longer))
        shares.append(said / max(1, len(longer)))
    return sum(shares) / max(1, len(shares))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="folder of a study")
    parser.add_argument("--texts", type=Path, help="a file of texts by people, to compare with")
    parser.add_argument("--match", type=regex_argument, default="", help="only texts whose ROW/FILE this pattern finds")
    args = parser.parse_args()
    table = Table("texts", "common words", "commonest longer word", "pairs said twice", "English", "said again")
    if args.texts:
        words = args.texts.read_text().split()
        add_table_row(
            table, args.texts.name, [" ".join(words[k : k + PIECE_LENGTH]) for k in range(0, len(words), PIECE_LENGTH)]
        )
    files = sample_files(args.study, args.match)
    if not files:
        parser.error(f"{args.study} holds no such texts; it is a folder that a study wrote, with its samples/")
    for folder, path in files:
        samples = read_samples(path)
        add_table_row(table, f"{folder.name}/{path.stem.rsplit('-', 1)[0]}", [line["text"] for line in samples.lines])
    Console(width=160, highlight=False).print(table)


def add_table_row(table: Table, name: str, texts: Sequence[str]) -> None:
    common, most, twice = measure_words(texts)
    shares = (
        f"{common:.1%}",
        f"{most:.1%}",
        f"{twice:.2%}",
        f"{english_share(texts):.1%}",
        f"{repeated_share(texts):.1%}",
    )
    table.add_row(f"{name} ({len(texts)})", *shares)


if __name__ == "__main__":
    main()
