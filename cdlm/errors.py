"""Which errors end a command with one line, and which with a traceback."""

import sysconfig
import traceback
from pathlib import Path

_KNOWN_DIRECTORIES = (Path(__file__).parent, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")))
_INSTALLED = {"site-packages", "dist-packages"}


def is_expected(error: BaseException) -> bool:
    """Whether an error that reached the command line is advice of ours, for which one line is enough.

    It is if only code of this package and of libraries took part. As soon as a user's code is on the stack (a
    divergence, coupling, sampler, network or metric from outside the package), the author needs the traceback.
    """
    return isinstance(error, (ValueError, OSError, FloatingPointError)) and not any(
        _is_user_code(frame.filename) for frame in traceback.extract_tb(error.__traceback__)
    )


def _is_user_code(filename: str) -> bool:
    """Whether a file is neither of this package, nor of the standard library, nor installed.

    Names such as <string> and <frozen importlib._bootstrap> belong to generated code, as of dataclasses.
    """
    if filename.startswith(("<string>", "<frozen")):
        return False
    path = Path(filename)
    return _INSTALLED.isdisjoint(path.parts) and not any(map(path.is_relative_to, _KNOWN_DIRECTORIES))
