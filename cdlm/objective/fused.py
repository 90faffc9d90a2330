"""Head and divergence in one pass: the loss of chosen rows and its gradient, chunk by chunk.

A chunk of rows goes from the network's hidden states to logits, to values and gradients (the closed forms of
divergence.py), and from there straight to the gradients of the hidden states and of the head. What is kept is as large
as the network's own tensors; the [n, v] distributions of `plain_sum` are never there all at once, and never in fp32.
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
from cdlm.objective.divergence import ClosedForm, Divergence, Gradient, Inputs
from cdlm.objective.target import Dense, Prediction
from cdlm.types import Index, Pair

Hidden = Float[Tensor, "n d"]
Rows = Float[Tensor, "c v"]
Values = Float[Tensor, "c"]
Kernel = Callable[..., tuple[Values, Rows]]

GPU_CHUNK, CPU_CHUNK = 2048, 128
"""Rows at a time. On a GPU always exactly so many, so that nothing is compiled twice; on a CPU as caches hold."""
_MULTIPLE, _NEVER = 128, -1e4


@dataclasses.dataclass(frozen=True)
class Summands:
    """Summands of one term of Eq. (8): w D(target, student) at positions flattened over batch and length."""

    index: Index
    """No two summands share a position."""
    target: Index | Dense
    weight: Float[Tensor, "n"]
    divergence: Divergence
    pair: Pair
    """At these positions."""

    def to(self, device: torch.device) -> "Summands":
        return dataclasses.replace(
            self,
            index=send(self.index, device),
            target=send(self.target, device) if isinstance(self.target, Tensor) else self.target,
            weight=send(self.weight, device),
            pair=self.pair.to(device),
        )


def gradient_of(part: Summands) -> Gradient | None:
    """The closed form for this kind of target; None without one, where autograd differentiates."""
    if not isinstance(part.divergence, ClosedForm) or not isinstance(part.target, Tensor | Prediction):
        return None
    return part.divergence.point if isinstance(part.target, Tensor) else part.divergence.dense


def has_closed_form(part: Summands, student: Denoiser) -> bool:
    """Whether `weighted_sums` takes it: a divergence with a closed form, between networks with a linear head."""
    networks = [student, part.target.network] if isinstance(part.target, Prediction) else [student]
    return gradient_of(part) is not None and all(network.linear_head is not None for network in networks)


def linear_head(network: Denoiser) -> tuple[Float[Tensor, "v d"], Float[Tensor, "v"]]:
    """Weight and bias of the head over the clean vocabulary."""
    assert network.linear_head is not None
    weight, bias = network.linear_head
    return _cut(weight, network.vocab), _cut(bias, network.vocab)


def weighted_sums(
    student: Denoiser, hidden: Hidden, parts: Sequence[Summands]
) -> tuple[Float[Tensor, ""], list[Float[Tensor, ""]]]:
    """The sum over all parts, which can be differentiated; and that of each, which cannot. All have closed forms."""
    weight, bias = linear_head(student)
    work = [_prepared(part, weight) for part in parts]
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    total, *sums = _Total.apply(hidden, weight, bias, work, dtype, torch.is_grad_enabled())
    return total, sums


@dataclasses.dataclass(frozen=True)
class _Work:
    """Summands on the device of the network, and the closed form for them."""

    index: Int[Tensor, "n"]
    weight: Float[Tensor, "n"]
    target: Int[Tensor, "n"] | Prediction
    gradient: Gradient
    rows: tuple[Float[Tensor, "n"] | Int[Tensor, "n"], ...]
    shared: tuple[Tensor, ...]


def _prepared(part: Summands, like: Tensor) -> _Work:
    assert isinstance(part.divergence, ClosedForm)
    assert isinstance(part.target, Tensor | Prediction)
    divergence, weight = part.divergence, part.weight
    if divergence.simpler is not None and (simpler := divergence.simpler(part.pair)) is not None:
        divergence, weight = simpler[0], weight * simpler[1]
    gradient = divergence.point if isinstance(part.target, Tensor) else divergence.dense
    inputs = Inputs() if divergence.inputs is None else divergence.inputs(part.pair)
    assert gradient is not None

    def moved(tensor: Tensor) -> Tensor:
        return send(tensor.to(value_dtype(like.dtype)) if tensor.is_floating_point() else tensor, like.device)

    return _Work(
        index=moved(part.index),
        weight=moved(weight),
        target=moved(part.target) if isinstance(part.target, Tensor) else part.target,
        gradient=gradient,
        rows=tuple(map(moved, inputs.rows)),
        shared=tuple(map(moved, inputs.shared)),
    )


class _Total(torch.autograd.Function):
    """Loss and gradient chunk by chunk, both in the forward pass; it can be differentiated once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Hidden, weight: Tensor, bias: Tensor, work: list[_Work], dtype: torch.dtype, needed: bool
    ) -> tuple[Tensor, ...]:
        v, device = weight.shape[0], weight.device
        w, b = _padded(weight, bias, dtype)
        d_hidden = torch.zeros_like(hidden) if needed else None
        d_weight = torch.zeros(w.shape, dtype=value_dtype(dtype), device=device) if needed else None
        d_bias = torch.zeros(len(w), dtype=value_dtype(dtype), device=device) if needed else None
        on_gpu = device.type == "cuda"
        chunk = GPU_CHUNK if on_gpu else CPU_CHUNK
        sums = []
        for part in work:
            width = v if part.shared else len(w)  # what is shared, like the prior, may have a value for each token
            kernel = (_compiled if on_gpu else _kernel)(part.gradient, len(w) - width)
            target_at = _targets(part.target, width, dtype)
            found = torch.zeros((), dtype=value_dtype(dtype), device=device)
            for first in range(0, len(part.index), chunk):
                span = slice(first, first + chunk)
                index = part.index[span]
                count = chunk if on_gpu else len(index)
                rows = _filled(hidden[index].to(dtype), count)
                logits = torch.addmm(b, rows, w.t())
                weights = torch.nn.functional.pad(part.weight[span], (0, count - len(index)))
                inputs = [_filled(row[span], count) for row in part.rows]
                loss, slope = kernel(logits[:, :width], target_at(span, count), weights, *inputs, *part.shared)
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


def _targets(target: Int[Tensor, "n"] | Prediction, width: int, dtype: torch.dtype) -> Callable[[slice, int], Tensor]:
    """The targets of a chunk of rows: token ids, or logits of the distributions that a network predicts."""
    if isinstance(target, Tensor):
        return lambda span, count: _filled(target[span], count)
    weight, bias = _padded(*linear_head(target.network), dtype)
    unconditional = None
    if target.unconditional is not None:
        logits = torch.addmm(bias, target.unconditional.to(dtype), weight.t())[:, :width]
        unconditional = mean_law(_log_softmax(logits)).to(dtype)

    def predicted(span: slice, count: int) -> Rows:
        rows = _filled(target.hidden[span].to(dtype), count)
        return target.adjusted(torch.addmm(bias, rows, weight.t())[:, :width], unconditional)

    return predicted


def _kernel(gradient: Gradient, padding: int) -> Kernel:
    """A closed form between logits, whose gradient has `padding` more columns of zeros, and their precision."""

    def kernel(logits: Rows, target: Tensor, weight: Values, *inputs: Tensor) -> tuple[Values, Rows]:
        target = _log_softmax(target) if target.is_floating_point() else target
        values, slope = gradient(_log_softmax(logits), target, weight, *inputs)
        slope = slope.to(logits.dtype)
        return values, torch.nn.functional.pad(slope, (0, padding)) if padding else slope

    return kernel


@functools.cache
def _compiled(gradient: Gradient, padding: int) -> Kernel:
    """The same in as few passes as the compiler finds."""
    return torch.compile(_kernel(gradient, padding), dynamic=False)


def _log_softmax(logits: Rows) -> Rows:
    return logits.to(value_dtype(logits.dtype)).log_softmax(-1)


def value_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of values and sums: single, or double for a network in double."""
    return torch.promote_types(dtype, torch.float32)


def _padded(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast, and on a GPU padded with tokens that have no probability: odd sizes take far slower kernels."""
    weight, bias = weight.detach().to(dtype), bias.detach().to(dtype)
    extra = -len(weight) % _MULTIPLE if weight.device.type == "cuda" else 0
    if not extra:
        return weight, bias
    return torch.nn.functional.pad(weight, (0, 0, 0, extra)), torch.nn.functional.pad(bias, (0, extra), value=_NEVER)


def _cut(head: Tensor, vocab: int) -> Tensor:
    """Without the tokens that `accelerate` has added, and without the mask of a network of the user's own."""
    return head if len(head) == vocab else head[:vocab]


def _filled(rows: Tensor, count: int) -> Tensor:
    """So many rows, the last ones copies of the first; their weight is zero."""
    short = count - len(rows)
    return rows if not short else torch.cat([rows, rows[:1].expand(short, *rows.shape[1:])])
