"""A studio and a browser for the tests of the page, one file at a time: a browser keeps a loop of events running."""

from collections.abc import Iterator
from typing import Any

import pytest

from cdlm.eval.config import EvalConfig
from cdlm.eval.sweep import evaluate

from ..eval.suites import QUIET
from ..writers import BPE, write_model


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from .test_serve import get, studio

    folder = tmp_path_factory.mktemp("page")
    masked, uniform = (write_model(folder / kind, kind, BPE, length=32) for kind in ("masked", "uniform"))
    judge = write_model(folder / "causal", "causal", BPE, length=64)
    evaluate(
        EvalConfig(models=(f"M={masked}", f"U={uniform}"), judge=(str(judge),), num_samples=3, steps=(2, 4),
                   temperature=(1.0, 0.5), device="cpu", out=folder / "results"), QUIET)  # fmt: skip
    with studio(f"Masked={masked}", f"Uniform={uniform}", "--results", folder / "results") as (url, _):
        get(f"{url}health")
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from .visits import BROWSER, NONE, playwright

    assert BROWSER, NONE
    with playwright.sync_playwright() as tool:
        found = tool.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    from .visits import visit

    with visit(browser, address) as found:
        yield found
