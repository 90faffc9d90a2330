"""Measuring models: likelihood, and the diversity of what they write."""
