"""A small network with random weights, none of them zero."""

from collections.abc import Callable

import pytest
import torch

from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.process import Process

VOCAB = 6


@pytest.fixture
def tiny() -> Callable[..., Denoiser]:
    def build(
        process: Process | None = None,
        *,
        causal: bool = False,
        time: bool = False,
        joint: bool = False,
        seed: int = 0,
    ) -> Denoiser:
        shape = NetworkConfig(
            hidden_size=16, num_layers=2, num_heads=2, cond_dim=8, dropout=0.0, time_conditioning=time, causal=causal,
            joint_layers=int(joint),
        )  # fmt: skip
        net = Denoiser(shape, process, vocab=VOCAB if process is None else None)
        torch.manual_seed(seed)
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter, 0, 0.3)
        return net.double()

    return build
