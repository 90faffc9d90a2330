"""An adapter for the lm-evaluation-harness: its tasks, for every model of this package.

    python -m cdlm.eval.harness run --model cdlm --model_args pretrained=runs/mcdlm,times=32 --tasks hellaswag

is the harness's own command line, with `cdlm` among its models. Only what is asked for is noised: a continuation of l
tokens is scored with its context clean, by a lower bound on log p(continuation | context).

    masked    (1/n) sum_j  l/k_j  sum of log f(x_j) over the k_j tokens masked in x_j       k ~ U{1..l}
    others   -(1/n) sum_j  2 u_j  sum of rate_kl over all l tokens, at the noise level u_j^2    u ~ U(0, 1)

The first is the masked NELBO with the number of masks in place of the time, which varies less. In the second, levels
are 1 - alpha (the bound depends on no schedule), and u^2 because estimates near 0 are rare and large: their variance
is infinite if levels are uniform, and finite like this. An autoregressive model is scored exactly.
"""

import collections
import dataclasses
import hashlib
import importlib.util
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from rich.console import Console
from rich.progress import track
from torch import Tensor

from cdlm.devices import Device, Dtype
from cdlm.draft import HOLE, Draft
from cdlm.model.denoiser import Denoiser
from cdlm.objective.coupling import Bridge
from cdlm.objective.divergence import rate_kl
from cdlm.process import LogLinear
from cdlm.rng import Rng, seeded
from cdlm.sample import Sampling, last
from cdlm.sample.generate import STEPS
from cdlm.text import Model, load, trimmed
from cdlm.types import LogLaw, Tokens

if importlib.util.find_spec("lm_eval") is None:
    message = "the harness is not installed; run: pip install 'cdlm[harness]'"
    if __name__ == "__main__":
        sys.exit(f"cdlm: {message}")
    raise ImportError(message)

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

Scored = Bool[Tensor, "b l"]
"""The tokens that are asked for; all others are context."""

TIMES, BATCH, NEW = 32, 8, 256
_COPIES, _ROWS = 32, 1024
_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What tasks call the most tokens to write."""
_KNOWN = (*_NAMES, "until", "do_sample", "temperature", "top_k", "top_p")


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens to be scored, and those before them; together they fit the model."""

    given: list[int]
    tokens: list[int]

    @property
    def row(self) -> int:
        """Where its noise comes from. Continuations of one context share theirs, so that their difference varies less
        than they do."""
        return _row(self.given or self.tokens)


@register_model("cdlm")
class Harness(LM):
    """A model as the harness sees it. A request's result depends on the seed and the request alone."""

    def __init__(
        self,
        pretrained: str | Path | Model,
        times: int = TIMES,
        steps: int = STEPS,
        batch_size: int | str = BATCH,
        device: str = "auto",
        dtype: Dtype | Literal["auto"] = "auto",
        seed: int = 0,
        tokenizer: str | None = None,
        length: int | None = None,
    ) -> None:
        """`pretrained` is whatever `cdlm.load` opens, or a model. A request is read under `times` noise levels; the
        more, the less it varies. Continuations are written in `steps` steps. `batch_size` requests are computed
        together. `length` is the model's own unless told otherwise."""
        super().__init__()
        if isinstance(pretrained, Model):
            self.model = pretrained
        else:
            self.model = load(pretrained, _device(device), dtype, tokenizer=tokenizer)
        self.times, self.steps, self.seed = times, steps, seed
        self.batch = BATCH if str(batch_size).startswith("auto") else int(batch_size)
        self.length = length or self.model.length
        if times < 1 or steps < 1 or self.batch < 1:
            raise ValueError(f"times, steps and batch_size are at least 1; got {times}, {steps} and {batch_size}")
        if not self.length:
            raise ValueError(f"{self.model.name} does not say how long its texts are: add length= to the model_args")
        words = self.model.tokenizer
        self.lead = [words.bos] if self.model.denoiser.process is None or self.model.framed else []
        """What every text begins with."""
        self._said: set[str] = set()

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """log p(continuation | context), or a lower bound; and whether the model would write it greedily: token by
        token, or for a diffusion model in one evaluation that sees noise in the continuation's place."""
        pairs = [self._pair(*request.args) for request in requests]
        found = self._score([self._spans(*pair) for pair in pairs])
        for request, result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """log p(document), or a lower bound, in blocks of the model's length. The first ones stand alone; the last one
        sees as much of what precedes it as fits."""
        texts = [self.model.tokenizer.encode(request.args[0]) for request in requests]
        found = [value for value, _ in self._score([self._spans([], text) for text in texts])]
        for request, value in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to the first of the strings `until`, the end of text, or the most tokens."""
        drafts = [self._draft(*request.args) for request in requests]
        hows = [self._sampling(request.args[1]) for request in requests]
        rows, seen = [], collections.Counter[int]()
        for draft in drafts:  # a request that is repeated gets another answer
            rows.append(_row(draft.ids))
            seen[rows[-1]] += 1
            rows[-1] += seen[rows[-1]] - 1
        kinds: dict[tuple[Sampling, int, int], list[int]] = {}
        for number, (draft, how) in enumerate(zip(drafts, hows, strict=True)):
            written = draft.written if self.model.denoiser.process is None else 0
            kinds.setdefault((how, len(draft.ids), written), []).append(number)
        batches = [(how, part) for (how, *_), all_ in kinds.items() for part in _cut(all_, self.batch)]
        found = [""] * len(requests)
        for how, part in _shown(batches, "writing"):
            chosen = [drafts[number] for number in part]
            self.model.check(chosen, how)
            rng = seeded(self.seed, "harness", "write", batch=len(part), rows=_tensor([rows[k] for k in part]))
            for number, ids in zip(part, last(self.model.states(chosen, how, rng)).x.tolist(), strict=True):
                context, kwargs = requests[number].args
                text = drafts[number].text(trimmed(ids, drafts[number], self.model.tokenizer.eos), self.model.show)
                found[number] = ended(text[len(context) :], _until(kwargs))
                self.cache_hook.add_partial("generate_until", requests[number].args, found[number])
        return found

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results."""
        process = self.model.denoiser.process
        return {
            "model_name": self.model.name,
            "model_process": "none" if process is None else process.name,
            "model_length": self.length,
            "model_dtype": str(self.model.denoiser.backbone.vocab_embed.embedding.dtype).removeprefix("torch."),
            "model_trained": self.model.trained,
            "likelihood": "exact" if process is None else f"lower bound, {self.times} noise levels",
            "steps": None if process is None else self.steps,
            "model_seed": self.seed,
        }

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of both, of one text that is split where the context's own tokens end.

        As the harness does it, spaces at the end of a context go to the continuation. A token across the two belongs
        to the continuation.
        """
        stem = context.rstrip()
        alone, whole = (self.model.tokenizer.encode(text) for text in (stem, context + continuation))
        same = next(
            (k for k, (a, b) in enumerate(zip(alone, whole, strict=False)) if a != b), min(len(alone), len(whole))
        )
        return whole[:same], whole[same:]

    def _spans(self, given: list[int], tokens: list[int]) -> list[Span]:
        """The tokens in blocks that fit the model, each with as much before it as fits too."""
        text, room = given + tokens, self.length - len(self.lead)
        ends = [min(begin + room, len(text)) for begin in range(len(given), len(text), room)]
        if given and ends and ends[0] > room:
            self._say(f"contexts beyond the {self.length} tokens of {self.model.name} are cut on the left")
        begins = [len(given), *ends[:-1]]
        return [
            Span(text[max(0, end - room) : begin], text[begin:end]) for begin, end in zip(begins, ends, strict=False)
        ]

    def _score(self, requests: list[list[Span]]) -> list[tuple[float, bool]]:
        """The sum over the spans of each request."""
        spans = [(owner, span) for owner, spans in enumerate(requests) for span in spans]
        lengths: dict[int, list[int]] = {}
        for number, (_, span) in enumerate(spans):
            lengths.setdefault(len(span.given) + len(span.tokens), []).append(number)
        totals, greedy = [0.0] * len(requests), [True] * len(requests)
        batches = [part for numbers in lengths.values() for part in _cut(numbers, self.batch)]
        for part in _shown(batches, "reading"):
            values, likely = self._read([spans[number][1] for number in part])
            for number, value, sure in zip(part, values.tolist(), likely.tolist(), strict=True):
                owner = spans[number][0]
                totals[owner] += value
                greedy[owner] &= sure
        return list(zip(totals, greedy, strict=True))

    def _read(self, spans: list[Span]) -> tuple[Float[Tensor, "b"], Bool[Tensor, "b"]]:
        """Spans of one length in all."""
        denoiser = self.model.denoiser
        x0 = torch.tensor([self.lead + span.given + span.tokens for span in spans], device=denoiser.device)
        first = torch.tensor([len(self.lead) + len(span.given) for span in spans], device=x0.device)
        scored = torch.arange(x0.shape[1], device=x0.device) >= first[:, None]
        if denoiser.process is None:
            return exact(denoiser, x0, scored)
        rng = seeded(self.seed, "harness", "read", batch=len(spans), rows=_tensor([span.row for span in spans]))
        copies = torch.arange(len(spans) * self.times)
        total = torch.zeros(len(spans), dtype=torch.float64)
        for part in copies.split(len(spans) * min(self.times, _COPIES)):
            owner, number = part // self.times, part % self.times
            own = dataclasses.replace(rng, rows=rng.rows[owner] + number)
            u = (number + own("level").uniform(1)[:, 0]) / self.times
            total.index_add_(0, owner, bound(denoiser, x0[owner], scored[owner], u, own("noise")))
        return total / self.times, at_once(denoiser, x0, scored, rng("once"))

    def _draft(self, context: str, kwargs: dict[str, Any]) -> Draft:
        """The context and a hole for what is to be written. Where both do not fit, the hole gets as many tokens as it
        was asked for, or half of the model's length; the context is cut on the left."""
        words = self.model.tokenizer.model is not None
        given = self.model.tokenizer.encode(context.removesuffix(" ") if words else context)
        room = self.length - len(self.lead)
        asked = int(next((kwargs[name] for name in _NAMES if kwargs.get(name) is not None), NEW))
        if asked < 1:
            raise ValueError(f"a continuation has at least one token; the task asks for max_gen_toks {asked}")
        new = min(asked, max(room - len(given), room // 2, 1))
        if new < asked:
            self._say(
                f"continuations of {asked} tokens do not fit the {self.length} of {self.model.name}: fewer are written"
            )
        if new + len(given) > room:
            self._say(f"contexts beyond the {self.length} tokens of {self.model.name} are cut on the left")
        ids = self.lead + given[max(0, len(given) + new - room) :]
        start = self.model.tokenizer.bos if self.model.framed else None
        hole = (len(ids), len(ids) + new)
        return Draft(ids + [HOLE] * new, [context, ""], [hole], len(self.lead), words, start=start)

    def _sampling(self, kwargs: dict[str, Any]) -> Sampling:
        """How a task wants it written: greedily unless it says otherwise, as in all of the harness."""
        unknown = sorted(set(kwargs) - set(_KNOWN))
        if unknown:
            self._say(f"these settings of the task are not known here, and do nothing: {', '.join(unknown)}")
        temperature = kwargs.get("temperature")
        sampled = kwargs.get("do_sample", bool(temperature)) and temperature != 0
        steps = None if self.model.denoiser.process is None else self.steps
        if not sampled:
            return Sampling(steps, top_k=1)
        top_k, top_p = max(0, int(kwargs.get("top_k") or 0)), float(kwargs.get("top_p") or 1.0)
        return Sampling(steps, temperature=1.0 if temperature is None else float(temperature), top_k=top_k, top_p=top_p)

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logging.getLogger(__name__).warning(what)


@torch.no_grad()
def exact(denoiser: Denoiser, x0: Tokens, scored: Scored) -> tuple[Float[Tensor, "b"], Bool[Tensor, "b"]]:
    """log p of the scored tokens under an autoregressive model, and whether each is the likeliest."""
    hidden = denoiser.features(x0[:, :-1], torch.ones(len(x0), dtype=torch.float64))
    return _compared(denoiser, hidden, x0[:, 1:], scored[:, 1:])


@torch.no_grad()
def at_once(denoiser: Denoiser, x0: Tokens, scored: Scored, rng: Rng) -> Bool[Tensor, "b"]:
    """Whether each scored token is the likeliest where all of them are noise."""
    assert denoiser.process is not None
    end = denoiser.process.noise.alpha(torch.ones(len(x0), dtype=torch.float64))
    x1 = torch.where(scored, denoiser.process.start(x0.shape[1], rng, x0.device), x0)
    return _compared(denoiser, denoiser.features(x1, end), x0, scored)[1]


@torch.no_grad()
def bound(denoiser: Denoiser, x0: Tokens, scored: Scored, u: Float[Tensor, "b"], rng: Rng) -> Float[Tensor, "b"]:
    """One estimate for each row whose mean over u ~ U(0, 1) and the noise is at most log p(scored | the rest)."""
    assert denoiser.process is not None
    return (_masked if denoiser.process.name == "masked" else _noised)(denoiser, x0, scored, u, rng)


def _masked(denoiser: Denoiser, x0: Tokens, scored: Scored, u: Float[Tensor, "b"], rng: Rng) -> Float[Tensor, "b"]:
    """k of l tokens are masked, uniform in k: those that come first in a random order. The noise level that goes with
    them, for a network that is told, is the k-th smallest of l uniforms."""
    assert denoiser.process is not None
    l = scored.sum(1)
    k = (u.to(x0.device) * l).long().clamp(max=l - 1) + 1
    order = rng("order").uniform(x0.shape[1], x0.device).masked_fill(~scored, torch.inf)
    level = order.sort(1).values.gather(1, k[:, None] - 1)
    hidden = denoiser.features(torch.where(order <= level, denoiser.process.vocab, x0), _signal(denoiser, level[:, 0]))
    return _compared(denoiser, hidden, x0, order <= level)[0] * (l / k).cpu()


def _noised(denoiser: Denoiser, x0: Tokens, scored: Scored, u: Float[Tensor, "b"], rng: Rng) -> Float[Tensor, "b"]:
    """The KL of reverse rates at the level u^2. It is the same for all schedules: here alpha = 1 - t."""
    assert denoiser.process is not None
    process, t = dataclasses.replace(denoiser.process, noise=LogLinear(0.0)), u.double() ** 2
    pair = Bridge(process)(x0, torch.zeros_like(t), t, rng)
    pair = dataclasses.replace(pair, x_t=torch.where(scored, pair.x_t, x0))
    hidden = denoiser.features(pair.x_t, _signal(denoiser, t))
    total = torch.zeros(len(x0), dtype=torch.float64)
    for index, law in _laws(denoiser, hidden, scored & process.positions(pair.x_t)):
        at = pair.at(index)
        value = rate_kl(target=at.x0, student=law, pair=at)
        total.index_add_(0, index.cpu() // x0.shape[1], value.double().cpu())
    return -2 * u.double() * total


def _signal(denoiser: Denoiser, level: Float[Tensor, "b"]) -> Float[Tensor, "b"]:
    """What the network is told of a noise level: no more noise than it was trained on."""
    assert denoiser.process is not None
    level = level.cpu().double()
    return torch.maximum(1 - level, denoiser.process.noise.alpha(torch.ones_like(level)))


def _compared(
    denoiser: Denoiser, hidden: Float[Tensor, "b l d"], tokens: Tokens, where: Scored
) -> tuple[Float[Tensor, "b"], Bool[Tensor, "b"]]:
    """The sum of the predicted log-probabilities of the tokens `where` they are asked for, and whether no other token
    is likelier."""
    total, misses = torch.zeros(2, len(tokens), dtype=torch.float64)
    for index, law in _laws(denoiser, hidden, where):
        token, owner = tokens.flatten()[index], index.cpu() // tokens.shape[1]
        total.index_add_(0, owner, law.gather(-1, token[:, None])[:, 0].double().cpu())
        misses.index_add_(0, owner, (law.argmax(-1) != token).double().cpu())
    return total, misses == 0


def _laws(
    denoiser: Denoiser, hidden: Float[Tensor, "b l d"], where: Scored
) -> Iterator[tuple[Int[Tensor, "n"], LogLaw]]:
    """The predicted laws at some positions, a few at a time: a vocabulary is wide."""
    for index in where.flatten().nonzero()[:, 0].split(_ROWS):
        yield index, denoiser.head(hidden.flatten(0, 1)[index])


def ended(text: str, until: Iterable[str]) -> str:
    """The text up to the first of these strings."""
    return text[: min([place for stop in until if stop and (place := text.find(stop)) >= 0], default=len(text))]


def _until(kwargs: dict[str, Any]) -> list[str]:
    until = kwargs.get("until") or []
    return [until] if isinstance(until, str) else until


def _device(name: str) -> Device:
    """The harness's name of a device, such as cuda:0."""
    kind, _, number = name.partition(":")
    if number.strip("0"):
        raise ValueError(f"to compute on GPU {number}, set CUDA_VISIBLE_DEVICES={number}, and use --device cuda")
    return cast(Device, kind)


def _row(ids: Sequence[int]) -> int:
    """A row of noise for these tokens, wherever they stand among others."""
    return int.from_bytes(hashlib.blake2b(repr(list(ids)).encode(), digest_size=7).digest(), "little")


def _tensor(rows: Sequence[int]) -> Int[Tensor, "b"]:
    return torch.tensor(rows, dtype=torch.long)


def _cut(numbers: list[int], size: int) -> list[list[int]]:
    return [numbers[k : k + size] for k in range(0, len(numbers), size)]


def _shown[T](batches: Sequence[T], what: str) -> Iterable[T]:
    console = Console(stderr=True)
    return track(batches, what, console=console, transient=True, disable=not console.is_terminal)


def main() -> None:
    """The harness's command line."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
