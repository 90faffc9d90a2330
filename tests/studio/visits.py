"""A real browser, and what one does with the page.

It needs Playwright and a Chromium (Debian: apt-get install chromium); without them the tests of the page are skipped,
unless CDLM_BROWSER=required. Screenshots go to $CDLM_SCREENSHOTS if that is set."""

import contextlib
import importlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REQUIRED = os.environ.get("CDLM_BROWSER") == "required"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NONE = "the page is tested in Chromium: apt-get install chromium"
if not REQUIRED:
    pytest.importorskip("playwright", reason="the page is tested with Playwright: pip install playwright")
    if BROWSER is None:
        pytest.skip(NONE, allow_module_level=True)
playwright = importlib.import_module("playwright.sync_api")
playwright.expect.set_options(timeout=30_000)  # a busy machine is no failure


@contextlib.contextmanager
def visit(browser: Any, address: str, **how: Any) -> Iterator[Any]:
    """A fresh page; whatever the browser complains about is a failure."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **how})
    found, complaints = context.new_page(), []
    found.set_default_timeout(15_000)
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    found.goto(address)
    playwright.expect(found.locator("#generate")).to_be_enabled()
    yield found
    context.close()
    assert [text for text in complaints if "400" not in text] == []


def column(page: Any, number: int = 0) -> Any:
    return page.get_by_test_id(f"column-{number}")


def choose(page: Any, steps: int, length: int = 24, prompt: str = "") -> None:
    page.fill("#prompt", prompt)
    page.evaluate(
        """([steps, length]) => {
            const slider = document.querySelector('#steps');
            const exact = Math.round(Math.log2(steps));
            slider.value = exact;
            slider.dispatchEvent(new Event('input', {bubbles: true}));
            const box = document.querySelector('#length');
            box.value = length;
            box.dispatchEvent(new Event('input', {bubbles: true}));
            box.dispatchEvent(new Event('change', {bubbles: true}));
        }""",
        [steps, length],
    )


def finished(page: Any, number: int = 0) -> None:
    playwright.expect(column(page, number).get_by_test_id("stats")).to_contain_text(re.compile("entropy", re.I))
    playwright.expect(page.locator("#generate")).to_be_enabled()
    playwright.expect(column(page, number).locator(".token.mask")).to_have_count(0)


def keep(page: Any, name: str) -> None:
    if os.environ.get("CDLM_SCREENSHOTS"):
        folder = Path(os.environ["CDLM_SCREENSHOTS"])
        folder.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=folder / f"{name}.png")
