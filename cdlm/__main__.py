"""`python -m cdlm` and `cdlm`: run the command line, and turn expected failures into one line of advice.

Errors that pass through a user's code keep their traceback (`cdlm/errors.py`).
"""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # background jobs of a shell ignore it
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from cdlm.cli.main import cli

        cli()
    except BrokenPipeError:  # the reader of our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except ConnectionError as error:  # what is left of the network between processes may wait for the dead for ever
        print(f"cdlm: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)
    except KeyboardInterrupt:
        print("cdlm: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        from cdlm.errors import is_expected

        if not is_expected(error):
            raise
        sys.exit(f"cdlm: {_advised(error)}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, except while a module is imported, where C code may swallow it: end at once there."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(sys.stderr.fileno(), b"cdlm: interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _advised(error: Exception) -> str:
    """The message; where a model is missing that a recipe trains, with the command that trains it."""
    from cdlm.hub import ModelNotFoundError

    if isinstance(error, ModelNotFoundError):
        from cdlm.train.recipes import RECIPES

        if error.source.name in RECIPES and str(error.source.parent) in (".", "runs"):
            return f"{error}; or train it: cdlm train {error.source.name} --data data"
    return str(error)


if __name__ == "__main__":
    main()
