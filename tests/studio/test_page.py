"""The page in a real browser: generate, scrub, infill, rewrite, cancel, errors, plots, moons, phone, dark and light.

It needs Playwright and a Chromium (Debian: apt-get install chromium); screenshots go to $CDLM_SCREENSHOTS if that is
set."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdlm.eval.grid import EvalConfig
from cdlm.eval.suite import evaluate

from ..eval.suites import QUIET
from ..writers import BPE, write_model
from .test_serve import get, studio

playwright = pytest.importorskip(
    "playwright.sync_api", reason="the page is tested with Playwright: pip install playwright"
)
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="the page is tested in Chromium: apt-get install chromium"),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("page")
    masked, uniform = (write_model(folder / kind, kind, BPE, length=32) for kind in ("masked", "uniform"))
    judge = write_model(folder / "causal", "causal", BPE, length=64)
    evaluate(
        EvalConfig((f"M={masked}", f"U={uniform}"), (str(judge),), num=3, steps=(2, 4), temperature=(1.0, 0.5),
                   device="cpu", out=folder / "results"), QUIET)  # fmt: skip
    with studio(f"Masked={masked}", f"Uniform={uniform}", "--results", folder / "results") as (url, _):
        get(f"{url}health")
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tool:
        found = tool.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A fresh page; whatever the browser complains about is a failure."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    found, complaints = context.new_page(), []
    found.set_default_timeout(15_000)
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    found.goto(address)
    playwright.expect(found.locator("#generate")).to_be_enabled()
    yield found
    context.close()
    assert [text for text in complaints if "422" not in text] == []


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


def test_two_models_write_side_by_side_and_steps_can_be_scrubbed(page: Any) -> None:
    choose(page, 8)
    page.click("#generate")
    for number in (0, 1):
        finished(page, number)
        assert column(page, number).locator(".token").count() == 24
    keep(page, "write")
    scrub = page.locator("#scrub")
    scrub.focus()
    scrub.press("Home")
    playwright.expect(column(page).locator(".token.mask")).to_have_count(24)
    scrub.press("ArrowRight")
    assert column(page).locator(".token.mask").count() < 24
    scrub.press("End")
    playwright.expect(column(page).locator(".token.mask")).to_have_count(0)


def test_what_the_page_asks_for_is_what_its_controls_say(page: Any) -> None:
    choose(page, 4)
    page.fill("#guidance", "0.5")
    page.fill("#top-p", "0.9")
    with page.expect_request("**/v1/completions") as sent:
        page.click("#generate")
    finished(page)
    asked = sent.value.post_data_json
    assert (asked["guidance"], asked["top_p"], asked["steps"], asked["order"]) == (0.5, 0.9, 4, "random")


def test_colours_change_at_once(page: Any) -> None:
    choose(page, 4)
    page.click("#generate")
    finished(page)

    def colours() -> list[str]:
        return page.eval_on_selector_all(
            "[data-testid=column-0] .token", "all => all.map(one => getComputedStyle(one).backgroundColor)"
        )

    before = colours()
    assert len(set(before)) > 1
    control = page.locator("#colour-by")
    if control.evaluate("one => one.tagName") == "SELECT":
        control.select_option(index=1)
    else:
        control.click()
    assert colours() != before


def test_blanks_are_filled(page: Any) -> None:
    choose(page, 4, prompt="the ___ sat on the mat")
    page.click("#generate")
    finished(page)
    text = column(page).get_by_test_id("text").inner_text()
    assert re.sub(r"\s+", " ", text).strip().startswith("the")
    assert text.rstrip().endswith("sat on the mat")


def test_marked_tokens_are_written_anew(page: Any) -> None:
    choose(page, 4)
    page.click("#generate")
    finished(page)
    tokens = column(page).locator(".token")
    before = tokens.all_inner_texts()
    tokens.nth(3).click()
    tokens.nth(4).focus()
    page.keyboard.press("Enter")
    playwright.expect(column(page).locator(".token.marked")).to_have_count(2)
    keep(page, "marked")
    column(page).get_by_test_id("rewrite").click()
    playwright.expect(column(page).locator(".token.marked")).to_have_count(0)
    finished(page)
    after = tokens.all_inner_texts()
    assert [a for k, a in enumerate(after) if k not in (3, 4)] == [b for k, b in enumerate(before) if k not in (3, 4)]


def test_cancelling_stops_the_work(page: Any, address: str) -> None:
    choose(page, 1024)
    page.click("#generate")
    playwright.expect(page.locator("#cancel")).to_be_enabled()
    page.click("#cancel")
    playwright.expect(page.locator("#generate")).to_be_enabled()
    for _ in range(50):
        if not get(f"{address}health")["running"]:
            break
        page.wait_for_timeout(100)
    assert get(f"{address}health")["running"] == 0


def test_errors_are_shown(page: Any) -> None:
    choose(page, 4, prompt="the cat sat on the mat. " * 40)
    page.click("#generate")
    playwright.expect(page.locator("#error")).to_contain_text("no room")
    keep(page, "error")
    choose(page, 4)
    page.click("#generate")
    finished(page)
    playwright.expect(page.locator("#error")).to_be_hidden()


def test_results_are_plotted_and_listed(page: Any) -> None:
    page.click("#tab-results")
    playwright.expect(page.locator("#frontier-plot svg, svg#frontier-plot").first).to_be_visible()
    assert page.locator("#results-table tbody tr").count() == 8
    keep(page, "results")


def test_moons_move(page: Any) -> None:
    page.click("#tab-moons")
    page.wait_for_timeout(800)

    def inked() -> int:
        return page.evaluate(
            """() => {
                const canvas = document.querySelector('#moons-canvas');
                const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
                const first = [data[0], data[1], data[2], data[3]].join();
                let count = 0;
                for (let i = 0; i < data.length; i += 4)
                    count += [data[i], data[i + 1], data[i + 2], data[i + 3]].join() !== first;
                return count;
            }"""
        )

    assert inked() > 500
    page.select_option("#moons-process", "uniform")
    page.wait_for_timeout(800)
    assert inked() > 500
    keep(page, "moons")


def test_tabs_by_keyboard(page: Any) -> None:
    page.focus("#tab-write")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-results"
    assert page.get_attribute("#tab-results", "aria-selected") == "true"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Any, address: str, scheme: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme=scheme, has_touch=True)
    page = context.new_page()
    page.goto(address)
    choose(page, 4)
    page.click("#generate")
    finished(page)
    for tab in ("write", "results", "moons"):
        page.click(f"#tab-{tab}")
        page.wait_for_timeout(400)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        keep(page, f"phone-{scheme}-{tab}")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)")
    assert (sum(light) > 380) == (scheme == "light")
    context.close()
