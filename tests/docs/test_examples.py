"""The complete programs in docs/examples."""

import math
import re
from pathlib import Path

import pytest

from ..zygote import run

OWN_NETWORK = Path(__file__).parents[2] / "docs" / "examples" / "own_network.py"


def own_network(cwd: Path, *steps: str) -> float:
    """Run the example; returns the NELBO that it prints."""
    done = run("python", str(OWN_NETWORK), *steps, cwd=cwd)
    assert done.returncode == 0, done.stderr
    found = re.search(r"^([\d.]+) \+- [\d.]+ nats per held-out token$", done.stdout, re.M)
    assert found, done.stdout
    assert len(re.findall(r"nats: the cat", done.stdout)) == 2
    return float(found[1])


def test_own_network_runs_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = own_network(tmp_path, "12")
    assert 0 < first < math.log(300)
    assert own_network(tmp_path, "12") == first


@pytest.mark.soak
def test_own_network_learns_the_language(tmp_path: Path) -> None:
    assert own_network(tmp_path) < 1
