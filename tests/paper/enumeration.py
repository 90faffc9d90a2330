"""Tiny worlds with every law written out: forward kernels from the rate matrix, everything else by Bayes' rule.

Nothing here calls the formulas of `cdlm`, except `bridged`, which assembles the package's own bridge, and `tiny`, which
builds a network.
"""

import dataclasses
import functools
import itertools
import math

import torch
from torch import Tensor, nn

from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.process import SCHEDULES, Process, bridge_law, masked, transition, uniform, unigram
from cdlm.types import Pair

VOCAB = 3
PRIORS = {
    "masked": (0.0, 0.0, 0.0, 1.0),
    "uniform": (1 / 3, 1 / 3, 1 / 3),
    "unigram": (0.5, 0.3, 0.2),
    "mixture": (0.25, 0.15, 0.1, 0.5),
}
KINDS = tuple(PRIORS)


@dataclasses.dataclass(frozen=True, eq=False)
class World:
    """A data law over sequences of l tokens and a process that noises them, position by position."""

    kind: str
    l: int
    noise: str
    eps: float
    law: Tensor
    """p(x_0) over all sequences of states, in the order of `states`; zero where a mask occurs."""

    @property
    def pi(self) -> Tensor:
        return torch.tensor(PRIORS[self.kind], dtype=torch.float64)

    @functools.cached_property
    def process(self) -> Process:
        """The code under test, for the same prior and schedule."""
        noise = SCHEDULES[self.noise](eps=self.eps)
        if self.kind == "masked":
            return masked(VOCAB, noise)
        return uniform(VOCAB, noise) if self.kind == "uniform" else unigram(self.pi, VOCAB, noise)

    @functools.cached_property
    def states(self) -> Tensor:
        """Every sequence of states, [n, l]."""
        return sequences(len(self.pi), self.l)

    @functools.cached_property
    def tokens(self) -> Tensor:
        """One-hot clean tokens, [n, l, v]; a zero row for the mask."""
        return torch.eye(len(self.pi), VOCAB, dtype=torch.float64)[self.states]

    @functools.cached_property
    def known(self) -> Tensor:
        """Positions that the prior cannot produce, [n, l]: the clean token is certain there."""
        return self.pi[self.states] == 0

    def alpha(self, t: float) -> float:
        lost = t if self.noise == "log-linear" else math.sin(math.pi * t / 2)
        return 1 - (1 - self.eps) * lost

    def rate(self, t: float) -> float:
        """beta = -alpha' / alpha."""
        slope = 1.0 if self.noise == "log-linear" else math.pi / 2 * math.cos(math.pi * t / 2)
        return (1 - self.eps) * slope / self.alpha(t)

    @property
    def jumps(self) -> Tensor:
        """The rate matrix of one position, up to beta: leave at rate 1, land on pi."""
        return self.pi.expand(len(self.pi), -1) - torch.eye(len(self.pi), dtype=torch.float64)

    @functools.cached_property
    def generator(self) -> Tensor:
        """The rate matrix of a sequence, up to beta: one position jumps at a time."""
        eye = torch.eye(len(self.pi), dtype=torch.float64)
        places = [[self.jumps if i == j else eye for j in range(self.l)] for i in range(self.l)]
        return torch.stack([functools.reduce(torch.kron, place) for place in places]).sum(0)

    def kernel(self, s: float, t: float) -> Tensor:
        """q(x_t^i | x_s^i), rows to columns: the exponential of the rate matrix."""
        return torch.matrix_exp(math.log(self.alpha(s) / self.alpha(t)) * self.jumps)

    def forward(self, s: float, t: float) -> Tensor:
        """q(x_t | x_s) of sequences."""
        return functools.reduce(torch.kron, [self.kernel(s, t)] * self.l)

    def marginal(self, t: float) -> Tensor:
        """p_t."""
        return self.law @ self.forward(0, t)

    def joint(self, s: float, t: float) -> Tensor:
        """p(x_s, x_t)."""
        return self.marginal(s)[:, None] * self.forward(s, t)

    def reverse(self, s: float, t: float) -> Tensor:
        """p(x_s | x_t), rows x_t."""
        joint = self.joint(s, t)
        return (joint / joint.sum(0)).T

    def bayes(self, t: float) -> Tensor:
        """f*(x_t, t)_i = p(x_0^i | x_t), [n, l, v]."""
        return apply(self.reverse(0, t), self.tokens)

    def paths(self, s: float, t: float) -> Tensor:
        """q(x_s, x_t | x_0) of one position, [x_0, x_s, x_t], for clean x_0."""
        return self.kernel(0, s)[:VOCAB, :, None] * self.kernel(s, t)


def world(kind: str, l: int = 2, noise: str = "log-linear", eps: float = 1e-3, seed: int = 0) -> World:
    """A world whose data law is random, positive on every clean sequence and far from a product."""
    generator = torch.Generator().manual_seed(seed)
    clean = (sequences(len(PRIORS[kind]), l) < VOCAB).all(1)
    law = torch.rand(len(clean), generator=generator, dtype=torch.float64).pow(3) + 0.02
    law = torch.where(clean, law, 0.0)
    return World(kind, l, noise, eps, law / law.sum())


def sequences(states: int, l: int) -> Tensor:
    return torch.tensor(list(itertools.product(range(states), repeat=l)))


def apply(kernel: Tensor, g: Tensor) -> Tensor:
    """Expectation of a predictor: sum_y kernel[x, y] g[y, i, v]."""
    return torch.einsum("xy,yiv->xiv", kernel, g)


def bridged(w: World, s: float, t: float) -> Tensor:
    """p(x_s | x_t) = E_{x_0 | x_t}[prod_i q(x_s^i | x_t^i, x_0^i)] with the package's bridge, rows x_t."""
    return torch.einsum("ba,abc->bc", w.reverse(0, t), bridges(w, s, t))


def bridges(w: World, s: float, t: float) -> Tensor:
    """The package's q(x_s | x_t, x_0) of sequences, [x_0, x_t, x_s]; zero where x_t cannot follow from x_0."""
    k = len(w.pi)
    one = torch.eye(k, dtype=torch.float64)[:, None].expand(k, k, k)
    x_t = torch.arange(k).expand(k, k)
    law = bridge_law(one, x_t, transition(w.process, 0.0, s), transition(w.process, s, t)).nan_to_num(0.0)
    sequence = law
    for _ in range(w.l - 1):
        sequence = torch.einsum("abc,xyz->axbycz", sequence, law).reshape([len(sequence) * k] * 3)
    return sequence


def predictor(w: World, seed: int, carry: bool = False) -> Tensor:
    """A random predictor, [n, l, v]; with carry-over, certain where the clean token is."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(*w.states.shape, VOCAB, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1)
    return torch.where(w.known[..., None], w.tokens, g) if carry else g


def rows(x0: Tensor, x_t: Tensor, alpha: Tensor, dalpha: Tensor, prior: Tensor) -> Pair:
    """A pair of single positions, all fields [n], as divergences and weights see it; s = 0."""
    zero, yes = torch.zeros_like(alpha), torch.ones_like(x0, dtype=torch.bool)
    return Pair(
        x0=x0, x_s=x0, x_t=x_t, s=zero, t=zero, alpha_s=zero + 1, alpha_t=alpha, dalpha_t=dalpha, positions=yes,
        known=yes, prior=prior,
    )  # fmt: skip


def tiny(process: Process, seed: int = 0, time_conditioning: bool = False) -> Denoiser:
    """A double-precision network with random weights everywhere, so that no prediction is uniform."""
    generator = torch.Generator().manual_seed(seed)
    shape = NetworkConfig(
        hidden_size=8, num_layers=1, num_heads=2, cond_dim=4, dropout=0.0, time_conditioning=time_conditioning
    )
    net = Denoiser(shape, process).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return net


def index(x: Tensor, states: int) -> Tensor:
    """The place of each sequence in `sequences`."""
    return functools.reduce(lambda place, column: place * states + column, x.unbind(-1))


def p_value(counts: Tensor, law: Tensor) -> float:
    """Pearson's chi-square of independent rows of counts against their laws; 0 if an impossible cell was hit."""
    counts, law = counts.double().reshape(-1, counts.shape[-1]), law.reshape(-1, law.shape[-1])
    statistic, freedom = 0.0, 0
    for seen, p in zip(counts, law / law.sum(-1, keepdim=True), strict=True):
        if float(seen[p < 1e-12].sum()):
            return 0.0
        seen, p = seen[p >= 1e-12], p[p >= 1e-12]
        expected = p * seen.sum()
        rare = expected < 5
        if rare.any():
            expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
            seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
        statistic += float(((seen - expected) ** 2 / expected).sum())
        freedom += len(seen) - 1
    return float(torch.special.gammaincc(*torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)))


def tv(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).abs().sum(-1) / 2


def entropy(p: Tensor) -> Tensor:
    return -torch.special.xlogy(p, p).sum(-1)


def minimise(loss, logits: Tensor, iterations: int = 400) -> Tensor:
    """The minimiser of a smooth function of logits, by L-BFGS."""
    logits = logits.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [logits], max_iter=iterations, tolerance_grad=1e-10, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss(logits)
        value.backward()
        return value

    optimiser.step(closure)
    return logits.detach()
