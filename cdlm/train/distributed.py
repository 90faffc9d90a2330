"""Several processes: the rank of this one, how weights are sharded, and how full tensors are put together again.

`ddp` replicates the weights and averages gradients; `fsdp` (torch's `fully_shard`) splits weights, gradients and
optimizer state. Either way `full_tensor` gives ordinary tensors: a checkpoint does not know how many processes wrote
it.
"""

import dataclasses
import datetime
import os
import time
import uuid
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor

from cdlm.model.denoiser import Denoiser
from cdlm.model.dit import DiT
from cdlm.train.config import Parallel
from cdlm.types import Mixture, Time, Tokens

PATIENCE = datetime.timedelta(minutes=10)
"""How long to wait for a process that does not answer; one that is dead is noticed at once."""


@dataclasses.dataclass(frozen=True)
class World:
    """The rank of this process and their number; a single process unless torchrun started several."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def join(parallel: Parallel, device: torch.device) -> World:
    """Join the processes that torchrun started; alone, everything is a single process."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if parallel == "none":
        if size > 1:
            raise ValueError(f"torchrun started {size} processes; say how they share the work: --parallel ddp or fsdp")
        return World()
    if "RANK" not in os.environ:
        raise ValueError(f"--parallel {parallel} needs torchrun: torchrun --nproc_per_node 2 -m cdlm train ...")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            store, rank, size = next(rendezvous("env://", timeout=PATIENCE))
            store = _own(store, rank, size)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
        except RuntimeError as error:
            if not lost_contact(error):
                raise
            why = str(error).splitlines()[0][:200]
            raise ConnectionError(f"the {size} processes of this run do not find each other ({why})") from None
    return World(dist.get_rank(), dist.get_world_size())


def _own(store: dist.Store, rank: int, size: int) -> dist.Store:
    """A part of the store in which processes find each other, for this attempt alone.

    torchrun keeps one store over its restarts, where the addresses of the dead would mislead the living, and counts
    the restarts of each node apart. So the processes agree on a name: the first calls out a new one, the others answer
    with one of their own, and a call is the right one if its list of answers has theirs.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + PATIENCE.total_seconds()
    if rank == 0:
        store.set("call", mine)
        answers = [f"{mine}/{other}" for other in range(1, size)]
        store.wait(answers, PATIENCE)
        store.set(f"{mine}/list", b" ".join(map(store.get, answers)))
        return PrefixStore(mine, store)
    while time.monotonic() < deadline:
        call = store.get("call").decode()
        store.set(f"{call}/{rank}", mine)
        if store.check([f"{call}/list"]) and mine in store.get(f"{call}/list").decode():
            return PrefixStore(call, store)
        time.sleep(0.05)
    raise dist.DistStoreError(f"the first did not answer for {PATIENCE}")


def leave(together: bool) -> None:
    """Leave the other processes; at a regular end all wait for the last one, which may still be writing."""
    if dist.is_initialized():
        if together:
            dist.barrier()
        dist.destroy_process_group()


def shard_frozen(network: Denoiser, parallel: Parallel) -> None:
    """Split the weights of a network that does not train, as one piece: unsharded from `unshard` to `reshard`.

    How often it runs depends on the rows that a process happens to have, and gathering is a joint effort: so it is not
    gathered by running it.
    """
    if parallel == "fsdp":
        fully_shard(network, reshard_after_forward=False)


def unshard(network: Denoiser | None) -> None:
    """Hold the full weights of a sharded network until `reshard`; every process must call this together."""
    for module in _sharded(network):
        module.unshard()


def reshard(*networks: nn.Module | None) -> None:
    """Free the full weights, so that parameters are shards again."""
    for network in networks:
        for module in _sharded(network):
            module.reshard()


def _sharded(network: nn.Module | None) -> list[FSDPModule]:
    return [module for module in network.modules() if isinstance(module, FSDPModule)] if network is not None else []


class _Features(nn.Module):
    """`Denoiser.features` as the forward pass of a module, which is where DDP prepares the gradients of all weights."""

    def __init__(self, denoiser: Denoiser) -> None:
        super().__init__()
        self.denoiser, self.features = denoiser, denoiser.features

    def forward(self, x: Tokens | Mixture, alpha: Time, rows: Tensor | None = None) -> Tensor:
        return self.features(x, alpha, rows)


def parallelize(denoiser: Denoiser, parallel: Parallel) -> nn.Module:
    """Synchronise gradients when a loss is differentiated, by the forward pass `denoiser.features` from now on.

    Blocks of a `DiT` are sharded one by one, a network of the user's own as one piece. A loss runs `features` once,
    then reads the weights of the head: they are whole until its backward pass has ended. Returns the module that
    `set_gradient_sync` and `reshard` take.
    """
    if parallel == "fsdp":
        for block in denoiser.backbone.blocks if isinstance(denoiser.backbone, DiT) else ():
            fully_shard(block)
        fully_shard(denoiser, reshard_after_forward=False)
        register_fsdp_forward_method(denoiser, "features")
    if parallel == "ddp":
        replica = nn.parallel.DistributedDataParallel(_Features(denoiser))
        denoiser.features = replica.__call__  # type: ignore[method-assign]
        return replica
    return denoiser


def set_gradient_sync(module: nn.Module, last: bool) -> None:
    """Synchronise gradients on the last micro-batch only."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module.require_backward_grad_sync = last
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor on the host, whatever way it is held; every process must call this together."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True).contiguous()


@torch.no_grad()
def load_full_tensor(tensor: Tensor, value: Tensor) -> None:
    """Put a full tensor into one that may be sharded."""
    if isinstance(tensor, DTensor):
        value = distribute_tensor(value.to(tensor.device, tensor.dtype), tensor.device_mesh, tensor.placements)
    tensor.copy_(value)


def mean_over_ranks(values: Tensor, world: World) -> Tensor:
    """The mean over the processes."""
    if world.size > 1:
        dist.all_reduce(values)
        values = values / world.size
    return values


def any_rank(flag: bool, world: World, device: torch.device) -> bool:
    """Whether the flag is set on any rank."""
    if world.size == 1:
        return flag
    value = torch.tensor(float(flag), device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return bool(value.item())


def broadcast_from_rank_0(work: Callable[[], str | None], world: World) -> str | None:
    """What rank 0 finds, sent to all ranks; its error too, so that none waits for an answer."""
    if world.size == 1:
        return work()
    told: list[str | None] = [None, None]
    if world.is_main:
        try:
            told[0] = work()
        except (ValueError, OSError) as error:
            told[1] = str(error)
    dist.broadcast_object_list(told)
    if told[1] is not None:
        raise ValueError(told[1])
    return told[0]


def lost_contact(error: BaseException) -> bool:
    """Whether an error means that another process is gone; gloo's are plain RuntimeErrors that name their source."""
    words = str(error)
    return isinstance(error, dist.DistError) or any(mark in words for mark in ("gloo", "NCCL", "peer"))
