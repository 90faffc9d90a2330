"""A sampler and a coupling that somebody wrote from the pages alone: scratch files beside their tests still work."""

import shutil
from pathlib import Path

import pytest

from ..zygote import run

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["my_sampler", "my_coupling"])
def test_scratch_files_pass_their_own_tests(name: str, tmp_path: Path) -> None:
    shutil.copy(HERE / f"{name}.py", tmp_path)
    shutil.copy(HERE / f"check_{name}.py", tmp_path / f"test_{name}.py")
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"test_{name}.py"]
    done = run("python", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_the_sampler_is_known_to_the_command_line(tmp_path: Path) -> None:
    shutil.copy(HERE / "my_sampler.py", tmp_path)
    flags = ["--sampler", "refine", "--steps", "8", "--num-samples", "1", "--max-length", "16", "--device", "cpu"]
    done = run("python", "my_sampler.py", "sample", "mdlm", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--sampler refine" in done.stdout
    refused = run("python", "my_sampler.py", "sample", "mdlm", *flags, "--order", "dilated", cwd=tmp_path)
    assert refused.returncode == 1
    assert "--order dilated" in refused.stderr
    assert "refine" in refused.stderr
