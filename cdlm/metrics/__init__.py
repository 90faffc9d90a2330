"""Measures of samples and models, used in training and evaluation."""
