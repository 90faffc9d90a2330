"""The shape of the network: plain values that a configuration holds, without the network itself."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The shape of the network. The defaults are the paper's 110M class (169.6M with both vocabulary matrices)."""

    hidden: int = 768
    """Width of the network."""
    blocks: int = 12
    """Transformer blocks."""
    heads: int = 12
    """Attention heads of a block."""
    cond: int = 128
    """Width of the noise-level embedding."""
    dropout: float = 0.1
    """Share of each branch's output dropped in training."""
    time_conditioning: bool = False
    """Whether the network is told the noise level; if not, the embedding sees a constant, as in MDLM."""
    causal: bool = False
    """Left-to-right attention without modulation: the autoregressive baseline."""
    absolute: int = 0
    """Learned embeddings for this many absolute positions; 0 for rotary ones alone, as in MDLM, which cannot tell the
    positions of a fully masked sequence apart (every value that attention mixes is the same)."""
    tied: bool = False
    """The head's weights are the embeddings of the clean tokens: a small network spends its parameters elsewhere."""

    def __post_init__(self) -> None:
        if min(self.hidden, self.blocks, self.heads, self.cond) < 1 or self.absolute < 0 or not 0 <= self.dropout < 1:
            raise ValueError(
                "hidden, blocks, heads and cond must be at least 1, absolute at least 0, dropout in [0, 1)"
            )
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise ValueError(f"hidden {self.hidden} must be an even multiple of heads {self.heads}")


SIZES = {
    "tiny": Architecture(hidden=64, blocks=2, heads=2, cond=32, dropout=0.0),
    "small": Architecture(hidden=384, blocks=8, heads=6, dropout=0.0),
    "18m": Architecture(hidden=384, blocks=8, heads=6, cond=16, dropout=0.0, absolute=256, tied=True),
    "110m": Architecture(),
}
