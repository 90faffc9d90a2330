"""The generation configs of the bundled models: chosen by a written rule on one seed, reported on another.

    python -m studies.bundled screen --device cuda      # 32 samples of every shaping, seed 1, with SmolLM2 as the judge
    python -m studies.bundled choose                    # applies the rule, and writes choice.json
    python -m studies.bundled report --device cuda      # 128 samples of the decisive cells, seed 2, both judges
    python -m studies.bundled texts --device cpu        # a text of each model by its generation config

The rule: among the settings of a model at a number of steps whose unigram entropy H1, bigram entropy H2 and share of
repeated pairs (rep-2) are all within `TOLERANCE` standard errors of human text, the lowest perplexity; if there are
none, the settings whose largest |z| of the three is the smallest. `report` measures the chosen settings, the previous
generation config, and three controls without guidance: the plain sampler, the best shaping of a random order, and the
best of the dilated order.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

import cdlm
from cdlm.eval.columns import COLUMNS, Texts
from cdlm.eval.config import EvalConfig
from cdlm.eval.human_text import as_texts, read_human_text
from cdlm.eval.null import Null, null_of_one_set
from cdlm.eval.results import ResultRow, read_rows, read_samples, samples_by_key, samples_key
from cdlm.eval.sweep import evaluate
from cdlm.sample.settings import explicit, flags

OUT = Path("studies/results/bundled")
MODELS = ("mdlm", "mcdlm-guided")
STEPS, REPORT_STEPS = (8, 16, 32), (8, 32)
SCREEN_SEED, REPORT_SEED = 1, 2
SCREEN_SAMPLES, REPORT_SAMPLES = 32, 128
TEMPERATURE = (1.0, 0.9, 0.8, 0.7)
PENALTY = (0.0, 1.0, 2.0)
GUIDANCE = {"random": (0.0, 0.5), "dilated": (0.0, 0.25, 0.5, 1.0)}
"""Shaping that is screened, by order."""
RULE = ("h1", "h2", "rep_2")
TOLERANCE = 3.0
PREVIOUS: dict[str, dict[int, dict[str, Any]]] = {
    "mdlm": {
        8: {"order": "dilated", "temperature": 0.8, "guidance": 0.5},
        16: {"order": "dilated", "temperature": 0.9, "guidance": 0.5},
        32: {"order": "dilated", "temperature": 0.9, "guidance": 0.25},
    },
    "mcdlm-guided": {
        8: {"order": "dilated", "temperature": 0.8, "guidance": 0.25},
        16: {"order": "dilated", "temperature": 0.8},
        32: {"order": "dilated", "temperature": 0.9},
    },
}
"""The generation configs before these measurements."""
AXES = ("order", "temperature", "guidance", "log_frequency_penalty")

Cell = dict[str, Any]


def screen(out: Path, device: str, models: Sequence[str], small: bool = False) -> None:
    """Samples of every shaping under one judge. What is finished is not computed again."""
    for name, steps, order in itertools.product(models, STEPS[:1] if small else STEPS, GUIDANCE):
        sweep: Cell = {
            "steps": (steps,),
            "order": (order,),
            "temperature": TEMPERATURE[:1] if small else TEMPERATURE,
            "guidance": GUIDANCE[order][:2],
            "log_frequency_penalty": PENALTY[:1] if small else PENALTY,
        }
        if not small:
            sweep["guidance"] = GUIDANCE[order]
        num_samples = 8 if small else SCREEN_SAMPLES
        _evaluate(name, out / Path(name).name, device, sweep, SCREEN_SEED, num_samples, ("none",), "robust")
    for name in models:
        folder = out / Path(name).name
        evaluate(EvalConfig(judge=("smollm2",), out=folder, device=device), Console(width=160, highlight=False))  # type: ignore[arg-type]


def choose(out: Path) -> dict[str, Any]:
    """The settings that the rule chooses from the screened cells, with the controls for the report."""
    found: dict[str, Any] = {}
    cells: dict[str, list[Cell]] = {}
    for folder in sorted(path.parent for path in out.glob("screen/*/results.jsonl")):
        rows = cells[folder.name] = screened(folder)
        found[folder.name] = {}
        for steps in sorted({row["steps"] for row in rows}):
            own = [row for row in rows if row["steps"] == steps]
            unguided = [row for row in own if not row["guidance"]]
            found[folder.name][str(steps)] = {
                "chosen": best(own),
                "dilated order": best([row for row in unguided if row["order"] == "dilated"]),
                "random order": best([row for row in unguided if row["order"] == "random"]),
            }
    (out / "cells.json").write_text(json.dumps(cells) + "\n")
    (out / "choice.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def best(cells: Sequence[Cell]) -> Cell:
    """The cell that the rule chooses."""
    admissible = [cell for cell in cells if largest_z(cell) <= TOLERANCE]
    return min(admissible, key=lambda cell: cell["ppl"]) if admissible else min(cells, key=largest_z)


def largest_z(cell: Cell) -> float:
    return max(abs(cell["z"][name]) for name in RULE)


def screened(folder: Path) -> list[Cell]:
    """The screened cells of a model: settings, perplexity, and z of the columns of the rule."""
    files, scored = samples_by_key(folder), [row for row in read_rows(folder) if row["judge"] != "none"]
    rows = {files[samples_key(row)]: row for row in scored}
    paths = list(rows)
    num_samples = len(read_samples(paths[0]).lines)
    model = cdlm.load(folder.name, "cpu")
    human = read_human_text(None, model, model.max_length, num_samples)
    pool = as_texts(human.pool, model.tokenizer)
    nulls = {}
    for name in RULE:
        metric = COLUMNS[name].prepare(pool)
        assert metric is not None
        nulls[name] = null_of_one_set(lambda rows, m=metric: m(rows, rows), len(pool), num_samples)  # type: ignore[misc]
    special = (model.tokenizer.eos, model.tokenizer.bos)
    with ProcessPoolExecutor() as workers:
        measured = list(workers.map(_columns, paths, [nulls] * len(paths), [special] * len(paths), chunksize=8))
    cells = []
    for path, z in zip(paths, measured, strict=True):
        row = rows[path]
        sampling = row["sampling"]
        settings = {"steps": sampling["steps"]} | {axis: sampling[axis] or 0.0 for axis in AXES}
        cells.append({**settings, "ppl": row["ppl"], "ppl_interval": row["ppl_interval"], "z": z})
    return cells


def _columns(path: Path, nulls: dict[str, Null], special: tuple[int, ...]) -> dict[str, float]:
    """z of the columns of the rule, for a file of samples."""
    ids = [[token for token in line["token_ids"] if token not in special] for line in read_samples(path).lines]
    texts, found = Texts(ids, [""] * len(ids)), {}
    for name, null in nulls.items():
        metric = COLUMNS[name].prepare(texts)
        assert metric is not None
        found[name] = round(null.z(metric(range(len(ids)), range(len(ids)))), 2)  # type: ignore[arg-type]
    return found


def report(
    out: Path, device: str, models: Sequence[str], judges: Sequence[str], steps: Sequence[int] = REPORT_STEPS
) -> None:
    """The decisive cells with more samples of another seed, which nothing was chosen by."""
    choice = json.loads((out / "choice.json").read_text())
    for name, number in itertools.product(models, steps):
        for cell in decisive(choice[Path(name).name][str(number)], PREVIOUS[Path(name).name][number]):
            sweep = {"steps": (number,), **{axis: (value,) for axis, value in cell.items()}}
            folder = out / "report" / f"{Path(name).name}-{number}"
            _evaluate(name, folder, device, sweep, REPORT_SEED, REPORT_SAMPLES, judges, "distributional")


def save_texts(out: Path, device: str, models: Sequence[str]) -> None:
    """The first text of seed 1 of each model by its generation config, for the page."""
    texts = []
    for name, steps in itertools.product(models, REPORT_STEPS):
        model = cdlm.load(name, device, "float32")
        settings = model.resolve({"steps": steps})
        (sample,) = model.sample(seed=SCREEN_SEED, steps=steps)
        texts.append({"model": Path(name).name, "settings": flags(explicit(settings)), "text": sample.text})
    (out / "texts.json").write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n")


def decisive(choice: dict[str, Cell], previous: Cell) -> Iterator[Cell]:
    """Different settings, each once: the plain sampler, the previous generation config, those of the rule."""
    plain = {"order": "random", "temperature": 1.0, "guidance": 0.0, "log_frequency_penalty": 0.0}
    cells = [plain, plain | previous, *({axis: cell[axis] for axis in AXES} for cell in choice.values())]
    for number, cell in enumerate(cells):
        if cell not in cells[:number]:
            yield cell


def _evaluate(
    model: str,
    out: Path,
    device: str,
    sweep: Cell,
    seed: int,
    num_samples: int,
    judges: Sequence[str],
    protocol: str,
) -> list[ResultRow]:
    options: Cell = {"num_samples": num_samples, "batch_size": 128, "device": device, "dtype": "float32", "seed": seed}
    label = f"{Path(model).name}={model}"
    config = EvalConfig(models=(label,), out=out, judge=tuple(judges), protocol=protocol, **options, **sweep)  # type: ignore[arg-type]
    return evaluate(config, Console(width=160, highlight=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["screen", "choose", "report", "texts"])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="bundled models, or their directories")
    parser.add_argument("--steps", nargs="+", type=int, default=list(REPORT_STEPS), help="of the report")
    parser.add_argument("--judge", nargs="+", default=["smollm2", "gemma3-270m"], help="judges of the report")
    parser.add_argument("--small", action="store_true", help="try the script: few cells of 8 samples")
    args = parser.parse_args()
    if args.stage == "screen":
        screen(args.out / "screen", args.device, args.models, args.small)
    elif args.stage == "choose":
        print(json.dumps(choose(args.out), indent=1))
    elif args.stage == "texts":
        save_texts(args.out, args.device, args.models)
    else:
        report(args.out, args.device, args.models, args.judge, args.steps)


if __name__ == "__main__":
    main()
