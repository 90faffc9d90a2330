"""Penalties of repetition: the formulas in plain Python, and the exact distribution of samplers that use them."""

import collections
import math

import pytest
import torch
from torch import Tensor

from cdlm.process import masked, uniform
from cdlm.rng import seeded
from cdlm.sample.generate import generate
from cdlm.sample.logits import LogitsRows, logits_processors, penalise, penalise_log
from cdlm.sample.settings import resolve

from ..writers import small
from .truth import Table, V, agrees, ancestor, composed, noise, point, sequences, text, tiny

N, STEPS, LENGTH = 16_000, 3, 3
LINEAR = {"frequency_penalty": 0.8, "presence_penalty": 0.5}
LOG = {"log_frequency_penalty": 1.5, "temperature": 0.6}


def penalised(row: list[float], others: list[int], sampled: list[int], settings: dict[str, float]) -> list[float]:
    """The logits of one position: `others` are the tokens elsewhere in the text, and `sampled` those not given."""
    text, own = collections.Counter(others), collections.Counter(sampled)
    frequency, presence = settings.get("frequency_penalty", 0.0), settings.get("presence_penalty", 0.0)
    log_frequency = settings.get("log_frequency_penalty", 0.0)
    linear = [logit - own[j] * frequency - float(own[j] > 0) * presence for j, logit in enumerate(row)]
    cooled = [logit / settings.get("temperature", 1.0) for logit in linear]
    return [logit - log_frequency * math.log(1 + text[j]) for j, logit in enumerate(cooled)]


def by_hand(net: Table, settings: dict[str, float], given: set[int]):
    """The penalised prediction at every position of every state; a mask (the state V) is no token."""

    def law(x: Tensor, t: float) -> Tensor:
        found = net.law(x, t).log()
        for row, tokens in zip(found, x.tolist(), strict=True):
            for place in range(len(tokens)):
                others = [token for i, token in enumerate(tokens) if i != place and token < V]
                sampled = [token for i, token in enumerate(tokens) if i not in given | {place} and token < V]
                row[place] = torch.tensor(penalised(row[place].tolist(), others, sampled, settings))
        return found.softmax(-1)

    return law


@pytest.mark.parametrize("sampler", ["ancestral", "plain"])
@pytest.mark.parametrize("settings", [LINEAR, LOG, LINEAR | LOG], ids=["linear", "log", "both"])
@pytest.mark.parametrize("prompt", [None, 1], ids=["unconditional", "prompt"])
def test_samples_have_the_distribution_of_the_formulas(
    settings: dict[str, float], sampler: str, prompt: int | None
) -> None:
    """And not that without penalties; a prompt counts for the logarithmic one alone."""
    process = masked(V)
    net, grid = Table(process, LENGTH), torch.linspace(1, 0, STEPS + 1, dtype=torch.float64)
    rng, given = seeded(5, batch=N), torch.zeros(LENGTH, dtype=torch.bool)
    x = process.start(LENGTH, rng("start"))
    begin = noise(process, LENGTH)
    if prompt is not None:
        x[:, 1], given[1] = prompt, True
        begin = point(torch.tensor([V, prompt, V]), process.states)
    predict = net.plain if sampler == "plain" else net
    resolved = resolve({"steps": STEPS, "sampler": sampler, **settings}, process)
    drawn = text(generate(predict, process, x, resolved, rng, given=given.expand_as(x)))
    places = set(given.nonzero()[:, 0].tolist())
    truth = composed(begin, process, LENGTH, ancestor(process, by_hand(net, settings, places)), grid)
    assert agrees(drawn, truth, process.states)
    other = {"temperature": settings.get("temperature", 1.0)}
    assert not agrees(
        drawn, composed(begin, process, LENGTH, ancestor(process, by_hand(net, other, places)), grid), process.states
    )


@pytest.mark.parametrize("sampler", ["ancestral", "plain"])
def test_a_uniform_process_counts_the_whole_text(sampler: str) -> None:
    """Noise included, since nobody knows which tokens are noise; but not the token that may be replaced."""
    process = uniform(V)
    net, grid = Table(process, LENGTH), torch.linspace(1, 0, STEPS + 1, dtype=torch.float64)
    rng = seeded(5, batch=N)
    resolved = resolve({"steps": STEPS, "sampler": sampler, **LOG}, process)
    predict = net.plain if sampler == "plain" else net
    drawn = text(generate(predict, process, process.start(LENGTH, rng("start")), resolved, rng))
    truth = composed(noise(process, LENGTH), process, LENGTH, ancestor(process, by_hand(net, LOG, set())), grid)
    assert agrees(drawn, truth, process.states)


@pytest.mark.parametrize("given", [{"order": "probability", "steps": 3}, {"order": "first-hitting"}], ids=str)
def test_one_token_at_a_time(given: dict[str, object]) -> None:
    """A strong penalty makes all tokens of a text different, and its negative makes them equal."""
    process = masked(V)
    for sign in (1, -1):
        strong = {"log_frequency_penalty": 300.0 * sign}
        rng = seeded(2, batch=200)
        x = process.start(LENGTH, rng("start"))
        found = text(generate(Table(process, LENGTH), process, x, resolve({**given, **strong}, process), rng))
        kinds = torch.tensor([len(set(row)) for row in found.tolist()])
        assert bool((kinds == (LENGTH if sign > 0 else 1)).all())


@pytest.mark.parametrize("settings", [LINEAR, LOG, LINEAR | LOG], ids=["linear", "log", "both"])
def test_an_autoregressive_model_follows_the_chain_rule(settings: dict[str, float]) -> None:
    net, length, prompt = tiny(None, V), 4, [1, 2]
    law = point(torch.tensor(prompt), V)
    for done in range(len(prompt), length):
        with torch.no_grad():
            logits = net(sequences(V, done))[:, -1]
        rows = [
            penalised(row, tokens, tokens[len(prompt) :], settings)
            for row, tokens in zip(logits.tolist(), sequences(V, done).tolist(), strict=True)
        ]
        law = (law[:, None] * torch.tensor(rows, dtype=torch.float64).softmax(-1)).flatten()
    x = torch.tensor([[*prompt, 0, 0]]).expand(N, -1)
    given = (torch.arange(length) < len(prompt)).expand(N, -1)
    found = text(generate(net, None, x, resolve(settings, None), seeded(1, batch=N), given=given))
    assert agrees(found, law, V)


def test_the_formulas_on_a_text() -> None:
    """Tokens 3 and 4 twice, one of the 3s in the prompt; 5 is a special token, and 6 the mask."""
    x = torch.tensor([[3, 4, 5, 4, 3, 6], [6, 6, 6, 6, 6, 0]])
    prompt = torch.tensor([[True] + [False] * 5, [False] * 6])
    rows = LogitsRows(torch.ones(3), x, torch.tensor([5, 3, 6]))
    logits = torch.zeros(3, 6)
    linear = penalise(logits, rows, frequency=0.5, presence=2.0, prompt=prompt, special=(5,))
    assert linear.tolist() == [[0, 0, 0, -2.5, -3.0, 0], [0, 0, 0, -2.5, -2.5, 0], [-2.5, 0, 0, 0, 0, 0]]
    two, three = math.log(2), math.log(3)
    log = penalise_log(logits, rows, penalty=2.0, special=(5,))
    expected = [[0, 0, 0, -2 * three, -2 * three, 0], [0, 0, 0, -2 * three, -2 * two, 0], [-2 * two, 0, 0, 0, 0, 0]]
    assert torch.allclose(log, torch.tensor(expected))


def test_they_act_before_and_after_the_temperature() -> None:
    names = [stage.func.__name__ for stage in logits_processors(resolve({**LINEAR, **LOG, "top_k": 2}))]
    assert names == ["penalise", "temper", "penalise_log", "keep_top_k"]


@pytest.mark.parametrize("kind", ["masked", "causal"])
def test_a_penalised_sample_does_not_depend_on_its_batch(kind) -> None:
    model, steps = small(kind, "bpe"), {} if kind == "causal" else {"steps": 8}
    asked = {"prompt": "the cat", "max_length": 24, **LINEAR, **LOG, **steps}
    together, apart = (model.sample(6, batch_size=size, **asked) for size in (6, 2))
    assert together == apart
    plain = model.sample(6, **{**asked, **dict.fromkeys((*LINEAR, "log_frequency_penalty"), 0.0)})
    counts = [
        sum(max(collections.Counter(sample.token_ids).values()) for sample in samples) for samples in (together, plain)
    ]
    assert counts[0] < counts[1]


def test_windows_count_what_earlier_ones_have_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the text that a window shows at first, the prompt alone was not sampled."""
    seen: list[tuple[Tensor, Tensor]] = []

    def recorded(denoiser, process, x, settings, rng, *, prompt, **more):
        seen.append((x, prompt))
        return generate(denoiser, process, x, settings, rng, prompt=prompt, **more)

    monkeypatch.setattr("cdlm.text.completion.generate", recorded)
    model = small("masked", length=8)
    found = model.sample(1, 14, prompt="abcd", steps=2, block_length=3, presence_penalty=2.0)[0].token_ids
    mask = model.denoiser.vocab
    assert [x[0].tolist() for x, _ in seen] == [
        found[:4] + [mask] * 4,
        found[3:8] + [mask] * 3,
        found[6:11] + [mask] * 3,
    ]
    assert [prompt[0].tolist().count(True) for _, prompt in seen] == [4, 1, 0]


def test_special_tokens_are_exempt() -> None:
    """A model that wants to end a text everywhere keeps wanting it."""
    model = small("masked", favour=30.0)
    found = model.sample(1, 16, steps=16, frequency_penalty=2.0, log_frequency_penalty=20.0)[0]
    assert found.token_ids == [model.tokenizer.eos] * 16


def test_a_penalty_of_zero_does_nothing() -> None:
    assert logits_processors(resolve(dict.fromkeys((*LINEAR, "log_frequency_penalty"), 0.0))) == ()
