"""Texts from a model: the thin line of `cdlm sample`."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from cdlm.data.tokenizer import Tokenizer
from cdlm.devices import Device, Dtype, autocast, pick_device, weight_dtype
from cdlm.eval.diversity import entropy
from cdlm.methods import parse_method
from cdlm.model.pretrained import load, newest
from cdlm.rng import seeded
from cdlm.sample import Posterior, ancestral, autoregressive, uniform_grid


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """Write text with a model folder or a run (its newest checkpoint, also while it is training)."""

    model: Path
    """A model folder, or the folder of a run."""
    num: int = 4
    """Texts to write."""
    length: int = 0
    """Tokens in a text; 0 for the length it was trained with."""
    steps: int = 32
    """Denoising steps (an autoregressive model takes one for each token)."""
    posterior: Literal["auto", "plug-in", "mixture"] = "auto"
    """How the prediction enters the bridge (docs/choices.md); auto is what the method of the run calls for."""
    seed: int = 0
    """The same seed writes the same texts."""
    device: Device = "auto"
    """Where to compute."""
    dtype: Dtype = "float32"
    """Precision of the network; draws are always made in double where there is one."""

    def __post_init__(self) -> None:
        for name, least in (("num", 1), ("steps", 1), ("length", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} must be at least {least}; got {getattr(self, name)}")


def write_texts(config: SampleConfig, console: Console) -> list[str]:
    """Draw, decode and print; returns the texts."""
    folder = newest(config.model)
    device = pick_device(config.device)
    denoiser = load(folder, device).to(weight_dtype(device, config.dtype))
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json to turn tokens into text; copy the one it was trained with there"
        )
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    run = json.loads((folder / "state.json").read_text())["run"] if (folder / "state.json").is_file() else {}
    length = config.length or run.get("length", 256)
    posterior: Posterior = config.posterior if config.posterior != "auto" else "plug-in"
    if config.posterior == "auto" and "method" in run:
        posterior = parse_method(run["method"])[0].posterior
    rng, began = seeded(config.seed, "write", batch=config.num), time.perf_counter()
    with console.status("writing"), autocast(device, config.dtype):
        if denoiser.process is None:
            start = torch.full((config.num, 1), tokenizer.bos, device=denoiser.device)
            x, evaluations = autoregressive(denoiser, start, length, rng), length - 1
        else:
            start = denoiser.process.start(length, rng("start"), denoiser.device)
            grid, evaluations = uniform_grid(config.steps), config.steps
            x = ancestral(denoiser, denoiser.process, start, grid, rng, posterior)
    seconds = time.perf_counter() - began
    texts = [tokenizer.decode(row) for row in x.tolist()]
    for number, text in enumerate(texts):
        console.rule(f"{number}")
        console.print(text, markup=False, highlight=False)
    console.rule()
    speed = config.num * length / seconds
    nats = float(entropy(x.cpu()).mean())
    console.print(
        f"{folder.name}: {evaluations} evaluations, entropy {nats:.2f} nats, {speed:,.0f} tokens/s", highlight=False
    )
    return texts
