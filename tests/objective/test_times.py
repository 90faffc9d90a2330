"""(s, t): ranges, strata over the global batch, and what happens where a hop would pass the data."""

import importlib.util
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm.objective import MAX_STEP, Times, step_scheduler
from cdlm.rng import seeded
from cdlm.schedules import constant, linear

KINDS = ["random", "increasing", "decreasing", "staged"]


def draw(times: Times, progress: float, batch: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return times(progress, torch.arange(batch), batch, seeded(seed, batch=batch))


@pytest.mark.parametrize("progress", [0.0, 0.2, 0.4, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_step_sizes_over_the_run(kind, progress):
    low, high = 1 / 8, 5 / 8
    s, t = draw(step_scheduler(kind, low, high, "shift"), progress, 2000)
    delta = t - s
    if kind == "random":
        assert low <= float(delta.min()) < low + 0.01
        assert high - 0.01 < float(delta.max()) <= high + 1e-12
        assert float(delta.mean()) == pytest.approx((low + high) / 2, abs=0.02)
        return
    truth = {
        "increasing": low + (high - low) * progress,
        "decreasing": high - (high - low) * progress,
        "staged": low if progress < 1 / 3 else (low + high) / 2 if progress < 2 / 3 else high,
    }[kind]
    assert torch.allclose(delta, torch.full_like(delta, truth), atol=1e-12)


def test_max_step_goes_to_the_data():
    s, t = draw(MAX_STEP, 0.3, 1000)
    assert float(s.abs().max()) == 0
    assert float(t.min()) >= 1e-3
    assert float(t.max()) <= 1
    assert t.dtype == s.dtype == torch.float64


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.sampled_from(KINDS), st.sampled_from(["clip", "conditional", "shift"]), st.integers(0, 100), st.integers(0, 99)
)
def test_always_a_proper_hop(kind, overshoot, percent, seed):
    s, t = draw(step_scheduler(kind, 0.05, 0.95, overshoot), percent / 100, 16, seed)
    assert bool(((s >= 0) & (s < t) & (t <= 1)).all())


@pytest.mark.parametrize("batch", [1, 2, 7, 64])
@pytest.mark.parametrize("times", [MAX_STEP, step_scheduler("random", 0.1, 0.5)], ids=["max", "random"])
def test_exactly_one_time_in_each_stratum(times, batch):
    _, t = draw(times, 0.5, batch)
    u = (t - times.floor) / (1 - times.floor)
    assert (u * batch).floor().long().tolist() == list(range(batch))


@pytest.mark.parametrize("overshoot", ["conditional", "shift"])
def test_strata_under_the_other_rules(overshoot):
    _, t = draw(Times(constant(0.25), constant(0.25), overshoot), 0.0, 40)
    if overshoot == "conditional":
        u = (t - 0.25) / 0.75
    else:
        u = (t - 0.25 - 1e-3) / (1 - 1e-3)
        u, t = u[t < 1], t[t < 1]
    assert (u * 40).floor().long().tolist() == list(range(len(u)))


def test_times_of_a_row_do_not_depend_on_its_company():
    times = step_scheduler("random", 0.1, 0.5)
    s, t = draw(times, 0.5, 12)
    rows = torch.tensor([3, 8])
    some = times(0.5, rows, 12, seeded(0, batch=12, rows=rows))
    assert torch.equal(some[0], s[rows])
    assert torch.equal(some[1], t[rows])


def test_time_and_step_are_independent():
    s, t = draw(step_scheduler("random", 0.05, 0.3, "conditional"), 0.0, 20_000)
    delta = t - s
    u = (t - delta) / (1 - delta)
    z = ((u - u.mean()) * (delta - delta.mean())).mean() / (u.std() * delta.std()) * 20_000**0.5
    assert abs(float(z)) < 4.9


def test_clip_stops_at_the_data():
    times = Times(constant(0.4), constant(0.4))
    s, t = draw(times, 0.0, 1000)
    assert torch.equal(s, (t - 0.4).clamp(min=0))
    assert float((s == 0).double().mean()) == pytest.approx(0.4, abs=0.01)
    assert float(t.mean()) == pytest.approx((1 + 1e-3) / 2, abs=1e-3)


def test_conditional_keeps_the_step_and_moves_the_time():
    s, t = draw(Times(constant(0.4), constant(0.4), "conditional"), 0.0, 1000)
    assert torch.allclose(t - s, torch.full_like(t, 0.4))
    assert 0.4 <= float(t.min()) < 0.402
    assert float(t.mean()) == pytest.approx(0.7, abs=1e-3)


def test_shift_moves_up_by_the_step_as_in_dcd():
    s, t = draw(Times(constant(0.25), constant(0.25), "shift"), 0.0, 1000)
    _, plain = draw(Times(constant(0.25), constant(0.25)), 0.0, 1000)
    assert torch.allclose(t, (plain + 0.25).clamp(max=1))
    assert torch.allclose(t - s, torch.full_like(t, 0.25))


@pytest.mark.parametrize("floor", [1e-5, 1e-3, 0.2])
def test_floor_bounds_the_time(floor):
    _, t = draw(Times(constant(0.1), constant(0.1), floor=floor), 0.0, 5000)
    assert floor <= float(t.min()) < floor + 1e-3
    assert float(t.max()) <= 1


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (constant(0.0), constant(0.5)),
        (constant(-0.1), constant(0.5)),
        (constant(0.5), constant(1.1)),
        (constant(0.6), constant(0.5)),
        (linear((0.0, 0.1), (1.0, 0.6)), constant(0.5)),
    ],
)
def test_impossible_step_sizes_are_refused(low, high):
    with pytest.raises(ValueError, match="step sizes must satisfy 0 < low <= high <= 1; got low"):
        Times(low, high)


def test_ranges_that_cross_inside_the_run_are_refused():
    with pytest.raises(ValueError, match="0 < low <= high <= 1"):
        Times(linear((0.0, 0.1), (0.5, 0.6), (1.0, 0.1)), constant(0.3))


def test_unknown_names_are_refused():
    # The module once more, without the checks of types that tests put around it.
    spec = importlib.util.spec_from_file_location("times_as_users_see_it", inspect.getfile(Times))
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    with pytest.raises(ValueError, match="unknown step scheduler 'linear'; choose from random, increasing"):
        plain.step_scheduler("linear", 0.1, 0.5)
    with pytest.raises(ValueError, match="unknown overshoot 'bounce'; choose from clip, conditional, shift"):
        plain.step_scheduler("random", 0.1, 0.5, "bounce")


def test_times_print_what_they_are():
    assert str(MAX_STEP) == "max step"
    assert "[1/8, 5/8]" in str(step_scheduler("random", 1 / 8, 5 / 8))
    printed = {str(step_scheduler(kind, 1 / 8, 3 / 8, rule)) for kind in KINDS for rule in ("clip", "shift")}
    assert len(printed) == 2 * len(KINDS)
