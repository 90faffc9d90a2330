"""The public layouts, rebuilt small, and a forward pass of the network that MDLM, UDLM, DUO and SDTT share.

Names, shapes and fields are those that the peers publish; weights are random.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from ..writers import BYTES

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
    "model": {"hidden_size": HIDDEN, "cond_dim": 8, "n_blocks": BLOCKS, "n_heads": HEADS, "length": LENGTH},
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
