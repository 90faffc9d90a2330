"""CUDA graphs: work of fixed shapes is recorded once and replayed, without a launch from the host for each kernel."""

from collections.abc import Callable

import torch
from torch import Tensor

from cdlm.model.denoiser import Denoiser


def recorded(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The same work, which reads and writes fixed tensors; on a CUDA device as a graph. Runs it three times first."""
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def accelerate(denoiser: Denoiser) -> None:
    """Compile the blocks of a network that only samples from now on, and record it where there is a GPU.

    For one shape of the batch at a time: another shape is compiled and recorded anew.
    """
    for block in denoiser.backbone.blocks:
        block.compile()
    denoiser.backbone.forward = _by_shape(denoiser.backbone.forward)  # type: ignore[method-assign,assignment]


def _by_shape(forward: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of two tensors as graphs, one for each shape that it meets. The next call overwrites its result."""
    known: dict[torch.Size, tuple[Tensor, Tensor, list[Tensor], Callable[[], None]]] = {}

    def call(x: Tensor, level: Tensor) -> Tensor:
        if x.shape not in known:
            inputs, levels, found = x.clone(), level.clone(), [level]

            def work() -> None:
                found[0] = forward(inputs, levels)

            with torch.compiler.set_stance("force_eager" if x.shape[1] == 1 else "default"):
                known[x.shape] = inputs, levels, found, recorded(work, x.device)
        inputs, levels, found, replay = known[x.shape]
        inputs.copy_(x)
        levels.copy_(level)
        with torch.compiler.set_stance("force_eager" if x.shape[1] == 1 else "default"):
            replay()
        return found[0]

    return call
