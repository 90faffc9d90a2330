"""The published sampler, kept as it is: the dense posterior, and a race over the whole vocabulary at every position.

In double precision it draws from the law of `ancestral`, which is its faster equal. In single precision it does not:
uniforms of 24 bits cannot make the rare large scores by which an unlikely state wins the race, the mask's competitors
among them, and samples come out sharper the more steps there are. The FP32 tables of the field rest on this artefact;
`naive-fp32` reproduces it.
"""

import itertools
from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cdlm.process.process import Process
from cdlm.rng import Rng
from cdlm.sample.logits import Shape
from cdlm.sample.plan import State, split
from cdlm.sample.settings import Tail
from cdlm.sample.timesteps import Grid
from cdlm.types import LogLaw, Predictor, Tokens

Naive = Literal["naive-fp32", "naive-fp64"]


@torch.no_grad()
def race(
    predict: Predictor,
    process: Process,
    x: Tokens,
    grid: Grid,
    rng: Rng,
    precision: Naive = "naive-fp32",
    shape: Shape | None = None,
    tail: Tail = "none",
    given: Bool[Tensor, "b l"] | None = None,
) -> Iterator[State]:
    """argmax_j p_j / (1e-10 - log(u_j + 1e-10)) over the plug-in posterior of every position, hop by hop."""
    shape, dtype = shape or Shape(), torch.float32 if precision == "naive-fp32" else torch.float64
    trunk, logits = split(predict, process)
    free = torch.ones_like(x, dtype=torch.bool) if given is None else ~given
    times = [*grid.tolist(), *([0.0] if tail == "sample" else [])]
    hops = len(times) - 1 + (tail == "argmax")
    evaluations = [0] * len(x)
    yield State(x, 0, hops, evaluations)
    for hop, (t, s) in enumerate(itertools.pairwise([*times, *([-1.0] if tail == "argmax" else [])])):
        evaluations = [done + 1 for done in evaluations]
        clock = torch.full((len(x),), t, dtype=torch.float64, device=x.device)
        law = shape(logits(trunk(x, clock))).to(torch.promote_types(dtype, torch.float32)).log_softmax(-1)
        new = law.argmax(-1) if s < 0 else raced(dense(law, process, x, s, t), rng("hop", hop))
        x = torch.where(free & process.positions(x), new, x)
        yield State(x, hop + 1, hops, evaluations)


def dense(law: LogLaw, process: Process, x_t: Tokens, s: float, t: float) -> Float[Tensor, "b l states"]:
    """Lemma 3.1 with the law in the place of x_0, over all states; in the precision of the law. Not normalised."""
    a_s, a_t = process.noise.alpha(torch.tensor([s, t], dtype=torch.float64)).tolist()
    a_ts = a_t / a_s
    pi, prior = process.pi(x_t).to(law.dtype)[..., None], process.prior.to(law)
    clean = law.exp()
    stay = clean.gather(-1, x_t.clamp(max=process.vocab - 1)[..., None]) * (x_t < process.vocab)[..., None]
    posterior = torch.nn.functional.pad(a_s * (1 - a_ts) * pi * clean, (0, process.states - process.vocab))
    posterior += (1 - a_s) * (1 - a_ts) * pi * prior
    return posterior.scatter_add_(-1, x_t[..., None], a_ts * (a_s * stay + (1 - a_s) * pi))


def raced(law: Float[Tensor, "b l states"], rng: Rng) -> Tokens:
    """Uniforms from torch's own generator, one for each sequence, as the published code draws them."""
    u = torch.empty_like(law)
    generator = torch.Generator(law.device)
    for row, seed in zip(u, rng.integers(1, 2**52)[:, 0].tolist(), strict=True):
        row.uniform_(generator=generator.manual_seed(seed))
    return (law / (1e-10 - (u + 1e-10).log())).argmax(-1)
