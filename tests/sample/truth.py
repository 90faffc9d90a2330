"""The law of a sampler, written out: every state of a tiny space, every hop a dense kernel.

Nothing here calls the formulas of `cdlm`: signal levels, forward kernels, bridges and reveal rates are spelled out once
more. `Table` is a network only in name.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn

from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.process import Cosine, Process, masked, uniform, unigram
from cdlm.sample.draw import State, last

from ..paper.enumeration import p_value

V, L = 3, 2
ALPHA = 1e-6
PRIORS = {
    "masked": masked(V),
    "uniform": uniform(V),
    "unigram": unigram(torch.tensor([0.5, 0.3, 0.2])),
    "mask and unigram": unigram(torch.tensor([0.2, 0.1, 0.3, 0.4]), V),
    "unigram with a zero": unigram(torch.tensor([0.6, 0.0, 0.4])),
}
Kernel = Callable[[Tensor, float, float], Tensor]
"""(x, t, s) to the law of each position of x_s given x_t = x, [n, l, states]."""


class Table(Denoiser):
    """A predictor of no process whatever: random logits for every state, moved by the signal level if `timed`.

    It poses as a network, so that sequences at different times are looked up at once; it counts the sequences.
    """

    position_invariant = False

    def __init__(self, process: Process, length: int = L, timed: bool = True, seed: int = 0) -> None:
        nn.Module.__init__(self)
        self.process, self.vocab, self.rows = process, process.vocab, 0
        generator = torch.Generator().manual_seed(seed)
        size = (process.states**length, length, process.vocab)
        self.base = 1.2 * torch.randn(size, generator=generator, dtype=torch.float64)
        self.slope = 1.5 * timed * torch.randn(size, generator=generator, dtype=torch.float64)

    def features(self, x: Tensor, alpha: Tensor, rows: Tensor | None = None) -> Tensor:
        self.rows += len(x)
        at = index(x, self.process.states)
        found = self.base[at] + alpha[:, None, None] * self.slope[at]
        return found if rows is None else found[torch.arange(len(x))[:, None], rows]

    def logits(self, rows: Tensor) -> Tensor:
        return rows

    def law(self, x: Tensor, t: float) -> Tensor:
        """The probabilities it predicts, without carry-over, [n, l, v]."""
        at = index(x, self.process.states)
        return (self.base[at] + level(self.process, t) * self.slope[at]).softmax(-1)

    def plain(self, x: Tensor, t: float) -> Tensor:
        """The same as an ordinary function of tokens and a time."""
        return self.law(x, t).log()


def tiny(process: Process | None, vocab: int = 7, seed: int = 0, **shape: int) -> Denoiser:
    """A network in double precision whose weights are random and large, so that it listens to what it sees."""
    sizes = {
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "cond_dim": 8,
        "dropout": 0.0,
        "causal": process is None,
    }
    net = Denoiser(NetworkConfig(**{**sizes, **shape}), process, vocab if process is None else None).double().eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        nn.init.normal_(parameter, 0, 0.7, generator=generator)
    return net


@contextlib.contextmanager
def along(times: Tensor) -> Iterator[None]:
    """Let samplers take steps at these times, whatever their settings say: also at times that no setting stands for."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("ancestral", "order", "confidence", "naive"):
            patch.setattr(f"cdlm.sample.{module}.timesteps", lambda settings, start=1.0: times)
        yield


def level(process: Process, t: float) -> float:
    """alpha(t) of the two schedules."""
    return 1 - (1 - 1e-3) * (math.sin(math.pi * t / 2) if isinstance(process.noise, Cosine) else t)


def sequences(states: int, length: int) -> Tensor:
    return torch.tensor(list(itertools.product(range(states), repeat=length)))


def index(x: Tensor, states: int) -> Tensor:
    """The place of each sequence in `sequences`."""
    return functools.reduce(lambda place, column: place * states + column, x.unbind(-1))


def forward(process: Process, s: float, t: float) -> Tensor:
    """q(x_t | x_s) of one position, rows to columns."""
    share = level(process, t) / level(process, s)
    return share * torch.eye(process.states, dtype=torch.float64) + (1 - share) * process.prior


def bridge(process: Process, clean: Tensor, x: Tensor, t: float, s: float, how: str) -> Tensor:
    """q(x_s | x_t, clean) by summing over x_0, with the law in its place or drawn from it, [n, l, states].

    A token that the prior cannot produce is clean, whatever the prediction says, and stays.
    """
    to_s, to_t, whole = forward(process, 0, s)[: process.vocab], forward(process, s, t), forward(process, 0, t)
    if how == "plug-in":
        joint = (clean @ to_s) * to_t.T[x]
        joint = joint / joint.sum(-1, keepdim=True)
    else:
        paths = to_s[:, :, None] * to_t[None]  # x_0, x_s, x_t
        paths = (paths / whole[: process.vocab, None]).nan_to_num(0.0).permute(2, 0, 1)
        joint = torch.einsum("nlv,nlvk->nlk", clean, paths[x])
    return torch.where((process.prior[x] > 0)[..., None], joint, onehot(x, process.states))


def onehot(x: Tensor, states: int) -> Tensor:
    return torch.nn.functional.one_hot(x, states).double()


def ancestor(process: Process, law: Callable[[Tensor, float], Tensor], how: str = "plug-in") -> Kernel:
    return lambda x, t, s: bridge(process, law(x, t), x, t, s, how)


def greedy(process: Process, law: Callable[[Tensor, float], Tensor]) -> Kernel:
    """The most likely token at every position that is still noisy, whatever s is."""

    def kernel(x: Tensor, t: float, s: float) -> Tensor:
        return onehot(torch.where(process.prior[x] > 0, law(x, t).argmax(-1), x), process.states)

    return kernel


def clamped(kernel: Kernel, given: Tensor) -> Kernel:
    """The same kernel, but `given` positions ([l]) keep their token."""
    return lambda x, t, s: torch.where(
        given[:, None], torch.eye(kernel(x, t, s).shape[-1], dtype=torch.float64)[x], kernel(x, t, s)
    )


def push(law: Tensor, process: Process, length: int, kernel: Kernel, t: float, s: float) -> Tensor:
    """One hop of a law over all sequences of states: sum over x of law[x] prod_i kernel[x, i, y_i]."""
    every = sequences(process.states, length)
    each = kernel(every, t, s)
    return law @ math.prod(each[:, i][:, every[:, i]] for i in range(length))


def composed(law: Tensor, process: Process, length: int, kernel: Kernel, grid: Iterable[float]) -> Tensor:
    """The law after all hops of a grid."""
    for t, s in itertools.pairwise([float(time) for time in grid]):
        law = push(law, process, length, kernel, t, s)
    return law


def noise(process: Process, length: int = L) -> Tensor:
    """The law of x_1: the prior at every position."""
    return functools.reduce(torch.kron, [process.prior] * length)


def point(x: Tensor, states: int) -> Tensor:
    """All mass on one sequence."""
    return onehot(index(x, states), states ** len(x))


def agrees(drawn: Tensor, law: Tensor, states: int) -> bool:
    """Chi-square of drawn sequences against a law over all sequences of states (rejects at p < 1e-6)."""
    assert abs(float(law.sum()) - 1) < 1e-9
    return p_value(torch.bincount(index(drawn, states), minlength=len(law)), law) > ALPHA


def text(states: Iterable[State]) -> Tensor:
    return last(states).x
