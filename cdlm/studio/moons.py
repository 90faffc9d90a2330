"""Points on their way to two moons, drawn with the exact posterior: what a perfect model does in so many steps."""

import functools
import itertools
from typing import Any, Literal

from cdlm.data.toy import Moons
from cdlm.process import masked, uniform
from cdlm.process.exact import posterior
from cdlm.rng import categorical, seeded
from cdlm.sample.timesteps import uniform_times

BINS = 64


@functools.lru_cache(maxsize=64)
def moving_points(process: Literal["masked", "uniform"], steps: int, points: int, seed: int) -> dict[str, Any]:
    """Every frame of `points` samples; a coordinate that is still masked is None."""
    moons, kind = Moons(BINS), (masked if process == "masked" else uniform)(BINS)
    rng = seeded(seed, "studio", batch=points)
    x, predict, grid = kind.start(moons.length, rng("start")), _posterior(process), uniform_times(steps).tolist()
    states = [x]
    for hop, (t, s) in enumerate(itertools.pairwise(grid)):
        noise = rng("hop", hop)
        x0 = categorical(predict(x, t).flatten(0, 1), noise("x0").uniform(2).flatten()).view_as(x)
        x = kind.bridge(x0, x, s, t, noise)
        states.append(x)
    frames = [[[None if z == BINS else z for z in point] for point in state.tolist()] for state in states]
    data = moons.sample(seeded(seed, "data", batch=1000)).tolist()
    return {"bins": BINS, "steps": steps, "data": data, "frames": frames}


@functools.lru_cache(maxsize=2)
def _posterior(process: str) -> Any:
    return posterior(Moons(BINS).law, (masked if process == "masked" else uniform)(BINS), 2)
