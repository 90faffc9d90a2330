"""Two moons, quantised into tokens: a data law that is known exactly, bin by bin."""

import dataclasses
import functools
import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cdlm.process.exact import listed
from cdlm.rng import Rng

Encoding = Literal["pair", "digits"]
BASE = 4


@dataclasses.dataclass(frozen=True)
class Moons:
    """Two interleaved half circles with Gaussian noise, on a grid of bins x bins cells.

    `pair`: a point is two tokens, its column and its row. `digits`: its column and row in base 4, digit by digit from
    coarse to fine (column, row, column, row, ...), which makes a longer sequence over a tiny vocabulary.
    """

    bins: int = 64
    noise: float = 0.05
    encoding: Encoding = "pair"

    def __post_init__(self) -> None:
        if self.encoding == "digits" and BASE ** round(math.log(self.bins, BASE)) != self.bins:
            raise ValueError(
                f"digits in base {BASE} need a power of {BASE} for --bins, such as 16 or 64; got {self.bins}"
            )
        if self.bins < 2 or self.noise <= 0:
            raise ValueError("two moons need at least 2 bins and noise > 0")

    @property
    def digits(self) -> int:
        return round(math.log(self.bins, BASE))

    @property
    def vocab(self) -> int:
        return self.bins if self.encoding == "pair" else BASE

    @property
    def length(self) -> int:
        return 2 if self.encoding == "pair" else 2 * self.digits

    @functools.cached_property
    def curve(self) -> Float[Tensor, "n 2"]:
        """Points along the two noiseless half circles, equally spaced in angle."""
        angle = math.pi * (torch.arange(2048, dtype=torch.float64) + 0.5) / 2048
        outer = torch.stack([angle.cos(), angle.sin()], -1)
        return torch.cat([outer, torch.tensor([1.0, 0.5], dtype=torch.float64) - outer])

    @functools.cached_property
    def edges(self) -> Float[Tensor, "2 edges"]:
        """Cell borders of the columns and of the rows; the box reaches four standard deviations past the curve."""
        low, high = self.curve.min(0).values - 4 * self.noise, self.curve.max(0).values + 4 * self.noise
        share = torch.linspace(0, 1, self.bins + 1, dtype=torch.float64)
        return low[:, None] + (high - low)[:, None] * share

    @property
    def centres(self) -> Float[Tensor, "2 bins"]:
        return (self.edges[:, 1:] + self.edges[:, :-1]) / 2

    @functools.cached_property
    def histogram(self) -> Float[Tensor, "bins bins"]:
        """The probability of every cell (column, row): the Gaussian integrated over cells, averaged along the curve."""
        column, row = (
            torch.special.ndtr((self.edges[axis] - self.curve[:, axis : axis + 1]) / self.noise).diff(dim=-1)
            for axis in (0, 1)
        )
        mass = column.T @ row
        return mass / mass.sum()

    @functools.cached_property
    def manifold(self) -> Bool[Tensor, "bins bins"]:
        """Cells that a point with at most three standard deviations of noise can fall into."""
        x, y = self.centres
        cells = torch.stack(torch.meshgrid(x, y, indexing="ij"), -1).flatten(0, 1)
        near = torch.cdist(cells, self.curve).min(-1).values <= 3 * self.noise
        return near.view(self.bins, self.bins)

    @functools.cached_property
    def law(self) -> Float[Tensor, "all"]:
        """The data law over all sequences, in the order of `cdlm.process.exact.listed`."""
        column, row = self.decode(listed(self.vocab, self.length)).unbind(-1)
        return self.histogram[column, row]

    def encode(self, cells: Int[Tensor, "n 2"]) -> Int[Tensor, "n l"]:
        if self.encoding == "pair":
            return cells
        place = BASE ** torch.arange(self.digits - 1, -1, -1)
        return (cells[:, None, :] // place[:, None] % BASE).flatten(1)

    def decode(self, tokens: Int[Tensor, "n l"]) -> Int[Tensor, "n 2"]:
        if self.encoding == "pair":
            return tokens
        place = BASE ** torch.arange(self.digits - 1, -1, -1)
        return (tokens.view(len(tokens), self.digits, 2) * place[:, None]).sum(1)

    def sample(self, rng: Rng) -> Int[Tensor, "n l"]:
        """One data point for each row of the noise."""
        u = rng("moons").uniform(1)[:, 0]
        cdf = self.histogram.flatten().cumsum(0)
        cell = torch.searchsorted(cdf, u * cdf[-1], right=True)
        return self.encode(torch.stack([cell // self.bins, cell % self.bins], -1))
