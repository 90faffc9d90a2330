"""A model may say how it writes best: that holds where nothing else is asked for, in Python, commands and requests."""

import json
from pathlib import Path

import pytest
from rich.console import Console

import cdlm
from cdlm.cli.sample import SampleConfig, write_texts
from cdlm.model.pretrained import LayoutError
from cdlm.sample.settings import Sampling, asked, flags, sampling_of
from cdlm.text.pipeline import Model

from ..cli.test_main import cdlm as command
from ..writers import BPE, write_model

OWN = {"steps": 6, "order": "dilated", "guidance": 0.5, "temperature": 0.8}
PLAIN = {"steps": 32, "order": "random", "guidance": 0.0, "temperature": 1.0}
MANY = {"steps": 20, "order": "dilated", "guidance": 0.25, "temperature": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("own") / "model"
    return write_model(place, "masked", BPE, favour=2.0, own=[OWN, MANY], length=24, framed=True, padded=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return cdlm.load(folder, "cpu", "float64")


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, OWN),
        ({"steps": 3}, {**OWN, "steps": 3}),
        ({"steps": 10}, {**OWN, "steps": 10}),
        ({"steps": 12}, {**MANY, "steps": 12}),  # by ratio it is nearer to 20
        ({"steps": 500, "temperature": 0.5}, {**MANY, "steps": 500, "temperature": 0.5}),
        ({"temperature": 1.0, "guidance": 0.0}, {**OWN, "temperature": 1.0, "guidance": 0.0}),
        ({"top_p": 0.9}, {**OWN, "top_p": 0.9}),
        ({"order": "dilated"}, OWN),
        ({"order": "random"}, {"steps": 32}),
        ({"order": "first-hitting"}, {"order": "first-hitting"}),
        ({"grid": "cosine", "steps": 3}, {"grid": "cosine", "steps": 3}),
        ({"corrector": "rescale"}, {"corrector": "rescale", "steps": 32}),
        ({"grid": "1,0.5,0"}, {"grid": "1,0.5,0"}),
        ({"precision": "naive-fp32"}, {"precision": "naive-fp32", "steps": 32}),
        ({"precision": "fp32"}, {**OWN, "precision": "fp32"}),
        ({"steps": None, "cool": None}, OWN),
    ],
)
def test_what_is_asked_for_comes_first_and_another_sampler_begins_plain(how: dict, expected: dict) -> None:
    assert sampling_of(how, [OWN, MANY]) == Sampling(**expected)


def test_without_own_settings_nothing_changes() -> None:
    assert sampling_of({"steps": 3}) == sampling_of({"steps": 3}, []) == Sampling(steps=3)


def test_settings_as_flags() -> None:
    assert flags(Sampling(**OWN)) == "--steps 6 --order dilated --temperature 0.8 --guidance 0.5"
    assert flags(Sampling()) == ""


def test_python_commands_and_folders_agree(folder: Path, model: Model, tmp_path: Path) -> None:
    """The same texts, whoever fills in the settings; and a saved copy still knows them."""
    best = [text.token_ids for text in model.sample(3, seed=1)]
    assert best == [text.token_ids for text in model.sample(3, seed=1, **OWN)]
    plain = [text.token_ids for text in model.sample(3, seed=1, order="random")]
    assert plain == [text.token_ids for text in model.sample(3, seed=1, **{**vars(Sampling()), "steps": 32})] != best
    copy = cdlm.load(model.save_pretrained(tmp_path / "copy", "float64"), "cpu", "float64")
    assert (copy.own, copy.padded) == ([OWN, MANY], True)
    assert best == [text.token_ids for text in copy.sample(3, seed=1)]
    for more, expected in (([], best), (["--order", "random"], plain), (["--order=random"], plain)):
        done = command("sample", str(folder), "--num", "3", "--seed", "1", "--dtype", "float64", "--json", *more)
        assert done.returncode == 0, done.stderr
        found = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda record: record["index"])
        assert [record["tokens"] for record in found] == expected
        assert found[0]["sampling"] == (OWN if expected is best else PLAIN)
        replayed = model.sample(3, seed=1, **found[0]["sampling"])
        assert expected == [text.token_ids for text in replayed]
        assert (f"as it writes best, with {flags(Sampling(**OWN))}" in done.stderr) == (expected is best)


@pytest.mark.parametrize(
    "how", [{}, {"steps": 3}, {"order": "random", "steps": 6}, {"temperature": 1.0}, {"grid": "cosine"}]
)
def test_what_is_recorded_says_how_to_do_it_again(how: dict) -> None:
    """Plain settings too, as the model would choose others."""
    settled = sampling_of(how, [OWN, MANY])
    assert sampling_of(asked(settled, [OWN, MANY]), [OWN, MANY]) == settled


def test_a_flag_with_the_plain_value_is_a_wish_too(folder: Path) -> None:
    done = command("sample", str(folder), "--num", "1", "--temperature", "1", "--json")
    assert json.loads(done.stdout)["sampling"] == {**OWN, "temperature": 1.0}
    assert "as it writes best" not in done.stderr
    assert "with --steps 6 --order dilated --temperature 1 --guidance 0.5" in done.stderr
    done = command("sample", str(folder), "--num", "1", "--steps", "5")
    assert "as it writes best at 6 steps, with --steps 5 --order dilated" in done.stdout


def test_padded_texts_end_where_they_end(model: Model, folder: Path) -> None:
    """The end of text fills a block up; it is not shown, and what would follow it is not either."""
    end = model.tokenizer.eos
    texts = model.sample(8, seed=2)
    assert any(len(text.token_ids) < 24 for text in texts)
    assert all(end not in text.token_ids[1:] and "<|endoftext|>" not in text.text for text in texts)
    frames = list(model.stream(num=8, seed=2))
    assert frames[-1].texts == [text.text for text in texts]
    with pytest.raises(ValueError, match="40 tokens are more than the 24"):
        model.sample(length=40, block=12)  # a second window would begin behind the end of a text
    whole = list(model.complete(model.continuations([""], 8), Sampling(**OWN), seed=2))
    assert [text.token_ids for text in sorted(whole, key=lambda text: text.index)] != [text.token_ids for text in texts]
    for watch in (True, False):
        found = write_texts(
            SampleConfig(model=str(folder), num=8, seed=2, dtype="float64", watch=watch), Console(quiet=True)
        )
        assert [text.text for text in sorted(found, key=lambda text: text.index)] == [text.text for text in texts]


@pytest.mark.parametrize("process", ["masked", "uniform"])
def test_given_texts_stand_with_their_ends(process: str, tmp_path: Path) -> None:
    """A padded model has seen a text end: it fills and rewrites one with its ends behind it, and shows none of them."""
    text, blank = "the cat sees the sea", "the cat ___ the sea."
    model = cdlm.load(write_model(tmp_path, process, BPE, favour=9.0, length=24, framed=True, padded=True), "cpu")
    end, size = model.tokenizer.eos, 1 + len(model.tokenizer.encode(text))
    for template in (*model.infillings([blank]), *model.rewritings([text])):
        assert len(template.token_ids) == 24
        assert template.token_ids[-template.suffix :] == [end] * template.suffix
    filled, rewritten = model.infill(blank, num=8, seed=2), model.rewrite(text, num=8, seed=2)
    assert all(end not in one.tokens[1:] for one in filled + rewritten)
    assert all(one.text.startswith("the cat ") and one.text.endswith(" the sea.") for one in filled)
    assert all(len(one.tokens) == size for one in rewritten)
    assert len({one.text for one in rewritten}) > 1
    assert [one.text for one in rewritten][:2] == [one.text for one in model.rewrite(text, num=2, seed=2)]
    both = model.rewrite([text, f"{text} again"], seed=2)  # of two lengths, each with its own ends
    assert [len(one.tokens) == size for one in both] == [True, False]
    mixed = [one.text for one in model.infill([blank, "the ___."], seed=2)]
    assert mixed[1].startswith("the ")
    assert mixed[1].endswith(".")


@pytest.mark.parametrize(
    ("sampling", "advice"),
    [
        ([{"steps": 0}], "--steps must be at least 1"),
        ([OWN, {"stops": 3}], "no setting 'stops'"),
        ([{"temperature": 0.5}], "for how many steps"),
        ("fast", "damaged"),
        (3, "damaged"),
    ],
)
def test_damaged_settings_are_named(folder: Path, tmp_path: Path, sampling: object, advice: str) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in folder.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "sampling": sampling}))
    with pytest.raises(LayoutError, match=advice):
        cdlm.load(broken, "cpu")
