"""Pictures of runs: loss curves from metrics.jsonl, and the schedules of a recipe."""

import dataclasses
from pathlib import Path
from typing import Any

from cdlm.methods.spec import parse_method
from cdlm.train.config import TrainConfig
from cdlm.train.log import read_metrics


def plot_run(run: Path, out: Path) -> Path:
    """Training loss by term, gradient norm, validation NELBO and sample entropy over the steps of a run."""
    lines = read_metrics(run)
    train = [line for line in lines if line["kind"] == "train"]
    valid = [line for line in lines if line["kind"] == "valid"]
    if not train:
        raise ValueError(f"{run / 'metrics.jsonl'} has no training line yet; wait for the first --log-every steps")
    figure, axes = _figure(2, 2, f"{run.name}")
    steps = [line["step"] for line in train]
    terms = [name.removeprefix("share ") for name in train[0] if name.startswith("share ")]
    for name in ["loss", *(terms if len(terms) > 1 else [])]:
        points = [(line["step"], line[name]) for line in train if name in line]
        axes[0][0].plot(*zip(*points, strict=True), label=name)
    axes[0][0].legend()
    axes[0][0].set_ylabel("nats per token")
    axes[0][0].set_title("training loss")
    axes[0][1].plot(steps, [line["grad_norm"] for line in train])
    axes[0][1].set_title("gradient norm")
    axes[1][0].plot([line["step"] for line in valid], [line["nelbo"] for line in valid], marker="o")
    axes[1][0].set_title("validation NELBO, EMA weights")
    axes[1][0].set_ylabel("nats per token")
    seen = [line for line in valid if "entropy" in line]
    axes[1][1].plot([line["step"] for line in seen], [line["entropy"] for line in seen], marker="o", label="samples")
    axes[1][1].plot([line["step"] for line in seen], [line["data_entropy"] for line in seen], "--", label="data")
    axes[1][1].set_title("unigram entropy")
    if seen:
        axes[1][1].legend()
    return _save(figure, out)


def plot_schedules(config: TrainConfig, name: str, out: Path) -> Path:
    """Shares (kappa), step sizes delta, and the target's lambda over a run."""
    method, choices = parse_method(config.method)
    objective = method(method.default_process(2), config.steps, **choices)
    objective = dataclasses.replace(objective, reference=config.reference_steps)  # as it trains
    figure, axes = _figure(1, 3, f"{name}: {config.steps:,} steps")
    places = sorted({round(i * (config.steps - 1) / 600) for i in range(601)})
    copies = [step for step in range(config.steps) if objective.network and objective.lam(step) == 0]
    for term in objective.terms:
        axes[0][0].plot(places, [term.share(step / config.steps) for step in places], label=term.name)
        low, high = ([end(step / config.steps) for step in places] for end in (term.times.low, term.times.high))
        axes[0][1].fill_between(places, low, high, alpha=0.3)
        axes[0][1].plot(places, high, label=term.name)
    axes[0][0].set_title("share of the loss (kappa)")
    axes[0][1].set_title("step size delta")
    if objective.network is not None:
        kept = [step for step in places if step not in copies]
        axes[0][2].plot(kept, [objective.lam(step) for step in kept], label="lambda")
        axes[0][2].vlines(copies, 0, 1, linestyles="dotted", colors="tab:red", label="copy of the online weights")
        axes[0][2].legend()
    axes[0][2].set_title("target: lambda" if objective.network is not None else "no target network")
    for axis in axes[0]:
        axis.set_ylim(0, 1.05)
    for axis in axes[0][:2]:
        axis.legend()
    return _save(figure, out)


def canvas(width: float, height: float, rows: int = 1, columns: int = 1, **how: Any) -> tuple[Any, Any]:
    """A figure that needs no screen, and its axes: one, or a list of lists."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **how)
    return figure, axes[0][0] if rows == columns == 1 else axes


def _figure(rows: int, columns: int, title: str) -> tuple[Any, Any]:
    figure, axes = canvas(4.5 * columns, 3.2 * rows, rows, columns)
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.locator_params(axis="x", nbins=5)
    figure.suptitle(title)
    return figure, axes


def _save(figure: Any, out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    return out
