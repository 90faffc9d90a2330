"""Parity with the reference implementations: their stored outputs, and the numbers computed from their formulas."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from cdlm.methods import METHODS
from cdlm.model.config import SIZES, NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.model.dit import DiT
from cdlm.model.pretrained import load_denoiser
from cdlm.objective import inverse_noise
from cdlm.objective.divergence import jsd, kl, rate_kl
from cdlm.process import LogLinear, Process, bridge_law, masked, uniform
from cdlm.process.gaussian import operator
from cdlm.process.process import DATA, PRIOR, STAY
from cdlm.rng import Rng, seeded
from cdlm.types import Pair

NOISE = LogLinear()


@pytest.fixture
def dit(peers):
    return {name: torch.from_numpy(value) for name, value in np.load(peers / "dit.npz").items()}


@pytest.fixture
def absorbing(peers):
    return {name: torch.from_numpy(value) for name, value in np.load(peers / "masked.npz").items()}


@pytest.fixture
def flat(peers):
    return {name: torch.from_numpy(value) for name, value in np.load(peers / "uniform.npz").items()}


@pytest.fixture
def net(peers):
    return load_denoiser(peers / "mdlm-hf-tiny")


def record(process: Process, x_t: Tensor, alpha: Tensor, dalpha: Tensor, t: Tensor | None = None) -> Pair:
    """What a divergence or a weight reads, at rows."""
    blank = torch.zeros_like(x_t)
    t = alpha if t is None else t
    return Pair(
        x0=blank, x_s=blank, x_t=x_t, s=torch.zeros_like(t), t=t, alpha_s=torch.ones_like(t), alpha_t=alpha,
        dalpha_t=dalpha, positions=process.positions(x_t), known=blank.bool(), prior=process.prior,
    )  # fmt: skip


def kernel(process: Process, a: float) -> Tensor:
    """a I + (1 - a) 1 pi^T."""
    return a * torch.eye(process.states, dtype=torch.float64) + (1 - a) * process.prior.expand(process.states, -1)


@dataclasses.dataclass(frozen=True, eq=False)
class Given(Rng):
    """Noise whose every uniform is given."""

    u: Tensor | None = None

    def uniform(self, columns, device="cpu"):
        return self.u


def route_law(process: Process, x_t: Tensor, stay: Tensor, alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
    """Probabilities of the three routes of `Process.route`, found by bisection on the uniform that it is given."""
    s, t = (process.noise.inverse(alpha.double().flatten()) for alpha in (alpha_s, alpha_t))

    def edge(codes: tuple[int, ...]) -> Tensor:
        low, high = torch.zeros(x_t.shape).double(), torch.ones(x_t.shape).double()
        for _ in range(60):
            middle = (low + high) / 2
            route = process.route(x_t, stay.double(), s, t, Given(0, torch.arange(len(x_t)), len(x_t), middle))
            inside = torch.isin(route, torch.tensor(codes))
            low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
        return (low + high) / 2

    first, second = edge((STAY,)), edge((STAY, DATA))
    law = torch.zeros(*x_t.shape, 3).double()
    law[..., DATA], law[..., STAY], law[..., PRIOR] = second - first, first, 1 - second
    return law


def drawn_law(process: Process, law: Tensor, x_t: Tensor, alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
    """The law of x_s that the three routes give for a predicted law over clean tokens."""
    padded = torch.cat([law, law.new_zeros(*law.shape[:-1], process.states - law.shape[-1])], -1)
    here = process.positions(x_t)
    stay = torch.where(here, padded.gather(-1, x_t[..., None])[..., 0], 1.0)
    routes = route_law(process, x_t, stay, alpha_s, alpha_t)
    one_hot = torch.nn.functional.one_hot(x_t, process.states)
    return (
        routes[..., DATA, None] * padded + routes[..., STAY, None] * one_hot + routes[..., PRIOR, None] * process.prior
    )


def plug_in(process: Process, law: Tensor, x_t: Tensor, alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
    """The dense posterior, sequence by sequence."""
    padded = torch.cat([law, law.new_zeros(*law.shape[:-1], process.states - law.shape[-1])], -1)
    rows = []
    for row in range(len(x_t)):
        a_s, a_t = float(alpha_s[row]), float(alpha_t[row])
        rows.append(bridge_law(padded[row], x_t[row], kernel(process, a_s), kernel(process, a_t / a_s)))
    return torch.stack(rows)


# ------------------------------------------------------------------------------------------------- stored outputs


@pytest.mark.parametrize(("level", "stored"), [("sigma", "logits"), ("zero", "logits_sigma0")])
def test_logits_of_the_public_layout(net, dit, level, stored):
    sigma = dit["sigma"] if level == "sigma" else torch.zeros(2)
    with torch.no_grad():
        logits = net.backbone.output_layer.linear(net.backbone(dit["x_t"], sigma))
    assert logits.shape == (2, 24, 96)
    assert torch.allclose(logits, dit[stored][..., :96], atol=1e-5, rtol=0)
    assert float((dit["logits"] - dit["logits_sigma0"]).abs().max()) > 0.1  # the level does matter


def test_time_conditioned_denoiser_sees_sigma_as_minus_log_alpha(net, dit):
    told = Denoiser(dataclasses.replace(net.config, time_conditioning=True), net.process).eval()
    told.load_state_dict(net.state_dict())
    with torch.no_grad():
        law = told.head(told.features(dit["x_t"], torch.exp(-dit["sigma"].double())))
    assert torch.allclose(law, dit["logits"][..., :96].log_softmax(-1), atol=1e-5, rtol=0)


def test_law_is_the_subs_parameterisation(net, absorbing):
    with torch.no_grad():
        law = net(absorbing["x_t"], NOISE.inverse(absorbing["alpha_t"].double()).flatten())
    stored = absorbing["log_law_subs"]
    hidden = absorbing["x_t"] == 96
    assert 10 < int(hidden.sum()) < 40
    assert torch.allclose(law[hidden], stored[hidden][:, :96], atol=1e-5, rtol=0)
    assert torch.equal(law[~hidden].exp(), stored[~hidden][:, :96].exp())
    assert float(stored[..., 96].exp().max()) == 0  # nothing is lost with the mask's column


def test_masked_nelbo(net, absorbing):
    x_t, x0 = absorbing["x_t"], absorbing["x0"]
    hidden = (x_t == 96).flatten()
    alpha, dalpha = (absorbing[name].expand(2, 24).flatten()[hidden] for name in ("alpha_t", "dalpha_t"))
    pair = record(net.process, x_t.flatten()[hidden], alpha, dalpha)
    with torch.no_grad():
        law = net(x_t, 0.5).flatten(0, 1)[hidden]
    stored = absorbing["nelbo_per_token"].flatten()
    target = x0.flatten()[hidden]
    assert torch.allclose(rate_kl(target=target, student=law, pair=pair), stored[hidden], rtol=1e-5, atol=0)
    weighted = inverse_noise(pair) * kl(target=target, student=law)
    assert torch.allclose(weighted, stored[hidden], rtol=1e-5, atol=0)
    assert bool((stored[~hidden] == 0).all())


def test_masked_posterior_from_the_stored_law(absorbing):
    process, x_t = masked(96), absorbing["x_t"]
    law = absorbing["log_law_subs"][..., :96].double().exp()
    levels = absorbing["alpha_s"].double(), absorbing["alpha_t"].double()
    drawn = drawn_law(process, law, x_t, *levels)
    assert torch.allclose(drawn, absorbing["posterior"], atol=1e-9, rtol=0)
    # The stored law is rounded to single precision and does not add up to 1; the dense form normalises it.
    size = law.sum(-1, keepdim=True)
    truth = torch.cat([absorbing["posterior"][..., :96] / size, absorbing["posterior"][..., 96:]], -1)
    assert torch.allclose(plug_in(process, law, x_t, *levels), truth, atol=1e-9, rtol=0)


def test_masked_posterior_from_our_own_law(net, absorbing):
    x_t = absorbing["x_t"]
    levels = absorbing["alpha_s"].double(), absorbing["alpha_t"].double()
    with torch.no_grad():
        law = net(x_t, NOISE.inverse(levels[1]).flatten()).double().exp()
    for found in (plug_in(net.process, law, x_t, *levels), drawn_law(net.process, law, x_t, *levels)):
        assert torch.allclose(found, absorbing["posterior"], atol=1e-6, rtol=0)


def test_uniform_nelbo(flat):
    process = uniform(96)
    alpha, dalpha = (flat[name].expand(2, 24).flatten() for name in ("alpha_t", "dalpha_t"))
    pair = record(process, flat["x_t"].flatten(), alpha, dalpha)
    found = rate_kl(target=flat["x0"].flatten(), student=flat["log_law"].flatten(0, 1), pair=pair)
    assert torch.allclose(found, flat["nelbo_per_token"].flatten(), atol=1e-9, rtol=0)
    same = (flat["x0"] == flat["x_t"]).double().mean()
    assert 0.2 < float(same) < 0.8  # both branches are there


def test_uniform_nelbo_in_single_precision(flat):
    process = uniform(96)
    alpha, dalpha = (flat[name].expand(2, 24).flatten() for name in ("alpha_t", "dalpha_t"))
    pair = record(process, flat["x_t"].flatten(), alpha, dalpha)
    found = rate_kl(target=flat["x0"].flatten(), student=flat["log_law"].flatten(0, 1).float(), pair=pair)
    assert torch.allclose(found.double(), flat["nelbo_per_token"].flatten(), rtol=1e-5, atol=1e-5)


def test_uniform_posterior(flat):
    process, law = uniform(96), flat["log_law"].exp()
    levels = flat["alpha_s"], flat["alpha_t"]
    for found in (plug_in(process, law, flat["x_t"], *levels), drawn_law(process, law, flat["x_t"], *levels)):
        assert torch.allclose(found, flat["posterior"], atol=1e-9, rtol=0)


# ------------------------------------------------------------------------------- numbers of the reference formulas


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_parameters_of_the_dit():
    with torch.device("meta"):
        assert count(DiT(NetworkConfig(), 50_258, 50_258)) == 169_627_218


def test_parameters_of_one_block():
    with torch.device("meta"):
        assert count(DiT(NetworkConfig(num_layers=1), 50_258, 50_258).blocks[0]) == 7_677_696


def test_parameters_of_the_autoregressive_network():
    with torch.device("meta"):
        assert count(DiT(NetworkConfig(causal=True), 50_258, 50_258)) == 162_246_482


def test_parameters_of_our_denoiser():
    """Our law has no row for the mask: 768 weights and a bias fewer."""
    process = masked(50_257)
    with torch.device("meta"):
        assert Denoiser(SIZES["110m"], process).count() == 169_627_218 - 769


@pytest.mark.parametrize("t", [1e-3, 0.1, 0.5, 1.0])
def test_first_mdlm_loss(t):
    """P(masked at t) times the loss of a uniform law there is 0.999 log 50257 for every t, hence in expectation."""
    process = masked(50_257)
    net = Denoiser(SIZES["tiny"], process).double()
    time = torch.tensor([t], dtype=torch.float64)
    with torch.no_grad():
        law = net(torch.tensor([[50_257]]), time)[0]
    pair = record(process, torch.tensor([50_257]), NOISE.alpha(time), NOISE.derivative(time))
    loss = float((1 - NOISE.alpha(time)) * rate_kl(target=torch.tensor([123]), student=law, pair=pair))
    assert loss == pytest.approx(0.999 * math.log(50_257), rel=1e-9)
    assert loss == pytest.approx(10.81, abs=0.005)


@pytest.mark.parametrize("t", [1e-3, 0.01, 0.3, 0.77, 1.0])
def test_log_linear_weight_is_one_over_t(t):
    time = torch.tensor([t], dtype=torch.float64)
    sigma, dsigma = -math.log(1 - 0.999 * t), 0.999 / (1 - 0.999 * t)
    assert dsigma / math.expm1(sigma) == pytest.approx(1 / t, rel=1e-12)
    pair = record(masked(3), torch.tensor([3]), NOISE.alpha(time), NOISE.derivative(time), time)
    assert float(inverse_noise(pair)) == pytest.approx(1 / t, rel=1e-12)


@pytest.mark.parametrize(
    ("z", "numbers"),
    [(1, [0.620408, 0.232653, 0.048980, 0.048980, 0.048980]), (0, [0.937662, 0.015584, 0.015584, 0.015584, 0.015584])],
    ids=["z!=x", "z==x"],
)
def test_uniform_bridge(z, numbers):
    process, x_t = uniform(5), torch.tensor([[z]])
    clean = torch.eye(5, dtype=torch.float64)[:1][None]
    levels = torch.tensor([[0.7]]).double(), torch.tensor([[0.3]]).double()
    for found in (plug_in(process, clean, x_t, *levels), drawn_law(process, clean, x_t, *levels)):
        assert found.flatten().tolist() == pytest.approx(numbers, abs=6e-7)


def test_the_predicted_law_is_plugged_in_not_mixed():
    process, z = uniform(7), torch.tensor([[2]])
    law = torch.tensor([[[0.1, 0.2, 0.05, 0.3, 0.15, 0.1, 0.1]]], dtype=torch.float64)
    levels = torch.tensor([[0.7]]).double(), torch.tensor([[0.3]]).double()
    assert float(drawn_law(process, law, z, *levels)[0, 0, 2]) == pytest.approx(0.3454, abs=5e-5)
    assert float(plug_in(process, law, z, *levels)[0, 0, 2]) == pytest.approx(0.3454, abs=5e-5)
    one_hot = torch.eye(7, dtype=torch.float64)
    bridges = torch.stack([plug_in(process, one_hot[x][None, None], z, *levels)[0, 0] for x in range(7)])
    assert float(law[0, 0] @ bridges[:, 2]) == pytest.approx(0.2551, abs=5e-5)


def test_the_sampler_draws_the_plugged_in_law():
    process, n = uniform(7), 40_000
    law = torch.tensor([0.1, 0.2, 0.05, 0.3, 0.15, 0.1, 0.1], dtype=torch.float64).log()
    s, t = (float(NOISE.inverse(torch.tensor(alpha, dtype=torch.float64))) for alpha in (0.7, 0.3))
    x_s = process.bridge(law.expand(4, n // 4, 7), torch.full((4, n // 4), 2), s, t, seeded(0, batch=4))
    stayed = float((x_s == 2).double().mean())
    assert abs(stayed - 0.3454) < 4.9 * math.sqrt(0.3454 * 0.6546 / n)
    assert abs(stayed - 0.2551) > 20 * math.sqrt(0.2551 * 0.7449 / n)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("z", [3, 5], ids=["z==x", "z!=x"])
def test_udlm_loss_in_its_dense_and_rao_blackwell_forms(alpha, z):
    v, x = 7, 3
    law = torch.tensor([0.1, 0.2, 0.05, 0.3, 0.15, 0.12, 0.08], dtype=torch.float64)
    bar = [v * alpha * (j == x) + 1 - alpha for j in range(v)]
    own = [v * alpha * p + 1 - alpha for p in law.tolist()]
    inner = sum(bar[j] / bar[z] * math.log(own[z] * bar[j] / (own[j] * bar[z])) for j in range(v))
    dense = -0.999 / (v * alpha) * (v / bar[z] - v / own[z] - inner)

    c, total = (1 - alpha) / (v * alpha + 1 - alpha), sum(map(math.log, own))
    if z == x:
        inner = -c * (total - v * math.log(own[z])) + (v - 1) * c * math.log(c)
    else:
        inner = -(total - v * math.log(own[z])) - math.log(c) / c
        inner -= v * alpha / (1 - alpha) * (math.log(own[x]) - math.log(own[z]))
    blackwell = -0.999 / (v * alpha) * (v / bar[z] - v / own[z] - inner)
    assert dense == pytest.approx(blackwell, abs=1e-13)

    signal, slope = (torch.tensor([value], dtype=torch.float64) for value in (alpha, -0.999))
    pair = record(uniform(v), torch.tensor([z]), signal, slope)
    for target in (torch.tensor([x]), torch.nn.functional.one_hot(torch.tensor([x]), v).double().log()):
        found = float(rate_kl(target=target, student=law.log()[None], pair=pair))
        assert found == pytest.approx(dense, abs=1e-12)


@pytest.mark.parametrize(
    ("gamma", "alpha"),
    [(-4, 0.99869), (-3.55, 0.94547), (-3.5, 0.92835), (-3, 0.59625), (-2.5, 0.23796), (-2, 0.07203), (-1.85, 0.04932),
     (-1.75, 0.03828), (-1, 0.00619)],
)  # fmt: skip
def test_duo_operator(gamma, alpha):
    found = operator(torch.tensor(float(gamma), dtype=torch.float64), 50_258)[0]
    assert float(found) == pytest.approx(alpha, abs=5.1e-6)


JSD = [
    (2e-5, 0.6930, -1.08e-4),
    (1e-3, 0.6892, -3.45e-3),
    (0.1, 0.5256, -0.108),
    (0.5, 0.2158, -0.137),
    (0.9, 0.0360, -0.034),
]


@pytest.mark.parametrize(("q", "value", "slope"), JSD)
def test_jsd_against_a_point_mass(q, value, slope):
    """Its value, and its gradient with respect to the logit of the true token."""
    rest = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64) * (1 - q)
    logits = torch.cat([torch.tensor([q], dtype=torch.float64), rest]).log().requires_grad_()
    for target in (torch.tensor([0]), torch.tensor([[0.0, *[-60.0] * 4]], dtype=torch.float64)):
        logits.grad = None
        loss = jsd(target=target, student=logits.log_softmax(-1)[None])
        loss.sum().backward()
        assert loss.item() == pytest.approx(value, abs=5.1e-5)
        assert logits.grad[0].item() == pytest.approx(slope, rel=0.02)
        assert logits.grad[0].item() == pytest.approx(0.5 * q * (1 - q) * math.log(q / (1 + q)), rel=1e-6)


@pytest.mark.parametrize("q", [2e-5, 1e-3, 0.1, 0.5, 0.9])
def test_cross_entropy_gradient_for_comparison(q):
    logits = torch.tensor([[q, 1 - q]], dtype=torch.float64).log().requires_grad_()
    kl(target=torch.tensor([0]), student=logits.log_softmax(-1)).sum().backward()
    assert logits.grad[0, 0].item() == pytest.approx(q - 1, abs=1e-12)


def test_jsd_gradient_is_largest_near_three_tenths():
    q = torch.linspace(0.01, 0.99, 981, dtype=torch.float64)
    logits = torch.stack([q.log(), (1 - q).log()], -1).requires_grad_()
    jsd(target=torch.zeros(981, dtype=torch.long), student=logits.log_softmax(-1)).sum().backward()
    assert float(q[logits.grad[:, 0].abs().argmax()]) == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize("stage", range(5))
def test_sdtt_practises_the_intended_grid(stage):
    """(t, t - dt), where upstream's interpolation turns t = 0.5 into (0.749, 0.249)."""
    (term,) = METHODS["sdtt"](masked(5)).terms
    batch, dt = 4096, 2**stage / 1024
    s, t = term.times(stage / 5, torch.arange(batch), batch, seeded(0, batch=batch))
    assert float(t.min()) < 1e-3
    assert float(t.max()) > 1 - 1e-3
    inside = t > dt
    assert torch.allclose(t[inside] - s[inside], torch.full_like(t[inside], dt), atol=1e-15)
    assert float(s[~inside].abs().max()) == 0
    near = (t - 0.5).abs().argmin()
    assert float(s[near]) == pytest.approx(0.5 - dt, abs=1e-3)


@pytest.mark.parametrize(("s", "t"), [(0.0, 0.3), (0.2, 0.5), (0.5 - 1 / 1024, 0.5), (0.1, 1.0)])
def test_masked_bridge_reveals_with_probability_of_the_step_over_t(s, t):
    x_t = torch.tensor([[3, 0]])
    alpha_s, alpha_t = (NOISE.alpha(torch.tensor([[time]], dtype=torch.float64)) for time in (s, t))
    routes = route_law(masked(3), x_t, torch.tensor([[0.0, 1.0]]), alpha_s, alpha_t)[0]
    assert float(routes[0, DATA]) == pytest.approx((t - s) / t, abs=1e-12)
    assert routes[1].tolist() == pytest.approx([0.0, 1.0, 0.0])  # a visible token stays


def test_two_hops_of_the_masked_bridge_are_one_hop_on_counts():
    process, n = masked(3), 60_000
    x0 = torch.randint(3, (6, n // 6))
    x_t = torch.full_like(x0, 3)
    rng = seeded(0, batch=6)
    one = process.bridge(x0, x_t, 0.2, 0.9, rng("one"))
    two = process.bridge(x0, process.bridge(x0, x_t, 0.5, 0.9, rng("first")), 0.2, 0.5, rng("second"))
    truth = 0.7 / 0.9
    for x_s in (one, two):
        shown = x_s < 3
        assert torch.equal(x_s[shown], x0[shown])
        z = (int(shown.sum()) - n * truth) / math.sqrt(n * truth * (1 - truth))
        assert math.erfc(abs(z) / math.sqrt(2)) > 1e-6
