"""The models that come with the package: folders beside this file, which `cdlm.load` and every command know by name."""

from pathlib import Path

HERE = Path(__file__).parent
BEST = "mcdlm-guided"
"""What writes where no model is named."""


def names() -> list[str]:
    """The models, the best one first."""
    found = sorted(path.parent.name for path in HERE.glob("*/config.json"))
    return sorted(found, key=lambda name: name != BEST)


def folder(name: str) -> Path | None:
    """The folder of a model by its name; None if there is none of that name."""
    return HERE / name if name in names() else None
