"""Fill the generated parts of docs/study.md and docs/study-samples.md from the results.

    cdlm report studies/results/main/* --compare paper --out runs/report/main
    cdlm report studies/results/anchor/* --out runs/report/anchor
    python -m studies.page

Between `<!-- table main/NAME -->` and `<!-- end -->` stands tables/NAME.md of that report; between
`<!-- figure main/NAME TITLE -->` and `<!-- end -->` its figures/NAME.png, copied to docs/study/. `<!-- wall clock -->`
and `<!-- samples -->` are made here. What stands outside is written by hand.
"""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from cdlm.eval.results import read_samples
from cdlm.plot import canvas

ROOT = Path(__file__).resolve().parents[1]
MAIN, PICTURES = ROOT / "studies" / "results" / "main", ROOT / "docs" / "study"
BLOCK = re.compile(r"(<!-- (table|figure|wall clock|samples)( [^>]*?)? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
READ = ("MDLM", "MDLM+SDTT", "MCDLM-PPLOptimized", "UCDLM")
STEPS, CUT = (4, 64, 256), 1000
TOKENS = 256 * 256
"""Of a step."""


def fill(page: str, reports: Path) -> str:
    """The page with its blocks made anew; a block of samples stays where the samples are not at hand."""

    def made(block: re.Match[str]) -> str:
        head, kind, what, old, end = block.groups()
        found = (what or "").split()
        if kind == "table":
            name = Path(found[0])
            body = (reports / name.parent / "tables" / f"{name.name}.md").read_text().split("\n", 2)[2]
        elif kind == "figure":
            body = f"![{' '.join(found[1:])}](study/{picture(reports, Path(found[0]))})\n"
        else:
            body = wall_clock() if kind == "wall clock" else samples() or old
        return f"{head}{body.strip()}\n{end}"

    return BLOCK.sub(made, page)


def picture(reports: Path, name: Path) -> str:
    """Copy a figure of a report beside the page."""
    PICTURES.mkdir(exist_ok=True)
    target = f"{name.parent}-{name.name}.png"
    shutil.copyfile(reports / name.parent / "figures" / f"{name.name}.png", PICTURES / target)
    return target


def wall_clock() -> str:
    lines = ["| Row | training (s) | sampling and judging (s) |", "| --- | --- | --- |"]
    for path in sorted(MAIN.glob("*/done.json")):
        done = json.loads(path.read_text())
        lines.append(f"| {done['label']} | {done['train']:.0f} | {done['evaluate']:.0f} |")
    return "\n".join(lines)


def samples() -> str:
    """The first text of each model at few, some and many steps."""
    found = {}
    for path in sorted(MAIN.glob("*/samples/*.jsonl")):
        texts = read_samples(path)
        how = texts.about.get("sampling", {})
        plain = how.get("temperature") == 1 and how.get("top_p") == 1 and how.get("tail") == "none"
        if texts.about["task"] == "unconditional" and plain and how.get("precision") == "fp64":
            found[texts.about["model"], how["steps"]] = texts.lines[0]["text"]
    if not found:
        return ""
    parts = []
    for model in READ:
        for steps in STEPS:
            text = " ".join(found[model, steps][:CUT].split()).replace("<", "&lt;")
            parts += [f"**{model}, {steps} steps**", "", f"> {text}", ""]
    return "\n".join(parts)


def learning(rows: Sequence[str], out: Path) -> None:
    """The NELBO in training over tokens: of MDLM its loss, of MCDLM its anchor, which is the same estimate."""
    figure, axis = canvas(6.5, 4)
    for row in rows:
        lines = [json.loads(line) for line in (MAIN / row / "metrics.jsonl").read_text().splitlines()]
        train = [line for line in lines if line["kind"] == "train"]
        x = [line["step"] * TOKENS / 1e6 for line in train]
        colour = "#1b7837" if row.startswith("mcdlm") else "#b2182b"
        style = {"-1": "--", "-2": ":", "pt": "-."}.get(row[-2:], "-")
        axis.plot(x, [line.get("anchor", line["loss"]) for line in train], style, color=colour, label=row)
    axis.set_ylim(5, 7.5)
    axis.set_xlabel("million tokens")
    axis.set_ylabel("NELBO in training (nats per token)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, dpi=150)


def main() -> None:
    learning(("mdlm", "mdlm-1", "mdlm-2", "mcdlm", "mcdlm-1", "mcdlm-2", "mcdlm-pplopt"), PICTURES / "learning.png")
    for name in ("study.md", "study-samples.md"):
        page = ROOT / "docs" / name
        page.write_text(fill(page.read_text(), ROOT / "runs" / "report"))
        print(f"filled {page}")


if __name__ == "__main__":
    main()
