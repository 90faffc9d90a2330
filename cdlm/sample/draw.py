"""What samplers share: the states that they yield, and how a token is drawn from the logits of the network."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cdlm.model.denoiser import Denoiser, mean_law
from cdlm.model.dit import take_positions
from cdlm.process.process import Posterior, Process
from cdlm.rng import categorical
from cdlm.sample.logits import LogitsProcessor, LogitsRows, logits_processors
from cdlm.sample.settings import Settings
from cdlm.types import Index, LogLaw, Predictor, Time, Tokens, wide

Trunk = Callable[..., Tensor]
Head = Callable[[Tensor], LogLaw]

_ENTRIES = 2**26
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


@dataclasses.dataclass(frozen=True)
class State:
    """A batch of samples after some steps."""

    x: Tokens
    step: int
    """Steps done: 0 in the initial state, one more in each state that follows."""
    num_steps: int | None
    """The largest value that `step` may reach; None if it is not known."""
    nfe: list[int]
    """Network evaluations so far, for each sequence; without the unconditional one of guidance."""
    token_probs: Float[Tensor, "b l"] | None = None
    """The probability of each token under the network when it was drawn, if asked for; NaN where none was drawn."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """How tokens are drawn from logits."""

    processors: tuple[LogitsProcessor, ...] = ()
    posterior: Posterior = "plug-in"
    precision: str = "fp64"
    """fp64 or fp32: the precision in which the mass of the vocabulary is summed. Both draw from the same distribution:
    positions, uniforms and choices are double in either, and fp32 moves a probability by about one part in ten
    million."""
    compiled: bool = False
    """Draw with a compiled kernel, and run the whole batch in every evaluation, so that a compiled network sees one
    shape."""
    watch: bool = False
    """Keep the probability of every token that is drawn (`State.token_probs`), before any logits processor."""

    def process(self, logits: LogLaw, rows: LogitsRows) -> LogLaw:
        """The logits that tokens are drawn from."""
        for processor in self.processors:
            logits = processor(logits, rows)
        return logits

    def log_probs(self, predict: Predictor, process: Process, x: Tokens, t: float) -> LogLaw:
        """f(x_t, t) after the logits processors, at every position; known tokens stay certain."""
        prediction = predict(x, t)
        if not self.processors:
            return prediction
        times = torch.full((x.numel(),), t, dtype=wide(x.device), device=x.device)
        rows = LogitsRows(times, x, torch.arange(x.numel(), device=x.device))
        processed = self.process(prediction.flatten(0, 1), rows).log_softmax(-1).view_as(prediction)
        return torch.where(process.positions(x)[..., None], processed, prediction)

    def token(self, logits: LogLaw, u: Float[Tensor, "n"]) -> Index:
        """One token for each row, by one uniform each."""
        draw = _compiled_categorical() if self.compiled else categorical
        return draw(logits, u, _DTYPES[self.precision])

    def unknown_probs(self, x: Tokens) -> Float[Tensor, "b l"] | None:
        """The token probabilities of an initial state, of which nothing was drawn."""
        return torch.full(x.shape, torch.nan, device=x.device) if self.watch else None


def make_draw(
    predict: Predictor,
    process: Process | None,
    x: Tokens,
    settings: Settings,
    *,
    banned: Sequence[int] = (),
    processors: Sequence[LogitsProcessor] = (),
    prompt: Bool[Tensor, "b l"] | None = None,
    special: Sequence[int] = (),
    compiled: bool = False,
    watch: bool = False,
) -> Draw:
    """How the settings draw tokens. Tokens in `banned` are never drawn; `processors` of the caller act after guidance
    and before the temperature. For the penalties, tokens at `prompt` positions were not sampled (by default those that
    x shows already, and of an autoregressive model the first), and tokens in `special` do not count."""
    unconditional = None
    if (settings.guidance or settings.guidance_end) and process is not None:
        unconditional = unconditional_log_probs(predict, process, x)
    if prompt is None:
        first = torch.arange(x.shape[1], device=x.device) < 1
        prompt = first.expand_as(x) if process is None else x < process.vocab
    stages = logits_processors(settings, unconditional, tuple(banned), tuple(processors), prompt, tuple(special))
    posterior: Posterior = "mixture" if settings.posterior == "mixture" else "plug-in"
    return Draw(stages, posterior, settings.precision, compiled, watch)


@functools.cache
def _compiled_categorical() -> Callable[..., Index]:
    return torch.compile(categorical, dynamic=True)


def last(states: Iterable[State]) -> State:
    """The final state."""
    for final in collections.deque(states, maxlen=1):
        return final
    raise ValueError("the sampler yielded no state; it must yield the initial state and the state after each step.")


def writable(process: Process, x: Tokens, given: Bool[Tensor, "b l"] | None) -> Bool[Tensor, "b l"]:
    """Where a sampler may write: under masking the masks, else everywhere; but not at given positions."""
    free = process.positions(x) if process.absorbing else torch.ones_like(x, dtype=torch.bool)
    return free if given is None else free & ~given


def trunk_and_head(predict: Predictor, process: Process) -> tuple[Trunk, Head]:
    """A predictor in two parts: the head runs only where a token is drawn. An exact posterior is all trunk."""
    if isinstance(predict, Denoiser):
        return (lambda x, t, rows=None: predict.features(x, process.noise.alpha(t), rows)), predict.logits

    def log_probs(x: Tokens, t: Time, rows: Tensor | None = None) -> Tensor:
        order, parts = [], []
        for time in t.unique().tolist():
            order.append((t == time).nonzero()[:, 0])
            parts.append(predict(x[order[-1]], time))
        found = torch.cat(parts)[torch.cat(order).argsort()]
        return found if rows is None else take_positions(found, rows)

    return log_probs, lambda rows: rows


def same_at_all_positions(predict: Predictor, process: Process, x: Tokens) -> bool:
    """Whether one position speaks for all: rotary attention mixes the equal values of masks into the same value."""
    return isinstance(predict, Denoiser) and predict.position_invariant and bool((x == process.vocab).all())


@torch.no_grad()
def unconditional_log_probs(predict: Predictor, process: Process, like: Tokens) -> Float[Tensor, "v"]:
    """The unconditional prediction: the mean over the masks of an input in which only special tokens are visible."""
    trunk, head = trunk_and_head(predict, process)
    x = torch.where(process.is_special(like[:1]), like[:1], process.vocab)
    x = x[:, :1] if same_at_all_positions(predict, process, x) else x
    t = torch.ones(len(x), dtype=wide(x.device), device=x.device)
    hidden = trunk(x, t)[0]
    logits = head(hidden[x[0] == process.vocab] if process.special else hidden)
    return mean_law(logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1))


def row_chunks(rows: int, vocab: int) -> Iterator[slice]:
    """Some rows at a time: the logits of all of them at once may not fit in memory."""
    size = max(64, _ENTRIES // vocab)
    return (slice(first, first + size) for first in range(0, rows, size))


def token_probs(logits: LogLaw, token: Index) -> Float[Tensor, "n"]:
    """The probability of each token under logits or log-probabilities."""
    return logits.float().log_softmax(-1).gather(-1, token[:, None])[:, 0].exp()
