"""`cdlm sample`: what it reads, writes, keeps and refuses."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import cdlm as package
from cdlm.cli.sample import SampleConfig, generate_samples
from cdlm.data import END
from cdlm.sample.settings import flag

from ..writers import BPE, write_model
from .test_main import ROOT, cdlm


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# Out


def test_json_lines_hold_everything(write, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(num_samples=3, json=True, seed=5, prompt="né", temperature=0.5, steps=4)
    out, err = capsys.readouterr()
    model = package.load(folder, "cpu")
    expected = model.sample(num_samples=3, prompt="né", max_length=16, steps=4, seed=5, temperature=0.5)
    found = lines(out)
    for record, text in zip(found, expected, strict=True):
        assert record["text"] == text.text
        assert record["token_ids"] == text.token_ids
        assert record["nfe"] == text.nfe
        assert (record["index"], record["seed"], record["model"], record["prompt"]) == (text.index, 5, "writer", "né")
        assert record["sampling"] == dataclasses.asdict(model.resolve({"steps": 4, "temperature": 0.5}))
    assert "né" in out  # readable, not escaped
    assert "3 samples" in err


def test_pages_show_each_text_and_a_summary(write, capsys: pytest.CaptureFixture[str]) -> None:
    texts = write(num_samples=2, prompt="abc")
    out, err = capsys.readouterr()
    assert err == ""
    assert [text.text.startswith("abc") for text in texts] == [True, True]
    assert out.index("─ 0 ─") < out.index("abc") < out.index("─ 1 ─") < out.rindex("abc")
    summary, settings = out.splitlines()[-2:]
    assert re.fullmatch(
        r"writer: 2 samples, NFE 3, entropy \d\.\d\d nats; 26 tokens in \d+\.\d\d s, [\d,]+ tok/s", summary
    )
    assert settings == "settings: --steps 3 (given)"


@pytest.mark.parametrize(
    ("settings", "written"),
    [
        ({"num_samples": 1}, 16),
        ({"num_samples": 3, "prompt": "abcd"}, 3 * 12),
        ({"num_samples": 2, "infill": "abcd___ef[MASK]", "max_length": None}, 2 * 5),
        ({"num_samples": 2, "rewrite": "abcdefg", "max_length": None}, 2 * 7),
    ],
)
def test_only_written_tokens_are_counted(
    write, settings: dict[str, Any], written: int, capsys: pytest.CaptureFixture[str]
) -> None:
    write(**settings)
    found = re.search(r"; (\d+) tokens in", capsys.readouterr().out)
    assert found is not None
    assert int(found[1]) == written


def test_given_tokens_of_an_autoregressive_model_are_not_counted(
    write, causal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(model=causal, num_samples=1, prompt="abc", steps=None)
    assert "1 sample, NFE 12," in (out := capsys.readouterr().out)
    assert "; 12 tokens in" in out


def test_the_speed_is_tokens_over_seconds(
    write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([10.0, 12.0])
    monkeypatch.setattr("cdlm.cli.sample.time.perf_counter", lambda: next(clock, 12.0))
    write(num_samples=2, prompt="abcd")
    assert "; 24 tokens in 2.00 s, 12 tok/s" in capsys.readouterr().out


def test_the_same_seed_writes_the_same_pages(write, capsys: pytest.CaptureFixture[str]) -> None:
    pages = []
    for seed in (1, 1, 2):
        write(num_samples=2, seed=seed)
        pages.append(capsys.readouterr().out.split("writer:")[0])
    assert pages[0] == pages[1] != pages[2]


def test_text_is_printed_as_it_is(write, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither markup nor the names of emoji mean anything."""
    prompt = "a [b]c[/b] :dog: [red] 1.5"
    write(num_samples=1, prompt=prompt, max_length=32)
    assert prompt in capsys.readouterr().out


def test_a_name_is_printed_as_it_is(write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(model=str(write_model(tmp_path / "my[b]model", "masked", length=16)), num_samples=1)
    assert "my[b]model: 1 sample" in capsys.readouterr().out


def test_trimmed_texts_end(write, ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(model=ending, num_samples=1, prompt="abc", stop_at_eos=True, json=True)
    (record,) = lines(capsys.readouterr().out)
    assert (record["text"], record["token_ids"]) == ("abc", [*b"abc"])


# Files


def test_a_file_is_written_beside_the_pages(write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = write(num_samples=3, out=tmp_path / "texts.jsonl", batch_size=2)
    assert [record["text"] for record in lines((tmp_path / "texts.jsonl").read_text())] == [t.text for t in texts]
    assert "─ 2 ─" in capsys.readouterr().out


def test_an_existing_file_is_not_overwritten(folder: str, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text("precious")
    with pytest.raises(ValueError, match=r"--out .*texts\.jsonl exists"):
        SampleConfig(model=folder, out=tmp_path / "texts.jsonl")
    assert (tmp_path / "texts.jsonl").read_text() == "precious"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_length": 99}, "more than the 16"),
        ({"prompt": "x" * 40}, "no room"),
        ({"input": "lines.txt", "watch": True}, "one length"),
        ({"precision": "naive-fp32"}, "--posterior mixture"),
    ],
)
def test_what_is_refused_leaves_no_file(
    write, settings: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lines.txt").write_text("a___\nabc___\n")
    write_model(tmp_path / "mixture", "uniform", length=16, posterior="mixture")
    with pytest.raises(ValueError, match=reason):
        write(**settings, model="mixture", out=Path("texts.jsonl"))
    assert not Path("texts.jsonl").exists()


# In


MIXED = [
    b"plain prompt",
    b"",
    b"fill ___ in",
    b'{"prompt": "a ___ that is no blank"}',
    b'  {"infill": "x[MASK:2]y", "other": 1}',
    '{"rewrite": "überall"}'.encode(),
    b"last",
]


@pytest.mark.parametrize("source", ["file", "-"])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_many_texts_of_any_kind_are_read(
    write, piped, source: str, newline: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = newline.join(MIXED)
    piped(data)
    (tmp_path / "in.jsonl").write_bytes(data)
    write(input="-" if source == "-" else str(tmp_path / "in.jsonl"), num_samples=2, json=True, max_length=30)
    found = sorted(lines(capsys.readouterr().out), key=lambda record: record["index"])
    assert [record["index"] for record in found] == list(range(12))
    assert [len(record["token_ids"]) for record in found[::2]] == [30, 12, 30, 4, 8, 30]
    kinds = [
        {kind: record[kind] for kind in ("prompt", "infill", "rewrite") if kind in record} for record in found[1::2]
    ]
    assert kinds == [
        {"prompt": "plain prompt"},
        {"infill": "fill ___ in"},
        {"prompt": "a ___ that is no blank"},
        {"infill": "x[MASK:2]y"},
        {"rewrite": "überall"},
        {"prompt": "last"},
    ]
    for record in found[:2]:
        assert record["text"].startswith("plain prompt")
    for record in found[2:4]:
        assert re.fullmatch(r"fill .* in", record["text"], re.DOTALL)


@pytest.mark.parametrize(
    ("data", "advice"),
    [
        (b"", "standard input holds no text; give one on each line"),
        (b"\n  \n", "standard input holds no text"),
        (b'ok\n{"prompt": "a"\n', "line 2 of standard input begins like JSON and is not"),
        (b'{"text": "a"}', "line 1 of standard input needs one of prompt, infill and rewrite"),
        (b'{"prompt": "a", "infill": "b___"}', "line 1 of standard input needs one of"),
        (b'{"prompt": 3}', "line 1 of standard input needs one of"),
        (b"fine\nalso fine\n\xff\xfe\n", "line 3 of standard input is not valid UTF-8; save it as UTF-8"),
        (b'{"prompt": "\\ud800"}', "not valid UTF-8"),
        (b'{"infill": "no blank"}', "no blanks"),
    ],
)
def test_bad_lines_are_named(write, piped, data: bytes, advice: str) -> None:
    piped(data)
    with pytest.raises(ValueError, match=re.escape(advice)):
        write(input="-")


def test_a_missing_input_is_named(write) -> None:
    with pytest.raises(ValueError, match=r"there is no file nowhere\.txt; --prompt takes a text itself"):
        write(input="nowhere.txt")


def test_bad_input_is_found_before_the_model_is_opened(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"empty\.txt holds no text"):
        generate_samples(SampleConfig(model="nowhere", input=str(tmp_path / "empty.txt")), Console())


def test_braces_in_a_text_file_are_text(write, tmp_path: Path) -> None:
    """Objects are read from .jsonl and from standard input, says the help."""
    (tmp_path / "in.txt").write_text("{x} is a set\n")
    assert write(input=str(tmp_path / "in.txt"), num_samples=1, max_length=30)[0].text.startswith("{x} is a set")


# Refusals


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"watch": True, "json": True}, ("--watch", "--json")),
        ({"prompt": "a", "infill": "b___"}, ("--prompt", "--infill")),
        ({"infill": "b___", "rewrite": "a"}, ("--infill", "--rewrite")),
        ({"prompt": "a", "input": "-"}, ("--prompt", "--input")),
        ({"prompt": "the ___ sat"}, ("--prompt", "--infill")),
        ({"noise_level": 0.3}, ("--noise-level", "--rewrite")),
        ({"noise_level": 0.3, "infill": "a___"}, ("--noise-level", "--rewrite")),
        ({"clamp": True, "prompt": "a"}, ("--clamp", "--rewrite")),
        ({"noise_level": 0.0, "rewrite": "a"}, ("--noise-level must", "0.0")),
        ({"noise_level": 1.5, "rewrite": "a"}, ("--noise-level must", "1.5")),
        ({"max_length": 12, "infill": "a___"}, ("leave out --max-length",)),
        ({"max_length": 12, "rewrite": "a"}, ("leave out --max-length",)),
        ({"max_length": 1}, ("--max-length must", "2", "1")),
        ({"num_samples": 0}, ("--num-samples must", "0")),
        ({"num_samples": 10**9}, ("--num-samples must", "1,000,000", "1000000000")),
        ({"batch_size": 0}, ("--batch-size must", "0")),
        ({"span_length": 0}, ("--span-length must", "0")),
        ({"span_length": 3}, ("--span-length", "--infill")),
        ({"stop_at_eos": True, "infill": "a___"}, ("--stop-at-eos",)),
    ],
)
def test_contradictions_are_refused_with_advice(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="--") as caught:
        SampleConfig(**settings)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(("name", "value"), [("steps", 0), ("temperature", 0.0), ("top_p", 1.2), ("order", "never")])
def test_values_out_of_range_are_refused_before_a_model_is_opened(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{flag(name)} must.*{value}"):
        SampleConfig(**{name: value})


def test_combinations_are_refused_before_anything_is_written(write, capsys: pytest.CaptureFixture) -> None:
    for settings in ({"eta": 0.1}, {"order": "first-hitting", "steps": 4}, {"timesteps": "1,0.5,0", "steps": 4}):
        with pytest.raises(ValueError, match="--"):
            write(**settings)
    assert capsys.readouterr().out == ""


# In a process of its own


def test_prompts_from_a_pipe_to_json(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "bpe", "masked", BPE, length=24)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "cdlm",
            "sample",
            str(folder),
            "--input",
            "-",
            "--json",
            "--num-samples",
            "1",
            "--steps",
            "3",
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        input="the cat\nthe ___ sé\n".encode(),
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    one, two = sorted(lines(done.stdout.decode()), key=lambda record: record["index"])
    assert one["text"].startswith("the cat")
    assert re.fullmatch(r"the .* sé", two["text"], re.DOTALL)
    assert END not in two["text"]
    assert b"2 samples" in done.stderr


def test_bfloat16_on_a_cpu(folder: str) -> None:
    """Without the tile registers, which some virtual machines announce and do not have."""
    flags = ["--dtype", "bfloat16", "--device", "cpu", "--num-samples", "1", "--steps", "2", "--json"]
    done = cdlm("sample", folder, *flags, ONEDNN_MAX_CPU_ISA="AVX2")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 32


def test_bfloat16_on_a_cpu_works_or_is_refused(folder: str) -> None:
    """With the instructions that this CPU announces, whether it has them or not: never an illegal one."""
    flags = ["--dtype", "bfloat16", "--device", "cpu", "--num-samples", "1", "--steps", "2", "--json"]
    done = cdlm("sample", folder, *flags, ONEDNN_MAX_CPU_ISA="ALL")
    assert done.returncode in (0, 1), done.stderr
    if done.returncode:
        assert done.stderr.startswith("cdlm: this CPU does not compute in bfloat16"), done.stderr


def test_arguments_that_are_not_text_are_refused(folder: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cdlm", "sample", folder, "--prompt", b"\xff"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "not valid UTF-8" in done.stderr
    assert "Traceback" not in done.stderr
