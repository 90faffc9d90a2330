"""Models that `cdlm sample` samples from, and its standard input."""

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from cdlm.cli.sample import SampleConfig, generate_samples
from cdlm.text.pipeline import Sample

from ..writers import write_model

QUICK = {"steps": 3, "max_length": 16, "device": "cpu"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A masked model of bytes, 32 tokens long."""
    return str(write_model(tmp_path_factory.mktemp("models") / "writer", "masked", length=32))


@pytest.fixture(scope="session")
def causal(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("models") / "ar", "causal", length=32))


@pytest.fixture(scope="session")
def ending(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One that writes nothing but the end of text."""
    return str(write_model(tmp_path_factory.mktemp("models") / "ending", "masked", favour=100.0, length=32))


@pytest.fixture
def write(folder: str) -> Callable[..., list[Sample]]:
    def run(**settings: Any) -> list[Sample]:
        return generate_samples(SampleConfig(**{"model": folder, **QUICK, **settings}), Console(width=160))

    return run


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return give
