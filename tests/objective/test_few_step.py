"""The likelihood of a sampler of few steps, against the sampler itself and the law it draws from, written out."""

import collections
import math

import pytest
import torch

from cdlm.methods import METHODS
from cdlm.metrics.likelihood import repeated_nelbo
from cdlm.metrics.sampler_likelihood import sampler_nats
from cdlm.objective import Bridge, Data, Objective, Ordered, Revealed, Times
from cdlm.process import masked, uniform
from cdlm.rng import seeded
from cdlm.sample.order import plan_by_level
from cdlm.sample.samplers import ORDERS, load_function
from cdlm.sample.settings import resolve
from cdlm.sample.timesteps import uniform_times
from cdlm.schedules import constant

from ..paper.enumeration import p_value
from ..sample.test_order import planned
from ..sample.truth import Table, V, index

L, STEPS = 4, 2
MASK, PROCESS = V, masked(V)
SPREAD = ["dilated", "bit-reversed"]
X0 = torch.tensor([2, 0, 1, 1])


def patterns(coupling: Bridge | Ordered, n: int) -> list[tuple[int, ...]]:
    """For each row the hop in which each position is revealed, as the training states show it."""
    x0, rng, hop = X0.expand(n, -1), seeded(3, batch=n), torch.full((n, L), -1)
    for k in range(STEPS):
        s, t = (torch.full((n,), (STEPS - k - j) / STEPS, dtype=torch.float64) for j in (1, 0))
        pair = coupling(x0, s, t, rng)
        shown = (pair.x_t == MASK) & (pair.x_s != MASK)
        assert bool((hop[shown] == -1).all())  # the same levels at every time: what is revealed stays so
        hop[shown] = k
        assert torch.equal(pair.x_t, torch.where(hop.eq(-1) | shown, MASK, x0))
        assert torch.equal(pair.positions & pair.known, shown)
    assert bool((hop >= 0).all())
    return [tuple(row) for row in hop.tolist()]


@pytest.mark.parametrize("order", SPREAD)
@pytest.mark.parametrize("steps", [2, 4])
def test_training_sees_the_masks_that_the_sampler_meets(order: str, steps: int, monkeypatch) -> None:
    monkeypatch.setitem(globals(), "STEPS", steps)
    n = 4000
    levels = load_function(ORDERS[order].levels)
    trained = collections.Counter(patterns(Ordered(PROCESS, levels, steps), n))
    rng = seeded(8, batch=n)
    everywhere = torch.ones(n, L, dtype=torch.bool)
    plan = plan_by_level(PROCESS, everywhere, levels(everywhere, steps, rng), uniform_times(steps), rng)
    met = torch.full((n * L,), -1)
    for number, evaluation in enumerate(plan):
        met[evaluation.index] = number
    sampled = collections.Counter(tuple(row) for row in met.view(n, L).tolist())
    assert set(trained) == set(sampled)
    flat = torch.full((len(sampled),), 1 / len(sampled), dtype=torch.float64)  # every pattern as likely as another
    for found in (trained, sampled):
        assert p_value(torch.tensor([found[key] for key in sampled]), flat) > 1e-6


@pytest.mark.parametrize("order", SPREAD)
def test_the_loss_is_minus_the_log_likelihood_of_the_sampler(order: str) -> None:
    """For each pattern, the terms of all hops add up to the probability that `planned` gives the text."""
    net, n = Table(PROCESS, L), 4000
    rows = patterns(Ordered(PROCESS, load_function(ORDERS[order].levels), STEPS), n)
    truth = {}
    for hop in set(rows):
        plan = [([i for i in range(L) if hop[i] == k], (STEPS - k) / STEPS) for k in range(STEPS)]
        truth[hop] = -math.log(float(planned(net, plan, torch.full((L,), MASK))[index(X0, V + 1)])) / L
    share = collections.Counter(rows)
    mean = sum(truth[hop] * count for hop, count in share.items()) / n
    settings = resolve({"steps": STEPS, "order": order}, PROCESS)
    many = sampler_nats(net, PROCESS, X0[None].expand(n, -1), settings, seeded(1, batch=n), rows=n) / L
    assert float(many.mean()) == pytest.approx(mean, abs=6 * float(many.std()) / n**0.5)
    objective = METHODS["few-step"](PROCESS, total=10, steps=STEPS, order=order)
    x0 = X0[None].expand(400, -1)
    losses = [float(objective.loss(net, None, x0, 0, seeded(k, batch=400), plain=True).total) for k in range(20)]
    assert sum(losses) / 20 == pytest.approx(mean, abs=6 * float(torch.tensor(losses).std()) / 20**0.5)
    (term,) = objective.terms
    for hop in truth:
        here = torch.tensor([row for row, found in enumerate(rows) if found == hop][:1])
        total = 0.0
        for k in range(STEPS):
            s, t = (torch.full((n,), (STEPS - k - j) / STEPS, dtype=torch.float64) for j in (1, 0))
            pair = term.coupling(X0.expand(n, -1), s, t, seeded(3, batch=n))
            law = net.law(pair.x_t[here], float(t[0])).log()[0]
            ((where, goal),) = term.target(pair)
            own = where // L == int(here)
            total -= float(law[where[own] % L, goal[own]].sum())
        assert total / L == pytest.approx(truth[hop], rel=1e-9)


def test_many_steps_are_the_nelbo() -> None:
    """At random times the same bound as MDLM's: one hop for each of very many levels."""
    net = Table(PROCESS, L, timed=False)
    x0 = X0[None].expand(4000, -1)
    rng = seeded(1, batch=len(x0))
    few = [sampler_nats(net, PROCESS, x0, resolve({"steps": n}, PROCESS), rng, rows=16_000) / L for n in (1, 64)]
    model = repeated_nelbo(net, x0, 16, 1, 64_000)
    noise = sum(float(found.var()) / found.numel() for found in (model, few[1])) ** 0.5
    assert float(few[1].mean()) == pytest.approx(float(model.mean()), abs=5 * noise)
    assert noise < 0.05 < 0.3 < abs(float(few[0].mean() - model.mean()))


def test_times_are_those_of_a_sampler() -> None:
    times = Times(constant(1 / 8), constant(1 / 8), whole=True)
    stratum = torch.arange(800)
    s, t = times(0.0, stratum, 800, seeded(0, batch=800))
    assert sorted(set((t * 8).tolist())) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert torch.allclose(t - s, torch.full_like(t, 1 / 8))
    assert torch.bincount((t * 8).round().long())[1:].tolist() == pytest.approx([100] * 8, abs=1)
    many = Times(constant(1 / 32), constant(1 / 8), whole=True)
    s, t = many(0.0, stratum, 800, seeded(0, batch=800))
    hop = t - s
    for number in (1 / hop, t / hop):
        assert torch.allclose(number, number.round(), atol=1e-6)
    assert 8 <= float((1 / hop).round().min()) < 11
    assert 30 < float((1 / hop).round().max()) <= 32


def test_revealed_positions_are_part_of_the_data_target() -> None:
    pair = Bridge(PROCESS)(
        X0.expand(50, -1), *(torch.full((50,), t, dtype=torch.float64) for t in (0.4, 0.9)), seeded(1, batch=50)
    )
    ((some, tokens),) = Revealed()(pair)
    ((every, _),) = Data()(pair)
    assert set(some.tolist()) < set(every.tolist())
    assert torch.equal(tokens, pair.x_s.flatten()[some])


@pytest.mark.parametrize(
    ("name", "choices", "advice"),
    [
        ("few-step", {"steps": 0}, "at least one step"),
        ("few-step", {"steps": 8, "most": 4}, "`most` is not below `steps`"),
        ("few-step", {"order": "backwards"}, "'backwards'.*random, dilated, bit-reversed"),
        ("mcdlm-guided", {"temperature": 0.0}, "temperature of a target must be above 0"),
        ("mcdlm-guided", {"guidance": -0.5}, "guidance of a target is at least 0"),
        ("mcdlm-pplopt", {"switch": 1.0}, "switch is a share of the run between 0 and 1; got 1.0"),
        ("sdtt", {"rounds": 12}, "rounds=12, so at most 11 rounds"),
        ("duo", {"gamma_min": -1.0, "gamma_max": -3.0}, "a larger one; got -1.0 and -3.0"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(name: str, choices: dict, advice: str) -> None:
    process = uniform(V) if METHODS[name].process == "uniform" else PROCESS
    with pytest.raises(ValueError, match=advice):
        METHODS[name](process, **choices)


def test_two_terms_need_two_names() -> None:
    term = METHODS["mdlm"](PROCESS).terms[0]
    with pytest.raises(ValueError, match="give every term another one"):
        Objective((term, term), 10)
