"""The README's line from a text file to samples, through the command line alone."""

import json
import random
import subprocess
from pathlib import Path

import pytest

from .test_main import cdlm


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    draw = random.Random(1)
    words = ["the", "a", "cat", "dog", "sees", "likes", "rain", "and", "sea", "over", "under", "old", "new"]
    documents = [" ".join(draw.choice(words) for _ in range(80)) + "." for _ in range(40)]
    (folder / "corpus.txt").write_text("\n<|endoftext|>\n".join(documents))
    return folder


QUICK = [
    "--steps",
    "6",
    "--batch-size",
    "4",
    "--save-every",
    "3",
    "--log-every",
    "2",
    "--valid-samples",
    "1",
    "--valid-sample-steps",
    "4",
]


def succeed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_from_text_to_samples(work: Path) -> None:
    data, run = str(work / "data"), str(work / "run")
    assert "train" in succeed(cdlm("prepare", str(work / "corpus.txt"), "--seq-length", "64", "--out", data))
    assert "NELBO" in succeed(cdlm("train", "tiny-mdlm", "--data", data, "--out", run, *QUICK))
    resumed = succeed(cdlm("train", "tiny-mdlm", "--data", data, "--out", run, *QUICK, "--resume", "auto"))
    assert "this run is complete" in resumed
    text = succeed(cdlm("sample", run, "--max-length", "64", "--steps", "4", "--num-samples", "2"))
    assert "run/step-00000006: 2 samples, NFE 4, " in text
    same = succeed(cdlm("sample", run, "--max-length", "64", "--steps", "4", "--num-samples", "2"))
    assert same.split("run/step-")[0] == text.split("run/step-")[0]
    assert "curves.png" in succeed(cdlm("plot", run))
    student = str(work / "student")
    succeed(cdlm("train", "tiny-sdtt", "--data", data, "--out", student, "--init-from", run, *QUICK))
    again = str(work / "again")
    succeed(cdlm("train", f"{run}/run.json", "--out", again))
    one, two = (json.loads((Path(folder) / "metrics.jsonl").read_text().splitlines()[0]) for folder in (run, again))
    assert one["loss"] == two["loss"]


def test_a_unigram_prior_from_text_to_samples(work: Path) -> None:
    data, run = str(work / "data-unigram"), str(work / "unigram")
    succeed(cdlm("prepare", str(work / "corpus.txt"), "--seq-length", "64", "--out", data))
    told = succeed(cdlm("train", "tiny-udlm", "--prior", "unigram", "--data", data, "--out", run, *QUICK))
    assert "prior: unigram" in told
    assert "unigram/step-00000006: 2 samples" in succeed(cdlm("sample", run, "--steps", "4", "--num-samples", "2"))


def test_the_help_of_train_begins_with_what_there_is_to_train() -> None:
    head = succeed(cdlm("train", "--help"))[:500]
    assert "cdlm train RECIPE --data DIR" in head
    assert "cdlm recipes" in head
    assert "(default: runs/tiny-mcdlm)" in succeed(cdlm("train", "--help"))


def test_recipes_and_schedules_are_shown(work: Path) -> None:
    text = succeed(cdlm("recipes"))
    for name in ("mcdlm-pplopt", "small-duo-dcd", "tiny-ar", "ablation-kappa-0"):
        assert name in text
    lines = [
        next(k for k, line in enumerate(text.splitlines()) if f" {kind}" in line)
        for kind in ("tiny-ar", "small-ar", "zoo-mdlm", "ablation-jsd")
    ]  # what a laptop can do comes first
    assert lines == sorted(lines)
    assert "wrote" in succeed(cdlm("plot", "mcdlm-pplopt", "--out", str(work / "schedules.png")))


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["train"], "train takes a recipe"),
        (["train", "tiny-mcdm"], "did you mean"),
        (["train", "tiny"], "did you mean tiny-ar, tiny-mdlm, tiny-mcdlm,"),
        (["train", "nowhere.json"], "nowhere.json does not exist"),
        (
            ["train", "tiny-mdlm", "--data", "nowhere"],
            "no directory nowhere; make it first, with: cdlm prepare FILE --out nowh",
        ),
        (["train", "tiny-mdlm", "--metod", "ar"], "--method"),
        (["train", "tiny-mdlm", "--prior", "mask"], "--prior must be auto, masked, uniform, unigram or mixed:M"),
        (["train", "tiny-mdlm", "--prior", "unigram"], "MDLM needs a masked process"),
        (["train", "tiny-mdlm", "--method", "sdtt"], "--init-from"),
        (["plot", "nowhere"], "there is no recipe"),
        (["plot", "docs"], "not a run directory"),
        (["sample", "nowhere"], "does not exist"),
        (["sample", "nowhere", "--steps", "0"], "--steps must be between 1 and 1,000,000 (got 0)."),
        (["sample", "nowhere", "--steps", "0"], "Error parsing cdlm sample:"),
        (["sample", "nowhere", "--num-samples", "ten"], "takes a whole number; got 'ten'"),
        (["prepare", "nowhere.txt", "--out", "never"], "nowhere.txt"),
        (["prepare"], "cdlm prepare FILE... --out DIR"),
        (["sampel"], "did you mean sample"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], advice: str) -> None:
    done = cdlm(*arguments, COLUMNS="200")
    assert done.returncode in (1, 2)
    assert advice in done.stderr
    assert "Traceback" not in done.stderr
