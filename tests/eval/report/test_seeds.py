"""Runs of other seeds: the interval is over runs, by Student's t with Welch's degrees of freedom."""

import json
import math
from pathlib import Path

import pytest
from scipy.special import stdtrit

from cdlm.eval.config import ReportConfig
from cdlm.eval.report import figures
from cdlm.eval.report.frontier import frontier_points
from cdlm.eval.report.layouts import TableStyle, unconditional_tables
from cdlm.eval.report.rows import Section
from cdlm.eval.report.seeds import compare_seeds
from cdlm.eval.report.write import write_report

from .rows import row


def runs(model: str, middle: float, spread: float, steps: int = 8, method: str = "mdlm") -> list[dict]:  # type: ignore[type-arg]
    ups = (0.0, -spread, spread)
    names = (model, f"{model}, seed 1", f"{model}, seed 2")
    return [
        row(n, steps, middle * math.exp(up), 5.2 + up, noise=0.3, method=method)
        for n, up in zip(names, ups, strict=True)
    ]


def section(*rows: dict) -> Section:  # type: ignore[type-arg]
    return Section("gpt2-large", "robust", 1024, list(rows))


def test_the_ratio_has_welchs_interval() -> None:
    found = compare_seeds(frontier_points(section(*runs("MDLM", 400, 0.1), *runs("MCDLM", 100, 0.4))), "MDLM")
    assert [(r.name, r.steps, len(r.ppls)) for r in found] == [("MDLM", 8, 3), ("MCDLM", 8, 3)]
    few, many = 0.1**2 / 3, 0.4**2 / 3  # squared errors of the two means
    freedom = (few + many) ** 2 / (few**2 / 2 + many**2 / 2)
    ratio, error = found[1].ratio, stdtrit(freedom, 0.975) * math.sqrt(few + many)
    assert (found[0].ratio, found[0].ppl, found[0].entropy) == (None, pytest.approx(400), pytest.approx(5.2))
    assert ratio is not None
    assert ratio.value == pytest.approx(0.25)
    assert ratio.low == pytest.approx(0.25 * math.exp(-error), rel=1e-5)
    assert ratio.high == pytest.approx(0.25 * math.exp(error), rel=1e-5)


def test_one_run_is_no_sample() -> None:
    alone = row("MCDLM", 8, 100.0)
    assert [r.name for r in compare_seeds(frontier_points(section(*runs("MDLM", 400, 0.1), alone)), "MDLM")] == ["MDLM"]
    assert not compare_seeds(frontier_points(section(row("MDLM", 8), *runs("MCDLM", 100, 0.1))), "MDLM")
    other = compare_seeds(frontier_points(section(*runs("MDLM", 400, 0.1), *runs("MCDLM", 100, 0.1, steps=16))), "MDLM")
    assert [(r.name, r.steps) for r in other] == [("MDLM", 8)]


def test_another_sampler_is_another_method() -> None:
    tails = [{**one, "sampling": {**one["sampling"], "final_step": "argmax"}} for one in runs("MDLM", 200, 0.1)]
    found = compare_seeds(frontier_points(section(*runs("MDLM", 400, 0.1), *tails)), "MDLM")
    assert [(r.name, len(r.ppls), round(r.ppl)) for r in found] == [("MDLM", 3, 400), ("MDLM (greedy)", 3, 200)]


def test_pictures_and_tables_when_every_run_has_a_seed(tmp_path: Path) -> None:
    """Pictures show the first run; the seeds have a table of their own, also for machines."""
    rows = [row(f"{name}, seed {k}", n, 100.0 + k) for name in ("A", "B") for k in (0, 1) for n in (8, 16)]
    found = section(*rows)
    assert {one["model"] for one in figures.plotted_rows(found)} == {"A, seed 0", "B, seed 0"}
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    page = write_report(ReportConfig((folder,), tmp_path / "report")).read_text()
    assert "**Over seeds**" in page
    written = json.loads((tmp_path / "report" / "report.json").read_text())["seeds"]
    assert [(one["steps"], one["name"], one["baseline"]) for one in written] == [
        (n, name, "A") for n in (8, 16) for name in ("A", "B")
    ]


def test_the_paper_is_quoted_once_for_all_runs() -> None:
    table = unconditional_tables(section(*runs("MDLM", 400, 0.1)), TableStyle(None, compare=True))[0]
    assert [line.name for line in table.lines] == ["MDLM", "paper", "MDLM, seed 1", "MDLM, seed 2"]


def test_the_paper_is_quoted_beneath_its_own_models_alone() -> None:
    rows = [row(f"A {k}", 8, method=method) for k, method in enumerate(("mcdlm:kappa=0", "mcdlm", "mcdlm:lam=0"))]
    table = unconditional_tables(section(*rows), TableStyle(None, compare=True))[0]
    assert [line.name for line in table.lines] == ["A 0", "A 1", "paper", "A 2"]
