"""The models that come with the package: trained, made into folders, and measured.

    cdlm prepare train.txt --valid valid.txt --train-vocab-size 8192 --seq-length 256 --packing sentences --out tokens
    python -m studies.zoo train --data tokens
    python -m studies.zoo export --models models
    python -m studies.zoo write --models models
    python -m studies.zoo fresh
    python -m studies.zoo people --data tokens
    python -m studies.second_opinion studies/results/zoo --judge smollm2 --steps 8 16 32 64 128 --controls --num 32
    python -m studies.zoo read

`train` runs the recipes zoo-base, zoo-mdlm and zoo-mcdlm-guided, 20 minutes of an H200 in all, and goes on where it was
stopped. `export` makes folders of bfloat16 weights. `write` has both models write with every sampler of `grids`, to be
judged and chosen from; `fresh` has them write once more, from another seed, as they now say that they write best.
`people` puts held-out texts beside theirs; `read` looks at the words of all. `python -m studies.page` puts what was
found into docs/zoo.md and the cards of the models (studies/zoo_tables.py).
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import cdlm
from cdlm.data import END
from cdlm.data.tokenizer import Tokenizer
from cdlm.data.tokens import open_tokens
from cdlm.eval.config import EvalConfig
from cdlm.eval.results import RESULTS, Samples, key_of, read_samples, samples_path, write_samples
from cdlm.eval.sweep import evaluate
from cdlm.sample.settings import Sampling
from cdlm.train.config import TrainConfig
from cdlm.train.loop import train
from cdlm.train.recipes import RECIPES
from studies.words import again, english

MODELS = {"mdlm": "MDLM", "mcdlm-guided": "MCDLM-guided"}
"""Folders of the zoo, and how tables call them."""
PEOPLE, WORDS = "people", "words.json"
FRESH, AGAIN = 1, "-fresh"
"""The seed of the texts that no setting was chosen by, and how their folders end."""
PART = 15_000_000
"""Bytes of a file of weights, at most."""
SMALL: dict[str, Any] = {"steps": 4, "batch_size": 4, "dtype": "float32", "compile": False, "valid_batches": 1}


def settings(name: str, data: Path, runs: Path, small: bool = False) -> TrainConfig:
    """A recipe of the zoo, with its folders elsewhere; `small` tries the script."""
    config = RECIPES[f"zoo-{name}"].config
    start = runs / config.init_from.name if config.init_from else None
    config = dataclasses.replace(config, data=data, out=runs / config.out.name, init_from=start)
    if not small:
        return config
    network = dataclasses.replace(config.network, hidden_size=32, num_layers=2, num_heads=2)
    return dataclasses.replace(config, network=network, **SMALL)


def export(runs: Path, models: Path) -> None:
    for name in MODELS:
        model = cdlm.load(runs / f"zoo-{name}", "cpu", "float32")
        print(f"wrote {model.save_pretrained(models / name, dtype='bfloat16', part=PART)}", flush=True)


def grids() -> list[dict[str, Any]]:
    """The samplers that texts are written with, those of many steps first."""
    hot = (1.0, 0.9, 0.8)
    plain: dict[str, Any] = {"order": ("random",), "temperature": hot}
    guided: dict[str, Any] = {"order": ("dilated",), "guidance": (0.0, 0.25, 0.5, 1.0), "temperature": hot}
    return [{"steps": (steps,), **how} for steps in (128, 64, 32, 16, 8) for how in (plain, guided)]


def write(models: Path, out: Path, num: int, device: str, names: list[str]) -> None:
    """Texts of every cell, to be judged elsewhere; those that are there are not written again."""
    for grid in grids():
        for name in names:
            _write(models / name, out / name, num, device, grid)


def fresh(models: Path, out: Path, num: int, device: str, names: list[str]) -> None:
    """Texts of another seed by the settings that were chosen, which saw those of the first."""
    for name in names:
        for own in cdlm.load(models / name, "cpu").own:
            cell = {setting: (value,) for setting, value in own.items()}
            _write(models / name, out / f"{name}{AGAIN}", num, device, cell, FRESH)


def _write(model: Path, out: Path, num: int, device: str, grid: dict[str, Any], seed: int = 0) -> None:
    asked: dict[str, Any] = {"judge": ("none",), "num": num, "batch": 64, "device": device, "seed": seed, "out": out}
    evaluate(EvalConfig((f"{MODELS[model.name]}={model}",), **asked, **grid), Console(width=160, highlight=False))
    (out / RESULTS).touch()  # which judges look for


def people(data: Path, out: Path, num: int) -> None:
    """Held-out blocks of people's, as a file of texts: what the judges say of these is the aim."""
    tokens, words = open_tokens(data, "valid"), Tokenizer.load(data / "tokenizer.json")
    rows = torch.linspace(0, tokens.blocks() - 1, num).long()
    blocks = tokens.read(rows).tolist()
    lines = [
        {"index": k, "text": words.decode(ids[1:]), "tokens": ids, "evaluations": 0} for k, ids in enumerate(blocks)
    ]
    about: dict[str, Any] = {"task": "unconditional", "model": PEOPLE, "num": num, "sampling": vars(Sampling())}
    about |= {"length": tokens.length(), "vocab": tokens.meta.vocab, "seed": 0, "eos": words.eos, "end": END}
    about |= {"hash": "", "key": key_of({"split": dataclasses.asdict(tokens.meta.splits["valid"]), "num": num})}
    write_samples(samples_path(out / PEOPLE, PEOPLE, about["key"]), Samples(about, lines))
    (out / PEOPLE / RESULTS).touch()


def read(out: Path) -> None:
    """Which of the words are English, and which are said again: kept as numbers, as the texts themselves are not."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in (PEOPLE, *MODELS, *(f"{name}{AGAIN}" for name in MODELS)):
        files = sorted((out / name / "samples").glob("*.jsonl"))
        texts = {path.name: [line["text"] for line in read_samples(path).lines] for path in files}
        found[name] = {
            file: {"num": len(some), "english": round(english(some), 4), "again": round(again(some), 4)}
            for file, some in texts.items()
        }
        print(f"read {len(files)} files of {name}", flush=True)
    (out / WORDS).write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["train", "export", "write", "fresh", "people", "read"])
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
    elif asked.stage == "people":
        people(asked.data, asked.out, asked.num)
    elif asked.stage == "read":
        read(asked.out)
    else:
        stage = write if asked.stage == "write" else fresh
        stage(asked.models, asked.out, asked.num, asked.device, asked.names)


if __name__ == "__main__":
    main()
