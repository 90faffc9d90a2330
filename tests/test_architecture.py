"""The architecture: which package imports which, how the top level looks, and what starts without torch."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cdlm.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cdlm"

STARTED = """\
import contextlib, io, sys
from cdlm.__main__ import main
out = io.StringIO()
sys.argv = ["cdlm", *sys.argv[1:]]
try:
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        main()
    status = 0
except SystemExit as end:
    status = end.code or 0
heavy = [name for name in ("torch", "numpy", "jaxtyping") if name in sys.modules]
print(status, len(out.getvalue()), *heavy)
"""


def started(*words: str) -> tuple[int, int, list[str]]:
    """The exit status of a command, how much it prints, and which heavy libraries it has imported."""
    done = subprocess.run([sys.executable, "-c", STARTED, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    status, printed, *heavy = done.stdout.split()
    return int(status), int(printed), heavy


def test_packages_import_downwards_and_without_cycles() -> None:
    """The contracts of pyproject.toml; imports inside functions count."""
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


def test_the_contract_notices_an_upward_import(tmp_path: Path) -> None:
    """Without this, a contract that checks nothing would pass as well."""
    subprocess.run(["cp", "-r", str(PACKAGE), str(ROOT / "pyproject.toml"), str(tmp_path)], check=True)
    (tmp_path / "cdlm" / "process" / "upward.py").write_text(
        "def f():\n    from cdlm.sample import plan\n    return plan\n"
    )
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [linter, "--no-logo", "--no-cache"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "cdlm.process.upward -> cdlm.sample.plan" in done.stdout


def test_the_top_level_is_small() -> None:
    modules = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert len(modules) <= 10, modules


def test_code_asks_what_a_process_can_do_and_not_what_it_is_called() -> None:
    compared = re.compile(r"process\.name\s*(==|!=|in\b)")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "process"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if compared.search(line)
    ]
    assert not found


@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_no_torch(command: str) -> None:
    status, printed, heavy = started(command, "--help")
    assert (status, heavy) == (0, [])
    assert printed > 200


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--help"], 0),
        (["--version"], 0),
        ([], 2),
        (["mooons"], 2),
        (["recipes"], 0),
        (["train", "tiny-mcdlm", "--help"], 0),
        (["train", "tiny-mcdl"], 2),
        (["train", "tiny-mcdlm", "--tyro-print-completion", "bash"], 0),
        (["sample", "--tyro-print-completion", "zsh"], 0),
        (["eval", "--tyro-print-completion", "bash"], 0),
    ],
)
def test_what_computes_nothing_needs_no_torch(words: list[str], expected: int) -> None:
    status, printed, heavy = started(*words)
    assert (status, heavy) == (expected, [])
    assert printed


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, cdlm; print(cdlm.__version__, *(m for m in ('torch', 'numpy', 'jaxtyping') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[1:] == [], done.stderr
