"""`cdlm sample` on its way: interrupted, and watched."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cdlm.cli.sample import SampleConfig, generate_samples
from cdlm.sample.draw import State
from cdlm.text.pipeline import MASK, Pipeline

from .test_main import ROOT
from .test_sample import lines


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the second batch is being written."""
    states, calls = Pipeline.states, []

    def once(self: Pipeline, *arguments: Any, **more: Any) -> Iterator[State]:
        calls.append(arguments)
        if len(calls) == 1:
            yield from states(self, *arguments, **more)
        else:
            yield next(iter(states(self, *arguments, **more)))
            raise KeyboardInterrupt

    monkeypatch.setattr(Pipeline, "states", once)


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize("as_json", [True, False])
def test_ctrl_c_keeps_what_is_finished(
    write, as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        write(num_samples=6, batch_size=2, out=tmp_path / "texts.jsonl", json=as_json)
    assert end.value.code == 130
    kept = lines((tmp_path / "texts.jsonl").read_text())
    assert [record["index"] for record in kept] == [0, 1]
    out, err = capsys.readouterr()
    assert "interrupted; 2 of 6 samples are finished and kept in" in err
    assert "texts.jsonl" in err.replace("\n", "")
    if as_json:
        assert lines(out) == kept
    else:
        assert "─ 1 ─" in out


def test_a_text_is_on_the_disk_before_the_next_batch(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states, kept, out = Pipeline.states, [], tmp_path / "texts.jsonl"

    def count(self: Pipeline, *arguments: Any, **more: Any) -> Iterator[State]:
        kept.append(len(lines(out.read_text())) if out.exists() else 0)
        return states(self, *arguments, **more)

    monkeypatch.setattr(Pipeline, "states", count)
    write(num_samples=5, batch_size=2, out=out)
    assert kept == [0, 2, 4]


def test_ctrl_c_in_a_process_of_its_own(folder: str, tmp_path: Path) -> None:
    out = tmp_path / "texts.jsonl"
    flags = ["--num-samples", "100000", "--batch-size", "1", "--steps", "4", "--device", "cpu", "--out", str(out)]
    code = (  # what runs in the background of a shell begins with the signal ignored
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import cdlm.__main__ as it; it.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "sample", folder, *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (out.exists() and out.stat().st_size > 2000) and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    kept = lines(out.read_text())
    assert [record["index"] for record in kept] == list(range(len(kept)))
    found = re.search(r"interrupted; (\d+) of 100000 samples are finished", err)
    assert found is not None, err
    assert int(found[1]) - len(kept) in (0, 1)  # the signal may come between counting a text and keeping it


# Watching


def test_watching_shows_every_step(write, capsys: pytest.CaptureFixture[str]) -> None:
    texts = write(num_samples=2, prompt="abc", watch=True, steps=4)
    out = capsys.readouterr().out
    for step in range(5):
        assert out.count(f"step {step} of 4") == 2
    frames = out.split("text 0, step ")
    assert frames[1].count(f"abc{MASK * 13}") == 2
    assert MASK not in frames[-1]
    assert "writer: 2 samples, NFE 4, " in frames[-1]
    assert texts == sorted(write(num_samples=2, prompt="abc", steps=4), key=lambda text: text.index)


def test_watching_on_a_terminal_leaves_the_texts(folder: str) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    texts = generate_samples(
        SampleConfig(model=folder, infill="abc___def", num_samples=1, watch=True, steps=2), console
    )
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue())
    assert f"abc{MASK * 4}def" in shown
    assert texts[0].text.startswith("abc")
    assert shown.rindex("step 2 of 2") > shown.rindex(MASK)


def test_watched_texts_are_kept(write, tmp_path: Path) -> None:
    texts = write(num_samples=2, watch=True, out=tmp_path / "texts.jsonl")
    assert [record["token_ids"] for record in lines((tmp_path / "texts.jsonl").read_text())] == [
        t.token_ids for t in texts
    ]


def test_watched_texts_are_trimmed(write, ending: str) -> None:
    assert write(model=ending, num_samples=1, prompt="abc", stop_at_eos=True, watch=True)[0].text == "abc"


def test_an_autoregressive_model_is_watched(write, causal: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(model=causal, num_samples=1, prompt="abc", steps=None, watch=True)
    assert "step 12 of 12" in capsys.readouterr().out
