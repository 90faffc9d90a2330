"""Judges: causal language models that say how surprising a text is, and what it looks like in their features.

A judge is always named, never chosen in silence: an id of the model hub or a folder of it (`gpt2-large` is the
paper's), one that installs as a package (see packages.py), or an autoregressive model of our own: an *in-domain*
judge, which has seen the very corpus that the models under test were trained on.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from cdlm.data import END
from cdlm.devices import Device, pick_device
from cdlm.eval.config import Protocol
from cdlm.eval.packages import PACKAGES, folder_of
from cdlm.extras import install
from cdlm.files import read_object
from cdlm.hub import hub_silence
from cdlm.model import pretrained
from cdlm.text.pipeline import load

WINDOW = 1024
PARTIAL = 1 << 29
"""Bytes of logits at a time on a CPU; a GPU takes eight times as many."""
CPU_TOKENS = 512
"""Tokens at a time on a CPU, which larger batches only slow down."""

Forward = Callable[
    [Int[Tensor, "b l"], Int[Tensor, "b"], Int[Tensor, "b"]], tuple[Float[Tensor, "b l"], Float[Tensor, "b d"]]
]
"""For right-padded ids, their lengths, and a position in each: the log-probability of every next token, and the hidden
state at that position."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a judge found in one text."""

    nats: float
    """Surprise, over the tokens that count."""
    tokens: int
    """How many count."""
    share: float
    """Of the text's tokens, those that fit into the window."""
    feature: NDArray[np.float32] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Judge:
    """A causal language model, loaded once, that reads texts in batches."""

    name: str
    kind: Literal["hub", "package", "in-domain"]
    encode: Callable[[str], list[int]]
    """Text to ids, nothing added at either end."""
    forward: Forward
    start: tuple[int, ...]
    """What comes before every text; empty for GPT-2, as in the published protocol."""
    eos: int
    window: int
    vocab: int
    fingerprint: str
    device: torch.device

    @property
    def label(self) -> str:
        return f"{self.name} (in-domain)" if self.kind == "in-domain" else self.name

    def ids(self, text: str) -> list[int]:
        """The text in the judge's own tokens, with its own token wherever one of the model's documents ends."""
        ids: list[int] = []
        for number, document in enumerate(text.split(END)):
            ids += [self.eos] * (number > 0) + (self.encode(document) if document else [])
        return ids

    @torch.no_grad()
    def read(
        self,
        texts: Sequence[str],
        protocol: Protocol = "robust",
        features: bool = False,
        show: Callable[[int], None] | None = None,
    ) -> list[Reading]:
        """Read every text up to the window, longest first. `show` is told how many texts are done at a time."""
        whole = [self.ids(text) for text in texts]
        cut = [ids[: self.window] for ids in whole]
        readings: list[Reading | None] = [None] * len(texts)
        order = sorted(range(len(texts)), key=lambda k: -len(cut[k]))
        while order:
            longest = max(1, len(self.start) + len(cut[order[0]]))
            room = PARTIAL * (8 if self.device.type == "cuda" else 1)
            size = room // (4 * self.vocab * longest)
            alike = sum(10 * (len(self.start) + len(cut[k])) >= 9 * longest for k in order)  # little padding
            size = min(size, alike, len(order) if self.device.type == "cuda" else CPU_TOKENS // longest)
            rows, order = order[: max(1, size)], order[max(1, size) :]
            for k, reading in zip(rows, self._batch([cut[k] for k in rows], protocol, features), strict=True):
                share = len(cut[k]) / len(whole[k]) if whole[k] else 1.0
                readings[k] = dataclasses.replace(reading, share=share)
            if show is not None:
                show(len(rows))
        return [reading for reading in readings if reading is not None]

    def _batch(self, ids: list[list[int]], protocol: Protocol, features: bool) -> list[Reading]:
        last = torch.tensor([max(1, len(self.start) + len(one)) - 1 for one in ids])
        if protocol == "paper":  # padded with the end of text, the first of which counts
            ids = [one + [self.eos] * (len(one) < self.window) for one in ids]
        lengths = torch.tensor([max(1, len(self.start) + len(one)) for one in ids])
        x = torch.full((len(ids), int(lengths.max())), self.eos)
        for row, one in zip(x, ids, strict=True):
            row[: len(self.start) + len(one)] = torch.tensor([*self.start, *one], dtype=torch.long)
        log_p, hidden = self.forward(*(part.to(self.device) for part in (x, lengths, last)))
        readings = []
        for row, one in enumerate(ids):
            first = 1 if protocol == "paper" or not self.start else 0
            where = [k + len(self.start) - 1 for k in counted(one, self.eos, first)]
            nats = -float(log_p[row, where].double().sum()) if where else 0.0
            feature = hidden[row].float().cpu().numpy() if features else None
            readings.append(Reading(nats, len(where), 1.0, feature))
        return readings


def counted(ids: Sequence[int], eos: int, first: int = 1) -> list[int]:
    """The positions whose surprise counts, from `first` on: every token but the ends of text, and the first of those.

    An end of text at position 0 is never counted; text after one is.
    """
    end = next((k for k, token in enumerate(ids) if token == eos), -1)
    return [k for k in range(first, len(ids)) if ids[k] != eos or (k == end and k > 0)]


def open_judge(name: str, device: Device = "auto") -> Judge:
    """The judge of that name: an installed package, a folder, or an id of the model hub."""
    chosen = pick_device(device)
    if name in PACKAGES:
        return _transformers(name, folder_of(name), "package", chosen, PACKAGES[name].start)
    folder = pretrained.newest(Path(name))
    if not folder.is_dir():
        if "/" in name.strip("/") and Path(name).parent.exists() and name.startswith((".", "/", "~", "runs")):
            raise ValueError(f"there is no judge {name}: the folder does not exist")
        return _transformers(name, name, "hub", chosen)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name} is no judge: it has no config.json; name a model folder, a run, or {_offers()}")
    if read_object(folder / "config.json").get("format") == "cdlm":
        return _ours(name, folder, chosen)
    return _transformers(name, folder, "hub", chosen)


def _ours(name: str, folder: Path, device: torch.device) -> Judge:
    """A causal model of our own."""
    model = load(folder, device.type, "float32")  # type: ignore[arg-type]
    if model.denoiser.process is not None:
        raise ValueError(
            f"{name} is a diffusion model, whose likelihood is only bounded; a judge is autoregressive: name "
            f"{_offers()}"
        )
    words = model.tokenizer

    def forward(
        x: Int[Tensor, "b l"], lengths: Int[Tensor, "b"], last: Int[Tensor, "b"]
    ) -> tuple[Float[Tensor, "b l"], Float[Tensor, "b d"]]:
        hidden = model.denoiser.features(x, torch.ones(len(x), dtype=torch.float64))
        law = model.denoiser.head(hidden[:, :-1])
        log_p = law.gather(-1, x[:, 1:, None])[..., 0]
        return log_p, hidden[torch.arange(len(x), device=x.device), last]

    return Judge(
        name=model.name,
        kind="in-domain",
        encode=words.encode,
        forward=forward,
        start=(words.bos,),
        eos=words.eos,
        # the start token takes one of the learned positions
        window=min(WINDOW, (model.max_length or WINDOW) - bool(model.denoiser.config.position_embeddings)),
        vocab=model.denoiser.vocab,
        fingerprint=fingerprint(folder),
        device=device,
    )


def _transformers(
    name: str, source: str | Path, kind: Literal["hub", "package"], device: torch.device, start: tuple[int, ...] = ()
) -> Judge:
    """Any causal model that the library opens."""
    try:
        import transformers
    except ImportError:
        raise ValueError(f"the judge {name} needs transformers; run in the checkout: {install('eval')}") from None
    transformers.utils.logging.disable_progress_bar()
    silence = None if isinstance(source, Path) else hub_silence()
    here = {"local_files_only": silence is not None}  # its cache, if it does not answer
    try:
        words = transformers.AutoTokenizer.from_pretrained(source, **here)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            **here,
            dtype=torch.float32,
            use_safetensors=True,  # pickles are not opened
        )
        model = model.eval().to(device)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        if silence is not None:
            raise ValueError(
                f"the judge {name} is not in the cache here, and the model hub cannot be reached ({silence}); connect "
                f"this machine, copy the model into a folder and name that, or name {_offers(name)}"
            ) from None
        raise ValueError(
            f"there is no judge {name} here, and the model hub did not give it ({reason}); name {_offers(name)}"
        ) from None
    model.requires_grad_(False)
    if words.eos_token_id is None:
        raise ValueError(f"the tokenizer of {name} has no token that ends a text; choose another judge")
    start = start or _start(words)
    longest = int(getattr(model.config, "max_position_embeddings", 0) or getattr(model.config, "n_positions", WINDOW))

    def forward(
        x: Int[Tensor, "b l"], lengths: Int[Tensor, "b"], last: Int[Tensor, "b"]
    ) -> tuple[Float[Tensor, "b l"], Float[Tensor, "b d"]]:
        mask = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        out = model(input_ids=x, attention_mask=mask.long(), output_hidden_states=True, use_cache=False)
        log_p = -torch.nn.functional.cross_entropy(
            out.logits[:, :-1].float().transpose(1, 2), x[:, 1:], reduction="none"
        )
        return log_p, out.hidden_states[-1][torch.arange(len(x), device=x.device), last]

    def encode(text: str) -> list[int]:
        ids: list[int] = words(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    commit = getattr(model.config, "_commit_hash", None)
    return Judge(
        name=name,
        kind=kind,
        encode=encode,
        forward=forward,
        start=start,
        eos=_end(words),
        window=min(WINDOW, longest - len(start)),
        vocab=model.config.vocab_size,
        fingerprint=commit or fingerprint(Path(source)),
        device=device,
    )


def _start(words: Any) -> tuple[int, ...]:
    """What the tokenizer itself puts before a text; nothing for GPT-2."""
    ids = words("a")["input_ids"]
    plain = words("a", add_special_tokens=False)["input_ids"]
    place = next((k for k in range(len(ids)) if ids[k : k + len(plain)] == plain), 0)
    return tuple(ids[:place])


def _end(words: Any) -> int:
    """The token between documents: <|endoftext|> where there is one, since a chat model ends its turns with another."""
    return words.get_vocab().get(END, words.eos_token_id)


def fingerprint(folder: Path) -> str:
    """A hash of the weights and of what it takes to read them: the same model under any name."""
    kinds = ("config.json", "model*.safetensors", "*.gguf", "tokenizer.*", "vocab.json", "merges.txt")
    files = [path for kind in kinds for path in sorted(folder.glob(kind))]
    hashes = (_hash(path, path.stat().st_mtime_ns, path.stat().st_size) for path in files)
    return hashlib.sha256(b"".join(hashes)).hexdigest()[:16]


@functools.lru_cache(maxsize=256)
def _hash(path: Path, changed: int, size: int) -> bytes:
    """Of a file's bytes; remembered for as long as it does not change."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _offers(tried: str = "") -> str:
    """The judges to choose from, without the one that was tried."""
    packages = (f"{name} ({package.install.partition(' (')[0]})" for name, package in PACKAGES.items())
    hub = ["gpt2-large (the paper's, from the model hub)"] if tried != "gpt2-large" else []
    return f"{', '.join([*hub, *packages])}, or a run of ar"
