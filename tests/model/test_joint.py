"""The joint head: its three forms are one function, it sees what it may see, and old models load without it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.model.joint import NUM_GAPS, gap_bucket, plain_conditioned
from cdlm.model.pretrained import load_denoiser, save_denoiser
from cdlm.process import masked, uniform

V, B, L = 7, 6, 12


def state(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x_t, x_s and what is revealed between them: in one sequence nothing, in one everything."""
    generator = torch.Generator().manual_seed(seed)
    x_s = torch.randint(V, (B, L), generator=generator)
    revealed = torch.rand(B, L, generator=generator) < 0.4
    revealed[0], revealed[1] = False, True
    return x_s.masked_fill(revealed, V), x_s, revealed


def features(net: Denoiser, x: Tensor) -> Tensor:
    return net.features(x, torch.full((len(x),), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("layers", [1, 2])
def test_one_pass_is_the_definition(tiny, layers: int) -> None:
    net = tiny(masked(V), joint_layers=layers).double().requires_grad_(False)
    x_t, x_s, revealed = state()
    hidden = features(net, x_t)
    fast = net.condition(hidden, x_s, revealed)
    plain = plain_conditioned(net.joint_head, net.dit.vocab_embed, hidden, x_s, revealed)
    assert torch.allclose(fast, plain, rtol=1e-11, atol=1e-11)
    assert torch.equal(fast[~revealed], hidden[~revealed])
    first = revealed & (revealed.cumsum(-1) == 1)
    assert torch.equal(fast[first], hidden[first])  # the trunk alone
    assert bool((fast != hidden)[revealed & ~first].all())


def test_a_position_sees_the_revealed_tokens_before_it_and_no_others(tiny) -> None:
    net = tiny(masked(V), joint_layers=2).double()
    x_t, x_s, revealed = state()
    hidden = features(net, x_t)
    before = net.condition(hidden, x_s, revealed)
    for place in range(L):
        changed = x_s.clone()
        changed[:, place] = (x_s[:, place] + 1) % V
        differs = (net.condition(hidden, changed, revealed) != before).any(-1)
        later = revealed & (torch.arange(L) > place) & revealed[:, place, None]
        assert torch.equal(differs, later)


def test_it_starts_as_the_trunk(tiny) -> None:
    net = tiny(masked(V), fresh=True, joint_layers=1)
    x_t, x_s, revealed = state()
    hidden = features(net, x_t)
    assert torch.equal(net.condition(hidden, x_s, revealed), hidden)
    assert net.count() - tiny(masked(V), fresh=True).count() == sum(p.numel() for p in net.joint_head.parameters())


def test_distances_have_an_embedding() -> None:
    gaps = torch.arange(1, 5000)
    buckets = gap_bucket(gaps)
    assert buckets[:16].tolist() == list(range(16))
    assert set(buckets.diff().tolist()) == {0, 1}
    assert int(buckets.max()) == NUM_GAPS - 1
    assert gap_bucket(torch.tensor([31, 32, 63, 64])).tolist() == [16, 17, 17, 18]


def test_it_is_saved_with_the_model_and_older_models_have_none(tiny, tmp_path: Path) -> None:
    net = tiny(masked(V), joint_layers=1)
    again = load_denoiser(save_denoiser(net, tmp_path / "joint"))
    x_t, x_s, revealed = state()
    assert torch.equal(
        again.condition(features(again, x_t), x_s, revealed), net.condition(features(net, x_t), x_s, revealed)
    )
    without = load_denoiser(save_denoiser(tiny(masked(V)), tmp_path / "plain"))
    assert without.joint_head is None
    with pytest.raises(ValueError, match="no joint head"):
        without.condition(features(without, x_t), x_s, revealed)


@pytest.mark.parametrize("process", [uniform(V), None])
def test_only_masked_models_have_one(process) -> None:
    with pytest.raises(ValueError, match=r"masked process|already draws"):
        Denoiser(
            NetworkConfig(hidden_size=16, num_heads=2, causal=process is None, joint_layers=1),
            process,
            vocab=None if process else V,
        )
