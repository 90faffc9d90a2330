"""A model may say how it samples best: that holds where nothing else is asked for, in Python and on the CLI."""

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

import cdlm
from cdlm.cli.sample import SampleConfig, generate_samples
from cdlm.model.pretrained import LayoutError
from cdlm.sample.generation_config import FILE, from_version_1, read_generation_config, write_generation_config
from cdlm.sample.settings import Settings, explicit
from cdlm.text.pipeline import Pipeline

from ..cli.test_main import cdlm as command
from ..writers import BPE, write_model

OWN = {"steps": 6, "order": "dilated", "guidance": 0.5, "temperature": 0.8}
PLAIN = {"steps": 32, "order": "random", "guidance": 0.0, "temperature": 1.0}
MANY = {"steps": 20, "order": "dilated", "guidance": 0.25, "temperature": 0.9}
CONFIG = {**OWN, "step_presets": [OWN, MANY]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory of version 0.1, with its settings in config.json."""
    place = tmp_path_factory.mktemp("own") / "model"
    return write_model(place, "masked", BPE, favour=2.0, own=[OWN, MANY], length=24, framed=True, padded=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> Pipeline:
    return cdlm.load(folder, "cpu", "float64")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, OWN),
        ({"steps": 3}, {**OWN, "steps": 3}),
        ({"steps": 12}, {**MANY, "steps": 12}),  # by ratio it is nearer to 20
        ({"order": "random"}, PLAIN),
        ({"steps": 12, "corrector": "cap"}, {**PLAIN, "steps": 12, "corrector": "cap"}),
    ],
)
def test_the_model_resolves_settings_with_its_generation_config(given: dict, expected: dict, model: Pipeline) -> None:
    settings = model.resolve(given)
    assert {name: getattr(settings, name) for name in expected} == expected


def test_a_list_of_version_1_becomes_a_config_with_presets(model: Pipeline) -> None:
    old = [{"steps": 8, "grid": "cosine", "tail": "argmax", "cool": 0.5, "guidance": None}, {"steps": 4, "block": 16}]
    new = [{"steps": 8, "timesteps": "cosine", "final_step": "argmax", "temperature_end": 0.5}]
    new.append({"steps": 4, "block_length": 16})
    assert from_version_1(old) == {**new[0], "step_presets": new}
    assert from_version_1(old[:1]) == new[0]
    assert from_version_1([{"steps": 8, "order": "entropy-bound", "bound": 0.2}]) == {
        "steps": 8,
        "order": "entropy-bound",
        "entropy_bound": 0.2,
    }
    assert from_version_1([]) == {}
    assert model.generation_config == CONFIG


def test_only_our_own_config_has_settings_of_version_1(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path, {"sampling": [OWN]}) == {}
    assert read_generation_config(tmp_path, {"format": "cdlm"}) == {}
    assert read_generation_config(tmp_path, {"format": "cdlm", "sampling": [OWN]}) == OWN


def test_the_file_goes_before_config_json_and_other_fields_are_ignored(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({**MANY, "transformers_version": "4.40", "top_k": None, "do_sample": True}))
    assert read_generation_config(tmp_path, {"format": "cdlm", "sampling": [OWN]}) == MANY


def test_steps_have_the_name_that_transformers_gives_them(tmp_path: Path) -> None:
    """In the file alone; one of an earlier version has ours."""
    write_generation_config(tmp_path, CONFIG)
    found = json.loads((tmp_path / FILE).read_text())
    assert [part["max_denoising_steps"] for part in (found, *found["step_presets"])] == [6, 6, 20]
    assert not any("steps" in part for part in (found, *found["step_presets"]))
    assert read_generation_config(tmp_path, {}) == CONFIG
    (tmp_path / FILE).write_text(json.dumps({**found, "steps": 8}))
    with pytest.raises(LayoutError, match="max_denoising_steps"):
        read_generation_config(tmp_path, {})


@pytest.mark.parametrize("config", [{}, OWN, CONFIG], ids=["none", "plain", "presets"])
def test_a_saved_copy_has_the_generation_config(config: dict, tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", "masked", BPE, length=24)
    if config:
        (source / FILE).write_text(json.dumps(config))
    copy = cdlm.load(source, "cpu").save_pretrained(tmp_path / "copy")
    assert cdlm.load(copy, "cpu").generation_config == config
    (copy / FILE).write_text(json.dumps({**json.loads((copy / FILE).read_text()), "max_length": 20, "own": [1]}))
    again = cdlm.load(copy, "cpu").save_pretrained(tmp_path / "again")
    fields = json.loads((again / FILE).read_text())
    assert fields == json.loads((copy / FILE).read_text())  # also those that are no settings of ours
    assert fields.items() >= {"do_sample": True, "eos_token_id": BPE.eos, "max_length": 20}.items()


def test_python_and_command_agree(folder: Path, model: Pipeline, tmp_path: Path) -> None:
    """The same samples, whoever fills in the settings; and a saved copy still knows them."""
    best = [sample.token_ids for sample in model.sample(3, seed=1)]
    assert best == [sample.token_ids for sample in model.sample(3, seed=1, **OWN)]
    plain = [sample.token_ids for sample in model.sample(3, seed=1, order="random")]
    assert plain == [sample.token_ids for sample in model.sample(3, seed=1, **PLAIN)] != best
    copy = cdlm.load(model.save_pretrained(tmp_path / "copy", "float64"), "cpu", "float64")
    assert (copy.generation_config, copy.eos_padded) == (CONFIG, True)
    assert best == [sample.token_ids for sample in copy.sample(3, seed=1)]
    for more, expected in (([], best), (["--order", "random"], plain), (["--order=random"], plain)):
        done = command(
            "sample", str(folder), "--num-samples", "3", "--seed", "1", "--dtype", "float64", "--json", *more
        )
        assert done.returncode == 0, done.stderr
        found = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda record: record["index"])
        assert [record["token_ids"] for record in found] == expected
        stored = found[0]["sampling"]
        wanted = OWN if expected is best else PLAIN
        assert {name: stored[name] for name in wanted} == wanted
        replayed = model.sample(3, seed=1, **explicit(Settings(**stored), model.generation_config))
        assert expected == [sample.token_ids for sample in replayed]
        source = "(generation config)" if expected is best else "(given)"
        assert source in done.stderr.splitlines()[-1]


def origins(summary: str) -> dict[str, set[str]]:
    """The flags of a summary line by where they come from."""
    found = re.findall(r"((?:--[\w-]+ \S+ ?)+)\(([\w ]+)\)", summary)
    return {source: set(re.findall(r"--[\w-]+ \S+", words)) for words, source in found}


def test_a_flag_with_the_default_value_is_given(folder: Path) -> None:
    done = command("sample", str(folder), "--num-samples", "1", "--temperature", "1", "--json")
    stored = json.loads(done.stdout)["sampling"]
    assert {name: stored[name] for name in OWN} == {**OWN, "temperature": 1.0}
    summary = done.stderr.splitlines()[-1]
    assert origins(summary) == {
        "generation config": {"--steps 6", "--guidance 0.5", "--order dilated"},
        "given": {"--temperature 1"},
    }
    done = command("sample", str(folder), "--num-samples", "1", "--steps", "5")
    summary = done.stdout.splitlines()[-1]
    own = {"--order dilated", "--temperature 0.8", "--guidance 0.5"}
    assert origins(summary) == {"given": {"--steps 5"}, "generation config": own}


def test_padded_texts_end_where_they_end(model: Pipeline, folder: Path) -> None:
    """EOS padding is not shown, and what would follow it is not either."""
    eos = model.tokenizer.eos
    samples = model.sample(8, seed=2)
    assert any(len(sample.token_ids) < 24 for sample in samples)
    assert all(eos not in sample.token_ids[1:] and "<|endoftext|>" not in sample.text for sample in samples)
    frames = list(model.stream(num_samples=8, seed=2))
    assert frames[-1].texts == [sample.text for sample in samples]
    with pytest.raises(ValueError, match="40 tokens are more than the 24"):
        model.sample(max_length=40, block_length=12)  # a second window would begin behind the end of a text
    whole = list(model.complete(model.continuations([""], 8), model.resolve(OWN), seed=2))
    whole.sort(key=lambda sample: sample.index)
    assert [sample.token_ids for sample in whole] != [sample.token_ids for sample in samples]
    for watch in (True, False):
        config = SampleConfig(model=str(folder), num_samples=8, seed=2, dtype="float64", watch=watch)
        found = sorted(generate_samples(config, Console(quiet=True)), key=lambda sample: sample.index)
        assert [sample.text for sample in found] == [sample.text for sample in samples]


@pytest.mark.parametrize("process", ["masked", "uniform"])
def test_given_texts_stand_with_their_ends(process: str, tmp_path: Path) -> None:
    """An EOS-padded model has seen texts end: it fills and rewrites one with its padding, and shows none of it."""
    text, blank = "the cat sees the sea", "the cat ___ the sea."
    model = cdlm.load(write_model(tmp_path, process, BPE, favour=9.0, length=24, framed=True, padded=True), "cpu")
    eos, size = model.tokenizer.eos, 1 + len(model.tokenizer.encode(text))
    for template in (*model.infillings([blank]), *model.rewritings([text])):
        assert len(template.token_ids) == 24
        assert template.token_ids[-template.suffix :] == [eos] * template.suffix
    filled, rewritten = model.infill(blank, num_samples=8, seed=2), model.rewrite(text, num_samples=8, seed=2)
    assert all(eos not in sample.token_ids[1:] for sample in filled + rewritten)
    assert all(sample.text.startswith("the cat ") and sample.text.endswith(" the sea.") for sample in filled)
    assert all(len(sample.token_ids) == size for sample in rewritten)
    assert len({sample.text for sample in rewritten}) > 1
    assert rewritten[:2] == model.rewrite(text, num_samples=2, seed=2)
    both = model.rewrite([text, f"{text} again"], seed=2)  # of two lengths, each with its own ends
    assert [len(sample.token_ids) == size for sample in both] == [True, False]
    mixed = [sample.text for sample in model.infill([blank, "the ___."], seed=2)]
    assert mixed[1].startswith("the ")
    assert mixed[1].endswith(".")


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize(
    ("sampling", "advice"),
    [
        ([{"steps": 0}], "--steps must be"),
        ([OWN, {"stops": 3}], "'stops'"),
        ([OWN, {"temperature": 0.5}], "how many steps"),
        ("fast", "damaged"),
        (3, "damaged"),
    ],
)
def test_damaged_settings_of_version_1_are_named(folder: Path, tmp_path: Path, sampling: object, advice: str) -> None:
    broken = copied(folder, tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "sampling": sampling}))
    with pytest.raises(LayoutError, match=advice):
        cdlm.load(broken, "cpu")


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        ({"steps": 0}, "--steps must be"),
        ({"steps": 4, "order": "backwards"}, "--order must be"),
        ({"steps": 4, "step_presets": [{"stops": 3, "steps": 4}]}, "'stops'"),
        ({"steps": 4, "step_presets": [{"temperature": 0.5}]}, "how many steps"),
        ({"steps": 4, "step_presets": 3}, "damaged"),
        ({"steps": 4, "step_presets": [3]}, "damaged"),
        ({"steps": 4, "step_presets": "fast"}, "damaged"),
        ([], "damaged"),
    ],
    ids=str,
)
def test_a_damaged_file_is_named(folder: Path, tmp_path: Path, config: object, advice: str) -> None:
    broken = copied(folder, tmp_path / "broken")
    (broken / FILE).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"generation_config\.json.*{advice}"):
        cdlm.load(broken, "cpu")


def test_settings_that_do_not_go_together_are_refused_when_they_are_used(folder: Path, tmp_path: Path) -> None:
    other = copied(folder, tmp_path / "other")
    (other / FILE).write_text(json.dumps({"steps": 4, "corrector": "cap", "order": "dilated"}))
    model = cdlm.load(other, "cpu")
    with pytest.raises(ValueError, match=r"--corrector cap.*--order dilated|--order dilated.*--corrector cap"):
        model.sample()
    assert len(model.sample(steps=2, order="random")) == 1
