"""Schedules are pure functions of progress; wrong ones are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm.schedules import PAPER_STEPS, Schedule, constant, linear, number, scaled_decay, stairs

values = st.floats(-10, 10, allow_subnormal=False)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 1000), values), max_size=5, unique_by=lambda k: k[0]), values, st.integers(0, 997)
)
def test_straight_lines_between_knots(rest, first, step):
    knots = [(0.0, first), *sorted((place / 1000, value) for place, value in rest)]
    truth = np.interp(step / 997, *zip(*knots, strict=True))
    assert linear(*knots)(step / 997) == pytest.approx(truth, abs=1e-9)


def test_knots_are_met_exactly_and_the_last_value_holds():
    schedule = linear((0.0, 0.4), (2 / 3, 0.4), (1.0, 0.2))
    assert schedule(0) == schedule(0.5) == schedule(100_000 / 150_000) == 0.4
    assert schedule(1) == schedule(1.5) == 0.2
    assert schedule(125_000 / 150_000) == pytest.approx(0.3)


def test_constant():
    assert {constant(0.7)(progress) for progress in (0, 0.3, 1, 2)} == {0.7}


@pytest.mark.parametrize("count", [1, 3, 5])
def test_stairs_are_equal_stages_that_jump_at_their_start(count):
    total = 60 * count
    schedule = stairs(*range(count))
    assert [schedule(step / total) for step in range(total)] == [step // 60 for step in range(total)]
    assert schedule(1) == count - 1


def test_jumps_hold_the_value_until_the_next_knot():
    schedule = Schedule(((0.0, 1.0), (0.5, 0.0)), jumps=True)
    assert [schedule(p) for p in (0, 0.25, 0.499999, 0.5, 0.9, 1)] == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    "knots",
    [
        (),
        ((0.1, 1.0),),
        ((-0.1, 1.0), (0.0, 1.0)),
        ((0.0, 1.0), (0.5, 1.0), (0.5, 2.0)),
        ((0.0, 1.0), (0.7, 1.0), (0.5, 2.0)),
        ((0.0, 1.0), (1.1, 2.0)),
    ],
)
def test_bad_knots_are_refused(knots):
    with pytest.raises(ValueError, match="must start at progress 0 and increase up to at most 1"):
        Schedule(knots)


def test_negative_progress_is_refused():
    with pytest.raises(ValueError, match=r"starts at 0; got -0\.1"):
        constant(1.0)(-0.1)


@pytest.mark.parametrize("total", [15_000, 75_000, 150_000, 600_000])
def test_scaled_decay_keeps_the_horizon_as_a_share_of_the_run(total):
    horizon = 1 / (1 - scaled_decay(0.999, total))
    assert horizon / total == pytest.approx(1000 / PAPER_STEPS)


def test_scaled_decay_of_a_very_short_run_and_at_the_reference():
    assert scaled_decay(0.999, 100) == 0
    assert scaled_decay(0.999, 150_000) == pytest.approx(0.999, abs=1e-15)
    assert 1 / (1 - scaled_decay(0.999, 2_000)) == pytest.approx(2_000 / 150)


@pytest.mark.parametrize(
    ("value", "name"),
    [(0.625, "5/8"), (0.125, "1/8"), (2 / 3, "2/3"), (1 / 512, "1/512"), (0.4, "0.4"), (1.0, "1"), (0.999, "0.999")],
)
def test_short_names_of_numbers(value, name):
    assert number(value) == name


def test_schedules_print_their_values():
    assert str(constant(0.4)) == "0.4"
    fading, jumping = str(linear((0.0, 0.4), (2 / 3, 0.4), (1.0, 0.2))), str(stairs(0.125, 0.25, 0.5))
    assert all(part in fading for part in ("0.4", "0.2", "2/3"))
    assert all(part in jumping for part in ("1/8", "1/4", "0.5", "1/3", "2/3"))
    assert str(linear((0.0, 0.125), (1.0, 0.5))) != str(stairs(0.125, 0.5))
