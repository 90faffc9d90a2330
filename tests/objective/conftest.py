"""A small network with random weights, none of them zero."""

from collections.abc import Callable

import pytest
import torch

from cdlm.model.architecture import Architecture
from cdlm.model.denoiser import Denoiser
from cdlm.process import Process

VOCAB = 6


@pytest.fixture
def tiny() -> Callable[..., Denoiser]:
    def build(process: Process | None = None, *, causal: bool = False, time: bool = False, seed: int = 0) -> Denoiser:
        shape = Architecture(hidden=16, blocks=2, heads=2, cond=8, dropout=0.0, time_conditioning=time, causal=causal)
        net = Denoiser(shape, process, vocab=VOCAB if process is None else None)
        torch.manual_seed(seed)
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter, 0, 0.3)
        return net.double()

    return build
