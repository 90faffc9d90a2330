"""Divergences D(target P, student Q) between distributions over the clean vocabulary, row by row, in nats.

The first argument is the target, the second the student, as in Eq. (8) (Eq. (6) writes them the other way round); so
`kl` is KL(P || Q), the forward one. A target is a row of log-probabilities or, for a point mass, a token id. Rows are
finite: certainty is an id, never -inf. Only `rate_kl` looks at the pair.

Each entry holds the value and, for point and dense targets, the gradient in the logits z of the student q = softmax(z):

    dD/dz = q * (g - <q, g>),   g = dD/dq

    D           target    g, or dD/dz itself
    kl          point y   dD/dz = q - y
    kl          dense P   dD/dz = q - P
    reverse_kl  point y   g = log q + floor [y]
    reverse_kl  dense P   g = log q - log P
    jsd         point y   dD/dz = c q_y (y - q),  c = log(q_y / (1 + q_y)) / 2
    jsd         dense P   g = log(q / m) / 2,  m = (P + q) / 2
    tv          point y   dD/dz = q_y (q - y)
    tv          dense P   g = sign(q - P) / 2
    rate_kl     either    g = beta pi[z] alpha ([z] (1/p_z - 1/q_z) / q_z - p / (p_z q)), p and q noised
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cdlm.objective.weight import inverse_noise
from cdlm.types import Pair

Rows = Float[Tensor, "n v"]
Ids = Int[Tensor, "n"]
TargetRows = Float[Tensor, "n v"] | Int[Tensor, "n"]
Values = Float[Tensor, "n"]

FLOOR = math.log(1e-6)
LOG_2 = math.log(2.0)


@runtime_checkable
class Divergence(Protocol):
    """D(target P, student Q), row by row, in nats. The student is a row of log-probabilities.

    The target is one too or, where it is a point mass, a token id: always for the data, and for a target network where
    the token is certain at x_s (the bridge has revealed it, or s = 0). `pair` has the times and noise of each row, on
    the device of the student. Any function of this signature will do; a `ClosedForm` is faster.
    """

    def __call__(self, *, target: TargetRows, student: Rows, pair: Pair) -> Values: ...


Gradient = Callable[..., tuple[Values, Rows]]
"""gradient(log_q, target, weight, *rows, *shared): weight * D for each row, and its gradient in the logits of q.

`log_q` are the student's log-probabilities, `target` token ids or log-probabilities, `rows` and `shared` the `Inputs`.
On a GPU it is compiled, and without `shared` inputs the vocabulary is padded with tokens of probability 0."""


class Inputs(NamedTuple):
    """What a gradient needs to know of the pair: one value for each row, and tensors shared by all rows."""

    rows: tuple[Tensor, ...] = ()
    shared: tuple[Tensor, ...] = ()


@dataclasses.dataclass(frozen=True)
class ClosedForm:
    """A divergence whose gradients are known, so that it never holds a distribution for more than a chunk of rows.

    Without the gradient for a kind of target, autograd differentiates `value` there.
    """

    name: str
    value: Callable[..., Values]
    point: Gradient | None = None
    dense: Gradient | None = None
    inputs: Callable[[Pair], Inputs] | None = None
    """What the gradients need of the pair, in the precision of its times."""
    simpler: Callable[[Pair], "tuple[ClosedForm, Values] | None"] | None = None
    """A divergence and a weight whose product is this divergence at these rows, if there is one."""

    def __call__(self, *, target: TargetRows, student: Rows, pair: Pair | None = None) -> Values:
        return self.value(target=target, student=student, pair=pair)

    def __str__(self) -> str:
        return self.name


def _kl(*, target: TargetRows, student: Rows, pair: Pair | None = None) -> Values:
    if not target.is_floating_point():
        return -_pick(student, target)
    return (target.exp() * (target - student)).sum(-1)


def _kl_point(log_q: Rows, y: Ids, w: Values) -> tuple[Values, Rows]:
    return -w * _pick(log_q, y), w[:, None] * (log_q.exp() - _onehot(y, log_q))


def _kl_dense(log_q: Rows, log_p: Rows, w: Values) -> tuple[Values, Rows]:
    p = log_p.exp()
    return w * (p * (log_p - log_q)).sum(-1), w[:, None] * (log_q.exp() - p)


kl = ClosedForm("kl", _kl, _kl_point, _kl_dense)
"""KL(P || Q) = sum_y P(y) log(P(y) / Q(y)); the cross entropy for a point mass. Elicits the mean."""


@functools.cache
def reverse_kl_above(floor: float) -> ClosedForm:
    """KL(Q || P) = sum_y Q(y) log(Q(y) / P(y)).

    Infinite against a point mass, whose log-probabilities are therefore floored.
    """

    def value(*, target: TargetRows, student: Rows, pair: Pair | None = None) -> Values:
        q = student.exp()
        if not target.is_floating_point():
            return (q * student).sum(-1) - floor * (1 - _pick(student, target).exp())
        return (q * (student - target)).sum(-1)

    def point(log_q: Rows, y: Ids, w: Values) -> tuple[Values, Rows]:
        q = log_q.exp()
        loss = (q * log_q).sum(-1) - floor * (1 - _pick(q, y))
        return w * loss, _through_softmax(q, log_q + floor * _onehot(y, log_q), w)

    return ClosedForm(f"reverse_kl, floor {floor:.3g}", value, point, _reverse_kl_dense)


def _reverse_kl_dense(log_q: Rows, log_p: Rows, w: Values) -> tuple[Values, Rows]:
    q, g = log_q.exp(), log_q - log_p
    return w * (q * g).sum(-1), _through_softmax(q, g, w)


reverse_kl = reverse_kl_above(FLOOR)
"""KL(Q || P), the log-probabilities of a point mass floored at log 1e-6."""


def _jsd(*, target: TargetRows, student: Rows, pair: Pair | None = None) -> Values:
    if not target.is_floating_point():
        log_q = _pick(student, target)
        q = log_q.exp()
        return LOG_2 + (q * log_q - (1 + q) * torch.log1p(q)) / 2
    mean = torch.logaddexp(target, student) - LOG_2
    return (target.exp() * (target - mean) + student.exp() * (student - mean)).sum(-1) / 2


def _jsd_point(log_q: Rows, y: Ids, w: Values) -> tuple[Values, Rows]:
    log_qy = _pick(log_q, y)
    q = log_qy.exp()
    loss = LOG_2 + (q * log_qy - (1 + q) * torch.log1p(q)) / 2
    c = w * q * (log_qy - torch.log1p(q)) / 2
    return w * loss, c[:, None] * (_onehot(y, log_q) - log_q.exp())


def _jsd_dense(log_q: Rows, log_p: Rows, w: Values) -> tuple[Values, Rows]:
    q, p = log_q.exp(), log_p.exp()
    log_m = torch.logaddexp(log_p, log_q) - LOG_2
    g = (log_q - log_m) / 2
    return w * ((p * (log_p - log_m)).sum(-1) / 2 + (q * g).sum(-1)), _through_softmax(q, g, w)


jsd = ClosedForm("jsd", _jsd, _jsd_point, _jsd_dense)
"""Jensen-Shannon: (KL(P || M) + KL(Q || M)) / 2 with M = (P + Q) / 2. At most log 2; it sharpens.

Against a point mass at y it depends on q = Q(y) alone: log 2 + (q log q - (1 + q) log(1 + q)) / 2."""


def _tv(*, target: TargetRows, student: Rows, pair: Pair | None = None) -> Values:
    if not target.is_floating_point():
        return 1 - _pick(student, target).exp()
    return (target.exp() - student.exp()).abs().sum(-1) / 2


def _tv_point(log_q: Rows, y: Ids, w: Values) -> tuple[Values, Rows]:
    q = log_q.exp()
    q_y = _pick(q, y)
    return w * (1 - q_y), (w * q_y)[:, None] * (q - _onehot(y, log_q))


def _tv_dense(log_q: Rows, log_p: Rows, w: Values) -> tuple[Values, Rows]:
    q, p = log_q.exp(), log_p.exp()
    return w * (q - p).abs().sum(-1) / 2, _through_softmax(q, torch.sign(q - p) / 2, w)


tv = ClosedForm("tv", _tv, _tv_point, _tv_dense)
"""Total variation: half the sum of |P - Q|."""


def _rate_kl(*, target: TargetRows, student: Rows, pair: Pair) -> Values:
    assert pair.prior is not None
    v, dtype, z, prior = student.shape[-1], student.dtype, pair.x_t, pair.prior.to(student.dtype)
    alpha, beta = pair.alpha_t.to(dtype), (-pair.dalpha_t / pair.alpha_t).to(dtype)
    noise = (1 - pair.alpha_t).to(dtype)  # before rounding: near t = 0 it is a small difference
    pi, mask = prior[:v], prior[v:].sum()  # mask: the prior mass of the mask state, 0 where there is none
    clean = z < v
    z_ = z.clamp(max=v - 1)
    left = noise[:, None] * pi

    def levels(log_probs: Rows) -> tuple[Rows, Values]:
        """log m at every clean token, and at x_t."""
        log_m = torch.logaddexp(torch.log(alpha)[:, None] + log_probs, torch.log(left))
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
    stays = noise * mask * (log_qz - log_pz) * clean  # the mask state, level with both distributions
    return beta * prior[z] * ((total + stays - 1) * torch.exp(-log_pz) + torch.exp(-log_qz))


def _rate_kl_inputs(pair: Pair) -> Inputs:
    """x_t, alpha, 1 - alpha, beta; and the prior."""
    assert pair.prior is not None
    return Inputs((pair.x_t, pair.alpha_t, 1 - pair.alpha_t, -pair.dalpha_t / pair.alpha_t), (pair.prior,))


def _rate_kl_gradient(
    log_q: Rows, p: Rows, w: Values, x_t: Ids, alpha: Values, noise: Values, beta: Values,
    prior: Float[Tensor, "states"],
) -> tuple[Values, Rows]:  # fmt: skip
    q = log_q.exp()
    v, scale = q.shape[1], beta * prior[x_t]
    left = noise[:, None] * prior[:v]
    level_p, level_q = alpha[:, None] * p + left, alpha[:, None] * q + left
    clean, masked = x_t < v, noise * prior[v:].sum()
    at = x_t.clamp(max=v - 1)
    p_z, q_z = (torch.where(clean, _pick(level, at), masked) for level in (level_p, level_q))
    tiny = torch.finfo(q.dtype).tiny
    gap = torch.log(p_z) - torch.log(q_z)
    logs = torch.log(level_p.clamp(min=tiny)) - torch.log(level_q.clamp(min=tiny)) - gap[:, None]
    moved = (level_p * logs).sum(-1) - masked * gap * clean
    loss = scale * ((moved - 1) / p_z + 1 / q_z)
    stay = torch.where(clean, (1 / p_z - 1 / q_z) / q_z, 0.0)
    g = _onehot(at, q) * stay[:, None] - level_p / (p_z[:, None] * level_q.clamp(min=tiny))
    return w * loss, _through_softmax(q, g, w * scale * alpha)


def _rate_kl_point(log_q: Rows, y: Ids, w: Values, *inputs: Tensor) -> tuple[Values, Rows]:
    return _rate_kl_gradient(log_q, _onehot(y, log_q), w, *inputs)


def _rate_kl_dense(log_q: Rows, log_p: Rows, w: Values, *inputs: Tensor) -> tuple[Values, Rows]:
    return _rate_kl_gradient(log_q, log_p.exp(), w, *inputs)


def _cross_entropy_under_masking(pair: Pair) -> tuple[ClosedForm, Values] | None:
    """Prop. D.1."""
    masked = pair.prior is not None and bool(pair.prior[-1] == 1)
    return (kl, inverse_noise(pair)) if masked else None


rate_kl = ClosedForm(
    "rate_kl", _rate_kl, _rate_kl_point, _rate_kl_dense, _rate_kl_inputs, simpler=_cross_entropy_under_masking
)
"""KL between the reverse jump rates that P and Q imply: the NELBO per token, for every prior.

    R_P(x_t -> y) = beta pi[x_t] m_P(y) / m_P(x_t),   m_P = alpha P + (1 - alpha) pi,   beta = -alpha' / alpha

the limit s -> t of KL(bridge(P) || bridge(Q)) / (t - s). On the masked process it is -alpha'/(1 - alpha) times
the cross entropy (Prop. D.1), on the uniform process the NELBO of UDLM and DUO."""


def _through_softmax(q: Rows, g: Rows, w: Values) -> Rows:
    """w q (g - <q, g>): the gradient in the logits from g, the one in q."""
    return w[:, None] * q * (g - (q * g).sum(-1, keepdim=True))


def _onehot(y: Ids, like: Rows) -> Rows:
    return (torch.arange(like.shape[1], device=like.device) == y[:, None]).to(like.dtype)


def _pick(rows: Rows, ids: Ids) -> Values:
    return rows.gather(-1, ids[:, None])[:, 0]


DIVERGENCES: dict[str, ClosedForm] = {"kl": kl, "reverse_kl": reverse_kl, "jsd": jsd, "tv": tv, "rate_kl": rate_kl}


def divergence(name: str, floor: float | None = None) -> ClosedForm:
    """A divergence by name; `floor` is the smallest target log-probability that the reverse KL sees at a point mass."""
    if name not in DIVERGENCES:
        raise ValueError(f"unknown divergence {name!r}; choose from {', '.join(DIVERGENCES)}")
    if name == "reverse_kl" and floor is not None:
        return reverse_kl_above(floor)
    return DIVERGENCES[name]


def describe(divergence: Divergence) -> str:
    """The name in the table of methods."""
    return divergence.name if isinstance(divergence, ClosedForm) else getattr(divergence, "__name__", str(divergence))
