"""Fill the generated parts of the pages on the studies (PAGES) from the results, and draw their pictures.

    cdlm report studies/results/main/* --compare paper --out runs/report/main
    cdlm report studies/results/ablations/* --compare paper --out runs/report/ablations
    for part in anchor timed; do cdlm report studies/results/$part/* --out runs/report/$part; done
    python -m studies.page

Between `<!-- table main/NAME -->` and `<!-- end -->` stands tables/NAME.md of that report; between
`<!-- figure main/NAME TITLE -->` and `<!-- end -->` its figures/NAME.png, copied to docs/study/. `<!-- search NAME -->`
is a table of studies/trials.py, `<!-- zoo NAME -->` one of studies/zoo_tables.py; `<!-- wall clock -->` and
`<!-- samples -->` are made here. What stands outside is written by hand.
"""

import json
import re
import shutil
from pathlib import Path

from cdlm.eval.results import read_samples
from cdlm.sample.settings import Sampling
from cdlm.train.plot import canvas
from studies import trials, zoo_tables

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("study", "study-samples", "ablations", "search", "zoo")]
PAGES += [ROOT / "cdlm" / "zoo" / name / "README.md" for name in zoo_tables.MODELS]
MAIN, PICTURES = ROOT / "studies" / "results" / "main", ROOT / "docs" / "study"
BLOCK = re.compile(r"(<!-- (table|figure|search|zoo|wall clock|samples)( [^>]*?)? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
READ = ("MDLM", "MDLM+SDTT", "MCDLM-PPLOptimized", "UCDLM")
STEPS, CUT = (4, 64, 256), 1000
TOKENS = 256 * 256
"""Of a step."""
RED, GREEN = {"color": "#b2182b"}, {"color": "#1b7837"}
LINES: dict[str, dict[str, str]] = {
    "mdlm": RED,
    "mdlm-1": {**RED, "linestyle": "--"},
    "mdlm-2": {**RED, "linestyle": ":"},
    "mcdlm": GREEN,
    "mcdlm-1": {**GREEN, "linestyle": "--"},
    "mcdlm-2": {**GREEN, "linestyle": ":"},
    "mcdlm-pplopt": {"color": "#8cc63f"},
}


def fill(page: str, reports: Path, pictures: Path = PICTURES) -> str:
    """The page with its blocks made anew; a block of samples stays where the samples are not at hand."""

    def made(block: re.Match[str]) -> str:
        head, kind, what, old, end = block.groups()
        found = (what or "").split()
        if kind == "table":
            name = Path(found[0])
            body = (reports / name.parent / "tables" / f"{name.name}.md").read_text().split("\n", 2)[2]
        elif kind == "figure":
            body = f"![{' '.join(found[1:])}](study/{picture(reports, Path(found[0]), pictures)})\n"
        elif kind in ("search", "zoo"):
            body = (trials if kind == "search" else zoo_tables).TABLES[found[0]]() or old
        else:
            body = wall_clock() if kind == "wall clock" else samples() or old
        return f"{head}{body.strip()}\n{end}"

    return BLOCK.sub(made, page)


def picture(reports: Path, name: Path, pictures: Path) -> str:
    """Copy a figure of a report beside the page."""
    pictures.mkdir(exist_ok=True)
    target = f"{name.parent}-{name.name}.png"
    shutil.copyfile(reports / name.parent / "figures" / f"{name.name}.png", pictures / target)
    return target


def wall_clock() -> str:
    lines = ["| Row | training (s) | sampling and judging (s) |", "| --- | --- | --- |"]
    for path in sorted(MAIN.glob("*/done.json")):
        done = json.loads(path.read_text())
        lines.append(f"| {done['label']} | {done['train']:.0f} | {done['evaluate']:.0f} |")
    return "\n".join(lines)


def samples() -> str:
    """The first text of each model at few, some and many steps."""
    asked = {(model, steps): vars(Sampling(steps)) for model in READ for steps in STEPS}
    found = {}
    for path in sorted(MAIN.glob("*/samples/*.jsonl")):
        texts = read_samples(path)
        how, model = texts.about.get("sampling", {}), texts.about["model"]
        if texts.about["task"] == "unconditional" and how == asked.get((model, how["steps"])):
            found[model, how["steps"]] = texts.lines[0]["text"]
    if len(found) < len(asked):
        return ""
    parts = []
    for model, steps in asked:
        text = " ".join(found[model, steps][:CUT].split()).replace("<", "&lt;")
        parts += [f"**{model}, {steps} steps**", "", f"> {text}", ""]
    return "\n".join(parts)


def learning(out: Path) -> None:
    """The NELBO in training over tokens: of MDLM its loss, of MCDLM its anchor, which is the same estimate."""
    figure, axis = canvas(6.5, 4)
    for row in LINES:
        lines = [json.loads(line) for line in (MAIN / row / "metrics.jsonl").read_text().splitlines()]
        train = [line for line in lines if line["kind"] == "train"]
        x = [line["step"] * TOKENS / 1e6 for line in train]
        axis.plot(x, [line.get("anchor", line["loss"]) for line in train], label=row, **LINES[row])
    axis.set_ylim(5, 7.5)
    axis.set_xlabel("million tokens")
    axis.set_ylabel("NELBO in training (nats per token)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, dpi=150)


def main() -> None:
    learning(PICTURES / "learning.png")
    trials.draw(PICTURES / "search-frontiers.png")
    zoo_tables.draw(PICTURES / "zoo-frontiers.png")
    for page in PAGES:
        page.write_text(fill(page.read_text(), ROOT / "runs" / "report"))
        print(f"filled {page}")


if __name__ == "__main__":
    main()
