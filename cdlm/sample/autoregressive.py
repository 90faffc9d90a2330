"""Sampling of the autoregressive baseline, one token after the other."""

import torch

from cdlm.model.denoiser import Denoiser
from cdlm.rng import Rng, categorical
from cdlm.types import Tokens


@torch.no_grad()
def autoregressive(denoiser: Denoiser, x: Tokens, length: int, rng: Rng) -> Tokens:
    """Continue the prompts x to `length` tokens, each drawn from the law of the next."""
    u = rng("next").uniform(length, x.device)
    while x.shape[1] < length:
        hidden = denoiser.features(x, torch.ones(len(x), dtype=torch.float64))
        law = denoiser.head(hidden[:, -1]).to(x.device)
        x = torch.cat([x, categorical(law, u[:, x.shape[1]])[:, None]], 1)
    return x
