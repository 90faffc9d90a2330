"""The published sampler, kept as it is: the dense posterior, and a race over the whole vocabulary at every position.

In double precision it draws from the distribution of `ancestral`, which is its faster equal. In single precision it
does not: uniforms of 24 bits cannot make the rare large scores by which an unlikely state wins the race, the mask's
competitors among them, and samples come out sharper the more steps there are. The FP32 tables of the field rest on this
artefact; `--precision naive-fp32` reproduces it.
"""

import itertools
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cdlm.process.process import Process
from cdlm.rng import Rng
from cdlm.sample.draw import Draw, State, make_draw, trunk_and_head
from cdlm.sample.logits import LogitsRows
from cdlm.sample.settings import Settings
from cdlm.sample.timesteps import timesteps
from cdlm.types import LogLaw, Predictor, Tokens


@torch.no_grad()
def naive_ancestral(
    predict: Predictor,
    process: Process,
    x: Tokens,
    settings: Settings,
    rng: Rng,
    *,
    given: Bool[Tensor, "b l"] | None = None,
    start: float = 1.0,
    draw: Draw | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[State]:
    """argmax_j p_j / (1e-10 - log(u_j + 1e-10)) over the plug-in posterior of every position, in every step."""
    draw = draw or make_draw(predict, process, x, settings)
    trunk, head = trunk_and_head(predict, process)
    free = torch.ones_like(x, dtype=torch.bool) if given is None else ~given
    index = torch.arange(x.numel(), device=x.device)
    times = timesteps(settings, start).tolist()
    times += [0.0] if settings.final_step == "sample" else []
    times += [-1.0] if settings.final_step == "argmax" else []
    num_steps = len(times) - 1
    yield State(x, 0, num_steps, [0] * len(x))
    for step, (t, s) in enumerate(itertools.pairwise(times), 1):
        t_column = torch.full((len(x),), t, dtype=torch.float64, device=x.device)
        logits = head(trunk(x, t_column))
        rows = LogitsRows(t_column.repeat_interleave(x.shape[1]), x, index)
        logits = draw.process(logits.flatten(0, 1), rows).view_as(logits)
        log_probs = logits.to(torch.promote_types(dtype, torch.float32)).log_softmax(-1)
        new = (
            log_probs.argmax(-1)
            if s < 0
            else gumbel_race(dense_posterior(log_probs, process, x, s, t), rng("hop", step - 1))
        )
        x = torch.where(free & process.positions(x), new, x)
        yield State(x, step, num_steps, [step] * len(x))


def dense_posterior(
    log_probs: LogLaw, process: Process, x_t: Tokens, s: float, t: float
) -> Float[Tensor, "b l states"]:
    """Lemma 3.1 with the prediction in the place of x_0, over all states; in its precision. Not normalised."""
    a_s, a_t = process.noise.alpha(torch.tensor([s, t], dtype=torch.float64)).tolist()
    a_ts = a_t / a_s
    pi, prior = process.pi(x_t).to(log_probs.dtype)[..., None], process.prior.to(log_probs)
    clean = log_probs.exp()
    stay = clean.gather(-1, x_t.clamp(max=process.vocab - 1)[..., None]) * (x_t < process.vocab)[..., None]
    posterior = torch.nn.functional.pad(a_s * (1 - a_ts) * pi * clean, (0, process.states - process.vocab))
    posterior += (1 - a_s) * (1 - a_ts) * pi * prior
    return posterior.scatter_add_(-1, x_t[..., None], a_ts * (a_s * stay + (1 - a_s) * pi))


def gumbel_race(probs: Float[Tensor, "b l states"], rng: Rng) -> Tokens:
    """Uniforms from torch's own generator, one for each sequence, as the published code draws them."""
    u = torch.empty_like(probs)
    generator = torch.Generator(probs.device)
    for row, seed in zip(u, rng.integers(1, 2**52)[:, 0].tolist(), strict=True):
        row.uniform_(generator=generator.manual_seed(seed))
    return (probs / (1e-10 - (u + 1e-10).log())).argmax(-1)
