"""The service writes as a model writes best, unless a request says otherwise."""

import dataclasses

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from starlette.testclient import TestClient

from cdlm.studio.app import create_app
from cdlm.studio.schema import Limits

from ..writers import small

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


def test_a_model_writes_as_it_writes_best_where_a_request_is_silent() -> None:
    own = {"steps": 12, "order": "dilated", "temperature": 0.7}
    model = dataclasses.replace(small("masked", "bpe", framed=True), own=[own], padded=True)
    with TestClient(create_app({"best": model}, limits=Limits(steps=8))) as client:
        assert client.get("/v1/models").json()["data"][0]["sampling"] == [own]
        for asked, how in (
            ({}, {**own, "steps": 8}),  # no more than the limit, whatever the model says
            ({"steps": 4}, {**own, "steps": 4}),
            ({"order": "random", "steps": 4}, {"order": "random", "steps": 4}),
        ):
            found = client.post("/v1/completions", json={"seed": 3, **asked}).json()["choices"][0]
            truth = model.sample(seed=3, **how)[0]
            assert found["text"] == truth.text
            assert found["tokens"][: len(truth.tokens)] == truth.tokens
