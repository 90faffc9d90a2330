"""The name under which model directories of version 0.1 import our classes for transformers; kept for them alone."""

from cdlm.interop.transformers import CDLMConfig, CDLMForMaskedLM

__all__ = ["CDLMConfig", "CDLMForMaskedLM"]
