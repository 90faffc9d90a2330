"""The bound of a sampler itself, against every order and every sequence of a tiny space, written out."""

import collections
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cdlm.metrics import sampler_likelihood
from cdlm.metrics.sampler_likelihood import check_has_likelihood, repeated_sampler_nats, sampler_nats
from cdlm.process import Cosine, masked, uniform
from cdlm.rng import seeded
from cdlm.sample.generate import generate
from cdlm.sample.settings import Settings, resolve

from ..sample.test_confidence import listed
from ..sample.test_penalties import penalised
from ..sample.truth import Table, V, agrees, ancestor, composed, noise, text, tiny

L, STEPS, N = 3, 3, 4000
PROCESS = masked(V)
CLEAN = torch.tensor(list(itertools.product(range(V), repeat=L)))
Pattern = tuple[int, ...]
"""The step in which each position is drawn."""
SHAPING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "temperature_end": 1.5},
    {"guidance": 0.8},
    {"guidance": 1.5, "guidance_end": 0.2, "temperature": 0.9},
    {"frequency_penalty": 0.8, "presence_penalty": -0.5},
    {"log_frequency_penalty": 1.5, "temperature": 0.7, "guidance": 0.4, "presence_penalty": 0.3},
]


def shaped(net: Table, given: dict[str, Any], prompt: frozenset[int] = frozenset()):
    """The predictions after guidance, penalties and temperature, by their formulas."""
    start, end = given.get("guidance", 0.0), given.get("guidance_end")
    hot, cold = given.get("temperature", 1.0), given.get("temperature_end")

    def law(x: Tensor, t: float) -> Tensor:
        blank = net.law(torch.full((1, x.shape[1]), V), 1.0)[0].mean(0).log()
        g = start if end is None else end + (start - end) * t
        heat = hot if cold is None else cold + (hot - cold) * t
        found = net.law(x, t).log()
        found = found + g * (found - blank)
        for row, tokens in zip(found, x.tolist(), strict=True):
            for place in range(len(tokens)):
                others = [token for i, token in enumerate(tokens) if i != place and token < V]
                sampled = [token for i, token in enumerate(tokens) if i not in prompt | {place} and token < V]
                about = {**given, "temperature": heat}
                row[place] = torch.tensor(penalised(row[place].tolist(), others, sampled, about), dtype=row.dtype)
        return found.softmax(-1)

    return law


def pattern_nats(law, pattern: Pattern, times: list[float], x0: Tensor, given: frozenset[int] = frozenset()) -> float:
    """-log of the probability that a sampler draws x0 with these positions in these steps."""
    nats = 0.0
    for step, t in enumerate(times):
        x = torch.tensor([[int(x0[i]) if i in given or pattern[i] < step else V for i in range(len(x0))]])
        found = law(x, t)[0]
        nats -= sum(math.log(found[i, x0[i]]) for i in range(len(x0)) if i not in given and pattern[i] == step)
    return nats


def patterns(order: str, length: int, steps: int, equal: bool) -> dict[Pattern, float]:
    """Every pattern of an order, with its probability."""
    if order == "dilated":  # positions `steps` apart together, the groups in any order, from any first number on
        every = [
            tuple(turn[(i + offset) % steps] for i in range(length))
            for turn in itertools.permutations(range(steps))
            for offset in range(steps)
        ]
    else:
        every = list(itertools.product(range(steps), repeat=length))
    if equal and order == "random":
        every = [tuple(found) for found in every if all(found.count(k) == length // steps for k in range(steps))]
    counts = collections.Counter(every)
    return {pattern: count / len(every) for pattern, count in counts.items()}


def uniform_grid(steps: int) -> list[float]:
    return [1 - k / steps for k in range(steps)]


ORDERS = [("random", L, False), ("dilated", 2, False), ("dilated", 3, True), ("random", 1, False), ("random", 3, True)]


@pytest.mark.parametrize("given", SHAPING, ids=str)
@pytest.mark.parametrize(("order", "steps", "equal"), ORDERS)
def test_it_is_the_mean_over_orders(order: str, steps: int, equal: bool, given: dict[str, Any]) -> None:
    """Every estimate is that of one order, and the mean over all of them is above -log p, which it equals if there is
    only one."""
    net = Table(PROCESS, L)
    settings = resolve({"steps": steps, "order": order, "step_size": "equal" if equal else "random", **given}, PROCESS)
    law, every = shaped(net, given), patterns(order, L, steps, equal)
    x0 = torch.tensor([[2, 0, 1], [1, 1, 1]])
    found = sampler_nats(net, PROCESS, x0.repeat_interleave(600, 0), settings, seeded(1, batch=1200), rows=500)
    for row, estimates in zip(x0, found.view(2, -1), strict=True):
        nats = torch.tensor(
            [pattern_nats(law, pattern, uniform_grid(steps), row) for pattern in every], dtype=torch.float64
        )
        share = torch.tensor(list(every.values()), dtype=torch.float64)
        nearest = (estimates[:, None] - nats).abs().min(-1)
        assert float(nearest.values.max()) < 1e-9
        bound, exact = float((share * nats).sum()), -float((share.log() - nats).logsumexp(0))
        assert exact <= bound + 1e-12
        assert (exact == pytest.approx(bound)) == (len(every) == 1)
        error = float(estimates.std()) / len(estimates) ** 0.5
        assert abs(float(estimates.mean()) - bound) < 5 * error + 1e-9


@pytest.mark.parametrize("given", SHAPING[1::2], ids=str)
def test_the_patterns_are_those_of_the_sampler(given: dict[str, Any]) -> None:
    """The likelihood that the bound is about is that of the samples, hop by hop over every state."""
    net, grid = Table(PROCESS, L), torch.linspace(1, 0, STEPS + 1, dtype=torch.float64)
    law = shaped(net, given)
    truth = composed(noise(PROCESS, L), PROCESS, L, ancestor(PROCESS, law), grid)
    every = patterns("random", L, STEPS, False)
    for x0 in CLEAN[::5]:
        mixed = sum(
            share * math.exp(-pattern_nats(law, pattern, uniform_grid(STEPS), x0)) for pattern, share in every.items()
        )
        assert mixed == pytest.approx(float(truth[sum(int(token) * 4 ** (2 - i) for i, token in enumerate(x0))]))
    rng = seeded(5, batch=N)
    drawn = text(
        generate(net, PROCESS, PROCESS.start(L, rng("start")), resolve({"steps": STEPS, **given}, PROCESS), rng)
    )
    assert agrees(drawn, truth, PROCESS.states)


def test_dilated_samples_follow_their_patterns() -> None:
    net, given = Table(PROCESS, L), {"guidance": 0.5, "temperature": 0.8}
    law, every = shaped(net, given), patterns("dilated", L, 2, False)
    rng = seeded(6, batch=N)
    settings = resolve({"steps": 2, "order": "dilated", **given}, PROCESS)
    drawn = text(generate(net, PROCESS, PROCESS.start(L, rng("start")), settings, rng))
    truth = torch.zeros(PROCESS.states**L, dtype=torch.float64)
    for x0 in CLEAN:
        place = sum(int(token) * 4 ** (2 - i) for i, token in enumerate(x0))
        truth[place] = sum(
            share * math.exp(-pattern_nats(law, pattern, uniform_grid(2), x0)) for pattern, share in every.items()
        )
    assert agrees(drawn, truth, PROCESS.states)


def test_context_is_given_and_not_scored() -> None:
    given, prompt = {"frequency_penalty": 1.0, "log_frequency_penalty": 0.7}, frozenset({1})
    net, settings = Table(PROCESS, L), resolve({"steps": 2, "step_size": "equal", **given}, PROCESS)
    x0 = torch.tensor([[2, 0, 0]]).expand(400, -1)
    context = torch.tensor([False, True, False]).expand(400, -1)
    found = sampler_nats(net, PROCESS, x0, settings, seeded(0, batch=400), given=context)
    law = shaped(net, given, prompt)
    truth = {round(pattern_nats(law, pattern, [1.0, 0.5], x0[0], prompt), 9) for pattern in ((0, 0, 1), (1, 0, 0))}
    assert {round(value, 9) for value in found.tolist()} == truth
    everything = torch.ones(3, L, dtype=torch.bool)
    for order in ("random", "margin"):
        settings = resolve({"order": order}, PROCESS)
        nothing = sampler_nats(net, PROCESS, x0[:3], settings, seeded(0, batch=3), given=everything)
        assert nothing.tolist() == [0, 0, 0]


@pytest.mark.parametrize("by", ["margin", "entropy-bound"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_order_that_follows_from_the_predictions_is_exact(by: str, steps: int) -> None:
    """It is unrolled, and the probabilities of all sequences add up to 1. Every draw of the sampler listed: the order
    of certainties is that of the predictions themselves."""
    net, grid = Table(PROCESS, L), torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    settings = resolve({"order": by, "steps": steps, "entropy_bound": 1.0} if by == "entropy-bound" else
                       {"order": by, "steps": steps}, PROCESS)  # fmt: skip
    found = sampler_nats(net, PROCESS, CLEAN, settings, seeded(0, batch=len(CLEAN)), rows=10)
    assert float((-found).exp().sum()) == pytest.approx(1)
    truth = listed(net, torch.full((L,), V), grid, by, 1.0)
    places = (CLEAN * torch.tensor([16, 4, 1])).sum(-1)
    assert torch.allclose((-found).exp(), truth[places], atol=1e-12)


def test_margin_with_everything_has_the_distribution_of_its_samples() -> None:
    net, given = Table(PROCESS, L), {"order": "margin", "steps": 2, "guidance": 0.8, "temperature": 0.7}
    settings = resolve({**given, "log_frequency_penalty": 1.0}, PROCESS)
    found = (-sampler_nats(net, PROCESS, CLEAN, settings, seeded(0, batch=len(CLEAN)))).exp()
    truth = torch.zeros(PROCESS.states**L, dtype=torch.float64)
    truth[(CLEAN * torch.tensor([16, 4, 1])).sum(-1)] = found
    rng = seeded(5, batch=N)
    assert agrees(text(generate(net, PROCESS, PROCESS.start(L, rng), settings, rng)), truth, PROCESS.states)


def test_ties_of_margin_are_random() -> None:
    """Equal margins everywhere: the first position is any, and the bound is above the likelihood."""
    net = Table(PROCESS, L)
    net.base[-1], net.slope[-1] = net.base[-1, 0].clone(), net.slope[-1, 0].clone()  # the fully masked sequence
    settings = resolve({"order": "margin", "steps": 3}, PROCESS)
    found = repeated_sampler_nats(net, PROCESS, CLEAN, settings, likelihood_samples=90)
    assert found.shape == (len(CLEAN), 30)
    assert float(found.std(-1).max()) > 0.1
    assert float((-found).exp().mean(-1).sum()) == pytest.approx(1, abs=0.1)
    assert float((-found.mean(-1)).exp().sum()) < 0.5


@pytest.mark.parametrize("noise_schedule", [None, Cosine()], ids=["log-linear", "cosine"])
def test_a_part_of_the_steps_stands_for_all(noise_schedule: Cosine | None) -> None:
    """Unbiased, with empty steps left out; and with as many evaluations as steps nothing is left to chance."""
    process = masked(V, noise_schedule)
    net, settings = tiny(process, V), resolve({"steps": 6}, process)
    n = 800
    x0 = torch.tensor([[0, 2, 1, 1, 0, 2, 2, 1]]).expand(n, -1)
    whole = sampler_nats(net, process, x0, settings, seeded(3, batch=n), rows=4000)
    for most in (1, 2, 3):
        part = sampler_nats(net, process, x0, settings, seeded(3, batch=n), num_evaluations=most, rows=4000)
        difference = part - whole
        assert abs(float(difference.mean())) < 5 * float(difference.std()) / n**0.5
        assert float(difference.std()) > 0.1
    assert torch.equal(
        whole, sampler_nats(net, process, x0, settings, seeded(3, batch=n), num_evaluations=6, rows=4000)
    )


def test_the_network_runs_as_often_as_asked() -> None:
    net, x0 = Table(PROCESS, 4), torch.zeros(10, 4, dtype=torch.long)
    for steps, samples, expected in ((1, 16, 10), (4, 16, 160), (4, 3, 20), (4, 1, 10)):
        net.rows = 0
        settings = resolve({"steps": steps, "step_size": "equal"}, PROCESS)
        found = repeated_sampler_nats(net, PROCESS, x0, settings, samples)
        assert net.rows == expected
        assert found.shape == (10, {1: 1, 16: 4, 3: 2}.get(samples if steps > 1 else 1))


FORCED: list[dict[str, Any]] = [
    {"steps": 5, "guidance": 0.5, "temperature": 0.8},
    {"steps": 3, "order": "dilated", "log_frequency_penalty": 1.0, "guidance_end": 1.0},
    {"steps": 4, "order": "bit-reversed", "timesteps": "cosine", "frequency_penalty": 0.5},
    {"steps": 4, "order": "dilated", "step_size": "equal", "final_step": "sample"},
    {"order": "first-hitting", "presence_penalty": 0.5, "temperature_end": 0.5},
]


@pytest.mark.parametrize("given", FORCED, ids=str)
def test_it_is_the_sampler_itself_with_the_tokens_of_the_text(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same number as the sampler's own run in which every token drawn is replaced by that of the text."""
    net, settings = tiny(PROCESS, V), resolve(given, PROCESS)
    x0 = torch.randint(V, (7, 12), generator=torch.Generator().manual_seed(0))
    context = torch.zeros_like(x0, dtype=torch.bool)
    context[:, 3:5] = True
    about: dict[str, Any] = {"given": context, "special": (1,), "rows": 4}
    found = sampler_nats(net, PROCESS, x0, settings, seeded(0, batch=7), **about)
    monkeypatch.setattr(sampler_likelihood, "UNROLLED", (settings.sampler,))
    about["rows"] = 7  # the noise of a sampler's run depends on its rows alone
    assert torch.allclose(found, sampler_nats(net, PROCESS, x0, settings, seeded(0, batch=7), **about), atol=1e-9)


@pytest.mark.parametrize("given", [{"top_k": 1}, {"top_p": 0.2}], ids=str)
@pytest.mark.parametrize("order", ["random", "margin"])
def test_what_cannot_be_drawn_costs_infinitely_much(given: dict[str, Any], order: str) -> None:
    net, settings = Table(PROCESS, L), resolve({"steps": 2, "order": order, **given}, PROCESS)
    found = sampler_nats(net, PROCESS, CLEAN, settings, seeded(0, batch=len(CLEAN)))
    assert not bool(found.isnan().any())
    assert 0 < int(found.isfinite().sum()) < len(CLEAN) / 2
    every = resolve({"steps": 2, "order": order, "top_k": V}, PROCESS)
    assert bool(sampler_nats(net, PROCESS, CLEAN, every, seeded(0, batch=len(CLEAN))).isfinite().all())
    banned = sampler_nats(net, PROCESS, CLEAN, every, seeded(0, batch=len(CLEAN)), banned=(2,))
    assert torch.equal(banned.isinf(), (CLEAN == 2).any(-1))


def test_many_steps_tend_to_one_token_at_a_time() -> None:
    """What drawing tokens together costs: nothing in the limit, and most in a single step."""
    net, x0 = Table(PROCESS, L, timed=False), torch.tensor([[2, 0, 1]]).expand(3000, -1)
    few, many, one = (
        sampler_nats(net, PROCESS, x0, resolve(given, PROCESS), seeded(1, batch=3000), rows=3000)
        for given in ({"steps": 1}, {"steps": 1000}, {"order": "first-hitting"})
    )
    assert float(few.std()) < 1e-9
    assert abs(float(many.mean() - one.mean())) < 5 * float(one.std()) / 3000**0.5
    law = net.law
    orders = [
        pattern_nats(law, pattern, [1.0, 0.5, 0.1], x0[0]) for pattern in itertools.permutations(range(L))
    ]  # fmt: skip
    assert float(one.mean()) == pytest.approx(sum(orders) / 6, abs=5 * float(one.std()) / 3000**0.5)


@pytest.mark.parametrize(
    ("settings", "process", "advice"),
    [
        (resolve({}, None), None, "autoregressive model, whose likelihood is exact"),
        (resolve({}, uniform(V)), uniform(V), "a uniform process"),
        (resolve({"order": "probability"}, PROCESS), PROCESS, "--order probability"),
        (resolve({"corrector": "cap"}, PROCESS), PROCESS, "the corrector sampler"),
        (resolve({"final_step": "argmax"}, PROCESS), PROCESS, "--final-step argmax"),
        (resolve({"precision": "naive-fp32"}, PROCESS), PROCESS, "the naive sampler"),
        (resolve({"block_length": 4}, PROCESS), PROCESS, "--block-length"),
    ],
)
def test_samplers_without_a_bound_are_refused(settings: Settings, process: Any, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        check_has_likelihood(settings, process)


def test_masks_are_no_data() -> None:
    with pytest.raises(ValueError, match="is noise, not data"):
        sampler_nats(
            Table(PROCESS, L), PROCESS, torch.full((1, L), V), resolve({}, PROCESS), seeded(0, batch=1)
        )  # fmt: skip
