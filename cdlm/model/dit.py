"""The diffusion transformer of MDLM and DUO: pre-norm blocks with rotary positions, modulated by the noise level.

Tensor names and shapes are those of the public checkpoints (vocab_embed, sigma_map, blocks.N, output_layer), so that
loading them is a copy. Attention is torch's own `scaled_dot_product_attention`; nothing else needs to be installed.
"""

import functools
import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cdlm.devices import send
from cdlm.model.config import NetworkConfig
from cdlm.process.grid import grid_cells
from cdlm.types import LogLaw, Mixture, Time, Tokens

Hidden = Float[Tensor, "b l d"]
Chosen = Float[Tensor, "b k d"]
"""Hidden rows at all positions, or at those asked for."""
Rows = Int[Tensor, "b r"]
Rotary = tuple[Float[Tensor, "... half"], Float[Tensor, "... half"]]
Past = tuple[Float[Tensor, "b h past e"], Float[Tensor, "b h past e"], Int[Tensor, "new"]]
"""Keys and values of a block for a whole text, filled from the left, and the positions that are being added."""


class LayerNorm(nn.Module):
    """Layer norm in fp32 or wider, with a learned scale and no shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Hidden) -> Hidden:
        kind = torch.promote_types(x.dtype, torch.float32)
        return (F.layer_norm(x.to(kind), x.shape[-1:]) * self.weight).to(x.dtype)


class Embedding(nn.Module):
    """Token embeddings; relaxed tokens are mixtures of them."""

    def __init__(self, inputs: int, width: int, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(inputs, width))
        if tied:  # as a head it starts small: rows of unit variance have logits of 0.02 sqrt(width)
            nn.init.normal_(self.embedding, std=0.02)
        else:
            nn.init.kaiming_uniform_(self.embedding, a=math.sqrt(5))

    def forward(self, x: Tokens | Mixture) -> Hidden:
        if isinstance(x, Tensor):
            return F.embedding(x, self.embedding)
        b, l, k = x.ids.shape
        weights = x.weights.to(self.embedding.dtype)
        listed = F.embedding_bag(
            x.ids.view(b * l, k), self.embedding, per_sample_weights=weights.view(b * l, k), mode="sum"
        )
        return listed.view(b, l, -1) + x.rest.to(self.embedding.dtype)[..., None] * self.embedding.mean(0)


class NoiseEmbedding(nn.Module):
    """The noise level -log alpha, as 256 sinusoids and a small perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, level: Float[Tensor, "b"]) -> Float[Tensor, "b c"]:
        frequencies = torch.exp(-math.log(10_000) / 128 * torch.arange(128, device=level.device))
        angles = level[:, None] * frequencies
        return self.mlp(torch.cat([angles.cos(), angles.sin()], -1).to(next(self.parameters()).dtype))


class Block(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads, self.causal, self.dropout = config.num_heads, config.causal, config.dropout
        self.norm1 = LayerNorm(width)
        self.attn_qkv = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.norm2 = LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        if not config.causal:
            self.adaLN_modulation = _zeros(nn.Linear(config.cond_dim, 6 * width))

    def forward(
        self,
        x: Hidden,
        c: Float[Tensor, "b c"] | None,
        rotary: Rotary,
        past: Past | None = None,
        rows: Rows | None = None,
    ) -> Chosen:
        """The next hidden rows; given `rows`, at these positions alone, which still see all of x."""
        if c is None:
            x = x + self._drop(self._attend(self.norm1(x), rotary, past))
            return x + self._drop(self._widen(self.norm2(x)))
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c)[:, None].chunk(6, -1)
        seen = self.norm1(x) * (1 + scale1) + shift1
        if rows is None:
            x = x + gate1 * self._drop(self._attend(seen, rotary))
        else:
            x = take_positions(x, rows) + gate1 * self._attend_at(seen, rotary, rows)
        return x + gate2 * self._drop(self._widen(self.norm2(x) * (1 + scale2) + shift2))

    def _attend(self, x: Hidden, rotary: Rotary, past: Past | None = None) -> Hidden:
        if x.is_cuda and torch.is_grad_enabled():  # three products: gathering one gradient costs more than they do
            parts = [F.linear(x, weight) for weight in self.attn_qkv.weight.chunk(3)]
        else:
            parts = list(self.attn_qkv(x).chunk(3, -1))
        q, k, v = map(self._heads, parts)
        q, k = rotate(q, rotary), rotate(k, rotary)
        if past is None:
            return self._merged(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal))
        keys, values, positions = past
        keys.index_copy_(2, positions, k)
        values.index_copy_(2, positions, v)
        seen = torch.arange(keys.shape[2], device=x.device) <= positions[:, None]
        return self._merged(F.scaled_dot_product_attention(q, keys, values, attn_mask=seen))

    def _attend_at(self, x: Hidden, rotary: Rotary, rows: Rows) -> Chosen:
        """Queries at some positions, keys and values at all."""
        query, rest = self.attn_qkv.weight.split([x.shape[2], 2 * x.shape[2]])
        k, v = (self._heads(part) for part in F.linear(x, rest).chunk(2, -1))
        q = self._heads(F.linear(take_positions(x, rows), query))
        cos, sin = (table[rows][:, None] for table in rotary)
        return self._merged(F.scaled_dot_product_attention(rotate(q, (cos, sin)), rotate(k, rotary), v))

    def _heads(self, x: Hidden) -> Float[Tensor, "b h l e"]:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _merged(self, mixed: Float[Tensor, "b h l e"]) -> Hidden:
        return self.attn_out(mixed.transpose(1, 2).flatten(2))

    def _widen(self, x: Hidden) -> Hidden:
        """The perceptron; in bfloat16 on a GPU its activation is applied within the first product."""
        weight, bias = self.mlp[0].weight, self.mlp[0].bias
        if x.is_cuda and weight.dtype == x.dtype == torch.bfloat16 and not torch.is_grad_enabled():
            wide = torch._addmm_activation(bias, x.flatten(0, 1), weight.T, use_gelu=True)  # type: ignore[arg-type]
            return self.mlp[2](wide).view_as(x)
        if torch.compiler.is_compiling() and torch.is_grad_enabled():  # keep one wide tensor instead of two
            return self.mlp[2](checkpoint(self.mlp[1], self.mlp[0](x), use_reentrant=False))
        return self.mlp(x)

    def _drop(self, x: Hidden) -> Hidden:
        return F.dropout(x, self.dropout, self.training)


class Bias(nn.Module):
    """What is left of a head whose weights are the embeddings. It does not hold them: they are kept, counted, averaged
    and written once, under one name, and no copy or conversion can part them."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(outputs))


class OutputLayer(nn.Module):
    """The last norm, and the head: a linear map that starts at zero, so that the first prediction is uniform."""

    def __init__(self, config: NetworkConfig, outputs: int) -> None:
        super().__init__()
        self.norm_final = LayerNorm(config.hidden_size)
        self.linear = Bias(outputs) if config.tie_embeddings else _zeros(nn.Linear(config.hidden_size, outputs))
        if not config.causal:
            self.adaLN_modulation = _zeros(nn.Linear(config.cond_dim, 2 * config.hidden_size))

    def forward(self, x: Hidden, c: Float[Tensor, "b c"] | None) -> Hidden:
        if c is None:
            return self.norm_final(x)
        shift, scale = self.adaLN_modulation(c)[:, None].chunk(2, -1)
        return self.norm_final(x) * (1 + scale) + shift


class DiT(nn.Module):
    """Tokens and a noise level in, hidden rows out; `head` turns a row into logits."""

    def __init__(self, config: NetworkConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.config = config
        self.cells: Int[Tensor, "3 cells"]
        self.vocab_embed = Embedding(inputs, config.hidden_size, config.tie_embeddings)
        if config.position_embeddings:
            self.position_embed = nn.Parameter(0.02 * torch.randn(config.position_embeddings, config.hidden_size))
        if config.grid_embeddings:
            side = config.grid_embeddings
            self.row_embed = nn.Parameter(0.02 * torch.randn(side, config.hidden_size))
            self.column_embed = nn.Parameter(0.02 * torch.randn(side, config.hidden_size))
            self.box_embed = nn.Parameter(0.02 * torch.randn(side, config.hidden_size))
            self.register_buffer("cells", torch.stack(grid_cells(side)), persistent=False)
        if not config.causal:
            self.sigma_map = NoiseEmbedding(config.cond_dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.output_layer = OutputLayer(config, outputs)

    @property
    def head(self) -> tuple[Float[Tensor, "v d"], Float[Tensor, "v"]]:
        """Weight and bias of the map from a row to logits; tied to the embeddings, the mask's row is left out."""
        linear = self.output_layer.linear
        if isinstance(linear, Bias):
            return self.vocab_embed.embedding[: len(linear.bias)], linear.bias
        return linear.weight, linear.bias

    def forward(
        self, x: Tokens | Mixture, level: Float[Tensor, "b"], rotary: Rotary | None = None, rows: Rows | None = None
    ) -> Chosen:
        """Hidden rows at every position, or at `rows` of each sequence alone: then the last block computes no others.

        A compiled network wants its `rotary` table from outside, or it computes cosines anew in every block.
        """
        length = (x if isinstance(x, Tensor) else x.ids).shape[1]
        rotary = rotary or self.rotary(length)
        h, c = self.stem(x, level, rotary)
        return self.tip(h, c, rotary, rows)

    @property
    def device(self) -> torch.device:
        return self.vocab_embed.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.vocab_embed.embedding.dtype

    def features(self, x: Tokens | Mixture, alpha: Time, rows: Rows | None = None) -> Chosen:
        """Hidden rows at the signal level alpha."""
        level = -torch.log(alpha) if self.config.time_conditioning else torch.zeros_like(alpha)
        length = (x if isinstance(x, Tensor) else x.ids).shape[1]
        return self(x, send(level.to(torch.float32), self.device), self.rotary(length), rows)

    def logits(self, rows: Float[Tensor, "*n d"]) -> LogLaw:
        return F.linear(rows, *self.head)

    def rotary(self, length: int) -> Rotary:
        return rotary_table(length, self.config.hidden_size // self.config.num_heads, next(self.parameters()).device)

    def stem(
        self, x: Tokens | Mixture, level: Float[Tensor, "b"], rotary: Rotary
    ) -> tuple[Hidden, Float[Tensor, "b c"] | None]:
        """All blocks but the last, and the embedded noise level."""
        h = self.vocab_embed(x)
        for most in (self.config.position_embeddings, self.config.grid_embeddings**2):
            if most and h.shape[1] > most:
                raise ValueError(f"the network has embeddings for {most} positions (got a length of {h.shape[1]})")
        h = self._place(h, slice(h.shape[1]))
        c = None if self.config.causal else F.silu(self.sigma_map(level))
        for block in self.blocks[:-1]:
            h = block(h, c, rotary)
        return h, c

    def _place(self, h: Hidden, positions: Int[Tensor, "q"] | slice) -> Hidden:
        """Add the learned embeddings of the positions."""
        if self.config.position_embeddings:
            h = h + self.position_embed[positions]
        if self.config.grid_embeddings:
            row, column, box = self.cells[:, positions]
            h = h + self.row_embed[row] + self.column_embed[column] + self.box_embed[box]
        return h

    def tip(self, h: Hidden, c: Float[Tensor, "b c"] | None, rotary: Rotary, rows: Rows | None = None) -> Chosen:
        """The last block and norm."""
        return self.output_layer(self.blocks[-1](h, c, rotary, rows=rows), c)

    def blank_past(self, batch: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Room for the keys and values of a text, for each block."""
        like = self.vocab_embed.embedding
        shape = (batch, self.config.num_heads, length, self.config.hidden_size // self.config.num_heads)
        return [(like.new_zeros(shape), like.new_zeros(shape)) for _ in self.blocks]

    def extend(self, x: Tokens, positions: Int[Tensor, "q"], past: list[tuple[Tensor, Tensor]]) -> Hidden:
        """Hidden rows of new tokens at the given positions of a text whose past is known; adds them to it (causal)."""
        h = self._place(self.vocab_embed(x), positions)
        cos, sin = self.rotary(past[0][0].shape[2])
        rotary = cos[positions], sin[positions]
        for block, (keys, values) in zip(self.blocks, past, strict=True):
            h = block(h, None, rotary, (keys, values, positions))
        return self.output_layer(h, None)


@functools.lru_cache(maxsize=16)
def rotary_table(length: int, width: int, device: torch.device) -> Rotary:
    """cos and sin of position times frequency, for the two halves of a head."""
    with torch.inference_mode(False):
        frequencies = 10_000.0 ** -(torch.arange(0, width, 2, device=device) / width)
        angles = torch.arange(length, device=device)[:, None] * frequencies
        return angles.cos(), angles.sin()


def take_positions(x: Hidden, rows: Rows) -> Chosen:
    """x at chosen positions of each sequence."""
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[2]))


def rotate(x: Float[Tensor, "b h l e"], rotary: Rotary) -> Float[Tensor, "b h l e"]:
    cos, sin = (table.to(x.dtype) for table in rotary)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _zeros(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
