"""Path invariance itself, measured: how far f(x_t, t) is from the mean of f(x_s, s) over the bridges (Def. 3.2).

Where every state can be listed the answer is exact. On text it cannot be: only one x_0 is known for each x_t, and the
bridges of a single x_0 do not average to anything that f(x_t, t) should equal. Two honest stand-ins:

* `own_chain`: the mean over the model's *own* reverse chain, which needs no x_0. A model that contradicts itself shows
  it here; one that is wrong but agrees with itself does not.
* `reliability`: x_s from the true bridge, averaged over all x_t to which the model gives the same probability. For a
  consistent f the mean of f(x_s, s)_i(v) over the pairs with f(x_t, t)_i(v) = p is p itself; at s = 0 this is
  calibration against the data.
"""

import dataclasses

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cdlm.model.denoiser import Denoiser
from cdlm.process.exact import listed
from cdlm.process.process import Posterior, Process, transition
from cdlm.rng import Rng, categorical
from cdlm.types import LogLaw, Predictor, Tokens

NUM_BINS = 24
"""Bins of probability, equal in log p from 1e-6 to 1."""


def full_posterior(predict: Predictor, process: Process) -> Predictor:
    """p(x_0^i | x_t) out of a predictor of p(x_0^i | x_t without position i), which `rate_kl` elicits: what x_t^i
    itself says is multiplied in. Only the former can be path-invariant. Under masking the two are the same."""

    def whole(x_t: Tokens, t: float) -> LogLaw:
        alpha = process.noise.alpha(torch.tensor(float(t), dtype=torch.float64)).item()
        return _with_own_evidence(predict(x_t, t).exp(), x_t, alpha, process).log()

    return predict if process.absorbing else whole


def _with_own_evidence(
    law: Float[Tensor, "*rows v"], token: Int[Tensor, "*rows"], alpha: float, process: Process
) -> Tensor:
    """A law times q(x_t^i | x_0^i), normalised."""
    noise = (1 - alpha) * process.pi(token).to(law.dtype)
    clean = token.clamp(max=process.vocab - 1)[..., None]
    own = torch.zeros_like(law).scatter_(-1, clean, alpha) * (token < process.vocab)[..., None]
    law = law * (own + noise[..., None])
    return law / law.sum(-1, keepdim=True)


def exact_gap(
    predict: Predictor, process: Process, law: Float[Tensor, "all"], length: int, s: float, t: float
) -> float:
    """E over x_t and i in M(x_t) of TV( f(x_t, t)_i , E[ f(x_s, s)_i | x_t ] ), every state listed.

    p(x_s | x_t) is p(x_s) Q_{s->t} / p(x_t), so the mean over all bridges is one pass of the noise along each axis over
    the table p(x_s) f(x_s, s).
    """
    states = listed(process.states, length)
    p_s = _push_forward(law.double().view((process.vocab,) * length), transition(process, 0.0, s)[: process.vocab])
    f_s = predict(states, s).double().exp() if s > 0 else _clean_states(states, process)
    weighted = (p_s.flatten()[:, None, None] * f_s).view(*p_s.shape, -1)
    step = transition(process, s, t)
    p_t, mean = (
        _push_forward(p_s, step).flatten(),
        _push_forward(weighted, step, length).reshape(len(states), length, -1),
    )
    mean = mean / p_t.clamp(min=1e-300)[:, None, None]
    gap = (predict(states, t).double().exp() - mean).abs().sum(-1) / 2
    weight = p_t[:, None] * process.positions(states)
    return float((weight * gap).sum() / weight.sum())


def exact_gaps(
    predict: Predictor, process: Process, law: Float[Tensor, "all"], length: int, times: list[float]
) -> list[list[float | None]]:
    """`exact_gap` for every s < t of `times`: row t, column s."""
    return [[exact_gap(predict, process, law, length, s, t) if s < t else None for s in times] for t in times]


@dataclasses.dataclass(frozen=True)
class ChainGap:
    """How far a model is from itself."""

    tv: float
    """Mean total variation between f(x_t, t)_i and the mean of f(x_s, s)_i over so many hops."""
    floor: float
    """What the finite number of hops alone would show: half the distance of the two halves of the hops."""


@torch.no_grad()
def own_chain_gap(
    denoiser: Denoiser,
    x0: Tokens,
    s: float,
    t: float,
    rng: Rng,
    hops: int = 64,
    positions: int = 32,
    posterior: Posterior = "plug-in",
    leave_one_out: bool = False,
) -> ChainGap:
    """x_t from the data, x_s from the model's own reverse chain, at up to `positions` of M(x_t) in each sequence.

    For a model that predicts p(x_0^i | x_t without position i), `leave_one_out` makes the full posterior of it first.
    """
    process, gaps = _process(denoiser), []
    for row in range(len(x0)):
        own = rng[torch.tensor([row])]
        x_t = process.corrupt(x0[row : row + 1], t, own("corrupt"))
        chosen, _ = _noisy_positions(process, x_t, positions, own)
        law, copies = denoiser(x_t, t), Rng(own.key, own.rows * hops + torch.arange(hops), rng.batch * hops)
        x_s = _hop(process, law, x_t, s, t, copies, posterior)
        if not chosen.shape[1]:
            continue
        now, then = (
            _probs_at(denoiser, x, u, chosen.expand(len(x), -1), leave_one_out) for x, u in ((x_t, t), (x_s, s))
        )
        drawn = ~process.positions(x_s.gather(1, chosen.expand(hops, -1)))
        then = torch.where(drawn[..., None], now, then)  # a token drawn from f(x_t) is f(x_t) in the mean
        a, b = then[::2].mean(0), then[1::2].mean(0)
        gaps.append((_total_variation(now[0], then.mean(0)), _total_variation(a, b) / 2))
    if not gaps:
        raise ValueError(f"no position of these texts is noisy at t = {t:g}: give longer ones, or more")
    tv, floor = torch.tensor(gaps, dtype=torch.float64).mean(0).tolist()
    return ChainGap(tv, floor)


def _hop(process: Process, law: LogLaw, x_t: Tokens, s: float, t: float, rng: Rng, posterior: Posterior) -> Tokens:
    """One hop of the model's reverse chain from one x_t, as often as the noise has rows."""
    many = x_t.expand(len(rng.rows), -1)
    if posterior == "mixture":
        u = rng("clean").uniform(x_t.shape[1], x_t.device)
        clean = torch.stack([categorical(law[0], row) for row in u])
        return process.bridge(clean, many, s, t, rng("bridge"))
    rows = [process.bridge(law, x_t, s, t, rng[torch.tensor([k])]("bridge")) for k in range(len(many))]
    return torch.cat(rows)


@dataclasses.dataclass(frozen=True)
class ReliabilityCurve:
    """A reliability curve: in each bin of f(x_t)_i(v), how many pairs (i, v), and the two means."""

    count: list[int]
    before: list[float]
    """The mean of f(x_t, t)_i(v)."""
    after: list[float]
    """The mean of f(x_s, s)_i(v); equal to `before` if f is consistent and fits the data."""

    @property
    def error(self) -> float:
        """The mean of |after - before| over tokens drawn from f(x_t): each bin weighs what probability it holds."""
        mass = [n * p for n, p in zip(self.count, self.before, strict=True)]
        gaps = zip(mass, self.before, self.after, strict=True)
        return sum(m * abs(after - before) for m, before, after in gaps) / sum(mass)


@torch.no_grad()
def reliability_curve(
    denoiser: Denoiser,
    x0: Tokens,
    s: float,
    t: float,
    rng: Rng,
    positions: int = 32,
    rows: int = 64,
    leave_one_out: bool = False,
) -> ReliabilityCurve:
    """x_s and x_t from the true bridge of each x_0; `leave_one_out` as above."""
    process = _process(denoiser)
    edges = torch.logspace(-6, 0, NUM_BINS + 1, dtype=torch.float64)
    count, before, after = (torch.zeros(NUM_BINS, dtype=torch.float64) for _ in range(3))
    for part in torch.arange(len(x0)).split(rows):
        own, x = rng[part], x0[part.to(x0.device)]
        x_t = process.corrupt(x, t, own("corrupt"))
        x_s = x if s == 0 else process.bridge(x, x_t, s, t, own("bridge"))
        chosen, there = _noisy_positions(process, x_t, positions, own)
        now, then = (_probs_at(denoiser, x, u, chosen, leave_one_out).cpu().double() for x, u in ((x_t, t), (x_s, s)))
        bin_ = torch.bucketize(now, edges).clamp(1, NUM_BINS) - 1
        seen = (now > edges[0]) & there.cpu()[..., None]
        for total, value in ((count, torch.ones_like(now)), (before, now), (after, then)):
            total.index_add_(0, bin_[seen], value[seen])
    filled = count > 0
    means = [(total[filled] / count[filled]).tolist() for total in (before, after)]
    return ReliabilityCurve(count[filled].long().tolist(), *means)


def _process(denoiser: Denoiser) -> Process:
    if denoiser.process is None:
        raise ValueError("an autoregressive model has no noise levels to be consistent between")
    return denoiser.process


def _push_forward(table: Tensor, level: Float[Tensor, "before after"], axes: int | None = None) -> Tensor:
    """A table over states, through the noise along each of its (first) axes."""
    for axis in range(table.dim() if axes is None else axes):
        table = torch.tensordot(table, level, ([axis], [0])).movedim(-1, axis)
    return table


def _clean_states(states: Int[Tensor, "all l"], process: Process) -> Float[Tensor, "all l v"]:
    """f(x_0, 0) = x_0; impossible states (a mask at s = 0) have no mass and get zeros."""
    onehot = torch.nn.functional.one_hot(states, process.states).double()
    return onehot[..., : process.vocab]


def _noisy_positions(
    process: Process, x_t: Tokens, positions: int, rng: Rng
) -> tuple[Int[Tensor, "b k"], Bool[Tensor, "b k"]]:
    """Up to so many positions of M(x_t) in each sequence, and which of them are there: one may have fewer."""
    here = process.positions(x_t)
    k = min(positions, int(here.sum(-1).max()))
    order = rng("positions").uniform(x_t.shape[1], x_t.device) + (~here)
    chosen = order.argsort(-1)[:, :k]
    return chosen, here.gather(1, chosen)


def _probs_at(
    denoiser: Denoiser, x: Tokens, t: float, rows: Int[Tensor, "b k"], leave_one_out: bool
) -> Float[Tensor, "b k v"]:
    """f(x, t) at chosen positions, with carry-over and the boundary condition."""
    process = _process(denoiser)
    x = x.to(denoiser.device)
    time = torch.full((len(x),), t, dtype=torch.float64)
    token = x.gather(1, rows.to(x.device))
    law = denoiser.head(denoiser.features(x, process.noise.alpha(time), rows.to(x.device))).exp()
    if leave_one_out:
        law = _with_own_evidence(law, token, float(process.noise.alpha(time)[0]), process)
    known = ~process.positions(token) | (token < process.vocab if t == 0 else torch.zeros_like(token, dtype=torch.bool))
    onehot = torch.zeros_like(law).scatter_(-1, token.clamp(max=process.vocab - 1)[..., None], 1.0)
    return torch.where(known[..., None], onehot, law)


def _total_variation(p: Tensor, q: Tensor) -> float:
    return float((p - q).abs().sum(-1).mean() / 2)
