"""A sample as an animated picture: at every step it shows the state of the sampler, and a browser agrees."""

import os
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cdlm.cli.sample import SampleConfig, generate_samples
from cdlm.text.animation import COLUMNS, animation, layout
from cdlm.text.pipeline import Pipeline
from cdlm.text.template import Template

from ..writers import BPE, Kind, small, write_model

SVG = "{http://www.w3.org/2000/svg}"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def drawn(model: Pipeline, template: Template) -> tuple[str, list[list[int]]]:
    settings = model.resolve({} if model.denoiser.process is None else {"steps": 5})
    states = [frame.token_ids[0] for frame in model.frames([template], settings, seed=3)]
    return animation(model, template, states, "a <caption>"), states


def seen(picture: str, step: int) -> list[tuple[float, float, str]]:
    """The texts that are visible at a step, with their places, by the names of their groups."""
    found = []
    for group in ElementTree.fromstring(picture).iter(f"{SVG}g"):
        name = re.match(r"k(\d+)(?:-(\d+))?", group.attrib["class"])
        assert name is not None
        if int(name[1]) <= step and (name[2] is None or step < int(name[2])):
            texts = [
                (float(one.attrib["y"]), float(one.attrib["x"]), one.text or "") for one in group.iter(f"{SVG}text")
            ]
            found += [text for text in texts if not text[2].startswith("step ")]
    return sorted(found)


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def test_a_masked_sample_shows_at_every_step_what_was_drawn_by_then() -> None:
    model = small("masked", "bpe")
    template = model.continuations(["the cat"], max_length=24)[0]
    picture, states = drawn(model, template)
    for step, ids in enumerate(states):
        known = [one for one in ids if one < model.tokenizer.vocab_size]
        pieces = model.tokenizer.pieces(known)
        text = "".join(
            "∎" if one == model.tokenizer.eos else piece or "" for one, piece in zip(known, pieces, strict=True)
        )
        shown = "".join(text for _, _, text in seen(picture, step))
        letters = "".join(letter for letter in squeezed(text) if letter.isprintable() and letter != "\ufffd")
        assert [one for one in squeezed(shown) if one != "\ufffd"] == list(letters)
    assert states[0] != states[-1]


@pytest.mark.parametrize("kind", ["uniform", "causal"])
def test_other_models_end_in_their_text_and_begin_in_another(kind: Kind) -> None:
    model = small(kind, "bpe")
    picture, states = drawn(model, model.continuations(["the cat"], max_length=16)[0])
    last = len(states) - 1
    first, final = (squeezed("".join(text for _, _, text in seen(picture, step))) for step in (0, last))
    assert first != final
    assert squeezed("the cat") in final
    assert f"step {last} of {last}" in picture


def test_given_words_are_not_coloured_and_hidden_ones_have_boxes() -> None:
    model = small("masked", "bpe")
    picture, _ = drawn(model, model.infillings(["the cat ___ the mat."])[0])
    groups = ElementTree.fromstring(picture).iter(f"{SVG}g")
    whole = [group for group in groups if group.attrib["class"] == "k0"]
    assert whole
    assert all(group.find(f"{SVG}path") is None for group in whole)
    assert 'class="blank"' in picture
    assert 'class="when"' in picture


@given(st.lists(st.text("ab \n", max_size=6), max_size=40), st.integers(3, 12))
def test_lines_hold_all_letters_in_order_within_their_columns(pieces: list[str], columns: int) -> None:
    segments = layout(pieces, columns)
    assert squeezed("".join(one.text for one in segments)) == squeezed("".join(pieces))
    assert [(one.row, one.column) for one in segments] == sorted((one.row, one.column) for one in segments)
    assert all(one.column + len(one.text) <= columns for one in segments)
    rows = [[one for one in segments if one.row == row] for row in range(1 + max((o.row for o in segments), default=0))]
    lines = ["".join(one.text for one in row) for row in rows]
    words = "".join(pieces).split()
    if all(len(word) <= columns for word in words):
        assert [word for line in lines for word in line.split()] == words


def test_characters_that_xml_does_not_allow_are_replaced() -> None:
    model = small("masked")
    template = model.continuations(["a"], max_length=8)[0]
    picture = animation(model, template, [[97, 0, 60, 38, 10, 9, 127, 256]], "")
    assert ElementTree.fromstring(picture).attrib["aria-label"].startswith("a\ufffd<&")


def test_the_command_draws_the_first_text_and_refuses_to_overwrite(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "masked", BPE, length=32)
    path = tmp_path / "text.svg"
    config = SampleConfig(model=str(folder), num_samples=2, steps=3, animate=path, device="cpu")
    first = generate_samples(config, Console(width=160))[0]
    plain = generate_samples(SampleConfig(model=str(folder), num_samples=2, steps=3, device="cpu"), Console(width=160))[
        0
    ]
    assert first.text == plain.text
    assert "model, 3 steps" in path.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"text\.svg exists"):
        SampleConfig(model=str(folder), animate=path)
    with pytest.raises(ValueError, match=r"--animate writes SVG.*text\.svg"):
        SampleConfig(model=str(folder), animate=tmp_path / "text.gif")
    with pytest.raises(ValueError, match="mkdir -p"):
        SampleConfig(model=str(folder), animate=tmp_path / "none" / "text.svg")


@pytest.mark.skipif(
    BROWSER is None and os.environ.get("CDLM_BROWSER") != "required",
    reason="the picture is looked at in Chromium: apt-get install chromium",
)
def test_a_browser_shows_each_step_in_its_time() -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    model = small("masked", "bpe")
    picture, states = drawn(model, model.continuations(["the cat"], max_length=24)[0])
    last = len(states) - 1
    pace = min(0.6, 6 / last)
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.set_content(picture)
        for step in range(last + 1):
            texts = page.evaluate(
                """time => {
                    for (const one of document.getAnimations()) { one.pause(); one.currentTime = time; }
                    return [...document.querySelectorAll('g')].filter(g => getComputedStyle(g).opacity === '1')
                        .flatMap(g => [...g.querySelectorAll('text')].map(t => t.textContent));
                }""",
                1000 * (step + 0.5) * pace,
            )
            assert f"step {step} of {last}" in texts
            assert sorted(text for text in texts if not text.startswith("step ")) == sorted(
                text for _, _, text in seen(picture, step)
            )
        assert max(float(one) for one in re.findall(r'x="([\d.]+)"', picture)) < COLUMNS * 8 + 44
        browser.close()
