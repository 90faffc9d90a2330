"""Another judge reads what the rows of a study wrote: some of the texts, at some of the steps, without the models.

    python -m studies.second_opinion studies/results/main --judge smollm2 --steps 4 8 16 32 64 --num-samples 64
    python -m studies.second_opinion studies/results/main --judge gemma3-270m --steps 8 32 --num-samples 64
    python -m studies.second_opinion studies/results/main --judge smollm2 --task conditional --steps 8 64 256
    python -m studies.second_opinion studies/results/search --judge smollm2 --steps 8 32 --match "^mdlm/.*order-dilated"

Its rows join those that are there; what it has read before is not read again.
"""

import argparse
import re
import time
from pathlib import Path

from cdlm.eval.config import EvalConfig
from cdlm.eval.console import format_duration, summarize_row
from cdlm.eval.measure import judge_fields, score_samples
from cdlm.eval.results import Samples, append_row, read_rows, read_samples, row_key
from cdlm.eval.scorer import open_judge
from cdlm.eval.sweep import first_samples
from cdlm.files import alone_in


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="folder of a study")
    parser.add_argument("--judge", required=True)
    parser.add_argument("--task", choices=["unconditional", "conditional"], default="unconditional")
    parser.add_argument("--steps", type=int, nargs="+", required=True)
    parser.add_argument("--controls", action="store_true", help="also the texts with temperature or top-p")
    parser.add_argument("--match", type=regex_argument, default="", help="only texts whose ROW/FILE this pattern finds")
    parser.add_argument("--num-samples", type=int, default=64)
    args = parser.parse_args()
    chosen = [
        (folder, path) for folder, path in sample_files(args.study, args.match) if is_wanted(read_samples(path), args)
    ]
    if not chosen:
        parser.error(f"{args.study} holds no such texts; it is a folder that a study wrote, with its samples/")
    config, judge = EvalConfig(judge=(args.judge,), num_samples=args.num_samples), open_judge(args.judge)
    began = time.perf_counter()
    for number, (folder, path) in enumerate(chosen, 1):
        samples = first_samples(path, args.num_samples)
        key = row_key({**samples.header, **judge_fields(judge, config)})
        with alone_in(folder):
            if all(row["key"] != key for row in read_rows(folder)):
                row = score_samples(samples, judge, config)
                append_row(folder, row)
                left = (time.perf_counter() - began) / number * (len(chosen) - number)
                print(f"{summarize_row(row)}; {format_duration(left)} left", flush=True)


def regex_argument(text: str) -> str:
    """For argparse: a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no pattern: {error}") from None
    return text


def sample_files(study: Path, match: str) -> list[tuple[Path, Path]]:
    """The rows of a study and their files of texts, where the pattern finds ROW/FILE."""
    folders = sorted(path.parent for path in study.glob("*/results.jsonl"))
    files = [(folder, path) for folder in folders for path in sorted((folder / "samples").glob("*.jsonl"))]
    return [(folder, path) for folder, path in files if re.search(match, f"{folder.name}/{path.name}")]


def is_wanted(samples: Samples, args: argparse.Namespace) -> bool:
    """Samples in double precision at one of the steps, which an autoregressive model has none of; and human text."""
    header, settings = samples.header, samples.header["sampling"]
    if header["task"] != args.task or (settings and settings["precision"] != "fp64"):
        return False
    if not settings:
        return True
    controlled = settings["temperature"] != 1 or settings["top_p"] != 1
    return settings["steps"] in (*args.steps, None) and (args.controls or not controlled)


if __name__ == "__main__":
    main()
