"""`cdlm COMMAND ...`: the table of commands. A command is a module of this package whose `main` takes its arguments."""

import importlib
import sys
from typing import NoReturn

from cdlm.files import VERSION

COMMANDS = {
    "demo": "Show what few steps buy: two models side by side, two moons, one page.",
    "zoo": "List the bundled models, and the best settings of each.",
    "methods": "Print the table of methods; with --run, train each for one step.",
    "sudoku": "Watch Sudoku grids fill in, step by step: models or samplers side by side.",
    "moons": "Train methods on two moons, sample with few steps, draw the figure.",
    "recipes": "List the named runs, what each reproduces and what it costs.",
    "prepare": "Turn text into tokens: .txt, .jsonl, .parquet or a dataset.",
    "train": "Train a recipe, or the run.json of an earlier run: cdlm train RECIPE --data DIR.",
    "plot": "Draw the curves of a run, or the schedules of a recipe.",
    "sample": "Write text with a model that comes with cdlm, another one, or a run.",
    "eval": "Measure models: perplexity under a judge, entropy, BLEU, MAUVE, NELBO, consistency.",
    "report": "Turn results into the paper's tables and figures, and frontiers at matched entropy.",
    "studio": "Watch models write in a browser, and use them over HTTP.",
    "push": "Upload a model to the hub, with a card: cdlm push MODEL owner/name.",
    "convert": "Turn a .ckpt file of MDLM, UDLM, DUO or SDTT into a model directory.",
    "pull": "Download a model from the hub: cdlm pull owner/name FOLDER.",
}


def cli(arguments: list[str] | None = None) -> None:
    """Run a command; only its own module is imported."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        stream = sys.stdout if arguments else sys.stderr
        print("usage: cdlm COMMAND [--help] ...\n", file=stream)
        print("Consistent Diffusion Language Models: text in few denoising steps.\n", file=stream)
        for name, about in COMMANDS.items():
            print(f"  {name:<9} {about}", file=stream)
        sys.exit(0 if arguments else 2)
    if arguments[0] == "--version":
        print(VERSION)
        return
    if arguments[0] not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(COMMANDS)}"
        fail(f"there is no command {arguments[0]!r}; {hint}")
    try:
        command = importlib.import_module(f"cdlm.cli.{arguments[0]}")
    except ModuleNotFoundError as error:
        sys.exit(f"cdlm: the command line needs {error.name}, which is not installed; run: pip install {error.name}")
    command.main(arguments[1:])


def fail(message: str) -> NoReturn:
    """End with a line of advice and the exit status of wrong usage."""
    print(f"cdlm: {message}", file=sys.stderr)
    sys.exit(2)
