"""An adapter for the lm-evaluation-harness: its tasks, for every model of this package.

    python -m cdlm.eval.harness run --model cdlm --model_args pretrained=runs/mcdlm --tasks hellaswag

is the harness's own command line, with `cdlm` among its models. An autoregressive model is scored exactly, a diffusion
model by a lower bound on log p(continuation | context), that of `cdlm/metrics/conditional.py`.
"""

import collections
import importlib.util
import itertools
import logging
import operator
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cdlm.devices import Device, Dtype
from cdlm.extras import install
from cdlm.metrics.conditional import (
    exact_log_likelihood,
    is_greedy_at_once,
    likelihood_rng,
    noise_row,
    repeated_bound,
)
from cdlm.rng import seeded
from cdlm.sample.draw import last
from cdlm.sample.settings import DEFAULTS, Settings, resolve
from cdlm.text.likelihood import (
    LIKELIHOOD_SAMPLES,
    ScoredSequence,
    batches_of,
    scored_batch,
    split_into_blocks,
    with_progress,
)
from cdlm.text.pipeline import Pipeline, load
from cdlm.text.template import OPEN, Template

if importlib.util.find_spec("lm_eval") is None:
    message = f"the harness is not installed; run in the checkout: {install('harness')}"
    if __name__ == "__main__":
        sys.exit(f"cdlm: {message}")
    raise ImportError(message)

import lm_eval.models  # noqa: F401 - it lists the harness's own models, which nobody does once ours is there
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

BATCH_SIZE, MAX_NEW_TOKENS = 8, 256
_MAX_COPIES = 32
_LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What tasks call the most tokens to write."""
_KNOWN_SETTINGS = (*_LENGTH_NAMES, "until", "do_sample", "temperature", "top_k", "top_p")


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
        return self._score([self._blocks(*self._encode_pair(*request.args)) for request in requests])

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """log p(document), or a lower bound, in blocks of the model's length. The first ones stand alone; the last one
        sees as much of what precedes it as fits."""
        texts = [self.model.tokenizer.encode(request.args[0]) for request in requests]
        return [value for value, _ in self._score([self._blocks([], text) for text in texts])]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Continuations up to the first of the strings `until`, the end of text, or the most tokens."""
        templates = [self._template(*request.args) for request in requests]
        settings = [self._settings(request.args[1]) for request in requests]
        rows, kinds = [], []
        seen = collections.Counter[int]()
        for template, each in zip(templates, settings, strict=True):
            row = noise_row(template.token_ids)
            rows.append(row + seen[row])  # a request that is repeated gets another answer
            seen[row] += 1
            prompt = template.num_generated if self.model.denoiser.process is None else 0
            kinds.append((each, len(template.token_ids), prompt))
        continuations = [""] * len(requests)
        for part in with_progress(batches_of(kinds, self.batch_size), "generating"):
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

    def _blocks(self, context: list[int], token_ids: list[int]) -> list[ScoredSequence]:
        """The tokens in blocks that fit the model, each with as much before it as fits too."""
        if context and len(context + token_ids) > self.length - len(self.prefix):
            self._warn(f"contexts beyond the {self.length} tokens of {self.model.name} are cut on the left")
        return split_into_blocks(context, token_ids, self.prefix, self.length)

    def _score(self, requests: list[list[ScoredSequence]]) -> list[tuple[float, bool]]:
        """The sum over the blocks of each request."""
        blocks = [(owner, block) for owner, blocks in enumerate(requests) for block in blocks]
        totals, greedy = [0.0] * len(requests), [True] * len(requests)
        batches = batches_of([len(block.token_ids) for _, block in blocks], self.batch_size)
        for part in with_progress(batches, "scoring"):
            values, likely = self._score_blocks([blocks[number][1] for number in part])
            for number, value, sure in zip(part, values.tolist(), likely.tolist(), strict=True):
                owner = blocks[number][0]
                totals[owner] += value
                greedy[owner] &= sure
        return list(zip(totals, greedy, strict=True))

    def _score_blocks(self, blocks: list[ScoredSequence]) -> tuple[Float[Tensor, "b"], Bool[Tensor, "b"]]:
        """Blocks of one length."""
        denoiser = self.model.denoiser
        x0, scored = scored_batch(denoiser, blocks)
        if denoiser.process is None:
            return exact_log_likelihood(denoiser, x0, scored)
        rng = likelihood_rng(self.seed, [block.noise_row for block in blocks])
        rows = len(blocks) * min(self.likelihood_samples, _MAX_COPIES)
        estimates = repeated_bound(denoiser, x0, scored, rng, self.likelihood_samples, rows)
        return estimates.mean(1), is_greedy_at_once(denoiser, x0, scored, rng("once"))

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
        denoiser = self.model.denoiser
        joint_head = denoiser.joint_head is not None
        return resolve(given, denoiser.process, self.model.posterior, joint_head=joint_head)

    def _warn(self, message: str) -> None:
        """Warn once."""
        if message not in self._warned:
            self._warned.add(message)
            logging.getLogger(__name__).warning(message)


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
