"""Head and divergence in one pass: the loss of chosen rows and its gradient, without a law that outlives its chunk.

For every divergence the gradient in the logits z of the student q = softmax(z) has a closed form:

    dD/dz = q * (g - <q, g>),   g = dD/dq

so a chunk of rows goes from the network's hidden rows to logits, to losses and dD/dz, and from there straight to the
gradients of the hidden rows and of the head. What is kept is as large as the network's own tensors; the [n, v] laws of
the plain version (divergence.py, the oracle of the tests) are never there all at once, and never in fp32.

    D           target    g, or dD/dz itself
    kl          point y   dD/dz = q - y
    kl          law P     dD/dz = q - P
    reverse_kl  point y   g = log q + floor [y]
    reverse_kl  law P     g = log q - log P
    jsd         point y   dD/dz = c q_y (y - q),  c = log(q_y / (1 + q_y)) / 2
    jsd         law P     g = log(q / m) / 2,  m = (P + q) / 2
    tv          point y   dD/dz = q_y (q - y)
    tv          law P     g = sign(q - P) / 2
    rate_kl     either    g = beta pi[z] alpha ([z] (1/p_z - 1/q_z) / q_z - p / (p_z q)), p and q noised
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from cdlm.devices import send
from cdlm.model.denoiser import Denoiser, mean_law
from cdlm.objective.divergence import FLOOR, LOG_2, Divergence, jsd, kl, rate_kl, reverse_kl, tv
from cdlm.objective.target import Dense, Prediction
from cdlm.types import Index, Pair

Hidden = Float[Tensor, "n d"]
Rows = Float[Tensor, "c v"]
Values = Float[Tensor, "c"]
Kernel = Callable[..., tuple[Values, Rows]]

GPU_CHUNK, CPU_CHUNK = 2048, 128
"""Rows at a time. On a GPU always exactly so many, so that nothing is compiled twice; on a CPU as caches hold."""
_WIDTH, _NEVER = 128, -1e4


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows of one term: where their hidden rows are, what they must agree with, and what each weighs. No two parts
    share a row."""

    index: Index
    target: Index | Dense
    weight: Float[Tensor, "n"]
    divergence: Divergence
    pair: Pair
    """At these rows."""


def weighted_sum(
    student: Denoiser, hidden: Hidden, parts: Sequence[Part]
) -> tuple[Float[Tensor, ""], list[Float[Tensor, ""]]]:
    """The weighted sum of the divergences of all parts, which can be differentiated; and that of each, which cannot."""
    known = [part for part in parts if _kernel(part) is not None]
    weight, bias = (_cut(part, student.vocab) for part in student.backbone.head)
    work = [_prepared(part, weight) for part in known]
    total, *sums = _Total.apply(hidden, weight, bias, work, _dtype(hidden), torch.is_grad_enabled())
    found = dict(zip(map(id, known), sums, strict=True))
    for part in parts:
        if id(part) not in found:
            value = plain(student, hidden, part)
            total, found[id(part)] = total + value, value.detach()
    return total, [found[id(part)] for part in parts]


def plain(student: Denoiser, hidden: Hidden, part: Part) -> Float[Tensor, ""]:
    """The same by its definition, for one part: every law at once, and the gradient left to autograd."""
    law = student.head(hidden[send(part.index, hidden.device)])
    goal = part.target if isinstance(part.target, Tensor) else part.target.law()
    d = part.divergence(target=goal.to(law.device), student=law, pair=part.pair)
    return (send(part.weight, law.device).to(d.dtype) * d).sum()


@dataclasses.dataclass(frozen=True)
class _Work:
    """A part on the device of the network, ready for its kernel."""

    index: Int[Tensor, "n"]
    weight: Float[Tensor, "n"]
    ids: Int[Tensor, "n"] | None
    prediction: Prediction | None
    kernel: Kernel
    rows: tuple[Float[Tensor, "n"] | Int[Tensor, "n"], ...]
    """What else the kernel needs to know of each row."""
    prior: Float[Tensor, "v"] | None


def _prepared(part: Part, like: Tensor) -> _Work:
    device, pair = like.device, part.pair
    kernel, weight, one = _kernel(part), part.weight, _wide(like.dtype)
    assert kernel is not None
    rows: tuple[Tensor, ...] = ()
    if kernel in (_rate_kl_point, _rate_kl_law) and _masks(pair):  # -alpha' / (1 - alpha) times the cross entropy
        weight = weight * -pair.dalpha_t / (1 - pair.alpha_t)
        kernel = _kl_point if kernel is _rate_kl_point else _kl_law
    rates = kernel in (_rate_kl_point, _rate_kl_law)
    if rates:
        rows = (pair.alpha_t, 1 - pair.alpha_t, -pair.dalpha_t / pair.alpha_t)
        rows = (send(pair.x_t, device), *(send(row.to(one), device) for row in rows))
    elif kernel is _reverse_kl_point:
        chosen = part.divergence.keywords if isinstance(part.divergence, functools.partial) else {}
        rows = (torch.full((len(part.index),), chosen.get("floor", FLOOR), dtype=one, device=device),)
    return _Work(
        index=send(part.index, device),
        weight=send(weight.to(one), device),
        ids=send(part.target, device) if isinstance(part.target, Tensor) else None,
        prediction=part.target if isinstance(part.target, Prediction) else None,
        kernel=kernel,
        rows=rows,
        prior=send(pair.prior.to(one), device) if rates and pair.prior is not None else None,
    )


def _kernel(part: Part) -> Kernel | None:
    """The closed form of a part; None for a divergence or a target that has none here, which autograd does."""
    if not isinstance(part.target, Tensor | Prediction):
        return None
    found = part.divergence.func if isinstance(part.divergence, functools.partial) else part.divergence
    return _KERNELS.get((found, isinstance(part.target, Tensor)))


class _Total(torch.autograd.Function):
    """Loss and gradient chunk by chunk, both in the forward pass; it can be differentiated once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Hidden, weight: Tensor, bias: Tensor, work: list[_Work], dtype: torch.dtype, needed: bool
    ) -> tuple[Tensor, ...]:
        v, device = weight.shape[0], weight.device
        w, b = _padded(weight, bias, dtype)
        d_hidden = torch.zeros_like(hidden) if needed else None
        d_weight = torch.zeros(w.shape, dtype=_wide(dtype), device=device) if needed else None
        d_bias = torch.zeros(len(w), dtype=_wide(dtype), device=device) if needed else None
        sums = []
        for one in work:
            chunk = GPU_CHUNK if device.type == "cuda" else CPU_CHUNK
            width = v if one.prior is not None else len(w)  # reverse rates look at the prior of every token
            kernel = _compiled(one.kernel, len(w) - width) if device.type == "cuda" else one.kernel
            goal, theirs, blank = one.prediction, None, None
            if goal is not None:
                matrix, shift = goal.network.backbone.head
                theirs = _padded(_cut(matrix, v), _cut(shift, v), dtype)
                if goal.blank is not None:
                    laws = _log_softmax(torch.addmm(theirs[1], goal.blank.to(dtype), theirs[0].t())[:, :width])
                    blank = mean_law(laws).to(dtype)
            found = torch.zeros((), dtype=_wide(dtype), device=device)
            for first in range(0, len(one.index), chunk):
                here = slice(first, first + chunk)
                index, whole = one.index[here], chunk if device.type == "cuda" else len(one.index[here])
                rows = _filled(hidden[index].to(dtype), whole)
                logits = torch.addmm(b, rows, w.t())
                if goal is None:
                    assert one.ids is not None
                    target = _filled(one.ids[here], whole)
                else:
                    assert theirs is not None
                    target = _predicted(goal, theirs, blank, here, whole, width)
                more = [_filled(row[here], whole) for row in one.rows]
                heavy = torch.nn.functional.pad(one.weight[here], (0, whole - len(index)))
                loss, slope = kernel(logits[:, :width], target, heavy, *more, one.prior)
                found = found + loss.sum()
                if d_hidden is None or d_weight is None or d_bias is None:
                    continue
                d_hidden.index_copy_(0, index, (slope @ w)[: len(index)].to(hidden.dtype))
                if slope.dtype == d_weight.dtype:
                    d_weight.addmm_(slope.t(), rows)
                else:
                    d_weight += slope.t() @ rows
                d_bias += slope.sum(0, dtype=d_bias.dtype)
            sums.append(found)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.vocab, ctx.dtypes = v, (weight.dtype, bias.dtype)
        ctx.mark_non_differentiable(*sums)
        return (torch.stack(sums).sum() if sums else hidden.new_zeros(()), *sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        scaled = []
        for part in (d_hidden, d_weight, d_bias):  # on a GPU in place: they are as large as the network's own
            scaled.append(part.mul_(grad.to(part.dtype)) if part.is_cuda else part * grad.to(part.dtype))
        weight, bias = (part[: ctx.vocab].to(kind) for part, kind in zip(scaled[1:], ctx.dtypes, strict=True))
        return scaled[0], weight, bias, None, None, None


def _predicted(
    goal: Prediction, head: tuple[Tensor, Tensor], blank: Tensor | None, here: slice, whole: int, width: int
) -> Rows:
    """Logits of the laws that a chunk of rows must agree with."""

    rows = _filled(goal.rows[here].to(head[0].dtype), whole)
    return goal.shaped(torch.addmm(head[1], rows, head[0].t())[:, :width], blank)


def _kl_point(z: Rows, y: Int[Tensor, "c"], w: Values, prior: None = None) -> tuple[Values, Rows]:
    log_q = _log_softmax(z)
    return -w * _pick(log_q, y), (w[:, None] * (log_q.exp() - _onehot(y, z))).to(z.dtype)


def _kl_law(z: Rows, p: Rows, w: Values, prior: None = None) -> tuple[Values, Rows]:
    log_q, log_p = _log_softmax(z), _log_softmax(p)
    law = log_p.exp()
    return w * (law * (log_p - log_q)).sum(-1), (w[:, None] * (log_q.exp() - law)).to(z.dtype)


def _reverse_kl_point(
    z: Rows, y: Int[Tensor, "c"], w: Values, floor: Values, prior: None = None
) -> tuple[Values, Rows]:
    log_q = _log_softmax(z)
    q = log_q.exp()
    loss = (q * log_q).sum(-1) - floor * (1 - _pick(q, y))
    return w * loss, _slope(q, log_q + floor[:, None] * _onehot(y, z), w, z)


def _reverse_kl_law(z: Rows, p: Rows, w: Values, prior: None = None) -> tuple[Values, Rows]:
    log_q, log_p = _log_softmax(z), _log_softmax(p)
    q, g = log_q.exp(), log_q - log_p
    return w * (q * g).sum(-1), _slope(q, g, w, z)


def _jsd_point(z: Rows, y: Int[Tensor, "c"], w: Values, prior: None = None) -> tuple[Values, Rows]:
    log_q = _log_softmax(z)
    log_qy = _pick(log_q, y)
    q = log_qy.exp()
    loss = LOG_2 + (q * log_qy - (1 + q) * torch.log1p(q)) / 2
    c = w * q * (log_qy - torch.log1p(q)) / 2
    return w * loss, (c[:, None] * (_onehot(y, z) - log_q.exp())).to(z.dtype)


def _jsd_law(z: Rows, p: Rows, w: Values, prior: None = None) -> tuple[Values, Rows]:
    log_q, log_p = _log_softmax(z), _log_softmax(p)
    q, law = log_q.exp(), log_p.exp()
    log_m = torch.logaddexp(log_p, log_q) - LOG_2
    g = (log_q - log_m) / 2
    return w * ((law * (log_p - log_m)).sum(-1) / 2 + (q * g).sum(-1)), _slope(q, g, w, z)


def _tv_point(z: Rows, y: Int[Tensor, "c"], w: Values, prior: None = None) -> tuple[Values, Rows]:
    q = _log_softmax(z).exp()
    q_y = _pick(q, y)
    return w * (1 - q_y), ((w * q_y)[:, None] * (q - _onehot(y, z))).to(z.dtype)


def _tv_law(z: Rows, p: Rows, w: Values, prior: None = None) -> tuple[Values, Rows]:
    q, law = _log_softmax(z).exp(), _log_softmax(p).exp()
    return w * (q - law).abs().sum(-1) / 2, _slope(q, torch.sign(q - law) / 2, w, z)


def _rate_kl(
    z: Rows,
    law: Rows,
    q: Rows,
    w: Values,
    x_t: Int[Tensor, "c"],
    alpha: Values,
    noise: Values,
    beta: Values,
    prior: Float[Tensor, "states"],
) -> tuple[Values, Rows]:
    """Between reverse rates: `law` is P; see divergence.py."""
    v, scale = z.shape[1], beta * prior[x_t]
    left = noise[:, None] * prior[:v]
    level_p, level_q = alpha[:, None] * law + left, alpha[:, None] * q + left
    clean, masked = x_t < v, noise * prior[v:].sum()
    at = x_t.clamp(max=v - 1)
    p_z, q_z = (torch.where(clean, _pick(level, at), masked) for level in (level_p, level_q))
    tiny = torch.finfo(q.dtype).tiny
    gap = torch.log(p_z) - torch.log(q_z)
    logs = torch.log(level_p.clamp(min=tiny)) - torch.log(level_q.clamp(min=tiny)) - gap[:, None]
    moved = (level_p * logs).sum(-1) - masked * gap * clean
    loss = scale * ((moved - 1) / p_z + 1 / q_z)
    stay = torch.where(clean, (1 / p_z - 1 / q_z) / q_z, 0.0)
    g = _onehot(at, z) * stay[:, None] - level_p / (p_z[:, None] * level_q.clamp(min=tiny))
    return w * loss, _slope(q, g, w * scale * alpha, z)


def _rate_kl_point(z: Rows, y: Int[Tensor, "c"], w: Values, *rows: Tensor) -> tuple[Values, Rows]:
    return _rate_kl(z, _onehot(y, z), _log_softmax(z).exp(), w, *rows)


def _rate_kl_law(z: Rows, p: Rows, w: Values, *rows: Tensor) -> tuple[Values, Rows]:
    return _rate_kl(z, _log_softmax(p).exp(), _log_softmax(z).exp(), w, *rows)


_KERNELS: dict[tuple[Divergence, bool], Kernel] = {
    (kl, True): _kl_point,
    (kl, False): _kl_law,
    (reverse_kl, True): _reverse_kl_point,
    (reverse_kl, False): _reverse_kl_law,
    (jsd, True): _jsd_point,
    (jsd, False): _jsd_law,
    (tv, True): _tv_point,
    (tv, False): _tv_law,
    (rate_kl, True): _rate_kl_point,
    (rate_kl, False): _rate_kl_law,
}


def _slope(q: Rows, g: Rows, w: Values, z: Rows) -> Rows:
    """w q (g - <q, g>), in the precision of the logits."""
    return (w[:, None] * q * (g - (q * g).sum(-1, keepdim=True))).to(z.dtype)


def _log_softmax(z: Rows) -> Rows:
    return z.to(_wide(z.dtype)).log_softmax(-1)


def _onehot(y: Int[Tensor, "c"], like: Rows) -> Rows:
    return (torch.arange(like.shape[1], device=like.device) == y[:, None]).to(_wide(like.dtype))


def _pick(rows: Rows, ids: Int[Tensor, "c"]) -> Values:
    return rows.gather(-1, ids[:, None])[:, 0]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _dtype(hidden: Tensor) -> torch.dtype:
    """What matrices are multiplied in: that of autocast, where it is on."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _padded(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast, and on a GPU padded with tokens that have no probability: odd sizes take far slower kernels."""
    weight, bias = weight.detach().to(dtype), bias.detach().to(dtype)
    extra = -len(weight) % _WIDTH if weight.device.type == "cuda" else 0
    if not extra:
        return weight, bias
    return torch.nn.functional.pad(weight, (0, 0, 0, extra)), torch.nn.functional.pad(bias, (0, extra), value=_NEVER)


def _cut(head: Tensor, vocab: int) -> Tensor:
    """Without the tokens that `accelerate` has added."""
    return head if len(head) == vocab else head[:vocab]


def _filled(rows: Tensor, count: int) -> Tensor:
    """So many rows, the last ones copies of the first; their weight is zero."""
    short = count - len(rows)
    return rows if not short else torch.cat([rows, rows[:1].expand(short, *rows.shape[1:])])


def _masks(pair: Pair) -> bool:
    """Whether all noise is the mask."""
    return pair.prior is not None and bool(pair.prior[-1] == 1)


@functools.cache
def _compiled(kernel: Kernel, extra: int) -> Kernel:
    """A kernel in as few passes as the compiler finds, whose slopes have columns of zeros for the padded tokens."""
    if not extra:
        return torch.compile(kernel, dynamic=False)

    def padded(*inputs: Tensor) -> tuple[Values, Rows]:
        loss, slope = kernel(*inputs)
        return loss, torch.nn.functional.pad(slope, (0, extra))

    return torch.compile(padded, dynamic=False)
