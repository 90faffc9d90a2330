"""A head that is the embeddings: laws and gradients of a network tied by hand in plain torch, one copy of all."""

import copy
import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from cdlm.methods import METHODS
from cdlm.model import compile as recording
from cdlm.model.config import SIZES, NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.model.ema import frozen_copy, update
from cdlm.model.pretrained import LayoutError, load_denoiser, save_denoiser
from cdlm.objective import fused
from cdlm.process import masked, uniform, unigram
from cdlm.rng import seeded
from cdlm.types import Mixture

V = 7
HEAD, TABLE = "backbone.output_layer.linear.weight", "backbone.vocab_embed.embedding"
PROCESSES = {
    "masked": masked(V),
    "uniform": uniform(V),
    "mask-and-unigram": unigram(torch.arange(1.0, V + 2), vocab=V),
    "ar": None,
}


def by_hand(tied: Denoiser) -> tuple[Denoiser, dict[str, torch.Tensor]]:
    """An ordinary network, and weights for it: the head's are rows of the embeddings, seen by autograd."""
    shape = dataclasses.replace(tied.config, tie_embeddings=False)
    other = Denoiser(shape, tied.process, vocab=tied.vocab if tied.process is None else None).to(torch.float64)
    weights = {name: value.detach().clone().requires_grad_() for name, value in tied.named_parameters()}
    return other, weights


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES.keys())
def test_laws_and_gradients_are_those_of_a_network_tied_by_hand(process, tiny):
    net = tiny(process, tie_embeddings=True).double()
    other, weights = by_hand(net)
    assert HEAD in other.state_dict()
    x, t = torch.randint(net.backbone.vocab_embed.embedding.shape[0], (3, 6)), torch.tensor([0.2, 0.6, 0.9])
    goal = torch.randint(V, (3, 6))

    def loss(law):
        return -law.gather(-1, goal[..., None])[law.gather(-1, goal[..., None]) > -torch.inf].sum()

    found, truth = net(x, t), torch.func.functional_call(other, {**weights, HEAD: weights[TABLE][:V]}, (x, t))
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
    loss(found).backward()
    loss(truth).backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("method", ["mdlm", "mcdlm", "ucdlm", "duo", "ar"])
def test_the_fused_objective_adds_both_gradients(method):
    """Of the embeddings as inputs, and as the head: an untied network with the same values has them apart."""
    torch.manual_seed(0)
    row = METHODS[method]
    process = row.default_process(V)
    shape = dataclasses.replace(
        SIZES["tiny"],
        hidden_size=16,
        cond_dim=8,
        time_conditioning=row.time_conditioning,
        causal=process is None,
        tie_embeddings=True,
    )
    vocab = V if process is None else None
    net = Denoiser(shape, process, vocab).double()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    apart = Denoiser(dataclasses.replace(shape, tie_embeddings=False), process, vocab).double()
    apart.load_state_dict({**net.state_dict(), HEAD: net.state_dict()[TABLE][:V]})
    x0, objective = torch.randint(V, (8, 12)), row(process, 100)
    totals = []
    for one in (net, apart):
        target = frozen_copy(one) if objective.network is not None else None
        loss = objective.loss(one, target, x0, 3, seeded(5, batch=8)).total
        loss.backward()
        totals.append(loss.detach())
    torch.testing.assert_close(*totals, rtol=1e-12, atol=0)
    inside, outside = apart.get_parameter(TABLE).grad, apart.get_parameter(HEAD).grad
    assert float(inside.norm()) > 0
    assert float(outside.norm()) > 0
    truth = inside.clone()
    truth[:V] += outside
    torch.testing.assert_close(net.get_parameter(TABLE).grad, truth, rtol=1e-9, atol=1e-12)
    for name, parameter in net.named_parameters():
        if name != TABLE:
            torch.testing.assert_close(parameter.grad, apart.get_parameter(name).grad, rtol=1e-9, atol=1e-12)


def test_relaxed_inputs_and_the_head_share_their_gradient(tiny):
    net = tiny(uniform(V), tie_embeddings=True, time_conditioning=True).double()
    other, weights = by_hand(net)
    ids = torch.randint(V, (2, 5, 3))
    x, alpha = Mixture(ids, torch.rand(2, 5, 3).double(), torch.rand(2, 5).double()), torch.tensor([0.3, 0.7]).double()
    net.head(net.features(x, alpha)).square().sum().backward()

    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = other

        def forward(self):
            return self.inner.head(self.inner.features(x, alpha))

    named = {f"inner.{name}": value for name, value in {**weights, HEAD: weights[TABLE]}.items()}
    torch.func.functional_call(Head(), named).square().sum().backward()
    torch.testing.assert_close(net.get_parameter(TABLE).grad, weights[TABLE].grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES.keys())
@pytest.mark.parametrize("part", [None, 9000])
def test_round_trip_holds_one_table(process, part, tiny, tmp_path):
    net = tiny(process, tie_embeddings=True)
    folder = save_denoiser(net, tmp_path / "model", part=part)
    written = [name for path in folder.glob("*.safetensors") for name in load_file(path)]
    assert sorted(written) == sorted({*net.state_dict(), *(["prior"] if process else [])})
    assert TABLE in written
    assert HEAD not in written
    again = load_denoiser(folder)
    assert again.config.tie_embeddings
    x = torch.randint(V, (2, 5))
    assert torch.equal(again(x, 0.4), net.eval()(x, 0.4))
    with torch.no_grad():  # still tied: a change of the table is a change of the head
        again.backbone.vocab_embed.embedding.zero_()
    assert torch.equal(again.head(torch.randn(3, 16)), again.backbone.head[1].log_softmax(-1).expand(3, V))


def test_files_of_the_other_kind_are_refused(tiny, tmp_path):
    for tied in (True, False):
        folder = save_denoiser(tiny(masked(V), tie_embeddings=tied), tmp_path / str(tied))
        config = json.loads((folder / "config.json").read_text())
        config["network"]["tie_embeddings"] = not tied
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(LayoutError, match=f"{'missing' if tied else 'unknown tensor'}"):
            load_denoiser(folder)


def test_folders_from_before_are_not_tied(tiny, tmp_path):
    folder = save_denoiser(tiny(masked(V)), tmp_path / "old")
    config = json.loads((folder / "config.json").read_text())
    assert config["network"].pop("tie_embeddings") is False
    (folder / "config.json").write_text(json.dumps(config))
    assert HEAD in load_denoiser(folder).state_dict()


def test_copies_and_conversions_stay_tied(tiny):
    """A head that holds no weights cannot be parted from its embeddings."""
    net = tiny(masked(V), tie_embeddings=True)
    with torch.device("meta"):
        blank = Denoiser(net.config, net.process)
    blank = blank.to_empty(device="cpu")
    blank.load_state_dict(net.state_dict())
    for one in (copy.deepcopy(net), frozen_copy(net).double(), blank, copy.deepcopy(net).to(torch.bfloat16)):
        assert one.count() == net.count() == sum(value.numel() for value in one.state_dict().values())
        one.requires_grad_(False)
        one.backbone.vocab_embed.embedding.fill_(0.5)
        assert bool((one.backbone.head[0] == 0.5).all())


def test_the_average_moves_once(tiny):
    average, online = (tiny(masked(V), seed=seed, tie_embeddings=True) for seed in (1, 2))
    frozen = frozen_copy(average)
    update(frozen, online, 0.9)
    wanted = 0.9 * average.get_parameter(TABLE) + 0.1 * online.get_parameter(TABLE)
    torch.testing.assert_close(frozen.get_parameter(TABLE), wanted)
    torch.testing.assert_close(frozen.backbone.head[0], wanted[:V])


def test_the_first_prediction_is_nearly_uniform():
    torch.manual_seed(0)
    shape = NetworkConfig(hidden_size=384, num_layers=1, num_heads=6, cond_dim=16, tie_embeddings=True)
    law = Denoiser(shape, masked(2000))(torch.full((1, 4), 2000), 1.0)[0, 0].detach()
    assert float(-(law.exp() * law).sum()) == pytest.approx(torch.tensor(2000.0).log().item(), abs=0.15)


def test_the_padded_head_of_a_fast_network_is_the_same(tiny, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda work, **_: work)
    net = tiny(masked(V), tie_embeddings=True).requires_grad_(False).eval()
    fast = copy.deepcopy(net)
    recording.accelerate(fast)
    rows = torch.randn(3, 16)
    assert fast.backbone.head[0].shape == (128, 16)
    torch.testing.assert_close(fast.logits(rows), net.logits(rows))
    student, hidden = tiny(masked(V), tie_embeddings=True), torch.randn(4, 16)
    weights = [fused._cut(part, V) for part in student.backbone.head]
    assert torch.equal(torch.nn.functional.linear(hidden, *weights), student.logits(hidden))


def test_a_compiled_network_is_saved_without_its_copy_of_the_embeddings(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda work, **_: work)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    network = Denoiser(dataclasses.replace(SIZES["tiny"], tie_embeddings=True), masked(V)).requires_grad_(False)
    x, before = torch.randint(V + 1, (2, 9)), network.count()
    law = network(x, 0.5)
    recording.accelerate(network)
    assert network.count() == before
    again = load_denoiser(save_denoiser(network, tmp_path / "model"))
    assert again.count() == before
    assert torch.allclose(again(x, 0.5), law, atol=1e-6)
