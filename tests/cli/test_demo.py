"""The demo: the bundled models side by side, and one page with all of it."""

import html
import re
from pathlib import Path

import pytest

from cdlm import zoo
from cdlm.cli import demo
from cdlm.cli.demo import DemoConfig, run_demo

from ..writers import BPE, write_model

NAMES = zoo.names()


def test_the_demo_shows_both_models_on_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "demo"
    monkeypatch.setattr(demo, "COMPARED_STEPS", (2, 3))
    monkeypatch.setattr(demo, "PLAIN_STEPS", (2, 5))
    samples = run_demo(DemoConfig(steps=4, moons=False, device="cpu", out=out))
    assert [sample.model.name for sample in samples[:2]] == list(reversed(NAMES))
    assert [sample.settings.steps for sample in samples] == [4, 4, 2, 2, 3, 3, 2, 5]
    assert [sample.settings.order for sample in samples[-2:]] == ["random"] * 2
    page = (out / "index.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 2
    for sample in samples:
        assert re.fullmatch(r"\d+ NFE, \d+\.\d s, entropy \d\.\d\d nats", sample.cost)
        assert html.escape(sample.text) in page
        settings = {"order": sample.settings.order, "steps": sample.settings.steps}
        assert sample.text == sample.model.sample(seed=0, **settings)[0].text.strip()
    assert "<code>cdlm sample</code>" in page
    without_pictures = re.sub(r"base64,[^\"]+", "", page)
    assert "http" not in without_pictures
    assert "<script" not in without_pictures
    with pytest.raises(ValueError, match=r"--out must be a directory.*index\.html"):
        DemoConfig(out=out / "index.html")


def test_a_demo_of_more_steps_than_tokens_shows_finished_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [{"steps": 4, "order": "dilated", "temperature": 0.5}]
    for name in NAMES:
        write_model(tmp_path / name, "masked", BPE, own=own, length=8, framed=True, padded=True)
    monkeypatch.setattr(zoo, "HERE", tmp_path)
    samples = run_demo(DemoConfig(steps=40, moons=False, device="cpu", out=tmp_path / "demo"))
    assert len(samples[0].frames) <= 9
    assert all(max(sample.frames[-1].token_ids[0]) < sample.model.denoiser.vocab for sample in samples)
    assert samples[-1].flags == "--steps 64 --order random --temperature 1"
    assert "moons" not in (tmp_path / "demo" / "index.html").read_text()
