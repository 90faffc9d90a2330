"""The exact distribution of a sampler, for spaces small enough to list: no histogram, no seed.

The reference of the two-moons example and an oracle of the tests; `process/exact.py` has the exact posterior.
"""

import functools
import itertools

import torch
from jaxtyping import Float
from torch import Tensor

from cdlm.model.denoiser import Denoiser
from cdlm.process.exact import listed
from cdlm.process.process import Posterior, Process, bridge_law, transition
from cdlm.types import LogLaw, Predictor, Tokens


def tabulate(denoiser: Denoiser, length: int) -> Predictor:
    """A network as a table over every state: one evaluation for each time (one in all, if it is not told the time)."""
    process = denoiser.process
    assert process is not None
    states, place = listed(process.states, length), process.states ** torch.arange(length - 1, -1, -1)

    @functools.lru_cache(maxsize=2)
    def table(t: float) -> Float[Tensor, "all l v"]:
        with torch.no_grad():
            return torch.cat([denoiser(part.to(denoiser.device), t).cpu().double() for part in states.split(4096)])

    def predict(x_t: Tokens, t: float) -> LogLaw:
        at = float(t) if denoiser.time_conditioning else 1.0
        return table(at)[(x_t.cpu() * place).sum(-1)].to(x_t.device)

    return predict


def ancestral_law(
    predict: Predictor,
    process: Process,
    length: int,
    grid: Float[Tensor, "n"],
    how: Posterior = "plug-in",
    chunk: int = 4096,
) -> Float[Tensor, "all"]:
    """The law over all v^l sequences that ancestral sampling draws from, hop by hop over every state."""
    states = listed(process.states, length)
    law = torch.ones(1, dtype=torch.float64)
    for _ in range(length):
        law = torch.outer(law, process.prior).flatten()
    times = grid.tolist()
    for t, s in itertools.pairwise(times):
        alive = law.nonzero()[:, 0]
        after = torch.zeros_like(law)
        for part in alive.split(chunk):
            after += _hop(law[part], _kernel(predict, process, states[part], s, t, how))
        law = after
    clean = (states < process.vocab).all(-1)
    return law[clean]


def _kernel(
    predict: Predictor, process: Process, x: Tokens, s: float, t: float, how: Posterior
) -> Float[Tensor, "b l k"]:
    """The law of each x_s^i given x_t over the k states: the plug-in posterior, or the mixture of exact bridges."""
    with torch.no_grad():
        clean = predict(x, t).cpu().double().exp()
    q_s, q_ts = transition(process, 0.0, s), transition(process, s, t)
    if how == "mixture":
        onehot = torch.eye(process.vocab, process.states, dtype=torch.float64).expand(*x.shape, -1, -1)
        bridges = bridge_law(onehot, x[..., None].expand(*x.shape, process.vocab), q_s, q_ts)
        return torch.einsum("blv,blvk->blk", clean, bridges.nan_to_num(0.0))
    return bridge_law(torch.nn.functional.pad(clean, (0, process.states - process.vocab)), x, q_s, q_ts)


def _hop(weight: Float[Tensor, "b"], kernel: Float[Tensor, "b l k"]) -> Float[Tensor, "all"]:
    """Push a weighted set of states through a kernel that is independent over positions, expanding one at a time."""
    source, target = torch.arange(len(weight)), torch.zeros(len(weight), dtype=torch.long)
    for i in range(kernel.shape[1]):
        branch = kernel[source, i]
        entry, value = branch.nonzero(as_tuple=True)
        weight = weight[entry] * branch[entry, value]
        source, target = source[entry], target[entry] * kernel.shape[2] + value
    return torch.zeros(kernel.shape[2] ** kernel.shape[1], dtype=torch.float64).index_add_(0, target, weight)
