"""The figures of the distributional protocol: the frontier against H1 and H2, and all z-scores at a glance."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cdlm.eval.report.distributional import Comparison, column_title, flags_of, row_label, z_text
from cdlm.eval.results import ResultRow
from cdlm.metrics.gen_ppl import bootstrap_indices
from cdlm.train.plot import canvas

COLOURS = ("#1b7837", "#b2182b", "#2166ac", "#7a4fa3", "#b8860b", "#00796b")
MARKERS = "osD^vP"
GRAY = "0.45"


@dataclasses.dataclass(frozen=True)
class Place:
    """A row on the plane: entropy and the measure of quality, each with its interval."""

    x: float
    y: float
    x_interval: tuple[float, float]
    y_interval: tuple[float, float]


def plot_shaping(comparison: Comparison, path: Path) -> Path | None:
    """Perplexity against both entropies: a line joins the temperatures of one model, sampler and penalty."""
    models = [row for row in comparison.of_kind("model") if "nats" in row["per_sample"]]
    if not models:
        return None
    figure, axes = canvas(6.4, 9.4, 2, 1)
    names = list(dict.fromkeys(row["model"] for row in models))
    samplers = list(dict.fromkeys(_sampler(row) for row in models))
    for axis, entropy in zip(axes[:, 0], ("h1", "h2"), strict=True):
        _plot_models(axis, models, entropy, names, samplers)
        rightmost = max(_place(row, entropy).x for row in models) - 0.1
        for row in comparison.of_kind("naive"):
            place = _place(row, entropy)
            axis.plot(place.x, place.y, "x", color=GRAY, markersize=7)
            on_right = place.x > rightmost
            name = f"{row['model']}  " if on_right else f"  {row['model']}"
            side = "right" if on_right else "left"
            axis.annotate(name, (place.x, place.y), color=GRAY, fontsize=9, va="center", ha=side)
        for row in comparison.of_kind("human"):
            place = _place(row, entropy)
            axis.axhline(place.y, color="black", linewidth=0.6, linestyle=":")
            axis.axvline(place.x, color="black", linewidth=0.6, linestyle=":")
            axis.plot(place.x, place.y, "k*", markersize=16, label="human text", zorder=5)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.margins(x=0.12)
        axis.grid(alpha=0.25)
        kind = {"h1": "H1: unigram", "h2": "H2: bigram"}[entropy]
        axis.set_xlabel(f"{kind} entropy within a sample (nats)", fontsize=11)
        axis.set_ylabel(f"perplexity ({comparison.judge})", fontsize=11)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=1, fontsize=9)
    figure.suptitle("Closer to the star is better.\nLines join temperatures; open marks: with a penalty.", fontsize=11)
    return _save(figure, path)


def _plot_models(
    axis: Any, models: Sequence[ResultRow], entropy: str, names: Sequence[str], samplers: Sequence[str]
) -> None:
    """One line for each model and sampler, along the temperatures and the values of top-p."""
    for sampler in samplers:
        for name in names:
            own = [row for row in models if row["model"] == name and _sampler(row) == sampler]
            own.sort(key=lambda row: (row["sampling"]["temperature"], row["sampling"]["top_p"]))
            places = [_place(row, entropy) for row in own]
            colour, marker = COLOURS[names.index(name) % len(COLOURS)], MARKERS[samplers.index(sampler) % len(MARKERS)]
            for place in places:
                axis.plot([place.x] * 2, place.y_interval, color=colour, linewidth=0.8)
                axis.plot(place.x_interval, [place.y] * 2, color=colour, linewidth=0.8)
            open_marker = any(row["sampling"]["log_frequency_penalty"] for row in own)
            axis.plot(
                [place.x for place in places],
                [place.y for place in places],
                marker + "-",
                color=colour,
                markerfacecolor="white" if open_marker else colour,
                markersize=7,
                linewidth=1,
                label=f"{name}, {sampler}" if places else None,
            )


def plot_scorecard(comparison: Comparison, path: Path) -> Path:
    """Every z-score of every row, pale where it is that of human text."""
    names, flagged = comparison.columns, flags_of(comparison)
    rows = comparison.rows
    z = np.array([[row["columns"].get(name, {}).get("z", np.nan) for name in names] for row in rows])
    labels = [row_label(row) for row in rows]
    figure, axis = canvas(0.055 * max(map(len, labels)) + 0.62 * len(names) + 0.6, 0.28 * len(rows) + 1.3)
    strength = np.sign(z) * np.log1p(np.abs(z) / 2).clip(0, 4)
    axis.imshow(np.nan_to_num(strength), cmap="PuOr", vmin=-4.5, vmax=4.5, aspect="auto")
    for (row, column), value in np.ndenumerate(z):
        dark = abs(strength[row, column]) > 2.8
        text = "" if np.isnan(value) else z_text(value)
        axis.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axis.set_xticks(range(len(names)), [column_title(name, flagged) for name in names], rotation=40, ha="left")
    axis.xaxis.tick_top()
    axis.set_yticks(range(len(rows)), labels)
    axis.tick_params(labelsize=9, length=0)
    return _save(figure, path)


def _sampler(row: ResultRow) -> str:
    """The label of a row without model, temperature and top-p."""
    words = row_label(row).split(", ")[1:]
    return ", ".join(word for word in words if not word.startswith(("T ", "top-p ")))


def _place(row: ResultRow, entropy: str) -> Place:
    per = row["per_sample"]
    nats, tokens, values = (np.array(per[name], dtype=np.float64) for name in ("nats", "tokens", entropy))
    draws = bootstrap_indices(len(nats)).numpy()
    ppl = np.exp(nats[draws].sum(-1) / tokens[draws].sum(-1))
    means = values[draws].mean(-1)
    x_interval, y_interval = (tuple(np.percentile(each, [2.5, 97.5]).tolist()) for each in (means, ppl))
    return Place(float(values.mean()), float(np.exp(nats.sum() / tokens.sum())), x_interval, y_interval)


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
