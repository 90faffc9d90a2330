"""Optimisers: AdamW for all weights, or Muon for the matrices of the blocks and AdamW for the others; the learning
rate."""

import torch
from torch import Tensor

from cdlm.model.denoiser import Denoiser
from cdlm.train.config import TrainConfig
from cdlm.train.distributed import full_tensor, load_full_tensor

Optimizers = tuple[torch.optim.Optimizer, ...]
"""Each has weights of its own; together they have all."""
MOMENTS = {"AdamW": ("exp_avg", "exp_avg_sq"), "Muon": ("momentum_buffer",)}
"""What each keeps for a weight."""


def make_optimizers(config: TrainConfig, denoiser: Denoiser) -> Optimizers:
    """Muon makes the update of a matrix orthogonal; scaled so that it is as large as one of AdamW, it takes the same
    learning rate. Embeddings, positions, norms, biases and the modulation stay with AdamW."""
    named = {name: parameter for name, parameter in denoiser.named_parameters() if parameter.requires_grad}
    chosen = {name for name in named if config.optimizer == "muon" and _matrix(name)}
    matrices, others = ([named[name] for name in named if (name in chosen) == inside] for inside in (True, False))
    decay, fused = config.weight_decay, denoiser.device.type == "cuda"
    adamw = torch.optim.AdamW(
        others, lr=config.learning_rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay, fused=fused
    )
    if not matrices:
        return (adamw,)
    return torch.optim.Muon(
        matrices, lr=config.learning_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
    ), adamw


def _matrix(name: str) -> bool:
    """Whether it maps hidden rows to hidden rows."""
    return ".blocks." in name and name.endswith(("attn_qkv.weight", "attn_out.weight", "mlp.0.weight", "mlp.2.weight"))


def learning_rate(config: TrainConfig, step: int) -> float:
    """A linear rise over the warm-up, then constant, and a linear fall over the cool-down, where there is one."""
    rise = (step + 1) / max(1.0, config.warmup_ratio * config.steps)
    fall = (config.steps - step) / max(1.0, config.cooldown_ratio * config.steps)
    return config.learning_rate * min(1.0, rise, fall)


def optimizer_step(optimizers: Optimizers, rate: float) -> None:
    """One step along the gradients, which are gone after it."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def moments(optimizers: Optimizers, denoiser: Denoiser) -> dict[str, Tensor]:
    """What the optimisers remember of each weight, by its name."""
    names = {parameter: name for name, parameter in denoiser.named_parameters()}
    return {
        f"{names[parameter]}.{moment}": optimizer.state[parameter][moment]
        for optimizer in optimizers
        for parameter in optimizer.param_groups[0]["params"]
        for moment in MOMENTS[type(optimizer).__name__]
    }


def optimizer_state(optimizers: Optimizers, denoiser: Denoiser) -> dict[str, Tensor]:
    """The same, whole and on the host; every process must call this together."""
    return {name: full_tensor(tensor) for name, tensor in moments(optimizers, denoiser).items()}


def restore_optimizers(optimizers: Optimizers, denoiser: Denoiser, step: int, tensors: dict[str, Tensor]) -> None:
    """Go back to what was saved after `step` steps; even a forced resume needs the same optimisers."""
    names = {parameter: name for name, parameter in denoiser.named_parameters()}
    for optimizer in optimizers:
        fused = optimizer.defaults.get("fused")
        for parameter in optimizer.param_groups[0]["params"]:
            slots = {moment: torch.zeros_like(parameter) for moment in MOMENTS[type(optimizer).__name__]}
            for moment, slot in slots.items():
                if f"{names[parameter]}.{moment}" not in tensors:
                    raise ValueError(
                        f"the checkpoint has no {moment} of {names[parameter]}: it was trained with another "
                        "--optimizer; use that, or start a new --out from it with --init-from"
                    )
                load_full_tensor(slot, tensors[f"{names[parameter]}.{moment}"])
            if "exp_avg" in slots:  # AdamW counts its steps
                slots["step"] = torch.tensor(float(step), device=parameter.device if fused else "cpu")
            optimizer.state[parameter] = slots
