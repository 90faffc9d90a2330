"""Divergences against sums written out token by token, and the rate KL against the bridges that it is the limit of."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cdlm.objective import DIVERGENCES, divergence
from cdlm.objective.divergence import FLOOR, describe, jsd, kl, rate_kl, reverse_kl, tv
from cdlm.process import Cosine, Process, bridge_law, masked, transition, uniform, unigram
from cdlm.types import Pair

V = 5
LAW = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
PROCESSES = {
    "masked": masked(V),
    "masked-cosine": masked(V, Cosine()),
    "uniform": uniform(V),
    "unigram": unigram(LAW),
    "unigram-with-gaps": unigram(torch.tensor([0.5, 0.0, 0.3, 0.2, 0.0])),
    "mask-and-unigram": unigram(torch.cat([LAW, torch.tensor([2.0]).double()]), vocab=V),
}
every_process = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES.keys())
PLAIN = {name: found for name, found in DIVERGENCES.items() if found is not rate_kl}  # those that need no pair
NAMES = {found: name for name, found in DIVERGENCES.items()}
plain = pytest.mark.parametrize("found", PLAIN.values(), ids=PLAIN.keys())
logits = st.lists(st.integers(-600, 600).map(lambda i: i / 100), min_size=V, max_size=V)


def laws(*rows: int, seed: int = 0, width: int = V) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(*rows, width, generator=generator, dtype=torch.float64)).log_softmax(-1)


def xlogx(p: float, ratio: float) -> float:
    return p * math.log(ratio) if p > 0 else 0.0


def naive(name: str, p: list[float], q: list[float]) -> float:
    """The definition, as a sum over tokens."""
    if name == "kl":
        return sum(xlogx(a, a / b) for a, b in zip(p, q, strict=True))
    if name == "reverse_kl":
        return sum(xlogx(b, b / max(a, 1e-6)) for a, b in zip(p, q, strict=True))
    if name == "tv":
        return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    assert name == "jsd", f"write down here, as a sum over tokens, what {name} is"
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return (naive("kl", p, middle) + naive("kl", q, middle)) / 2


def naive_rate_kl(process: Process, p: list[float], q: list[float], z: int, alpha: float, dalpha: float) -> float:
    """Sum over all other states of the KL between two jump intensities."""
    prior = process.prior.tolist()
    extra = [0.0] * (process.states - V)
    levels = [[alpha * a + (1 - alpha) * b for a, b in zip(law + extra, prior, strict=True)] for law in (p, q)]
    total = 0.0
    for y in range(process.states):
        if y != z:
            r, s = (-dalpha / alpha * prior[z] * level[y] / level[z] for level in levels)
            total += (xlogx(r, r / s) if r else 0.0) - r + s
    return total


def pair_at(process: Process, x_t: Tensor, t: Tensor) -> Pair:
    """The record that a divergence sees at rows; only the fields that it may use carry information."""
    blank, dot = torch.zeros_like(x_t), torch.full_like(t, math.nan)
    return Pair(
        x0=blank,
        x_s=blank,
        x_t=x_t,
        s=dot,
        t=t,
        alpha_s=dot,
        alpha_t=process.noise.alpha(t),
        dalpha_t=process.noise.derivative(t),
        positions=process.positions(x_t),
        known=blank.bool(),
        prior=process.prior,
    )


def contributing(process: Process) -> list[int]:
    return [z for z in range(process.states) if process.prior[z] > 0]


@plain
def test_dense_form_is_the_sum_over_tokens(found):
    p, q = laws(40, seed=1), laws(40, seed=2)
    truth = [naive(NAMES[found], *pair) for pair in zip(p.exp().tolist(), q.exp().tolist(), strict=True)]
    assert found(target=p, student=q).tolist() == pytest.approx(truth, abs=1e-13)


@plain
def test_point_mass_form_is_the_sum_over_tokens(found):
    q, y = laws(40, seed=3), torch.arange(40) % V
    hot = torch.nn.functional.one_hot(y, V).double().tolist()
    truth = [naive(NAMES[found], *pair) for pair in zip(hot, q.exp().tolist(), strict=True)]
    assert found(target=y, student=q).tolist() == pytest.approx(truth, abs=1e-13)


@pytest.mark.parametrize("found", [kl, reverse_kl, jsd, tv], ids=str)
def test_point_mass_form_is_the_limit_of_the_dense_form(found):
    q, y = laws(30, seed=4), torch.arange(30) % V
    hot = torch.nn.functional.one_hot(y, V).bool()
    # The reverse KL has no limit: its floor is met at the mass that it stands for.
    small = 1e-6 if found is reverse_kl else 1e-13
    sharp = torch.where(hot, math.log1p(-(V - 1) * small), math.log(small)).double()
    gap = 1e-5 if found is reverse_kl else 1e-10
    assert found(target=y, student=q).tolist() == pytest.approx(found(target=sharp, student=q).tolist(), abs=gap)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(logits, logits)
def test_bounds_and_symmetry(a, b):
    p, q = (torch.tensor([x], dtype=torch.float64).log_softmax(-1) for x in (a, b))
    values = {found: float(found(target=p, student=q)) for found in (kl, reverse_kl, jsd, tv)}
    assert values[kl] >= -1e-12
    assert values[reverse_kl] >= -1e-12
    assert -1e-12 <= values[jsd] <= math.log(2)
    assert 0 <= values[tv] <= 1
    assert values[kl] == pytest.approx(float(reverse_kl(target=q, student=p)), abs=1e-12)
    assert values[jsd] == pytest.approx(float(jsd(target=q, student=p)), abs=1e-12)
    assert values[tv] == pytest.approx(float(tv(target=q, student=p)), abs=1e-12)
    assert values[tv] ** 2 / 2 <= values[jsd] + 1e-12  # Pinsker, twice
    assert 2 * values[tv] ** 2 <= values[kl] + 1e-12
    assert values[jsd] <= math.log(2) * values[tv] + 1e-12


@plain
def test_zero_between_equal_laws_and_only_there(found):
    p, q = laws(20, seed=5), laws(20, seed=6)
    assert found(target=p, student=p).abs().max() < 1e-15
    assert float(found(target=p, student=q).min()) > 1e-3


@every_process
def test_rate_kl_is_zero_between_equal_laws_and_positive_elsewhere(process):
    z = torch.tensor(contributing(process)).repeat(5)
    pair = pair_at(process, z, torch.linspace(0.1, 0.9, len(z)).double())
    p, q = laws(len(z), seed=5), laws(len(z), seed=6)
    assert rate_kl(target=p, student=p, pair=pair).abs().max() < 1e-12
    assert float(rate_kl(target=p, student=q, pair=pair).min()) > 1e-4


@every_process
@pytest.mark.parametrize("t", [1e-3, 0.2, 0.7, 1.0])
def test_rate_kl_is_the_sum_over_rates(process, t):
    z = torch.tensor([z for z in contributing(process) for _ in range(V)])
    times = torch.full((len(z),), t, dtype=torch.float64)
    pair = pair_at(process, z, times)
    p, q, y = laws(len(z), seed=7), laws(len(z), seed=8), torch.arange(len(z)) % V
    hot = torch.nn.functional.one_hot(y, V).double()
    alpha, dalpha = float(pair.alpha_t[0]), float(pair.dalpha_t[0])
    for target, dense in ((p, p.exp()), (y, hot)):
        truth = [
            naive_rate_kl(process, dense[i].tolist(), q[i].exp().tolist(), int(z[i]), alpha, dalpha)
            for i in range(len(z))
        ]
        found = rate_kl(target=target, student=q, pair=pair)
        assert found.tolist() == pytest.approx(truth, rel=1e-10, abs=1e-10)


@every_process
@pytest.mark.parametrize("t", [0.1, 0.5, 0.9])
def test_rate_kl_is_the_limit_of_the_kl_between_bridges(process, t):
    """KL(bridge(P) || bridge(Q)) / (t - s) as s -> t, by two small steps and extrapolation."""
    z = torch.tensor([z for z in contributing(process) for _ in range(V)])
    p, q, y = laws(len(z), seed=9), laws(len(z), seed=10), torch.arange(len(z)) % V
    pad = torch.zeros(len(z), process.states - V, dtype=torch.float64)

    def slope(law: Tensor, h: float) -> Tensor:
        hop = transition(process, 0.0, t - h), transition(process, t - h, t)
        one, two = (bridge_law(torch.cat([x, pad], -1), z, *hop) for x in (law, q.exp()))
        terms = torch.where(one > 0, one * torch.log(one / two), 0.0)
        return terms.sum(-1) / h

    pair = pair_at(process, z, torch.full((len(z),), t, dtype=torch.float64))
    for target, law in ((p, p.exp()), (y, torch.nn.functional.one_hot(y, V).double())):
        limit = 2 * slope(law, 2e-5) - slope(law, 4e-5)
        found = rate_kl(target=target, student=q, pair=pair)
        assert found.tolist() == pytest.approx(limit.tolist(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("noise", [None, Cosine(0.01)])
def test_rate_kl_on_the_masked_process_is_the_weighted_cross_entropy(noise):
    process = masked(V, noise)
    t = torch.linspace(0.01, 0.99, 20).double()
    pair = pair_at(process, torch.full((20,), V), t)
    q, y, p = laws(20, seed=11), torch.arange(20) % V, laws(20, seed=12)
    weight = -process.noise.derivative(t) / (1 - process.noise.alpha(t))
    assert torch.allclose(rate_kl(target=y, student=q, pair=pair), weight * kl(target=y, student=q), rtol=1e-12)
    assert torch.allclose(rate_kl(target=p, student=q, pair=pair), weight * kl(target=p, student=q), rtol=1e-10)


@every_process
def test_rate_kl_in_single_precision(process):
    z = torch.tensor([z for z in contributing(process) for _ in range(V)])
    y = torch.arange(len(z)) % V
    q = laws(len(z), seed=13)
    for t in (0.05, 0.5, 0.95):
        pair = pair_at(process, z, torch.full((len(z),), t, dtype=torch.float64))
        exact = rate_kl(target=y, student=q, pair=pair)
        rough = rate_kl(target=y, student=q.float(), pair=pair)
        assert rough.dtype == torch.float32
        assert rough.tolist() == pytest.approx(exact.tolist(), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("t", [1e-3, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("kind", [masked, uniform])
def test_rate_kl_in_single_precision_at_the_size_of_gpt2s_vocabulary(kind, t):
    v = 50_257
    process = kind(v)
    q = laws(4, seed=14, width=v)
    y = torch.tensor([0, 1, 7, 50_256])
    z = torch.full((4,), v) if process.states > v else torch.tensor([0, 2, 7, 5])
    pair = pair_at(process, z, torch.full((4,), t, dtype=torch.float64))
    exact = rate_kl(target=y, student=q, pair=pair)
    assert rate_kl(target=y, student=q.float(), pair=pair).tolist() == pytest.approx(exact.tolist(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("point", [False, True], ids=["dense", "point"])
@every_process
def test_gradients(name, point, process):
    z = torch.tensor(contributing(process))
    pair = pair_at(process, z, torch.linspace(0.2, 0.8, len(z)).double())
    target = torch.arange(len(z)) % V if point else laws(len(z), seed=15)
    scores = torch.randn(len(z), V, dtype=torch.float64, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return DIVERGENCES[name](target=target, student=x.log_softmax(-1), pair=pair)

    assert torch.autograd.gradcheck(loss, scores)


@pytest.mark.parametrize("name", PLAIN)
def test_minimised_at_the_target(name):
    """Descending the logits of the student leads to the target law."""
    p = laws(3, seed=16) / 2
    p = p.log_softmax(-1)
    x = torch.zeros_like(p).requires_grad_()
    optimiser = torch.optim.LBFGS([x], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = DIVERGENCES[name](target=p, student=x.log_softmax(-1)).sum()
        value.backward()
        return value

    optimiser.step(closure)
    assert torch.allclose(x.log_softmax(-1).exp(), p.exp(), atol=0.05 if name == "tv" else 1e-4)


def test_floor_of_the_reverse_kl():
    q, y = laws(10, seed=17), torch.arange(10) % V
    assert math.log(1e-6) == FLOOR
    at_y = q.exp().gather(-1, y[:, None])[:, 0]
    entropy = -(q.exp() * q).sum(-1)
    for floor in (FLOOR, -3.0, -30.0):
        found = divergence("reverse_kl", floor)(target=y, student=q)
        assert torch.allclose(found, -floor * (1 - at_y) - entropy, atol=1e-12)
    assert torch.equal(reverse_kl(target=y, student=q), divergence("reverse_kl")(target=y, student=q))
    dense = divergence("reverse_kl", -3.0)(target=laws(10, seed=18), student=q)
    assert torch.equal(dense, reverse_kl(target=laws(10, seed=18), student=q))  # dense targets have no floor


def test_reverse_kl_to_tokens_of_a_law_is_least_at_a_flatter_one():
    """At exp(-floor p), not at p: in a large vocabulary a flat p becomes noise (docs/ablations.md, Table 6)."""

    def expected(found, z):
        return (LAW * found(target=torch.arange(V), student=z.log_softmax(-1).expand(V, V))).sum()

    for found, best in ((reverse_kl, -FLOOR * LAW), (kl, LAW.log())):
        z = best.clone().requires_grad_()
        (slope,) = torch.autograd.grad(expected(found, z), z)
        assert slope.abs().max() < 1e-12
        assert all(expected(found, z) < expected(found, z + 0.1 * row) for row in laws(20))


def test_divergences_by_name():
    assert [divergence(name) for name in DIVERGENCES] == list(DIVERGENCES.values())
    assert divergence("jsd", -3.0) is jsd
    with pytest.raises(ValueError, match=f"unknown divergence 'js'; choose from {', '.join(DIVERGENCES)}$"):
        divergence("js")


def test_divergences_describe_themselves():
    assert describe(jsd) == "jsd"
    assert describe(reverse_kl) == "reverse_kl, floor -13.8"
    assert describe(divergence("reverse_kl")) == "reverse_kl, floor -13.8"


def test_a_chosen_floor_is_shown_once():
    assert describe(divergence("reverse_kl", -3.0)) == "reverse_kl, floor -3"
