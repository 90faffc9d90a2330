"""Ancestral sampling: the posterior bridge, iterated with the model's own prediction in place of the data."""

import itertools
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cdlm.process.process import Process
from cdlm.rng import Rng, categorical
from cdlm.types import LogLaw, Tokens

Predictor = Callable[[Tokens, float], LogLaw]
"""Anything that maps (x_t, t) to a law for each position: a Denoiser, or an exact posterior."""

Posterior = Literal["plug-in", "mixture"]
"""How a predicted law enters the bridge: in the place of x_0, or by drawing x_0 from it. Equal under masking."""


def uniform_grid(steps: int, start: float = 1.0) -> Float[Tensor, "n"]:
    """Times start = t_0 > t_1 > ... > t_steps = 0, equally far apart: `steps` hops."""
    if steps < 1:
        raise ValueError(f"sampling needs at least one step; got {steps}")
    return torch.linspace(start, 0.0, steps + 1, dtype=torch.float64)


@torch.no_grad()
def ancestral(
    predict: Predictor,
    process: Process,
    x: Tokens,
    grid: Float[Tensor, "n"],
    rng: Rng,
    posterior: Posterior = "plug-in",
    on_step: Callable[[int, Tokens], None] | None = None,
) -> Tokens:
    """x_s ~ q(x_s | x_t, f(x_t, t)) down the grid, one evaluation of f for each hop."""
    times = grid.tolist()
    for step, (t, s) in enumerate(itertools.pairwise(times)):
        noise = rng("hop", step)
        law = predict(x, t)
        clean = law if posterior == "plug-in" else categorical(law, noise("clean").uniform(x.shape[1], x.device))
        x = process.bridge(clean, x, s, t, noise)
        if on_step is not None:
            on_step(step, x)
    return x
