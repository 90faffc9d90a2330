"""Samplers: plain functions over (predictor, process, x, grid)."""

from cdlm.sample.ancestral import Posterior, Predictor, ancestral, uniform_grid

__all__ = ["Posterior", "Predictor", "ancestral", "uniform_grid"]
