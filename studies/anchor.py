"""Which reading of the anchor trains at all: KL or JSD, convex or additive, kappa from the start or falling from 1.
And, as that needs another network too: whether a masked one should be told the time.

    python -m studies.anchor --data tokens --texts corpus --steps 500 --out studies/results/anchor

Short equal runs of MCDLM beside MDLM, everything else as in the study's main table.
"""

from pathlib import Path
from typing import Any

from studies.rows import JUDGE, StudyRow, run_study

READINGS = {
    "kl-convex": "mcdlm",
    "kl-additive": "mcdlm:additive=true",
    "jsd-convex": "mcdlm:anchor=jsd",
    "jsd-additive": "mcdlm:anchor=jsd,additive=true",
    "kl-annealed": "mcdlm:anneal=0.5",
    "jsd-annealed": "mcdlm:anchor=jsd,anneal=0.5",
}


def study_rows(texts: Path) -> dict[str, StudyRow]:
    bound: dict[str, Any] = {"tasks": ("likelihood",), "texts": (f"valid={texts / 'valid.txt'}",)}
    tasks = (bound, {"steps": (8, 64)})
    found = {"judge": JUDGE, "mdlm": StudyRow("MDLM", "small-mdlm", tasks=tasks)}
    for name, method in READINGS.items():
        found[name] = StudyRow(f"MCDLM, {name.replace('-', ', ')}", "small-mcdlm", method=method, tasks=tasks)
    timed = {"time_conditioning": True}
    found["mdlm-timed"] = StudyRow("MDLM told the time", "small-mdlm", network=timed, tasks=tasks)
    found["timed"] = StudyRow("MCDLM told the time", "small-mcdlm", network=timed, tasks=tasks)
    return found


if __name__ == "__main__":
    run_study(__doc__, study_rows, "studies/results/anchor")
