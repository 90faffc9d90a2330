"""The bundled models: directories beside this file, which `cdlm.load` and every command know by name."""

from pathlib import Path

HERE = Path(__file__).parent
BEST = "mcdlm-guided"
"""What writes where no model is named."""
SUDOKU = {4: "sudoku-4", 6: "sudoku-6"}
"""Models of Sudoku grids by the side of the grid; one is bundled if its directory is here."""


def names() -> list[str]:
    """The bundled models of text, the best one first."""
    found = sorted(set(_directories()) - set(SUDOKU.values()))
    return sorted(found, key=lambda name: name != BEST)


def sudoku_names() -> dict[int, str]:
    """The bundled models of Sudoku grids, by the side of the grid."""
    there = _directories()
    return {side: name for side, name in SUDOKU.items() if name in there}


def locate(path: Path) -> Path:
    """The path itself if it exists, else the bundled model of that name, if there is one."""
    return HERE / path if not path.exists() and str(path) in _directories() else path


def _directories() -> list[str]:
    return [path.parent.name for path in HERE.glob("*/config.json")]
