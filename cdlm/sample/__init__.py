"""Samplers: plain functions over (predictor, process, x, grid) that yield the states of a sample on its way."""

from cdlm.sample.ancestral import ancestral
from cdlm.sample.autoregressive import autoregressive
from cdlm.sample.confidence import confident
from cdlm.sample.correct import Corrector
from cdlm.sample.generate import Sampling, asked, flags, generate, nearest, sampling_of
from cdlm.sample.grid import NEAR_ZERO, cosine_grid, custom_grid, loop_grid, uniform_grid
from cdlm.sample.order import first_hitting, ordered
from cdlm.sample.passes import Drawing, Posterior, Precision, Predictor, State, last
from cdlm.sample.race import race
from cdlm.sample.shape import Shape

__all__ = [
    "NEAR_ZERO",
    "Corrector",
    "Drawing",
    "Posterior",
    "Precision",
    "Predictor",
    "Sampling",
    "Shape",
    "State",
    "ancestral",
    "asked",
    "autoregressive",
    "confident",
    "cosine_grid",
    "custom_grid",
    "first_hitting",
    "flags",
    "generate",
    "last",
    "loop_grid",
    "nearest",
    "ordered",
    "race",
    "sampling_of",
    "uniform_grid",
]
