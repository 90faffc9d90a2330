"""The other tabs in a real browser, and the page itself: plots, moons, keyboard, phone, dark and light."""

import re
from typing import Any

import pytest

from .visits import choose, finished, keep, playwright, visit

pytestmark = pytest.mark.filterwarnings("default")


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
    page.focus("#tab-generate")
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
    for tab in ("generate", "results", "moons"):
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
