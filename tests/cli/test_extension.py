"""Methods from outside the package on the command line: unusual ingredients, and runs that need their file."""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ..zygote import run

EXTENSION = """
import functools

import torch

from cdlm.methods import METHODS, Method
from cdlm.objective import MAX_STEP, Bridge, Data, Objective, Term
from cdlm.objective.divergence import kl
from cdlm.schedules import PAPER_STEPS
from cdlm.train.recipes import RECIPES, tiny


def power(pair, exponent):
    return pair.t ** -exponent


class Unit:
    def __call__(self, pair):
        return torch.ones_like(pair.t)


def mine(process, total=PAPER_STEPS):
    weight = functools.partial(power, exponent=0.5)
    first = Term("first", MAX_STEP, Bridge(process), Data(), kl, weight)
    return Objective((first, Term("second", MAX_STEP, Bridge(process), Data(), kl, Unit())), total)


METHODS["mine"] = Method("Mine", mine, "masked")
RECIPES["tiny-mine"] = tiny("mine")

if __name__ == "__main__":
    from cdlm.__main__ import main

    main()
"""
QUICK = "--steps 2 --batch-size 4 --seq-length 16 --valid-samples 0 --valid-every 0 --valid-batches 1 --device cpu"


def test_a_partial_as_weight_is_shown_with_what_it_fixes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(EXTENSION)
    done = run("python", "mine.py", "methods", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = "".join(done.stdout.split())
    assert "power(exponen" in shown
    assert "Unit" in shown


def test_a_run_of_another_file_says_that_the_file_is_needed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(EXTENSION)
    (tmp_path / "text.txt").write_text(textwrap.fill("words and more words " * 200, 70))
    prepared = run("cdlm", "prepare", "text.txt", "--seq-length", "16", "--out", "data", cwd=tmp_path)
    assert prepared.returncode == 0, prepared.stderr
    words = ["train", "tiny-mine", "--data", "data", "--out", "run", *QUICK.split()]
    trained = run("python", "mine.py", *words, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    alone = run("cdlm", "train", "run/run.json", "--out", "again", cwd=tmp_path)
    assert alone.returncode == 1
    assert "unknown method 'mine'" in alone.stderr
    assert "python FILE.py train" in alone.stderr
    beside = run("python", "mine.py", "train", "run/run.json", "--out", "again", cwd=tmp_path)
    assert beside.returncode == 0, beside.stderr


def test_a_missing_run_of_a_recipe_comes_with_the_command_that_trains_it(tmp_path: Path) -> None:
    for model, recipe in (("runs/tiny-mdlm", "tiny-mdlm"), ("zoo-mdlm", "zoo-mdlm")):
        done = run("cdlm", "sample", model, cwd=tmp_path)
        assert done.returncode == 1
        assert f"or train it: cdlm train {recipe} --data data" in done.stderr
    assert "train it" not in run("cdlm", "sample", "elsewhere/tiny-mdlm/x", cwd=tmp_path).stderr


def _interruptible() -> None:
    """What starts in the background ignores SIGINT otherwise, and Python with it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("delay", [0.02, 0.3, 0.8, 1.6])
def test_an_interrupt_while_starting_is_one_line(delay: float) -> None:
    """SIGINT at several moments while a command imports torch and opens a model: no traceback at any of them."""
    code = "import sys; from cdlm.__main__ import main; print(flush=True); sys.argv[0] = 'cdlm'; main()"
    words = [sys.executable, "-c", code, "sample", "--num-samples", "64", "--steps", "64"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, cwd=Path(__file__).parents[2], preexec_fn=_interruptible, **streams) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # from here on the interpreter itself has started
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert b"Traceback" not in said, said.decode()
    assert process.returncode == 130, said.decode()
