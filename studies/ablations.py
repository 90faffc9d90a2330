"""The paper's three ablations, and the questions it leaves open, in short equal runs.

    python -m studies.ablations --data tokens --texts corpus --steps 1300
    cdlm report studies/results/ablations/* --compare paper --out runs/report/ablations

From scratch, runs that are short enough to have many of say nothing of sharpness: they have only learnt which tokens
are frequent. So every row trains a quarter of a run more, from one whole run of MDLM; `mdlm` is the control. Tables 4
to 6 change one ingredient of MCDLM-PPLOptimized, the open questions one of MCDLM. `post` has the tokens of a whole run,
two thirds of them as MDLM, to stand beside the study's MCDLM. Whether a masked network should be told the time is asked
in studies/anchor.py.
"""

from pathlib import Path
from typing import Any

from studies.rows import BASES, EXTRA, JUDGE, StudyRow, run_study

TABLES = {
    "pplopt": "",
    "staged": "steps=staged",
    "increasing": "steps=increasing",
    "decreasing": "steps=decreasing",
    "kappa-0": "kappa=0,kappa_end=0",
    "kappa-1": "kappa=1,kappa_end=1",
    "kl": "divergence=kl",
    "reverse-kl": "divergence=reverse_kl",
}
"""Name of the row: the choices of MCDLM-PPLOptimized. The first is random steps, kappa 0.4 and JSD in all tables."""
QUESTIONS = {
    "mcdlm": "",
    "anchor-jsd": "anchor=jsd",
    "anchor-kl-additive": "additive=true",
    "anchor-jsd-additive": "anchor=jsd,additive=true",
    "annealed": "anneal=0.5",
    "lambda-0": "lam=0",
    "lambda-0.9999": "lam=0.9999",
    "short-hops": "low=0.03125,high=0.125",
    "long-hops": "low=0.5,high=1",
}
"""Name of the row: the choices of MCDLM."""


def study_rows(texts: Path) -> dict[str, StudyRow]:
    bound: dict[str, Any] = {"tasks": ("likelihood",), "texts": (f"valid={texts / 'valid.txt'}",), "steps": (8, 64)}
    tasks = (bound, {"steps": (8, 64, 256)})
    control = (bound, {"steps": (8, 64, 256), "temperature": (1.0, 0.9, 0.8), "top_p": (0.9, 0.8)})
    more: dict[str, Any] = {"start": "base", "share": EXTRA}
    found = {"judge": JUDGE, "base": BASES["base"], "mdlm": StudyRow("MDLM", "small-mdlm", tasks=control, **more)}
    for recipe, label, table in (
        ("small-mcdlm-pplopt", "MCDLM-PPLOptimized", TABLES),
        ("small-mcdlm", "MCDLM", QUESTIONS),
    ):
        slug = recipe.removeprefix("small-")
        for name, choices in table.items():
            row_label = f"{label} {choices.replace(',', ', ').replace('=', ' ')}".strip()
            found[name] = StudyRow(
                row_label, recipe, method=f"{slug}:{choices}" if choices else slug, tasks=tasks, **more
            )
    found["post"] = StudyRow("MCDLM after MDLM", "small-mcdlm", base="small-mdlm", share=1 / 3, tasks=tasks)
    return found


if __name__ == "__main__":
    run_study(__doc__, study_rows, "studies/results/ablations")
