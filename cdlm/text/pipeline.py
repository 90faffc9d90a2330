"""The pipeline that `cdlm.load` returns: a denoiser with its tokenizer, from text to text.

    pipe = cdlm.load("runs/small-mcdlm")            # or nothing: the best model that comes with the package
    for sample in pipe.sample(num_samples=4, steps=8, seed=0):
        print(sample)
    print(pipe.infill("The ___ sat on the ___.")[0])
    for frame in pipe.stream("Once upon a time", max_length=64, steps=16):
        print(frame.texts[0])
    print(pipe.nelbo(["The cat sat on the mat."]).nats_per_token)
    print(pipe.score("The ___ sat on the mat.", ["cat", "rain"]))

A sample depends on the seed and its own index alone, not on the batch that it is drawn in: exactly so in float64 on a
CPU, elsewhere up to floating point (the last digits of a network may change with the shape of its batch).
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cdlm import zoo
from cdlm.data.tokenizer import Tokenizer, has_tokenizer, tokenizer_of, write_for_transformers
from cdlm.devices import Device, Dtype, pick_device, weight_dtype
from cdlm.hub import check_free, model_directory, write_model_directory
from cdlm.model import pretrained
from cdlm.model.compile import accelerate
from cdlm.model.denoiser import Denoiser
from cdlm.process.process import Posterior
from cdlm.rng import Rng, seeded
from cdlm.sample.draw import State, last
from cdlm.sample.generation_config import (
    read_generation_config,
    text_config,
    transformers_fields,
    write_generation_config,
)
from cdlm.sample.logits import LogitsProcessor
from cdlm.sample.settings import Settings, SettingValues, resolve
from cdlm.text.completion import batches, check_templates, complete_batch
from cdlm.text.likelihood import (
    LIKELIHOOD_SAMPLES,
    CorpusLikelihood,
    Likelihood,
    ScoredSequence,
    num_bytes,
    score_sequences,
    score_texts,
)
from cdlm.text.predictions import Times, TokenIds, log_probs, logits
from cdlm.text.template import (
    OPEN,
    Template,
    continuation,
    fill,
    has_blanks,
    infilling,
    repeat,
    rewriting,
    until_eos,
    without_padding,
)

MASK = "░"
_MAX_UNUSED = 128  # outputs beyond the tokens, which round a vocabulary up, or stand for a [PAD] that texts never hold


@dataclasses.dataclass(frozen=True)
class Sample:
    """A finished sample; `print` shows its text."""

    index: int
    text: str
    token_ids: list[int]
    nfe: int
    """Network evaluations that it took."""

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Frame:
    """Samples after some steps: one picture of an animation."""

    step: int
    num_steps: int | None
    """How many there will be, where that is known."""
    token_ids: list[list[int]]
    texts: list[str]
    """As far as they are generated; a mask shows as a shaded block."""
    nfe: list[int]
    token_probs: list[list[float]] | None = None
    """The probability of each token when it was drawn; NaN for tokens that were not drawn."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
    """What `cdlm.load` returns.

    Keyword arguments beyond the named ones are those of `cdlm.sample.settings.Settings`: steps, temperature, ...; where
    a call does not give one, the generation config of the model holds, and then the default.
    """

    name: str
    denoiser: Denoiser = dataclasses.field(repr=False)
    tokenizer: Tokenizer = dataclasses.field(repr=False)
    max_length: int
    """Tokens in a sequence that it was trained on; 0 if its directory does not say."""
    posterior: Posterior = "plug-in"
    bos_framed: bool = False
    """Whether the sequences it was trained on begin with a BOS token."""
    eos_padded: bool = False
    """Whether they are padded with EOS tokens: then a sample ends there, too."""
    compiled: bool = False
    directory: Path | None = dataclasses.field(default=None, repr=False)
    training: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    """By which method and how long, and from which model; as far as its directory says."""
    generation_config: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    """The settings that it is best used with, with `step_presets` for different numbers of steps."""

    def sample(
        self,
        num_samples: int = 1,
        max_length: int | None = None,
        prompt: str | Sequence[str] | None = None,
        seed: int = 0,
        stop_at_eos: bool = False,
        batch_size: int = 32,
        logits_processors: Sequence[LogitsProcessor] = (),
        **settings: Unpack[SettingValues],
    ) -> list[Sample]:
        """Generate samples, or continuations of each prompt. `stop_at_eos` ends a text at its first EOS token."""
        templates = self.continuations(_texts(prompt), num_samples, max_length)
        return self._complete(templates, settings, seed, batch_size, logits_processors, stop_at_eos)

    def infill(
        self,
        text: str | Sequence[str],
        num_samples: int = 1,
        span_length: int = 4,
        seed: int = 0,
        batch_size: int = 32,
        logits_processors: Sequence[LogitsProcessor] = (),
        **settings: Unpack[SettingValues],
    ) -> list[Sample]:
        """Fill the blanks of a text: ___ with `span_length` tokens, [MASK] with one, [MASK:n] with n."""
        templates = self.infillings(_texts(text), num_samples, span_length)
        return self._complete(templates, settings, seed, batch_size, logits_processors)

    def rewrite(
        self,
        text: str | Sequence[str],
        num_samples: int = 1,
        noise_level: float = 0.5,
        clamp: bool = False,
        seed: int = 0,
        batch_size: int = 32,
        logits_processors: Sequence[LogitsProcessor] = (),
        **settings: Unpack[SettingValues],
    ) -> list[Sample]:
        """Noise a text to time `noise_level` and denoise it from there: the paper's conditional generation.

        A uniform model may change every token, as in the paper; `clamp` keeps those that the noise left alone.
        """
        templates = self.rewritings(_texts(text), num_samples, noise_level, clamp)
        return self._complete(templates, settings, seed, batch_size, logits_processors)

    def stream(
        self,
        text: str = "",
        num_samples: int = 1,
        max_length: int | None = None,
        seed: int = 0,
        span_length: int = 4,
        **settings: Unpack[SettingValues],
    ) -> Iterator[Frame]:
        """Generate step by step, a frame after each. Blanks are filled; text without any is continued."""
        if has_blanks(text):
            templates = self.infillings([text], num_samples, span_length)
        else:
            templates = self.continuations([text], num_samples, max_length)
        return self.frames(templates, self.resolve(settings), seed)

    @property
    def mask_token_id(self) -> int | None:
        """The id of the mask, one beyond the tokens; None for a model without a mask."""
        process = self.denoiser.process
        return self.denoiser.vocab if process is not None and process.has_mask else None

    @property
    def device(self) -> torch.device:
        """Where the network is; token ids may be anywhere."""
        return self.denoiser.device

    def encode(self, text: str, span_length: int = 4) -> list[int]:
        """The token ids of a text as the model saw texts in training, for `logits` and `log_probs`.

        That is with BOS where it was trained on BOS-framed blocks and with EOS up to its length where it is EOS-padded.
        Blanks become masks: ___ as many as `span_length`, [MASK] one, [MASK:n] n.
        """
        if not has_blanks(text):
            return self.padded(rewriting(text, self.tokenizer, bos_framed=bool(self._prefix))).token_ids
        mask = self.mask_token_id
        if mask is None:
            raise ValueError(f"{self.name} has no mask that could stand for a blank; give a text without blanks.")
        (template,) = self.infillings([text], 1, span_length)
        return [mask if token == OPEN else token for token in template.token_ids]

    def logits(self, token_ids: TokenIds, t: Times | None = None, batch_size: int = 32) -> Float[Tensor, "b l v"]:
        """The output of the network for noisy tokens at time `t` (0 is data, 1 is noise), before normalisation.

        `token_ids` are sequences of one length, as a tensor on any device or as lists; `t` is a number for all of them
        or one for each. The result is in float32, or float64 for a float64 model, on the device of the model. It has
        one column for each clean token and none for the mask. Autoregressive models take no `t`; their row i predicts
        token i + 1.
        """
        return logits(self.denoiser, token_ids, t, batch_size)

    def log_probs(self, token_ids: TokenIds, t: Times | None = None, batch_size: int = 32) -> Float[Tensor, "b l v"]:
        """log f(x_t, t), the predicted distribution over the clean token at every position; arguments as in `logits`.

        Normalised, and as the objective and the samplers see it: a token that cannot be noise (any visible token of a
        masked model, all tokens at t = 0) is carried over with probability 1.
        """
        return log_probs(self.denoiser, token_ids, t, batch_size)

    def nelbo(
        self,
        texts: str | Sequence[str],
        likelihood_samples: int = LIKELIHOOD_SAMPLES,
        max_length: int | None = None,
        seed: int = 0,
        batch_size: int = 32,
        progress: bool = True,
    ) -> CorpusLikelihood:
        """The negative evidence lower bound of texts: in total, and of each text (`per_text`).

        For an autoregressive model it is the exact negative log-likelihood. For a diffusion model it is a Monte Carlo
        estimate from `likelihood_samples` noise levels per sequence. Texts longer than `max_length` tokens (the model's
        own unless given) are split into blocks. A BOS token is given where the model was trained with one, and no end
        of text is scored. A result depends on the seed and the text alone. `batch_size` sequences go through the
        network at a time; `progress` shows a bar on a terminal.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        self._check_scoring(likelihood_samples, batch_size)
        if not any(texts):
            raise ValueError("there is nothing to score: give at least one text that is not empty.")
        length, prefix = self.max_length if max_length is None else max_length, self._prefix
        if not length and max_length is None:
            raise ValueError(f"{self.name} does not say how long its sequences are; give max_length.")
        suffix = [self.tokenizer.eos] if self.always_framed else []
        least = len(prefix) + len(suffix) + 1
        if length < least:
            raise ValueError(f"max_length must be at least {least} for this model (got {length}).")
        about = (length, likelihood_samples, seed, batch_size, progress)
        return score_texts(self.denoiser, self.tokenizer, texts, (prefix, suffix), *about)

    def score(
        self,
        text: str,
        infills: str | Sample | Sequence[str | Sequence[str] | Sample],
        likelihood_samples: int = LIKELIHOOD_SAMPLES,
        span_length: int = 4,
        seed: int = 0,
        batch_size: int = 32,
        progress: bool = True,
    ) -> list[Likelihood]:
        """log p(infill | the rest of the text) for each of several infills of a text with blanks, or a lower bound.

        An infill is a string (for several blanks a sequence of strings, one for each) of any number of tokens, or a
        `Sample` that `infill` has generated from this text with this `span_length`, whose own tokens are then scored.
        For a diffusion model it is a Monte Carlo estimate of a lower bound, with the rest of the text kept clean.
        Infills of the same length share their noise, so that their difference varies less than they do. An
        autoregressive model scores a blank at the end of the text, exactly.
        """
        self._check_scoring(likelihood_samples, batch_size)
        infills = [infills] if isinstance(infills, str | Sample) else list(infills)
        filled = [self._filled(text, infill, span_length) for infill in infills]
        sequences = [sequence for sequence, _ in filled]
        scores = score_sequences(self.denoiser, sequences, likelihood_samples, seed, batch_size, progress)
        exact = self.denoiser.process is None
        return [
            Likelihood(value, error, sequence.num_scored, size, exact)
            for (sequence, size), (value, error) in zip(filled, scores, strict=True)
        ]

    def save_pretrained(
        self,
        directory: str | Path,
        dtype: Dtype = "float32",
        results: Sequence[dict[str, Any]] = (),
        max_shard_size: int | None = None,
    ) -> Path:
        """Write a directory that `cdlm.load` opens anywhere, and transformers too (with trust_remote_code).

        Its model card lists `results` of an evaluation. `max_shard_size` is the largest size of a file, in bytes. A
        masked language model of transformers is written as transformers writes it, without a card.
        """
        if self.denoiser.masked_lm is not None:
            out = Path(directory)
            check_free(out)
            network: Any = self.denoiser.backbone.network
            network.save_pretrained(out, self.tokenizer, getattr(torch, dtype))
            return out
        if self.directory is None:
            raise ValueError(f"{self.name} was not loaded from a directory: there is no tokenizer to write beside it")
        text = {
            "max_length": self.max_length,
            "posterior": self.posterior,
            "bos_framed": self.bos_framed,
            "eos_padded": self.eos_padded,
        }
        about = {"text": text, "training": self.training}
        out = write_model_directory(
            self.denoiser, self.directory, about, Path(directory), dtype, results, max_shard_size
        )
        if not has_tokenizer(out):
            self.tokenizer.save(out)  # it was given apart from the directory
        write_for_transformers(self.tokenizer, out, self.mask_token_id, self.max_length)
        unused = range(self.tokenizer.vocab_size, self.denoiser.vocab)
        others = transformers_fields(self.directory, self.tokenizer.eos, self.tokenizer.bos, unused)
        write_generation_config(out, self.generation_config, others)
        return out

    def resolve(self, settings: Mapping[str, Any]) -> Settings:
        """The complete settings of a call that gives these."""
        denoiser = self.denoiser
        joint_head = denoiser.joint_head is not None
        return resolve(settings, denoiser.process, self.posterior, self.generation_config, joint_head)

    def continuations(
        self,
        prompts: Sequence[str | Sequence[int]],
        num_samples: int = 1,
        max_length: int | None = None,
        new_tokens: bool = False,
    ) -> list[Template]:
        """What `sample` completes. A prompt may be given by its tokens; with `new_tokens`, it is not part of the
        length."""
        length = self.max_length if max_length is None else max_length
        if not length:
            raise ValueError(f"{self.name} does not say how long its sequences are; give --max-length.")
        causal = self.denoiser.process is None
        framed = self.always_framed
        length -= framed and not new_tokens
        about = (length, self.tokenizer, self.bos_framed, causal, self.max_length, not self.eos_padded, new_tokens)
        templates = [continuation(prompt, *about, framed=framed) for prompt in prompts]
        return repeat([self.padded(template) for template in templates] if framed else templates, num_samples)

    def infillings(self, texts: Sequence[str], num_samples: int = 1, span_length: int = 4) -> list[Template]:
        """What `infill` completes."""
        templates = [infilling(text, self.tokenizer, span_length, self.bos_framed) for text in texts]
        return repeat([self.padded(template) for template in templates], num_samples)

    def rewritings(
        self, texts: Sequence[str], num_samples: int = 1, noise_level: float = 0.5, clamp: bool = False
    ) -> list[Template]:
        """What `rewrite` completes."""
        templates = [rewriting(text, self.tokenizer, noise_level, clamp, self.bos_framed) for text in texts]
        return repeat([self.padded(template) for template in templates], num_samples)

    def padded(self, template: Template) -> Template:
        """A text that is given whole, as an EOS-padded model knows it: with its end, and EOS nowhere else. A frame is
        closed."""
        if self.always_framed:
            return dataclasses.replace(template, token_ids=[*template.token_ids, self.tokenizer.eos], suffix=1)
        if not self.eos_padded:
            return template
        eos, suffix = self.tokenizer.eos, max(0, self.max_length - len(template.token_ids))
        token_ids, banned = template.token_ids + [eos] * suffix, (*template.banned, eos)
        return dataclasses.replace(template, token_ids=token_ids, suffix=suffix, banned=banned)

    def perturbations(self, blocks: Iterable[Sequence[int]], share: float = 0.5, clamp: bool = False) -> list[Template]:
        """The paper's conditional task: exactly this share of each block's words is noise; the model recovers them."""
        if self.denoiser.process is None:
            raise ValueError(f"{self.name} is autoregressive: it cannot recover words within a text")
        t = float(self.denoiser.process.noise.inverse(torch.tensor(1 - share, dtype=torch.float64)))
        prefix = int(self.bos_framed)
        return [
            Template(
                list(ids),
                [self.tokenizer.decode(ids[prefix:])],
                [],
                prefix,
                noise_level=t,
                clamp=clamp,
                exact_share=True,
            )
            for ids in blocks
        ]

    def complete(
        self,
        templates: Sequence[Template],
        settings: Settings,
        seed: int = 0,
        stop_at_eos: bool = False,
        batch_size: int = 32,
        logits_processors: Sequence[LogitsProcessor] = (),
        on_state: Callable[[State, int], None] | None = None,
    ) -> Iterator[Sample]:
        """Complete every template; samples come as soon as their batch is done.

        `on_state` sees each state and its batch size.
        """
        self.check(templates, settings)
        if batch_size < 1:
            raise ValueError(f"--batch-size must be at least 1 (got {batch_size}).")
        for rows in batches(templates, batch_size, self.denoiser.process is None):
            noise = sample_noise(seed, len(templates), rows)
            states = self.states([templates[k] for k in rows], settings, noise, logits_processors)
            state = last(states if on_state is None else _watched(states, on_state, len(rows)))
            for k, token_ids, nfe in zip(rows, state.x.tolist(), state.nfe, strict=True):
                token_ids = self.finished(token_ids, templates[k]) if stop_at_eos else token_ids
                yield Sample(k, templates[k].text(token_ids, self.decode), token_ids, nfe)

    def frames(self, templates: Sequence[Template], settings: Settings, seed: int = 0) -> Iterator[Frame]:
        """Complete templates of one length, and show every state on the way."""
        self.check(templates, settings)
        if len(batches(templates, len(templates), self.denoiser.process is None)) > 1:
            raise ValueError("only texts of one length can be watched together")
        noise = sample_noise(seed, len(templates), range(len(templates)))
        return self._frames(templates, self.states(templates, settings, noise, watch=True))

    def _frames(self, templates: Sequence[Template], states: Iterable[State]) -> Iterator[Frame]:
        for state in states:
            rows = state.x.tolist()
            texts = [
                template.text(self._so_far(token_ids, template), self.decode)
                for token_ids, template in zip(rows, templates, strict=True)
            ]
            probs = None if state.token_probs is None else state.token_probs.tolist()
            yield Frame(state.step, state.num_steps, rows, texts, state.nfe, probs)

    def finished(self, token_ids: list[int], template: Template) -> list[int]:
        """A sample up to its end."""
        return (without_padding if self.eos_padded else until_eos)(token_ids, template, self.tokenizer.eos)

    def _so_far(self, token_ids: list[int], template: Template) -> list[int]:
        """A sample on its way as it is, and once no mask is left as `sample` gives it."""
        done = self.eos_padded and max(token_ids) < self.denoiser.vocab
        return self.finished(token_ids, template) if done else token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, some of which may be masks."""
        parts = itertools.groupby(token_ids, lambda token: token >= self.tokenizer.vocab_size)
        return "".join(MASK * len(list(run)) if masked else self.tokenizer.decode(run) for masked, run in parts)

    def check(self, templates: Sequence[Template], settings: Settings) -> None:
        """Refuse templates that this model or these settings cannot complete, before anything is computed."""
        about = (self.name, self.denoiser.process, self.max_length, self.eos_padded)
        check_templates(templates, settings, *about)

    def states(
        self,
        templates: Sequence[Template],
        settings: Settings,
        rng: Rng,
        logits_processors: Sequence[LogitsProcessor] = (),
        watch: bool = False,
    ) -> Iterator[State]:
        """The states of templates that are completed together, all of one kind and length."""
        return complete_batch(
            self.denoiser, self.tokenizer, templates, settings, rng, max_length=self.max_length,
            compiled=self.compiled, logits_processors=logits_processors, watch=watch,
        )  # fmt: skip

    @property
    def _prefix(self) -> list[int]:
        """What every sequence begins with."""
        return [self.tokenizer.bos] if self.denoiser.process is None or self.bos_framed else []

    @property
    def always_framed(self) -> bool:
        """Whether every sequence stands between BOS and EOS tokens that the model never generates."""
        process = self.denoiser.process
        return self.bos_framed and process is not None and self.tokenizer.eos in process.special

    def _check_scoring(self, likelihood_samples: int, batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1 (got {batch_size}).")
        if likelihood_samples < 2 and self.denoiser.process is not None:
            raise ValueError(f"likelihood_samples must be at least 2, to estimate an error (got {likelihood_samples}).")

    def _filled(self, text: str, infill: str | Sequence[str] | Sample, span_length: int) -> tuple[ScoredSequence, int]:
        """A text with one of its infills as a sequence whose spans are scored, and the bytes of the infill."""
        causal, framed = self.denoiser.process is None, bool(self._prefix)
        if isinstance(infill, Sample):
            template = infilling(text, self.tokenizer, span_length, framed)
            token_ids, spans = infill.token_ids[: len(template.token_ids)], template.spans
            if len(token_ids) < len(template.token_ids) or any(
                given not in (OPEN, token) for given, token in zip(template.token_ids, token_ids, strict=True)
            ):
                raise ValueError(
                    f"sample {infill.index} was not generated from this text with span_length={span_length}; give the "
                    "text and the span_length of infill."
                )
            size = num_bytes(infill.text) - sum(map(num_bytes, template.pieces))
        else:
            parts = [infill] if isinstance(infill, str) else list(infill)
            token_ids, spans = fill(text, parts, self.tokenizer, framed)
            size = sum(map(num_bytes, parts))
        if causal and (len(spans) > 1 or spans[0][1] < len(token_ids)):
            raise ValueError(
                f"{self.name} is autoregressive: it can score a continuation, with one blank at the end of the text."
            )
        total = len(token_ids) + self.always_framed
        if self.max_length and total > self.max_length:
            raise ValueError(
                f"the filled text has {total} tokens, and {self.name} was trained on {self.max_length}; shorten it."
            )
        suffix = self.max_length - len(token_ids) if self.eos_padded and self.max_length and not causal else 0
        suffix = 1 if self.always_framed else suffix
        token_ids = token_ids + [self.tokenizer.eos] * suffix
        return ScoredSequence.of(token_ids, spans, len(self._prefix), suffix), size

    def _complete(
        self,
        templates: list[Template],
        settings: Mapping[str, Any],
        seed: int,
        batch_size: int,
        logits_processors: Sequence[LogitsProcessor],
        stop_at_eos: bool = False,
    ) -> list[Sample]:
        stop = stop_at_eos or self.eos_padded
        samples = self.complete(templates, self.resolve(settings), seed, stop, batch_size, logits_processors)
        return sorted(samples, key=lambda sample: sample.index)


def load(
    source: str | Path | None = None,
    device: Device = "auto",
    dtype: Dtype | Literal["auto"] = "auto",
    compile: bool = False,
    tokenizer: str | Path | None = None,
    network: nn.Module | None = None,
    bos_framed: bool | None = None,
    trust_remote_code: bool = False,
) -> Pipeline:
    """Open a model directory, a run (its newest checkpoint), a model that comes with the package by its name (`cdlm
    zoo` lists them; the best one if none is named), or an id of the model hub; those of MDLM and DUO too, and masked
    language models of transformers such as BERT. `trust_remote_code` allows such a model to run code of its own.

    `dtype` is the network's: bfloat16 on a GPU and float32 elsewhere unless given. `compile` takes a minute at first
    and pays for many samples. A `tokenizer` (a tokenizer.json, or a directory of GPT-2's files) is needed where the
    directory has none. A run of a network of your own needs that `network`, into which the weights are copied.
    `bos_framed` says whether the model was trained on blocks between BOS and EOS, where that differs from what the
    directory says or its layout implies.
    """
    source = zoo.HERE / zoo.BEST if source is None else source
    directory = pretrained.resolve_checkpoint(model_directory(source, trust_remote_code))
    chosen = pick_device(device)
    config = pretrained.read_model_config(directory)
    denoiser = pretrained.load_denoiser(directory, chosen, config, network, trust_remote_code)
    if dtype == "auto":  # whether a network of the user's own computes in bfloat16, nobody knows
        dtype = "bfloat16" if chosen.type == "cuda" and network is None else "float32"
    kept = weight_dtype(chosen, dtype)  # also where it is not taken: it knows what the device cannot do
    denoiser.to(torch.bfloat16 if dtype == "bfloat16" else kept).requires_grad_(False)
    words = tokenizer_of(directory, tokenizer)
    about, masked_lm = text_config(config, directory), denoiser.masked_lm
    if masked_lm is not None and "text" not in config:
        special = masked_lm["special"]
        about = {"max_length": masked_lm["max_length"], "bos_framed": words.bos in special and words.eos in special}
    num_tokens = denoiser.vocab if masked_lm is None else masked_lm["num_tokens"]
    if not words.vocab_size <= num_tokens < words.vocab_size + _MAX_UNUSED:
        raise ValueError(
            f"the tokenizer has {words.vocab_size} tokens and {source} {num_tokens}: they do not belong together"
        )
    if compile:
        accelerate(denoiser)
    name = str(source) if directory != pretrained.resolve_checkpoint(Path(source)) else directory.name
    if (directory / "state.json").is_file():
        name = f"{directory.parent.name}/{directory.name}"
    given = {} if bos_framed is None else {"bos_framed": bos_framed}
    return Pipeline(
        name,
        denoiser,
        words,
        compiled=compile,
        directory=directory,
        training=config.get("training") or {},
        generation_config=read_generation_config(directory, config),
        **{**about, **given},
    )


def sample_noise(seed: int, total: int, rows: Sequence[int]) -> Rng:
    """The noise of some of the samples of a call, by their numbers."""
    return seeded(operator.index(seed), "sample", batch=total, rows=torch.tensor(rows))


def _watched(states: Iterable[State], on_state: Callable[[State, int], None], size: int) -> Iterator[State]:
    for state in states:
        on_state(state, size)
        yield state


def _texts(texts: str | Sequence[str] | None) -> Sequence[str]:
    return [texts or ""] if texts is None or isinstance(texts, str) else texts
