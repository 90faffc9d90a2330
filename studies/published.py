"""Evaluate the public checkpoints of MDLM, SDTT and DUO at the published settings, beside the published numbers.

    python -m studies.published --tokenizer gpt2 --judge gpt2-large --texts openwebtext=openwebtext_valid.txt
    python -m studies.published --models MDLM --model MDLM=my-copy --tokenizer gpt2 --judge gpt2-large --steps 32 64

The checkpoints come from the model hub, or with --model LABEL=MODEL from a directory. OUT/results.jsonl has the rows
of `cdlm eval`, of which finished ones are not computed again, and OUT/published.md the table.
"""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from cdlm.eval.config import EvalConfig
from cdlm.eval.results import ResultRow
from cdlm.eval.sweep import evaluate
from studies.trials import markdown_table

DATASET = "openwebtext"
"""The dataset of the published NELBOs: the last 100,000 documents of OpenWebText."""
NUM_SAMPLES = 256
TOLERANCE = 1.15
"""Generative perplexities of independent set-ups differ by about this factor; see docs/peers.md."""


@dataclasses.dataclass(frozen=True)
class Published:
    """A published number: a generative perplexity with its entropy at some steps, or the perplexity of a NELBO."""

    source: str
    value: float
    steps: int | None = None
    """None: the perplexity of the NELBO."""
    entropy: float | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    """Settings of the sampler, beyond the steps."""


@dataclasses.dataclass(frozen=True)
class PublicModel:
    """A public checkpoint and what is known of it."""

    model: str | None
    """Its id on the model hub; None where it has to be pulled first."""
    numbers: tuple[Published, ...]


def curve(source: str, numbers: str, **settings: Any) -> tuple[Published, ...]:
    """Numbers written as STEPS:PERPLEXITY/ENTROPY."""
    found = []
    for word in numbers.split():
        steps, _, rest = word.partition(":")
        value, _, entropy = rest.partition("/")
        found.append(Published(source, float(value), int(steps), float(entropy), tuple(settings.items())))
    return tuple(found)


GREEDY = {"final_step": "argmax"}
PUBLIC_MODELS = {
    "MDLM": PublicModel(
        "kuleshov-group/mdlm-owt",
        (
            Published("PGM", 23.07),
            *curve("PGM", "32:192.3/5.73 64:142.6/5.69 128:122.9/5.67 256:114.0/5.66 512:109.1/5.64 1024:106.8/5.64"),
            *curve("CoFRe", "8:830.8/5.91"),
            *curve("DUO, issue 16", "1024:40.7/5.28", precision="naive-fp32"),
        ),
    ),
    "SDTT": PublicModel(
        None,
        (
            *curve("PGM", "32:66.3/5.49 64:54.0/5.46 128:48.0/5.44 256:45.9/5.42 512:44.2/5.40 1024:43.2/5.38"),
            *curve("CoFRe", "8:193.1/5.58 16:89.2/5.53"),
        ),
    ),
    "DUO": PublicModel("s-sahoo/duo", curve("IDLM", "1024:71.7/5.22", **GREEDY)),
    "DUO+DCD": PublicModel(
        "s-sahoo/duo-distilled",
        (*curve("IDLM", "4:96.2/4.93", **GREEDY), *curve("DBTM", "1:5743/6.02 2:891/5.41 4:251/5.37")),
    ),
}
"""Numbers on OpenWebText with gpt2-large as the judge and 64-bit sampling, unless their settings say otherwise.

PGM, CoFRe, IDLM and DBTM are papers that measured the models of others; those of SDTT are of checkpoints that they may
have distilled themselves."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=PUBLIC_MODELS, help="some of the checkpoints [all]")
    parser.add_argument("--model", nargs="+", default=[], metavar="LABEL=MODEL", help="a copy of a checkpoint")
    parser.add_argument("--steps", type=int, nargs="+", help="some of the published numbers of steps [all]")
    parser.add_argument("--judge", default="gpt2-large", help="the published judge is gpt2-large")
    parser.add_argument("--tokenizer", type=Path, help="a directory of GPT-2's files")
    parser.add_argument("--texts", help=f"{DATASET}=FILE of validation texts, for the NELBO [no NELBO]")
    parser.add_argument("--num-samples", type=int, default=NUM_SAMPLES)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("results/published"))
    args = parser.parse_args()
    labels = args.models or list(PUBLIC_MODELS)
    sources = {label: PUBLIC_MODELS[label].model for label in labels}
    for word in args.model:
        label, _, source = word.partition("=")
        if label not in sources:
            parser.error(f"--model takes LABEL=MODEL with a label among {', '.join(sources)} (got {word!r}).")
        sources[label] = source
    missing = [label for label, source in sources.items() if source is None]
    if missing and args.models:
        parser.error(
            f"{missing[0]} keeps its models on branches; pull one (docs/hub.md), then add --model {missing[0]}=DIR."
        )
    common = {"judge": args.judge, "tokenizer": args.tokenizer, "num_samples": args.num_samples}
    common |= {"device": args.device, "out": args.out}
    lines = []
    for label, source in sources.items():
        if source is None:
            print(f"left out: {label}, which keeps its models on branches; pull one, then add --model {label}=DIR")
        else:
            lines += compare(label, source, args.steps, args.texts, common)
    page = render(lines, args.judge, args.num_samples)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "published.md").write_text(page, encoding="utf-8")
    Console().print(page, markup=False, highlight=False)


def compare(
    label: str, source: str, steps: Sequence[int] | None, texts: str | None, common: dict[str, Any]
) -> list[tuple[str, Published, ResultRow]]:
    """Measure what was published of a checkpoint, and pair each number with ours."""
    judge, rest = common["judge"], {name: value for name, value in common.items() if name != "judge"}
    rest["models"] = (f"{label}={source}",)
    numbers = [number for number in PUBLIC_MODELS[label].numbers if is_asked(number, steps, texts)]
    found: list[tuple[str, Published, ResultRow]] = []
    for settings in dict.fromkeys(number.settings for number in numbers if number.steps is not None):
        chosen = [number for number in numbers if number.steps is not None and number.settings == settings]
        axes = {name: (value,) for name, value in settings}
        swept = tuple(dict.fromkeys(number.steps for number in chosen if number.steps is not None))
        rows = evaluate(EvalConfig(judge=(judge,), steps=swept, **axes, **rest))
        by_steps = {row["sampling"]["steps"]: row for row in rows}
        found += [(label, number, by_steps[number.steps]) for number in chosen]
    for number in numbers:
        if number.steps is None and texts is not None:
            (row,) = evaluate(EvalConfig(tasks=("likelihood",), texts=(texts,), steps=(1,), **rest))
            found.append((label, number, row))
    return found


def is_asked(number: Published, steps: Sequence[int] | None, texts: str | None) -> bool:
    if number.steps is None:
        return texts is not None
    return steps is None or number.steps in steps


def render(lines: Sequence[tuple[str, Published, ResultRow]], judge: str, num_samples: int) -> str:
    """The table: ours beside what was published, their ratio, and whether the difference needs an explanation."""
    table = []
    for label, number, row in lines:
        settings = " ".join(f"{name} {value}" for name, value in number.settings)
        if number.steps is None:
            what, value, entropy = f"NELBO perplexity, {row['dataset']}", row["nelbo_ppl"], ""
            low, high = (math.exp(bound) for bound in row["nelbo_interval"])
        else:
            what = f"{number.steps} steps{f', {settings}' if settings else ''}"
            value, entropy = row["ppl"], f"{row['entropy']:.2f} / {number.entropy:.2f}"
            low, high = row["ppl_interval"]
        ratio = value / number.value
        verdict = "" if 1 / TOLERANCE <= ratio <= TOLERANCE else "differs"
        ours = f"{value:.1f} ({low:.1f} to {high:.1f})"
        table.append([label, what, ours, f"{number.value:g}", f"{ratio:.2f}", entropy, number.source, verdict])
    header = ["Model", "Measured", "Ours (95 %)", "Published", "Ratio", "Entropy, ours / published", "Source", ""]
    caption = f"{num_samples} samples or blocks each; judge: {judge}. A ratio beyond a factor of {TOLERANCE} is marked."
    return f"# Public checkpoints\n\n{caption}\n\n{markdown_table(header, table)}\n"


if __name__ == "__main__":
    main()
