"""Lets transformers open this folder; the model itself is in the package cdlm (install its checkout)."""

from cdlm.interop.transformers import CDLMConfig, CDLMForMaskedLM

__all__ = ["CDLMConfig", "CDLMForMaskedLM"]
