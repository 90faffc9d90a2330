"""The paper's main tables in the small: every row trained on the same tokens (half for AR), sampled, and judged.

    cdlm prepare train.txt --valid valid.txt --train-vocab-size 16384 --seq-length 256 --packing plain --out tokens
    python -m studies.main_table --data tokens --texts corpus                        # every row, one after another
    python -m studies.main_table --data tokens --texts corpus --rows judge ar mdlm   # some; others may run beside them
    cdlm report studies/results/main/* --compare paper --out runs/report/main

The judge is an autoregressive model of another seed. Rows that are distilled have two thirds of the tokens as their
base and one third as themselves, as in the paper.
"""

from pathlib import Path
from typing import Any

from studies.rows import JUDGE, StudyRow, run_study

STEPS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
SETS = {
    "openwebtext": "openwebtext_sample.txt",
    "lambada": "lambada_test.txt",
    "wikitext103": "wikitext103_test.detok.txt",
    "ptb": "ptb_test.txt",
}


def study_rows(texts: Path) -> dict[str, StudyRow]:
    valid = texts / "valid.txt"
    sets = tuple(f"{name}={texts / 'eval' / file}" for name, file in SETS.items())
    bound: dict[str, Any] = {"tasks": ("likelihood",), "texts": (f"valid={valid}",)}
    plain: dict[str, Any] = {"steps": STEPS, "reference": valid}
    greedy: dict[str, Any] = {"steps": STEPS, "reference": valid, "final_step": ("none", "argmax")}
    frontier: dict[str, Any] = {
        "steps": (8, 32),
        "temperature": (0.95, 0.9, 0.85, 0.8, 0.7, 0.6),
        "top_p": (0.95, 0.9, 0.8, 0.7),
    }
    coarse: dict[str, Any] = {"steps": (8, 64, 256), "precision": ("naive-fp32",)}
    recover: dict[str, Any] = {"tasks": ("conditional",), "texts": sets, "steps": (8, 64, 256), "judge": ("none",)}
    large: dict[str, Any] = {"steps": (8,), "num_samples": 256}
    found = {
        "judge": JUDGE,
        "ar": StudyRow("AR", "small-ar", tasks=(bound, {**plain, "temperature": (1.0, 0.9, 0.8, 0.7)})),
        "mdlm": StudyRow("MDLM", "small-mdlm", tasks=(bound, plain, frontier, coarse, recover, large)),
        "mcdlm": StudyRow("MCDLM", "small-mcdlm", tasks=(bound, plain, frontier, coarse, large)),
        "mcdlm-pplopt": StudyRow(
            "MCDLM-PPLOptimized", "small-mcdlm-pplopt", tasks=(bound, plain, frontier, coarse, recover)
        ),
        "udlm": StudyRow("UDLM", "small-udlm", tasks=(bound, plain, frontier, coarse)),
        "duo": StudyRow("DUO", "small-duo", tasks=(bound, plain)),
        "ucdlm": StudyRow("UCDLM", "small-ucdlm", tasks=(bound, greedy, frontier)),
        "mdlm-sdtt": StudyRow("MDLM+SDTT", "small-sdtt", "small-mdlm", tasks=(bound, plain, recover)),
        "mcdlm-sdtt": StudyRow("MCDLM+SDTT", "small-mcdlm-sdtt", "small-mcdlm", tasks=(bound, plain)),
        "duo-dcd": StudyRow(
            "DUO+DCD", "small-duo-dcd", "small-duo", tasks=(bound, greedy, {**recover, "final_step": ("argmax",)})
        ),
    }
    for method in ("mdlm", "mcdlm"):
        for seed in (1, 2):
            label = f"{method.upper()}, seed {seed}"
            found[f"{method}-{seed}"] = StudyRow(label, f"small-{method}", seed=seed, tasks=(bound, large))
    return found


if __name__ == "__main__":
    run_study(__doc__, study_rows, "studies/results/main")
