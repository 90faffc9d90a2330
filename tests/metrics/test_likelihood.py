"""The NELBO against enumeration over every noisy state and quadrature over time; its floor, the true likelihood."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cdlm.eval.cells import EvalCell
from cdlm.eval.config import EvalConfig
from cdlm.eval.datasets import Dataset
from cdlm.eval.measure import likelihood_samples, measure_likelihood
from cdlm.metrics.likelihood import nelbo_estimates, repeated_nelbo
from cdlm.model.config import SIZES
from cdlm.model.denoiser import Denoiser
from cdlm.process import SCHEDULES, Process, masked, uniform, unigram
from cdlm.process.exact import listed
from cdlm.rng import seeded

from ..writers import BYTES, Kind, small

V, L, FLOOR = 3, 2, 1e-3
CLEAN = listed(V, L)
LAW = torch.tensor([8.0, 1, 0.5, 2, 5, 1, 0.5, 3, 4], dtype=torch.float64) / 25


def random_net(process: Process | None) -> Denoiser:
    told = process is not None and process.name != "masked"
    shape = dataclasses.replace(
        SIZES["tiny"], hidden_size=16, num_layers=1, cond_dim=8, causal=process is None, time_conditioning=told
    )
    net = Denoiser(shape, process, None if process else V).double().eval()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return net


class Stand:
    """A predictor where a network is asked for: any function of (x_t, alpha) that gives log-laws. It keeps both."""

    def __init__(self, process: Process, law: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.process, self.law, self.device = process, law, torch.device("cpu")
        self.seen: list[tuple[Tensor, Tensor]] = []

    def features(self, x: Tensor, alpha: Tensor) -> Tensor:
        self.seen.append((x, alpha))
        return self.law(x, alpha)

    def head(self, rows: Tensor) -> Tensor:
        return rows


def bayes(process: Process, leave_one_out: bool, power: float = 1.0) -> Stand:
    """p(x_0^i | x_t), or without the evidence of position i itself, by a sum over every x_0; then tempered."""

    def law(x: Tensor, alpha: Tensor) -> Tensor:
        seen = alpha[:, None, None] * (x[:, None] == CLEAN) + (1 - alpha)[:, None, None] * process.prior[x][:, None]
        found = torch.empty(*x.shape, V, dtype=torch.float64)
        for i in range(L):
            others = [j for j in range(L) if j != i or not leave_one_out]
            weight = LAW * seen[:, :, others].prod(-1)
            for token in range(V):
                found[:, i, token] = weight[:, CLEAN[:, i] == token].sum(-1)
        return (found.log() * power).log_softmax(-1)

    return Stand(process, law)


def quadrature(nodes: int = 40) -> list[tuple[float, float]]:
    """Times and weights of an average over [FLOOR, 1], dense near its lower end."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    span = -math.log(FLOOR)
    times = [(FLOOR * math.exp(span * (u + 1) / 2), weight / 2 * span) for u, weight in zip(x, w, strict=True)]
    return [(t, t * weight / (1 - FLOOR)) for t, weight in times]


def masked_cost(law: Tensor, x0: Tensor, x_t: Tensor, alpha: float, slope: float) -> float:
    """-alpha' / (1 - alpha) times the cross entropy at the masks."""
    here = x_t == V
    return float(-law.gather(-1, x0[:, None])[here].sum()) * -slope / (1 - alpha)


def uniform_cost(law: Tensor, x0: Tensor, x_t: Tensor, alpha: float, slope: float) -> float:
    """ANCHORS 1.8 as it stands: xbar = V alpha x + 1 - alpha, z the noisy id."""
    total = 0.0
    for token, z, p in zip(x0, x_t, law.exp(), strict=True):
        bar, guess = V * alpha * torch.nn.functional.one_hot(token, V).double() + 1 - alpha, V * alpha * p + 1 - alpha
        logs = (bar / bar[z] * torch.log(guess[z] * bar / (guess * bar[z]))).sum()
        total += slope / (V * alpha) * float(V / bar[z] - V / guess[z] - logs)
    return total


def levels(process: Process, t: float) -> tuple[float, float]:
    at = torch.tensor(t, dtype=torch.float64)
    return float(process.noise.alpha(at)), float(process.noise.derivative(at))


@pytest.fixture(scope="module", params=[(kind, noise) for kind in ("masked", "uniform") for noise in SCHEDULES])
def net(request: pytest.FixtureRequest) -> Denoiser:
    kind, noise = request.param
    torch.manual_seed(0)
    return random_net((masked if kind == "masked" else uniform)(V, SCHEDULES[noise]()))


def test_an_estimate_is_the_integrand_at_its_own_time(net: Denoiser) -> None:
    """Row by row, to rounding: the cost of the very x_t and t that were drawn."""
    cost = masked_cost if net.process.name == "masked" else uniform_cost
    stand = Stand(net.process, lambda x, alpha: net.head(net.features(x, alpha)).detach())
    found = repeated_nelbo(stand, CLEAN, times=8, seed=5, rows=13).flatten()
    x_t, alpha = (torch.cat(parts) for parts in zip(*stand.seen, strict=True))
    for k, x0 in enumerate(CLEAN.repeat_interleave(8, 0)):
        t = float(net.process.noise.inverse(alpha[k]))
        with torch.no_grad():
            law = net(x_t[k : k + 1], t)[0]
        assert float(found[k]) == pytest.approx(cost(law, x0, x_t[k], *levels(net.process, t)) / L, rel=1e-6), k


def test_the_mean_of_a_sequence_is_its_own_bound(net: Denoiser) -> None:
    """Every x_t enumerated, t by quadrature: within four standard errors, a few per cent each."""
    process, x0 = net.process, torch.tensor([[0, 2], [1, 1], [2, 0]])
    cost = masked_cost if process.name == "masked" else uniform_cost
    states, truth = listed(process.states, L), torch.zeros(len(x0), dtype=torch.float64)
    for t, weight in quadrature():
        alpha, slope = levels(process, t)
        with torch.no_grad():
            laws = net(states, t)
        for k, row in enumerate(x0):
            for state, law in zip(states, laws, strict=True):
                chance = math.prod(
                    alpha * (a == b) + (1 - alpha) * float(process.prior[b])
                    for a, b in zip(row.tolist(), state.tolist(), strict=True)
                )
                if chance:
                    truth[k] += weight * chance * cost(law, row, state, alpha, slope) / L
    found = repeated_nelbo(net, x0, times=20_000, seed=3, rows=10_000)
    error = found.std(-1) / math.sqrt(found.shape[1])
    assert ((found.mean(-1) - truth).abs() < 4 * error).all()
    assert (error < 0.06 * truth).all()


def test_times_are_stratified_over_each_sequence_and_over_all() -> None:
    process, n, times = masked(V), 5, 8
    stand = Stand(process, lambda x, alpha: torch.full((*x.shape, V), -math.log(V), dtype=torch.float64))
    repeated_nelbo(stand, CLEAN[:n], times, seed=1, rows=7)
    u = (process.noise.inverse(torch.cat([alpha for _, alpha in stand.seen])) - FLOOR) / (1 - FLOOR)
    assert sorted((u * n * times).floor().long().tolist()) == list(range(n * times))
    assert torch.equal((u.view(n, times) * times).floor().long().sort(-1).values, torch.arange(times).expand(n, -1))


def test_how_a_batch_is_cut_does_not_matter() -> None:
    net, x0 = random_net(uniform(V)), CLEAN.repeat(3, 1)
    rng, stratum = seeded(0, "cut", batch=len(x0)), torch.arange(len(x0)).flip(0)
    whole = nelbo_estimates(net, x0, stratum, rng, rows=len(x0))
    assert torch.allclose(nelbo_estimates(net, x0, stratum, rng, rows=4), whole, atol=1e-12)
    assert torch.equal(repeated_nelbo(net, x0, 4, seed=2), repeated_nelbo(net, x0, 4, seed=2))
    assert not torch.equal(repeated_nelbo(net, x0, 4, seed=2), repeated_nelbo(net, x0, 4, seed=3))


PROCESSES = {"masked": masked(V), "uniform": uniform(V), "unigram": unigram(torch.tensor([0.5, 0.3, 0.2]))}


@pytest.mark.parametrize("name", list(PROCESSES))
def test_the_perfect_predictor_reaches_the_likelihood(name: str) -> None:
    """p(x_0^i | the others) makes the reverse process exact: every sequence costs its own -log p(x_0), not less."""
    found = repeated_nelbo(bayes(PROCESSES[name], leave_one_out=True), CLEAN, times=40_000, seed=1, rows=90_000)
    truth, error = -LAW.log() / L, found.std(-1) / math.sqrt(found.shape[1])
    assert ((found.mean(-1) - truth).abs() < 4 * error + 0.01).all()  # what lies below t = 1e-3 is left out
    assert float((LAW * found.mean(-1)).sum()) == pytest.approx(float((LAW * truth).sum()), abs=0.02)


@pytest.mark.parametrize("name", list(PROCESSES))
@pytest.mark.parametrize("power", [0.5, 2.0])
def test_any_other_predictor_is_above_it(name: str, power: float) -> None:
    """In the mean over the data the bound is above the entropy, and clearly so for a tempered predictor."""
    found = repeated_nelbo(bayes(PROCESSES[name], True, power), CLEAN, times=1000, seed=1, rows=9000)
    assert float((LAW * found.mean(-1)).sum()) > float(-(LAW * LAW.log()).sum()) / L + 0.02


@pytest.mark.parametrize("name", ["uniform", "unigram"])
def test_the_posterior_itself_is_not_the_minimiser(name: str) -> None:
    """docs/choices.md: the bound is least for p(x_0^i | the others), not for p(x_0^i | x_t)."""
    full, others = (repeated_nelbo(bayes(PROCESSES[name], one), CLEAN, 1000, 1, 9000).mean(-1) for one in (False, True))
    assert float((LAW * (full - others)).sum()) > 0.02


def test_an_autoregressive_model_is_exact_with_one_column() -> None:
    net = random_net(None)
    x0 = torch.tensor([[0, 2, 1, 1], [2, 0, 0, 1], [1, 1, 1, 1]])
    with torch.no_grad():
        law = net(x0[:, :-1])
    found = repeated_nelbo(net, x0, times=16)
    assert found.shape == (3, 1)
    assert torch.allclose(found[:, 0], -law.gather(-1, x0[:, 1:, None])[..., 0].mean(-1), atol=1e-12)
    assert torch.equal(found, repeated_nelbo(net, x0, times=2, seed=9))


def cell(tmp_path: Path, kind: Kind) -> tuple[EvalCell, EvalConfig]:
    """Lines of plain ASCII, each a document: a letter is a token, and so is every end."""
    (tmp_path / "lines.txt").write_text("the cat sat\na dog ran far\n" * 60)
    config = EvalConfig(
        models=("m",),
        tasks=("likelihood",),
        texts=(f"lines={tmp_path / 'lines.txt'}",),
        num_samples=8,
        likelihood_samples=4,
    )
    return EvalCell("m", small(kind), "likelihood", None, Dataset(*config.named_texts()[0])), config


@pytest.mark.parametrize("kind", ["masked", "uniform", "causal"])
def test_the_row_of_a_set(kind: Kind, tmp_path: Path) -> None:
    one, config = cell(tmp_path, kind)
    row = measure_likelihood(one, config)
    blocks = Dataset("lines", tmp_path / "lines.txt").blocks(BYTES, 32, False, 8)
    found = repeated_nelbo(one.model.denoiser, blocks, 4)
    assert row["nelbo"] == pytest.approx(float(found.mean()))
    assert row["nelbo_ppl"] == pytest.approx(math.exp(row["nelbo"]))
    assert row["nelbo_interval"][0] < row["nelbo"] < row["nelbo_interval"][1]
    assert row["nelbo_std_over_texts"] == pytest.approx(float(found.mean(-1).std()))
    assert (row["exact"], likelihood_samples(one, config)) == (kind == "causal", 1 if kind == "causal" else 4)
    assert (row["nelbo_std_over_times"] is None) == (kind == "causal")


def test_bits_per_character_are_of_the_text_alone(tmp_path: Path) -> None:
    """One ASCII letter is one token: the characters of a block are its tokens but for the ends."""
    one, config = cell(tmp_path, "masked")
    row, blocks = measure_likelihood(one, config), Dataset("lines", tmp_path / "lines.txt").blocks(BYTES, 32, False, 8)
    letters = int((blocks != BYTES.eos).sum())
    assert row["bits_per_character"] == pytest.approx(row["nelbo"] * blocks.numel() / letters / math.log(2))
