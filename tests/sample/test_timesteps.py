"""Time grids: where they begin and end, how they fall, and what they refuse."""

import math
from collections.abc import Callable

import pytest
import torch

from cdlm.sample.logits import Shape
from cdlm.sample.timesteps import NEAR_ZERO, cosine_times, custom_times, loop_times, uniform_times

TIMES = [1.0, 0.6, 0.5, 0.1, 0.0]
RANGES = [(1.0, 0.0), (1.0, NEAR_ZERO), (0.7, 0.0), (0.5, 0.2)]


@pytest.mark.parametrize(("start", "end"), RANGES)
@pytest.mark.parametrize("steps", [1, 2, 7, 1000])
@pytest.mark.parametrize("build", [uniform_times, cosine_times])
def test_a_grid_falls_from_start_to_end(build: Callable, steps: int, start: float, end: float) -> None:
    grid = build(steps, start, end)
    assert grid.dtype == torch.float64
    assert len(grid) == steps + 1
    assert (float(grid[0]), float(grid[-1])) == (start, end)
    assert bool((grid[:-1] > grid[1:]).all())


@pytest.mark.parametrize(("start", "end"), RANGES)
def test_where_the_times_lie(start: float, end: float) -> None:
    steps = 6
    even = [end + (start - end) * (1 - k / steps) for k in range(steps + 1)]
    curved = [end + (start - end) * math.cos(math.pi / 2 * k / steps) for k in range(steps + 1)]
    own = [end + (start - end) * t for t in TIMES]
    assert uniform_times(steps, start, end).tolist() == pytest.approx(even, abs=1e-12)
    assert cosine_times(steps, start, end).tolist() == pytest.approx(curved, abs=1e-12)
    assert custom_times(TIMES, start, end).tolist() == pytest.approx(own, abs=1e-12)


def test_a_cosine_grid_begins_with_small_hops() -> None:
    hops = -cosine_times(20).diff()
    assert bool((hops[1:] > hops[:-1]).all())


@pytest.mark.parametrize(("start", "end"), RANGES)
@pytest.mark.parametrize("steps", [4, 5, 10, 20, 21, 100, 1024])
def test_a_loop_goes_down_stays_and_finishes(steps: int, start: float, end: float) -> None:
    """45 % of the hops down to a tenth, half of them there, the rest (at least one) to the end."""
    grid = loop_times(steps, start, end)
    hops = -grid.diff()
    assert len(hops) == steps
    assert (float(grid[0]), float(grid[-1])) == (start, end)
    down, last = max(1, round(0.45 * steps)), max(1, round(0.05 * steps))
    assert bool((hops[:down] > 0).all())
    assert bool((hops[down : steps - last] == 0).all())
    assert bool((hops[steps - last :] > 0).all())
    assert grid[down : steps - last + 1].tolist() == [pytest.approx(end + (start - end) * 0.1)] * (
        steps - down - last + 1
    )
    assert float((hops[:down] - hops[0]).abs().max()) < 1e-12


@pytest.mark.parametrize("steps", [0, -1])
@pytest.mark.parametrize("build", [uniform_times, cosine_times])
def test_a_grid_has_at_least_one_step(build: Callable, steps: int) -> None:
    with pytest.raises(ValueError, match=f"at least one step; got {steps}"):
        build(steps)


@pytest.mark.parametrize("steps", [-1, 0, 3])
def test_a_loop_has_at_least_four_steps(steps: int) -> None:
    with pytest.raises(ValueError, match=f"at least 4 steps; got {steps}"):
        loop_times(steps)


NAN = float("nan")


@pytest.mark.parametrize(("start", "end"), [(0.5, 0.5), (0.2, 0.6), (1.1, 0.0), (1.0, -0.1), (NAN, 0.0), (1.0, NAN)])
def test_a_grid_stays_within_its_range(start: float, end: float) -> None:
    for build in (
        lambda: uniform_times(4, start, end),
        lambda: cosine_times(4, start, end),
        lambda: loop_times(4, start, end),
        lambda: custom_times(TIMES, start, end),
    ):
        with pytest.raises(ValueError, match=r"falls from start to end within \[0, 1\]"):
            build()


@pytest.mark.parametrize(
    "times",
    [[], [1.0], [1.0, 0.5], [0.9, 0.0], [1.0, 0.5, 0.5, 0.0], [1.0, 0.2, 0.3, 0.0], [1.0, 1.5, 0.0], [1.0, NAN, 0.0]],
)
def test_a_grid_of_your_own_falls_from_one_to_zero(times: list[float]) -> None:
    with pytest.raises(ValueError, match=r"falls from 1 to 0, such as 1,0\.6,0\.3,0"):
        custom_times(times)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"temperature": 0.0}, "use top-k 1"),
        ({"temperature": -1.0}, "above 0 and finite"),
        ({"temperature": NAN}, "above 0 and finite"),
        ({"temperature": float("inf")}, "above 0 and finite"),
        ({"top_k": -1}, "0 to keep every token; got -1"),
        ({"top_p": 0.0}, "1 keeps every token"),
        ({"top_p": 1.01}, "1 keeps every token"),
        ({"top_p": NAN}, "1 keeps every token"),
    ],
)
def test_a_shape_refuses_what_is_no_law(settings: dict[str, float], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        Shape(**settings)


def test_a_shape_at_its_edges_leaves_the_law_alone() -> None:
    logits = torch.randn(20, 9, dtype=torch.float64)
    for shape in (Shape(), Shape(1.0, 0, 1.0), Shape(top_k=9), Shape(top_k=100)):
        assert torch.equal(shape(logits), logits)
    only = Shape(top_k=1)(logits)
    assert torch.equal(only.isfinite().sum(-1), torch.ones(20, dtype=torch.long))
    assert torch.equal(only.argmax(-1), logits.argmax(-1))
    assert torch.equal(Shape(top_p=1e-9)(logits), only)
