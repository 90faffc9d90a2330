"""OpenAI's own client against a server of ours: what it sends is understood, and what it reads is there."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")

import openai
import uvicorn

from cdlm.studio.app import create_app
from cdlm.studio.schema import Limits

from ..writers import BPE, small

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")
MODELS = {
    "masked": small("masked", "bpe"),
    "uniform": small("uniform", "bpe"),
    "ar": small("causal", "bpe"),
    "padded": small("masked", "bpe", favour=1.5, framed=True, padded=True),
}
MASKED = MODELS["masked"]


@contextlib.contextmanager
def served(**more: Any) -> Iterator[str]:
    """A server in a thread of its own, at a free port."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    app = create_app(MODELS, limits=Limits(max_length=64, max_samples=6), **more)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def client_of(url: str, key: str = "unused") -> Any:
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with served() as url, client_of(url) as found:
        yield found


def test_models(client: Any) -> None:
    models = client.models.list()
    assert [(model.id, model.object, model.owned_by) for model in models] == [
        (name, "model", "cdlm") for name in MODELS
    ]
    assert client.models.retrieve("uniform") == models.data[1]
    assert isinstance(models.data[0].created, int)
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("some/other")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("model", MODELS)
def test_a_completion(client: Any, model: str) -> None:
    steps = {} if model == "ar" else {"steps": 8}
    found = client.completions.create(
        model=model,
        prompt="the cat",
        max_tokens=12,
        n=2,
        seed=4,
        temperature=0.7,
        top_p=0.9,
        user="me",
        extra_body=steps,
    )
    begin = len(MODELS[model].continuations(["the cat"], 1, 12, new_tokens=True)[0].token_ids) - 12
    truth = MODELS[model].sample(
        2, begin + 12, "the cat", seed=4, temperature=0.7, top_p=0.9, stop_at_eos=True, **steps
    )
    assert ["the cat" + choice.text for choice in found.choices] == [sample.text for sample in truth]
    assert [choice.index for choice in found.choices] == [0, 1]
    assert (found.object, found.model) == ("text_completion", model)
    assert found.id.startswith("cmpl-")
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (begin, 24, begin + 24)
    for choice, sample in zip(found.choices, truth, strict=True):
        ended = len(sample.token_ids) < begin + 12
        assert choice.finish_reason == ("stop" if ended else "length")
        assert choice.logprobs is None


def test_defaults_are_those_of_the_api(client: Any) -> None:
    """Sixteen tokens, one sample, another one each time; null is as good as nothing."""
    first, second = (client.completions.create(model="masked", prompt=None) for _ in range(2))
    assert first.usage.completion_tokens == 16
    assert first.choices[0].text != second.choices[0].text
    again = client.completions.create(
        model="masked", prompt="", seed=first.seed, n=None, stop=None, temperature=None, max_tokens=None, stream=None,
        suffix=None, echo=None, logprobs=None, best_of=None, logit_bias=None, frequency_penalty=None, top_p=None,
    )  # fmt: skip
    assert again.choices[0].token_ids == first.choices[0].token_ids


def test_several_prompts_and_prompts_of_tokens(client: Any) -> None:
    """Each is as good as a request of its own, up to the noise; a list of token ids is one prompt."""
    ids = [BPE.encode(text) for text in ("the cat sat", "a")]
    common = {"model": "masked", "max_tokens": 6, "seed": 2, "n": 2, "echo": True}
    texts, tokens = (client.completions.create(prompt=prompt, **common) for prompt in (["the cat sat", "a"], ids))
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    assert [choice.text.startswith("the cat sat") for choice in texts.choices] == [True, True, False, False]
    assert [choice.text for choice in texts.choices] == [choice.text for choice in tokens.choices]
    assert texts.usage.prompt_tokens == len(ids[0]) + len(ids[1])
    assert texts.usage.completion_tokens == 24
    one = client.completions.create(prompt=ids[0], **common)
    assert [choice.text for choice in one.choices] == [choice.text for choice in texts.choices[:2]]


@pytest.mark.parametrize("model", ["masked", "uniform", "padded"])
def test_a_suffix_is_infilled(client: Any, model: str) -> None:
    found = client.completions.create(
        model=model, prompt="the ___ [MASK] ", suffix=" on the mat.", max_tokens=3, seed=1, extra_body={"steps": 4}
    )
    before, after = BPE.encode("the ___ [MASK]"), BPE.encode(" on the mat.")
    (choice,) = found.choices
    begin = int(MODELS[model].bos_framed) + len(before)
    end = begin + 3 + len(after)
    assert choice.token_ids[begin - len(before) : begin] == before
    assert choice.token_ids[begin + 3 : end] == after
    assert choice.text == BPE.decode(choice.token_ids[begin : begin + 3]).removeprefix(" ")
    assert set(choice.token_ids[end:]) <= {BPE.eos}
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (end - 3, 3)
    truth = MODELS[model].infill("the [MASK:3] on the mat.", seed=1, steps=4)[0]
    plain = client.completions.create(
        model=model, prompt="the ", suffix=" on the mat.", max_tokens=3, seed=1, extra_body={"steps": 4}
    )
    assert "the " + plain.choices[0].text + " on the mat." == truth.text


def test_stop_strings_end_a_text(client: Any) -> None:
    common = {"model": "ar", "prompt": "the cat", "max_tokens": 24, "seed": 3}
    whole = client.completions.create(**common).choices[0]
    assert whole.finish_reason == "length"
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 2]
    cut = client.completions.create(**common, stop=["no such text", stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")


def test_a_temperature_of_zero_is_greedy(client: Any) -> None:
    found = client.completions.create(model="masked", prompt="the", max_tokens=8, seed=1, temperature=0)
    truth = MASKED.sample(1, 9, "the", seed=1, top_k=1)[0]
    assert found.choices[0].token_ids == truth.token_ids


@pytest.mark.parametrize("model", ["masked", "ar"])
def test_penalties_and_biases_reach_the_sampler(client: Any, model: str) -> None:
    common = {"model": model, "prompt": "the cat", "max_tokens": 20, "seed": 5}
    found = client.completions.create(**common, frequency_penalty=1.5, presence_penalty=0.5)
    length = len(found.choices[0].token_ids)
    settings = {"frequency_penalty": 1.5, "presence_penalty": 0.5}
    truth = MODELS[model].sample(1, length, "the cat", seed=5, **settings)[0]
    assert found.choices[0].token_ids == truth.token_ids
    assert truth.token_ids != MODELS[model].sample(1, length, "the cat", seed=5)[0].token_ids
    (dog,) = BPE.encode(" dog")
    biased = client.completions.create(**common, logit_bias={str(dog): 100})
    assert biased.choices[0].text == " dog" * 20


@pytest.mark.parametrize("model", MODELS)
def test_a_stream_adds_up_to_the_completion(client: Any, model: str) -> None:
    common = {"model": model, "prompt": ["the cat", "a dog sat"], "max_tokens": 16, "seed": 6, "stop": ["e"]}
    whole = client.completions.create(**common)
    chunks = list(client.completions.create(**common, stream=True, stream_options={"include_usage": True}))
    *news, last = chunks
    texts = {choice.index: "" for choice in whole.choices}
    ends = {}
    for chunk in news:
        (choice,) = chunk.choices
        assert choice.index not in ends
        texts[choice.index] += choice.text
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
        assert (chunk.object, chunk.model, chunk.usage) == ("text_completion", model, None)
    assert [texts[choice.index] for choice in whole.choices] == [choice.text for choice in whole.choices]
    assert [ends[choice.index] for choice in whole.choices] == [choice.finish_reason for choice in whole.choices]
    assert last.choices == []
    assert last.usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    plain = list(client.completions.create(**common, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in plain)


def test_drafts_of_a_stream(client: Any) -> None:
    chunks = client.completions.create(
        model="masked", prompt="the cat", max_tokens=8, seed=1, stream=True,
        extra_body={"stream_drafts": True, "steps": 8},
    )  # fmt: skip
    drafts = [choice.draft for chunk in chunks for choice in chunk.choices if choice.finish_reason is None]
    assert drafts[0]["text"] == "░" * 8
    masks = [draft["text"].count("░") for draft in drafts]
    assert masks == sorted(masks, reverse=True)
    assert masks[-1] == 0
    assert [draft["step"] for draft in drafts] == list(range(len(drafts)))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "nobody"}, "model"),
        ({"logprobs": 1}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"n": 7}, "n"),
        ({"temperature": 2_000_000}, "temperature"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"prompt": [1.5]}, "prompt"),
        ({"extra_body": {"step": 4}}, "step"),
        ({"extra_body": {"timesteps": "1,2"}}, "timesteps"),
        ({"model": "uniform", "presence_penalty": 1.0}, "presence_penalty"),
        ({"model": "ar", "suffix": "mat"}, None),
        ({"stream_options": {"include_usage": True}}, None),
    ],
)
def test_errors_are_those_that_the_client_knows(client: Any, body: dict[str, Any], param: str | None) -> None:
    kind = openai.NotFoundError if param == "model" else openai.BadRequestError
    with pytest.raises(kind) as refused:
        client.completions.create(**{"model": "masked", "prompt": "the", **body})
    error = refused.value
    assert (error.type, error.param) == ("invalid_request_error", param)
    assert error.body["message"]


def test_the_token_is_the_api_key() -> None:
    with served(token="secret") as url:
        with client_of(url, "secret") as client:
            assert len(client.models.list().data) == len(MODELS)
        with client_of(url, "wrong") as client, pytest.raises(openai.AuthenticationError) as refused:
            client.completions.create(model="masked", prompt="the")
        assert refused.value.code == "invalid_api_key"
