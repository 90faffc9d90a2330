"""Timesteps: where they begin and end, how they fall, and what they refuse."""

import math
from collections.abc import Callable

import pytest
import torch

from cdlm.sample.settings import custom_timesteps, resolve
from cdlm.sample.timesteps import NEAR_ZERO, cosine_times, custom_times, loop_times, timesteps, uniform_times

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


@pytest.mark.parametrize("steps", [-1, 0, 3])
def test_a_loop_has_at_least_four_steps(steps: int) -> None:
    with pytest.raises(ValueError, match=rf"at least 4 steps.*{steps}"):
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
        with pytest.raises(ValueError, match=r"within \[0, 1\]"):
            build()


@pytest.mark.parametrize(
    "times",
    [[], [1.0], [1.0, 0.5], [0.9, 0.0], [1.0, 0.5, 0.5, 0.0], [1.0, 0.2, 0.3, 0.0], [1.0, 1.5, 0.0], [1.0, NAN, 0.0]],
)
def test_a_grid_of_your_own_falls_from_one_to_zero(times: list[float]) -> None:
    with pytest.raises(ValueError, match="--timesteps must"):
        custom_timesteps(",".join(map(str, times)))


def test_the_times_of_the_settings() -> None:
    """32 steps unless given; above 0 before a final step; from wherever the sampler starts."""
    assert torch.equal(timesteps(resolve()), uniform_times(32))
    assert torch.equal(timesteps(resolve({"steps": 5, "final_step": "sample"})), uniform_times(5, end=NEAR_ZERO))
    cosine = resolve({"steps": 5, "timesteps": "cosine", "final_step": "argmax"})
    assert torch.equal(timesteps(cosine, 0.4), cosine_times(5, 0.4, NEAR_ZERO))
    assert torch.equal(timesteps(resolve({"timesteps": "1,0.25,0"}), 0.8), custom_times([1.0, 0.25, 0.0], 0.8))
    assert torch.equal(timesteps(resolve({"corrector": "loop", "steps": 8}), 0.9), loop_times(8, 0.9))
    assert custom_timesteps("1,0.25,0") == [1.0, 0.25, 0.0]
    assert custom_timesteps("cosine") == []
