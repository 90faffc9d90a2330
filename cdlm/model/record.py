"""CUDA graphs: work of fixed shapes is recorded once and replayed, without a launch from the host for each kernel."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cdlm.model.denoiser import Denoiser

Stem = Callable[..., tuple[Tensor, Tensor | None]]


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

    For one shape of the batch at a time: another shape is compiled and recorded anew. The head is padded to a multiple
    of 128 tokens: matrix units are several times slower on odd sizes such as GPT-2's 50,257.
    """
    head = denoiser.backbone.output_layer.linear
    padded = torch.nn.Linear(head.in_features, -(-head.out_features // 128) * 128, device=head.weight.device)
    padded = padded.to(head.weight.dtype).requires_grad_(False)
    padded.weight[: head.out_features], padded.bias[: head.out_features] = head.weight, head.bias
    denoiser.backbone.output_layer.linear = padded
    backbone = denoiser.backbone
    if denoiser.process is None:
        for block in backbone.blocks:
            block.compile(dynamic=False)
        return
    stem, tip = backbone.stem, backbone.tip
    recorded_stem, compiled_tip = _by_shape(stem), torch.compile(tip, dynamic=True)

    def any_tip(h: Tensor, *rest: Any) -> Tensor:
        return (tip if h.shape[1] == 1 else compiled_tip)(h, *rest)

    backbone.stem, backbone.tip = recorded_stem, any_tip  # type: ignore[method-assign,assignment]


def _by_shape(stem: Stem) -> Stem:
    """The first blocks, compiled, as graphs, one for each shape that they meet. The next call overwrites the result."""
    known: dict[torch.Size, tuple[Tensor, Tensor, list[Any], Callable[[], None]]] = {}
    compiled = torch.compile(stem, dynamic=False)

    def call(x: Tensor, level: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        if x.shape not in known:
            tokens, levels = x.clone(), level.clone()
            chosen = stem if x.shape[1] == 1 else compiled  # one masked position for all is too small to compile
            found: list[Any] = [None]

            def work() -> None:
                found[0] = chosen(tokens, levels, rotary)

            known[x.shape] = tokens, levels, found, recorded(work, x.device)
        tokens, levels, found, replay = known[x.shape]
        tokens.copy_(x)
        levels.copy_(level)
        replay()
        return found[0]

    return call
