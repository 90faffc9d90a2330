"""Runs of other seeds: the interval is over runs, by the table of Student's t."""

import math

import pytest

from cdlm.report.frontier import points
from cdlm.report.layouts import Style, unconditional_tables
from cdlm.report.rows import Section
from cdlm.report.seeds import over_seeds

from .rows import row

T_4 = 2.776445
"""The 97.5 % point of Student's t with four degrees of freedom, from a table."""


def runs(model: str, middle: float, spread: float, steps: int = 8, method: str = "mdlm") -> list[dict]:  # type: ignore[type-arg]
    ups = (0.0, -spread, spread)
    names = (model, f"{model}, seed 1", f"{model}, seed 2")
    return [
        row(n, steps, middle * math.exp(up), 5.2 + up, noise=0.3, method=method)
        for n, up in zip(names, ups, strict=True)
    ]


def section(*rows: dict) -> Section:  # type: ignore[type-arg]
    return Section("gpt2-large", "robust", 1024, list(rows))


def test_the_ratio_has_the_interval_of_students_table() -> None:
    found = over_seeds(points(section(*runs("MDLM", 400, 0.1), *runs("MCDLM", 100, 0.1))), "MDLM")
    assert [(r.name, r.steps, len(r.ppls)) for r in found] == [("MDLM", 8, 3), ("MCDLM", 8, 3)]
    ratio, error = found[1].ratio, T_4 * math.sqrt(2 * 0.1**2 / 3)
    assert (found[0].ratio, found[0].ppl, found[0].entropy) == (None, pytest.approx(400), pytest.approx(5.2))
    assert ratio is not None
    assert ratio.value == pytest.approx(0.25)
    assert ratio.low == pytest.approx(0.25 * math.exp(-error), rel=1e-5)
    assert ratio.high == pytest.approx(0.25 * math.exp(error), rel=1e-5)


def test_one_run_is_no_sample() -> None:
    alone = row("MCDLM", 8, 100.0)
    assert [r.name for r in over_seeds(points(section(*runs("MDLM", 400, 0.1), alone)), "MDLM")] == ["MDLM"]
    assert not over_seeds(points(section(row("MDLM", 8), *runs("MCDLM", 100, 0.1))), "MDLM")
    other = over_seeds(points(section(*runs("MDLM", 400, 0.1), *runs("MCDLM", 100, 0.1, steps=16))), "MDLM")
    assert [(r.name, r.steps) for r in other] == [("MDLM", 8)]


def test_the_paper_is_quoted_once_for_all_runs() -> None:
    sheet = unconditional_tables(section(*runs("MDLM", 400, 0.1)), Style(None, compare=True))[0]
    assert [line.name for line in sheet.lines] == ["MDLM", "paper", "MDLM, seed 1", "MDLM, seed 2"]
