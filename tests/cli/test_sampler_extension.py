"""A sampler and an unmasking order from outside the package: two rows of the tables, and they are known everywhere."""

import json
from pathlib import Path

import pytest

from ..writers import write_model
from ..zygote import run

EXTENSION = '''
"""A sampler that draws all of x_0 and noises it again, and the order from left to right."""

import itertools

import torch

from cdlm.rng import categorical
from cdlm.sample.draw import State
from cdlm.sample.samplers import ORDERS, SAMPLERS, Sampler, UnmaskingOrder
from cdlm.sample.timesteps import timesteps


@torch.no_grad()
def resample(predict, process, x, settings, rng, *, given=None, start=1.0, draw=None):
    times = timesteps(settings, start).tolist()
    yield State(x, 0, settings.steps, [0] * len(x))
    for step, (t, s) in enumerate(itertools.pairwise(times), 1):
        noise = rng("resample", step)
        x0 = categorical(predict(x, t), noise("x_0").uniform(x.shape[1], x.device))
        x_s = process.corrupt(x0, s, noise)
        x = x_s if given is None else torch.where(given, x, x_s)
        yield State(x, step, settings.steps, [step] * len(x))


def left_to_right(is_mask, steps, rng):
    place = (is_mask.cumsum(-1) - 1).clamp(min=0).double()
    return 1 - (place + 0.5) / is_mask.sum(-1, keepdim=True).clamp(min=1)


SAMPLERS["resample"] = Sampler(resample, "draws x_0 and noises it again", "any", ("steps", "timesteps"))
ORDERS["left-to-right"] = UnmaskingOrder(left_to_right, "as an autoregressive model writes")

if __name__ == "__main__":
    from cdlm.__main__ import main

    main()
'''
PYTHON = """
import sys

import extension
import cdlm
from cdlm.sample.settings import choices, explicit, resolve

assert "resample" in choices("sampler") and "left-to-right" in choices("order")
pipe = cdlm.load(sys.argv[1], "cpu", "float64")
mask = pipe.denoiser.vocab

frames = list(pipe.stream("ab", max_length=10, steps=8, order="left-to-right"))
assert [[token < mask for token in frame.token_ids[0]].index(False) for frame in frames[:-1]] == list(range(2, 10))
(half,) = [frame for frame in pipe.stream(max_length=12, steps=4, order="left-to-right") if frame.step == 2]
assert [token < mask for token in half.token_ids[0]] == [True] * 6 + [False] * 6
assert pipe.sample(max_length=12, steps=3, order="left-to-right", step_size="equal")[0].nfe == 3

first, again = (pipe.sample(2, max_length=12, steps=3, sampler="resample", seed=1) for _ in range(2))
assert first == again and [sample.nfe for sample in first] == [3, 3]
assert first != pipe.sample(2, max_length=12, steps=3, seed=1)
assert pipe.infill("a[MASK:3]b", steps=2, sampler="resample")[0].text.startswith("a")

for given, words in (
    ({"order": "never"}, ["left-to-right"]),
    ({"sampler": "never"}, ["resample"]),
    ({"sampler": "resample", "temperature": 0.5}, ["resample", "--temperature 0.5"]),
    ({"sampler": "resample", "order": "left-to-right"}, ["resample", "--order left-to-right"]),
    ({"corrector": "cap", "order": "left-to-right"}, ["--corrector cap", "--order left-to-right"]),
    ({"precision": "naive-fp32", "order": "left-to-right"}, ["--precision naive-fp32", "--order left-to-right"]),
):
    try:
        pipe.sample(**given)
    except ValueError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(given)
for given in ({"sampler": "resample", "steps": 4}, {"order": "left-to-right"}):
    assert resolve(explicit(resolve(given))) == resolve(given)

"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extension")
    (folder / "extension.py").write_text(EXTENSION)
    write_model(folder / "model", "masked", length=16)
    write_model(folder / "judge", "causal", length=64)
    return folder


def extended(work: Path, *words: str) -> str:
    """What the command line with the two rows prints."""
    done = run("python", "extension.py", *words, cwd=work)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", ["sample", "eval"])
def test_they_are_in_the_help(command: str, work: Path) -> None:
    shown = "".join(extended(work, command, "--help").split())
    assert "resample" in shown
    assert "left-to-right" in shown
    assert "resample" not in run("cdlm", command, "--help", cwd=work).stdout


def test_they_are_known_in_python(work: Path) -> None:
    (work / "check.py").write_text(PYTHON)
    done = run("python", "check.py", "model", cwd=work)
    assert done.returncode == 0, done.stderr


def test_they_sample_on_the_command_line(work: Path) -> None:
    flags = ["model", "--num-samples", "2", "--steps", "3", "--device", "cpu", "--json"]
    for words, name, value in (
        (["--sampler", "resample"], "sampler", "resample"),
        (["--order", "left-to-right"], "order", "left-to-right"),
    ):
        records = [json.loads(line) for line in extended(work, "sample", *flags, *words).splitlines()]
        assert [record["sampling"][name] for record in records] == [value] * 2
        assert all(len(record["token_ids"]) == 16 and record["nfe"] <= 3 for record in records)
    done = run("python", "extension.py", "sample", *flags, "--corrector", "cap", "--order", "left-to-right", cwd=work)
    assert done.returncode == 1
    assert "--corrector cap" in done.stderr
    assert "--order left-to-right" in done.stderr
    assert "resample" in run("python", "extension.py", "sample", "--sampler", "never", cwd=work).stderr


def test_they_are_axes_of_a_sweep_and_names_in_the_report(work: Path) -> None:
    """Cells, file names, the table of the evaluation and the tables of the report tell them apart."""
    flags = ["model", "--judge", "judge", "--num-samples", "2", "--steps", "3", "--device", "cpu", "--dtype", "float32"]
    shown = extended(work, "eval", *flags, "--order", "random", "left-to-right", "--out", "results")
    shown += extended(work, "eval", *flags, "--sampler", "resample", "--out", "results")
    assert "left-to-right" in shown
    assert "resample" in shown
    rows = [json.loads(line) for line in (work / "results" / "results.jsonl").read_text().splitlines()]
    drawn = [(row["sampling"]["sampler"], row["sampling"]["order"]) for row in rows]
    assert drawn == [("ancestral", "random"), ("ancestral", "left-to-right"), ("resample", "random")]
    names = sorted(path.name for path in (work / "results" / "samples").iterdir())
    assert sum("left-to-right" in name for name in names) == sum("resample" in name for name in names) == 1
    extended(work, "report", "results", "--out", "report")
    report = "".join(path.read_text() for path in (work / "report").rglob("*.md"))
    assert "left-to-right" in report
    assert "resample sampler" in report
    alone = run("cdlm", "report", "results", "--out", "alone", cwd=work)  # results outlive the file
    assert alone.returncode == 0, alone.stderr


def test_they_are_in_the_description_of_the_studio(work: Path) -> None:
    (work / "describe.py").write_text(
        "import json\nimport extension\nfrom cdlm.studio.schema import Settings\n"
        "print(json.dumps(Settings.model_json_schema()['properties']))\n"
    )
    done = run("python", "describe.py", cwd=work)
    assert done.returncode == 0, done.stderr
    properties = json.loads(done.stdout)
    assert "resample" in json.dumps(properties["sampler"])
    assert "left-to-right" in json.dumps(properties["order"])
