"""A sampler from outside the package: ancestral steps, then the least probable tokens are masked and drawn again."""

import dataclasses

import torch

from cdlm.sample.ancestral import ancestral
from cdlm.sample.draw import make_draw
from cdlm.sample.samplers import SAMPLERS, SHAPING, Sampler

SHARE = 0.2
"""Of the tokens that were drawn, how many are drawn again."""


def first_steps(steps):
    """How many steps draw; the last quarter, at least one step, draws again."""
    return steps - max(1, steps // 4)


def least_probable(probs):
    """The SHARE least probable tokens of each row, at least one; NaN where nothing was drawn. Ties go to the left."""
    drawn = ~probs.isnan()
    count = (SHARE * drawn.sum(-1, keepdim=True)).round().clamp(min=1)
    rank = probs.masked_fill(~drawn, torch.inf).argsort(dim=-1, stable=True).argsort(-1)
    return (rank < count) & drawn


@torch.no_grad()
def refine(predict, process, x, settings, rng, *, given=None, start=1.0, draw=None):
    """Draw all tokens, mask those that were least probable when they were drawn, and draw them given all others."""
    if settings.steps < 2:
        raise ValueError(f"--sampler refine needs at least 2 steps (got {settings.steps}).")
    draw = draw or make_draw(predict, process, x, settings)
    watching, steps, first = dataclasses.replace(draw, watch=True), settings.steps, first_steps(settings.steps)

    def shown(state, done, nfe, probs):
        return dataclasses.replace(
            state, step=done + state.step, num_steps=steps, nfe=nfe, token_probs=probs if draw.watch else None
        )

    how = dataclasses.replace(settings, steps=first)
    for state in ancestral(predict, process, x, how, rng("first"), given=given, start=start, draw=watching):
        yield shown(state, 0, state.nfe, state.token_probs)

    done, nfe, probs = state.step, state.nfe, state.token_probs  # it may need fewer steps than it is given
    x = torch.where(least_probable(probs), process.vocab, state.x)
    masked_share = SHARE * (1 - process.noise.alpha(torch.tensor(start, dtype=torch.float64)))
    again = float(process.noise.inverse(1 - masked_share))
    how = dataclasses.replace(settings, steps=steps - first)
    states = ancestral(predict, process, x, how, rng("again"), given=given, start=again, draw=watching)
    next(states)  # the masked text is not a step
    for state in states:
        new = torch.where(state.token_probs.isnan(), probs, state.token_probs)
        yield shown(state, done, [a + b for a, b in zip(nfe, state.nfe, strict=True)], new)


SAMPLERS["refine"] = Sampler(
    refine,
    "ancestral steps, of which the last quarter draws the least probable fifth of the tokens again",
    "masked",
    ("steps", *SHAPING, "precision"),
    {"precision": ("fp64", "fp32")},
)

if __name__ == "__main__":
    from cdlm.__main__ import main

    main()
