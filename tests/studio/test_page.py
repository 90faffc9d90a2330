"""Generating in a real browser: settings, scrubbing, infilling, regenerating, cancelling, errors."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

from cdlm.sample.settings import DEFAULTS, SPECS, choices

from ..writers import BPE, write_model
from .test_serve import get, studio
from .visits import choose, column, finished, keep, playwright, visit

pytestmark = pytest.mark.filterwarnings("default")


def test_two_models_generate_side_by_side_and_steps_can_be_scrubbed(page: Any) -> None:
    choose(page, 8)
    page.click("#generate")
    for number in (0, 1):
        finished(page, number)
        assert column(page, number).locator(".token").count() == 24
    keep(page, "generate")
    scrub = page.locator("#scrub")
    scrub.focus()
    scrub.press("Home")
    playwright.expect(column(page).locator(".token.mask")).to_have_count(24)
    scrub.press("ArrowRight")
    assert column(page).locator(".token.mask").count() < 24
    scrub.press("End")
    playwright.expect(column(page).locator(".token.mask")).to_have_count(0)


def test_a_request_has_the_settings_that_were_changed_and_no_others(page: Any) -> None:
    choose(page, 4)
    page.fill("#guidance", "0.5")
    page.fill("#top-p", "0.9")
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if "completions" in request.url else None)
    page.click("#generate")
    for number in (0, 1):
        finished(page, number)
    masked, uniform = sorted(bodies, key=lambda body: body["model"])
    common = {
        "prompt": "",
        "max_length": 24,
        "seed": 0,
        "stream": True,
        "stream_drafts": True,
        "steps": 4,
        "top_p": 0.9,
    }
    assert masked == {**common, "model": "Masked", "guidance": 0.5}
    assert uniform == {**common, "model": "Uniform"}  # which has no mask token


def test_each_model_follows_its_generation_config_until_a_control_is_changed(browser: Any, tmp_path: Path) -> None:
    few = {"steps": 4, "order": "dilated", "guidance": 0.25, "temperature": 0.8}
    own = [few, {"steps": 32, "temperature": 0.9}]
    first = write_model(tmp_path / "first", "masked", BPE, length=32, own=own)
    second = write_model(tmp_path / "second", "masked", BPE, length=32, own=[{"steps": 2, "top_p": 0.75}])
    with studio(first, second) as (url, _):
        get(f"{url}health")
        with visit(browser, url) as page:

            def shows(steps: str, *values: str) -> None:
                playwright.expect(page.locator("#steps-value")).to_have_text(steps)
                for name, value in zip(("order", "guidance", "temperature", "temperature-slider"), values, strict=True):
                    playwright.expect(page.locator(f"#{name}")).to_have_value(value)

            def summary(number: int) -> str:
                return str(column(page, number).get_by_test_id("summary").inner_text())

            shows("4", "dilated", "0.25", "0.8", "0.8")
            assert summary(0) == "4 steps, fp64, order dilated, temperature 0.8, guidance 0.25"
            assert summary(1) == "2 steps, fp64, top-p 0.75"
            choose(page, 8)
            shows("8", "dilated", "0.25", "0.8", "0.8")
            choose(page, 16)
            shows("16", "random", "0", "0.9", "0.9")
            page.fill("#temperature", "0.5")
            choose(page, 4)
            shows("4", "dilated", "0.25", "0.5", "0.5")
            with page.expect_request("**/v1/completions") as sent:
                page.click("#generate")
            finished(page)
            assert {"steps": 4, "temperature": 0.5}.items() <= sent.value.post_data_json.items()
            assert "order" not in sent.value.post_data_json
            page.click("[aria-label='Reset Temperature']")
            shows("4", "dilated", "0.25", "0.8", "0.8")
            page.click("#reset")
            playwright.expect(page.locator("#reset")).to_be_hidden()
            column(page).get_by_test_id("model").select_option("second")
            shows("2", "random", "0", "1", "1")


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
    page.fill("#temperature", "1000000")  # more than the slider has
    page.press("#temperature", "ArrowUp")
    assert (page.input_value("#temperature"), page.input_value("#temperature-slider")) == ("1000000", "2")


def test_the_form_has_every_setting_of_the_sampler(page: Any, address: str) -> None:
    page.click("#more summary")
    for name in SPECS:
        control = page.locator(f"#{name.replace('_', '-')}")
        assert control.count() == 1
        if choices(name):
            assert control.locator("option").all_inner_texts() == choices(name)
            assert control.input_value() == DEFAULTS[name]

    def extended(route: Any) -> None:
        description = get(f"{address}openapi.json")
        properties = description["components"]["schemas"]["SettingsRequest"]["properties"]
        properties["order"]["anyOf"][0]["enum"].append("from-the-right")
        properties["patience"] = {"anyOf": [{"type": "integer"}], "x-default": 3, "description": "A new setting."}
        route.fulfill(json=description)

    page.route("**/openapi.json", extended)
    page.reload()
    playwright.expect(page.locator("#order option", has_text="from-the-right")).to_have_count(1)
    playwright.expect(page.locator("#patience")).to_have_value("3")


def test_settings_that_do_not_apply_are_disabled_or_hidden(page: Any) -> None:
    page.click("#more summary")
    eta, steps, corrector = page.locator("#eta"), page.locator("#steps"), page.locator("#corrector")
    playwright.expect(eta).to_be_hidden()
    corrector.select_option("cap")
    playwright.expect(eta).to_be_visible()
    playwright.expect(page.locator("#order")).to_be_disabled()  # no sampler takes both
    corrector.select_option("none")
    playwright.expect(page.locator("#order")).to_be_enabled()
    page.select_option("#order", "first-hitting")
    playwright.expect(corrector).to_be_visible()  # the uniform model has no order
    playwright.expect(steps).to_be_enabled()
    page.uncheck("#two-columns")
    playwright.expect(corrector).to_be_hidden()
    playwright.expect(steps).to_be_disabled()
    page.select_option("#order", "margin")
    playwright.expect(steps).to_be_enabled()
    column(page).get_by_test_id("model").select_option("Uniform")
    playwright.expect(page.locator("#guidance")).to_be_disabled()
    assert "mask token" in page.locator(".field", has=page.locator("#guidance")).get_attribute("title")


def test_settings_that_contradict_each_other_are_explained_at_once(page: Any) -> None:
    choose(page, 8)
    page.click("#more summary")
    page.fill("#timesteps", "1,0.5,0")
    playwright.expect(page.locator("#settings-error")).to_contain_text("leave out steps")
    page.click("[aria-label='Reset Steps']")
    playwright.expect(page.locator("#settings-error")).to_be_empty()
    page.click("#generate")
    finished(page)
    assert "2 steps" in column(page).get_by_test_id("summary").inner_text()


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
    assert page.locator("#span-length").is_hidden()


@pytest.mark.parametrize("number", [0, 1])
def test_selected_tokens_are_regenerated(page: Any, number: int) -> None:
    choose(page, 4)
    page.click("#generate")
    finished(page, number)
    page.locator("#scrub").press("End")
    tokens = column(page, number).locator(".token")
    before = tokens.all_inner_texts()
    tokens.nth(3).click()
    tokens.nth(4).focus()
    page.keyboard.press("Enter")
    playwright.expect(column(page, number).locator(".token.selected")).to_have_count(2)
    keep(page, f"selected-{number}")
    column(page, number).get_by_test_id("regenerate").click()
    playwright.expect(column(page, number).locator(".token.selected")).to_have_count(0)
    finished(page, number)
    playwright.expect(column(page, number).locator(".token.given")).to_have_count(22)
    after = tokens.all_inner_texts()
    assert [a for k, a in enumerate(after) if k not in (3, 4)] == [b for k, b in enumerate(before) if k not in (3, 4)]


def test_an_autoregressive_model_says_what_it_cannot_do(browser: Any, tmp_path: Path) -> None:
    causal = write_model(tmp_path / "causal", "causal", BPE, length=32)
    with studio(causal) as (url, _), visit(browser, url) as page:
        page.fill("#prompt", "the ___ sat")
        page.click("#generate")
        playwright.expect(page.locator("#error")).to_contain_text("autoregressive model cannot fill blanks")
        choose(page, 4, prompt="the cat")
        page.click("#generate")
        finished(page)
        playwright.expect(column(page).locator(".token")).to_have_count(24)
        assert "".join(column(page).locator(".token.given").all_inner_texts()) == "the cat"
        playwright.expect(column(page).get_by_test_id("hint")).to_contain_text("cannot regenerate tokens")


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
    playwright.expect(page.locator("#status")).to_have_text("Finished.")


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
                alone = get(f"{address}v1/completions", {"model": name, "steps": 256, "max_length": 24, "seed": seed})
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
