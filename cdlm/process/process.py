"""The noising process and its posterior bridges: one formula for every prior.

The transition matrix of masked, uniform and unigram diffusion alike is Q_{s->t} = a_ts I + (1 - a_ts) 1 pi^T, with
a_ts = alpha(t) / alpha(s). Put into Lemma 3.1 it gives

    q(x_s | x_t, x_0)  is proportional to  (a_s x_0 + (1 - a_s) pi) * (a_ts x_t + (1 - a_ts) pi[x_t])

and, expanded, a draw among three routes that costs O(1) for each position, whatever the vocabulary:

    data    x_s = x_0       with weight  a_s (1 - a_ts) pi[x_t]
    stay    x_s = x_t       with weight  a_ts (a_s [x_0 = x_t] + (1 - a_s) pi[x_t])
    prior   x_s ~ pi        with weight  (1 - a_s) (1 - a_ts) pi[x_t]

A point mass on the mask gives the cases of Algorithm 2, pi = 1/v the posterior of UDLM and DUO. M(x_t) and carry-over
fall out: where pi[x_t] = 0, x_0 = x_t with certainty, and only positions with pi[x_t] > 0 contribute to a loss.
"""

import dataclasses
import functools
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cdlm.process.noise import LogLinear, Noise
from cdlm.rng import Rng, categorical
from cdlm.types import LogLaw, Time, Tokens, wide

DATA, STAY, PRIOR = 0, 1, 2

Posterior = Literal["plug-in", "mixture"]
"""How a predicted distribution enters the bridge: in the place of x_0, or by drawing x_0 from it.

Under masking both are the same."""


@dataclasses.dataclass(frozen=True, eq=False)
class Process:
    """Q_{s->t} = a_ts I + (1 - a_ts) 1 pi^T over the v clean tokens and, if the prior has v + 1 entries, the mask v."""

    vocab: int
    prior: Float[Tensor, "states"]
    noise: Noise = dataclasses.field(default_factory=LogLinear)
    special: tuple[int, ...] = ()
    """Tokens that are never generated, such as [CLS] and [SEP]: they stay visible at every noise level, and a
    `Denoiser` gives them no probability. For absorbing processes."""

    def __post_init__(self) -> None:
        if self.prior.shape[0] not in (self.vocab, self.vocab + 1):
            raise ValueError(
                f"a prior over {self.prior.shape[0]} states does not fit {self.vocab} tokens: "
                f"give {self.vocab} entries, or {self.vocab + 1} with the mask last"
            )
        if not (bool((self.prior >= 0).all()) and abs(float(self.prior.sum()) - 1) < 1e-6):
            raise ValueError("a prior is a distribution: entries >= 0 that add up to 1; divide it by its sum")
        if self.special and not self.absorbing:
            raise ValueError("special tokens stay visible, which only an absorbing process allows: use masked(vocab)")
        if not all(0 <= token < self.vocab for token in self.special):
            raise ValueError(
                f"special tokens must lie in [0, {self.vocab}) (got {min(self.special)} to {max(self.special)})"
            )

    @property
    def name(self) -> str:
        """masked, uniform or unigram: read off the prior. A label for people and files; code asks what follows."""
        return "masked" if self.absorbing else "uniform" if self.flat else "unigram"

    @functools.cached_property
    def absorbing(self) -> bool:
        """Whether all noise is the mask: then a visible token is data, and stays as it is."""
        return self.has_mask and float(self.prior[-1]) == 1

    @property
    def has_mask(self) -> bool:
        """Whether there is a mask state, `vocab`: a fully masked text says nothing about the data."""
        return self.states > self.vocab

    @functools.cached_property
    def flat(self) -> bool:
        """Whether the prior gives every token the same probability and there is no mask: uniform-state diffusion."""
        return not self.has_mask and bool((self.prior == self.prior[0]).all())

    @property
    def states(self) -> int:
        return self.prior.shape[0]

    @functools.cached_property
    def full(self) -> bool:
        """Whether every state can be noise, so that none tells that it is data."""
        return bool((self.prior > 0).all())

    @functools.cached_property
    def _cdf(self) -> Float[Tensor, "states"]:
        cdf = self.prior.cumsum(0)
        return cdf / cdf[-1]

    def pi(self, x: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """pi[x], the prior mass of each token."""
        return self.prior.to(x.device, wide(x.device))[x]

    @functools.cached_property
    def _special(self) -> Bool[Tensor, "states"]:
        return torch.zeros(self.states, dtype=torch.bool).index_fill(0, torch.tensor(self.special), True)

    def is_special(self, x: Int[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Where x holds special tokens."""
        return self._special.to(x.device)[x] if self.special else torch.zeros_like(x, dtype=torch.bool)

    def positions(self, x_t: Int[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """M(x_t) = { i : pi[x_t^i] > 0 }: masked positions under masking, all positions under a full prior."""
        return self.pi(x_t) > 0

    def start(self, length: int, rng: Rng, device: torch.device | str = "cpu") -> Tokens:
        """x_1 ~ pi at every position."""
        if self.absorbing:
            return torch.full((len(rng.rows), length), self.vocab, device=device)
        return self.prior_at(rng("prior").uniform(length, device))

    def prior_at(self, u: Float[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Draws from pi by inverting its distribution function at u."""
        return torch.searchsorted(self._cdf.to(u.device, u.dtype), u, right=True).clamp_(max=self.states - 1)

    def corrupt(self, x0: Tokens, t: Time | float, rng: Rng) -> Tokens:
        """x_t ~ q(x_t | x_0) = Cat(alpha_t x_0 + (1 - alpha_t) pi)."""
        self.check_ids(x0)
        return torch.where(self.kept(x0, t, rng), x0, self.start(x0.shape[1], rng, x0.device))

    def kept(self, x0: Tokens, t: Time | float, rng: Rng) -> Bool[Tensor, "b l"]:
        """The positions that `corrupt` leaves alone."""
        kept = rng("keep").uniform(x0.shape[1], x0.device) < self.noise.alpha(self._time(t, x0))
        return kept | self.is_special(x0)

    def kept_evenly(self, x0: Tokens, t: Time | float, rng: Rng, among: Bool[Tensor, "b l"]) -> Bool[Tensor, "b l"]:
        """The same with the expected number of positions `among` those given, rounded, in place of a random one."""
        among = among & ~self.is_special(x0)
        u = rng("keep").uniform(x0.shape[1], x0.device).masked_fill(~among, torch.inf)
        lost = ((1 - self.noise.alpha(self._time(t, x0))) * among.sum(-1, keepdim=True)).round()
        return u.argsort(-1).argsort(-1) >= lost

    def bridge(self, x0: Tokens | LogLaw, x_t: Tokens, s: Time | float, t: Time | float, rng: Rng) -> Tokens:
        """x_s ~ q(x_s | x_t, x_0), Eq. (2) of Lemma 3.1, position by position, for 0 <= s < t <= 1.

        x0 is the data, or a predicted distribution in its place (the plug-in posterior of MDLM, UDLM and DUO).
        """
        if x0.is_floating_point():
            noisy = self.positions(x_t)
            token = x_t.clamp(max=self.vocab - 1)[..., None]
            stay = x0.gather(-1, token)[..., 0].exp() * (x_t < self.vocab)
            stay = torch.where(noisy, stay.to(wide(x_t.device)), 1.0)
            clean = categorical(x0, rng("data").uniform(x_t.shape[1], x_t.device))
        else:
            self.check_ids(x0)
            stay, clean = (x0 == x_t).to(wide(x_t.device)), x0
        route = self.route(x_t, stay, s, t, rng)
        noise = self.start(x_t.shape[1], rng, x_t.device)
        return torch.where(route == DATA, clean, torch.where(route == STAY, x_t, noise))

    def route(
        self, x_t: Tokens, stay: Float[Tensor, "b l"], s: Time | float, t: Time | float, rng: Rng
    ) -> Int[Tensor, "b l"]:
        """Which of the three routes each position takes from t to s.

        `stay` is the (predicted) probability that x_0 = x_t. Under masking it does not depend on the prediction:
        positions can be drawn before the network runs.
        """
        s, t = self._time(s, x_t), self._time(t, x_t)
        _require(s < t, "a bridge runs from t down to s and needs s < t; swap the two, or use different times")
        a_s, a_ts = self.noise.alpha(s), self.noise.alpha(t) / self.noise.alpha(s)
        pi = self.pi(x_t)
        data = a_s * (1 - a_ts) * pi
        keep = a_ts * (a_s * stay + (1 - a_s) * pi)
        prior = (1 - a_s) * (1 - a_ts) * pi
        u = rng("route").uniform(x_t.shape[1], x_t.device) * (data + keep + prior)
        return torch.where(u < keep, STAY, torch.where(u < keep + data, DATA, PRIOR))

    def _time(self, t: Time | float, like: Tensor) -> Float[Tensor, "rows 1"]:
        """A time as a column beside tokens: one for each sequence, or one for all."""
        t = torch.as_tensor(t, dtype=wide(like.device)).to(like.device).reshape(-1, 1)
        _require((t >= 0) & (t <= 1), "times lie in [0, 1], where 0 is data and 1 is noise")
        return t

    def check_ids(self, x0: Tokens) -> None:
        """Data are clean tokens: the mask and anything else beyond the vocabulary is refused."""
        message = f"data ids lie in [0, {self.vocab}) for this vocabulary of {self.vocab}"
        if self.states > self.vocab:
            message += f"; the mask ({self.vocab}) is noise, not data"
        _require((x0 >= 0) & (x0 < self.vocab), message)


def masked(vocab: int, noise: Noise | None = None) -> Process:
    """Absorbing-state diffusion: the prior is the mask, an extra state with the id `vocab`."""
    prior = torch.zeros(vocab + 1, dtype=torch.float64)
    prior[-1] = 1
    return Process(vocab, prior, noise or LogLinear())


def uniform(vocab: int, noise: Noise | None = None) -> Process:
    """Uniform-state diffusion: the prior gives every token 1/v; there is no mask."""
    return Process(vocab, torch.full((vocab,), 1 / vocab, dtype=torch.float64), noise or LogLinear())


def unigram(prior: Float[Tensor, "states"], vocab: int | None = None, noise: Noise | None = None) -> Process:
    """Diffusion towards any prior: token frequencies, or, with a last entry for the mask, a mixture of both kinds."""
    prior = prior.double()
    return Process(vocab or prior.shape[0], prior / prior.sum(), noise or LogLinear())


def transition(process: Process, s: float, t: float) -> Float[Tensor, "states states"]:
    """Q_{s->t} as a dense matrix, rows to columns: for reference and tests, never at run time."""
    s_, t_ = torch.tensor([s, t], dtype=torch.float64)
    a_ts = process.noise.alpha(t_) / process.noise.alpha(s_)
    return a_ts * torch.eye(process.states, dtype=torch.float64) + (1 - a_ts) * process.prior


def bridge_law(
    x0: Float[Tensor, "*rows k"], x_t: Int[Tensor, "*rows"], q_s: Float[Tensor, "k k"], q_ts: Float[Tensor, "k k"]
) -> Float[Tensor, "*rows k"]:
    """Lemma 3.1 for any chain, dense: (x_0 Q_{1:s}) * (x_t Q_{s+1:t}^T) / <x_0 Q_{1:t}, x_t>.

    x0 holds laws over the k states (a point mass for data); q_s = Q_{1:s}, q_ts = Q_{s+1:t}.
    """
    joint = (x0 @ q_s) * q_ts.T[x_t]
    return joint / joint.sum(-1, keepdim=True)


def _require(condition: Bool[Tensor, "..."], message: str) -> None:
    """Raise where the condition can be read at once; on an accelerator assert without waiting for it."""
    if condition.device.type == "cpu":
        if not bool(condition.all()):
            raise ValueError(message)
    else:
        torch._assert_async(condition.all(), message)
