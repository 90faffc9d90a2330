"""Samplers: plain functions over (predictor, process, x, times) that yield the states of a sample on its way."""
