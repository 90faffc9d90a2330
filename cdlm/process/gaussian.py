"""DUO's duality: uniform-state diffusion as the argmax of a Gaussian diffusion on one-hot vectors.

    w_t = a_t x_0 + s_t e,   e ~ N(0, I_v),   a_t^2 = sigmoid(-gamma_t),   s_t^2 = sigmoid(gamma_t)

argmax(w_t) has exactly the law of the uniform process at alpha(gamma) = (v P - 1) / (v - 1), where P is the
probability that the clean coordinate wins. Only the largest few of the v Gaussians ever matter, and their joint law
is known (order statistics), so nothing here holds a tensor of vocabulary size.
"""

import dataclasses
import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cdlm.rng import Rng
from cdlm.types import Mixture, Time, Tokens, wide


def operator(gamma: Float[Tensor, "*g"], vocab: int) -> tuple[Float[Tensor, "*g"], Float[Tensor, "*g"]]:
    """alpha(gamma) and its derivative, for the actual vocabulary, by quadrature.

    P = integral N(y; m, 1) Phi(y)^(v-1) dy with m = a/s = exp(-gamma/2); the trapezoid rule on a smooth integrand
    that vanishes at both ends is accurate to rounding.
    """
    m = torch.exp(-gamma.double() / 2)[..., None]
    z = torch.linspace(-9, 9, 2401, dtype=torch.float64, device=gamma.device)
    density = torch.exp(-z * z / 2 + (vocab - 1) * log_ndtr(m + z)) / math.sqrt(2 * math.pi)
    win, slope = torch.trapezoid(density, z), torch.trapezoid(density * z, z)
    share = vocab / (vocab - 1)
    return share * win - 1 / (vocab - 1), share * slope * (-m[..., 0] / 2)


@dataclasses.dataclass(frozen=True)
class Gaussian:
    """The Gaussian diffusion behind a uniform process, with gamma linear in t between its two ends."""

    vocab: int
    gamma_min: float = -3.55
    gamma_max: float = -1.85

    def gamma(self, t: Time) -> Time:
        return self.gamma_min + (self.gamma_max - self.gamma_min) * t

    def alpha(self, t: Time) -> Time:
        return operator(self.gamma(t), self.vocab)[0]

    def derivative(self, t: Time) -> Time:
        return operator(self.gamma(t), self.vocab)[1] * (self.gamma_max - self.gamma_min)

    def shared(self, x0: Tokens, s: Time, t: Time, rng: Rng) -> tuple[Tokens, Tokens]:
        """(x_s, x_t) from one noise vector e: DUO's deterministic trajectory, in O(1) memory a position.

        The clean token wins iff e_x + a/s > M, with M the largest of the other v - 1 Gaussians; otherwise a uniform
        other token does, the same one at both times.
        """
        own = ndtri(rng("own").uniform(x0.shape[1], x0.device))
        top = largest(rng("others").uniform(x0.shape[1], x0.device), self.vocab - 1)
        other = (x0 + 1 + rng("winner").integers(x0.shape[1], self.vocab - 1, x0.device)) % self.vocab

        def argmax(time: Time) -> Tokens:
            return torch.where(own + self._ratio(time, x0) > top, x0, other)

        return argmax(s), argmax(t)

    def relaxed(self, x0: Tokens, t: Time, tau: float, top: int, rng: Rng) -> tuple[Tokens, Mixture]:
        """x_t = argmax(w_t), and softmax(w_t / tau) as a mixture of x_0 and the `top` largest other tokens.

        The joint law of the listed coordinates is exact; the sum over the v - 1 - top others is replaced by its
        expectation given that they lie below the listed ones, and spread evenly over the vocabulary (zero when all
        are listed).
        """
        b, l = x0.shape
        top = min(top, self.vocab - 1)
        own = ndtri(rng("own").uniform(l, x0.device))
        u = rng("others").uniform(l * top, x0.device).view(b, l, top)
        others = order_statistics(u, self.vocab - 1)
        ids = distinct(rng("ids").uniform(l * top, x0.device).view(b, l, top), self.vocab - 1)
        ids = (x0[..., None] + 1 + ids) % self.vocab
        x_t = torch.where(own + self._ratio(t, x0) > others[..., 0], x0, ids[..., 0])

        gamma = self.gamma(t).to(x0.device, wide(x0.device))[:, None]
        a, s = torch.sigmoid(-gamma).sqrt(), torch.sigmoid(gamma).sqrt()
        scores = torch.cat([(a + s * own)[..., None], s[..., None] * others], -1) / tau
        low = others[..., -1]
        log_rest = (s / tau) ** 2 / 2 + log_ndtr(low - s / tau) - log_ndtr(low)
        log_rest = (
            log_rest + math.log(self.vocab - 1 - top) if top < self.vocab - 1 else torch.full_like(low, -math.inf)
        )
        weights = torch.softmax(torch.cat([scores, log_rest[..., None]], -1), -1).float()
        return x_t, Mixture(torch.cat([x0[..., None], ids], -1), weights[..., :-1], weights[..., -1])

    def _ratio(self, t: Time, like: Tensor) -> Float[Tensor, "b 1"]:
        """a_t / s_t, as a column beside tokens."""
        return torch.exp(-self.gamma(t) / 2).to(like.device, wide(like.device))[:, None]


def ndtri(p: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The inverse of Phi; on the host where a device lacks it."""
    return torch.special.ndtri(p.cpu()).to(p.device) if p.device.type == "mps" else torch.special.ndtri(p)


def log_ndtr(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """log Phi; on the host where a device lacks it."""
    return torch.special.log_ndtr(x.cpu()).to(x.device) if x.device.type == "mps" else torch.special.log_ndtr(x)


def largest(u: Float[Tensor, "*shape"], count: int | Float[Tensor, "..."]) -> Float[Tensor, "*shape"]:
    """The largest of `count` standard Gaussians, Phi^-1(u^(1/count)), accurate in the far tail."""
    return -ndtri(-torch.expm1(torch.log(u) / count))


def order_statistics(u: Float[Tensor, "*shape k"], count: int) -> Float[Tensor, "*shape k"]:
    """The k largest of `count` standard Gaussians, in descending order, from k uniforms.

    Given the i largest, the next is the largest of count - i below it: log Phi falls by log(u_i) / (count - i).
    """
    left = count - torch.arange(u.shape[-1], device=u.device, dtype=u.dtype)
    log_cdf = (torch.log(u) / left).cumsum(-1)
    return -ndtri(-torch.expm1(log_cdf))


def distinct(u: Float[Tensor, "*shape k"], count: int) -> Int[Tensor, "*shape k"]:
    """k different integers of [0, count), uniform over ordered selections: the i-th picks among those not yet taken."""
    taken: list[Tensor] = []
    ordered: list[Tensor] = []  # the same, smallest first: kept so by insertion, which is far cheaper than sorting
    for i in range(u.shape[-1]):
        pick = (u[..., i] * (count - i)).long().clamp_(max=count - i - 1)
        for earlier in ordered:
            pick = pick + (pick >= earlier)
        taken.append(pick)
        for place, earlier in enumerate(ordered):
            ordered[place], pick = torch.minimum(earlier, pick), torch.maximum(earlier, pick)
        ordered.append(pick)
    return torch.stack(taken, -1)
