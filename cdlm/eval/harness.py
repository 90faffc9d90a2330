"""An adapter for the lm-evaluation-harness: its tasks, for every model of this package.

    python -m cdlm.eval.harness run --model cdlm --model_args pretrained=runs/mcdlm --tasks hellaswag

is the harness's own command line, with `cdlm` among its models. An autoregressive model is scored exactly, a diffusion
model by a lower bound on log p(continuation | context): the context stays clean, and k of the continuation's l tokens
turn into noise, at the level 1 - alpha = t. With g the KL of reverse rates at a level, summed over all l tokens,

    -log p  <=  integral of E[g(t)] dt  =  mean over k of  E[ (l + 1)/k t g(t) ],   k in 0..l,  t the k-th smallest of l

uniforms (for k = 0: g(t), t the smallest of l + 1). Under masking t g(t) = -sum of log f over the masked tokens, for
every t, and nothing for k = 0: what remains is l/k times that sum, over k in 1..l. A fixed number of noised tokens
varies less than one that a time decides, and nothing is divided by a small time. No schedule plays a part.
"""

import collections
import dataclasses
import hashlib
import importlib.util
import itertools
import logging
import operator
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from rich.console import Console
from rich.progress import track
from torch import Tensor

from cdlm.devices import Device, Dtype
from cdlm.extras import install
from cdlm.model.denoiser import Denoiser
from cdlm.objective.divergence import rate_kl
from cdlm.rng import Rng, seeded
from cdlm.sample.draw import last
from cdlm.sample.settings import DEFAULTS, Settings, resolve
from cdlm.text.pipeline import Pipeline, load
from cdlm.text.template import OPEN, Template
from cdlm.types import LogLaw, Pair, Time, Tokens

if importlib.util.find_spec("lm_eval") is None:
    message = f"the harness is not installed; run in the checkout: {install('harness')}"
    if __name__ == "__main__":
        sys.exit(f"cdlm: {message}")
    raise ImportError(message)

import lm_eval.models  # noqa: F401 - it lists the harness's own models, which nobody does once ours is there
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

Scored = Bool[Tensor, "b l"]
"""The tokens that are asked for, on the host; all others are context."""

LIKELIHOOD_SAMPLES, BATCH_SIZE, MAX_NEW_TOKENS = 32, 8, 256
_MAX_COPIES, _ROWS = 32, 1024
_LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What tasks call the most tokens to write."""
_KNOWN_SETTINGS = (*_LENGTH_NAMES, "until", "do_sample", "temperature", "top_k", "top_p")


@dataclasses.dataclass(frozen=True)
class ScoredSpan:
    """Tokens to be scored, and those before them; together they fit the model."""

    context: list[int]
    token_ids: list[int]

    @property
    def noise_row(self) -> int:
        """Where its noise comes from. Continuations of one context share theirs, so that their difference varies less
        than they do."""
        return _noise_row(self.context or self.token_ids)


@register_model("cdlm")
class Harness(LM):
    """A model as the harness sees it. A request's result depends on the seed and the request alone."""

    def __init__(
        self,
        pretrained: str | Path | Pipeline,
        likelihood_samples: int = LIKELIHOOD_SAMPLES,
        steps: int = DEFAULTS["steps"],
        batch_size: int | str = BATCH_SIZE,
        device: str = "auto",
        dtype: Dtype | Literal["auto"] = "auto",
        seed: int = 0,
        tokenizer: str | None = None,
        max_length: int | None = None,
    ) -> None:
        """`pretrained` is whatever `cdlm.load` opens, or a pipeline. A request is scored under `likelihood_samples`
        noise levels; the more, the less it varies. Continuations take `steps` steps. `batch_size` requests are computed
        together. `max_length` is the model's own unless given."""
        super().__init__()
        if isinstance(pretrained, Pipeline):
            self.model = pretrained
        else:
            self.model = load(pretrained, _parse_device(device), dtype, tokenizer=tokenizer)
        self.likelihood_samples = likelihood_samples
        self.steps = steps
        self.seed = seed
        self.batch_size = BATCH_SIZE if str(batch_size).startswith("auto") else int(batch_size)
        self.length = self.model.max_length if max_length is None else max_length
        for name, value in (
            ("likelihood_samples", likelihood_samples),
            ("steps", steps),
            ("batch_size", self.batch_size),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1 (got {value}).")
        if not self.length and max_length is None:
            raise ValueError(
                f"{self.model.name} does not say how long its sequences are; add max_length= to the model_args."
            )
        if self.length < 2:
            raise ValueError(f"max_length must be at least 2 (got {max_length}).")
        self.prefix = [self.model.tokenizer.bos] if self.model.denoiser.process is None or self.model.bos_framed else []
        """What every sequence begins with."""
        self._warned: set[str] = set()

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """log p(continuation | context), or a lower bound; and whether the model would write it greedily: token by
        token, or for a diffusion model in one evaluation that sees noise in the continuation's place."""
        return self._score([self._spans(*self._encode_pair(*request.args)) for request in requests])

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """log p(document), or a lower bound, in blocks of the model's length. The first ones stand alone; the last one
        sees as much of what precedes it as fits."""
        texts = [self.model.tokenizer.encode(request.args[0]) for request in requests]
        return [value for value, _ in self._score([self._spans([], text) for text in texts])]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Continuations up to the first of the strings `until`, the end of text, or the most tokens."""
        templates = [self._template(*request.args) for request in requests]
        settings = [self._settings(request.args[1]) for request in requests]
        rows, kinds = [], []
        seen = collections.Counter[int]()
        for template, each in zip(templates, settings, strict=True):
            row = _noise_row(template.token_ids)
            rows.append(row + seen[row])  # a request that is repeated gets another answer
            seen[row] += 1
            prompt = template.num_generated if self.model.denoiser.process is None else 0
            kinds.append((each, len(template.token_ids), prompt))
        continuations = [""] * len(requests)
        for part in _with_progress(_batches(kinds, self.batch_size), "generating"):
            chosen, shared = [templates[number] for number in part], settings[part[0]]
            self.model.check(chosen, shared)
            rng = seeded(self.seed, "harness write", batch=len(part), rows=torch.tensor([rows[k] for k in part]))
            for number, token_ids in zip(part, last(self.model.states(chosen, shared, rng)).x.tolist(), strict=True):
                context, kwargs = requests[number].args
                text = templates[number].text(self.model.finished(token_ids, templates[number]), self.model.decode)
                continuations[number] = until_stop(text[len(context) :], kwargs.get("until") or [])
        return continuations

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results."""
        process = self.model.denoiser.process
        return {
            "model_name": self.model.name,
            "model_process": "none" if process is None else process.name,
            "model_length": self.length,
            "model_dtype": str(self.model.denoiser.dtype).removeprefix("torch."),
            "model_training": self.model.training,
            "likelihood": "exact" if process is None else f"lower bound, {self.likelihood_samples} noise levels",
            "steps": None if process is None else self.steps,
            "model_seed": self.seed,
        }

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of both, of one text that is split where the context's own tokens end.

        As the harness does it, spaces at the end of a context go to the continuation. A token across the two belongs
        to the continuation.
        """
        alone = self.model.tokenizer.encode(context.rstrip())
        whole = self.model.tokenizer.encode(context + continuation)
        same = sum(itertools.takewhile(bool, map(operator.eq, alone, whole)))
        return whole[:same], whole[same:]

    def _spans(self, context: list[int], token_ids: list[int]) -> list[ScoredSpan]:
        """The tokens in blocks that fit the model, each with as much before it as fits too."""
        text, room = context + token_ids, self.length - len(self.prefix)
        if context and len(text) > room:
            self._warn(f"contexts beyond the {self.length} tokens of {self.model.name} are cut on the left")
        spans = []
        for begin in range(len(context), len(text), room):
            end = min(begin + room, len(text))
            spans.append(ScoredSpan(text[max(0, end - room) : begin], text[begin:end]))
        return spans

    def _score(self, requests: list[list[ScoredSpan]]) -> list[tuple[float, bool]]:
        """The sum over the spans of each request."""
        spans = [(owner, span) for owner, spans in enumerate(requests) for span in spans]
        totals, greedy = [0.0] * len(requests), [True] * len(requests)
        batches = _batches([len(span.context) + len(span.token_ids) for _, span in spans], self.batch_size)
        for part in _with_progress(batches, "scoring"):
            values, likely = self._score_spans([spans[number][1] for number in part])
            for number, value, sure in zip(part, values.tolist(), likely.tolist(), strict=True):
                owner = spans[number][0]
                totals[owner] += value
                greedy[owner] &= sure
        return list(zip(totals, greedy, strict=True))

    def _score_spans(self, spans: list[ScoredSpan]) -> tuple[Float[Tensor, "b"], Bool[Tensor, "b"]]:
        """Spans of one length in all."""
        denoiser = self.model.denoiser
        x0 = torch.tensor([self.prefix + span.context + span.token_ids for span in spans], device=denoiser.device)
        first = torch.tensor([len(self.prefix) + len(span.context) for span in spans])
        scored = torch.arange(x0.shape[1]) >= first[:, None]
        if denoiser.process is None:
            return exact_log_likelihood(denoiser, x0, scored)
        rng = seeded(self.seed, "harness read", batch=len(spans), rows=torch.tensor([span.noise_row for span in spans]))
        num_levels = self.likelihood_samples
        copies = torch.arange(len(spans) * num_levels)
        total = torch.zeros(len(spans), dtype=torch.float64)
        for part in copies.split(len(spans) * min(num_levels, _MAX_COPIES)):
            owner, number = part // num_levels, part % num_levels
            own = dataclasses.replace(rng, rows=rng.rows[owner] + number)
            u = (number + own("level").uniform(1)[:, 0]) / num_levels
            estimate = log_likelihood_bound(denoiser, x0[owner.to(x0.device)], scored[owner], u, own("noise"))
            total.index_add_(0, owner, estimate)
        return total / num_levels, is_greedy_at_once(denoiser, x0, scored, rng("once"))

    def _template(self, context: str, kwargs: dict[str, Any]) -> Template:
        """The context and a masked span to generate. Where both do not fit, the span gets as many tokens as were asked
        for, or half of the model's length; the context is cut on the left."""
        has_words = self.model.tokenizer.model is not None
        given = self.model.tokenizer.encode(context.removesuffix(" ") if has_words else context)
        room = self.length - len(self.prefix)
        asked = int(next((kwargs[name] for name in _LENGTH_NAMES if kwargs.get(name) is not None), MAX_NEW_TOKENS))
        if asked < 1:
            raise ValueError(f"max_gen_toks must be at least 1 (the task asks for {asked}).")
        new = min(asked, max(room - len(given), room // 2, 1))
        if new < asked:
            self._warn(
                f"continuations of {asked} tokens do not fit the {self.length} of {self.model.name}: they are shorter"
            )
        if new + len(given) > room:
            self._warn(f"contexts beyond the {self.length} tokens of {self.model.name} are cut on the left")
        token_ids = self.prefix + given[max(0, len(given) + new - room) :]
        bos = self.model.tokenizer.bos if self.model.bos_framed else None
        span = (len(token_ids), len(token_ids) + new)
        return Template(token_ids + [OPEN] * new, [context, ""], [span], len(self.prefix), has_words, bos=bos)

    def _settings(self, kwargs: dict[str, Any]) -> Settings:
        """The sampler's settings for a task: greedy unless it says otherwise, as in all of the harness."""
        unknown = sorted(set(kwargs) - set(_KNOWN_SETTINGS))
        if unknown:
            self._warn(f"these settings of the task are unknown and have no effect: {', '.join(unknown)}")
        temperature = kwargs.get("temperature")
        sampled = kwargs.get("do_sample", bool(temperature)) and temperature != 0
        steps = None if self.model.denoiser.process is None else self.steps
        given: dict[str, Any] = {"steps": steps, "top_k": 1}
        if sampled:
            given["top_k"], given["top_p"] = max(0, int(kwargs.get("top_k") or 0)), float(kwargs.get("top_p") or 1.0)
            given["temperature"] = 1.0 if temperature is None else float(temperature)
        return resolve(given, self.model.denoiser.process, self.model.posterior)

    def _warn(self, message: str) -> None:
        """Warn once."""
        if message not in self._warned:
            self._warned.add(message)
            logging.getLogger(__name__).warning(message)


@torch.no_grad()
def exact_log_likelihood(
    denoiser: Denoiser, x0: Tokens, scored: Scored
) -> tuple[Float[Tensor, "b"], Bool[Tensor, "b"]]:
    """log p of the scored tokens under an autoregressive model, and whether each is the likeliest."""
    hidden = denoiser.features(x0[:, :-1], torch.ones(len(x0), dtype=torch.float64))
    return _compare(denoiser, hidden, x0[:, 1:], scored[:, 1:])


@torch.no_grad()
def is_greedy_at_once(denoiser: Denoiser, x0: Tokens, scored: Scored, rng: Rng) -> Bool[Tensor, "b"]:
    """Whether each scored token is the likeliest where all of them are noise."""
    process = denoiser.process
    assert process is not None
    x1 = torch.where(scored.to(x0.device), process.start(x0.shape[1], rng, x0.device), x0)
    hidden = denoiser.features(x1, process.noise.alpha(torch.ones(len(x0), dtype=torch.float64)))
    return _compare(denoiser, hidden, x0, scored)[1]


@torch.no_grad()
def log_likelihood_bound(denoiser: Denoiser, x0: Tokens, scored: Scored, u: Time, rng: Rng) -> Float[Tensor, "b"]:
    """One estimate for each row, whose mean over u ~ U(0, 1) and the noise is at most log p(scored | the rest)."""
    process = denoiser.process
    assert process is not None
    masks = process.absorbing
    l = scored.sum(1).double()
    k = torch.floor(u * l).clamp(max=l - 1) + 1 if masks else torch.floor(u * (l + 1)).clamp(max=l)
    order = rng("order").uniform(x0.shape[1]).masked_fill(~scored, torch.inf)
    smallest = order.sort(1).values.gather(1, (k.long()[:, None] - 1).clamp(min=0))[:, 0]
    noised = (order <= smallest[:, None]) & (k[:, None] > 0)
    x_t = torch.where(noised.to(x0.device), process.start(x0.shape[1], rng, x0.device), x0)
    t = torch.where(k > 0, smallest, 1 - rng("none").uniform(1)[:, 0] ** (1 / (l + 1)))
    end = process.noise.alpha(torch.ones_like(t))
    hidden = denoiser.features(x_t, torch.maximum(1 - t, end))  # it was trained on no more noise than that
    if masks:
        return l / k * _compare(denoiser, hidden, x0, noised)[0]
    one = torch.ones_like(t)
    pair = Pair(
        x0=x0, x_s=x0, x_t=x_t, s=0 * t, t=t, alpha_s=one, alpha_t=1 - t, dalpha_t=-one, positions=scored, known=scored,
        prior=process.prior,
    )  # fmt: skip
    total = torch.zeros(len(x0), dtype=torch.float64)
    for index, law in _log_prob_chunks(denoiser, hidden, scored & process.positions(x_t).cpu()):
        at = pair.at(index.to(law.device)).to(law.device)
        total.index_add_(0, index // x0.shape[1], rate_kl(target=at.x0, student=law, pair=at).cpu().double())
    return -torch.where(k > 0, (l + 1) / k * t, one) * total


def _compare(
    denoiser: Denoiser, hidden: Float[Tensor, "b l d"], tokens: Tokens, where: Scored
) -> tuple[Float[Tensor, "b"], Bool[Tensor, "b"]]:
    """The predicted log-probabilities of tokens, added up, and whether there is none that another token exceeds."""
    total, misses = torch.zeros(2, len(tokens), dtype=torch.float64)
    for index, law in _log_prob_chunks(denoiser, hidden, where):
        token, owner = tokens.flatten()[index.to(law.device)], index // tokens.shape[1]
        total.index_add_(0, owner, law.gather(-1, token[:, None])[:, 0].cpu().double())
        misses.index_add_(0, owner, (law.argmax(-1) != token).cpu().double())
    return total, misses == 0


def _log_prob_chunks(
    denoiser: Denoiser, hidden: Float[Tensor, "b l d"], where: Scored
) -> Iterator[tuple[Int[Tensor, "n"], LogLaw]]:
    """The predicted laws at some positions, a few at a time: a vocabulary is wide."""
    for index in where.flatten().nonzero()[:, 0].split(_ROWS):
        yield index, denoiser.head(hidden.flatten(0, 1)[index.to(hidden.device)])


def until_stop(text: str, until: str | Sequence[str]) -> str:
    """The text up to the first of these strings."""
    stops = [until] if isinstance(until, str) else until
    return text[: min((text.find(stop) for stop in stops if stop and stop in text), default=len(text))]


def _parse_device(name: str) -> Device:
    """The harness's name of a device; cuda:0 is what it says where nobody has said anything."""
    kind, _, number = ("auto" if name == "cuda:0" else name).partition(":")
    if number.strip("0"):
        raise ValueError(f"to compute on GPU {number}, set CUDA_VISIBLE_DEVICES={number}, and use --device cuda")
    return cast(Device, kind)


def _noise_row(ids: Sequence[int]) -> int:
    """A row of noise for these tokens, wherever they stand among others."""
    return int.from_bytes(hashlib.blake2b(repr(list(ids)).encode(), digest_size=7).digest(), "little")


def _batches(kinds: Sequence[Hashable], size: int) -> list[list[int]]:
    """The numbers of requests of one kind, at most `size` together."""
    alike: dict[Hashable, list[int]] = {}
    for number, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(number)
    return [numbers[k : k + size] for numbers in alike.values() for k in range(0, len(numbers), size)]


def _with_progress(batches: list[list[int]], what: str) -> Iterable[list[int]]:
    """With a bar, on a terminal."""
    console = Console(stderr=True)
    return track(batches, what, console=console, transient=True, disable=not console.is_terminal)


def main() -> None:
    """The harness's command line."""
    from lm_eval.__main__ import cli_evaluate

    torch.set_flush_denormal(True)
    try:
        cli_evaluate()
    except (ValueError, OSError) as error:
        sys.exit(f"cdlm: {error}")


if __name__ == "__main__":
    main()
