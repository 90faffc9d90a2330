"""Targets: which rows get which law, and the law of motion of the target's weights."""

import pytest
import torch

from cdlm.methods import METHODS
from cdlm.objective import Bridge, Data, Network, Rollout, SharedNoise, inverse_noise, inverse_step, unit
from cdlm.objective.target import Prediction
from cdlm.process import Cosine, Gaussian, masked, uniform, unigram
from cdlm.rng import seeded
from cdlm.schedules import constant

V = 6
PROCESSES = {
    "masked": masked(V),
    "uniform": uniform(V),
    "unigram-with-gaps": unigram(torch.tensor([0.3, 0.0, 0.2, 0.0, 0.4, 0.1])),
    "mask-and-unigram": unigram(torch.arange(1.0, V + 2), vocab=V),
}
every_process = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES.keys())


def pair_of(process, s=(0.0, 0.1, 0.3, 0.0, 0.6)):
    s = torch.tensor(s, dtype=torch.float64)
    t = (s + 0.35).clamp(max=1)
    return Bridge(process)(torch.randint(V, (len(s), 12)), s, t, seeded(1, batch=len(s)))


def rows_of(groups) -> list[int]:
    return torch.cat([index for index, _ in groups]).tolist()


@every_process
def test_groups_partition_the_positions(process, tiny):
    net = tiny(process, time=True)
    for s in ((0.0, 0.1, 0.3, 0.0, 0.6), (0.0, 0.0), (0.2, 0.4)):
        pair = pair_of(process, s)
        truth = pair.positions.flatten().nonzero()[:, 0].tolist()
        assert rows_of(Data()(pair)) == truth
        assert sorted(rows_of(Network()(pair, net))) == truth  # every row once


@every_process
def test_data_is_a_point_mass_everywhere(process):
    pair = pair_of(process)
    ((index, law),) = Data()(pair)
    assert torch.equal(law, pair.x0.flatten()[index])


@every_process
def test_network_is_the_denoiser_at_the_earlier_time(process, tiny):
    net = tiny(process, time=True)
    pair = pair_of(process)
    truth = net(pair.x_s, pair.s).exp().flatten(0, 1)
    kinds = set()
    for index, law in Network()(pair, net):
        if isinstance(law, Prediction):
            kinds.add("dense")
            assert torch.allclose(law.log_probs().exp(), truth[index], atol=1e-12)
            assert not law.hidden.requires_grad
        else:
            kinds.add("point")
            assert torch.equal(torch.nn.functional.one_hot(law, V).double(), truth[index])
    assert kinds == {"dense", "point"}


def test_network_of_shared_noise_is_told_the_gaussians_level(tiny):
    process, gaussian = uniform(V), Gaussian(V, -3.0, 1.0)
    net = tiny(process, time=True)
    s, t = torch.tensor([0.1, 0.5]).double(), torch.tensor([0.3, 0.9]).double()
    pair = SharedNoise(process, gaussian)(torch.randint(V, (2, 7)), s, t, seeded(2, batch=2))
    certain, (index, prediction) = Network()(pair, net)
    assert len(certain[0]) == 0
    assert torch.equal(index, torch.arange(14))
    truth = net.head(net.features(pair.x_s, gaussian.alpha(s)))
    assert torch.allclose(prediction.log_probs(), truth.flatten(0, 1), atol=1e-12)


def test_rollout_gives_revealed_tokens_the_law_they_were_drawn_from(tiny):
    process = masked(V)
    net = tiny(process)
    s, t = torch.tensor([0.0, 0.2, 0.4]).double(), torch.tensor([0.5, 0.8, 0.9]).double()
    pair = Rollout(process)(torch.randint(V, (3, 20)), s, t, seeded(3, batch=3), net)
    groups = Network()(pair, net)
    assert sorted(rows_of(groups)) == (pair.x_t == V).flatten().nonzero()[:, 0].tolist()
    early, late = (net(x, time).flatten(0, 1) for x, time in ((pair.x_t, t), (pair.x_s, s)))
    (revealed, first), (masks, second) = groups
    assert torch.equal(revealed, ((pair.x_t == V) & (pair.x_s < V)).flatten().nonzero()[:, 0])
    assert torch.allclose(first.log_probs(), early[revealed], atol=1e-12)
    assert torch.allclose(second.log_probs(), late[masks], atol=1e-12)
    assert min(len(revealed), len(masks)) > 5


def test_rows_at_the_boundary_need_no_network(tiny, monkeypatch):
    net = tiny(uniform(V), time=True)
    seen = []
    features = type(net).features

    def counting(self, x, alpha):
        seen.append(len(x))
        return features(self, x, alpha)

    monkeypatch.setattr(type(net), "features", counting)
    Network()(pair_of(uniform(V), (0.0, 0.0, 0.0)), net)
    assert seen == []
    Network()(pair_of(uniform(V), (0.0, 0.3, 0.0, 0.4)), net)
    assert seen == [2]


def test_a_target_network_must_be_given():
    with pytest.raises(ValueError, match="pass a copy of the student, or a trained teacher"):
        Network()(pair_of(masked(V)))


def test_average_warms_up_and_then_decays():
    total = 150_000
    lam = [Network(constant(0.999)).lam(step, total) for step in range(0, 20_000, 7)]
    truth = [min(0.999, (1 + n) / (10 + n)) for n in range(1, 20_001, 7)]
    assert lam == pytest.approx(truth, abs=1e-12)
    assert lam[0] == pytest.approx(2 / 11)
    assert lam[-1] == pytest.approx(0.999)


def test_average_of_a_short_run_has_the_same_horizon():
    assert Network(constant(0.999)).lam(1999, 2000) == pytest.approx(1 - 0.001 * 75)
    assert Network(constant(0.999)).lam(50, 100) == 0  # shorter than the horizon of one step: always a copy


def test_a_frozen_teacher_never_moves():
    assert {Network(constant(1.0)).lam(step, 1000) for step in range(1000)} == {1.0}


@pytest.mark.parametrize("total", [150, 1_500, 1_501, 1_499])
def test_mcdlm_pplopt_copies_from_two_thirds_on(total):
    """At 100K, 110K, ... of 150K, in proportion."""
    network = METHODS["mcdlm-pplopt"](masked(V), total).network
    zeros = [step + 1 for step in range(total) if network.lam(step, total) == 0 and (step + 1) * 15 >= 10 * total]
    assert zeros == [-(-total * k // 15) for k in range(10, 16)]
    for step in range(total):
        if (step + 1) * 3 >= 2 * total and step + 1 not in zeros:
            assert network.lam(step, total) == 1


def test_mcdlm_pplopt_at_the_papers_own_steps():
    network = METHODS["mcdlm-pplopt"](masked(V)).network
    total = 150_000
    for done in (100_000, 110_000, 120_000, 130_000, 140_000):
        assert network.lam(done - 1, total) == 0
        assert network.lam(done, total) == network.lam(done + 4_999, total) == 1
    for done in (10_000, 50_000, 90_000, 99_999):
        assert network.lam(done - 1, total) == pytest.approx(0.999)
    assert network.lam(100_000 - 2, total) == pytest.approx(0.999)


@pytest.mark.parametrize(("name", "kind", "smallest"), [("sdtt", masked, 1 / 1024), ("duo-dcd", uniform, 1 / 512)])
def test_rounds_renew_the_teacher_and_double_the_hop_together(name, kind, smallest):
    objective = METHODS[name](kind(V))
    assert objective.total == 50_000
    (term,) = objective.terms
    for done in range(1_000, 50_001, 1_000):
        assert objective.network.lam(done - 1, 50_000) == (0 if done % 10_000 == 0 else 1)
        assert objective.network.lam(done, 50_000) == 1
    for step in (0, 9_999, 10_000, 19_999, 20_000, 30_000, 40_000, 49_999):
        hop = smallest * 2 ** (step // 10_000)
        assert term.times.low(step / 50_000) == term.times.high(step / 50_000) == hop


@pytest.mark.parametrize("noise", [None, Cosine(0.01)], ids=["log-linear", "cosine"])
def test_weights(noise):
    s, t = torch.tensor([0.0, 0.1, 0.5]).double(), torch.tensor([0.2, 0.6, 0.9]).double()
    process = masked(V, noise)
    pair = Bridge(process)(torch.randint(V, (3, 4)), s, t, seeded(0, batch=3)).at(torch.tensor([0, 4, 8]))
    assert unit(pair).tolist() == [1, 1, 1]
    assert inverse_step(pair).tolist() == pytest.approx([5, 2, 2.5])
    h = 1e-6
    alpha = process.noise.alpha
    truth = -(alpha(t + h) - alpha(t - h)) / (2 * h) / (1 - alpha(t))
    assert inverse_noise(pair).tolist() == pytest.approx(truth.tolist(), rel=1e-7)
    if noise is None:
        assert inverse_noise(pair).tolist() == pytest.approx((1 / t).tolist(), rel=1e-12)


def test_targets_print_what_they_are():
    assert str(Data()) == "data"
    assert "0.999" in str(Network())
    assert "frozen" in str(Network(constant(1.0)))
    printed = str(METHODS["mcdlm-pplopt"](masked(V)).network)
    assert "15 copies" in printed
    assert "0.999" in printed
