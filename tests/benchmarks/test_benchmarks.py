"""The benchmarks run, at sizes too small to say anything."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = ["--device", "cpu", "--hidden-size", "64", "--num-layers", "1", "--vocab-size", "300", "--seq-length", "32"]


def run(name: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *TINY, *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sampling_ends_with_its_speed_up(tmp_path: Path) -> None:
    out = tmp_path / "new" / "sampling.json"
    text = run(
        "sampling", "--batch-size", "2", "--steps", "4", "--repeats", "2", "--process", "uniform", "--out", str(out)
    )
    found = re.fullmatch(r"speed-up (\d+\.\d) x", text.splitlines()[-1])
    assert found is not None, text
    about = json.loads(out.read_text())
    reference, ours = about["rows"]
    assert (reference["name"], ours["name"]) == ("reference", "ours")
    assert float(found[1]) == round(reference["seconds"] / ours["seconds"], 1)
    assert (about["process"], about["steps"], about["seq_length"]) == ("uniform", 4, 32)
    assert reference["evaluations"] == 4
    assert 0 < ours["evaluations"] <= 4
    for row in about["rows"]:
        assert abs(row["tokens_per_second"] * row["seconds"] / (2 * 32) - 1) < 1e-9


def test_autoregressive_writes_table_and_picture(tmp_path: Path) -> None:
    out = tmp_path / "wallclock.json"
    text = run("autoregressive", "--batches", "1", "2", "--steps", "2", "8", "--out", str(out))
    rows = json.loads(out.read_text())["rows"]
    assert [(row["model"], row["batch"], row["steps"]) for row in rows] == [
        (model, batch, steps) for batch in (1, 2) for model, steps in (("AR", 32), ("diffusion", 2), ("diffusion", 8))
    ]
    assert [row["evaluations"] for row in rows if row["model"] == "AR"] == [31, 31]
    assert all(row["evaluations"] <= row["steps"] for row in rows)
    assert sum(line.startswith(("AR ", "diffusion ")) for line in text.splitlines()) == len(rows)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_joint_counts_what_it_runs(tmp_path: Path) -> None:
    out = tmp_path / "joint.json"
    run("joint", "--batches", "2", "--steps", "1", "4", "--out", str(out))
    rows = {(row["sampler"], row["steps"]): row for row in json.loads(out.read_text())["rows"]}
    assert rows["ancestral", 1]["evaluations"] == rows["joint", 1]["evaluations"] == 1
    assert rows["joint", 1]["head_evaluations"] == 32
    assert rows["ancestral", 4]["head_evaluations"] == 0
    assert rows["joint", 4]["gflop"] > rows["ancestral", 4]["gflop"]


def test_training_agrees_with_its_plain_version(tmp_path: Path) -> None:
    out = tmp_path / "training.json"
    text = run("training", "--batch-size", "4", "--plain-batch", "4", "--repeats", "1", "--out", str(out))
    assert re.fullmatch(r"speed-up \d+\.\d x", text.splitlines()[-1]), text
    rows = json.loads(out.read_text())["rows"]
    assert {row["method"] for row in rows} == {"mdlm", "mcdlm", "udlm", "duo", "sdtt", "duo-dcd", "ucdlm", "ar"}
    for plain, ours in zip(rows[::2], rows[1::2], strict=True):
        assert (plain["column"], ours["column"]) == ("plain", "ours")
        assert abs(ours["loss"] / plain["loss"] - 1) < 1e-5
        assert ours["trunk"] > 0


def test_judging_agrees_with_its_plain_version() -> None:
    flags = [
        "--device",
        "cpu",
        "--hidden-size",
        "384",
        "--num-layers",
        "1",
        "--seq-length",
        "32",
        "--num",
        "4",
        "--repeats",
        "1",
    ]
    text = run("judge", *flags)
    assert float(text.splitlines()[-2].split()[-1]) < 1e-5
    assert re.fullmatch(r"speed-up \d+\.\d x", text.splitlines()[-1]), text


@pytest.mark.soak
def test_growth_varies_one_thing_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "growth.json"
    flags = ["--batch-size", "4", "--lengths", "64", "--vocabs", "200", "--batches", "2", "--repeats", "1"]
    run("growth", *flags, "--out", str(out))
    rows = json.loads(out.read_text())["rows"]
    found = [(row["varied"], row["length"], row["vocab"], row["batch"]) for row in rows]
    assert found == [("base", 32, 300, 4), ("length", 64, 300, 2), ("vocab", 32, 200, 4), ("batch", 32, 300, 2)]
    picture = out.with_suffix(".png")
    picture.unlink()
    run("growth", "--redraw", str(out))
    assert picture.read_bytes().startswith(b"\x89PNG")


def bare(name: str, *flags: str) -> str:
    words = [sys.executable, "-m", f"benchmarks.{name}", *flags]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.soak
def test_help_takes_a_small_part_of_importing_torch() -> None:
    text = bare("startup", "--repeats", "3")
    share = re.search(r"cdlm --help +[\d.]+ s +([\d.]+) of import torch", text)
    assert share is not None, text
    assert float(share[1]) < 0.3


@pytest.mark.soak
def test_the_call_traces_stay_short_and_follow_the_formula() -> None:
    text = bare("trace")
    pattern = r"^{}: (\d+) interface functions in (\d+) files .*\n  by package: .*\n  (\S+) +(\w+)"
    step = re.search(pattern.format("one MCDLM training step"), text, re.M)
    sampled = re.search(pattern.format("cdlm sample .*"), text, re.M)
    assert step is not None
    assert sampled is not None
    assert step.groups()[2:] == ("train/step.py", "train_step")
    assert sampled.groups()[2:] == ("__main__.py", "main")
    assert int(step[1]) <= 65
    assert int(step[2]) <= 20
    assert int(sampled[1]) <= 105
    assert int(sampled[2]) <= 34
    files = re.findall(r"^  objective/(\w+)\.py", text, re.M)
    assert files == ["loss", "times", "coupling", "target", "weight", "fused", "divergence"]  # in the order of Eq. (8)
    assert "settings resolved x1; read: config.json x1, generation_config.json x1" in text
