"""The training loop: one straight line from a batch to the next weights."""

from collections.abc import Callable

import torch

from cdlm.devices import Dtype, autocast
from cdlm.model.average import frozen_copy, update
from cdlm.model.denoiser import Denoiser
from cdlm.objective import Loss, Objective
from cdlm.rng import seeded
from cdlm.schedules import scaled_decay
from cdlm.types import Tokens


def fit(
    denoiser: Denoiser,
    objective: Objective,
    batch_of: Callable[[int], Tokens],
    *,
    teacher: Denoiser | None = None,
    lr: float = 3e-4,
    warmup: float = 1 / 60,
    clip: float = 1.0,
    decay: float = 0.9999,
    seed: int = 0,
    dtype: Dtype = "float32",
    on_step: Callable[[int, Loss], None] | None = None,
) -> Denoiser:
    """Train for `objective.total` steps on batch_of(step); returns the averaged weights, which are what to evaluate.

    `warmup` is a share of the run; `decay` of the average is quoted for the paper's run length, like the target's.
    """
    device = denoiser.device
    optimizer = torch.optim.AdamW(denoiser.parameters(), lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    target = frozen_copy(teacher or denoiser) if objective.network is not None else None
    average = frozen_copy(denoiser)
    denoiser.train()
    for step in range(objective.total):
        torch.manual_seed(seeded(seed, "dropout", step, batch=1).key)
        x0 = batch_of(step)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / max(1.0, warmup * objective.total))
        with autocast(device, dtype):
            loss = objective.loss(denoiser, target, x0, step, seeded(seed, "train", step, batch=len(x0)))
        if not torch.isfinite(loss.total):
            raise FloatingPointError(
                f"the loss is {loss.total.item()} at step {step}; terms: {_show(loss)}; lower --lr"
            )
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(denoiser.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if target is not None and objective.network is not None:
            update(target, denoiser, objective.network.lam(step, objective.total))
        update(average, denoiser, min(scaled_decay(decay, objective.total), (2 + step) / (11 + step)))
        if on_step is not None:
            on_step(step, loss)
    return average


def _show(loss: Loss) -> str:
    return ", ".join(f"{name} {value.item():.4g}" for name, value in loss.terms.items())
