"""A configuration that beats MDLM with its best temperature or top-p at equal entropy: what was tried.

    python -m studies.search --data tokens --texts corpus --steps 1300
    cdlm report studies/results/search/* --out runs/report/search

Every trial trains a quarter of a run on an idea, from one whole run of MDLM (or UDLM); the control trains on as it was.
Samplers are tried on the controls. docs/search.md has the ideas, the numbers and the verdicts.
"""

import dataclasses
import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np

import cdlm
from cdlm.data.tokens import DTYPES, Split, read_meta
from cdlm.sample import Sampling
from studies.rows import BASES, DONE, EXTRA, JUDGE, Place, Row, arguments, study, wait_for

STEPS = (8, 32)
TRIALS = {
    "jsd": "mcdlm",
    "jsd-revealed-kl": "mcdlm:revealed=kl",
    "bridges": "mcdlm:bridges=4",
    "kl": "mcdlm:divergence=kl",
    "weight-noise": "mcdlm:weight=noise",
    "weight-unit": "mcdlm:weight=unit",
    "short-hops": "mcdlm:low=0.03125,high=0.125",
    "long-hops": "mcdlm:low=0.5,high=1",
    "sharp-teacher": "mcdlm:divergence=kl,lam=1,sharpen=0.8",
    "guided-teacher": "mcdlm:divergence=kl,lam=1,guide=1,sharpen=0.85",
    "guided-self": "mcdlm:divergence=kl,guide=0.5,sharpen=0.9",
    "few-step": "few-step",
    "few-step-dilated": "few-step:order=dilated",
    "few-step-spread": "few-step:most=32,order=bit-reversed",
    "jsd-spread": "mcdlm:revealed=kl,order=bit-reversed",
    "sdtt": "sdtt",
    "sdtt-long": "sdtt:smallest=0.00390625",
}
"""Name of the row: its method."""
UNIFORM = {"udlm": "udlm", "ucdlm": "ucdlm", "ucdlm-kl": "ucdlm:divergence=kl"}
"""The same from UDLM, its control first."""
ROLLOUTS = {
    "rollouts": Sampling(64, temperature=0.9),
    "rollouts-guided": Sampling(64, temperature=0.85, guidance=0.5, order="dilated"),
}
"""Trials at sequence level: MDLM goes on with texts that the base has written so."""
NUM = 16_384
"""Of those texts."""


def rows(texts: Path) -> dict[str, Row]:
    orders = ("random", "dilated", "bit-reversed")
    bound: dict[str, Any] = {"tasks": ("likelihood",), "texts": (f"valid={texts / 'valid.txt'}",)}
    bound |= {"steps": STEPS, "order": orders}
    frontier: dict[str, Any] = {"steps": STEPS, "temperature": (1.0, 0.9, 0.8, 0.7), "top_p": (0.95, 0.9, 0.8)}
    spread: dict[str, Any] = {**frontier, "order": ("dilated", "bit-reversed")}
    hot = (1.15, 1.0, 0.85)
    guided: dict[str, Any] = {"steps": STEPS, "order": ("dilated",), "guidance": (0.5, 1.0), "temperature": hot}
    guided |= {"top_p": (0.9, 0.8)}
    some: dict[str, Any] = {"steps": STEPS, "order": ("dilated",), "guidance": (0.5,), "temperature": (1.0, 0.85)}
    samplers: tuple[dict[str, Any], ...] = (
        spread,
        {"steps": STEPS, "order": ("probability", "margin"), "temperature": (1.4, 1.2, 1.0)},
        {"steps": STEPS, "grid": ("cosine",), "temperature": (1.0, 0.9, 0.8)},
        {"steps": STEPS, "corrector": ("constant", "rescale"), "eta": (0.05, 0.2), "temperature": (1.0, 0.85, 0.7)},
        {"steps": STEPS, "corrector": ("loop",), "eta": (0.1,), "temperature": (1.0, 0.85, 0.7)},
        {"steps": STEPS, "guidance": (0.25, 0.5, 1.0, 2.0), "temperature": hot},
        guided,
        {"steps": STEPS, "order": ("dilated",), "guidance": (0.25, 2.0), "temperature": hot},
        {"steps": STEPS, "cool": (0.8, 0.5), "temperature": hot},
    )
    tails: tuple[dict[str, Any], ...] = (
        {**frontier, "tail": ("none", "argmax", "sample")},
        {"steps": STEPS, "corrector": ("constant",), "eta": (0.1, 0.3), "temperature": (1.0, 0.85, 0.7)},
    )
    found = {"judge": JUDGE, **BASES}
    for seed in (0, 1, 2):
        again: dict[str, Any] = {"start": base(seed), "share": EXTRA, "seed": seed}
        every = (spread, guided) if seed else samplers
        found[f"mdlm{end(seed)}"] = Row(f"MDLM{said(seed)}", "small-mdlm", tasks=(bound, frontier, *every), **again)
        for name, method in TRIALS.items():
            ways = (bound, frontier, some, spread) if "order" in method else (bound, frontier, some)
            found[name + end(seed)] = Row(name + said(seed), "small-mdlm", method=method, tasks=ways, **again)
        for name in ROLLOUTS:
            ways, written = (bound, frontier, some, spread), f"written-{name}{end(seed)}"
            found[name + end(seed)] = Row(name + said(seed), "small-mdlm", data=written, tasks=ways, **again)
    for name, method in UNIFORM.items():
        label = "UDLM" if name == "udlm" else name
        found[name] = Row(label, "small-udlm", method=method, start="base-u", share=EXTRA, tasks=tails)
    return found


def base(seed: int) -> str:
    return f"base{end(seed)}"


def end(seed: int) -> str:
    return f"-{seed}" if seed else ""


def said(seed: int) -> str:
    return f", seed {seed}" if seed else ""


def write_rollouts(row: Row, how: Sampling, place: Place) -> None:
    """Texts that the base writes in many steps, as tokens to train on: its joint law, simpler than people's."""
    out, base = place.scratch / str(row.data), wait_for(place.scratch / str(row.start))
    if (out / DONE).is_file():
        return
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    model = cdlm.load(base, device=place.device)
    num = 32 if place.small else NUM
    drafts = model.continuations([""], num)
    texts = sorted(model.write(drafts, how, batch=512), key=lambda text: text.index)
    meta = read_meta(place.data)
    ids = np.array([text.tokens for text in texts], dtype=DTYPES[meta.dtype])
    ids.tofile(out / "train.bin")
    written = Split(num, 0, ids.size, 0, 0, hashlib.sha256(ids.tobytes()).hexdigest())
    for file in ("valid.bin", "tokenizer.json"):
        shutil.copyfile(place.data / file, out / file)
    dataclasses.replace(meta, splits={**meta.splits, "train": written}).write(out)
    (out / DONE).write_text("{}\n")


def main() -> None:
    asked, place = arguments(__doc__, list(rows(Path())), "studies/results/search")
    found = rows(place.texts)
    for name in asked:
        how = ROLLOUTS.get(found[name].label.split(",")[0])
        if how:
            write_rollouts(found[name], how, place)
        study(found, [name], place)


if __name__ == "__main__":
    main()
