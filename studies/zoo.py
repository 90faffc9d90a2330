"""The models that come with the package: trained, made into folders, and measured.

    cdlm prepare train.txt --valid valid.txt --train-vocab-size 8192 --seq-length 256 --packing sentences --out tokens
    python -m studies.zoo train --data tokens
    python -m studies.zoo export --models models
    python -m studies.zoo sample --models models
    python -m studies.zoo sample-fresh
    python -m studies.zoo human-text --data tokens
    python -m studies.second_opinion studies/results/zoo --judge smollm2 --steps 8 16 32 64 128 --controls \
        --num-samples 32
    python -m studies.zoo words

`train` runs the recipes zoo-base, zoo-mdlm and zoo-mcdlm-guided, 20 minutes of an H200 in all, and goes on where it was
stopped. `export` makes directories of bfloat16 weights. `sample` draws samples of both models with every sampler of
`sweeps`, to be judged and chosen from; `sample-fresh` draws more, from another seed, by their generation configs.
`human-text` puts held-out texts beside them; `words` looks at the words of all. `python -m studies.page` puts what was
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
from cdlm.eval.results import FORMAT, RESULTS, Samples, read_samples, samples_key, samples_path, write_samples
from cdlm.eval.sweep import evaluate
from cdlm.train.config import TrainConfig
from cdlm.train.loop import train
from cdlm.train.recipes import RECIPES
from studies.words import english_share, repeated_share

MODELS = {"mdlm": "MDLM", "mcdlm-guided": "MCDLM-guided"}
"""Folders of the zoo, and how tables call them."""
HUMAN, WORDS = "people", "words.json"
FRESH_SEED, FRESH_SUFFIX = 1, "-fresh"
"""The seed of the texts that no setting was chosen by, and how their folders end."""
SHARD_SIZE = 15_000_000
"""Bytes of a file of weights, at most."""
SMALL: dict[str, Any] = {"steps": 4, "batch_size": 4, "dtype": "float32", "compile": False, "valid_batches": 1}


def zoo_config(name: str, data: Path, runs: Path, small: bool = False) -> TrainConfig:
    """A recipe of the zoo, with its folders elsewhere; `small` tries the script."""
    config = RECIPES[f"zoo-{name}"].config
    start = runs / config.init_from.name if config.init_from else None
    config = dataclasses.replace(config, data=data, out=runs / config.out.name, init_from=start)
    if not small:
        return config
    network = dataclasses.replace(config.network, hidden_size=32, num_layers=2, num_heads=2)
    return dataclasses.replace(config, network=network, **SMALL)


def export_models(runs: Path, models: Path) -> None:
    for name in MODELS:
        model = cdlm.load(runs / f"zoo-{name}", "cpu", "float32")
        print(f"wrote {model.save_pretrained(models / name, dtype='bfloat16', max_shard_size=SHARD_SIZE)}", flush=True)


def sweeps() -> list[dict[str, Any]]:
    """The samplers that texts are written with, those of many steps first."""
    hot = (1.0, 0.9, 0.8)
    plain: dict[str, Any] = {"order": ("random",), "temperature": hot}
    guided: dict[str, Any] = {"order": ("dilated",), "guidance": (0.0, 0.25, 0.5, 1.0), "temperature": hot}
    return [{"steps": (steps,), **how} for steps in (128, 64, 32, 16, 8) for how in (plain, guided)]


def sample_all(models: Path, out: Path, num_samples: int, device: str, names: list[str]) -> None:
    """Texts of every cell, to be judged elsewhere; those that are there are not written again."""
    for sweep in sweeps():
        for name in names:
            _sample(models / name, out / name, num_samples, device, sweep)


def sample_fresh(models: Path, out: Path, num_samples: int, device: str, names: list[str]) -> None:
    """Texts of another seed by the settings that were chosen, which saw those of the first."""
    for name in names:
        config = cdlm.load(models / name, "cpu").generation_config
        for preset in config.get("step_presets") or ([config] if config else []):
            sweep = {setting: (value,) for setting, value in preset.items()}
            _sample(models / name, out / f"{name}{FRESH_SUFFIX}", num_samples, device, sweep, FRESH_SEED)


def _sample(model: Path, out: Path, num_samples: int, device: str, sweep: dict[str, Any], seed: int = 0) -> None:
    options: dict[str, Any] = {"num_samples": num_samples, "batch_size": 64, "device": device, "seed": seed, "out": out}
    config = EvalConfig(models=(f"{MODELS[model.name]}={model}",), judge=("none",), **options, **sweep)
    evaluate(config, Console(width=160, highlight=False))
    (out / RESULTS).touch()  # which judges look for


def save_human_text(data: Path, out: Path, num_samples: int) -> None:
    """Held-out blocks of human text, as a file of samples: what the judges say of these is the aim."""
    tokens, tokenizer = open_tokens(data, "valid"), Tokenizer.load(data / "tokenizer.json")
    rows = torch.linspace(0, tokens.blocks() - 1, num_samples).long()
    blocks = tokens.read(rows).tolist()
    lines = [
        {"index": k, "text": tokenizer.decode(ids[1:]), "token_ids": ids, "nfe": 0} for k, ids in enumerate(blocks)
    ]
    header: dict[str, Any] = {
        "format": FORMAT,
        "task": "unconditional",
        "model": HUMAN,
        "model_hash": "",
        "dataset_hash": tokens.meta.splits["valid"].sha256,
        "num_samples": num_samples,
        "sampling": None,
        "max_length": tokens.length(),
        "vocab_size": tokens.meta.vocab,
        "seed": 0,
        "eos_token_id": tokenizer.eos,
        "eos_token": END,
    }
    write_samples(samples_path(out / HUMAN, HUMAN, samples_key(header)), Samples(header, lines))
    (out / HUMAN / RESULTS).touch()


def measure_words(out: Path) -> None:
    """Which of the words are English, and which are said again: kept as numbers, as the texts themselves are not."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in (HUMAN, *MODELS, *(f"{name}{FRESH_SUFFIX}" for name in MODELS)):
        files = sorted((out / name / "samples").glob("*.jsonl"))
        texts = {path.name: [line["text"] for line in read_samples(path).lines] for path in files}
        found[name] = {
            file: {"num": len(some), "english": round(english_share(some), 4), "again": round(repeated_share(some), 4)}
            for file, some in texts.items()
        }
        print(f"read {len(files)} files of {name}", flush=True)
    (out / WORDS).write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["train", "export", "sample", "sample-fresh", "human-text", "words"])
    parser.add_argument("--data", type=Path, default=Path("tokens"), help="folder written by cdlm prepare")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the training runs")
    parser.add_argument("--models", type=Path, default=Path("cdlm/zoo"), help="folder of the folders of models")
    parser.add_argument("--out", type=Path, default=Path("studies/results/zoo"), help="folder for texts and results")
    parser.add_argument("--num-samples", type=int, default=64, help="samples per cell")
    parser.add_argument("--names", nargs="+", choices=list(MODELS), default=list(MODELS), help="whose texts")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="try the script: a tiny network, few steps")
    args = parser.parse_args()
    if args.stage == "train":
        for name in ("base", *MODELS):
            train(dataclasses.replace(zoo_config(name, args.data, args.runs, args.small), device=args.device), "auto")
    elif args.stage == "export":
        export_models(args.runs, args.models)
    elif args.stage == "human-text":
        save_human_text(args.data, args.out, args.num_samples)
    elif args.stage == "words":
        measure_words(args.out)
    else:
        stage = sample_all if args.stage == "sample" else sample_fresh
        stage(args.models, args.out, args.num_samples, args.device, args.names)


if __name__ == "__main__":
    main()
