"""What an editor and a type checker know of a pipeline, and that it is what the pipeline does."""

import subprocess
import sys
import tomllib
import types
import typing
from pathlib import Path
from typing import Literal, get_args, get_origin

import cdlm
from cdlm.sample.settings import SPECS, TYPES, SettingValues

ROOT = Path(__file__).parents[2]
CONFIG = """\
[mypy]
strict = True
mypy_path = {root}
follow_imports = silent
disable_error_code = name-defined, syntax, valid-type, import-not-found, import-untyped
[mypy-torch.*,numpy.*,rich.*,jaxtyping.*,tokenizers.*,cdlm.data.*,cdlm.hub,cdlm.metrics.*,cdlm.model.*,cdlm.process.*]
follow_imports = skip
"""
"""What the signatures do not speak of is left out, since to check it takes long."""
SCRIPT = """\
import cdlm

pipe = cdlm.load("mdlm", device="cpu")
found = pipe.nelbo(["a text", "another"], likelihood_samples=8)
reveal_type(found.bits_per_byte)
reveal_type(found.per_text[0].standard_error)
reveal_type(pipe.score("a ___", ["b"])[0].log_likelihood)
reveal_type(pipe.mask_token_id)
reveal_type(pipe.sample(steps=8, temperature=0.8)[0].text)
pipe.sample(step=8)
pipe.infill("a ___", corrector="caps")
pipe.nelbo(3)
pipe.score("a ___", [1])
cdlm.load(device="gpu")
"""


def test_a_type_checker_knows_the_pipeline(tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text(CONFIG.format(root=ROOT))
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", ".cache", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    lines = [line.split(": ", 2) for line in done.stdout.splitlines() if line.startswith("script.py")]
    notes = [text for _, kind, text in lines if kind == "note" and "Revealed" in text]
    assert [note.split('"')[1].replace("builtins.", "") for note in notes] == [
        "float", "float", "float", "int | None", "str",
    ], done.stdout  # fmt: skip
    errors = {int(where.split(":")[1]) for where, kind, _ in lines if kind == "error"}
    assert errors == {10, 11, 12, 13, 14}, done.stdout


def test_the_package_says_that_it_is_typed() -> None:
    """The marker lies in the package, all of which is in the wheel."""
    assert (Path(cdlm.__file__).parent / "py.typed").is_file()
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert build == {"packages": ["cdlm"]}


def test_the_types_of_settings_are_those_of_the_schema() -> None:
    hints = typing.get_type_hints(SettingValues)
    assert list(hints) == list(SPECS)
    for name, hint in hints.items():
        assert get_origin(hint) is types.UnionType or type(None) in get_args(hint)
        (kind,) = (part for part in get_args(hint) if part is not type(None))
        if SPECS[name].choices:
            assert get_origin(kind) is Literal
            assert get_args(kind) == tuple(SPECS[name].choices)
        else:
            assert kind is TYPES[name]
