"""f_theta: laws over clean tokens, carry-over, the boundary, and time."""

import math

import pytest
import torch

from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.process import Cosine, LogLinear, masked, uniform, unigram
from cdlm.types import Mixture

V = 7
PROCESSES = {
    "masked": masked(V),
    "uniform": uniform(V),
    "unigram-with-gaps": unigram(torch.tensor([0.3, 0.0, 0.2, 0.0, 0.3, 0.1, 0.1])),
    "mask-and-unigram": unigram(torch.arange(1.0, V + 2), vocab=V),
}
every_process = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES.keys())


@every_process
def test_laws_are_normalised_over_clean_tokens(process, tiny):
    law = tiny(process)(torch.arange(process.states)[None], 0.7)
    assert law.shape == (1, process.states, V)
    assert torch.allclose(law.exp().sum(-1), torch.ones(1, process.states), atol=1e-6)


@every_process
def test_first_prediction_is_uniform(process, tiny):
    net = tiny(process, fresh=True)
    law = net(torch.arange(process.states)[None], 0.7)
    here = process.positions(torch.arange(process.states)[None])
    assert torch.allclose(law[here], torch.full_like(law[here], -math.log(V)))


@every_process
def test_known_tokens_are_carried_over_exactly(process, tiny):
    law = tiny(process)(torch.arange(process.states)[None], 0.7)[0]
    for z in range(process.states):
        if process.prior[z] == 0:
            assert law[z].exp().tolist() == [float(y == z) for y in range(V)]
        else:
            assert bool(law[z].isfinite().all())


@every_process
def test_boundary_at_time_zero_is_exact(process, tiny):
    net = tiny(process)
    x = torch.arange(V)[None]
    assert torch.equal(net(x, 0.0)[0].exp(), torch.eye(V))
    both = net(x.repeat(2, 1), torch.tensor([0.0, 0.5]).double())  # only the row at time 0
    assert torch.equal(both[0].exp(), torch.eye(V))
    assert not torch.equal(both[1].exp(), torch.eye(V)) or process.name == "masked"


def test_a_mask_has_no_clean_token_even_at_time_zero(tiny):
    law = tiny(masked(V))(torch.tensor([[0, V]]), 0.0)[0]
    assert law[0].exp().tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert bool(law[1].isfinite().all())


@pytest.mark.parametrize("conditioned", [False, True])
def test_time_matters_iff_the_network_is_told(conditioned, tiny):
    net = tiny(uniform(V), time_conditioning=conditioned)
    x = torch.randint(V, (1, 6))
    early, late = net(x, 0.2), net(x, 0.8)
    assert torch.equal(early, late) != conditioned
    if conditioned:
        # One time for each sequence, and each sees only its own.
        both = net(x.repeat(2, 1), torch.tensor([0.2, 0.8]).double())
        assert torch.allclose(both, torch.cat([early, late]), atol=1e-6)


def test_the_level_is_minus_log_alpha_of_the_processes_own_schedule(tiny):
    net = tiny(uniform(V, Cosine(0.05)), time_conditioning=True)
    x, t = torch.randint(V, (1, 6)), 0.35
    alpha = 1 - 0.95 * math.sin(math.pi * t / 2)
    hidden = net.backbone(x, torch.tensor([-math.log(alpha)]))
    truth = net.backbone.output_layer.linear(hidden).log_softmax(-1)
    assert torch.allclose(net(x, t), truth, atol=1e-6)


def test_without_conditioning_the_level_is_zero(tiny):
    net = tiny(uniform(V))
    x = torch.randint(V, (1, 6))
    truth = net.backbone.output_layer.linear(net.backbone(x, torch.zeros(1))).log_softmax(-1)
    assert torch.equal(net(x, 0.9), truth)


def test_head_of_some_rows_is_some_rows_of_the_head(tiny):
    net = tiny(masked(V))
    x = torch.randint(V + 1, (2, 6))
    hidden = net.features(x, torch.full((2,), 0.5).double())
    index = torch.tensor([1, 4, 11])
    assert torch.allclose(net.head(hidden.flatten(0, 1)[index]), net.head(hidden).flatten(0, 1)[index], atol=1e-6)


def test_head_is_never_narrower_than_single_precision(tiny):
    net = tiny(masked(V)).bfloat16()
    assert net.head(torch.randn(3, 16).bfloat16()).dtype == torch.float32
    assert tiny(masked(V)).double().head(torch.randn(3, 16).double()).dtype == torch.float64


def test_features_of_a_one_token_mixture_are_those_of_the_token(tiny):
    net = tiny(uniform(V))
    x = torch.randint(V, (2, 5))
    weights = torch.nn.functional.one_hot(torch.zeros(2, 5, dtype=torch.long), 3).float()
    mixture = Mixture(x[..., None].repeat(1, 1, 3), weights, torch.zeros(2, 5))
    alpha = torch.tensor([0.3, 0.6]).double()
    assert torch.allclose(net.features(mixture, alpha), net.features(x, alpha), atol=1e-6)


def test_autoregressive_rows_predict_the_next_token(tiny):
    net = tiny()
    assert net.process is None
    assert net.vocab == V
    x = torch.randint(V, (2, 5))
    law = net(x)
    assert law.shape == (2, 5, V)
    assert torch.allclose(law.exp().sum(-1), torch.ones(2, 5), atol=1e-6)
    assert bool(law.isfinite().all())  # nothing is carried over


def test_double_precision_agrees_with_single(tiny):
    net = tiny(masked(V))
    x = torch.full((1, 6), V)
    single = net(x, 0.5)
    assert torch.allclose(net.double()(x, 0.5).float(), single, atol=1e-4)


def test_count_is_the_number_of_weights(tiny):
    net = tiny(masked(V))
    assert net.count() == sum(math.prod(tensor.shape) for tensor in net.state_dict().values())


def test_a_process_and_a_causal_network_exclude_each_other():
    causal, plain = (NetworkConfig(hidden_size=16, num_layers=1, num_heads=2, causal=flag) for flag in (True, False))
    with pytest.raises(ValueError, match="a causal network models next tokens and takes `vocab`"):
        Denoiser(causal, masked(V))
    with pytest.raises(ValueError, match="any other network takes a `process`"):
        Denoiser(plain, vocab=V)
    with pytest.raises(ValueError, match="give `vocab`"):
        Denoiser(causal)


@pytest.mark.parametrize("t", [-0.1, 1.5])
def test_times_outside_the_unit_interval_are_refused(t, tiny):
    with pytest.raises(ValueError, match=r"times lie in \[0, 1\]"):
        tiny(uniform(V), time_conditioning=True)(torch.zeros(1, 3, dtype=torch.long), t)


@pytest.mark.parametrize("noise", [LogLinear(0.0), Cosine(0.0)])
def test_a_network_that_is_told_the_time_needs_some_signal_left(noise, tiny):
    """-log alpha(1) would be infinite."""
    with pytest.raises(ValueError, match="use a noise schedule with eps > 0"):
        tiny(uniform(V, noise), time_conditioning=True)
    assert bool(torch.isfinite(tiny(uniform(V, noise))(torch.zeros(1, 3, dtype=torch.long), 1.0)).all())
