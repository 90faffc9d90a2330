"""Run the sampler that the settings name."""

from collections.abc import Iterator, Sequence

from jaxtyping import Bool
from torch import Tensor

from cdlm.process.process import Process
from cdlm.rng import Rng
from cdlm.sample.draw import State, make_draw
from cdlm.sample.logits import LogitsProcessor
from cdlm.sample.samplers import SAMPLERS, load_function
from cdlm.sample.settings import Settings
from cdlm.types import Predictor, Tokens


def generate(
    predict: Predictor,
    process: Process | None,
    x: Tokens,
    settings: Settings,
    rng: Rng,
    *,
    given: Bool[Tensor, "b l"] | None = None,
    start: float = 1.0,
    banned: Sequence[int] = (),
    logits_processors: Sequence[LogitsProcessor] = (),
    prompt: Bool[Tensor, "b l"] | None = None,
    special: Sequence[int] = (),
    compiled: bool = False,
    watch: bool = False,
) -> Iterator[State]:
    """Denoise x from time `start` on; yields the initial state and the state after each step.

    `settings` come from `resolve`. `given` positions keep their tokens (under masking, visible ones do anyway). Tokens
    in `banned` are never drawn. For the penalties, tokens at `prompt` positions were not sampled (by default those that
    x shows already, and of an autoregressive model those that are given), and tokens in `special` do not count.
    `compiled` is for networks that `accelerate` has compiled. With `watch`, states have
    the probability of each token (except for the naive sampler).
    """
    prompt = given if prompt is None and process is None else prompt
    draw = make_draw(
        predict, process, x, settings, banned=banned, processors=logits_processors, prompt=prompt, special=special,
        compiled=compiled, watch=watch,
    )  # fmt: skip
    sampler = load_function(SAMPLERS[settings.sampler].function)
    states: Iterator[State] = sampler(predict, process, x, settings, rng, given=given, start=start, draw=draw)
    return states
