"""Samples of two moons on their way from noise to data, drawn with the exact posterior: what a perfect model does."""

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
def moon_frames(process_name: Literal["masked", "uniform"], steps: int, points: int, seed: int) -> dict[str, Any]:
    """Every state of `points` samples; a coordinate that is still masked is None."""
    moons = Moons(BINS)
    process = (masked if process_name == "masked" else uniform)(BINS)
    rng = seeded(seed, "studio", batch=points)
    x = process.start(moons.length, rng("start"))
    predict = _posterior(process_name)
    states = [x]
    for hop, (t, s) in enumerate(itertools.pairwise(uniform_times(steps).tolist())):
        noise = rng("hop", hop)
        x0 = categorical(predict(x, t).flatten(0, 1), noise("x0").uniform(2).flatten()).view_as(x)
        x = process.bridge(x0, x, s, t, noise)
        states.append(x)
    frames = [[[None if z == BINS else z for z in point] for point in state.tolist()] for state in states]
    data = moons.sample(seeded(seed, "data", batch=1000)).tolist()
    return {"bins": BINS, "steps": steps, "data": data, "frames": frames}


@functools.lru_cache(maxsize=2)
def _posterior(process_name: str) -> Any:
    return posterior(Moons(BINS).law, (masked if process_name == "masked" else uniform)(BINS), 2)
