"""The notebook is a valid one, without outputs, and its cells run in order in one namespace."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOOK = ROOT / "docs" / "quickstart.ipynb"
RUN = """\
import json, sys
import matplotlib
matplotlib.use("Agg")
space = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), space)
print("figures:", matplotlib.pyplot.get_fignums())
"""


@pytest.fixture(scope="module")
def cells() -> list[dict]:
    return json.loads(BOOK.read_text())["cells"]


def test_it_is_a_notebook(cells: list[dict]) -> None:
    book = json.loads(BOOK.read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        assert isinstance(cell["metadata"], dict)
        assert all(isinstance(line, str) for line in cell["source"])
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
        else:
            assert cell["cell_type"] == "markdown"


def test_its_cells_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(BOOK)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "figures: [1]" in done.stdout  # `show` starts a new one only with a window
    assert "░" in done.stdout
