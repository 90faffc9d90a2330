"""The tab "Sudoku" in a real browser: steps, conflicts, a puzzle that is typed, keyboard and phone."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from cdlm.data.sudoku import digits_tokenizer

from ..writers import write_model
from .visits import keep, playwright, visit

pytestmark = pytest.mark.filterwarnings("default")
expect = playwright.expect


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from .test_serve import studio

    model = write_model(tmp_path_factory.mktemp("page") / "untrained", "masked", digits_tokenizer(9), length=81)
    with studio(model) as (url, _):
        yield url


def opened(page: Any) -> Any:
    """The tab, with its first grids there."""
    page.emulate_media(reduced_motion="reduce")  # it goes to the last step at once
    page.click("#tab-sudoku")
    expect(page.locator("#sudoku-generate")).to_be_enabled()
    expect(board(page).locator("td.drawn")).to_have_count(16)
    return page


def board(page: Any, number: int = 0) -> Any:
    return page.get_by_test_id(f"sudoku-column-{number}").get_by_test_id("board")


def generate(page: Any) -> list[dict[str, Any]]:
    """Generate, and what the server responds for each column."""
    responses = []
    page.on("response", lambda response: responses.append(response) if response.url.endswith("/v1/sudoku") else None)
    page.click("#sudoku-generate")
    expect(page.locator("#sudoku-generate")).to_be_enabled()
    bodies = {response.request.post_data: response.json() for response in responses}
    return [bodies[key] for key in sorted(bodies, key=lambda text: '"order":"grid"' in text)]


def test_grids_fill_in_along_the_slider_with_conflicts_marked(page: Any) -> None:
    opened(page)
    page.select_option("#sudoku-size", "6")
    for number, found in enumerate(generate(page)):
        column = page.get_by_test_id(f"sudoku-column-{number}")
        buttons = column.get_by_test_id("samples").locator("button")
        expect(buttons).to_have_count(len(found["grids"]))
        for grid in found["grids"][:1]:
            buttons.nth(grid["index"]).click()
            page.locator("#sudoku-scrub").press("Home")
            for step, (state, conflicts) in enumerate(zip(grid["states"], grid["conflicts"], strict=True)):
                expect(page.locator("#sudoku-value")).to_have_text(f"step {step} of 8")
                cells = board(page, number).locator("td")
                assert cells.all_inner_texts() == ["" if symbol == "." else symbol for symbol in state]
                marked = cells.evaluate_all("cells => cells.map((cell) => cell.classList.contains('conflict'))")
                assert [cell for cell, mark in enumerate(marked) if mark] == conflicts
                page.locator("#sudoku-scrub").press("ArrowRight")
        verdict = f"Valid {found['valid']} of 8, distinct {found['distinct']}"
        expect(column.get_by_test_id("verdict")).to_contain_text(verdict)
    keep(page, "sudoku")


def test_a_puzzle_is_typed_and_kept(page: Any) -> None:
    opened(page)
    cells = page.locator("#sudoku-puzzle input")
    cells.first.click()
    for key in ("1", "ArrowRight", "9", "3", "ArrowDown", "4", "ArrowLeft", "ArrowLeft", "x"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Row 2, column 1"
    assert cells.evaluate_all("inputs => inputs.map((i) => i.value)") == ["1", "3", "", "", "", "4", *[""] * 10]
    assert all(found["puzzle"] == "13...4.........." for found in generate(page))
    for number in (0, 1):
        assert board(page, number).locator("td.given").all_inner_texts() == ["1", "3", "4"]
    cells.nth(4).fill("1")
    page.click("#sudoku-generate")
    expect(page.locator("#error")).to_contain_text("puzzle has the digit 1 twice in column 1")
    page.click("#sudoku-clear")
    assert all(found["puzzle"] is None for found in generate(page))
    expect(page.locator("#error")).to_be_hidden()


def test_settings_of_a_column_are_its_own(page: Any) -> None:
    opened(page)
    page.fill("#sudoku-steps-0", "2")
    page.uncheck("#sudoku-two")
    (found,) = generate(page)
    assert found["summary"].startswith("2 steps")
    expect(page.locator("#sudoku-value")).to_have_text("step 2 of 2")
    expect(page.get_by_test_id("sudoku-column-1")).to_be_hidden()
    page.fill("#sudoku-steps-0", "0")
    page.click("#sudoku-generate")
    expect(page.locator("#error")).to_contain_text(re.compile("steps.*greater than or equal to 1"))


def test_on_a_phone(browser: Any, address: str) -> None:
    with visit(browser, address, viewport={"width": 375, "height": 812}, has_touch=True) as page:
        opened(page)
        for size in ("4", "6"):
            page.select_option("#sudoku-size", size)
            generate(page)
            assert page.evaluate("document.documentElement.scrollWidth") <= 375
            keep(page, f"phone-sudoku-{size}")
