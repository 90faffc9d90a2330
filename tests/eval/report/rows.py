"""Result rows with known numbers."""

import dataclasses
import math
import random
from typing import Any

from cdlm.methods import METHODS
from cdlm.sample.settings import SPECS, resolve

SHARPER = {"T 0.7": 0.5, "T 0.8": 0.34, "T 0.9": 0.17, "plain": 0.0, "top-p 0.9": 0.4, "top-p 0.8": 0.8}
"""How much entropy each control costs."""


def row(
    model: str = "MDLM",
    steps: int | None = 8,
    ppl: float = 100.0,
    entropy: float = 5.2,
    num: int = 64,
    noise: float = 0.0,
    task: str = "unconditional",
    process: str = "masked",
    method: str | None = "mdlm",
    base: dict[str, Any] | None = None,
    control: str = "plain",
    **more: Any,
) -> dict[str, Any]:
    """A row as `cdlm eval` writes it: texts whose mean log perplexity and mean entropy are exactly those asked for."""
    draw = random.Random(1)
    ups = [draw.gauss(0, noise) for _ in range(num)]
    ups = [x - sum(ups) / num for x in ups]
    given: dict[str, Any] = {"steps": steps, **{name: more.pop(name) for name in SPECS if name in more}}
    kind, _, value = control.rpartition(" ")
    given |= {"temperature": float(value)} if kind == "T" else {"top_p": float(value)} if kind == "top-p" else {}
    known = METHODS.get((method or "").partition(":")[0])
    settings = resolve(given, None if process == "none" else "any", known.posterior if known else "plug-in")
    training = {"method": method, "steps": 1000, "from": base} if method else {}
    return {
        "task": task,
        "model": model,
        "model_hash": model,
        "training": training,
        "process": process,
        "format": 2,
        "vocab_size": 50257,
        "max_length": 1024,
        "seed": 0,
        "num_samples": num,
        "sampling": dataclasses.asdict(settings),
        "nfe": float(steps or 1023),
        "judge": "gpt2-large",
        "protocol": "robust",
        "ppl": ppl,
        "ppl_interval": [ppl * 0.9, ppl * 1.1],
        "entropy": entropy,
        "entropy_interval": [entropy - 0.1, entropy + 0.1],
        "per_sample": {
            "nats": [1000 * (math.log(ppl) + x) for x in ups],
            "tokens": [1000] * num,
            "entropy": [entropy + x for x in ups],
        },
        "key": repr((model, steps, control, task, given, more)),
        **more,
    }


def sweep(model: str, steps: int, gain: float = 1.0, start: float = 5.5, **more: Any) -> list[dict[str, Any]]:
    """A frontier: log perplexity linear in entropy, exp(2 (H - 5.5)) x 400, better by a factor `gain`."""
    found = []
    for control, lost in SHARPER.items():
        h = start - lost
        found.append(row(model, steps, 400 * math.exp(2 * (h - 5.5)) * gain, h, control=control, noise=0.05, **more))
    return found
