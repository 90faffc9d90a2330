"""What the network of a pipeline predicts for token ids that the caller gives."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cdlm.model.denoiser import Denoiser
from cdlm.types import Time, Tokens

TokenIds = Int[Tensor, "b l"] | Sequence[Sequence[int]]
"""A batch of sequences of one length, as a tensor or as lists."""
Times = float | Sequence[float] | Float[Tensor, "b"]
"""A time in [0, 1] for all sequences, or one for each."""


@torch.no_grad()
def logits(denoiser: Denoiser, token_ids: TokenIds, t: Times | None, batch_size: int) -> Float[Tensor, "b l v"]:
    """The output of the network at every position, before normalisation."""
    x_t, times = _checked(denoiser, token_ids, t, batch_size)
    alpha = torch.ones_like(times) if denoiser.process is None else denoiser.process.noise.alpha(times)
    parts = zip(x_t.split(batch_size), alpha.split(batch_size), strict=True)
    return torch.cat([_at_least_float32(denoiser.logits(denoiser.features(x, a))) for x, a in parts])


@torch.no_grad()
def log_probs(denoiser: Denoiser, token_ids: TokenIds, t: Times | None, batch_size: int) -> Float[Tensor, "b l v"]:
    """f(x_t, t): log-probabilities of the clean token at every position, where known tokens are certain."""
    x_t, times = _checked(denoiser, token_ids, t, batch_size)
    parts = zip(x_t.split(batch_size), times.split(batch_size), strict=True)
    return torch.cat([_at_least_float32(denoiser(x, t)) for x, t in parts])


def _checked(denoiser: Denoiser, token_ids: TokenIds, t: Times | None, batch_size: int) -> tuple[Tokens, Time]:
    """Tokens on the device of the network, and a time on the host for each sequence."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1 (got {batch_size}).")
    try:
        x_t = torch.as_tensor(token_ids)
    except (TypeError, ValueError):
        raise ValueError("token_ids must be sequences of one length; pad them, or pass them one by one.") from None
    if x_t.dim() != 2 or x_t.is_floating_point() or x_t.dtype == torch.bool or not x_t.numel():
        shape = tuple(x_t.shape)
        raise ValueError(f"token_ids must be integers of shape [batch, length] (got {x_t.dtype} of shape {shape}).")
    num_states = denoiser.vocab if denoiser.process is None else denoiser.process.states
    outside = x_t[(x_t < 0) | (x_t >= num_states)]
    if len(outside):
        raise ValueError(f"token_ids must lie in [0, {num_states}) for this model (got {int(outside[0])}).")
    if t is None and denoiser.process is not None:
        raise ValueError("t must be given: the time in [0, 1] at which token_ids are noisy; 0 is data, 1 is noise.")
    times = torch.as_tensor(1.0 if t is None else t, dtype=torch.float64).cpu()
    if times.shape not in ((), (len(x_t),)):
        raise ValueError(f"t must be a number or have one for each of {len(x_t)} sequences (got {tuple(times.shape)}).")
    if not bool(((times >= 0) & (times <= 1)).all()):
        raise ValueError(f"t must be between 0 and 1 (got {t}).")
    return x_t.long().to(denoiser.device), times.expand(len(x_t))


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
