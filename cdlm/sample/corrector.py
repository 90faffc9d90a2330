"""Predictor-corrector sampling: steps that also remask tokens.

A Psi sampler draws from  kappa q(x_s | x_t, f) + (1 - kappa) (q(x_0 | x_t, f), noised to s): with kappa = 1 the
ancestral sampler, with kappa = 0 a new start from the prediction in every hop. Every member keeps the marginals of the
process if f is exact. ReMDM's schedules give the share sigma of visible tokens that is masked again, and
kappa = 1 - sigma / (1 - a_s).
"""

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Corrector:
    """Which share of tokens is remasked.

    | kind     | share of visible tokens that is remasked in a step                             |
    | -------- | ------------------------------------------------------------------------------ |
    | constant | eta (1 - a_s): a share eta of all positions starts anew (Psi)                   |
    | cap      | min(eta, most), where most = min(1, (1 - a_s) / a_t) is all that marginals bear |
    | rescale  | eta most                                                                        |
    | loop     | eta most, on the plateau of `loop_times`; nothing elsewhere                   |

    Other processes have no masks: there kappa, at least 0, is the share of positions that hop as usual, and the rest is
    predicted and noised again.
    """

    kind: str
    eta: float

    def kappa(self, a_t: Float[Tensor, "n"], a_s: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        """The share of the ancestral hop; below 0 where ReMDM takes back more than a mixture could."""
        if self.kind == "constant":
            return torch.where(a_s < 1, 1 - self.eta, torch.ones_like(a_s))
        most = ((1 - a_s) / a_t).clamp(max=1)
        sigma = most.clamp(max=self.eta) if self.kind == "cap" else self.eta * most
        if self.kind == "loop":
            sigma = torch.where(a_s == a_t, sigma, torch.zeros_like(sigma))
        return torch.where(a_s < 1, 1 - sigma / (1 - a_s), torch.ones_like(a_s))
