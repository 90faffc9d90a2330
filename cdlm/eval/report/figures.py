"""The pictures of a report: the paper's bars, curves over steps, frontiers, reliability."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cdlm.eval.report.frontier import Point
from cdlm.eval.report.rows import (
    Section,
    display_name,
    is_distilled,
    num_steps,
    paper_name,
    unconditional_rows,
    uncontrolled,
    without_seed,
)
from cdlm.eval.results import ResultRow
from cdlm.train.plot import canvas

REDS, BLUES, GREENS, GRAYS = (
    ("#b2182b", "#ef8a62", "#d6a58f"),
    ("#2166ac", "#67a9cf", "#b0d3ea", "#7a4fa3"),
    ("#1b7837", "#8cc63f", "#999933", "#00796b", "#5fd0c0"),
    ("#4d4d4d", "#999999"),
)
MARKERS = "osD^vPX*<>"


def plotted_rows(section: Section) -> list[ResultRow]:
    """The unconditional cells that pictures show: of several runs of a model, the first."""
    rows = unconditional_rows(section.rows)
    first: dict[str, str] = {}
    for row in rows:
        first.setdefault(without_seed(row["model"]), row["model"])
    return [row for row in rows if row["model"] in first.values()]


def plot_bars(section: Section, path: Path) -> Path | None:
    """Figure 2: perplexity over steps, entropy above each bar; distilled models hatched, families by colour."""
    panels = []
    for title, kinds in (("masked", ("masked",)), ("uniform", ("uniform", "unigram"))):
        rows = [row for row in uncontrolled(plotted_rows(section)) if row["process"] in kinds]
        if rows:
            panels.append((title, rows))
    if not panels:
        return None
    widest = max(len({(display_name(r), num_steps(r)) for r in rows}) for _, rows in panels)
    colours = family_colors(plotted_rows(section))
    figure, axes = canvas(min(13.0, max(5.0, 0.34 * widest + 1.5)), 3.8 * len(panels), len(panels))
    for axis, (title, rows) in zip(np.atleast_1d(axes).ravel(), panels, strict=True):
        counts, names = (
            sorted({num_steps(row) or 0 for row in rows}),
            list(dict.fromkeys(display_name(row) for row in rows)),
        )
        wide = 0.86 / len(names)
        for k, one in enumerate(names):
            own = {num_steps(row) or 0: row for row in rows if display_name(row) == one}
            x = [counts.index(n) - 0.43 + wide * (k + 0.5) for n in own]
            height = [row["ppl"] for row in own.values()]
            spread = [[abs(row["ppl_interval"][side] - row["ppl"]) for row in own.values()] for side in (0, 1)]
            hatch = "///" if is_distilled(next(iter(own.values()))) else None
            axis.bar(x, height, wide * 0.94, color=colours[one], hatch=hatch, edgecolor="white", label=one)
            axis.errorbar(x, height, spread, fmt="none", ecolor="0.3", elinewidth=0.7, capsize=1.5)
            for place, row in zip(x, own.values(), strict=True):
                where = row["ppl_interval"][1] * 1.06
                axis.text(place, where, f"{row['entropy']:.1f}", rotation=90, fontsize=6, ha="center", va="bottom")
        for row in uncontrolled(plotted_rows(section)):
            if row["process"] == "none":
                axis.axhline(row["ppl"], color="0.2", linestyle=":", linewidth=1, label=display_name(row))
        _log_scale(axis)
        ends = [row["ppl_interval"] for row in rows]
        axis.set_ylim(0.6 * min(low for low, _ in ends), 1.9 * max(high for _, high in ends))
        axis.set_xticks(range(len(counts)), [str(n) for n in counts])
        axis.set_xlabel("sampling steps")
        axis.set_ylabel("generative perplexity (entropy above)")
        axis.set_title(f"{title} prior", fontsize=10)
        axis.legend(fontsize=7, ncols=2, loc="upper right")
    figure.suptitle(section.title, fontsize=9)
    return _save_figure(figure, path)


def plot_curves(section: Section, path: Path) -> Path | None:
    """Perplexity and entropy over steps; an autoregressive model is a line across."""
    rows = uncontrolled(plotted_rows(section))
    several = [row for row in rows if num_steps(row)]
    if len({num_steps(row) for row in several}) < 2:
        return None
    figure, axes = canvas(10.5, 4.4, 1, 2)
    colours = family_colors(plotted_rows(section))
    for one in dict.fromkeys(display_name(row) for row in rows):
        own = sorted((row for row in rows if display_name(row) == one), key=lambda row: num_steps(row) or 0)
        for axis, measure in zip(axes[0], ("ppl", "entropy"), strict=True):
            y = [row[measure] for row in own]
            edge = [[row[f"{measure}_interval"][side] for row in own] for side in (0, 1)]
            if num_steps(own[0]) is None:
                axis.axhline(y[0], color=colours[one], linestyle=":", label=one)
                continue
            x = [num_steps(row) or 0 for row in own]
            axis.plot(x, y, color=colours[one], marker=_marker(colours, one), markersize=4, label=one)
            axis.fill_between(x, *edge, color=colours[one], alpha=0.15, linewidth=0)
    for axis, label in zip(axes[0], ("generative perplexity", "entropy (nats)"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("sampling steps")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _log_scale(axes[0][0])
    _legend(figure, axes[0][0])
    figure.suptitle(section.title, fontsize=9)
    return _save_figure(figure, path)


def plot_frontiers(found: Sequence[Point], section: Section, path: Path) -> Path | None:
    """Perplexity against entropy for each step count: temperatures solid, top-p dashed, the plain cell filled."""
    colours = family_colors(plotted_rows(section))
    swept = [p for p in found if p.steps and p.name in colours]
    counts = sorted({p.steps for p in swept if p.steps and _is_swept(swept, p)})
    if not counts:
        return None
    columns = min(3, len(counts))
    rows = -(-len(counts) // columns)
    figure, axes = (
        canvas(5 * columns, 4.2 * rows + 0.8, rows, columns, sharey=True) if len(counts) > 1 else canvas(6, 5)
    )
    flat = np.atleast_1d(np.asarray(axes)).ravel()
    names = list(dict.fromkeys(p.name for p in swept))
    causal = [p for p in found if p.steps is None and p.name in colours]
    for axis, n in zip(flat, counts, strict=False):
        for one in names:
            own = [p for p in swept if p.name == one and p.steps == n]
            colour, mark = colours[one], _marker(colours, one)
            for kind, style in (("T ", "-"), ("top-p ", "--")):
                line = sorted(
                    (p for p in own if p.control.startswith(kind) or p.control == "plain"), key=lambda p: p.entropy[0]
                )
                if len(line) > 1:
                    x, y = [p.entropy[0] for p in line], [np.exp(p.log_ppl[0]) for p in line]
                    axis.plot(x, y, style, color=colour, linewidth=1)
            for p in own:
                x, y = p.entropy[0], np.exp(p.log_ppl[0])
                edge = [[abs(q - y)] for q in np.exp(np.percentile(p.log_ppl[1:], [2.5, 97.5]))]
                filled = p.control == "plain"
                axis.errorbar(
                    [x],
                    [y],
                    edge,
                    fmt=mark,
                    color=colour,
                    markersize=6 if filled else 4,
                    markerfacecolor=colour if filled else "white",
                    elinewidth=0.7,
                    label=one if filled else None,
                )
        for p in causal:
            if p.control == "plain":
                axis.plot([p.entropy[0]], [np.exp(p.log_ppl[0])], "k*", markersize=9, label=p.name)
        _log_scale(axis)
        axis.set_title(f"{n} steps", fontsize=10)
        axis.set_xlabel("entropy (nats)")
        axis.grid(alpha=0.3, which="both")
    for axis in flat[len(counts) :]:
        axis.remove()
    flat[0].set_ylabel("generative perplexity")
    _legend(figure, flat[0])
    figure.suptitle(
        f"{section.title}\nsolid: temperature, dashed: top-p, filled: neither; lower right is better", fontsize=9
    )
    return _save_figure(figure, path)


def plot_reliability(rows: Sequence[ResultRow], path: Path) -> Path | None:
    """E f(x_s, s) in bins of f(x_t, t): on the diagonal where a model is consistent."""
    found = [row for row in rows if row["task"] == "consistency"]
    if not found:
        return None
    pairs = [(pair["t"], pair["s"]) for pair in found[0]["pairs"]]
    figure, axes = canvas(3.4 * len(pairs), 3.6, 1, max(2, len(pairs)), sharey=True)
    for k, (t, s) in enumerate(pairs):
        axis = axes[0][k]
        axis.plot([1e-6, 1], [1e-6, 1], color="0.6", linewidth=0.8)
        for number, row in enumerate(found):
            curve = row["pairs"][k]["reliability"]
            label = f"{row['model']}, {row['dataset']}"
            shown = [k for k, count in enumerate(curve["count"]) if count >= 100 and curve["after"][k] > 0]
            before, after = ([curve[side][k] for k in shown] for side in ("before", "after"))
            axis.plot(before, after, MARKERS[number % len(MARKERS)] + "-", markersize=3, linewidth=1, label=label)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylim(1e-7, 1.5)
        axis.set_title(f"t = {t:g} to s = {s:g}" + (" (calibration)" if s == 0 else ""), fontsize=9)
        axis.set_xlabel("f(x_t, t)")
    axes[0][0].set_ylabel("mean f(x_s, s), true bridge")
    axes[0][0].legend(fontsize=7)
    return _save_figure(figure, path)


def family_colors(rows: Sequence[ResultRow]) -> dict[str, str]:
    """Reds for MDLM and its kin, blues for DUO's and UDLM, greens for CDLM, greys for the rest."""
    used: dict[int, int] = {}
    found = {}
    for row in rows:
        one, known = display_name(row), paper_name(row)
        if one in found:
            continue
        kind = 2 if "CDLM" in known else 0 if "MDLM" in known or known == "SDTT" else 1 if "D" in known[:2] else 3
        shades = (REDS, BLUES, GREENS, GRAYS)[kind]
        if known.startswith("UDLM"):
            shades = BLUES
        found[one] = shades[used.get(kind, 0) % len(shades)]
        used[kind] = used.get(kind, 0) + 1
    return found


def _marker(colours: dict[str, str], one: str) -> str:
    """With its colour, what tells a model from the others, in every picture the same."""
    return MARKERS[list(colours).index(one) % len(MARKERS)]


def _legend(figure: Any, axis: Any) -> None:
    """Below the axes, where it hides nothing."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), fontsize=8)


def _is_swept(found: Sequence[Point], point: Point) -> bool:
    return len({p.control for p in found if p.name == point.name and p.steps == point.steps}) > 1


def _log_scale(axis: Any) -> None:
    """A logarithmic scale with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def _save_figure(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
