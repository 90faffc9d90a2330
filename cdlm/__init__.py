"""Consistent Diffusion Language Models: train, sample and evaluate diffusion language models that need few steps."""

from typing import TYPE_CHECKING, Any

from cdlm.files import VERSION

if TYPE_CHECKING:
    from cdlm.text.pipeline import load

__all__ = ["__version__", "load"]
__version__ = VERSION


def __getattr__(name: str) -> Any:
    """Import `load`, and torch with it, when it is first asked for: `import cdlm` and `cdlm --help` are instant."""
    if name == "load":
        from cdlm.text.pipeline import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
