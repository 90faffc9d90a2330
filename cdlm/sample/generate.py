"""Every sampler behind one signature: `Sampling` says how, `generate` does it."""

from collections.abc import Iterator

from jaxtyping import Bool
from torch import Tensor

from cdlm.process.process import Posterior, Process
from cdlm.rng import Rng
from cdlm.sample.ancestral import ancestral
from cdlm.sample.confidence import confident
from cdlm.sample.corrector import Corrector
from cdlm.sample.logits import Shape
from cdlm.sample.naive import race
from cdlm.sample.order import first_hitting, ordered
from cdlm.sample.plan import Drawing, State, blank_law
from cdlm.sample.settings import BOUND, ETA, STEPS, Sampling
from cdlm.sample.timesteps import NEAR_ZERO, Grid, cosine_grid, custom_grid, loop_grid, uniform_grid
from cdlm.types import Predictor, Tokens


def generate(
    predict: Predictor,
    process: Process,
    x: Tokens,
    sampling: Sampling,
    rng: Rng,
    posterior: Posterior = "plug-in",
    start: float = 1.0,
    given: Bool[Tensor, "b l"] | None = None,
    compiled: bool = False,
    without: tuple[int, ...] = (),
    watched: bool = False,
) -> Iterator[State]:
    """Denoise x from time `start` on; yields the start, and the state after each evaluation.

    `given` positions keep their tokens (under masking, visible ones do anyway). `compiled` is for
    networks that `accelerate` has compiled. Tokens of `without` are never drawn. If `watched`, states tell how probable
    each token was (but for naive-fp32).
    """
    sampling.check(process, posterior)
    posterior = posterior if sampling.posterior == "auto" else sampling.posterior
    if sampling.precision == "naive-fp32":
        grid = timesteps(sampling, start)
        return race(predict, process, x, grid, rng, "naive-fp32", shape(sampling, without), sampling.tail, given)
    blank = blank_law(predict, process, x) if sampling.guidance else None
    drawing = Drawing(shape(sampling, without), posterior, sampling.precision, compiled, watched, blank)
    if sampling.order == "first-hitting":
        return first_hitting(predict, process, x, rng, start, drawing, given)
    grid = timesteps(sampling, start)
    order = sampling.order
    if order == "probability" or order == "margin" or order == "entropy-bound":
        bound = BOUND if sampling.bound is None else sampling.bound
        return confident(predict, process, x, grid, rng, order, drawing, bound, given)
    if order != "random":
        return ordered(predict, process, x, grid, rng, order, drawing, sampling.tail, given)
    corrector = None
    if sampling.corrector != "none":
        corrector = Corrector(sampling.corrector, ETA if sampling.eta is None else sampling.eta)
    return ancestral(predict, process, x, grid, rng, drawing, sampling.tail, given, corrector)


def shape(sampling: Sampling, without: tuple[int, ...] = ()) -> Shape:
    """How the predicted distribution is sharpened; tokens of `without` are never drawn."""
    return Shape(sampling.temperature, sampling.top_k, sampling.top_p, without, sampling.guidance, sampling.cool)


def timesteps(sampling: Sampling, start: float = 1.0) -> Grid:
    """The times of the steps, from `start` to 0 or, before a tail, to just above it."""
    end, steps, times = 0.0 if sampling.tail == "none" else NEAR_ZERO, sampling.steps or STEPS, sampling.times()
    if times:
        return custom_grid(times, start, end)
    if sampling.corrector == "loop":
        return loop_grid(steps, start, end)
    return (cosine_grid if sampling.grid == "cosine" else uniform_grid)(steps, start, end)
