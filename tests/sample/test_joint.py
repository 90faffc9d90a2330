"""Sampling with a joint head, against the product of its conditionals over every state of a tiny space."""

import itertools

import pytest
import torch
from torch import Tensor

from cdlm.model.denoiser import Denoiser
from cdlm.process import masked, uniform
from cdlm.rng import seeded
from cdlm.sample.ancestral import ancestral
from cdlm.sample.draw import last, make_draw
from cdlm.sample.generate import generate
from cdlm.sample.joint import joint
from cdlm.sample.logits import LogitsRows
from cdlm.sample.order import plan_by_level
from cdlm.sample.samplers import ORDERS, load_function
from cdlm.sample.settings import Settings, describe_settings, resolve
from cdlm.sample.timesteps import timesteps

from .truth import agrees, index, point, sequences, tiny

V, L, MASK = 2, 3, 2
PROCESS = masked(V)


def network(layers: int = 1, vocab: int = V, **shape: int) -> Denoiser:
    """Random, and far from certain of anything."""
    net = tiny(masked(vocab), vocab, joint_layers=layers, **shape).requires_grad_(False)
    last_layer = net.dit.output_layer
    for weight in (*last_layer.adaLN_modulation.parameters(), last_layer.linear.bias):
        weight.zero_()
    last_layer.linear.weight.mul_(0.3)
    return net


def blank(n: int, length: int = L, vocab: int = V) -> Tensor:
    return torch.full((n, length), vocab)


def choose(**given) -> Settings:
    return resolve(given, PROCESS, joint_head=True)


def hop(
    net: Denoiser, x: Tensor, places: list[int], t: float, settings: Settings, prompt: Tensor | None = None
) -> Tensor:
    """The distribution over all states after a hop from one state, token by token by the uncached head."""
    every = sequences(V + 1, len(x))
    draw = make_draw(net, PROCESS, x[None], settings, prompt=None if prompt is None else prompt[None])
    after = torch.zeros(len(every), dtype=torch.float64)
    alpha = PROCESS.noise.alpha(torch.tensor([t], dtype=torch.float64))
    hidden = net.features(x[None], alpha)
    for tokens in itertools.product(range(V), repeat=len(places)):
        y, chance = x[None].clone(), 1.0
        for count, (place, token) in enumerate(zip(places, tokens, strict=True), 1):
            revealed = torch.zeros(1, len(x), dtype=torch.bool)
            revealed[0, places[:count]] = True
            row = net.condition(hidden, y.clamp(max=V - 1), revealed)[:, place]
            rows = LogitsRows(torch.tensor([t], dtype=torch.float64), y, torch.tensor([place]))
            chance *= float(draw.process(net.logits(row), rows).softmax(-1)[0, token])
            y[0, place] = token
        after[index(y, V + 1)] += chance
    return after


def truth(net: Denoiser, x: Tensor, settings: Settings, seed: int = 0, n: int = 20_000) -> Tensor:
    """The product of the conditionals, averaged over the plans of n sequences with this noise."""
    where = (x == MASK).expand(n, -1)
    times, rng = timesteps(settings), seeded(seed, batch=n)
    level = load_function(ORDERS[settings.order].levels)(where, len(times) - 1, rng)
    step = torch.full(where.shape, -1)
    for number, evaluation in enumerate(plan_by_level(PROCESS, where, level, times, rng)):
        step.view(-1)[evaluation.index] = number
    every = sequences(V + 1, len(x))
    total = torch.zeros(len(every), dtype=torch.float64)
    patterns, counts = step.unique(dim=0, return_counts=True)
    for pattern, count in zip(patterns, counts, strict=True):
        law = point(x, V + 1)
        for number in range(int(pattern.max()) + 1):
            places = (pattern == number).nonzero()[:, 0].tolist()
            after = torch.zeros_like(law)
            for state in law.nonzero()[:, 0].tolist():
                after += law[state] * hop(net, every[state], places, 0.5, settings, x != MASK)
            law = after
        total += law * float(count) / n
    return total


CASES = {
    "one step": {"steps": 1},
    "dilated": {"steps": 2, "order": "dilated"},
    "bit-reversed": {"steps": 2, "order": "bit-reversed"},
    "fp32": {"steps": 1, "precision": "fp32"},
    "temperature": {"steps": 1, "temperature": 0.6},
    "top-p": {"steps": 1, "top_p": 0.7},
    "penalties": {"steps": 1, "presence_penalty": 1.5, "log_frequency_penalty": 1.0},
    "penalties, two steps": {"steps": 2, "order": "dilated", "presence_penalty": 1.5},
    "guidance": {"steps": 1, "guidance": 0.5},
}


@pytest.mark.parametrize(("name", "prompt"), [*((name, None) for name in CASES), ("dilated", 1), ("penalties", 1)])
def test_samples_have_the_product_of_the_conditionals(name: str, prompt: int | None) -> None:
    """In every order, after a prompt or none; processors act on each draw and see the tokens of the step."""
    net, n = network(), 20_000
    x = blank(n)
    if prompt is not None:
        x[:, 1] = prompt
    settings = choose(**CASES[name])
    assert settings.sampler == "joint"
    drawn = last(joint(net, PROCESS, x, settings, seeded(0, batch=n))).x
    assert agrees(drawn, truth(net, x[0], settings), V + 1)


def test_random_order_of_two_steps() -> None:
    """Every position falls into either step by itself: all patterns, each as likely as another."""
    net, n, settings = network(), 20_000, choose(steps=2)
    law = torch.zeros((V + 1) ** L, dtype=torch.float64)
    every = sequences(V + 1, L)
    for pattern in itertools.product(range(2), repeat=L):
        now = point(blank(1)[0], V + 1)
        for number in range(2):
            places = [i for i in range(L) if pattern[i] == number]
            states = now.nonzero()[:, 0].tolist()
            now = sum(now[state] * hop(net, every[state], places, 0.5, settings) for state in states)
        law += now / 2**L
    drawn = last(joint(net, PROCESS, blank(n), settings, seeded(1, batch=n))).x
    assert agrees(drawn, law, V + 1)


def test_it_differs_from_independent_draws() -> None:
    net, n = network(), 20_000
    drawn = last(ancestral(net, PROCESS, blank(n), choose(steps=1, sampler="ancestral"), seeded(0, batch=n))).x
    assert not agrees(drawn, truth(net, blank(1)[0], choose(steps=1)), V + 1)


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_one_token_per_step_is_the_ancestral_sampler(precision: str) -> None:
    net = network(vocab=7)
    process, x = masked(7), blank(16, 8, 7)
    given = {"steps": 8, "order": "dilated", "precision": precision}
    one = last(joint(net, process, x, choose(**given), seeded(0, batch=16)))
    other = last(ancestral(net, process, x, choose(**given, sampler="ancestral"), seeded(0, batch=16)))
    assert torch.equal(one.x, other.x)
    assert one.nfe == other.nfe == [8] * 16


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("final_step", ["none", "sample", "argmax"])
def test_the_cache_changes_nothing(layers: int, final_step: str) -> None:
    """Cached draws are those of the definition: each token by a pass of the head over all of its step so far."""
    net, length, n = network(layers, vocab=7), 12, 6
    process, x = masked(7), blank(6, 12, 7)
    x[0], x[1, ::2] = 3, 4
    settings = choose(steps=3, final_step=final_step)
    states = list(joint(net, process, x, settings, seeded(2, batch=n)))
    rng = seeded(2, batch=n)
    where = x == 7
    level = load_function(ORDERS["random"].levels)(where, 3, rng)
    for before, after, evaluation in zip(
        states, states[1:], plan_by_level(process, where, level, timesteps(settings), rng, final_step), strict=False
    ):
        hidden, y = net.features(before.x, process.noise.alpha(evaluation.t)), before.x.clone()
        revealed = torch.zeros_like(where)
        draw = make_draw(net, process, x, settings)
        for number, flat in enumerate(evaluation.index.tolist()):
            row, place = divmod(flat, length)
            revealed[row, place] = True
            rows = net.condition(hidden[row : row + 1], y[row : row + 1].clamp(max=6), revealed[row : row + 1])
            logits = net.logits(rows[:, place])
            greedy = evaluation.u is None
            token = logits.argmax(-1) if greedy else draw.token(logits, evaluation.u[number : number + 1])
            y[row, place] = token
        assert torch.equal(y, after.x)


@pytest.mark.parametrize(
    ("shape", "order"), [({"position_embeddings": 12}, "random"), ({"grid_embeddings": 4}, "grid")]
)
def test_a_sample_does_not_depend_on_its_batch(shape: dict[str, int], order: str) -> None:
    net, process = network(vocab=7, **shape), masked(7)
    x = blank(9, 12, 7)
    x[4, :5] = torch.arange(5)
    settings, rng = choose(steps=3, order=order, temperature=0.8, frequency_penalty=0.5), seeded(3, batch=9)
    whole = last(joint(net, process, x, settings, rng, given=x < 7)).x
    for rows in (torch.tensor([4]), torch.tensor([8, 0, 3])):
        part = last(joint(net, process, x[rows], settings, rng[rows], given=x[rows] < 7)).x
        assert torch.equal(part, whole[rows])
    assert torch.equal(whole[4, :5], torch.arange(5))


def test_it_heeds_banned_tokens_and_processors_of_the_caller() -> None:
    net, process = network(vocab=7), masked(7)

    def forbid_three(logits: Tensor, rows: LogitsRows) -> Tensor:
        return logits.index_fill(-1, torch.tensor([3]), -torch.inf)

    settings, rng = choose(steps=2), seeded(1, batch=50)
    states = generate(net, process, blank(50, 8, 7), settings, rng, banned=[2], logits_processors=[forbid_three])
    assert set(last(states).x.flatten().tolist()) == {0, 1, 4, 5, 6}


@pytest.mark.parametrize("shape", [{}, {"grid_embeddings": 4}], ids=str)
def test_probabilities_are_those_of_the_draws(shape: dict[str, int]) -> None:
    """The product of what is watched is the likelihood of the sample, by the head in one pass."""
    net, process, x = network(vocab=7, **shape), masked(7), blank(5, 8, 7)
    settings, rng = choose(steps=1), seeded(0, batch=5)
    final = last(generate(net, process, x, settings, rng, watch=True))
    hidden = net.features(x, process.noise.alpha(torch.ones(5, dtype=torch.float64)))
    law = net.head(net.condition(hidden, final.x, torch.ones_like(x, dtype=torch.bool)))
    expected = law.gather(-1, final.x[..., None])[..., 0].exp().float()
    assert torch.allclose(final.token_probs, expected, rtol=1e-5)


def test_it_is_chosen_for_models_with_a_head() -> None:
    assert resolve({"steps": 4}, PROCESS, joint_head=True).sampler == "joint"
    assert resolve({"steps": 4}, PROCESS).sampler == "ancestral"
    assert resolve({"steps": 4, "sampler": "ancestral"}, PROCESS, joint_head=True).sampler == "ancestral"
    assert resolve({"steps": 4, "corrector": "cap"}, PROCESS, joint_head=True).sampler == "corrector"
    assert resolve({"order": "first-hitting"}, PROCESS, joint_head=True).sampler == "first-hitting"
    assert "sampler joint" in describe_settings(choose(steps=4))
    assert "sampler" not in " ".join(describe_settings(choose(steps=4, sampler="ancestral")))


@pytest.mark.parametrize(
    ("given", "process", "joint_head", "message"),
    [
        ({}, PROCESS, False, "needs a model with a joint head"),
        ({}, uniform(V), False, "needs a model with a joint head"),
        ({"order": "probability"}, PROCESS, True, "--order probability"),
        ({"corrector": "cap"}, PROCESS, True, "--corrector cap"),
        ({"precision": "naive-fp32"}, PROCESS, True, "--precision naive-fp32"),
    ],
)
def test_what_is_not_defined_is_refused(given: dict, process, joint_head: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve({"steps": 4, "sampler": "joint", **given}, process, joint_head=joint_head)


def test_a_model_without_a_head_is_refused_by_the_sampler_too() -> None:
    net = tiny(PROCESS, V)
    with pytest.raises(ValueError, match="needs a model with a joint head"):
        last(joint(net, PROCESS, blank(2), choose(steps=1), seeded(0, batch=2)))
