"""The layouts of the public checkpoints, rebuilt small: the peers' own arithmetic, their samplers, and our evaluation.

Names, shapes and fields are those that the peers publish; weights are random. What a folder must predict is computed
here from its tensors, by a forward pass of its own that agrees with the outputs stored in `fixtures/peers`.
"""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import cdlm
from cdlm.eval.config import EvalConfig
from cdlm.eval.sweep import evaluate
from cdlm.model import pretrained
from cdlm.model.pretrained import LayoutError
from cdlm.sample.timesteps import NEAR_ZERO

from ..eval.suites import QUIET
from ..writers import BYTES, write_model

HIDDEN, BLOCKS, HEADS, LENGTH = 16, 2, 2, 12
IDS = BYTES.vocab_size + 1
"""Every peer has one id beyond its tokenizer: the mask, or `[PAD]`, or a mask that the uniform process never needed."""


@dataclasses.dataclass(frozen=True)
class Layout:
    config: dict[str, Any]
    masks: bool
    """Whether the last id is the mask; else the process is uniform over all ids, and the network is told the time."""
    cond: int = 8
    prefix: str = "backbone."
    seed: int = 0


SIZES = {"hidden_dim": HIDDEN, "cond_dim": 8, "n_blocks": BLOCKS, "n_heads": HEADS, "dropout": 0.1}
PLAIN = {**SIZES, "vocab_size": IDS, "model_length": LENGTH}
MDLM = {**PLAIN, "model_type": "mdlm", "architectures": ["MDLM"], "time_conditioning": False}
DUO = {**PLAIN, "model_type": "DUO", "architectures": ["DUO"], "causal": False, "cond_dim": 9, "var_min": True}
UDLM = {**PLAIN, "model_type": "udlm", "time_conditioning": True, "cfg": False, "cfg_num_classes": -1}
SDTT = {
    "model": {"hidden_size": HIDDEN, "cond_dim": 8, "n_blocks": BLOCKS, "n_heads": HEADS, "max_length": LENGTH},
    "parameterization": {"distill_mode": "kl-fwd", "start_from_hf": True},
    "time_conditioning": False,
    "tokenizer": {"name": "gpt2"},
}
LAYOUTS = {
    "mdlm-owt": Layout(MDLM, masks=True),
    "duo": Layout(DUO, masks=False, cond=9),  # the default of its configuration is odd, too: 129
    "duo-distilled": Layout(DUO, masks=False, cond=9, seed=1),
    "sdtt": Layout(SDTT, masks=True),
    "sdtt-from-hub": Layout(SDTT, masks=True, prefix="backbone.backbone."),  # where its teacher came from the hub
    "udlm": Layout(UDLM, masks=False),
}


def weights(layout: Layout) -> dict[str, Tensor]:
    """Random tensors under the peers' names, none of them zero; the id beyond the tokenizer is what they favour."""
    d, c = HIDDEN, layout.cond
    shapes: dict[str, tuple[int, ...]] = {"vocab_embed.embedding": (IDS, d), "rotary_emb.inv_freq": (d // HEADS // 2,)}
    shapes |= {"sigma_map.mlp.0.weight": (c, 256), "sigma_map.mlp.0.bias": (c,)}
    shapes |= {"sigma_map.mlp.2.weight": (c, c), "sigma_map.mlp.2.bias": (c,)}
    for block in (f"blocks.{k}." for k in range(BLOCKS)):
        shapes |= {block + "norm1.weight": (d,), block + "norm2.weight": (d,)}
        shapes |= {block + "attn_qkv.weight": (3 * d, d), block + "attn_out.weight": (d, d)}
        shapes |= {block + "mlp.0.weight": (4 * d, d), block + "mlp.0.bias": (4 * d,)}
        shapes |= {block + "mlp.2.weight": (d, 4 * d), block + "mlp.2.bias": (d,)}
        shapes |= {block + "adaLN_modulation.weight": (6 * d, c), block + "adaLN_modulation.bias": (6 * d,)}
    shapes |= {"output_layer.norm_final.weight": (d,)}
    shapes |= {"output_layer.adaLN_modulation.weight": (2 * d, c), "output_layer.adaLN_modulation.bias": (2 * d,)}
    shapes |= {"output_layer.linear.weight": (IDS, d), "output_layer.linear.bias": (IDS,)}
    noise = torch.Generator().manual_seed(layout.seed)
    tensors = {name: 0.4 * torch.randn(shape, generator=noise) for name, shape in shapes.items()}
    tensors["output_layer.linear.bias"][-1] += 3.0
    return tensors


def write_peer(folder: Path, layout: Layout, **changes: Any) -> Path:
    folder.mkdir()
    tensors = {layout.prefix + name: tensor for name, tensor in weights(layout).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**layout.config, **changes}))
    return folder


def peers_logits(w: dict[str, Tensor], heads: int, x: Tensor, sigma: Tensor) -> Tensor:
    """The network that MDLM, UDLM, DUO and SDTT share, in double precision and in the plainest words."""
    w = {name: tensor.double() for name, tensor in w.items()}

    def linear(name: str, h: Tensor) -> Tensor:
        out = h @ w[f"{name}.weight"].T
        return out + w[f"{name}.bias"] if f"{name}.bias" in w else out

    def norm(name: str, h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return h * w[f"{name}.weight"] * (1 + scale) + shift

    def turned(h: Tensor) -> Tensor:
        """Pairs (k, k + half) of a head, turned by the position over 10000^(k / half)."""
        half = h.shape[-1] // 2
        angle = torch.arange(h.shape[1])[:, None, None] / 10_000 ** (torch.arange(half).double() / half)
        z = torch.complex(h[..., :half], h[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag], -1)

    angles = sigma.double()[:, None] * torch.exp(-math.log(10_000) * torch.arange(128).double() / 128)
    c = linear("sigma_map.mlp.0", torch.cat([angles.cos(), angles.sin()], -1))
    c = F.silu(linear("sigma_map.mlp.2", F.silu(c)))
    h = w["vocab_embed.embedding"][x]
    for k in range(sum(name.endswith("attn_qkv.weight") for name in w)):
        name = f"blocks.{k}"
        modulation = linear(f"{name}.adaLN_modulation", c)[:, None]
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.chunk(6, -1)
        qkv = linear(f"{name}.attn_qkv", norm(f"{name}.norm1", h, shift1, scale1))
        q, k_, v = (part.unflatten(-1, (heads, -1)) for part in qkv.chunk(3, -1))
        scores = torch.einsum("bihe,bjhe->bhij", turned(q), turned(k_)) / math.sqrt(q.shape[-1])
        mixed = torch.einsum("bhij,bjhe->bihe", scores.softmax(-1), v).flatten(2)
        h = h + gate1 * linear(f"{name}.attn_out", mixed)
        wide = linear(f"{name}.mlp.0", norm(f"{name}.norm2", h, shift2, scale2))
        h = h + gate2 * linear(f"{name}.mlp.2", F.gelu(wide, approximate="tanh"))
    shift, scale = linear("output_layer.adaLN_modulation", c)[:, None].chunk(2, -1)
    return linear("output_layer.linear", norm("output_layer.norm_final", h, shift, scale))


def peers_law(layout: Layout, x: Tensor, t: float) -> Tensor:
    """What a peer makes of its logits: SUBS without a time under masking, a softmax over all ids at sigma(t) else."""
    sigma = 0.0 if layout.masks else -math.log(1 - (1 - 1e-3) * t)
    logits = peers_logits(weights(layout), HEADS, x, torch.full((len(x),), sigma))
    if not layout.masks:
        return logits.log_softmax(-1)
    law = logits[..., : IDS - 1].log_softmax(-1)
    carried = F.one_hot(x.clamp(max=IDS - 2), IDS - 1).double().log()
    return torch.where((x == IDS - 1)[..., None], law, carried)


def likeliest(layout: Layout, x: Tensor, t: float) -> Tensor:
    """By the peer's law; what stands for no token is not drawn."""
    return peers_law(layout, x, t)[..., : BYTES.vocab_size].argmax(-1)


def test_the_plain_forward_pass_gives_the_stored_logits(peers: Path) -> None:
    stored = {name: torch.from_numpy(value) for name, value in np.load(peers / "dit.npz").items()}
    tensors = load_file(peers / "mdlm-hf-tiny" / "model.safetensors")
    w = {name.removeprefix("backbone."): tensor for name, tensor in tensors.items()}
    for sigma, name in ((stored["sigma"], "logits"), (torch.zeros(2), "logits_sigma0")):
        assert torch.allclose(peers_logits(w, 4, stored["x_t"], sigma), stored[name].double(), atol=1e-5, rtol=0)


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS.keys())
def layout(request: pytest.FixtureRequest) -> Layout:
    return request.param


@pytest.fixture
def folder(layout: Layout, tmp_path: Path) -> Path:
    return write_peer(tmp_path / "peer", layout)


def test_its_law_is_the_peers(layout: Layout, folder: Path) -> None:
    net = cdlm.load(folder, "cpu", "float64", tokenizer="bytes").denoiser
    assert net.process is not None
    assert (net.process.name, net.process.states) == ("masked" if layout.masks else "uniform", IDS)
    x = torch.randint(0, IDS, (2, LENGTH))
    x[:, ::3] = IDS - 1
    for t in (0.2, 0.9):
        assert torch.allclose(net(x, t).exp(), peers_law(layout, x, t).exp(), atol=1e-6, rtol=0)
    told = float((peers_law(layout, x, 0.2).exp() - peers_law(layout, x, 0.9).exp()).abs().max())
    assert told == 0 if layout.masks else told > 1e-3


def test_it_writes_by_the_peers_law(layout: Layout, folder: Path) -> None:
    """Two steps with the likeliest tokens: the last is what the peer predicts at t = 1/2 for what the first left."""
    model = cdlm.load(folder, "cpu", tokenizer="bytes")
    start, left, last = (torch.tensor(frame.token_ids) for frame in model.stream(num_samples=8, steps=2, top_k=1))
    assert bool((start == IDS - 1).all()) == layout.masks
    assert torch.equal(last, likeliest(layout, left, 0.5))
    assert not torch.equal(last, left)
    assert layout.masks or not torch.equal(last, likeliest(layout, left, 1.0))


def test_it_samples_by_the_plug_in_posterior(layout: Layout, folder: Path) -> None:
    model = cdlm.load(folder, "cpu", tokenizer="bytes")
    texts = [text.token_ids for text in model.sample(8, steps=4)]
    assert max(map(max, texts)) < BYTES.vocab_size
    if layout.masks:
        with pytest.raises(ValueError, match="plug-in and mixture are the same"):
            model.sample(posterior="mixture")
        return
    assert texts == [text.token_ids for text in model.sample(8, steps=4, posterior="plug-in")]
    assert texts != [text.token_ids for text in model.sample(8, steps=4, posterior="mixture")]
    frames = model.stream(num_samples=8, steps=4, final_step="argmax")
    *_, left, last = (torch.tensor(frame.token_ids) for frame in frames)
    assert torch.equal(last, likeliest(layout, left, NEAR_ZERO))  # DUO's greedy tail


def test_it_is_evaluated(layout: Layout, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = write_model(tmp_path / "judge", "causal", length=64)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n<|endoftext|>\n".join(f"a text, number {k}, of some length " for k in range(20)))
    asked = EvalConfig(
        models=(str(folder),),
        judge=(str(judge),),
        tasks=("unconditional", "likelihood"),
        texts=(f"some={texts}",),
        num_samples=4,
        steps=(2,),
        times=4,
        device="cpu",
        tokenizer=Path("bytes"),
        out=tmp_path / "out",
    )
    written, bound = evaluate(asked, QUIET)
    kind = "masked" if layout.masks else "uniform"
    assert {(row["process"], row["length"], row["num"]) for row in (written, bound)} == {(kind, LENGTH, 4)}
    assert 1 < written["ppl"] < math.inf
    assert 0 < written["entropy"] < math.log(LENGTH) + 1e-9
    assert 0 < bound["nelbo"] < math.inf


def test_it_is_saved_as_ours(layout: Layout, folder: Path, tmp_path: Path) -> None:
    one = cdlm.load(folder, "cpu", tokenizer="bytes")
    other = cdlm.load(one.save_pretrained(tmp_path / "copy"), "cpu")
    x = torch.randint(0, IDS, (2, LENGTH))
    x[:, ::3] = IDS - 1
    assert torch.equal(other.denoiser(x, 0.4), one.denoiser(x, 0.4))
    assert torch.allclose(other.denoiser(x, 0.4).exp().double(), peers_law(layout, x, 0.4).exp(), atol=1e-4)
    assert (other.length, other.posterior) == (LENGTH, "plug-in")
    assert [text.text for text in other.sample(2, steps=3)] == [text.text for text in one.sample(2, steps=3)]


def test_a_udlm_that_is_not_told_the_time(tmp_path: Path) -> None:
    net = pretrained.load_denoiser(write_peer(tmp_path / "peer", LAYOUTS["udlm"], time_conditioning=False))
    x = torch.randint(0, IDS, (1, LENGTH))
    assert torch.equal(net(x, 0.2), net(x, 0.9))


def test_a_class_guided_udlm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="guided by classes"):
        pretrained.load_denoiser(write_peer(tmp_path / "peer", LAYOUTS["udlm"], cfg=True))


def test_an_sdtt_without_its_width_is_named(tmp_path: Path) -> None:
    model = {name: value for name, value in SDTT["model"].items() if name != "hidden_size"}
    with pytest.raises(LayoutError, match=r"config.json lacks 'hidden_size'"):
        pretrained.load_denoiser(write_peer(tmp_path / "peer", LAYOUTS["sdtt"], model=model))


@pytest.mark.parametrize("averaged", [True, False])
def test_the_documented_conversion_of_a_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, averaged: bool) -> None:
    layout = LAYOUTS["mdlm-owt"]
    tensors = {f"backbone.{name}": tensor for name, tensor in weights(layout).items()}
    averages = [tensor for name, tensor in tensors.items() if not name.endswith("inv_freq")]
    state = {name: torch.zeros_like(tensor) if averaged else tensor for name, tensor in tensors.items()}
    ema = {"decay": 0.9999, "shadow_params": averages} if averaged else {}
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": state, "ema": ema, "epoch": 3}, "last.ckpt")
    page = (Path(__file__).parents[2] / "docs" / "hub.md").read_text()
    code = page.split("## Checkpoints that are pickles")[1].split("```python\n")[1].split("```")[0]
    sizes = json.loads(re.search(r"sizes = (\{.*\})", code)[1])  # type: ignore[index]
    assert sizes.keys() < MDLM.keys()
    small = {name: MDLM[name] for name in sizes}
    exec(code.replace("sizes = {", f"sizes = {small} or {{"), {})
    net = cdlm.load("from-ckpt", "cpu", "float64", tokenizer="bytes").denoiser
    x = torch.randint(0, IDS, (2, LENGTH))
    assert torch.allclose(net(x, 0.3).exp(), peers_law(layout, x, 0.3).exp(), atol=1e-6, rtol=0)
