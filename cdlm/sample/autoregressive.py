"""Sampling of the autoregressive baseline, one token after the other, with a cache of keys and values."""

from collections.abc import Iterator

import torch

from cdlm.model.compile import recorded
from cdlm.model.denoiser import Denoiser
from cdlm.rng import Rng
from cdlm.sample.naive import raced
from cdlm.sample.plan import Drawing, State, picked
from cdlm.types import Tokens


@torch.no_grad()
def autoregressive(
    denoiser: Denoiser, x: Tokens, length: int, rng: Rng, drawing: Drawing | None = None, naive: bool = False
) -> Iterator[State]:
    """Continue the prompts x, at least one token each, to `length` tokens; yields a state after each token.

    A step reads and writes fixed tensors only, so that on a GPU it is recorded once and replayed. `naive` draws by the
    race in single precision.
    """
    drawing, (b, given) = drawing or Drawing(), x.shape
    text = torch.nn.functional.pad(x, (0, length - given))
    u = rng("next").uniform(length, x.device)
    past = denoiser.backbone.blank_past(b, length)
    if given > 1:
        denoiser.backbone.extend(x[:, :-1], torch.arange(given - 1, device=x.device), past)
    position = torch.full((1,), given - 1, device=x.device)
    chance = drawing.unknown(text)

    def step() -> None:
        hidden = denoiser.backbone.extend(text.index_select(1, position), position, past)
        said = denoiser.logits(hidden[:, 0])
        law = drawing.shape(said)
        if naive:
            token = raced(law.float().softmax(-1)[:, None], rng("race", int(position)))[:, 0]
        else:
            token = drawing.draw(law, u.index_select(1, position + 1)[:, 0])
        text.index_copy_(1, position + 1, token[:, None])
        if chance is not None:
            chance.index_copy_(1, position + 1, picked(said, token)[:, None])
        position.add_(1)

    if length - given > 8 and not naive:  # recording runs the step a few times
        step = recorded(step, x.device)
        position.fill_(given - 1)
    yield State(x, 0, length - given, [0] * b, drawing.unknown(x))
    for done in range(1, length - given + 1):
        step()
        seen = None if chance is None else chance[:, : given + done].clone()
        yield State(text[:, : given + done].clone(), done, length - given, [done] * b, seen)
