"""Samplers: plain functions over (predictor, process, x, grid)."""

from cdlm.sample.ancestral import Posterior, Predictor, ancestral, uniform_grid
from cdlm.sample.autoregressive import autoregressive

__all__ = ["Posterior", "Predictor", "ancestral", "autoregressive", "uniform_grid"]
