"""Randomness as a pure function: a uniform depends on (seed, keys, row, column) and on nothing else.

A counter-based generator (the SplitMix64 finaliser over a hashed key) instead of a stateful one. The draws of a
training step belong to the *global* batch, so one process and eight see the same noise; a text does not depend on the
batch it is drawn in; adding an evaluation changes no training step; resuming needs no generator state; and every
device with doubles draws the same bits.
"""

import dataclasses
import hashlib

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cdlm.types import LogLaw, wide

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_STRETCH = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Rng:
    """The noise of one batch: a key, and for each local row its index in the global batch of `batch` rows."""

    key: int
    rows: Int[Tensor, "b"]
    batch: int

    def __call__(self, *purpose: str | int) -> "Rng":
        """An independent stream for a purpose: rng("corrupt"), rng("step", 7)."""
        return dataclasses.replace(self, key=_hash(self.key, *purpose))

    def __getitem__(self, index: Int[Tensor, "n"]) -> "Rng":
        """The same noise, for some of the rows."""
        return dataclasses.replace(self, rows=self.rows[index])

    def uniform(self, columns: int, device: torch.device | str = "cpu", first: int = 0) -> Float[Tensor, "b columns"]:
        """Uniforms strictly inside (0, 1), one for each row and column from `first` on, of 52 bits (23 where there is
        no double)."""
        rows = self.rows.to(device)
        column = torch.arange(first, first + columns, device=device)
        h = _mix(self.key + (rows + 1) * _GOLDEN)
        h = _mix(h[:, None] + (column + 1) * _GOLDEN)
        bits = 52 if wide(device) == torch.float64 else 23  # one less than the mantissa: the largest stays below 1
        return (_shift(h, 64 - bits).to(wide(device)) + 0.5) * 2.0**-bits

    def integers(self, columns: int, high: int, device: torch.device | str = "cpu") -> Int[Tensor, "b columns"]:
        """Uniform integers in [0, high)."""
        return (self.uniform(columns, device) * high).long().clamp_(max=high - 1)


def seeded(seed: int, *key: str | int, batch: int, rows: Int[Tensor, "b"] | None = None) -> Rng:
    """The noise of (seed, *key) for a global batch, or for the `rows` of it that live here."""
    return Rng(_hash(seed, *key), torch.arange(batch) if rows is None else rows.cpu(), batch)


def categorical(log_law: LogLaw, u: Float[Tensor, "*rows"], dtype: torch.dtype | None = None) -> Int[Tensor, "*rows"]:
    """One draw from each law by inverting its distribution function at u; laws need not be normalised.

    Exact to the resolution of u, and it needs one uniform a draw where a Gumbel race needs v. Two levels: the mass of
    each stretch of tokens is summed in `dtype` (that of u unless told otherwise), then a stretch is chosen, and a token
    within it, both in the precision of u: one pass over the vocabulary, whose rounding is all that `dtype` decides.
    """
    v, dtype = log_law.shape[-1], dtype or u.dtype
    width = min(_STRETCH, v)
    whole = v // width * width
    mass = log_law[..., :whole].unflatten(-1, (-1, width)).to(dtype).logsumexp(-1)
    if whole < v:
        mass = torch.cat([mass, log_law[..., whole:].to(dtype).logsumexp(-1, keepdim=True)], -1)
    mass = mass.to(u.dtype)
    stretch, rest = _invert((mass - mass.amax(-1, keepdim=True)).exp(), u)
    token = stretch[..., None] * width + torch.arange(width, device=u.device)
    inside = log_law.gather(-1, token.clamp(max=v - 1)).to(u.dtype).masked_fill(token >= v, -torch.inf)
    return stretch * width + _invert((inside - inside.amax(-1, keepdim=True)).exp(), rest)[0]


def _invert(
    mass: Float[Tensor, "*rows k"], u: Float[Tensor, "*rows"]
) -> tuple[Int[Tensor, "*rows"], Float[Tensor, "*rows"]]:
    """The entry in which u falls, and where within it: both uniform again."""
    cdf = mass.cumsum(-1)
    target = u[..., None] * cdf[..., -1:]
    entry = torch.searchsorted(cdf, target, right=True).clamp_(max=mass.shape[-1] - 1)
    own = mass.gather(-1, entry)
    rest = (target - (cdf.gather(-1, entry) - own)) / own
    return entry[..., 0], rest[..., 0].clamp(0, 1 - torch.finfo(u.dtype).eps)


def _hash(*key: str | int) -> int:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shift(h: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (h >> bits) & ((1 << (64 - bits)) - 1)


def _mix(h: Tensor) -> Tensor:
    h = (h ^ _shift(h, 30)) * _MIX_1
    h = (h ^ _shift(h, 27)) * _MIX_2
    return h ^ _shift(h, 31)
