"""Frontiers with known answers: what is only sharpened shows no gain, what is better shows its factor."""

import math

import numpy as np
import pytest

from cdlm.eval.report.frontier import (
    choose_baseline,
    compare_frontiers,
    crossing,
    frontier_points,
    match_entropies,
    steps_to_match,
)
from cdlm.eval.report.rows import Section

from .rows import row, sweep


def section(*rows: dict) -> Section:  # type: ignore[type-arg]
    return Section("gpt2-large", "robust", 1024, list(rows))


def test_a_sharpened_copy_gains_nothing_and_a_better_model_its_factor() -> None:
    copy = row("sharpened", 8, 400 * math.exp(-0.5), 5.25, noise=0.05)
    better = row("better", 8, 400 * math.exp(-0.5) * 0.7, 5.25, noise=0.05)
    found = {
        m.name: m
        for m in match_entropies(frontier_points(section(*sweep("MDLM", 8), copy, better)), "MDLM")
        if m.name != "MDLM"
    }
    assert copy["ppl"] < 400  # better in the raw column ...
    assert found["sharpened"].ratio.value == pytest.approx(1.0, abs=1e-9)  # ... by sharpening alone
    assert found["sharpened"].ratio.low <= 1 <= found["sharpened"].ratio.high
    assert found["better"].ratio.value == pytest.approx(0.7)
    assert found["better"].ratio.high < 1


def test_the_baselines_own_cells_show_the_error_of_interpolation() -> None:
    own = [m for m in match_entropies(frontier_points(section(*sweep("MDLM", 8))), "MDLM") if m.name == "MDLM"]
    inside = {m.control: m.ratio.value for m in own if m.ratio}
    assert set(inside) == {"T 0.8", "T 0.9", "top-p 0.9"}  # the ends of a line have nothing to be compared with
    assert all(ratio == pytest.approx(1, abs=1e-9) for ratio in inside.values())


def test_nothing_is_claimed_beyond_what_was_measured() -> None:
    far = row("far", 8, 10.0, 3.0)
    (found,) = (m for m in match_entropies(frontier_points(section(*sweep("MDLM", 8), far)), "MDLM") if m.name == "far")
    assert found.baseline_ppl is None
    assert found.ratio is None


def test_step_counts_are_never_mixed() -> None:
    other = row("other", 16, 50.0, 5.2)
    assert not [
        m for m in match_entropies(frontier_points(section(*sweep("MDLM", 8), other)), "MDLM") if m.name == "other"
    ]


def test_two_frontiers_over_the_entropies_they_share() -> None:
    (found,) = compare_frontiers(
        frontier_points(section(*sweep("MDLM", 8), *sweep("B", 8, gain=0.8, start=5.3))), "MDLM"
    )
    assert found.ratio.value == pytest.approx(0.8)
    assert found.low == pytest.approx(5.5 - 0.8)
    assert found.high == pytest.approx(5.3)


def test_frontiers_are_compared_control_by_control() -> None:
    """Top-p is better than temperature here, and one model's ends earlier: that is no difference between the models."""
    cells = []
    for model, gain, end in (("MDLM", 1.0, 0.6), ("B", 0.8, 0.3)):
        cells += [one for one in sweep(model, 8, gain) if one["sampling"]["top_p"] == 1]
        for control, drop in (("top-p 0.9", end / 2), ("top-p 0.8", end)):
            cells.append(row(model, 8, 400 * gain * math.exp(-4 * drop), 5.5 - drop, control=control, noise=0.05))
    (found,) = compare_frontiers(frontier_points(section(*cells)), "MDLM")
    assert found.ratio.value == pytest.approx(0.8)
    assert (found.low, found.high) == pytest.approx((5.0, 5.5))


def test_the_interval_covers_a_known_truth() -> None:
    """Texts with noise: the factor 0.8 lies in its interval, and the interval is not trivial."""
    cells = [*sweep("MDLM", 8), row("B", 8, 400 * math.exp(-0.5) * 0.8, 5.25, noise=0.3)]
    (found,) = (m for m in match_entropies(frontier_points(section(*cells)), "MDLM") if m.name == "B")
    assert found.ratio.low < 0.8 < found.ratio.high
    assert 0.01 < found.ratio.high - found.ratio.low < 0.5


def test_crossings_are_log_log_linear() -> None:
    log_ppl = np.log(np.array([[800.0, 400.0, 200.0, 100.0]]))
    for goal, steps in (
        (800.0, 4.0),
        (900.0, 4.0),
        (400.0, 8.0),
        (200 * math.sqrt(2), 8 * math.sqrt(2)),
        (100.0, 32.0),
    ):
        assert crossing([4, 8, 16, 32], log_ppl, np.log(np.array([goal])))[0] == pytest.approx(steps)
    assert crossing([4, 8, 16, 32], log_ppl, np.log(np.array([99.0])))[0] == math.inf


def test_speed_ups_over_ar_and_over_the_baseline_at_its_most_steps() -> None:
    rows = [row("AR", None, 200.0, 5.5, process="none", method="ar")]
    rows += [row("MDLM", n, 6400 / n, 5.5) for n in (4, 8, 16, 32)]
    rows += [row("MCDLM", n, 1600 / n, 5.3, method="mcdlm") for n in (4, 8, 16, 32)]
    found = {(s.name, s.target): s for s in steps_to_match(frontier_points(section(*rows)), ["AR", "MDLM"])}
    assert found["MDLM", "AR"].steps.value == pytest.approx(32)
    assert found["MCDLM", "AR"].steps.value == pytest.approx(8)
    assert found["MCDLM", "AR"].factor == pytest.approx(1023 / 8)
    assert found["MCDLM", "MDLM"].steps.value == pytest.approx(8)  # 200 at 32 steps
    assert found["MCDLM", "MDLM"].factor == pytest.approx(4)
    assert found["MCDLM", "MDLM"].entropy == pytest.approx(5.3)


def test_the_baseline_is_mdlm_unless_told_otherwise() -> None:
    both = section(row("first", method="mcdlm"), row("second", method="mdlm"))
    assert choose_baseline(both, None) == "second"
    assert choose_baseline(both, "first") == "first"
    assert choose_baseline(both, "third") is None


def test_evaluations_are_counted_not_steps() -> None:
    """A corrector that takes two evaluations a step saves half of what its steps say; and no plain cell, no target."""
    rows = [row("MDLM", n, 640 / n) for n in (16, 64)]
    rows += [{**row("B", n, 160 / n), "nfe": 2.0 * n} for n in (8, 16)]
    (found,) = (s for s in steps_to_match(frontier_points(section(*rows)), ["MDLM", "nobody"]) if s.name == "B")
    assert found.steps.value == pytest.approx(16)
    assert found.factor == pytest.approx(64 / 32)
