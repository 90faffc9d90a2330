"""A model that writes: a denoiser with its tokenizer, from text to text.

    model = cdlm.load("runs/small-mcdlm")            # or nothing: the best model that comes with the package
    for text in model.sample(num=4, length=256, steps=8, seed=0):
        print(text)
    print(model.infill("The ___ sat on the ___.")[0])
    for frame in model.stream("Once upon a time", length=64, steps=16):
        print(frame.texts[0])

A text depends on the seed and its own index alone, not on the batch that it is drawn in: exactly so in float64 on a
CPU, elsewhere up to floating point (the last digits of a network may change with the shape of its batch).
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from cdlm import zoo
from cdlm.data.tokenizer import Tokenizer, has_tokenizer, tokenizer_of
from cdlm.devices import Device, Dtype, pick_device, weight_dtype
from cdlm.hub import folder_of, write_folder
from cdlm.model import pretrained
from cdlm.model.compile import accelerate
from cdlm.model.denoiser import Denoiser
from cdlm.process.process import Posterior
from cdlm.rng import Rng, seeded
from cdlm.sample.autoregressive import autoregressive
from cdlm.sample.generate import generate, shape
from cdlm.sample.plan import Drawing, DrawPrecision, State, last
from cdlm.sample.settings import Sampling, sampling_of
from cdlm.sample.timesteps import NEAR_ZERO
from cdlm.text.generation_config import about_text, own_settings
from cdlm.text.template import HOLE, Draft, blanks, continuation, ended, has_blanks, noised, times, trimmed
from cdlm.text.windows import windows
from cdlm.types import Tokens

MASK = "░"
_PADDED = 128  # outputs beyond the tokens, which round a vocabulary up, or stand for a [PAD] that texts never hold


@dataclasses.dataclass(frozen=True)
class Text:
    """A finished text; `print` shows it."""

    index: int
    text: str
    tokens: list[int]
    evaluations: int
    """Passes over the network that it took."""

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Frame:
    """Texts on their way: one picture of an animation."""

    step: int
    steps: int | None
    """How many there will be, where that is known."""
    tokens: list[list[int]]
    texts: list[str]
    """As far as they are written; a mask shows as a shaded block."""
    evaluations: list[int]
    chances: list[list[float]] | None = None
    """How probable the model found each token when it drew it; NaN for tokens that it did not draw."""


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """What `cdlm.load` returns. Settings beyond the named ones are those of `Sampling`: steps, temperature, ..."""

    name: str
    denoiser: Denoiser = dataclasses.field(repr=False)
    tokenizer: Tokenizer = dataclasses.field(repr=False)
    length: int
    """Tokens in a text that it was trained on; 0 if its folder does not say."""
    posterior: Posterior = "plug-in"
    framed: bool = False
    """Whether the texts it was trained on begin with a token of their own."""
    padded: bool = False
    """Whether they end with the end of text, and are filled up with it: then what is written ends there, too."""
    compiled: bool = False
    folder: Path | None = dataclasses.field(default=None, repr=False)
    trained: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    """By which method and how long, and from which model; as far as its folder says."""
    own: list[dict[str, Any]] = dataclasses.field(default_factory=list, repr=False)
    """Settings that it writes best with, as far as its folder says: they hold where a call says nothing. There may be
    several, for different numbers of steps; the first are the usual ones."""

    def sample(
        self,
        num: int = 1,
        length: int | None = None,
        prompt: str | Sequence[str] | None = None,
        seed: int = 0,
        trim: bool = False,
        batch: int = 32,
        **how: Any,
    ) -> list[Text]:
        """Write `num` texts, or `num` continuations of each prompt. `trim` ends a text at its end-of-text token."""
        return self._all(self.continuations(_several(prompt), num, length), how, seed, trim, batch)

    def infill(
        self, text: str | Sequence[str], num: int = 1, width: int = 4, seed: int = 0, batch: int = 32, **how: Any
    ) -> list[Text]:
        """Fill the blanks of a text, ___ with `width` tokens, [MASK] with one, [MASK:n] with n; the rest stays."""
        return self._all(self.infillings(_several(text), num, width), how, seed, False, batch)

    def rewrite(
        self,
        text: str | Sequence[str],
        num: int = 1,
        t: float = 0.5,
        clamp: bool = False,
        seed: int = 0,
        batch: int = 32,
        **how: Any,
    ) -> list[Text]:
        """Noise a text to time t and denoise it from there: the paper's conditional generation.

        A uniform model may change every token, as in the paper; `clamp` keeps those that the noise left alone.
        """
        return self._all(self.rewritings(_several(text), num, t, clamp), how, seed, False, batch)

    def stream(
        self, text: str = "", num: int = 1, length: int | None = None, seed: int = 0, width: int = 4, **how: Any
    ) -> Iterator[Frame]:
        """Watch texts being written, a frame for each evaluation. Blanks are filled; text without any is continued."""
        filling = has_blanks(text)
        drafts = self.infillings([text], num, width) if filling else self.continuations([text], num, length)
        return self.frames(drafts, self.settings(how), seed)

    def save_pretrained(
        self, folder: str | Path, dtype: Dtype = "float32", rows: Sequence[dict[str, Any]] = (), part: int | None = None
    ) -> Path:
        """Write a folder that `cdlm.load` opens anywhere, and transformers too (with trust_remote_code).

        It has a card; result `rows` of an evaluation go into it. `part` splits the weights into files of so many bytes.
        """
        if self.folder is None:
            raise ValueError(f"{self.name} was not loaded from a folder: there is no tokenizer to write beside it")
        text = {
            "max_length": self.length,
            "posterior": self.posterior,
            "bos_framed": self.framed,
            "eos_padded": self.padded,
        }
        about = {"text": text, "training": self.trained} | ({"sampling": self.own} if self.own else {})
        out = write_folder(self.denoiser, self.folder, about, Path(folder), dtype, rows, part)
        if not has_tokenizer(out):
            self.tokenizer.save(out)  # it was given apart from the folder
        return out

    def settings(self, how: dict[str, Any]) -> Sampling:
        """How a call is answered: as it says, and where it does not, as the model writes best."""
        return sampling_of(how, self.own)

    def continuations(self, prompts: Sequence[str], num: int = 1, length: int | None = None) -> list[Draft]:
        """What `sample` writes."""
        length = self.length if length is None else length
        if not length:
            raise ValueError(f"{self.name} does not say how long its texts are: give a length")
        causal = self.denoiser.process is None
        about = (length, self.tokenizer, self.framed, causal, self.length, not self.padded)
        return times([continuation(one, *about) for one in prompts], num)

    def infillings(self, texts: Sequence[str], num: int = 1, width: int = 4) -> list[Draft]:
        """What `infill` writes."""
        return times([self.filled(blanks(one, self.tokenizer, width, self.framed)) for one in texts], num)

    def rewritings(self, texts: Sequence[str], num: int = 1, t: float = 0.5, clamp: bool = False) -> list[Draft]:
        """What `rewrite` writes."""
        return times([self.filled(noised(one, self.tokenizer, t, clamp, self.framed)) for one in texts], num)

    def filled(self, draft: Draft) -> Draft:
        """A text that is given whole, as a padded model knows it: with its end, which it does not write elsewhere."""
        if not self.padded:
            return draft
        end, tail = self.tokenizer.eos, max(0, self.length - len(draft.ids))
        return dataclasses.replace(draft, ids=draft.ids + [end] * tail, tail=tail, without=(*draft.without, end))

    def perturbations(self, blocks: Iterable[Sequence[int]], share: float = 0.5, clamp: bool = False) -> list[Draft]:
        """The paper's conditional task: exactly this share of each block's words is noise; the model recovers them."""
        if self.denoiser.process is None:
            raise ValueError(f"{self.name} is autoregressive: it cannot recover words within a text")
        t = float(self.denoiser.process.noise.inverse(torch.tensor(1 - share, dtype=torch.float64)))
        lead = int(self.framed)
        return [
            Draft(list(ids), [self.tokenizer.decode(ids[lead:])], [], lead, level=t, clamp=clamp, evenly=True)
            for ids in blocks
        ]

    def write(
        self,
        drafts: Sequence[Draft],
        how: Sampling,
        seed: int = 0,
        trim: bool = False,
        batch: int = 32,
        show: Callable[[State, int], None] | None = None,
    ) -> Iterator[Text]:
        """Write every draft; texts come as soon as their batch is done. `show` sees each state, and its batch size."""
        self.check(drafts, how)
        if batch < 1:
            raise ValueError(f"a batch holds at least one text; got {batch}")
        for rows in self._batches(drafts, batch):
            states = self.states([drafts[k] for k in rows], how, _noise(seed, len(drafts), rows))
            state = last(states if show is None else _shown(states, show, len(rows)))
            for k, ids, evaluations in zip(rows, state.x.tolist(), state.evaluations, strict=True):
                ids = self.finished(ids, drafts[k]) if trim else ids
                yield Text(k, drafts[k].text(ids, self.show), ids, evaluations)

    def frames(self, drafts: Sequence[Draft], how: Sampling, seed: int = 0) -> Iterator[Frame]:
        """Write drafts of one length, and show every state on the way."""
        self.check(drafts, how)
        if len(self._batches(drafts, len(drafts))) > 1:
            raise ValueError("only texts of one length can be watched together")
        noise = _noise(seed, len(drafts), range(len(drafts)))
        return self._frames(drafts, self.states(drafts, how, noise, watched=True))

    def _frames(self, drafts: Sequence[Draft], states: Iterable[State]) -> Iterator[Frame]:
        for state in states:
            tokens = state.x.tolist()
            texts = [draft.text(self._so_far(ids, draft), self.show) for ids, draft in zip(tokens, drafts, strict=True)]
            chances = None if state.chance is None else state.chance.tolist()
            yield Frame(state.step, state.steps, tokens, texts, state.evaluations, chances)

    def finished(self, ids: list[int], draft: Draft) -> list[int]:
        """A text up to its end."""
        return (ended if self.padded else trimmed)(ids, draft, self.tokenizer.eos)

    def _so_far(self, ids: list[int], draft: Draft) -> list[int]:
        """A text on its way as it is, and once no mask is left as `sample` gives it."""
        return self.finished(ids, draft) if self.padded and max(ids) < self.denoiser.vocab else ids

    def show(self, ids: Sequence[int]) -> str:
        """The text of tokens some of which may be masks."""
        parts = itertools.groupby(ids, lambda i: i >= self.tokenizer.vocab_size)
        return "".join(MASK * len(list(run)) if masked else self.tokenizer.decode(run) for masked, run in parts)

    def check(self, drafts: Sequence[Draft], how: Sampling) -> None:
        """Refuse what cannot be written, before anything is computed."""
        process, longest = self.denoiser.process, max(len(draft.ids) for draft in drafts)
        how.check(process, self.posterior)
        if process is None and not all(draft.continues and draft.lead for draft in drafts):
            raise ValueError(f"{self.name} is autoregressive: it continues a prompt, and cannot fill blanks or rewrite")
        if process is not None and process.absorbing and any(draft.clamp for draft in drafts):
            raise ValueError("a masked model keeps the tokens that the noise left alone by itself: leave out clamp")
        if how.block and not self.length:
            raise ValueError(f"{self.name} does not say how long its own texts are, so none can be longer: no block")
        if how.block and not how.block < self.length < longest:
            raise ValueError(
                f"a block is for longer texts than the model's own length of {self.length}, and shorter than that; "
                f"got a block of {how.block} for {longest} tokens"
            )
        least = min((draft.level for draft in drafts if draft.level is not None), default=1.0)
        if how.tail != "none" and least <= NEAR_ZERO:
            raise ValueError(f"noise of {least:g} leaves nothing before a tail, which stands at {NEAR_ZERO:g}")
        if self.length and longest > self.length:
            if process is None or self.padded or not all(draft.continues for draft in drafts):
                over = next(draft for draft in drafts if len(draft.ids) == longest)
                room, filled = self.length - longest + over.written, over.level is None and not over.continues
                most = f"; beside its words, its blanks have room for {room} tokens at most" * (filled and room > 0)
                most = most or "; its texts end within them, so that it writes no longer ones in windows" * self.padded
                raise ValueError(
                    f"{longest} tokens are more than the {self.length} that {self.name} was trained on{most}"
                )
            if not how.block:
                raise ValueError(
                    f"{longest} tokens are more than the {self.length} that {self.name} was trained on; write them in "
                    f"windows: --block {self.length // 2} (in Python, block={self.length // 2})"
                )

    def states(self, drafts: Sequence[Draft], how: Sampling, rng: Rng, watched: bool = False) -> Iterator[State]:
        """Write drafts of one kind and length together."""
        ids = torch.tensor([draft.ids for draft in drafts], device=self.denoiser.device)
        process, first = self.denoiser.process, drafts[0]
        if process is None:
            naive = how.precision == "naive-fp32"
            precision: DrawPrecision = "fp32" if how.precision == "fp32" else "fp64"
            drawing = Drawing(shape(how, self.unwritable), precision=precision, compiled=self.compiled, watched=watched)
            return autoregressive(self.denoiser, ids[:, : -first.written], ids.shape[1], rng, drawing, naive)
        given = ids != HOLE
        x = torch.where(given, ids, process.start(ids.shape[1], rng("start"), ids.device))
        if first.level is not None:
            places = torch.arange(ids.shape[1], device=ids.device)
            edge = (places < first.lead) | (places >= ids.shape[1] - first.tail)
            noise, words = rng("noise"), (ids != self.tokenizer.eos) & (ids != self.tokenizer.bos) & ~edge
            if first.evenly:
                kept = process.kept_evenly(ids, first.level, noise, words)
            else:
                kept = process.kept(ids, first.level, noise)
            x = torch.where(edge | kept, ids, process.start(ids.shape[1], noise, ids.device))
            given = edge | (kept & first.clamp)

        def fill(x: Tokens, given: Bool[Tensor, "b l"], number: int) -> Iterator[State]:
            noise = rng("window", number)
            start, without = 1.0 if first.level is None else first.level, first.without + self.unwritable
            return generate(
                self.denoiser, process, x, how, noise, self.posterior, start, given, self.compiled, without, watched
            )

        own = self.length or ids.shape[1]
        return windows(fill, x, given, own, how.block or own)

    @property
    def unwritable(self) -> tuple[int, ...]:
        """Outputs of the network that stand for no token; they are never drawn."""
        return tuple(range(self.tokenizer.vocab_size, self.denoiser.vocab))

    def _batches(self, drafts: Sequence[Draft], size: int) -> list[list[int]]:
        """Drafts that can be written together, by number: the same length, noise, and for AR the same prompt length."""
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for number, draft in enumerate(drafts):
            given = draft.written if self.denoiser.process is None else 0
            kind = (len(draft.ids), draft.tail, draft.level, draft.clamp, draft.evenly, draft.without, given)
            kinds.setdefault(kind, []).append(number)
        return [rows[k : k + size] for rows in kinds.values() for k in range(0, len(rows), size)]

    def _all(self, drafts: Sequence[Draft], how: dict[str, Any], seed: int, trim: bool, batch: int) -> list[Text]:
        texts = self.write(drafts, self.settings(how), seed, trim or self.padded, batch)
        return sorted(texts, key=lambda text: text.index)


def load(
    source: str | Path | None = None,
    device: Device = "auto",
    dtype: Dtype | Literal["auto"] = "auto",
    compile: bool = False,
    tokenizer: str | Path | None = None,
) -> Model:
    """Open a model folder, a run (its newest checkpoint), a model that comes with the package by its name (`cdlm zoo`
    lists them; the best one if none is named), or an id of the model hub; MDLM's and DUO's too.

    `dtype` is the network's: bfloat16 on a GPU and float32 elsewhere unless told otherwise. `compile` takes a minute at
    first and pays for many texts. A `tokenizer` (a tokenizer.json, or a folder of GPT-2's files) is needed where the
    folder has none.
    """
    source = zoo.HERE / zoo.BEST if source is None else source
    folder = pretrained.newest(folder_of(source))
    chosen = pick_device(device)
    config = pretrained.read_model_config(folder)
    denoiser = pretrained.load(folder, chosen, config)
    if dtype == "auto":
        dtype = "bfloat16" if chosen.type == "cuda" else "float32"
    kept = weight_dtype(chosen, dtype)  # also where it is not taken: it knows what the device cannot do
    denoiser.to(torch.bfloat16 if dtype == "bfloat16" else kept).requires_grad_(False)
    words = tokenizer_of(folder, tokenizer)
    if not words.vocab_size <= denoiser.vocab < words.vocab_size + _PADDED:
        raise ValueError(
            f"the tokenizer has {words.vocab_size} tokens and {source} {denoiser.vocab}: they do not belong together"
        )
    if compile:
        accelerate(denoiser)
    about = about_text(config, folder)
    name = str(source) if folder != pretrained.newest(Path(source)) else folder.name
    if (folder / "state.json").is_file():
        name = f"{folder.parent.name}/{folder.name}"
    trained = config.get("training") or {}
    own = own_settings(config, folder)
    return Model(name, denoiser, words, compiled=compile, folder=folder, trained=trained, own=own, **about)


def _noise(seed: int, total: int, rows: Sequence[int]) -> Rng:
    return seeded(operator.index(seed), "sample", batch=total, rows=torch.tensor(rows))


def _shown(states: Iterable[State], show: Callable[[State, int], None], size: int) -> Iterator[State]:
    for state in states:
        show(state, size)
        yield state


def _several(texts: str | Sequence[str] | None) -> Sequence[str]:
    return [texts or ""] if texts is None or isinstance(texts, str) else texts
