"""The configuration of the network: plain values, without the network itself."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
    """The size and kind of the network. The defaults, dropout included, are those of MDLM and DUO: the 110M class that
    the paper names (169.6M parameters with both vocabulary matrices)."""

    hidden_size: int = 768
    """Width of the hidden states."""
    num_layers: int = 12
    """Number of transformer blocks."""
    num_heads: int = 12
    """Attention heads per block."""
    cond_dim: int = 128
    """Width of the noise-level embedding."""
    dropout: float = 0.1
    """Dropout probability of each residual branch during training."""
    time_conditioning: bool = False
    """Condition the network on the noise level; otherwise the embedding receives a constant, as in MDLM."""
    causal: bool = False
    """Left-to-right attention without modulation: the autoregressive baseline."""
    position_embeddings: int = 0
    """Number of learned absolute position embeddings; 0 uses rotary embeddings alone, as in MDLM, which cannot tell the
    positions of a fully masked sequence apart (every value that attention mixes is the same)."""
    grid_embeddings: int = 0
    """Side of a square grid, such as a Sudoku, whose cells are the sequence, row by row: its rows, columns and boxes
    have learned embeddings. 0 is off."""
    tie_embeddings: bool = False
    """Share the output matrix with the token embeddings, so that a small network spends its parameters elsewhere."""
    joint_layers: int = 0
    """Causal blocks of the joint head, which draws the tokens of one step one after the other instead of independently;
    0 for none. For masked processes."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "cond_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 (got {getattr(self, name)})")
        for name in ("position_embeddings", "grid_embeddings", "joint_layers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0 (got {getattr(self, name)})")
        if self.joint_layers and self.causal:
            raise ValueError("a causal network already draws its tokens one after the other; leave out joint_layers")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1) (got {self.dropout})")
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be an even multiple of num_heads {self.num_heads}; "
                "change either of them"
            )


SIZES = {
    "tiny": NetworkConfig(hidden_size=64, num_layers=2, num_heads=2, cond_dim=32, dropout=0.0),
    "small": NetworkConfig(hidden_size=384, num_layers=8, num_heads=6, dropout=0.0),
    "18m": NetworkConfig(
        hidden_size=384,
        num_layers=8,
        num_heads=6,
        cond_dim=16,
        dropout=0.0,
        position_embeddings=256,
        tie_embeddings=True,
    ),
    "110m": NetworkConfig(),
    "sudoku-4": NetworkConfig(hidden_size=64, num_layers=4, num_heads=4, cond_dim=16, dropout=0.0, grid_embeddings=4),
    "sudoku-6": NetworkConfig(hidden_size=128, num_layers=6, num_heads=4, cond_dim=16, dropout=0.0, grid_embeddings=6),
}

RENAMED_NETWORK = {
    "hidden": "hidden_size",
    "blocks": "num_layers",
    "heads": "num_heads",
    "cond": "cond_dim",
    "absolute": "position_embeddings",
    "tied": "tie_embeddings",
}
"""Fields of earlier versions, as in their run.json and config.json, and the present names."""
