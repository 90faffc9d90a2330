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

import dataclasses
import json
import re
import shutil
from pathlib import Path

from cdlm.eval.results import read_samples
from cdlm.sample.settings import resolve
from cdlm.train.plot import canvas
from studies import trials, zoo_tables

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("study", "study-samples", "ablations", "search", "zoo")]
PAGES += [ROOT / "cdlm" / "zoo" / name / "README.md" for name in zoo_tables.MODELS]
MAIN, PICTURES = ROOT / "studies" / "results" / "main", ROOT / "docs" / "study"
BLOCK = re.compile(r"(<!-- (table|figure|search|zoo|wall clock|samples)( [^>]*?)? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
SAMPLED_MODELS = ("MDLM", "MDLM+SDTT", "MCDLM-PPLOptimized", "UCDLM")
STEPS, MAX_CHARACTERS = (4, 64, 256), 1000
TOKENS = 256 * 256
"""Of a step."""
RED, GREEN = {"color": "#b2182b"}, {"color": "#1b7837"}
LINE_STYLES: dict[str, dict[str, str]] = {
    "mdlm": RED,
    "mdlm-1": {**RED, "linestyle": "--"},
    "mdlm-2": {**RED, "linestyle": ":"},
    "mcdlm": GREEN,
    "mcdlm-1": {**GREEN, "linestyle": "--"},
    "mcdlm-2": {**GREEN, "linestyle": ":"},
    "mcdlm-pplopt": {"color": "#8cc63f"},
}


def fill_page(page: str, reports: Path, pictures: Path = PICTURES) -> str:
    """The page with its blocks made anew; a block of samples stays where the samples are not at hand."""

    def made(block: re.Match[str]) -> str:
        head, kind, what, old, end = block.groups()
        found = (what or "").split()
        if kind == "table":
            name = Path(found[0])
            body = (reports / name.parent / "tables" / f"{name.name}.md").read_text().split("\n", 2)[2]
        elif kind == "figure":
            body = f"![{' '.join(found[1:])}](study/{copy_figure(reports, Path(found[0]), pictures)})\n"
        elif kind in ("search", "zoo"):
            body = (trials if kind == "search" else zoo_tables).TABLES[found[0]]() or old
        else:
            body = wall_clock_table() if kind == "wall clock" else study_samples() or old
        return f"{head}{body.strip()}\n{end}"

    return BLOCK.sub(made, page)


def copy_figure(reports: Path, name: Path, pictures: Path) -> str:
    """Copy a figure of a report beside the page."""
    pictures.mkdir(exist_ok=True)
    target = f"{name.parent}-{name.name}.png"
    shutil.copyfile(reports / name.parent / "figures" / f"{name.name}.png", pictures / target)
    return target


def wall_clock_table() -> str:
    lines = ["| Row | training (s) | sampling and judging (s) |", "| --- | --- | --- |"]
    for path in sorted(MAIN.glob("*/done.json")):
        done = json.loads(path.read_text())
        lines.append(f"| {done['label']} | {done['train']:.0f} | {done['evaluate']:.0f} |")
    return "\n".join(lines)


def study_samples() -> str:
    """The first text of each model at few, some and many steps."""
    wanted = [(model, steps) for model in SAMPLED_MODELS for steps in STEPS]
    found = {}
    for path in sorted(MAIN.glob("*/samples/*.jsonl")):
        samples = read_samples(path)
        sampling, model = samples.header["sampling"], samples.header["model"]
        plain = dataclasses.asdict(resolve({"steps": sampling["steps"]}, "any", sampling["posterior"]))
        if samples.header["task"] == "unconditional" and sampling == plain and (model, sampling["steps"]) in wanted:
            found[model, sampling["steps"]] = samples.lines[0]["text"]
    if len(found) < len(wanted):
        return ""
    parts = []
    for model, steps in wanted:
        text = " ".join(found[model, steps][:MAX_CHARACTERS].split()).replace("<", "&lt;")
        parts += [f"**{model}, {steps} steps**", "", f"> {text}", ""]
    return "\n".join(parts)


def plot_learning(out: Path) -> None:
    """The NELBO in training over tokens: of MDLM its loss, of MCDLM its anchor, which is the same estimate."""
    figure, axis = canvas(6.5, 4)
    for row in LINE_STYLES:
        lines = [json.loads(line) for line in (MAIN / row / "metrics.jsonl").read_text().splitlines()]
        train = [line for line in lines if line["kind"] == "train"]
        x = [line["step"] * TOKENS / 1e6 for line in train]
        axis.plot(x, [line.get("anchor", line["loss"]) for line in train], label=row, **LINE_STYLES[row])
    axis.set_ylim(5, 7.5)
    axis.set_xlabel("million tokens")
    axis.set_ylabel("NELBO in training (nats per token)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, dpi=150)


def main() -> None:
    plot_learning(PICTURES / "learning.png")
    trials.plot_search(PICTURES / "search-frontiers.png")
    zoo_tables.plot_zoo(PICTURES / "zoo-frontiers.png")
    for page in PAGES:
        page.write_text(fill_page(page.read_text(), ROOT / "runs" / "report"))
        print(f"filled {page}")


if __name__ == "__main__":
    main()
