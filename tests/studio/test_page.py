"""The page in a real browser: generate, scrub, infill, rewrite, cancel, errors, plots, moons, phone, dark and light.

It needs Playwright and a Chromium (Debian: apt-get install chromium); without them these tests are skipped, unless
CDLM_BROWSER=required. Screenshots go to $CDLM_SCREENSHOTS if that is set."""

import contextlib
import importlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from cdlm.eval.grid import EvalConfig
from cdlm.eval.suite import evaluate
from cdlm.sample import Sampling

from ..eval.suites import QUIET
from ..writers import BPE, write_model
from .test_serve import get, studio

REQUIRED = os.environ.get("CDLM_BROWSER") == "required"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NONE = "the page is tested in Chromium: apt-get install chromium"
if not REQUIRED:
    pytest.importorskip("playwright", reason="the page is tested with Playwright: pip install playwright")
    if BROWSER is None:
        pytest.skip(NONE, allow_module_level=True)
playwright = importlib.import_module("playwright.sync_api")
pytestmark = pytest.mark.filterwarnings("default")


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
    assert BROWSER, NONE
    with playwright.sync_playwright() as tool:
        found = tool.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


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
    assert [text for text in complaints if "422" not in text] == []


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    with visit(browser, address) as found:
        yield found


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


@pytest.mark.parametrize(("name", "typed", "nearest", "step"), [
    ("temperature", "0.83", "0.85", 0.05), ("top-p", "0.62", "0.6", 0.05), ("seed", "41", "41", 1),
])  # fmt: skip
def test_a_slider_and_its_box_say_the_same(page: Any, name: str, typed: str, nearest: str, step: float) -> None:
    box, slider = page.locator(f"#{name}"), page.locator(f"#{name}-slider")
    box.fill(typed)
    assert slider.input_value() == nearest
    box.press("ArrowUp")
    assert float(box.input_value()) == pytest.approx(float(typed) + step)
    box.press("ArrowDown")
    assert box.input_value() == typed
    slider.press("ArrowLeft")
    assert float(box.input_value()) == pytest.approx(float(nearest) - step)
    slider.press("Home")
    least = box.input_value()
    assert float(least) == (0 if name == "seed" else 0.05)
    box.fill("")  # while it is typed anew, the slider waits
    assert slider.input_value() == least


def test_the_dice_and_the_ends_of_a_box(page: Any) -> None:
    page.fill("#seed", "7")
    page.click("#dice")
    assert page.input_value("#seed") != "7"
    assert float(page.input_value("#seed-slider")) == min(99, float(page.input_value("#seed")))
    page.fill("#temperature", "100")  # more than the slider has
    page.press("#temperature", "ArrowUp")
    assert (page.input_value("#temperature"), page.input_value("#temperature-slider")) == ("100", "2")


def test_the_menus_are_those_of_the_sampler(page: Any, address: str) -> None:
    hints = get_type_hints(Sampling)
    for name in ("order", "tail"):
        assert page.locator(f"#{name} option").all_inner_texts() == list(get_args(hints[name]))
        assert page.input_value(f"#{name}") == getattr(Sampling(), name)

    def extended(route: Any) -> None:
        description = get(f"{address}openapi.json")
        description["components"]["schemas"]["Completion"]["properties"]["order"]["enum"].append("from-the-right")
        route.fulfill(json=description)

    page.route("**/openapi.json", extended)
    page.reload()
    page.select_option("#order", "from-the-right")
    with page.expect_request("**/v1/completions") as sent:
        page.click("#generate")
    assert sent.value.post_data_json["order"] == "from-the-right"
    playwright.expect(page.locator("#error")).to_contain_text("order")


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


def test_blanks_are_filled_by_masked_and_uniform_models(page: Any) -> None:
    choose(page, 4, prompt="the ___ sat on the mat")
    page.click("#generate")
    for number in (0, 1):
        finished(page, number)
        text = column(page, number).get_by_test_id("text").inner_text()
        assert re.sub(r"\s+", " ", text).strip().startswith("the")
        assert text.rstrip().endswith("sat on the mat")
        given = column(page, number).locator(".token.given").all_inner_texts()
        assert "".join(given).split() == ["the", "sat", "on", "the", "mat"]
    assert page.locator("#length").is_hidden()
    page.fill("#prompt", "")
    assert page.locator("#length").is_visible()
    assert page.locator("#width").is_hidden()


@pytest.mark.parametrize("number", [0, 1])
def test_marked_tokens_are_written_anew(page: Any, number: int) -> None:
    choose(page, 4)
    page.click("#generate")
    finished(page, number)
    page.locator("#scrub").press("End")
    tokens = column(page, number).locator(".token")
    before = tokens.all_inner_texts()
    tokens.nth(3).click()
    tokens.nth(4).focus()
    page.keyboard.press("Enter")
    playwright.expect(column(page, number).locator(".token.marked")).to_have_count(2)
    keep(page, f"marked-{number}")
    column(page, number).get_by_test_id("rewrite").click()
    playwright.expect(column(page, number).locator(".token.marked")).to_have_count(0)
    finished(page, number)
    playwright.expect(column(page, number).locator(".token.given")).to_have_count(22)
    after = tokens.all_inner_texts()
    assert [a for k, a in enumerate(after) if k not in (3, 4)] == [b for k, b in enumerate(before) if k not in (3, 4)]


def test_a_model_from_left_to_right_says_what_it_cannot_do(browser: Any, tmp_path: Path) -> None:
    causal = write_model(tmp_path / "causal", "causal", BPE, length=32)
    with studio(causal) as (url, _), visit(browser, url) as page:
        page.fill("#prompt", "the ___ sat")
        page.click("#generate")
        playwright.expect(page.locator("#error")).to_contain_text("from left to right cannot fill in blanks")
        choose(page, 4, prompt="the cat")
        page.click("#generate")
        finished(page)
        playwright.expect(column(page).locator(".token")).to_have_count(24)
        assert "".join(column(page).locator(".token.given").all_inner_texts()) == "the cat"
        playwright.expect(column(page).get_by_test_id("hint")).to_contain_text("No marking here")


def test_arrows_go_from_token_to_token(page: Any) -> None:
    choose(page, 4)
    page.click("#generate")
    finished(page)
    page.locator("#scrub").press("End")

    def at() -> int:
        return int(page.evaluate("document.activeElement.dataset.position"))

    column(page).locator(".token").first.focus()
    for key, place in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 23), ("Home", 0)):
        page.keyboard.press(key)
        assert at() == place
    page.keyboard.press("ArrowLeft")  # nothing is before the first
    assert at() == 0
    assert page.locator("#scrub-value").inner_text() == "step 4 of 4"  # these arrows move no step
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#scrub-value").inner_text() == "step 3 of 4"


def test_cancelling_stops_the_work_and_says_so(page: Any, address: str) -> None:
    choose(page, 1024)
    page.click("#generate")
    playwright.expect(column(page, 1)).to_have_attribute("data-state", "running")
    page.click("#cancel")
    playwright.expect(page.locator("#generate")).to_be_enabled()
    playwright.expect(column(page, 1).get_by_test_id("state")).to_have_text("cancelled")
    playwright.expect(page.locator("#status")).to_have_text("Cancelled.")
    playwright.expect(page.locator("#cancel")).to_be_disabled()
    assert page.locator("#error").is_hidden()
    for _ in range(50):
        if not get(f"{address}health")["running"]:
            break
        page.wait_for_timeout(100)
    assert get(f"{address}health")["running"] == 0
    choose(page, 4)
    page.click("#generate")
    for number in (0, 1):
        finished(page, number)
        playwright.expect(column(page, number)).to_have_attribute("data-state", "done")
        assert column(page, number).locator(".token").count() == 24
    playwright.expect(page.locator("#status")).to_have_text("The text is finished.")


def test_two_visitors_at_once(browser: Any, address: str) -> None:
    with contextlib.ExitStack() as stack:
        pages = [stack.enter_context(visit(browser, address, reduced_motion="reduce")) for _ in range(2)]
        for seed, page in enumerate(pages):
            choose(page, 256)
            page.fill("#seed", str(seed))
            page.click("#generate")
        for page in pages:
            playwright.expect(column(page, 1)).to_have_attribute("data-state", "running")
        assert column(pages[0], 1).get_attribute("data-state") == "running"  # still, beside the other
        assert get(f"{address}health")["running"] >= 2
        for seed, page in enumerate(pages):
            for number, name in enumerate(("Masked", "Uniform")):
                playwright.expect(column(page, number)).to_have_attribute("data-state", "done", timeout=60_000)
                alone = get(f"{address}v1/completions", {"model": name, "steps": 256, "max_tokens": 24, "seed": seed})
                pieces = column(page, number).locator(".token")
                assert pieces.evaluate_all("all => all.map(one => one.textContent)") == alone["choices"][0]["pieces"]


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


@pytest.mark.parametrize("plot", ["#frontier-plot", "#steps-plot"])
def test_a_point_of_a_plot_tells_its_values(page: Any, plot: str) -> None:
    page.click("#tab-results")
    marks, tip = page.locator(f"{plot} .mark"), page.locator(f"{plot} .tip")
    playwright.expect(marks.first).to_be_visible()
    assert tip.is_hidden()
    marks.first.hover()
    playwright.expect(tip).to_be_visible()
    found = tip.locator("div").nth(1).inner_text().removeprefix("perplexity ")
    assert found in page.locator("#results-table td:nth-child(4)").all_inner_texts()
    keep(page, f"tip-{plot[1:]}")
    page.mouse.move(0, 0)
    playwright.expect(tip).to_be_hidden()
    marks.first.focus()
    assert marks.first.get_attribute("aria-label") == words(tip)
    page.keyboard.press("ArrowRight")
    assert marks.nth(1).get_attribute("aria-label") == words(tip)
    page.keyboard.press("Escape")
    playwright.expect(tip).to_be_hidden()


def words(tip: Any) -> str:
    return ", ".join(tip.locator("div").all_inner_texts())


def test_models_and_steps_can_be_left_out_of_the_plots(page: Any) -> None:
    page.click("#tab-results")
    frontier, button = page.locator("#frontier-plot .mark"), page.get_by_test_id("series-M")
    playwright.expect(frontier).to_have_count(4)
    page.select_option("#results-steps", "all")
    playwright.expect(frontier).to_have_count(8)
    button.click()
    playwright.expect(frontier).to_have_count(4)
    playwright.expect(page.locator("#steps-plot .mark")).to_have_count(2)
    assert set(page.locator("#results-table tbody td:first-child").all_inner_texts()) == {"U"}
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    playwright.expect(frontier).to_have_count(8)


MOVED = """() => {
    const canvas = document.querySelector('#moons-canvas');
    const now = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    const before = window.before ?? now;
    window.before = now;
    let count = 0;
    for (let i = 0; i < now.length; i += 4) count += [0, 1, 2, 3].some((k) => now[i + k] !== before[i + k]);
    return count;
}"""
"""How many pixels have changed since it was last asked."""


@pytest.mark.parametrize("process", ["masked", "uniform"])
def test_moons_move(browser: Any, address: str, process: str) -> None:
    with visit(browser, address) as page:
        page.click("#tab-moons")
        page.select_option("#moons-process", process)
        playwright.expect(page.locator("#moons-value")).to_have_text(re.compile("step [1-9]"), timeout=15_000)
        page.evaluate(MOVED)
        page.wait_for_timeout(300)  # it plays by itself
        assert page.evaluate(MOVED) > 100
        scrub, shares = page.locator("#moons-scrub"), []
        scrub.press("Home")
        page.evaluate(MOVED)
        for step in range(1, 11):
            scrub.press("ArrowRight")
            playwright.expect(page.locator("#moons-value")).to_have_text(f"step {step} of 10")
            assert page.evaluate(MOVED) > 100
            assert page.evaluate(MOVED) == 0  # and between two steps they stand still
            shares.append(int(page.locator("#moons-share").inner_text().split()[0]))
        assert shares[-1] > 80
        if process == "uniform":
            assert shares[0] < shares[-1] - 30
        keep(page, f"moons-{process}")


def test_the_theme_can_be_switched_and_is_remembered(browser: Any, address: str) -> None:
    def light(page: Any) -> bool:
        return sum(page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")) > 380

    for scheme in ("light", "dark"):
        with visit(browser, address, color_scheme=scheme) as page:
            assert light(page) == (scheme == "light")
            page.click("#theme")
            assert light(page) == (scheme == "dark")
            page.reload()
            assert light(page) == (scheme == "dark")
            page.click("#theme")
            assert light(page) == (scheme == "light")


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


def test_on_a_phone_an_error_is_in_sight(browser: Any, address: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 600}, has_touch=True)
    page = context.new_page()
    page.goto(address)
    choose(page, 4)
    page.click("#generate")
    finished(page)
    choose(page, 4, prompt="the cat sat on the mat. " * 20)
    page.click("#generate")
    playwright.expect(page.locator("#error")).to_contain_text("no room")
    playwright.expect(page.locator("#error")).to_be_in_viewport()
    context.close()
