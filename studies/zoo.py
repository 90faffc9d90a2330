"""The models that come with the package: trained, made into folders, and measured.

    cdlm prepare train.txt --valid valid.txt --train-vocab 8192 --length 256 --packing sentences --out tokens
    python -m studies.zoo train --data tokens
    python -m studies.zoo export
    python -m studies.zoo write

`train` runs the recipes zoo-base, zoo-mdlm and zoo-mcdlm-guided, half an hour of an H200 in all, and goes on where it
was stopped. `export` makes folders of bfloat16 weights. `write` has both models write the texts that are read and
judged (`studies.second_opinion`, docs/zoo.md).
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console

import cdlm
from cdlm.config import RunConfig
from cdlm.eval.grid import EvalConfig
from cdlm.eval.suite import evaluate
from cdlm.recipes import RECIPES
from cdlm.train.loop import train

MODELS = {"mdlm": "MDLM", "mcdlm-guided": "MCDLM-guided"}
"""Folders of the zoo, and how tables call them."""
PART = 15_000_000
"""Bytes of a file of weights, at most."""
SMALL: dict[str, Any] = {"steps": 4, "batch": 4, "dtype": "float32", "compile": False, "valid_batches": 1}


def settings(name: str, data: Path, runs: Path, small: bool = False) -> RunConfig:
    """A recipe of the zoo, with its folders elsewhere; `small` tries the script."""
    config = RECIPES[f"zoo-{name}"].config
    start = runs / config.init_from.name if config.init_from else None
    config = dataclasses.replace(config, data=data, out=runs / config.out.name, init_from=start)
    if not small:
        return config
    network = dataclasses.replace(config.network, hidden=32, blocks=2, heads=2)
    return dataclasses.replace(config, network=network, **SMALL)


def export(runs: Path, models: Path) -> None:
    for name in MODELS:
        model = cdlm.load(runs / f"zoo-{name}", "cpu", "float32")
        print(f"wrote {model.save_pretrained(models / name, dtype='bfloat16', part=PART)}", flush=True)


def grids() -> list[dict[str, Any]]:
    """The samplers that texts are written with, those of many steps first."""
    hot = (1.0, 0.9, 0.8, 0.7)
    plain: dict[str, Any] = {"order": ("random",), "temperature": hot}
    guided: dict[str, Any] = {"order": ("dilated",), "guidance": (0.0, 0.25, 0.5, 1.0), "temperature": hot}
    return [{"steps": (steps,), **how} for steps in (128, 64, 32, 16, 8) for how in (plain, guided)]


def write(models: Path, out: Path, num: int, device: str, names: list[str]) -> None:
    """Texts of every cell, to be judged elsewhere; those that are there are not written again."""
    for grid in grids():
        for name in names:
            which = (f"{MODELS[name]}={models / name}",)
            asked: dict[str, Any] = {"judge": ("none",), "num": num, "batch": 64, "device": device, "out": out / name}
            evaluate(EvalConfig(which, **asked, **grid), Console(width=160, highlight=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["train", "export", "write"])
    parser.add_argument("--data", type=Path, default=Path("tokens"), help="folder written by cdlm prepare")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the training runs")
    parser.add_argument("--models", type=Path, default=Path("cdlm/zoo"), help="folder of the folders of models")
    parser.add_argument("--out", type=Path, default=Path("studies/results/zoo"), help="folder for texts and results")
    parser.add_argument("--num", type=int, default=64, help="texts in a cell")
    parser.add_argument("--names", nargs="+", choices=list(MODELS), default=list(MODELS), help="whose texts")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="try the script: a tiny network, few steps")
    asked = parser.parse_args()
    if asked.stage == "train":
        for name in ("base", *MODELS):
            train(dataclasses.replace(settings(name, asked.data, asked.runs, asked.small), device=asked.device), "auto")
    elif asked.stage == "export":
        export(asked.runs, asked.models)
    else:
        write(asked.models, asked.out, asked.num, asked.device, asked.names)


if __name__ == "__main__":
    main()
