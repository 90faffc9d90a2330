"""Sudoku over HTTP: the grids of the library, step by step, and refusals that explain themselves."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from starlette.testclient import TestClient

import cdlm
from cdlm.data.sudoku import digits_tokenizer
from cdlm.studio.app import create_app
from cdlm.studio.schema import Limits
from cdlm.text.sudoku import exact_model, generate_grids, last_changes, parse_puzzle, written

from ..writers import small, write_model

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")
PUZZLE = "1..4......2....."


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("grids")
    kinds: Any = ("masked", "causal")
    models = {kind: cdlm.load(write_model(folder / kind, kind, digits_tokenizer(4), length=16)) for kind in kinds}
    with TestClient(create_app({"text": small()} | models, limits=Limits(max_steps=64, max_samples=8))) as found:
        yield found


def test_the_models_of_grids_are_listed(client: TestClient) -> None:
    found = [(each["model"], each["size"]) for each in client.get("/v1/sudoku/models").json()["data"]]
    assert found[:2] == [("masked", 4), ("causal", 4)]
    assert found[-2:] == [("exact", 4), ("exact", 6)]
    assert "text" not in dict(found)


@pytest.mark.parametrize("puzzle", [None, PUZZLE])
def test_grids_are_those_of_the_library(client: TestClient, puzzle: str | None) -> None:
    asked = {"model": "exact", "size": 4, "n": 5, "seed": 3, "steps": 4, "order": "margin", "puzzle": puzzle}
    found = client.post("/v1/sudoku", json=asked).json()
    model = exact_model(4)
    cells = None if puzzle is None else parse_puzzle(puzzle)
    settings = model.resolve({"steps": 4, "order": "margin"})
    samples = [sample for sample in generate_grids(model, settings, 3, 5, cells) if sample is not None]
    assert (found["model"], found["size"], found["puzzle"], found["seed"]) == ("exact", 4, puzzle, 3)
    for grid, sample in zip(found["grids"], samples, strict=True):
        assert grid["states"] == [written(state, 4) for state in sample.states]
        assert (grid["steps"], grid["nfe"]) == (last_changes(sample), sample.nfe)
        assert grid["conflicts"][-1] == sample.conflicts
        assert grid["valid"] == sample.valid == (not grid["conflicts"][-1])
    valid = [grid["states"][-1] for grid in found["grids"] if grid["valid"]]
    assert (found["valid"], found["distinct"]) == (len(valid), len(set(valid)))
    assert "4 steps" in found["summary"]
    assert "order margin" in found["summary"]


def test_the_first_model_of_the_size_is_used(client: TestClient) -> None:
    assert client.post("/v1/sudoku", json={"steps": 1, "seed": 0}).json()["model"] == "masked"
    assert client.post("/v1/sudoku", json={"size": 6, "steps": 1, "seed": 0}).json()["size"] == 6
    assert client.post("/v1/sudoku", json={"puzzle": "." * 36, "steps": 1}).json()["model"] in ("sudoku-6", "exact")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"puzzle": "1..4"}, "puzzle", "puzzle must have as many cells as the grid"),
        ({"puzzle": "1..1" + "." * 12}, "puzzle", "puzzle has the digit 1 twice in row 1"),
        ({"puzzle": "." * 16, "size": 6}, "puzzle", "36 for size 6 (got 16)"),
        ({"puzzle": PUZZLE, "model": "causal"}, "puzzle", "causal is autoregressive"),
        ({"model": "text"}, "model", "there is no model 'text' that generates Sudoku grids; there are: masked"),
        ({"model": "exact", "size": 9}, "model", "there is no model 'exact' of size 9"),
        ({"size": 5}, "size", "4, 6 or 9"),
        ({"n": 9}, "n", "n must be at most 8 (got 9)"),
        ({"steps": 65}, "steps", "steps must be at most 64"),
        ({"order": "grid", "corrector": "cap"}, "order", "no sampler takes"),
        ({"prompt": "x"}, "prompt", "Extra inputs"),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    client: TestClient, body: dict[str, Any], param: str, message: str
) -> None:
    response = client.post("/v1/sudoku", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] == param


def test_it_is_described(client: TestClient) -> None:
    described = client.get("/openapi.json").json()
    assert set(described["paths"]["/v1/sudoku"]) == {"post"}
    assert set(described["paths"]["/v1/sudoku/models"]) == {"get"}
    fields = described["components"]["schemas"]["SudokuRequest"]["properties"]
    assert {"puzzle", "size", "order", "steps", "n"} <= set(fields)
    for name in ("SudokuRequest", "SudokuResponse", "Grid", "GridModel"):
        properties = described["components"]["schemas"][name]["properties"]
        assert all(field.get("description") for field in properties.values()), name
