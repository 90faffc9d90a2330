"""Errors at the command line: one line for advice of ours, a traceback as soon as a user's code took part."""

import textwrap
from pathlib import Path

import pytest

from .zygote import run

MAIN = """
if __name__ == "__main__":
    from cdlm.__main__ import main

    main()
"""
METHOD = """
import math

from cdlm.methods import METHODS, Method
from cdlm.objective import MAX_STEP, Bridge, Data, Objective, Term
from cdlm.objective.divergence import kl
from cdlm.objective.weight import unit
from cdlm.schedules import PAPER_STEPS


def broken(target, student, pair):
    return math.log(-1)


def mine(process, total=PAPER_STEPS):
    return Objective((Term("mine", MAX_STEP, Bridge(process), Data(), DIVERGENCE, unit),), total)


METHODS["mine"] = Method("Mine", mine, "masked")
"""
SAMPLER = """
from cdlm.sample.samplers import SAMPLERS, Sampler


def broken(predict, process, x, settings, rng, *, given=None, start=1.0, draw=None):
    raise ValueError("this sampler is broken")


SAMPLERS["plain"] = Sampler(broken, "one that fails", "masked", ("steps", "timesteps"))
"""
TRAIN = (
    "moons --methods mine --train-steps 1 --num-samples 8 --bins 4 --encoding digits --sampling-steps 1 --batch-size 4"
)


def test_an_error_in_a_divergence_of_the_user_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(METHOD.replace("DIVERGENCE", "broken") + MAIN)
    done = run("python", "mine.py", *TRAIN.split(), "--out", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "in broken\n    return math.log(-1)" in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("ValueError: ")


def test_an_error_in_a_sampler_of_the_user_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SAMPLER + MAIN)
    words = "sample mdlm --sampler plain --steps 1 --num-samples 1 --max-length 8 --device cpu"
    done = run("python", "mine.py", *words.split(), cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "in broken\n" in done.stderr
    assert done.stderr.endswith("ValueError: this sampler is broken\n")


def test_a_refusal_of_ours_that_a_user_s_code_provokes_says_where(tmp_path: Path) -> None:
    """The message alone would not say which line of the user's file is wrong."""
    method = METHOD.replace("Objective((", "Objective((Term('mine', MAX_STEP, Bridge(process), Data(), kl, unit), ")
    (tmp_path / "mine.py").write_text(method.replace("DIVERGENCE", "kl") + MAIN)
    done = run("python", "mine.py", *TRAIN.split(), "--out", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert 'mine.py", line' in done.stderr
    assert "in mine\n" in done.stderr
    assert "ValueError: each term draws its noise by its name" in done.stderr


def test_an_error_while_a_user_s_file_is_imported_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import math\n\nmath.log(-1)\n" + MAIN)
    done = run("python", "mine.py", "recipes", cwd=tmp_path)
    assert done.returncode == 1
    assert 'mine.py", line 3' in done.stderr


def test_user_code_beside_which_our_own_refusal_is_raised_does_not_matter(tmp_path: Path) -> None:
    """A user's file that only adds a row and calls `main` took no part in a wrong flag."""
    (tmp_path / "mine.py").write_text(METHOD.replace("DIVERGENCE", "kl") + MAIN)
    done = run("python", "mine.py", "moons", "--methods", "mcdlm:kapa=1", "--out", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("cdlm: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sample nowhere/at/all", "nowhere/at/all"),
        ("sample mdlm --input nowhere.txt", "nowhere.txt"),
        ("prepare nowhere.txt --out data", "nowhere.txt"),
        ("prepare latin.txt --seq-length 8 --out data", "latin.txt"),
        ("prepare text.txt --seq-length 8 --out text.txt/data", "text.txt"),
    ],
)
def test_refusals_and_missing_files_are_one_line(words: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Käse\n".encode("latin-1") * 20)
    (tmp_path / "text.txt").write_text(textwrap.fill("words and more words " * 50, 70))
    done = run("cdlm", *words.split(), cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("cdlm: ")


@pytest.mark.parametrize(
    "raised",
    [
        "torch.zeros(2).view(3)",
        "raise KeyError('a bug of ours')",
    ],
)
def test_bugs_of_ours_keep_their_traceback(raised: str, tmp_path: Path) -> None:
    """Errors of kinds that no refusal has: of torch, and Python's own."""
    fail = f"import torch\nimport cdlm.cli.main\n\n\ndef cli():\n    {raised}\n\n\ncdlm.cli.main.cli = cli\n"
    (tmp_path / "mine.py").write_text(fail + MAIN)
    done = run("python", "mine.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_value_out_of_range_is_an_error_of_usage(tmp_path: Path) -> None:
    done = run("cdlm", "sample", "mdlm", "--steps", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert "--steps must be between 1 and 1,000,000 (got 0)." in done.stderr
    assert "Traceback" not in done.stderr
