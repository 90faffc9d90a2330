"""Small networks with random weights, none of them zero."""

from collections.abc import Callable

import pytest
import torch

from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.process import Process

VOCAB = 7


@pytest.fixture
def tiny() -> Callable[..., Denoiser]:
    def build(process: Process | None = None, *, seed: int = 0, fresh: bool = False, **shape) -> Denoiser:
        sizes = {
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "cond_dim": 8,
            "dropout": 0.0,
            "causal": process is None,
        }
        net = Denoiser(NetworkConfig(**{**sizes, **shape}), process, vocab=VOCAB if process is None else None)
        torch.manual_seed(seed)
        if not fresh:
            for parameter in net.parameters():
                torch.nn.init.normal_(parameter, 0, 0.3)
        return net

    return build
