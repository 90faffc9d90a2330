"""Another judge reads what the rows of a study wrote: some of the texts, at some of the steps, without the models.

    python -m studies.second_opinion studies/results/main --judge smollm2 --steps 4 8 16 32 64 --num 64
    python -m studies.second_opinion studies/results/main --judge gemma3-270m --steps 8 32 --num 64
    python -m studies.second_opinion studies/results/main --judge smollm2 --task conditional --steps 8 64 256
    python -m studies.second_opinion studies/results/search --judge smollm2 --steps 8 32 --match "^mdlm/.*order-dilated"

Its rows join those that are there; what it has read before is not read again.
"""

import argparse
import re
import time
from pathlib import Path

from cdlm.eval.config import EvalConfig
from cdlm.eval.console import minutes, summary
from cdlm.eval.measure import judged
from cdlm.eval.results import Samples, append_row, read_rows, read_samples
from cdlm.eval.scorer import open_judge
from cdlm.eval.sweep import row_key
from cdlm.files import alone_in


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="folder of a study")
    parser.add_argument("--judge", required=True)
    parser.add_argument("--task", choices=["unconditional", "conditional"], default="unconditional")
    parser.add_argument("--steps", type=int, nargs="+", required=True)
    parser.add_argument("--controls", action="store_true", help="also the texts with temperature or top-p")
    parser.add_argument("--match", type=pattern, default="", help="only texts whose ROW/FILE this pattern finds")
    parser.add_argument("--num", type=int, default=64)
    asked = parser.parse_args()
    chosen = [(folder, path) for folder, path in sampled(asked.study, asked.match) if wanted(read_samples(path), asked)]
    if not chosen:
        parser.error(f"{asked.study} holds no such texts; it is a folder that a study wrote, with its samples/")
    config, judge = EvalConfig((), (asked.judge,), num=asked.num), open_judge(asked.judge)
    began = time.perf_counter()
    for number, (folder, path) in enumerate(chosen, 1):
        samples = read_samples(path)
        lines = samples.lines[: asked.num]
        samples = Samples({**samples.about, "num": len(lines), "file": path.name}, lines)
        key = row_key(samples.about, judge, config)
        with alone_in(folder):
            if all(row["key"] != key for row in read_rows(folder)):
                row = judged(samples, judge, config, key)
                append_row(folder, row)
                left = (time.perf_counter() - began) / number * (len(chosen) - number)
                print(f"{summary(row)}; {minutes(left)} left", flush=True)


def pattern(text: str) -> str:
    """For argparse: a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no pattern: {error}") from None
    return text


def sampled(study: Path, match: str) -> list[tuple[Path, Path]]:
    """The rows of a study and their files of texts, where the pattern finds ROW/FILE."""
    folders = sorted(path.parent for path in study.glob("*/results.jsonl"))
    files = [(folder, path) for folder in folders for path in sorted((folder / "samples").glob("*.jsonl"))]
    return [(folder, path) for folder, path in files if re.search(match, f"{folder.name}/{path.name}")]


def wanted(samples: Samples, asked: argparse.Namespace) -> bool:
    """Texts in double precision at one of the steps; an autoregressive model has none."""
    about, how = samples.about, samples.about["sampling"]
    if about["task"] != asked.task or how["precision"] != "fp64":
        return False
    controlled = how["temperature"] != 1 or how["top_p"] != 1
    return how["steps"] in (*asked.steps, None) and (asked.controls or not controlled)


if __name__ == "__main__":
    main()
