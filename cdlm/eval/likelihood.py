"""The negative evidence lower bound of a model on data, in nats per token; exact for an autoregressive one."""

from collections.abc import Iterable

import torch

from cdlm.methods import METHODS
from cdlm.model.denoiser import Denoiser
from cdlm.rng import seeded
from cdlm.types import Tokens


@torch.no_grad()
def nelbo(denoiser: Denoiser, batches: Iterable[tuple[int, Tokens]], seed: int = 0) -> float:
    """The mean over numbered batches, one stratified time a sequence; a batch's noise depends on its number alone."""
    row = "ar" if denoiser.process is None else "mdlm" if denoiser.process.name == "masked" else "udlm"
    objective = METHODS[row](denoiser.process, total=1)
    losses = [
        objective.loss(denoiser, None, x0, 0, seeded(seed, "nelbo", number, batch=len(x0))).total
        for number, x0 in batches
    ]
    return float(torch.stack(losses).double().mean())
