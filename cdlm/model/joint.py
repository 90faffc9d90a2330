"""The joint head: the tokens that one step reveals, predicted one after the other instead of independently.

    p(x_R | x_t) = prod_j p(x_{r_j} | x_t, x_{r_1}, ..., x_{r_{j-1}}),    R = {r_1 < r_2 < ...} the revealed positions

The trunk runs once. A small causal transformer over the revealed positions alone adds to the hidden state of each what
the revealed tokens before it say; the output matrix of the trunk then makes logits of the sum. It adds nothing to the
first position of a step, which has no such tokens: one token per step is the trunk itself, whatever the weights are.
"""

import dataclasses

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from cdlm.model.config import NetworkConfig
from cdlm.model.dit import Block, Chosen, LayerNorm, Past, rotary_table, take_positions

Places = Int[Tensor, "b k"]
"""The revealed positions of each sequence, from left to right."""

EXACT_GAPS = 16
NUM_GAPS = EXACT_GAPS + 8
"""Distances to the previous revealed position: up to 16 each by itself, then one embedding for each power of two."""


class JointHead(nn.Module):
    """Hidden states of revealed positions, each with what the revealed tokens before it add.

    Row j is computed from the hidden states of r_1 ... r_j and the tokens at r_1 ... r_{j-1}, never from others.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.head_width = width // config.num_heads
        self.hidden_norm, self.token_norm = LayerNorm(width), LayerNorm(width)
        self.input = nn.Linear(2 * width, width, bias=False)
        self.gap_embed = nn.Parameter(0.02 * torch.randn(NUM_GAPS, width))
        causal = dataclasses.replace(config, causal=True, joint_layers=0)
        self.blocks = nn.ModuleList(Block(causal) for _ in range(config.joint_layers))
        self.norm_final = LayerNorm(width)
        self.output = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.output.weight)  # the network starts as the trunk

    def forward(
        self,
        hidden: Chosen,
        previous_token: Chosen,
        position: Places,
        previous_position: Places,
        length: int,
        past: list[Past] | None = None,
    ) -> Chosen:
        """The conditioned hidden states of all revealed positions at once or, given the `past`, of the next ones.

        `previous_token` and `previous_position` are the embedding and the position of the revealed token before each;
        the first has none: its previous position is -1.
        """
        gap = gap_bucket(position - previous_position)
        x = torch.cat([self.hidden_norm(hidden), self.token_norm(previous_token)], -1)
        x = self.input(x) + self.gap_embed[gap].to(hidden.dtype)
        cos, sin = rotary_table(length, self.head_width, hidden.device)
        rotary = cos[position][:, None], sin[position][:, None]
        for number, block in enumerate(self.blocks):
            x = block(x, None, rotary, None if past is None else past[number])
        added = self.output(self.norm_final(x))
        return hidden + torch.where((previous_position >= 0)[..., None], added, 0).to(hidden.dtype)

    def empty_cache(self, batch: int, size: int, like: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Room for the keys and values of `size` revealed positions, for each block."""
        shape = (batch, like.shape[-1] // self.head_width, size, self.head_width)
        return [(like.new_zeros(shape), like.new_zeros(shape)) for _ in self.blocks]


def gap_bucket(gap: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """Which embedding a distance of at least 1 has; any one for those of padding, which are below."""
    beyond = (gap.clamp(min=EXACT_GAPS).float() / EXACT_GAPS).log2().floor().long()
    return torch.where(gap <= EXACT_GAPS, gap - 1, EXACT_GAPS + beyond).clamp(0, NUM_GAPS - 1)


def revealed_first(revealed: Bool[Tensor, "b l"]) -> tuple[Places, Bool[Tensor, "b k"]]:
    """The revealed positions of each sequence from left to right, padded with others; and which are no padding."""
    counts = revealed.sum(-1)
    size = max(1, int(counts.max()))  # never empty, so that every weight has a gradient
    places = (~revealed).long().argsort(dim=-1, stable=True)[:, :size]
    return places, torch.arange(size, device=counts.device) < counts[:, None]


def shift(x: Tensor, first: int) -> Tensor:
    """Every row takes the place of the next one; the first becomes `first`."""
    return torch.cat([torch.full_like(x[:, :1], first), x[:, :-1]], 1)


def conditioned(
    head: JointHead,
    embed: nn.Module,
    hidden: Float[Tensor, "b l d"],
    x: Int[Tensor, "b l"],
    revealed: Bool[Tensor, "b l"],
) -> Float[Tensor, "b l d"]:
    """All hidden states, those at `revealed` positions conditioned on the tokens that x has at the revealed positions
    before them: one pass of the head, as its attention is causal. `plain_conditioned` is the definition."""
    places, valid = (tensor.to(hidden.device) for tensor in revealed_first(revealed))
    chosen, tokens = take_positions(hidden, places), embed(x.gather(1, places)).to(hidden.dtype)
    found = head(chosen, shift(tokens, 0), places, shift(places, -1), x.shape[1])
    added = torch.where(valid[..., None], found - chosen, 0)
    return hidden.scatter_add(1, places[..., None].expand_as(added), added.to(hidden.dtype))


def plain_conditioned(
    head: JointHead,
    embed: nn.Module,
    hidden: Float[Tensor, "b l d"],
    x: Int[Tensor, "b l"],
    revealed: Bool[Tensor, "b l"],
) -> Float[Tensor, "b l d"]:
    """The same by definition: for each revealed position, the head on the revealed positions up to it."""
    found = hidden.clone()
    for row in range(len(x)):
        places = revealed[row].nonzero()[:, 0].tolist()
        for count in range(1, len(places) + 1):
            seen = torch.tensor(places[:count], device=hidden.device)[None]
            tokens = embed(x[row, seen]).to(hidden.dtype)
            rows = head(hidden[row, seen], shift(tokens, 0), seen, shift(seen, -1), x.shape[1])
            found[row, places[count - 1]] = rows[0, -1]
    return found
