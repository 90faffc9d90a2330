"""Averages of weights: the target network, and the weights that are evaluated."""

import copy

import torch

from cdlm.model.denoiser import Denoiser


def frozen_copy(denoiser: Denoiser) -> Denoiser:
    """A copy that never trains: no gradients, no dropout."""
    return copy.deepcopy(denoiser).requires_grad_(False).eval()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lives in this process: all of it, unless the weights are sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@torch.no_grad()
def update(average: Denoiser, online: Denoiser, lam: float) -> None:
    """w <- lambda w + (1 - lambda) theta; a copy at lambda = 0, nothing at lambda = 1.

    Buffers, such as the running statistics of a batch norm, are copied.
    """
    if lam == 1:
        return
    for kept, buffer in zip(average.buffers(), online.buffers(), strict=True):
        kept.copy_(buffer)
    ours, theirs = ([local(parameter.detach()) for parameter in net.parameters()] for net in (average, online))
    if lam == 0:
        torch._foreach_copy_(ours, theirs)
    else:
        torch._foreach_lerp_(ours, theirs, 1 - lam)
