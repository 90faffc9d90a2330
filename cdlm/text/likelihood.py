"""What a model says of given tokens: log-likelihoods, or bounds on them, with their Monte Carlo error.

The bound itself is in `cdlm/metrics/conditional.py`. Here texts become sequences of which some tokens are scored, the
sequences are computed in batches, and their values are added up.
"""

import collections
import dataclasses
import math
from collections.abc import Hashable, Iterable, Sequence

import torch
from jaxtyping import Float
from rich.console import Console
from rich.progress import track
from torch import Tensor

from cdlm.data.tokenizer import Tokenizer
from cdlm.metrics.conditional import exact_log_likelihood, likelihood_rng, noise_row, repeated_bound
from cdlm.model.denoiser import Denoiser
from cdlm.text.template import Span

LIKELIHOOD_SAMPLES = 32
"""Noise levels for each sequence."""


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """The log-likelihood of a text, or of a part of it; for a diffusion model a lower bound."""

    log_likelihood: float
    """In nats: exact for an autoregressive model, otherwise a Monte Carlo estimate of a lower bound (minus the
    NELBO)."""
    standard_error: float
    """The Monte Carlo standard error of `log_likelihood`; 0 if it is exact."""
    num_tokens: int
    """Scored tokens."""
    num_bytes: int
    """UTF-8 bytes of the scored text."""
    exact: bool
    """Whether this is the log-likelihood itself."""

    @property
    def nats_per_token(self) -> float:
        """The negative log-likelihood, or the NELBO, per token; NaN without tokens."""
        return _ratio(-self.log_likelihood, self.num_tokens)

    @property
    def nats_per_token_error(self) -> float:
        """The standard error of `nats_per_token`."""
        return _ratio(self.standard_error, self.num_tokens)

    @property
    def bits_per_byte(self) -> float:
        """The negative log-likelihood, or the NELBO, in bits per byte: independent of the tokenizer."""
        return _ratio(-self.log_likelihood / math.log(2), self.num_bytes)

    @property
    def bits_per_byte_error(self) -> float:
        """The standard error of `bits_per_byte`."""
        return _ratio(self.standard_error / math.log(2), self.num_bytes)

    @property
    def perplexity(self) -> float:
        """exp(nats_per_token); an upper bound unless it is exact."""
        return math.exp(self.nats_per_token)


@dataclasses.dataclass(frozen=True)
class CorpusLikelihood(Likelihood):
    """The sum over some texts, and each of them."""

    per_text: list[Likelihood] = dataclasses.field(repr=False)
    """One for each text, in their order."""


@dataclasses.dataclass(frozen=True)
class ScoredSequence:
    """A sequence for the network, of which some tokens are scored; all others are context."""

    token_ids: list[int]
    spans: list[Span]
    """Where the scored tokens begin and end."""
    noise_row: int
    """Where its noise comes from."""

    @property
    def num_scored(self) -> int:
        return sum(end - begin for begin, end in self.spans)

    @staticmethod
    def of(token_ids: list[int], spans: list[Span], prefix: int = 0, suffix: int = 0) -> "ScoredSequence":
        """With the noise of its context: alternatives for the same spans share theirs, so that their difference varies
        less than they do. The first `prefix` and the last `suffix` tokens are not part of the text."""
        scored = {place for begin, end in spans for place in range(begin, end)}
        places = range(prefix, len(token_ids) - suffix)
        context = [token_ids[place] for place in places if place not in scored]
        own = [token_ids[place] for place in places if place in scored]
        return ScoredSequence(token_ids, spans, noise_row(context or own))


def split_into_blocks(
    context: list[int], token_ids: list[int], prefix: list[int], max_length: int, suffix: Sequence[int] = ()
) -> list[ScoredSequence]:
    """Sequences of at most `max_length` tokens, between `prefix` and `suffix`, that score `token_ids` behind a context.

    The first ones stand alone; the last one sees as much of what precedes it as fits.
    """
    text, room = context + token_ids, max_length - len(prefix) - len(suffix)
    blocks = []
    for begin in range(len(context), len(text), room):
        end = min(begin + room, len(text))
        ids = prefix + text[max(0, end - room) : end]
        scored = [(len(ids) - (end - begin), len(ids))]
        blocks.append(ScoredSequence.of([*ids, *suffix], scored, len(prefix), len(suffix)))
    return blocks


def score_texts(
    denoiser: Denoiser,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    frame: tuple[list[int], list[int]],
    max_length: int,
    likelihood_samples: int,
    seed: int,
    batch_size: int,
    progress: bool,
) -> CorpusLikelihood:
    """The log-likelihood of texts, or a lower bound, in blocks of at most `max_length` tokens with a `frame` around
    them."""
    counts = collections.Counter(texts)  # a text that is repeated has one estimate, and its error counts as often
    distinct = list(counts)
    token_ids = [ids.tolist() for ids in tokenizer.encode_batch(distinct)]
    prefix, suffix = frame
    blocks = [
        (k, block)
        for k, ids in enumerate(token_ids)
        for block in split_into_blocks([], ids, prefix, max_length, suffix)
    ]
    sequences = [block for _, block in blocks]
    scores = score_sequences(denoiser, sequences, likelihood_samples, seed, batch_size, progress)
    totals, variances = [0.0] * len(distinct), [0.0] * len(distinct)
    for (k, _), (value, error) in zip(blocks, scores, strict=True):
        totals[k] += value
        variances[k] += error**2
    exact = denoiser.process is None
    found = {
        text: Likelihood(totals[k], math.sqrt(variances[k]), len(token_ids[k]), num_bytes(text), exact)
        for k, text in enumerate(distinct)
    }
    per_text = [found[text] for text in texts]
    return CorpusLikelihood(
        log_likelihood=math.fsum(one.log_likelihood for one in per_text),
        standard_error=math.hypot(*(count * found[text].standard_error for text, count in counts.items())),
        num_tokens=sum(one.num_tokens for one in per_text),
        num_bytes=sum(one.num_bytes for one in per_text),
        exact=exact,
        per_text=per_text,
    )


def score_sequences(
    denoiser: Denoiser,
    sequences: Sequence[ScoredSequence],
    likelihood_samples: int,
    seed: int,
    batch_size: int,
    progress: bool,
) -> list[tuple[float, float]]:
    """The log-likelihood of the scored tokens of each sequence given its context, or a lower bound; and its error.

    A value depends on the seed and its own sequence alone. `batch_size` sequences go through the network at a time.
    """
    process = denoiser.process
    order = sorted(range(len(sequences)), key=lambda k: len(sequences[k].token_ids))
    kinds: list[tuple[int, int]] = []
    for sequence in (sequences[k] for k in order):
        if process is None:
            kinds.append((0, 1))  # a causal network takes sequences of several lengths, padded
        else:
            single = process.absorbing and sequence.num_scored == 1  # nothing is random
            kinds.append((len(sequence.token_ids), 1 if single else likelihood_samples))
    scores = [(0.0, 0.0)] * len(sequences)
    for part in with_progress(batches_of(kinds, batch_size), "scoring", progress):
        rows = [order[k] for k in part]
        estimates = _estimates(denoiser, [sequences[k] for k in rows], kinds[part[0]][1], seed, batch_size)
        for k, values in zip(rows, estimates, strict=True):
            scores[k] = (float(values.mean()), standard_error(values))
    return scores


def scored_batch(denoiser: Denoiser, sequences: Sequence[ScoredSequence]) -> tuple[Tensor, Tensor]:
    """The tokens of some sequences on the device of the network, and which of them are scored, on the host.

    Shorter sequences are padded at the end, which only a causal network does not see.
    """
    length = max(len(sequence.token_ids) for sequence in sequences)
    rows = [sequence.token_ids + [0] * (length - len(sequence.token_ids)) for sequence in sequences]
    scored = torch.zeros(len(sequences), length, dtype=torch.bool)
    for k, sequence in enumerate(sequences):
        for begin, end in sequence.spans:
            scored[k, begin:end] = True
    return torch.tensor(rows, device=denoiser.device), scored


def standard_error(estimates: Float[Tensor, "n"]) -> float:
    """The standard error of the mean of estimates, one from each of n strata in order; 0 for a single, exact value.

    Neighbouring strata are taken in pairs ("collapsed strata"): (x_1 - x_2)^2 has the variances of both as its mean,
    plus the squared difference of their means, which is small. The spread over all strata is no error.
    """
    n = len(estimates)
    if n == 1:
        return 0.0
    pairs = estimates[: n // 2 * 2].view(-1, 2).diff().square().sum()
    left_over = estimates[-2:].diff().square().sum() / 2 if n % 2 else torch.zeros(())
    return float((pairs + left_over).sqrt() / n)


def batches_of(kinds: Sequence[Hashable], batch_size: int) -> list[list[int]]:
    """The numbers of items of one kind, at most `batch_size` together."""
    alike: dict[Hashable, list[int]] = {}
    for number, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(number)
    return [numbers[k : k + batch_size] for numbers in alike.values() for k in range(0, len(numbers), batch_size)]


def with_progress(batches: list[list[int]], description: str, show: bool = True) -> Iterable[list[int]]:
    """With a progress bar, if there are several batches and standard error is a terminal."""
    console = Console(stderr=True)
    disable = not (show and len(batches) > 1 and console.is_terminal)
    return track(batches, description, console=console, transient=True, disable=disable)


def _estimates(
    denoiser: Denoiser, sequences: Sequence[ScoredSequence], likelihood_samples: int, seed: int, batch_size: int
) -> Float[Tensor, "b samples"]:
    x0, scored = scored_batch(denoiser, sequences)
    if denoiser.process is None:
        return exact_log_likelihood(denoiser, x0, scored)[0][:, None]
    rng = likelihood_rng(seed, [sequence.noise_row for sequence in sequences])
    return repeated_bound(denoiser, x0, scored, rng, likelihood_samples, batch_size)


def num_bytes(text: str) -> int:
    """The length of a text in UTF-8."""
    return len(text.encode("utf-8", "surrogateescape"))


def _ratio(value: float, count: int) -> float:
    return value / count if count else math.nan
