"""Divergences D(target P, student Q) between laws over the clean vocabulary, row by row, in nats.

The first argument is the target, the second the student, as in Eq. (8) (Eq. (6) writes them the other way round); so
`kl` is KL(P || Q), the forward one. A target is a row of log-probabilities or, for a point mass, a token id, for
which every divergence has a closed form. Rows are finite: certainty is an id, never -inf. All share one
signature; only `rate_kl` looks at the pair.
"""

import functools
import math
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cdlm.types import Pair

Rows = Float[Tensor, "n v"]
TargetRows = Float[Tensor, "n v"] | Int[Tensor, "n"]
Values = Float[Tensor, "n"]


@runtime_checkable
class Divergence(Protocol):
    """D(target P, student Q), row by row, in nats. The target is a row of log-probabilities or, for a point mass, a
    token id; `pair` has the times and noise of each row."""

    def __call__(self, *, target: TargetRows, student: Rows, pair: Pair) -> Values: ...


FLOOR = math.log(1e-6)
LOG_2 = math.log(2.0)


def kl(*, target: TargetRows, student: Rows, pair: Pair | None = None) -> Values:
    """KL(P || Q) = sum_y P(y) log(P(y) / Q(y)); the cross entropy for a point mass. Elicits the mean."""
    if not target.is_floating_point():
        return -_pick(student, target)
    return (target.exp() * (target - student)).sum(-1)


def reverse_kl(*, target: TargetRows, student: Rows, pair: Pair | None = None, floor: float = FLOOR) -> Values:
    """KL(Q || P) = sum_y Q(y) log(Q(y) / P(y)).

    Infinite against a point mass, whose log-probabilities are therefore floored (at log 1e-6 unless told otherwise).
    """
    q = student.exp()
    if not target.is_floating_point():
        return (q * student).sum(-1) - floor * (1 - _pick(student, target).exp())
    return (q * (student - target)).sum(-1)


def jsd(*, target: TargetRows, student: Rows, pair: Pair | None = None) -> Values:
    """Jensen-Shannon: (KL(P || M) + KL(Q || M)) / 2 with M = (P + Q) / 2. At most log 2; it sharpens.

    Against a point mass at y it depends on q = Q(y) alone: log 2 + (q log q - (1 + q) log(1 + q)) / 2.
    """
    if not target.is_floating_point():
        log_q = _pick(student, target)
        q = log_q.exp()
        return LOG_2 + (q * log_q - (1 + q) * torch.log1p(q)) / 2
    mean = torch.logaddexp(target, student) - LOG_2
    return (target.exp() * (target - mean) + student.exp() * (student - mean)).sum(-1) / 2


def tv(*, target: TargetRows, student: Rows, pair: Pair | None = None) -> Values:
    """Total variation: half the sum of |P - Q|."""
    if not target.is_floating_point():
        return 1 - _pick(student, target).exp()
    return (target.exp() - student.exp()).abs().sum(-1) / 2


def rate_kl(*, target: TargetRows, student: Rows, pair: Pair) -> Values:
    """KL between the reverse jump rates that P and Q imply: the NELBO per token, for every prior.

        R_P(x_t -> y) = beta pi[x_t] m_P(y) / m_P(x_t),   m_P = alpha P + (1 - alpha) pi,   beta = -alpha' / alpha

    the limit s -> t of KL(bridge(P) || bridge(Q)) / (t - s). On the masked process it is -alpha'/(1 - alpha) times
    the cross entropy (Prop. D.1), on the uniform process the NELBO of UDLM and DUO.
    """
    assert pair.prior is not None
    v, dtype, device = student.shape[-1], student.dtype, student.device
    prior = pair.prior.to(device, dtype)
    z = pair.x_t.to(device)
    alpha, beta = pair.alpha_t.to(device, dtype), (-pair.dalpha_t / pair.alpha_t).to(device, dtype)
    noise = (1 - pair.alpha_t).to(device, dtype)  # before rounding: near t = 0 it is a small difference
    pi, mask = prior[:v], prior[v:].sum()  # mask: the prior mass of the mask state, 0 where there is none
    clean = z < v
    z_ = z.clamp(max=v - 1)
    left = noise[:, None] * pi

    def levels(log_law: Rows) -> tuple[Rows, Values]:
        """log m at every clean token, and at x_t."""
        log_m = torch.logaddexp(torch.log(alpha)[:, None] + log_law, torch.log(left))
        return log_m, torch.where(clean, _pick(log_m, z_), torch.log(noise * mask))

    log_q, log_qz = levels(student)
    if target.is_floating_point():
        log_p, log_pz = levels(target)
        moved = torch.exp(log_p) * (log_p - log_q - (log_pz - log_qz)[:, None])
        total = moved.sum(-1)  # the term y = x_t is zero by itself
    else:
        # m_P = (1 - alpha) pi everywhere but at x_0: one pass over the student, the rest are gathers.
        at_x0 = noise * pi[target]
        log_px = torch.log(alpha + at_x0)
        log_pz = torch.where(z == target, log_px, torch.log(noise * prior[z]))
        gap = log_pz - log_qz
        others = left * (torch.log(left.clamp(min=torch.finfo(dtype).tiny)) - log_q - gap[:, None])
        total = others.sum(-1) - _pick(others, target) + torch.exp(log_px) * (log_px - _pick(log_q, target) - gap)
    stays = noise * mask * (log_qz - log_pz) * clean  # the mask state, level with both laws
    return beta * prior[z] * ((total + stays - 1) * torch.exp(-log_pz) + torch.exp(-log_qz))


def _pick(rows: Rows, ids: Int[Tensor, "n"]) -> Values:
    return rows.gather(-1, ids.to(rows.device)[:, None])[:, 0]


DIVERGENCES: dict[str, Divergence] = {"kl": kl, "reverse_kl": reverse_kl, "jsd": jsd, "tv": tv, "rate_kl": rate_kl}


def divergence(name: str, floor: float | None = None) -> Divergence:
    """A divergence by name; `floor` is the smallest target log-probability that the reverse KL sees at a point mass."""
    if name not in DIVERGENCES:
        raise ValueError(f"unknown divergence {name!r}; choose from {', '.join(DIVERGENCES)}")
    found = DIVERGENCES[name]
    return functools.partial(found, floor=floor) if found is reverse_kl and floor is not None else found


def describe(found: Divergence) -> str:
    """The name in the table of methods, with the floor where there is one."""
    function, chosen = (found.func, found.keywords) if isinstance(found, functools.partial) else (found, {})
    name = getattr(function, "__name__", str(function))
    return f"{name}, floor {chosen.get('floor', FLOOR):.3g}" if function is reverse_kl else name
