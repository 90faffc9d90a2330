"""Speed for networks that only sample from now on: compiled blocks, and CUDA graphs, which replay work of fixed shapes
without a launch from the host for each kernel."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cdlm.model.denoiser import Denoiser

Forward = Callable[..., Tensor]
SHAPES = 16
"""Shapes of batches whose graphs are kept; beyond that the one unused longest goes."""


def recorded(work: Callable[[], None], device: torch.device, pool: Any = None) -> Callable[[], None]:
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
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph.replay


def accelerate(denoiser: Denoiser) -> None:
    """Compile a network, and record it where there is a GPU. Another shape of the batch is compiled and recorded anew.

    The head is padded to a multiple of 128 tokens: matrix units are several times slower on odd sizes such as GPT-2's
    50,257.
    """
    backbone, (weight, bias) = denoiser.dit, denoiser.dit.head
    padded = torch.nn.Linear(weight.shape[1], -(-len(weight) // 128) * 128, device=weight.device)
    padded = padded.to(weight.dtype).requires_grad_(False)
    padded.weight[: len(weight)], padded.bias[: len(bias)] = weight, bias
    backbone.output_layer.linear = padded
    if denoiser.process is None:
        for block in backbone.blocks:
            block.compile(dynamic=False)
        return
    plain = backbone.forward
    stem, tip = torch.compile(backbone.stem, dynamic=False), torch.compile(backbone.tip, dynamic=True)

    def compiled(x: Tensor, level: Tensor, rotary: tuple[Tensor, Tensor], rows: Tensor | None) -> Tensor:
        if x.shape[1] == 1:  # the one masked position that speaks for all is too small to compile
            return plain(x, level, rotary, rows)
        h, c = stem(x, level, rotary)
        return tip(h, c, rotary, rows)

    backbone.forward = _by_shape(compiled)  # type: ignore[method-assign]


def _by_shape(forward: Forward) -> Forward:
    """A network as graphs, one for each shape of its batch and rows. The next call overwrites the result."""
    known: dict[Any, tuple[list[Tensor], list[Tensor], Callable[[], None]]] = {}  # the last used last
    pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None

    def call(x: Tensor, level: Tensor, rotary: tuple[Tensor, Tensor], rows: Tensor | None = None) -> Tensor:
        inputs = [x, level] if rows is None else [x, level, rows]
        key = tuple(tensor.shape for tensor in inputs)
        if key not in known:
            fixed, found = [tensor.clone() for tensor in inputs], [level]

            def work() -> None:
                found[0] = forward(fixed[0], fixed[1], rotary, fixed[2] if len(fixed) > 2 else None)

            known[key] = fixed, found, recorded(work, x.device, pool)
            if len(known) > SHAPES:
                del known[next(iter(known))]
        known[key] = fixed, found, replay = known.pop(key)
        for own, tensor in zip(fixed, inputs, strict=True):
            own.copy_(tensor)
        replay()
        return found[0]

    return call
