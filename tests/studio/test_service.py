"""The service over HTTP: samples are those of the library, and refusals explain themselves."""

import asyncio
import json
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from cdlm.eval.config import EvalConfig
from cdlm.eval.sweep import evaluate
from cdlm.sample.samplers import SAMPLERS
from cdlm.sample.settings import DEFAULTS, SPECS, choices
from cdlm.studio import app as service
from cdlm.studio.app import MAX_BODY, create_app
from cdlm.studio.generation import check_request
from cdlm.studio.jobs import Job, JobQueue
from cdlm.studio.schema import Completion, Infill, Limits

from ..eval.suites import QUIET
from ..writers import BPE, small, write_model

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")
MODELS = {
    "masked": small("masked", "bpe"),
    "uniform": small("uniform", "bpe"),
    "ar": small("causal", "bpe"),
    "framed": small("masked", "bpe", framed=True),
}


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(
        create_app(MODELS, limits=Limits(max_steps=64, max_length=64, max_samples=4, max_characters=500))
    ) as found:
        yield found


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in text.split("\n\n"):
        if block and not block.startswith(":"):
            kind, data = block.split("\n", 1)
            found.append((kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_models_limits_and_health(client: TestClient) -> None:
    cards = client.get("/v1/models").json()["data"]
    assert [(card["id"], card["process"]) for card in cards] == [
        *(("masked", "masked"), ("uniform", "uniform"), ("ar", "none"), ("framed", "masked"))
    ]
    assert cards[0]["num_parameters"] == MODELS["masked"].denoiser.count()
    assert client.get("/v1/limits").json()["max_steps"] == 64
    assert client.get("/health").json() == {"status": "ok", "models": 4, "running": 0, "queued": 0, "available": 16}


@pytest.mark.parametrize("name", MODELS)
def test_texts_are_those_of_the_library(client: TestClient, name: str) -> None:
    settings: dict[str, Any] = {} if name == "ar" else {"steps": 6}
    asked = {"model": name, "prompt": "the cat", "max_tokens": 20, "n": 2, "seed": 5, "temperature": 0.7, **settings}
    found = client.post("/v1/completions", json=asked).json()
    truth = MODELS[name].sample(2, 20, "the cat", seed=5, temperature=0.7, **settings)
    assert [choice["text"] for choice in found["choices"]] == [sample.text for sample in truth]
    assert [choice["token_ids"] for choice in found["choices"]] == [sample.token_ids for sample in truth]
    assert [choice["nfe"] for choice in found["choices"]] == [sample.nfe for sample in truth]
    assert (found["model"], found["object"]) == (name, "text_completion")
    assert found["usage"]["prompt_tokens"] + found["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("more", [{"guidance": 2.0}, {"temperature_end": 0.2}, {"order": "dilated"}, {"top_k": 3}])
def test_every_control_reaches_the_sampler(client: TestClient, more: dict[str, Any]) -> None:
    found, plain = (
        client.post("/v1/completions", json={"model": "masked", "max_tokens": 20, "steps": 6, **extra}).json()
        for extra in (more, {})
    )
    truth = MODELS["masked"].sample(1, 20, steps=6, **more)
    assert found["choices"][0]["token_ids"] == truth[0].token_ids
    assert found["choices"][0]["token_ids"] != plain["choices"][0]["token_ids"]


def test_a_stream_ends_as_the_answer_would(client: TestClient) -> None:
    asked = {"steps": 5, "max_tokens": 16, "seed": 3}
    whole = client.post("/v1/completions", json=asked).json()
    answer = client.post("/v1/completions", json={**asked, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    kinds = events(answer.text)
    middle = [kind for kind, _ in kinds[1:-1]]
    assert (kinds[0][0], set(middle), kinds[-1][0]) == ("start", {"frame"}, "done")
    assert 3 <= len(middle) <= 6  # a step that reveals nothing has no frame
    done = kinds[-1][1]
    assert done["choices"] == whole["choices"]
    assert done["id"] == kinds[0][1]["id"]
    frames = [data for kind, data in kinds if kind == "frame"]
    assert frames[0]["samples"][0]["pieces"] == [None] * 16
    assert frames[-1]["samples"][0]["pieces"] == done["choices"][0]["pieces"]
    changed = [place for frame in frames for place in frame["samples"][0]["changed"]]
    assert sorted(changed) == list(range(16))  # each token is revealed once
    assert all(0 < p <= 1 for frame in frames for p in frame["samples"][0]["token_probs"])


def test_infilling_text_and_tokens(client: TestClient) -> None:
    found = client.post("/v1/infill", json={"text": "the ___ sat", "span_length": 2, "seed": 1, "steps": 4}).json()
    assert found["choices"][0]["text"] == MODELS["masked"].infill("the ___ sat", span_length=2, seed=1, steps=4)[0].text
    tokens = found["choices"][0]["token_ids"]
    again = client.post(
        "/v1/infill", json={"token_ids": tokens, "masked_positions": [1, 2], "seed": 9, "steps": 4}
    ).json()["choices"][0]
    assert [again["token_ids"][k] for k in range(len(tokens)) if k not in (1, 2)] == [tokens[0], *tokens[3:]]
    assert again["text"] == BPE.decode(again["token_ids"])
    assert "".join(again["pieces"]) == again["text"]
    assert BPE.eos not in again["token_ids"][1:3]


@pytest.mark.parametrize("name", ["masked", "uniform"])
def test_the_first_frame_says_what_is_given_and_it_stays(client: TestClient, name: str) -> None:
    asked = {"model": name, "text": "the ___ sat on the mat", "span_length": 3, "steps": 4, "stream": True}
    frames = [data for kind, data in events(client.post("/v1/infill", json=asked).text) if kind == "frame"]
    given = frames[0]["samples"][0]["given"]
    pieces = [[frame["samples"][0]["pieces"][place] for place in given] for frame in frames]
    assert "".join(pieces[0]).split() == ["the", "sat", "on", "the", "mat"]
    assert len(frames[0]["samples"][0]["pieces"]) == len(given) + 3
    assert all(shown == pieces[0] for shown in pieces)
    assert "given" not in frames[1]["samples"][0]
    tokens = client.post("/v1/infill", json={**asked, "stream": False}).json()["choices"][0]["token_ids"]
    again = {"model": name, "token_ids": tokens, "masked_positions": [1, 3], "steps": 4, "stream": True}
    (first, *_) = (data for kind, data in events(client.post("/v1/infill", json=again).text) if kind == "frame")
    assert first["samples"][0]["given"] == [place for place in range(len(tokens)) if place not in (1, 3)]


def test_the_token_that_begins_a_block_is_not_shown(client: TestClient) -> None:
    choice = client.post("/v1/infill", json={"model": "framed", "text": "the ___", "steps": 2}).json()["choices"][0]
    assert choice["token_ids"][0] == BPE.bos
    assert choice["pieces"][0] == ""


@pytest.mark.parametrize("text", ["naïve café", "日本語", "🙂 ok 🙂", "plain"])
def test_pieces_make_the_text(text: str) -> None:
    ids = BPE.encode(text)
    assert "".join(piece or "" for piece in MODELS["masked"].tokenizer.pieces(ids)) == text
    assert len(MODELS["masked"].tokenizer.pieces(ids)) == len(ids)
    holes = [*ids[:1], BPE.vocab_size, *ids[1:]]
    assert MODELS["masked"].tokenizer.pieces(holes)[1] is None


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("completions", {"model": "nobody"}, 404, "there is no model 'nobody'; there are: masked, uniform"),
        ("completions", {"steps": 65}, 422, "steps must be at most 64 (got 65)"),
        ("completions", {"n": 5}, 422, "n must be at most 4 (got 5)"),
        ("completions", {"max_tokens": 65}, 422, "max_tokens must be at most 64 (got 65)"),
        ("completions", {"prompt": "a" * 501}, 422, "at most 500 characters"),
        ("completions", {"prompt": "the cat " * 30, "max_tokens": 8}, 422, "leaves no room"),
        ("completions", {"temperature": -1}, 422, "temperature"),
        ("completions", {"step": 4}, 422, "step: Extra inputs"),
        ("completions", {"model": "ar", "steps": 4}, 422, "autoregressive"),
        ("completions", {"model": "uniform", "order": "margin"}, 422, "order margin needs a masked process"),
        ("completions", {"order": "backwards"}, 422, "order"),
        (
            "completions",
            {"order": "margin", "final_step": "sample"},
            422,
            "no sampler takes final_step sample together",
        ),
        ("completions", {"order": "first-hitting", "steps": 4}, 422, "no sampler takes steps 4 together with order"),
        ("completions", {"timesteps": "1,0.5"}, 422, "timesteps must be uniform"),
        (
            "completions",
            {"timesteps": ",".join(str(1 - k / 80) for k in range(81))},
            422,
            "must be at most 64 (got 80)",
        ),
        ("completions", {"guidance": 1e300}, 422, "guidance"),
        ("completions", {"block_length": 10**400}, 422, "block_length"),
        ("completions", {"max_tokens": 48}, 422, "generate in windows: block_length 16"),
        ("completions", {"max_tokens": 64, "block_length": 1, "steps": 4}, 422, "4 steps in each of 33 windows"),
        ("completions", {"model": "uniform", "guidance": 1}, 422, "needs a mask token"),
        ("completions", {"guidance": -1}, 422, "guidance"),
        ("completions", {"seed": -1}, 422, "seed"),
        ("infill", {"text": "nothing to fill"}, 422, "has no blanks"),
        ("infill", {}, 422, "give a text with blanks, or token_ids"),
        ("infill", {"token_ids": [1, 2], "masked_positions": [2]}, 422, "between 0 and 1 (got 2)"),
        ("infill", {"token_ids": [1, 99999], "masked_positions": [0]}, 422, "(got 99999)"),
        ("infill", {"token_ids": [1, 2], "masked_positions": []}, 422, "at least one of masked_positions"),
        ("infill", {"model": "ar", "text": "a ___ b"}, 422, "autoregressive"),
        ("infill", {"text": "[MASK:65]"}, 422, "at most 64 tokens"),
    ],
)
def test_what_cannot_be_done_is_explained(
    client: TestClient, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    for stream in (False, True):
        answer = client.post(f"/v1/{path}", json={**body, "stream": stream})
        assert answer.status_code == status
        assert message in answer.json()["error"]["message"]


def test_a_short_text_of_wide_blanks_is_refused_before_it_is_built() -> None:
    asked = Infill(text="[MASK:100000]a" * 30)  # three million tokens
    tracemalloc.start()
    with pytest.raises(ValueError, match="at most 64 tokens"):
        check_request(asked, MODELS["masked"], Limits(max_length=64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def endless(*_: object) -> Iterator[service.Event]:
    while True:
        yield service.Event("frame", {})
        time.sleep(0.002)


def test_a_plain_answer_is_not_written_for_one_who_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if events come all the time."""
    monkeypatch.setattr(service, "DISCONNECT_POLL", 0.05, raising=False)

    class Left:
        async def is_disconnected(self) -> bool:
            return True

    async def scene() -> None:
        queue = JobQueue()
        job, _ = queue.submit(endless)
        with pytest.raises(HTTPException, match="cancelled"):
            await asyncio.wait_for(service.plain_response(job, "m", Left()), 5)
        assert await asyncio.to_thread(job.ended.wait, 5)
        queue.close()

    asyncio.run(scene())


def test_a_stream_whose_reader_left_before_it_began_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = JobQueue.submit
    seen: list[Job] = []

    def noted(queue: JobQueue, work: Any) -> tuple[Job, int]:
        job, ahead = submit(queue, work)
        seen.append(job)
        return job, ahead

    monkeypatch.setattr(JobQueue, "submit", noted)
    monkeypatch.setattr(service, "generation_events", endless)
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1"}
    scope |= {"method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b""}
    scope |= {"headers": [(b"content-type", b"application/json")], "scheme": "http", "root_path": ""}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"stream": true}', "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        raise OSError("the connection is closed")

    async def scene() -> None:
        app = create_app(MODELS)
        async with app.router.lifespan_context(app):
            with pytest.raises(Exception):  # noqa: B017, PT011 (whatever the framework makes of it)
                await app(scope, receive, send)
            assert await asyncio.to_thread(seen[0].ended.wait, 5)

    asyncio.run(scene())


def test_frames_are_made_only_for_those_who_look(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: object) -> dict[str, Any]:
        raise ValueError("a frame was made")

    monkeypatch.setattr("cdlm.studio.generation._frame_data", made)
    assert client.post("/v1/completions", json={"steps": 4, "max_tokens": 8}).status_code == 200
    assert "a frame was made" in client.post("/v1/completions", json={"steps": 4, "stream": True}).text


def test_what_is_no_request_is_refused(client: TestClient) -> None:
    for body, kind in ((b"{", "application/json"), (b"{}", "text/plain"), (b"[]", "application/json")):
        answer = client.post("/v1/completions", content=body, headers={"content-type": kind})
        assert "must be a JSON object" in answer.json()["error"]["message"]
    assert client.get("/v1/nothing").status_code == 404
    assert client.get("/v1/completions").status_code == 405
    assert client.delete("/v1/jobs/unknown").json()["error"]["message"].startswith("there is no such job")
    large = client.post("/v1/completions", content=b" " * (MAX_BODY + 1))
    assert (large.status_code, large.json()["error"]["type"]) == (413, "too large")

    def drops() -> Iterator[bytes]:  # no length is told beforehand
        for _ in range(MAX_BODY // 65_536 + 2):
            yield b" " * 65_536

    assert client.post("/v1/completions", content=drops()).status_code == 413


def test_a_full_queue_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    from cdlm.studio.jobs import QueueFull

    def full(*_: object) -> None:
        raise QueueFull("16 requests are waiting, and the queue is full")

    monkeypatch.setattr(JobQueue, "submit", full)
    with TestClient(create_app(MODELS)) as client:
        answer = client.post("/v1/completions", json={})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")


def test_a_failure_inside_is_not_shown_to_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> Iterator[Any]:
        yield from ()
        raise RuntimeError("secret path /home/someone")

    monkeypatch.setattr("cdlm.studio.app.generation_events", broken)
    with TestClient(create_app(MODELS), raise_server_exceptions=False) as client:
        assert client.post("/v1/completions", json={}).status_code == 500
        streamed = client.post("/v1/completions", json={"stream": True}).text
    assert "secret" not in streamed


def test_a_token_guards_the_service() -> None:
    with TestClient(create_app(MODELS, token="abc")) as client:
        for headers in ({}, {"authorization": "Bearer abd"}):
            assert client.get("/v1/models", headers=headers).status_code == 401
        assert client.get("/v1/models", headers={"authorization": "Bearer abc"}).status_code == 200
        assert client.get("/").status_code == 200  # the page itself tells nothing


def test_browsers_are_kept_from_harm(client: TestClient) -> None:
    for path in ("/", "/v1/models", "/static/studio.css", "/nowhere"):
        headers = client.get(path).headers
        assert "script-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py"):
        assert client.get(path).status_code == 404
    with TestClient(create_app(MODELS, hosts=("localhost",)), base_url="http://evil.example") as stranger:
        assert stranger.get("/v1/models").status_code == 400


@pytest.mark.parametrize("process", ["masked", "uniform"])
def test_moons_move_onto_the_manifold(client: TestClient, process: str) -> None:
    found = client.get("/v1/moons", params={"process": process, "steps": 20, "points": 200}).json()
    assert len(found["frames"]) == 21
    if process == "masked":
        assert found["frames"][0] == [[None, None]] * 200
    from cdlm.data.toy import Moons

    manifold = Moons(64).manifold
    share = [sum(bool(manifold[x, y]) for x, y in frame) / 200 for frame in (found["frames"][-1], found["data"][:200])]
    assert share[0] > 0.85
    assert share[1] > 0.98
    assert client.get("/v1/moons", params={"steps": 7}).status_code == 422


def test_results_are_the_rows_of_an_evaluation(tmp_path: Path) -> None:
    masked, judge = (write_model(tmp_path / kind, kind, BPE, length=16) for kind in ("masked", "causal"))
    rows = evaluate(
        EvalConfig(models=(f"M={masked}",), judge=(str(judge),), num_samples=3, steps=(2,), temperature=(1.0, 0.5),
                   device="cpu", out=tmp_path / "out"), QUIET)  # fmt: skip
    with TestClient(create_app(MODELS, results=[tmp_path / "out"])) as client:
        (section,) = client.get("/v1/results").json()["sections"]
    assert [(row["model"], row["control"], row["ppl"]) for row in section["rows"]] == [
        *(("M", "plain", rows[0]["ppl"]), ("M", "T 0.5", rows[1]["ppl"]))
    ]
    with TestClient(create_app(MODELS)) as client:
        assert "cdlm eval" in client.get("/v1/results").json()["error"]["message"]


def test_the_description_names_every_path(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert set(paths) == {
        *("/health", "/v1/models", "/v1/limits", "/v1/settings", "/v1/completions", "/v1/infill", "/v1/jobs/{job}"),
        *("/v1/results", "/v1/moons"),
    }
    for path in ("/v1/completions", "/v1/infill"):
        assert set(paths[path]["post"]["responses"]) == set(map(str, (200, 400, 401, 404, 409, 413, 422, 429)))
    stop = paths["/v1/jobs/{job}"]["delete"]
    assert set(stop["responses"]) == {"204", "401", "404"}
    (named,) = stop["parameters"]
    assert (named["name"], named["in"], named["schema"]) == ("job", "path", {"type": "string"})


def test_everything_in_the_description_is_described(client: TestClient) -> None:
    description = client.get("/openapi.json").json()
    schemas = description["components"]["schemas"]
    assert {"Completion", "Infill", "CompletionResponse", "ModelCard", "Health", "Limits", "ErrorResponse"} < set(
        schemas
    )
    fields = [
        (f"{name}.{key}", value)
        for name, schema in schemas.items()
        for key, value in schema.get("properties", {}).items()
    ]
    calls = [(f"{path} {verb}", call) for path, verbs in description["paths"].items() for verb, call in verbs.items()]
    parameters = [(f"{where} {one['name']}", one) for where, call in calls for one in call.get("parameters", [])]
    assert [where for where, each in fields + calls + parameters if not each.get("description")] == []


def test_the_settings_of_a_request_are_those_of_the_sampler(client: TestClient) -> None:
    """The page builds its form from here, so that a new setting or order shows up by itself."""
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    for request in ("SettingsRequest", "Completion", "Infill"):
        properties = schemas[request]["properties"]
        for name, spec in SPECS.items():
            (kind, null) = properties[name]["anyOf"]
            assert null == {"type": "null"}
            assert kind.get("enum", []) == choices(name)
            assert kind.get("minimum") == spec.minimum
            assert kind.get("exclusiveMinimum") == spec.above
            assert kind.get("maximum") == spec.maximum
            assert properties[name].get("x-default") == DEFAULTS[name]
            assert properties[name].get("x-requires") == spec.requires
    card = schemas["ModelCard"]["properties"]
    assert {spec.requires for spec in SPECS.values() if spec.requires} <= set(card)
    assert list(schemas["SettingsRequest"]["properties"]) == [*SPECS, "model"]


@pytest.mark.parametrize("model", ["masked", "uniform", "ar"])
def test_settings_are_completed_as_for_a_sample(client: TestClient, model: str) -> None:
    found = client.post("/v1/settings", json={"model": model, "temperature": 0.5}).json()
    resolved = MODELS[model].resolve({"temperature": 0.5})
    assert found["settings"] == {name: getattr(resolved, name) for name in found["settings"]}
    assert set(found["settings"]) == {"sampler", *SAMPLERS[resolved.sampler].settings}
    assert found["sources"]["temperature"] == "given"
    assert found["sources"]["top_p"] == "default"
    assert found["ignored"] == []


@pytest.mark.parametrize(
    ("given", "ignored"),
    [
        ({"model": "uniform", "order": "dilated", "guidance": 1.0, "steps": 4}, ["order", "guidance"]),
        ({"model": "ar", "steps": 4, "corrector": "cap", "top_p": 0.5}, ["steps", "corrector"]),
        ({"model": "masked", "order": "first-hitting", "steps": 4}, ["steps"]),
        ({"model": "masked", "corrector": "none", "eta": 0.5}, ["eta"]),
        ({"model": "masked", "corrector": "cap", "eta": 0.5}, []),
    ],
)
def test_settings_that_do_not_apply_are_left_out(client: TestClient, given: dict[str, Any], ignored: list[str]) -> None:
    found = client.post("/v1/settings", json=given).json()
    assert sorted(found["ignored"]) == sorted(ignored)
    rest = {name: value for name, value in given.items() if name not in ignored}
    assert client.post("/v1/completions", json={**rest, "max_tokens": 8}).status_code == 200


@pytest.mark.parametrize("model", ["masked", "uniform", "ar"])
def test_values_are_offered_if_and_only_if_they_can_be_requested(client: TestClient, model: str) -> None:
    for given in ({}, {"order": "margin"}, {"corrector": "cap"}, {"precision": "naive-fp32"}, {"final_step": "sample"}):
        found = client.post("/v1/settings", json={"model": model, **given}).json()
        used = {name: value for name, value in given.items() if name not in found["ignored"]}
        for name, offered in found["choices"].items():
            for value in choices(name):
                accepted = True
                try:
                    check_request(Completion(**{**used, name: value}), MODELS[model], Limits())
                except ValueError:
                    accepted = False
                assert accepted == (value in offered) or (not offered and value == DEFAULTS[name])


def test_settings_are_refused_as_in_a_request(client: TestClient) -> None:
    for given, message in (
        ({"order": "margin", "final_step": "sample"}, "no sampler takes final_step sample together with order margin"),
        ({"steps": 65}, "steps must be at most 64 (got 65)"),
        ({"timesteps": "1,0.5,0", "steps": 4}, "has 2 steps; leave out steps"),
        ({"temperature": 0}, "temperature"),
        ({"prompt": "the cat"}, "prompt: Extra inputs"),
    ):
        answer = client.post("/v1/settings", json=given)
        assert answer.status_code == 422
        assert message in answer.json()["error"]["message"]
    assert client.post("/v1/settings", json={"model": "nobody"}).status_code == 404


def test_samples_beyond_the_length_of_the_model_are_generated_in_windows(client: TestClient) -> None:
    request = {"max_tokens": 48, "block_length": 16, "steps": 4, "seed": 2}
    found = client.post("/v1/completions", json=request).json()["choices"][0]
    assert found["token_ids"] == MODELS["masked"].sample(1, 48, seed=2, steps=4, block_length=16)[0].token_ids


def test_refusals_name_the_fields_of_a_request_and_no_flags() -> None:
    model, limits = MODELS["masked"], Limits()
    for asked in (
        Completion(prompt="the cat " * 40),
        Completion(prompt="", max_tokens=(model.max_length or 64) * 2),
        Completion(prompt="the cat sat on the mat. a dog", max_tokens=3),
    ):
        with pytest.raises(ValueError, match="tokens") as refused:
            check_request(asked, model, limits)
        assert "--" not in str(refused.value)
        assert "Python" not in str(refused.value)
