"""Shared by all tests: shapes checked at run time, deterministic arithmetic, and the peers' fixtures."""

import importlib.util
from pathlib import Path

import pytest
import torch

import cdlm.sample.settings  # noqa: F401 (it checks its values itself; before the hook below does)

if importlib.util.find_spec("beartype") and not torch.cuda.is_available():  # torch.compile cannot trace the checks
    from jaxtyping import install_import_hook

    for package in ("cdlm.types", "cdlm.rng", "cdlm.process", "cdlm.objective", "cdlm.model", "cdlm.sample"):
        install_import_hook(package, "beartype.beartype")

PEERS = Path(__file__).parent / "fixtures" / "peers"

torch.set_flush_denormal(True)
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def peers() -> Path:
    """Numbers computed by the reference implementations of MDLM and DUO."""
    return PEERS
