"""Consistent Diffusion Language Models: train, sample and evaluate diffusion language models that need few steps."""

from cdlm.text import load

__all__ = ["__version__", "load"]
__version__ = "0.1.0"
