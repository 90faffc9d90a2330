"""The bundled models: directories beside this file, which `cdlm.load` and every command know by name."""

from pathlib import Path

HERE = Path(__file__).parent
BEST = "mcdlm-guided"
"""What writes where no model is named."""


def names() -> list[str]:
    """The models, the best one first."""
    found = sorted(path.parent.name for path in HERE.glob("*/config.json"))
    return sorted(found, key=lambda name: name != BEST)


def locate(path: Path) -> Path:
    """The path itself if it exists, else the bundled model of that name, if there is one."""
    return HERE / path if not path.exists() and str(path) in names() else path
