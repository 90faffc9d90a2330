"""Optional dependencies: import one, or say which extra installs it."""

import importlib
from typing import Any


def install(extra: str) -> str:
    """The command that installs an extra from the checkout."""
    return f'pip install -c constraints.txt -e ".[{extra}]"'


def require(module: str, extra: str, purpose: str, package: str = "") -> Any:
    """Import an optional dependency; without it, an error that names the extra which installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(
            f"{purpose} needs {package or module.partition('.')[0]}; run in the checkout: {install(extra)}"
        ) from None
