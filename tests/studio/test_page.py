"""Writing, in a real browser: generate, scrub, infill, rewrite, cancel, errors."""

import contextlib
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from cdlm.sample.settings import Sampling

from ..writers import BPE, write_model
from .test_serve import get, studio
from .visits import choose, column, finished, keep, playwright, visit

pytestmark = pytest.mark.filterwarnings("default")


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


def test_controls_begin_as_the_model_writes_best_and_follow_the_steps(browser: Any, tmp_path: Path) -> None:
    few = {"steps": 4, "order": "dilated", "guidance": 0.25, "temperature": 0.8}
    folder = write_model(tmp_path / "best", "masked", BPE, length=32, own=[few, {"steps": 32, "temperature": 0.9}])
    names = ("steps", "order", "guidance", "temperature", "temperature-slider")
    with studio(folder) as (url, _):
        get(f"{url}health")
        with visit(browser, url) as page:

            def says() -> list[str]:
                return [page.locator(f"#{name}").input_value() for name in names]

            assert says() == ["2", "dilated", "0.25", "0.8", "0.8"]
            choose(page, 8)
            assert says() == ["3", "dilated", "0.25", "0.8", "0.8"]
            choose(page, 16)
            assert says() == ["4", "random", "0", "0.9", "0.9"]
            page.fill("#temperature", "0.5")  # from now on they are the visitor's
            choose(page, 4)
            assert says() == ["2", "random", "0", "0.5", "0.5"]
            with page.expect_request("**/v1/completions") as sent:
                page.click("#generate")
            finished(page)
            assert sent.value.post_data_json["temperature"] == 0.5


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
