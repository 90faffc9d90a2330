"""The negative evidence lower bound of a model on data, in nats per token; exact for an autoregressive one."""

from collections.abc import Iterable

import torch

from cdlm.methods import METHODS
from cdlm.model.denoiser import Denoiser
from cdlm.rng import seeded
from cdlm.types import Tokens


@torch.no_grad()
def nelbo(denoiser: Denoiser, batches: Iterable[tuple[int, Tokens]], seed: int = 0, rows: int = 64) -> float:
    """The mean over numbered batches, one stratified time a sequence, `rows` sequences at a time.

    A batch's noise depends on its number and size alone, not on how it is cut.
    """
    row = "ar" if denoiser.process is None else "mdlm" if denoiser.process.name == "masked" else "udlm"
    objective = METHODS[row](denoiser.process, total=1)
    total, count = 0.0, 0
    for number, x0 in batches:
        for part in torch.arange(len(x0)).split(rows):
            rng = seeded(seed, "nelbo", number, batch=len(x0), rows=part)
            loss = objective.loss(denoiser, None, x0[part.to(x0.device)], 0, rng).total
            total, count = total + loss.item() * len(part), count + len(part)
    return total / count
