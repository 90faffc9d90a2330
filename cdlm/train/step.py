"""What learns: the networks and the optimiser of a run, and the step that moves them."""

import dataclasses
from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from cdlm.devices import autocast
from cdlm.model.denoiser import Denoiser
from cdlm.model.ema import frozen_copy, local, update
from cdlm.objective import Objective
from cdlm.rng import seeded
from cdlm.schedules import ema_decay
from cdlm.train.config import TrainConfig
from cdlm.train.distributed import (
    World,
    full_tensor,
    load_full_tensor,
    parallelize,
    reshard,
    set_gradient_sync,
    shard_frozen,
    unshard,
)
from cdlm.train.optim import (
    Optimizers,
    learning_rate,
    make_optimizers,
    moments,
    optimizer_state,
    optimizer_step,
    restore_optimizers,
)
from cdlm.types import Tokens

Batches = Callable[[int, Int[Tensor, "b"]], Tokens]
"""The rows of the global batch of a step, as tokens: a pure function of both."""


@dataclasses.dataclass(frozen=True)
class Learner:
    """The state of training: online, target and EMA weights, and the state of the optimizers."""

    config: TrainConfig
    objective: Objective
    denoiser: Denoiser
    target: Denoiser | None
    ema: Denoiser
    optimizers: Optimizers
    module: torch.nn.Module
    world: World

    def state(self) -> dict[str, dict[str, Tensor]]:
        """All tensors, whole and on the host; every process must call this together."""
        reshard(self.module, self.ema, self.target)
        parts = {"model": self.ema, "online": self.denoiser, "target": self.target}
        state = {
            part: {name: full_tensor(tensor) for name, tensor in network.state_dict().items()}
            for part, network in parts.items()
            if network is not None
        }
        if self.denoiser.process is not None:
            state["model"]["prior"] = self.denoiser.process.prior.cpu()
        state["optimizer"] = optimizer_state(self.optimizers, self.denoiser)
        return state

    def non_finite(self) -> list[str]:
        """The tensors held by this process that are not finite numbers throughout, by part and name."""
        parts = {"EMA": self.ema, "online": self.denoiser, "target": self.target}
        held = {
            f"{part} {name}": tensor
            for part, network in parts.items()
            if network is not None
            for name, tensor in network.state_dict().items()
        }
        held |= {f"optimizer {name}": value for name, value in moments(self.optimizers, self.denoiser).items()}
        finite = torch.stack([torch.isfinite(local(tensor)).all() for tensor in held.values()]).tolist()
        return [name for name, fine in zip(held, finite, strict=True) if not fine]

    def restore(self, step: int, state: dict[str, dict[str, Tensor]]) -> None:
        """Go back to a saved state, after `step` steps."""
        for part, network in (("model", self.ema), ("online", self.denoiser), ("target", self.target)):
            if network is not None:
                for name, tensor in network.state_dict().items():
                    load_full_tensor(tensor, state[part][name])
        restore_optimizers(self.optimizers, self.denoiser, step, state["optimizer"])


def make_learner(config: TrainConfig, denoiser: Denoiser, objective: Objective, world: World) -> Learner:
    """Everything at its start: target network and EMA are copies of the network."""
    target = frozen_copy(denoiser) if objective.network is not None else None
    ema = frozen_copy(denoiser)
    for network in (denoiser, target):  # the EMA only validates, in shapes and a precision of its own
        if network is not None and config.compile:
            network.dit.compile()
    for network in (target, ema):
        if network is not None:
            shard_frozen(network, config.parallel)
    module = parallelize(denoiser.train(), config.parallel)
    if config.freeze_trunk:  # no dropout where nothing trains
        denoiser.backbone.eval()
    return Learner(config, objective, denoiser, target, ema, make_optimizers(config, denoiser), module, world)


def train_step(learner: Learner, batches: Batches, step: int) -> dict[str, Tensor]:
    """One step of the optimiser and of both averages; returns the loss, its terms and the gradient's norm."""
    config, world = learner.config, learner.world
    torch.manual_seed(seeded(config.seed, "dropout", step, world.rank, batch=1).key)
    parts = torch.arange(config.batch_size).view(world.size, config.grad_accum_steps, -1)[world.rank]
    seen: dict[str, list[Tensor]] = {}  # a term may have no row in a micro-batch
    unshard(learner.target)
    for micro, rows in enumerate(parts):
        set_gradient_sync(learner.module, last=micro == len(parts) - 1)
        rng = seeded(config.seed, "train", step, batch=config.batch_size, rows=rows)
        with autocast(learner.denoiser.device, config.dtype):
            loss = learner.objective.loss(learner.denoiser, learner.target, batches(step, rows), step, rng)
        (loss.total / len(parts)).backward()
        for name, value in {"loss": loss.total.detach(), **loss.terms}.items():
            seen.setdefault(name, []).append(value)
    reshard(learner.module, learner.target, learner.ema)
    for parameter in learner.denoiser.parameters():  # those of a custom network may be unused; resuming stays exact
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    norm = torch.nn.utils.clip_grad_norm_(learner.denoiser.parameters(), config.max_grad_norm)
    optimizer_step(learner.optimizers, learning_rate(config, step))
    if learner.target is not None:
        update(learner.target, learner.denoiser, learner.objective.lam(step))
    decay = ema_decay(config.ema_decay, step, config.steps, config.reference_steps)
    update(learner.ema, learner.denoiser, decay)
    means = {name: torch.stack(values).mean() for name, values in seen.items()}
    return {**means, "grad_norm": norm.full_tensor() if hasattr(norm, "full_tensor") else norm}
