"""The exact posterior by enumeration, for spaces small enough to list.

The reference of the two-moons example and an oracle of the tests; `sample/exact.py` has the exact distribution of a
sampler.
"""

import functools

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cdlm.process.process import Process, transition
from cdlm.types import LogLaw, Predictor, Tokens


def listed(values: int, length: int) -> Int[Tensor, "all length"]:
    """Every sequence of the given length, in the order of its digits: row k is k written in base `values`."""
    place = values ** torch.arange(length - 1, -1, -1)
    return torch.arange(values**length)[:, None] // place % values


def posterior(law: Float[Tensor, "all"], process: Process, length: int, leave_one_out: bool = False) -> Predictor:
    """f*(x_t, t)_i = p(x_0^i | x_t), the Bayes predictor of Prop. 3.4, for a law over all v^l sequences.

    `leave_one_out` gives p(x_0^i | x_t without position i) instead, the minimiser of `rate_kl` (docs/choices.md);
    under masking the two agree wherever the loss looks. Impossible states get the law of a
    vanishing uniform mixture.
    """
    joint = (law + 1e-30).view((process.vocab,) * length)
    place = process.states ** torch.arange(length - 1, -1, -1)

    @functools.lru_cache(maxsize=2)
    def table(t: float) -> Float[Tensor, "all l v"]:
        """The prediction at every state: the joint law pushed through the noise along all axes but one."""
        level = transition(process, 0.0, t)[: process.vocab]
        rows = []
        for i in range(length):
            pushed = joint
            for j in range(length):
                if j != i:
                    pushed = torch.tensordot(pushed, level, ([j], [0])).movedim(-1, j)
            pushed = pushed.movedim(i, -1).unsqueeze(i)  # [..., one at axis i, ..., v]
            seen = torch.ones_like(level.T) if leave_one_out else level.T
            weight = pushed * seen.view((1,) * i + (process.states,) + (1,) * (length - 1 - i) + (process.vocab,))
            rows.append((weight / weight.sum(-1, keepdim=True)).reshape(-1, process.vocab))
        return torch.stack(rows, 1).log()

    def predict(x_t: Tokens, t: float) -> LogLaw:
        return table(float(t))[(x_t.cpu() * place).sum(-1)].to(x_t.device)

    return predict
