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


def chunks(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream, which ends with [DONE]."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def drafts(text: str) -> list[dict[str, Any]]:
    return [choice["draft"] for chunk in chunks(text) for choice in chunk["choices"] if "draft" in choice]


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
    asked = {"model": name, "prompt": "the cat", "max_length": 20, "n": 2, "seed": 5, "temperature": 0.7, **settings}
    found = client.post("/v1/completions", json={**asked, "echo": True}).json()
    truth = MODELS[name].sample(2, 20, "the cat", seed=5, temperature=0.7, **settings)
    ended = MODELS[name].sample(2, 20, "the cat", seed=5, temperature=0.7, stop_at_eos=True, **settings)
    assert [choice["text"] for choice in found["choices"]] == [sample.text for sample in ended]
    generated = client.post("/v1/completions", json=asked).json()["choices"]
    assert ["the cat" + choice["text"] for choice in generated] == [sample.text for sample in ended]
    assert [choice["token_ids"] for choice in found["choices"]] == [sample.token_ids for sample in truth]
    assert [choice["nfe"] for choice in found["choices"]] == [sample.nfe for sample in truth]
    assert (found["model"], found["object"], found["seed"]) == (name, "text_completion", 5)
    given = len(BPE.encode("the cat")) + (name in ("ar", "framed"))  # BOS is given, too
    usage = {name: found["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert list(usage.values()) == [given, 2 * (20 - given), given + 2 * (20 - given)]


@pytest.mark.parametrize("more", [{"guidance": 2.0}, {"temperature_end": 0.2}, {"order": "dilated"}, {"top_k": 3}])
def test_every_control_reaches_the_sampler(client: TestClient, more: dict[str, Any]) -> None:
    found, plain = (
        client.post(
            "/v1/completions", json={"model": "masked", "max_tokens": 20, "steps": 6, "seed": 0, **extra}
        ).json()
        for extra in (more, {})
    )
    truth = MODELS["masked"].sample(1, 20, steps=6, **more)
    assert found["choices"][0]["token_ids"] == truth[0].token_ids
    assert found["choices"][0]["token_ids"] != plain["choices"][0]["token_ids"]


def test_a_stream_of_drafts_ends_as_the_answer_would(client: TestClient) -> None:
    asked = {"steps": 5, "max_tokens": 16, "seed": 3}
    whole = client.post("/v1/completions", json=asked).json()
    answer = client.post("/v1/completions", json={**asked, "stream": True, "stream_drafts": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    first, *middle, last, usage = chunks(answer.text)
    assert (first["choices"], first["queue_position"], first["seed"]) == ([], 0, 3)
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 16)
    assert 3 <= len(middle) <= 6  # a step that reveals nothing has no chunk
    assert {chunk["id"] for chunk in (first, *middle, last, usage)} == {first["id"]}
    states = drafts(answer.text)
    assert len(states) == len(middle)
    assert states[0]["text"] == "░" * 16
    assert states[0]["pieces"] == [None] * 16
    (choice,) = last["choices"]
    text = "".join(chunk["choices"][0]["text"] for chunk in (*middle, last))
    assert {**choice, "text": text} == whole["choices"][0]
    assert states[-1]["pieces"] == choice["pieces"]
    changed = [place for state in states for place in state["changed"]]
    assert sorted(changed) == list(range(16))  # each token is revealed once
    assert all(0 < p <= 1 for state in states for p in state["token_probs"])


@pytest.mark.parametrize(
    ("name", "settings", "several"),
    [
        ("masked", {"steps": 16}, True),
        ("masked", {"order": "first-hitting"}, True),
        ("framed", {"order": "probability", "steps": 8}, True),
        ("ar", {}, True),
        ("masked", {"steps": 16, "corrector": "cap", "eta": 0.5}, False),  # which takes tokens back
        ("uniform", {"steps": 16}, False),  # every token may change until the end
    ],
)
def test_what_a_stream_has_sent_is_final(
    client: TestClient, name: str, settings: dict[str, Any], several: bool
) -> None:
    for more in ({}, {"echo": True, "prompt": "the cat "}, {"stop": ["e", "the", " a"], "n": 3}, {"n": 2, "seed": 8}):
        asked = {"model": name, "max_tokens": 24, "seed": 1, **settings, **more}
        whole = client.post("/v1/completions", json=asked).json()["choices"]
        sent = [
            chunk["choices"] for chunk in chunks(client.post("/v1/completions", json={**asked, "stream": True}).text)
        ]
        for choice in whole:
            parts = [part for (part,) in sent if part["index"] == choice["index"]]
            assert "".join(part["text"] for part in parts) == choice["text"]
            assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
            assert all(part["text"] for part in parts[:-1])
        assert all(len(choices) == 1 for choices in sent)
        assert (len(sent) > len(whole)) == several


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
    watched, quiet = ({"stream": watch, "stream_drafts": watch} for watch in (True, False))
    asked = {"model": name, "text": "the ___ sat on the mat", "span_length": 3, "steps": 4, **watched}
    states = drafts(client.post("/v1/infill", json=asked).text)
    given = states[0]["given"]
    pieces = [[state["pieces"][place] for place in given] for state in states]
    assert "".join(pieces[0]).split() == ["the", "sat", "on", "the", "mat"]
    assert len(states[0]["pieces"]) == len(given) + 3
    assert all(shown == pieces[0] for shown in pieces)
    assert "given" not in states[1]
    tokens = client.post("/v1/infill", json={**asked, **quiet}).json()["choices"][0]["token_ids"]
    again = {"model": name, "token_ids": tokens, "masked_positions": [1, 3], "steps": 4, **watched}
    first, *_ = drafts(client.post("/v1/infill", json=again).text)
    assert first["given"] == [place for place in range(len(tokens)) if place not in (1, 3)]


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
        ("completions", {"steps": 65}, 400, "steps must be at most 64 (got 65)"),
        ("completions", {"n": 5}, 400, "n must be at most 4 (got 5)"),
        ("completions", {"max_tokens": 65}, 400, "max_tokens must be at most 64 (got 65)"),
        ("completions", {"prompt": "a" * 501}, 400, "at most 500 characters"),
        ("completions", {"prompt": "the cat " * 30, "max_length": 8}, 400, "leaves no room"),
        ("completions", {"prompt": "the cat " * 12, "max_tokens": 20}, 400, "are more than the 32"),
        ("completions", {"temperature": -1}, 400, "temperature"),
        ("completions", {"step": 4}, 400, "step: Extra inputs"),
        ("completions", {"model": "ar", "steps": 4}, 400, "autoregressive"),
        ("completions", {"model": "uniform", "order": "margin"}, 400, "order margin needs a masked process"),
        ("completions", {"order": "backwards"}, 400, "order"),
        (
            "completions",
            {"order": "margin", "final_step": "sample"},
            400,
            "no sampler takes final_step sample together",
        ),
        ("completions", {"order": "first-hitting", "steps": 4}, 400, "no sampler takes steps 4 together with order"),
        ("completions", {"timesteps": "1,0.5"}, 400, "timesteps must be uniform"),
        (
            "completions",
            {"timesteps": ",".join(str(1 - k / 80) for k in range(81))},
            400,
            "must be at most 64 (got 80)",
        ),
        ("completions", {"guidance": 1e300}, 400, "guidance"),
        ("completions", {"block_length": 10**400}, 400, "block_length"),
        ("completions", {"max_tokens": 48}, 400, "generate in windows: block_length 16"),
        ("completions", {"max_tokens": 64, "block_length": 1, "steps": 4}, 400, "4 steps in each of 33 windows"),
        ("completions", {"model": "uniform", "guidance": 1}, 400, "needs a mask token"),
        ("completions", {"guidance": -1}, 400, "guidance"),
        ("completions", {"seed": -1}, 400, "seed"),
        ("completions", {"max_tokens": 4, "max_length": 4}, 400, "give max_tokens or max_length, not both"),
        ("completions", {"suffix": "mat", "max_length": 4}, 400, "leave out max_length"),
        ("completions", {"model": "ar", "suffix": "mat"}, 400, "autoregressive"),
        ("completions", {"prompt": [["a"]]}, 400, "prompt must be a string, a list of strings"),
        ("completions", {"prompt": []}, 400, "prompt must be a string, a list of strings"),
        ("completions", {"prompt": [1, 288]}, 400, "between 0 and 287 (got 288)"),
        ("completions", {"prompt": ["a"] * 5}, 400, "at most 4 samples are possible in one request (got 5 prompts"),
        ("completions", {"stop": ["a"] * 5}, 400, "up to four strings"),
        ("completions", {"stop": ""}, 400, "none of them empty"),
        ("completions", {"logprobs": 0}, 400, "logprobs is not supported"),
        ("completions", {"n": 2, "best_of": 3}, 400, "best_of must be n, which is 2 (got 3)"),
        ("completions", {"logit_bias": {"288": 1}}, 400, "between 0 and 287 (got '288')"),
        ("completions", {"model": "uniform", "presence_penalty": 1}, 400, "needs a masked process"),
        ("completions", {"stream": False, "stream_options": {}}, 400, "set stream to true"),
        ("infill", {"text": "nothing to fill"}, 400, "has no blanks"),
        ("infill", {}, 400, "give a text with blanks, or token_ids"),
        ("infill", {"token_ids": [1, 2], "masked_positions": [2]}, 400, "between 0 and 1 (got 2)"),
        ("infill", {"token_ids": [1, 99999], "masked_positions": [0]}, 400, "(got 99999)"),
        ("infill", {"token_ids": [1, 2], "masked_positions": []}, 400, "at least one of masked_positions"),
        ("infill", {"model": "ar", "text": "a ___ b"}, 400, "autoregressive"),
        ("infill", {"text": "[MASK:65]"}, 400, "at most 64 tokens"),
    ],
)
def test_what_cannot_be_done_is_explained(
    client: TestClient, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    for stream in (False, True):
        answer = client.post(f"/v1/{path}", json={"stream": stream, **body})
        assert answer.status_code == status
        error = answer.json()["error"]
        assert message in error["message"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] is None or error["param"] in body


def test_a_short_text_of_wide_blanks_is_refused_before_it_is_built() -> None:
    asked = Infill(text="[MASK:100000]a" * 30)  # three million tokens
    tracemalloc.start()
    with pytest.raises(ValueError, match="at most 64 tokens"):
        check_request(asked, MODELS["masked"], Limits(max_length=64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def endless(*_: object) -> Iterator[service.Progress]:
    while True:
        yield service.Progress()
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
        with pytest.raises(service.ApiError, match="cancelled"):
            await asyncio.wait_for(service.plain_response(job, {}, Left()), 5)
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


@pytest.mark.parametrize(("work", "asked"), [("_draft", {"stream_drafts": True}), ("_final_text", {})])
def test_only_what_is_sent_is_made(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, work: str, asked: dict[str, Any]
) -> None:
    def made(*_: object) -> dict[str, Any]:
        raise ValueError(f"{work} was called")

    monkeypatch.setattr(f"cdlm.studio.generation.{work}", made)
    assert client.post("/v1/completions", json={"steps": 4, "max_tokens": 8}).status_code == 200
    streamed = client.post("/v1/completions", json={"steps": 4, "stream": True, **asked}).text
    error = json.loads(streamed.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
    assert (error["message"], error["type"]) == (f"{work} was called", "invalid_request_error")


def test_what_is_no_request_is_refused(client: TestClient) -> None:
    for body, kind in ((b"{", "application/json"), (b"{}", "text/plain"), (b"[]", "application/json")):
        answer = client.post("/v1/completions", content=body, headers={"content-type": kind})
        assert "must be a JSON object" in answer.json()["error"]["message"]
    assert client.get("/v1/nothing").status_code == 404
    assert client.get("/v1/completions").status_code == 405
    assert client.delete("/v1/jobs/unknown").json()["error"]["message"].startswith("there is no such job")
    large = client.post("/v1/completions", content=b" " * (MAX_BODY + 1))
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")

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
    assert answer.json()["error"]["type"] == "rate_limit_error"


def test_a_failure_inside_is_not_shown_to_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> Iterator[Any]:
        yield from ()
        raise RuntimeError("secret path /home/someone")

    monkeypatch.setattr("cdlm.studio.app.generation_events", broken)
    with TestClient(create_app(MODELS), raise_server_exceptions=False) as client:
        plain, streamed = (client.post("/v1/completions", json={"stream": stream}) for stream in (False, True))
    assert plain.status_code == 500
    error = {"message": service.FAILED, "type": "server_error", "param": None, "code": "internal_error"}
    assert plain.json()["error"] == json.loads(streamed.text.removeprefix("data: "))["error"] == error


def test_a_token_guards_the_service() -> None:
    with TestClient(create_app(MODELS, token="abc")) as client:
        for headers in ({}, {"authorization": "Bearer abd"}):
            refused = client.get("/v1/models", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
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
    assert client.get("/v1/moons", params={"steps": 7}).status_code == 400


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
        *("/health", "/v1/models", "/v1/models/{model}", "/v1/limits", "/v1/settings", "/v1/completions"),
        *("/v1/infill", "/v1/jobs/{job}", "/v1/results", "/v1/moons", "/v1/sudoku", "/v1/sudoku/models"),
    }
    for path in ("/v1/completions", "/v1/infill"):
        assert set(paths[path]["post"]["responses"]) == set(map(str, (200, 400, 401, 404, 409, 413, 429)))
    stop = paths["/v1/jobs/{job}"]["delete"]
    assert set(stop["responses"]) == {"204", "401", "404"}
    (named,) = stop["parameters"]
    assert (named["name"], named["in"], named["schema"]["type"]) == ("job", "path", "string")
    assert all("422" not in call["responses"] for verbs in paths.values() for call in verbs.values())


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
            greedy = name == "temperature" and request != "SettingsRequest"  # a temperature of 0, as OpenAI has it
            assert kind.get("minimum") == (0 if greedy else spec.minimum)
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
        assert answer.status_code == 400
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
        Completion(prompt="", max_tokens=1),
        Completion(prompt="the cat sat on the mat. a dog", max_length=3),
    ):
        with pytest.raises(ValueError, match="tokens") as refused:
            check_request(asked, model, limits)
        assert "--" not in str(refused.value)
        assert "Python" not in str(refused.value)
