"""The models that come with the package: what they promise in size, and that they write English as they are."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

import cdlm
from cdlm import zoo
from cdlm.data import END
from cdlm.data.sudoku import ExactSudoku, all_grids, valid_grids
from cdlm.eval.results import read_rows
from cdlm.methods.spec import same_method
from cdlm.metrics.diversity import entropy
from cdlm.model import pretrained
from cdlm.model.denoiser import Denoiser
from cdlm.process import masked
from cdlm.sample.generation_config import read_generation_config
from cdlm.sample.settings import explicit, flags, resolve
from cdlm.text.pipeline import Pipeline
from cdlm.train.config import read_config
from cdlm.train.recipes import RECIPES
from studies.words import english_share

from .cli.test_main import cdlm as command
from .cli.test_pipeline import succeed

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "results" / "zoo"
NAMES = ["mcdlm-guided", "mdlm"]
SUDOKU, SUDOKU_ROW = "sudoku-4", ROOT / "studies" / "results" / "sudoku" / "4-mdlm"


@pytest.fixture(scope="module")
def models() -> dict[str, Pipeline]:
    return {name: cdlm.load(name, "cpu") for name in NAMES}


def test_there_are_two_and_the_best_is_first() -> None:
    assert sorted(zoo.names()) == NAMES
    assert zoo.names()[0] == zoo.BEST
    assert zoo.locate(Path("mdlm")) == zoo.HERE / "mdlm"
    for other in (Path("nobody"), Path("../zoo/mdlm"), Path()):
        assert zoo.locate(other) is other


@pytest.mark.parametrize("name", NAMES)
def test_sizes(name: str) -> None:
    folder = zoo.HERE / name
    parts = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(parts) == 3
    assert max(parts) < 16_000_000
    assert sum(parts) <= 36_000_000
    assert pretrained.count(folder) == pretrained.load_denoiser(folder).count() == 17_761_056 <= 18_000_000
    index = json.loads((folder / pretrained.INDEX).read_text())
    assert set(index["weight_map"].values()) == {path.name for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_its_recipe_makes(name: str) -> None:
    """The runs that were trained are the recipes of today, and config.json says so."""
    ways = {"data", "out", "init_from"}
    for row in ("base", name):
        ran, recipe = read_config(RESULTS / row / "run.json"), RECIPES[f"zoo-{row}"].config
        for field in dataclasses.fields(ran):
            if field.name == "method":
                assert same_method(ran.method, recipe.method)
            elif field.name not in ways:
                assert getattr(ran, field.name) == getattr(recipe, field.name), field.name
    config = json.loads((zoo.HERE / name / "config.json").read_text())
    assert {"grid_embeddings": 0, "joint_layers": 0} | config["network"] == dataclasses.asdict(
        RECIPES["zoo-base"].config.network
    )
    last, first = config["training"], config["training"]["from"]
    for trained, row in ((last, name), (first, "base")):
        recipe = RECIPES[f"zoo-{row}"].config
        assert same_method(trained["method"], recipe.method)
        assert trained["steps"] == recipe.steps
        assert (trained["batch_size"], trained["seq_length"]) == (recipe.batch_size, recipe.seq_length)


@pytest.mark.parametrize("name", NAMES)
def test_the_card_tells_what_one_must_know(name: str) -> None:
    page = (zoo.HERE / name / "README.md").read_text()
    for part in ("library_name: cdlm", "license", "CC BY-SA 3.0", "public domain", "SmolLM2", "Gemma", "## Limits"):
        assert part in page, part
    for preset in read_generation_config(zoo.HERE / name, {})["step_presets"]:
        assert flags(explicit(resolve(preset))) in page
    assert f'cdlm.load("{name}")' in page


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_english(name: str, models: dict[str, Pipeline]) -> None:
    """As its generation config says: words that people use, as many different ones, sentences that end."""
    texts = models[name].sample(num_samples=8, seed=0)
    assert english_share([text.text for text in texts]) > 0.93
    nats = [float(entropy(torch.tensor([text.token_ids]))) for text in texts]
    assert sum(nats) / len(nats) > 4.5
    assert all(END not in text.text for text in texts)
    assert sum(bool(re.search(r"[.!?][\"')]*$", text.text.strip())) for text in texts) >= 7
    assert sum(text.text[:1].isupper() or text.text[:1] in "\"'" for text in texts) >= 7


def test_a_blank_is_filled_with_words(models: dict[str, Pipeline]) -> None:
    text = "The old ___ sat on the ___ and looked at the sea."
    for model in models.values():
        found = model.infill(text, num_samples=2, seed=0)
        whole = re.compile(r"The old .+ sat on the .+ and looked at the sea\.", re.DOTALL)
        assert all(whole.fullmatch(one.text) for one in found)
        assert english_share([one.text for one in found]) > 0.9


@pytest.mark.parametrize(("name", "nats"), [("mdlm", 0.8057), ("mcdlm-guided", 0.6007)])
def test_hidden_words_are_as_likely_as_when_the_weights_were_made(
    name: str, nats: float, models: dict[str, Pipeline]
) -> None:
    """Weights that were mixed up, or rounded further, would show."""
    law, tokens = models[name].denoiser, models[name].tokenizer
    text = "It was a cold day in April, and the bells of the old church were ringing over the roofs of the town."
    ids = [tokens.bos, *tokens.encode(text)]
    x = torch.tensor([ids + [tokens.eos] * (256 - len(ids))])
    hidden = x.clone()
    hidden[0, 3 : len(ids) : 4] = law.vocab
    said = law(hidden, 0.25)[0].gather(-1, x[0, :, None])[:, 0]
    assert float(-said[hidden[0] == law.vocab].mean()) == pytest.approx(nats, rel=0.01)


def test_without_a_model_the_best_one_writes_and_says_how(models: dict[str, Pipeline]) -> None:
    done = command("sample", "--num-samples", "1", "--device", "cpu")
    text = succeed(done)
    assert f"no model was named: {zoo.BEST} is bundled with cdlm" in text
    config = {name: value for name, value in models[zoo.BEST].generation_config.items() if name != "step_presets"}
    shown = re.search(r"settings: (.*) \(generation config\)$", text, re.MULTILINE)
    assert shown is not None
    assert sorted(re.findall(r"--\S+ \S+", shown[1])) == sorted(flags({name: value}) for name, value in config.items())
    assert " ".join(models[zoo.BEST].sample(seed=0)[0].text.split())[:200] in " ".join(text.split())


def test_named_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: dict[str, Pipeline]) -> None:
    monkeypatch.chdir(tmp_path)
    assert cdlm.load("mdlm", "cpu").name == "mdlm"
    assert cdlm.load(device="cpu").name == zoo.BEST
    models["mdlm"].save_pretrained(tmp_path / zoo.BEST)  # a folder of that name is what is meant by it
    assert cdlm.load(zoo.BEST, "cpu").directory == Path(zoo.BEST)
    assert cdlm.load(device="cpu").directory == zoo.HERE / zoo.BEST
    with pytest.raises(ValueError, match=r"a model of cdlm zoo \(.*mdlm.*\)"):
        cdlm.load("nobody", "cpu")


def test_the_sudoku_model_is_the_one_of_the_study() -> None:
    folder = zoo.HERE / SUDOKU
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2_000_000
    config, ran = json.loads((folder / "config.json").read_text()), read_config(SUDOKU_ROW / "run.json")
    assert config["network"].items() <= dataclasses.asdict(ran.network).items()
    assert ran.network == RECIPES["sudoku-4-mdlm"].config.network
    trained = {name: getattr(ran, name) for name in ("method", "steps", "batch_size", "seq_length")}
    assert config["training"] == trained | {"from": None}
    page, usual = (folder / "README.md").read_text(), read_generation_config(folder, config)
    assert flags(explicit(resolve(usual))) in page
    assert f'cdlm.load("{SUDOKU}")' in page
    controls = [row for row in read_rows(SUDOKU_ROW) if row["num_samples"] == 512 and row["sampling"]["steps"] == 8]
    best = max(controls, key=lambda row: float(row["valid"]))
    assert {name: best["sampling"][name] for name in usual} == usual  # the settings that the study found best


def test_the_sudoku_model_has_the_valid_share_of_the_study() -> None:
    """From another seed: within the 99.9 % interval of a difference between two shares."""
    model, num_samples = cdlm.load(SUDOKU, "cpu"), 512
    usual = model.generation_config
    rows = read_rows(SUDOKU_ROW)
    (row,) = [row for row in rows if {name: row["sampling"][name] for name in usual} == usual]
    samples = model.sample(num_samples, seed=7, batch_size=num_samples)
    share = float(valid_grids(torch.tensor([sample.token_ids for sample in samples])).double().mean())
    variance = row["valid"] * (1 - row["valid"]) * (1 / num_samples + 1 / row["num_samples"])
    assert share == pytest.approx(row["valid"], abs=3.3 * variance**0.5)


def test_the_sudoku_model_predicts_as_the_exact_denoiser() -> None:
    model, exact = cdlm.load(SUDOKU, "cpu").denoiser, Denoiser(ExactSudoku(4), masked(5))
    x0 = all_grids(4)
    hidden = torch.rand(x0.shape, generator=torch.manual_seed(0)) < torch.linspace(0.1, 1, len(x0))[:, None]
    x = x0.masked_fill(hidden, model.vocab)
    truth = exact(x, 0.5)[hidden].double()
    kl = (truth.exp() * (truth - model(x, 0.5)[hidden])).nan_to_num().sum(-1)
    assert 0 <= float(kl.mean()) < 0.02


def test_training_goes_on_from_one_by_its_name(tmp_path: Path) -> None:
    """With its tokenizer, by its name too; the new model tells where it comes from."""
    (tmp_path / "text.txt").write_text("The sea was calm, and the ship lay still. " * 400)
    told = ["--tokenizer", "mdlm", "--seq-length", "256", "--packing", "sentences", "--out", str(tmp_path / "tokens")]
    succeed(command("prepare", str(tmp_path / "text.txt"), *told))
    run = [
        "--init-from",
        "mdlm",
        "--steps",
        "1",
        "--batch-size",
        "1",
        "--no-compile",
        "--valid-samples",
        "0",
        "--device",
        "cpu",
    ]
    run += ["--valid-batches", "1", "--out", str(tmp_path / "run")]
    succeed(command("train", "zoo-mdlm", "--data", str(tmp_path / "tokens"), *run))
    assert cdlm.load(tmp_path / "run", "cpu").training["from"] == cdlm.load("mdlm", "cpu").training


def test_the_list_names_them_all() -> None:
    text = succeed(command("zoo"))
    for name in (*NAMES, SUDOKU):
        assert name in text
    usual = ("--order dilated", "--order grid --step-size equal")
    for part in ("17.8M", "36 MB", "0.47 MB", "1.34B", *usual, str(zoo.HERE)):
        assert part in " ".join(text.split())
    assert command("zoo", "--sise").returncode != 0


def test_the_readme_shows_the_first_four_of_seed_1(models: dict[str, Pipeline]) -> None:
    """Not picked. The last digits of another CPU may turn one of them."""
    page = (ROOT / "README.md").read_text()
    shown = [" ".join(part.split()) for part in re.findall(r"^> (.+(?:\n> .+)*)", page, re.MULTILINE)]
    shown = [part.replace("> ", "").replace("&lt;", "<") for part in shown]
    texts = [" ".join(text.text.split()) for text in models[zoo.BEST].sample(num_samples=4, seed=1)]
    assert len(shown) == 4
    assert sum(text in shown for text in texts) >= 3
