"""Path invariance where every state can be listed: the exact gap, the model's own chain, and reliability."""

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cdlm.metrics.consistency import ReliabilityCurve, exact_gap, exact_gaps, own_chain_gap, reliability_curve
from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.process import Process, bridge_law, masked, transition, uniform, unigram
from cdlm.process.exact import listed, posterior
from cdlm.process.process import Posterior
from cdlm.rng import seeded
from cdlm.types import Predictor

from ..paper.enumeration import tiny
from ..writers import small

V, L = 3, 2
LAW = torch.tensor([8.0, 1, 0.5, 2, 5, 1, 0.5, 3, 4], dtype=torch.float64) / 25
PROCESSES = {
    "masked": masked(V),
    "uniform": uniform(V),
    "unigram": unigram(torch.tensor([0.5, 0.3, 0.2])),
    "mask and unigram": unigram(torch.tensor([0.2, 0.1, 0.3, 0.4]), V),
}
TIMES = [(0.0, 0.4), (0.0, 1.0), (0.25, 0.5), (0.3, 0.9), (0.75, 1.0)]
EVERY = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)


def tempered(predict: Predictor, power: float) -> Predictor:
    return lambda x, t: (predict(x, t) * power).log_softmax(-1)


def network(process: Process, seed: int = 0) -> Denoiser:
    return tiny(process, seed, time_conditioning=process.name != "masked").eval()


def point(token: int, states: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token), states).double()


def by_loops(predict: Predictor, process: Process, s: float, t: float) -> float:
    """Def. 3.2 with Lemma 3.1: for each x_t, the mean over x_0 given x_t and over the bridge to x_s, one by one."""
    q_s, q_t, q_ts = (transition(process, *pair) for pair in ((0.0, s), (0.0, t), (s, t)))
    gap = mass = 0.0
    clean, states = listed(V, L).tolist(), listed(process.states, L)
    now, then = (predict(states, time).detach().exp() for time in (t, max(s, 1e-9)))
    place = {tuple(x): k for k, x in enumerate(states.tolist())}
    for x_t in states.tolist():
        weights = [
            float(p) * math.prod(float(q_t[x0[i], x_t[i]]) for i in range(L)) for p, x0 in zip(LAW, clean, strict=True)
        ]
        if sum(weights) == 0:
            continue
        mean = torch.zeros(L, V, dtype=torch.float64)
        for weight, x0 in zip(weights, clean, strict=True):
            if not weight:
                continue
            laws = [bridge_law(point(x0[i], process.states), torch.tensor(x_t[i]), q_s, q_ts) for i in range(L)]
            for x_s in itertools.product(range(process.states), repeat=L):
                chance = weight / sum(weights) * math.prod(float(laws[i][x_s[i]]) for i in range(L))
                if chance:
                    f = then[place[x_s]] if s else torch.stack([point(token, V) for token in x_s])
                    mean += chance * f
        here = [i for i in range(L) if float(process.prior[x_t[i]]) > 0]
        for i in here:
            gap += sum(weights) * float((now[place[tuple(x_t)]][i] - mean[i]).abs().sum()) / 2
        mass += sum(weights) * len(here)
    return gap / mass


@pytest.mark.parametrize(("s", "t"), TIMES)
@EVERY
def test_the_exact_posterior_has_no_gap(process: Process, s: float, t: float) -> None:
    assert exact_gap(posterior(LAW, process, L), process, LAW, L, s, t) < 1e-9


@EVERY
def test_a_tempered_one_has(process: Process) -> None:
    """At s = 0 the more the further from the truth; at s > 0 a flat law would agree with itself again."""
    exact = posterior(LAW, process, L)
    powers = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)
    data, between = ([exact_gap(tempered(exact, p), process, LAW, L, s, 0.75) for p in powers] for s in (0.0, 0.25))
    assert data[3] < 1e-9
    assert data[:4] == sorted(data[:4], reverse=True)
    assert data[3:] == sorted(data[3:])
    assert all(gap > 0.002 for k, gap in enumerate(between) if k != 3)
    flat = exact_gap(lambda x, t: torch.full((*x.shape, V), -math.log(V)), uniform(V), LAW, L, 0.25, 0.75)
    assert flat < 1e-6


@pytest.mark.parametrize(("s", "t"), TIMES[1:4])
@EVERY
def test_the_gap_is_the_double_sum_over_x0_and_xs(process: Process, s: float, t: float) -> None:
    """For a network of random weights, which is far from consistent."""
    net = network(process)
    with torch.no_grad():
        found = exact_gap(net, process, LAW, L, s, t)
    assert found == pytest.approx(by_loops(net, process, s, t), rel=1e-9)
    assert found > 0.01


def test_the_minimiser_of_udlm_is_not_path_invariant() -> None:
    """p(x_0^i | the others) is no martingale: a perfect UDLM shows a gap here, which is no fault of its own."""
    predict = posterior(LAW, uniform(V), L, leave_one_out=True)
    assert exact_gap(predict, uniform(V), LAW, L, 0.25, 0.5) > 0.01
    assert exact_gap(posterior(LAW, masked(V), L, leave_one_out=True), masked(V), LAW, L, 0.25, 0.5) < 1e-9


def test_heat_has_a_row_for_t_and_a_column_for_s() -> None:
    process = uniform(V)
    predict = tempered(posterior(LAW, process, L), 2.0)
    table = exact_gaps(predict, process, LAW, L, [0.0, 0.4, 1.0])
    gap = functools.partial(exact_gap, predict, process, LAW, L)
    assert table == [[None] * 3, [gap(0.0, 0.4), None, None], [gap(0.0, 1.0), gap(0.4, 1.0), None]]


class Table:
    """A predictor that is known at every state, where a network is asked for."""

    def __init__(self, process: Process, predict: Predictor) -> None:
        self.process, self.predict, self.device = process, predict, torch.device("cpu")

    def __call__(self, x: Tensor, t: float) -> Tensor:
        """With carry-over, as a network has it."""
        certain = torch.full((*x.shape, V), -torch.inf, dtype=torch.float64)
        certain.scatter_(-1, x.clamp(max=V - 1)[..., None], 0.0)
        return torch.where(self.process.positions(x)[..., None], self.predict(x, t), certain)

    def features(self, x: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
        (level,) = alpha.unique()
        law = self.predict(x, float(self.process.noise.inverse(level)))
        return law.gather(1, rows[..., None].expand(-1, -1, V))

    def head(self, rows: Tensor) -> Tensor:
        return rows


def contrary(process: Process) -> Table:
    """Random laws at every state: a predictor that contradicts itself."""
    logits = 2 * torch.randn(process.states**L, L, V, dtype=torch.float64)
    place = process.states ** torch.arange(L - 1, -1, -1)
    return Table(process, lambda x, t: (logits[(x * place).sum(-1)] * (1 + t)).log_softmax(-1))


def own_truth(net: Table, x_t: Tensor, s: float, t: float, how: Posterior) -> float:
    """E f(x_s, s) over the model's own kernel, every x_s listed, at the positions of M(x_t)."""
    process = net.process
    q_s, q_ts = transition(process, 0.0, s), transition(process, s, t)
    states = listed(process.states, L)
    f_t, f_s = net(x_t[None], t)[0].exp(), net(states, s).exp()
    kernel = []
    for i in range(L):
        if how == "mixture":
            rows = [bridge_law(point(v, process.states), x_t[i], q_s, q_ts) for v in range(V)]
            kernel.append(sum(f_t[i, v] * row.nan_to_num(0.0) for v, row in enumerate(rows)))
        else:
            clean = torch.nn.functional.pad(f_t[i], (0, process.states - V))
            kernel.append(bridge_law(clean, x_t[i], q_s, q_ts))
    chance = torch.stack([kernel[i][states[:, i]] for i in range(L)]).prod(0)
    mean = (chance[:, None, None] * f_s).sum(0)
    here = process.positions(x_t)
    return float((f_t - mean)[here].abs().sum() / 2 / max(1, int(here.sum())))


@pytest.mark.parametrize(
    ("name", "how", "hops"),
    [
        ("masked", "plug-in", 400),
        ("uniform", "plug-in", 400),
        ("mask and unigram", "plug-in", 400),
        ("uniform", "mixture", 1024),
        ("unigram", "mixture", 1024),
    ],
)
def test_own_chain_converges_to_the_listed_kernel(name: str, how: Posterior, hops: int) -> None:
    process, s, t = PROCESSES[name], 0.3, 0.8
    net, x0, rng = contrary(process), torch.tensor([[0, 1], [2, 2]]), seeded(4, "chain", batch=2)
    x_t = torch.cat([process.corrupt(x0[k : k + 1], t, rng[torch.tensor([k])]("corrupt")) for k in range(2)])
    truth = sum(own_truth(net, row, s, t, how) for row in x_t) / 2
    few, many = (own_chain_gap(net, x0, s, t, rng, number, posterior=how) for number in (hops // 16, hops))
    assert many.tv == pytest.approx(truth, abs=3 * many.floor + 1e-4)
    assert 0 < many.floor < few.floor / 2
    assert truth > 0.05 > many.floor


def test_a_chain_that_reveals_all_shows_no_gap() -> None:
    """Under masking a revealed token is a draw from f(x_t), whose mean is f(x_t): no hops are needed to know that."""
    found = own_chain_gap(contrary(masked(V)), torch.tensor([[0, 1], [2, 2]]), 1e-12, 1.0, seeded(0, "x", batch=2), 8)
    assert (found.tv, found.floor) == pytest.approx((0.0, 0.0), abs=1e-6)


def test_the_floor_is_what_a_consistent_model_shows() -> None:
    """Of a single token the exact posterior agrees with itself, so that all of its gap is that of finite hops."""
    law, n = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), 60
    table, x0 = Table(uniform(V), posterior(law, uniform(V), 1)), torch.arange(n)[:, None] % V
    found = own_chain_gap(table, x0, 0.3, 0.8, seeded(0, "x", batch=n), 32, posterior="mixture")
    assert found.tv == pytest.approx(found.floor, rel=0.3)


def test_own_chain_repeats_and_takes_some_positions() -> None:
    net, x0 = small("uniform").denoiser, torch.randint(257, (2, 32))
    rng = seeded(0, "chain", batch=2)
    assert own_chain_gap(net, x0, 0.5, 1.0, rng, 8, 4) == own_chain_gap(net, x0, 0.5, 1.0, rng, 8, 4)
    whole = own_chain_gap(net, x0, 0.5, 1.0, rng, 64, 32)
    part = own_chain_gap(net, x0, 0.5, 1.0, rng, 64, 8)
    assert part.tv == pytest.approx(whole.tv, rel=0.5)
    assert part.tv != whole.tv


def curve(
    process: Process, change: Callable[[Predictor], Predictor], s: float, t: float, n: int = 20_000
) -> ReliabilityCurve:
    x0 = listed(V, L)[torch.multinomial(LAW, n, replacement=True, generator=torch.Generator().manual_seed(1))]
    rng = seeded(2, "reliability", batch=n)
    return reliability_curve(Table(process, change(posterior(LAW, process, L))), x0, s, t, rng, rows=5000)


@pytest.mark.parametrize(("s", "t"), [(0.0, 0.5), (0.25, 0.5), (0.5, 1.0)])
@EVERY
def test_an_exact_posterior_is_reliable(process: Process, s: float, t: float) -> None:
    """In every bin the mean of f(x_s) is that of f(x_t), within five standard errors of draws in [0, 1]."""
    found = curve(process, lambda predict: predict, s, t)
    for count, before, after in zip(found.count, found.before, found.after, strict=True):
        assert after == pytest.approx(before, abs=5 * math.sqrt((before * (1 - before) + 1e-4) / count) + 1e-6)
    assert found.error < 0.01
    assert sum(found.count) > 20_000
    assert found.before == sorted(found.before)


@pytest.mark.parametrize("power", [0.4, 2.5])
@EVERY
def test_a_tempered_one_is_not(process: Process, power: float) -> None:
    """Against the data (s = 0): one that is too sure finds less than it promised at the top, a timid one more."""
    found = curve(process, lambda predict: tempered(predict, power), 0.0, 0.6)
    assert found.error > 0.03
    bins = zip(found.before, found.after, found.count, strict=True)
    unsure = [(before, after) for before, after, count in bins if 0.6 < before < 0.99 and count > 500]
    assert all(after < before - 0.01 if power > 1 else after > before + 0.01 for before, after in unsure)


def test_a_curve_against_the_data_by_hand() -> None:
    """Any predictor, all positions: binned here, one at a time, beside whether the token was the true one."""
    process, t = uniform(V), 0.7
    table, x0, rng = contrary(process), listed(V, L).repeat(20, 1), seeded(3, "x", batch=180)
    law = table(process.corrupt(x0, t, rng("corrupt")), t).exp()
    edges = [10 ** (-6 + k / 4) for k in range(25)]
    bins: dict[int, list[tuple[float, float]]] = {}
    for row, i, v in itertools.product(range(len(x0)), range(L), range(V)):
        p = float(law[row, i, v])
        if p > 1e-6:
            bins.setdefault(sum(edge < p for edge in edges), []).append((p, float(x0[row, i] == v)))
    found = reliability_curve(table, x0, 0.0, t, rng, rows=50)
    wanted = [bins[k] for k in sorted(bins)]
    assert found.count == [len(pairs) for pairs in wanted]
    assert found.before == pytest.approx([sum(p for p, _ in pairs) / len(pairs) for pairs in wanted], rel=1e-5)
    assert found.after == pytest.approx([sum(hit for _, hit in pairs) / len(pairs) for pairs in wanted], abs=1e-6)


def test_the_error_of_a_curve_by_hand() -> None:
    """Two bins that hold a mass of 4 x 0.25 and 2 x 0.5: each counts for half."""
    assert ReliabilityCurve([4, 2], [0.25, 0.5], [0.35, 0.3]).error == pytest.approx((0.1 + 0.2) / 2)


def test_only_masks_are_looked_at() -> None:
    """The mass of a curve is the number of laws in it: one for each mask of a text of one token, no others."""
    process, law = masked(V), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    x0, rng = torch.zeros(200, 1, dtype=torch.long), seeded(0, "few", batch=200)
    found = reliability_curve(Table(process, posterior(law, process, 1)), x0, 0.0, 0.5, rng)
    masks = int((process.corrupt(x0, 0.5, rng("corrupt")) == V).sum())
    assert sum(n * p for n, p in zip(found.count, found.before, strict=True)) == pytest.approx(masks)


def test_an_autoregressive_model_has_no_levels() -> None:
    net = Denoiser(NetworkConfig(8, 1, 2, 4, 0.0, causal=True), None, V)
    x0, rng = torch.zeros(2, L, dtype=torch.long), seeded(0, "x", batch=2)
    with pytest.raises(ValueError, match="autoregressive model has no noise levels"):
        own_chain_gap(net, x0, 0.5, 1.0, rng)
    with pytest.raises(ValueError, match="autoregressive model has no noise levels"):
        reliability_curve(net, x0, 0.5, 1.0, rng)
