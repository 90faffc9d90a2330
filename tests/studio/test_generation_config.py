"""The service follows a model's generation config unless a request gives other settings."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from starlette.testclient import TestClient

from cdlm.studio.app import create_app
from cdlm.studio.schema import Limits
from cdlm.text.pipeline import Pipeline

from ..writers import small

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")
CONFIG = {"steps": 12, "order": "dilated", "temperature": 0.7}


@pytest.fixture(scope="module")
def model() -> Pipeline:
    return dataclasses.replace(small("masked", "bpe", framed=True), generation_config=CONFIG, eos_padded=True)


@pytest.fixture
def client(model: Pipeline) -> Iterator[TestClient]:
    with TestClient(create_app({"best": model}, limits=Limits(max_steps=8))) as found:
        yield found


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({}, {**CONFIG, "steps": 8}),  # no more than the limit
        ({"steps": 4}, {**CONFIG, "steps": 4}),
        ({"order": "random", "steps": 4}, {"order": "random", "steps": 4}),
        ({"temperature": None}, {**CONFIG, "steps": 8}),  # null is not given
        ({"temperature": 1.0}, {**CONFIG, "steps": 8, "temperature": 1.0}),
    ],
)
def test_a_setting_that_is_not_given_comes_from_the_generation_config(
    client: TestClient, model: Pipeline, given: dict[str, Any], settings: dict[str, Any]
) -> None:
    found = client.post("/v1/completions", json={"seed": 3, "max_length": 32, **given}).json()["choices"][0]
    expected = model.sample(seed=3, **settings)[0]
    assert found["text"] == expected.text
    assert found["token_ids"][: len(expected.token_ids)] == expected.token_ids
    shown = client.post("/v1/settings", json=given).json()["settings"]
    assert {name: shown[name] for name in settings} == settings


def test_the_model_card_has_the_generation_config(client: TestClient) -> None:
    assert client.get("/v1/models").json()["data"][0]["generation_config"] == CONFIG
    shown = client.post("/v1/settings", json={"steps": 4}).json()
    assert shown["sources"]["steps"] == "given"
    assert shown["sources"]["temperature"] == "generation config"
    assert shown["sources"]["top_p"] == "default"
    assert shown["summary"] == "4 steps, fp64, order dilated, temperature 0.7"
