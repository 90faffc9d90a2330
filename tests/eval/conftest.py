"""Two tiny models, two tiny judges and two files of text."""

from pathlib import Path

import pytest

from ..writers import write_model
from .suites import LENGTH


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    for kind in ("masked", "uniform"):
        write_model(folder / kind, kind, length=LENGTH)
    for name, favour in (("judge", 0.0), ("other", 1.0)):
        write_model(folder / name, "causal", favour=favour, length=256)
    for name in ("one", "two"):
        (folder / f"{name}.txt").write_text("\n<|endoftext|>\n".join(f"text {name} {k} " * 3 for k in range(40)))
    return folder


@pytest.fixture
def compared() -> None:
    """BLEU and MAUVE need their libraries."""
    pytest.importorskip("sacrebleu")
    pytest.importorskip("sklearn")
