"""`python -m cdlm` and `cdlm`: run the command line, and turn expected failures into one line of advice."""

import os
import sys


def main() -> None:
    try:
        _run()
    except BrokenPipeError:  # the reader of our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except ConnectionError as error:  # what is left of the network between processes may wait for the dead for ever
        print(f"cdlm: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"cdlm: {error}")
    except KeyboardInterrupt:
        print("cdlm: interrupted", file=sys.stderr)
        sys.exit(130)


def _run() -> None:
    import torch

    torch.set_flush_denormal(True)  # tiny probabilities make denormals, which slow a CPU down tenfold
    try:
        from cdlm.cli import cli
    except ModuleNotFoundError as error:
        sys.exit(f"cdlm: the command line needs {error.name}, which is not installed; run: pip install {error.name}")
    cli()


if __name__ == "__main__":
    main()
