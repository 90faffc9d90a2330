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
from cdlm.sample.settings import resolve
from studies.mcdlm_search import register
from studies.rows import BASES, DONE, EXTRA, JUDGE, StudyOptions, StudyRow, parse_arguments, run_rows, wait_for

STEPS = (8, 32)
TRIALS = {
    "jsd": "mcdlm",
    "jsd-revealed-kl": "mcdlm-search:revealed=kl",
    "bridges": "mcdlm-search:bridges=4",
    "kl": "mcdlm:divergence=kl",
    "weight-noise": "mcdlm-search:weight=noise",
    "weight-unit": "mcdlm-search:weight=unit",
    "short-hops": "mcdlm:low=0.03125,high=0.125",
    "long-hops": "mcdlm:low=0.5,high=1",
    "sharp-teacher": "mcdlm-guided:guidance=0,temperature=0.8",
    "guided-teacher": "mcdlm-guided",
    "guided-self": "mcdlm-guided:guidance=0.5,temperature=0.9,lam=0.999",
    "few-step": "few-step",
    "few-step-dilated": "few-step:order=dilated",
    "few-step-spread": "few-step:most=32,order=bit-reversed",
    "jsd-spread": "mcdlm-search:revealed=kl,order=bit-reversed",
    "sdtt": "sdtt",
    "sdtt-long": "sdtt:smallest=0.00390625",
}
"""Name of the row: its method."""
BEST, REPEATED = "guided-teacher", ("guided-teacher", "kl")
"""The trial that wins, and those that are repeated from two other runs of MDLM."""
UNIFORM = {"udlm": "udlm", "ucdlm": "ucdlm", "ucdlm-kl": "ucdlm:divergence=kl"}
"""The same from UDLM, its control first."""
ROLLOUTS: dict[str, dict[str, Any]] = {
    "rollouts": {"steps": 64, "temperature": 0.9},
    "rollouts-guided": {"steps": 64, "temperature": 0.85, "guidance": 0.5, "order": "dilated"},
}
"""Trials at sequence level: MDLM goes on with texts that the base has written so."""
NUM_ROLLOUTS = 16_384
"""How many samples."""


def study_rows(texts: Path) -> dict[str, StudyRow]:
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
        {"steps": STEPS, "timesteps": ("cosine",), "temperature": (1.0, 0.9, 0.8)},
        {"steps": STEPS, "corrector": ("constant", "rescale"), "eta": (0.05, 0.2), "temperature": (1.0, 0.85, 0.7)},
        {"steps": STEPS, "corrector": ("loop",), "eta": (0.1,), "temperature": (1.0, 0.85, 0.7)},
        {"steps": STEPS, "guidance": (0.25, 0.5, 1.0, 2.0), "temperature": hot},
        guided,
        {"steps": STEPS, "order": ("dilated",), "guidance": (0.25, 2.0), "temperature": hot},
        {"steps": STEPS, "temperature_end": (0.8, 0.5), "temperature": hot},
    )
    tails: tuple[dict[str, Any], ...] = (
        {**frontier, "final_step": ("none", "argmax", "sample")},
        {"steps": STEPS, "corrector": ("constant",), "eta": (0.1, 0.3), "temperature": (1.0, 0.85, 0.7)},
    )
    found = {"judge": JUDGE, **BASES}
    for seed in (0, 1, 2):
        suffix = f"-{seed}" if seed else ""
        seed_label = f", seed {seed}" if seed else ""
        again: dict[str, Any] = {"start": f"base{suffix}", "share": EXTRA, "seed": seed}
        every = (spread, guided) if seed else samplers
        found[f"mdlm{suffix}"] = StudyRow(f"MDLM{seed_label}", "small-mdlm", tasks=(bound, frontier, *every), **again)
        for name, method in TRIALS.items():
            if seed and name not in REPEATED:
                continue
            ways = (bound, frontier, some, spread) if "order" in method or name == BEST else (bound, frontier, some)
            found[name + suffix] = StudyRow(name + seed_label, "small-mdlm", method=method, tasks=ways, **again)
    more: dict[str, Any] = {"start": "base", "share": EXTRA, "tasks": (bound, frontier, some, spread)}
    for name in ROLLOUTS:
        found[name] = StudyRow(name, "small-mdlm", data=f"written-{name}", **more)
    for name, method in UNIFORM.items():
        label = "UDLM" if name == "udlm" else name
        found[name] = StudyRow(label, "small-udlm", method=method, start="base-u", share=EXTRA, tasks=tails)
    return found


def write_rollouts(name: str, options: StudyOptions) -> None:
    """Samples of the base in many steps, as tokens to train on: its joint distribution, simpler than human text."""
    out, base = options.scratch / f"written-{name}", wait_for(options.scratch / "base")
    if (out / DONE).is_file():
        return
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    model = cdlm.load(base, device=options.device)
    num_samples = 32 if options.small else NUM_ROLLOUTS
    templates = model.continuations([""], num_samples)
    settings = resolve(ROLLOUTS[name], model.denoiser.process, model.posterior)
    samples = sorted(model.complete(templates, settings, batch_size=512), key=lambda sample: sample.index)
    meta = read_meta(options.data)
    ids = np.array([sample.token_ids for sample in samples], dtype=DTYPES[meta.dtype])
    ids.tofile(out / "train.bin")
    written = Split(num_samples, 0, ids.size, 0, 0, hashlib.sha256(ids.tobytes()).hexdigest())
    for file in ("valid.bin", "tokenizer.json"):
        shutil.copyfile(options.data / file, out / file)
    dataclasses.replace(meta, splits={**meta.splits, "train": written}).write(out)
    (out / DONE).write_text("{}\n")


def main() -> None:
    register()
    names, options = parse_arguments(__doc__, list(study_rows(Path())), "studies/results/search")
    for name in names:
        if name in ROLLOUTS:
            write_rollouts(name, options)
        run_rows(study_rows(options.texts), [name], options)


if __name__ == "__main__":
    main()
