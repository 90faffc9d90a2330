"""The notation of the whole package: array aliases and the two records that travel between its parts.

| symbol | meaning                                                              |
| ------ | -------------------------------------------------------------------- |
| b, l   | sequences in the batch, positions in a sequence                      |
| v      | clean vocabulary; the mask, where there is one, is the extra state v |
| n      | rows: positions chosen out of the b * l, flattened                   |
| d      | width of the network                                                 |
| s, t   | times in [0, 1]; 0 is data, 1 is noise, and s < t                    |
| alpha  | share of signal left: alpha(0) = 1, falling in t                     |
| pi     | prior law, where every position ends at t = 1                        |

Times live on the host in double precision; tokens live wherever the data does.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cdlm.devices import send

Tokens = Int[Tensor, "b l"]
Time = Float[Tensor, "b"]
LogLaw = Float[Tensor, "*rows v"]
Index = Int[Tensor, "n"]


@runtime_checkable
class Predictor(Protocol):
    """f(x_t, t): a distribution over clean tokens for each position. A `Denoiser`, an exact posterior, or your own."""

    def __call__(self, x_t: Tokens, t: float, /) -> LogLaw: ...


@runtime_checkable
class LogitsNetwork(Protocol):
    """A network of your own: any `torch.nn.Module` whose `forward(ids, t)` returns logits.

    `ids` [batch, length] are token ids; where the process has a mask, its id is `vocab`. `t` [batch] is the time of
    each sequence in [0, 1], where 0 is data and 1 is noise, in float32 (float64 if the weights are); autoregressive
    networks get 0. The logits have one column for each clean token, or one more for the mask, which is ignored.
    `Denoiser` normalises them, and carries known tokens over.
    """

    def __call__(self, ids: Tokens, t: Time, /) -> Float[Tensor, "b l columns"]: ...


@runtime_checkable
class HiddenStatesNetwork(LogitsNetwork, Protocol):
    """A network of your own that is faster to train and to sample: `forward(ids, t)` is `head(hidden_states(ids, t))`.

    The loss then goes chunk by chunk from hidden states to gradients, and the samplers run the head only where a token
    is drawn: logits of all positions are never there at once.
    """

    head: torch.nn.Linear

    def hidden_states(self, ids: Tokens, t: Time, /) -> Float[Tensor, "b l d"]: ...


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Relaxed tokens: each position is a convex combination of a few embeddings.

    `rest` is the weight given to the mean of all embeddings, for the tokens not listed in `ids`.
    """

    ids: Int[Tensor, "b l k"]
    weights: Float[Tensor, "b l k"]
    rest: Float[Tensor, "b l"]

    def to(self, device: torch.device) -> "Mixture":
        return Mixture(send(self.ids, device), send(self.weights, device), send(self.rest, device))


@dataclasses.dataclass(frozen=True)
class Pair:
    """One draw of (x_s, x_t) given x_0 from a coupling Pi, with everything that Eq. (8) asks of it.

    Times are on the host. So are `positions` and `known` in training: rows are chosen without waiting for a GPU.
    """

    x0: Int[Tensor, "..."]
    x_s: Int[Tensor, "..."]
    x_t: Int[Tensor, "..."]
    s: Float[Tensor, "..."]
    t: Float[Tensor, "..."]
    alpha_s: Float[Tensor, "..."]
    alpha_t: Float[Tensor, "..."]
    dalpha_t: Float[Tensor, "..."]
    positions: Bool[Tensor, "..."]
    """M(x_t): the positions that contribute to the loss."""
    known: Bool[Tensor, "..."]
    """Positions of x_s whose clean token is certain: f(x_s, s)_i is a point mass there."""
    prior: Float[Tensor, "states"] | None = None
    """pi, for divergences between reverse rates."""
    input: Mixture | Int[Tensor, "..."] | None = None
    """What the student sees, where it is not x_t itself."""
    drawn_from: Float[Tensor, "b l d"] | None = None
    """Hidden states whose distributions the newly known tokens were drawn from, where they are not point masses."""

    @property
    def student_input(self) -> Mixture | Int[Tensor, "..."]:
        return self.x_t if self.input is None else self.input

    def at(self, index: Index) -> "Pair":
        """The same record at chosen positions: every field has the shape [n], and stays on the device it is on."""
        length, indices = self.x0.shape[-1], {index.device: index}

        def chosen(field: Tensor) -> Tensor:
            if field.device not in indices:
                indices[field.device] = send(index, field.device)
            rows = indices[field.device]
            return field[rows // length] if field.dim() == 1 else field.flatten()[rows]

        names = ("x0", "x_s", "x_t", "s", "t", "alpha_s", "alpha_t", "dalpha_t", "positions", "known")
        fields: dict[str, Any] = {name: chosen(getattr(self, name)) for name in names}
        return Pair(**fields, prior=self.prior)

    def to(self, device: torch.device) -> "Pair":
        """The same record with every field on one device."""
        fields: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in fields.items():
            if isinstance(value, Tensor | Mixture):
                fields[name] = to_device(value, device)
        return dataclasses.replace(self, **fields)


def select(field: Int[Tensor, "b l"], index: Index) -> Int[Tensor, "n"]:
    """Tokens at positions that are flattened over batch and length, on the device of the tokens."""
    return field.flatten()[send(index, field.device)]


def wide(device: torch.device | str) -> torch.dtype:
    """The widest float that a device computes in: double, except on Apple's GPUs, which have none."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def to_device(x: Tensor | Mixture, device: torch.device) -> Tensor | Mixture:
    """Tokens, plain or relaxed, on a device."""
    return send(x, device) if isinstance(x, Tensor) else x.to(device)
