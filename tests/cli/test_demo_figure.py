"""The Sudoku figure of the demo: every point stands where its row says, and the exact references are drawn in."""

import dataclasses
import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from cdlm.cli.demo_figure import BOTTOM, TOP, series, sudoku_figure
from cdlm.sample.settings import resolve


def row(
    model: str, steps: int | None, nats: float | None, valid: float, seed: int = 0, **settings: Any
) -> dict[str, Any]:
    given = settings if steps is None else {"steps": steps, **settings}
    sampling = dataclasses.asdict(resolve(given, None if steps is None else "any"))
    interval = None if nats is None else [nats - 0.5, nats + 0.25]
    about = {"task": "sudoku", "max_length": 16, "model": model, "seed": seed, "nfe": float(steps or 15)}
    return about | {
        "sampling": sampling, "nats": nats, "nats_interval": interval, "valid": valid, "valid_interval": [0.0, valid],
    }  # fmt: skip


ROWS = [
    *(row("mdlm", steps, 20 / steps, steps / 16, seed=seed) for steps in (1, 2, 4) for seed in (0, 1)),
    row("mdlm", 2, 5.0, 0.5, seed=2),
    row("mdlm", 2, None, 0.9, temperature=0.5),
    row("ar", None, 5.8, 0.9),
    row("exact", 1, 22.0, 0.0),
    row("exact", 8, 7.0, 0.4),
    row("exact", 8, None, 0.8, order="grid", step_size="equal"),
    row("exact", 8, 7.0, 0.4) | {"max_length": 36},
    {"task": "unconditional"},
]


def charts(page: str) -> list[ElementTree.Element]:
    found = [ElementTree.fromstring(part) for part in re.findall(r'<svg class="chart" .*?</svg>', page)]
    assert len(found) == 2
    return found


def test_points_stand_where_the_rows_say() -> None:
    for chart, measure in zip(charts(sudoku_figure(ROWS)), ("nats", "valid"), strict=True):
        known = [each for each in ROWS if each.get("max_length") == 16]
        plain = [each for each in known if each["model"] == "exact" or each["sampling"]["temperature"] == 1]
        lines = series(plain, measure)
        labels = [(float(text.text or ""), float(text.get("y", 0)) - 4) for text in chart.iter("text")
                  if text.get("text-anchor") == "end"]  # fmt: skip
        (v0, y0), (v1, y1) = labels[0], labels[-1]
        drawn = [[(float(mark.get("cx", 0)), float(mark.get("cy", 0))) for mark in group.iter("circle")]
                 for group in chart.iter("g")]  # fmt: skip
        assert [len(marks) for marks in drawn] == [len(points) for points in lines.values()]
        for marks, points in zip(drawn, lines.values(), strict=True):
            for (_, y), point in zip(marks, points, strict=True):
                assert v0 + (y - y0) / (y1 - y0) * (v1 - v0) == pytest.approx(point.value, abs=0.03)
                assert TOP - 0.1 <= y <= BOTTOM + 0.1
        places = {point.nfe: x for marks, points in zip(drawn, lines.values(), strict=True)
                  for (x, _), point in zip(marks, points, strict=True)}  # fmt: skip
        assert places[4.0] - places[2.0] == pytest.approx(places[2.0] - places[1.0], abs=0.2)  # powers of two


def test_seeds_are_averaged_and_controls_left_out() -> None:
    page = sudoku_figure(ROWS)
    assert "MDLM" in page
    assert "--temperature" not in page
    assert "exact denoiser --order grid --step-size equal" in page
    assert f"{math.log(288):.2f}" in page
    for chart in charts(page):
        label = chart.get("aria-label", "")
        assert "MDLM" in label
        if label.startswith("nats"):
            assert "MDLM 20 at 1, 8.33 at 2, 5 at 4; AR 5.8 at 15; exact denoiser 22 at 1, 7 at 8" in label
    points = series(ROWS[:7], "nats")["MDLM"]
    assert [(point.low, point.high) for point in points] == [(20, 20), (5, 10), (5, 5)]
    (single,) = series([ROWS[8]], "nats")["AR"]
    assert (single.low, single.high) == pytest.approx((5.3, 6.05))


def test_it_needs_no_file_and_no_script_and_some_rows() -> None:
    page = sudoku_figure(ROWS)
    for part in ("<img", "<script", "http", "url("):
        assert part not in page
    with pytest.raises(ValueError, match="no rows of the task sudoku for size 6"):
        sudoku_figure([ROWS[0]], 6)
