"""Training: configurations and recipes, the step, the loop, and everything that must survive a crash."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdlm.train.loop import train

__all__ = ["train"]


def __getattr__(name: str) -> Any:
    """Import `train`, and torch with it, when it is first asked for: configurations and recipes need no torch."""
    if name == "train":
        from cdlm.train.loop import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
