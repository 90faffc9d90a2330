"""The transformer: shapes, what it may see, and relaxed tokens."""

import math

import pytest
import torch
from torch import Tensor, nn

from cdlm.model.config import SIZES, NetworkConfig
from cdlm.model.dit import Block, DiT, Embedding, LayerNorm, NoiseEmbedding, OutputLayer, rotary_table, rotate
from cdlm.process import masked
from cdlm.types import Mixture

V = 7


def randomise(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    return module


@pytest.mark.parametrize(("b", "l"), [(1, 1), (3, 9)])
@pytest.mark.parametrize("causal", [False, True])
def test_shapes(b, l, causal):
    net = DiT(NetworkConfig(hidden_size=32, num_layers=3, num_heads=4, cond_dim=8, causal=causal), V + 1, V)
    hidden = net(torch.randint(V + 1, (b, l)), torch.zeros(b))
    assert hidden.shape == (b, l, 32)
    assert net.output_layer.linear(hidden).shape == (b, l, V)


def test_causal_network_does_not_look_ahead(tiny):
    net = tiny().eval()
    x = torch.randint(V, (2, 10))
    for place in range(10):
        changed = x.clone()
        changed[:, place] = (x[:, place] + 1) % V
        same = (net(x) == net(changed)).all(-1).all(0)
        assert bool(same[:place].all())
        assert not bool(same[place:].any())


def test_bidirectional_network_looks_everywhere(tiny):
    net = tiny(masked(V)).eval()
    x = torch.full((1, 6), V)
    changed = x.clone()
    changed[0, 3] = 2
    gap = (net(x, 0.5) - net(changed, 0.5)).abs().amax(-1)[0]
    assert bool((gap[[0, 1, 2, 4, 5]] > 1e-6).all())


def test_sequences_do_not_see_each_other(tiny):
    net = tiny(masked(V)).eval()
    x = torch.randint(V + 1, (3, 8))
    whole = net.features(x, torch.ones(3).double())
    for row in range(3):
        assert torch.allclose(net.features(x[row : row + 1], torch.ones(1).double())[0], whole[row], atol=1e-6)


def test_positions_matter_only_relative_to_each_other():
    """Rotary: scores of rotated queries and keys depend on the distance alone."""
    q, k = torch.randn(8).double(), torch.randn(8).double()
    table = rotary_table(40, 8, torch.device("cpu"))
    q, k = (rotate(x.expand(1, 1, 40, 8), table)[0, 0] for x in (q, k))
    scores = q @ k.T
    for distance in (-7, 0, 1, 12):
        line = scores.diagonal(distance)
        assert torch.allclose(line, line[:1].expand_as(line), atol=1e-5)
    assert float(scores[0].std()) > 0.1


def test_rotary_table_by_hand():
    cos, sin = rotary_table(5, 4, torch.device("cpu"))
    for place in range(5):
        angles = [place, place / 100]
        assert cos[place].tolist() == pytest.approx([math.cos(a) for a in angles], abs=1e-6)
        assert sin[place].tolist() == pytest.approx([math.sin(a) for a in angles], abs=1e-6)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(1, 1, 5, 4)
    a, c = math.cos(3), math.sin(3)
    turned = rotate(x, (cos, sin))[0, 0, 3]
    assert turned[0].item() == pytest.approx(1 * a - 3 * c, abs=1e-5)
    assert turned[2].item() == pytest.approx(3 * a + 1 * c, abs=1e-5)


def test_noise_embedding_is_a_perceptron_on_256_sinusoids():
    net = randomise(NoiseEmbedding(8))
    level = torch.tensor([0.0, 0.7, 6.9])
    waves = [
        [math.cos(v * 10_000 ** (-i / 128)) for i in range(128)]
        + [math.sin(v * 10_000 ** (-i / 128)) for i in range(128)]
        for v in level.tolist()
    ]
    first, _, second = net.mlp
    h = torch.tensor(waves) @ first.weight.T + first.bias
    truth = (h * torch.sigmoid(h)) @ second.weight.T + second.bias
    assert torch.allclose(net(level), truth, atol=1e-5)


def test_layer_norm_by_hand_has_a_scale_and_no_shift():
    norm = randomise(LayerNorm(16))
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    x = torch.randn(2, 3, 16)
    centred = x - x.mean(-1, keepdim=True)
    truth = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    assert torch.allclose(norm(x), truth, atol=1e-6)
    low = x.bfloat16()  # the statistics are computed in single precision, whatever comes in
    assert torch.equal(norm(low), norm(low.float()).bfloat16())


@pytest.mark.parametrize("causal", [False, True])
def test_block_by_hand(causal):
    """One block, written out with an explicit softmax over positions."""
    torch.manual_seed(0)
    shape = NetworkConfig(hidden_size=8, num_layers=1, num_heads=2, cond_dim=4, dropout=0.0, causal=causal)
    block = randomise(Block(shape).double())
    b, l, d, e = 2, 5, 8, 4
    x, c = torch.randn(b, l, d).double(), torch.randn(b, 4).double()
    table = rotary_table(l, e, torch.device("cpu"))
    s1 = k1 = s2 = k2 = torch.zeros(b, 1, d).double()
    g1 = g2 = torch.ones(b, 1, d).double()
    if not causal:
        six = c @ block.adaLN_modulation.weight.T + block.adaLN_modulation.bias
        s1, k1, g1, s2, k2, g2 = six.view(b, 1, 6, d).unbind(2)

    def attention(h: Tensor) -> Tensor:
        out = torch.zeros(b, l, d).double()
        q, k, v = (h @ block.attn_qkv.weight.T).split(d, -1)
        for head in range(2):
            own = slice(head * e, (head + 1) * e)
            turned = [rotate(z[..., own][:, None], table)[:, 0] for z in (q, k)]
            scores = turned[0] @ turned[1].transpose(1, 2) / math.sqrt(e)
            if causal:
                scores = scores.masked_fill(torch.ones(l, l).triu(1).bool(), -math.inf)
            out[..., own] = scores.softmax(-1) @ v[..., own]
        return out @ block.attn_out.weight.T

    h = x + g1 * attention(block.norm1(x) * (1 + k1) + s1)
    inner = (block.norm2(h) * (1 + k2) + s2) @ block.mlp[0].weight.T + block.mlp[0].bias
    inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
    truth = h + g2 * (inner @ block.mlp[2].weight.T + block.mlp[2].bias)
    assert torch.allclose(block(x, None if causal else c, table), truth, atol=1e-10)


def test_blocks_are_the_identity_at_the_start():
    torch.manual_seed(0)
    shape = NetworkConfig(hidden_size=16, num_layers=1, num_heads=2, cond_dim=8)
    x = torch.randn(2, 4, 16)
    assert torch.equal(Block(shape)(x, torch.randn(2, 8), rotary_table(4, 8, torch.device("cpu"))), x)


def test_output_layer_by_hand():
    layer = randomise(OutputLayer(NetworkConfig(hidden_size=8, num_heads=2, cond_dim=4), V))
    x, c = torch.randn(2, 3, 8), torch.randn(2, 4)
    shift, scale = (c @ layer.adaLN_modulation.weight.T + layer.adaLN_modulation.bias)[:, None].split(8, -1)
    assert torch.allclose(layer(x, c), layer.norm_final(x) * (1 + scale) + shift, atol=1e-6)


def test_embedding_starts_within_the_bound_of_its_width():
    table = Embedding(1000, 64).embedding
    assert float(table.detach().abs().max()) <= 1 / 8
    assert float(table.detach().abs().max()) > 0.99 / 8
    assert float(table.detach().mean()) == pytest.approx(0, abs=0.002)


def test_relaxed_tokens_of_one_token_are_plain_tokens():
    table = randomise(Embedding(V, 16))
    x = torch.randint(V, (2, 5))
    ids = torch.cat([x[..., None], torch.randint(V, (2, 5, 3))], -1)
    weights = torch.zeros(2, 5, 4)
    weights[..., 0] = 1
    assert torch.equal(table(Mixture(ids, weights, torch.zeros(2, 5))), table(x))


def test_relaxed_tokens_are_weighted_means_of_embeddings():
    table = randomise(Embedding(V, 16))
    ids, weights, rest = torch.randint(V, (2, 5, 3)), torch.rand(2, 5, 3), torch.rand(2, 5)
    found = table(Mixture(ids, weights, rest))
    for b in range(2):
        for i in range(5):
            truth = rest[b, i] * table.embedding.sum(0) / V
            for j in range(3):
                truth = truth + weights[b, i, j] * table.embedding[ids[b, i, j]]
            assert torch.allclose(found[b, i], truth, atol=1e-6)


def test_relaxed_tokens_train_the_embedding():
    table = randomise(Embedding(V, 4))
    ids, weights = torch.tensor([[[1, 2]]]), torch.tensor([[[0.25, 0.5]]])
    table(Mixture(ids, weights, torch.tensor([[0.7]]))).sum().backward()
    truth = torch.full((V,), 0.7 / V)
    truth[1] += 0.25
    truth[2] += 0.5
    assert torch.allclose(table.embedding.grad[:, 0], truth)


def test_dropout_only_while_training(tiny):
    net = tiny(masked(V), dropout=0.5)
    x = torch.full((1, 6), V)
    assert not torch.equal(net.train()(x, 0.5), net(x, 0.5))
    assert torch.equal(net.eval()(x, 0.5), net(x, 0.5))


@pytest.mark.parametrize(("hidden", "heads"), [(10, 4), (12, 4), (6, 2)])
def test_shapes_that_do_not_divide_are_refused(hidden, heads):
    with pytest.raises(ValueError, match=f"hidden_size {hidden} must be an even multiple of num_heads {heads}"):
        NetworkConfig(hidden_size=hidden, num_heads=heads)


def test_sizes():
    assert SIZES["110m"] == NetworkConfig(hidden_size=768, num_layers=12, num_heads=12, cond_dim=128, dropout=0.1)
    assert list(SIZES) == ["tiny", "small", "18m", "110m", "sudoku-4", "sudoku-6"]
