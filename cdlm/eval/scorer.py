"""Judges: causal language models that say how surprising a text is, and what it looks like in their features.

A judge is always named, never chosen in offline: an id of the model hub or a folder of it (`gpt2-large` is the
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
from cdlm.eval.packages import INSTALL, PACKAGES, package_directory
from cdlm.extras import install
from cdlm.files import read_object
from cdlm.hub import hub_connection_error
from cdlm.model import pretrained
from cdlm.text.pipeline import load

WINDOW = 1024
LOGITS_BYTES = 1 << 29
"""Bytes of logits at a time on a CPU; a GPU takes eight times as many."""
CPU_TOKENS = 512
"""Tokens at a time on a CPU, which larger batches only slow down."""

Forward = Callable[
    [Int[Tensor, "b l"], Int[Tensor, "b"], Int[Tensor, "b"]], tuple[Float[Tensor, "b l"], Float[Tensor, "b d"]]
]
"""For right-padded ids, their lengths, and a position in each: the log-probability of every next token, and the hidden
state at that position."""


@dataclasses.dataclass(frozen=True)
class JudgeScore:
    """What a judge found in one text."""

    nats: float
    """The surprisal of the tokens that count."""
    num_tokens: int
    """How many count."""
    scored_fraction: float
    """Of the tokens of the text, those that fit into the window."""
    feature: NDArray[np.float32] | None = None
    """The last hidden state at the last token, if asked for."""


@dataclasses.dataclass(frozen=True, eq=False)
class Judge:
    """A causal language model, loaded once, that scores texts in batches."""

    name: str
    kind: Literal["hub", "package", "in-domain"]
    encode: Callable[[str], list[int]]
    """Text to token ids, nothing added at either end."""
    forward: Forward
    start: tuple[int, ...]
    """What comes before every text; empty for GPT-2, as in the published protocol."""
    eos: int
    window: int
    vocab_size: int
    fingerprint: str
    device: torch.device
    architecture: str = ""
    """As the library calls it, such as gpt2 or llama."""

    @property
    def label(self) -> str:
        return f"{self.name} (in-domain)" if self.kind == "in-domain" else self.name

    def encode_documents(self, text: str) -> list[int]:
        """The text in the judge's own tokens, with its EOS token between documents."""
        token_ids: list[int] = []
        for number, document in enumerate(text.split(END)):
            token_ids += [self.eos] if number else []
            token_ids += self.encode(document) if document else []
        return token_ids

    @torch.no_grad()
    def score(
        self,
        texts: Sequence[str],
        protocol: Protocol = "robust",
        features: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[JudgeScore]:
        """Score every text up to the window, longest first. `on_progress` gets the number of texts of each batch."""
        token_ids = [self.encode_documents(text) for text in texts]
        windows = [ids[: self.window] for ids in token_ids]
        scores: list[JudgeScore | None] = [None] * len(texts)
        order = sorted(range(len(texts)), key=lambda k: -len(windows[k]))
        while order:
            batch_size = self._batch_size([len(self.start) + len(windows[k]) for k in order])
            batch, order = order[:batch_size], order[batch_size:]
            for k, score in zip(batch, self._score_batch([windows[k] for k in batch], protocol, features), strict=True):
                fraction = len(windows[k]) / len(token_ids[k]) if token_ids[k] else 1.0
                scores[k] = dataclasses.replace(score, scored_fraction=fraction)
            if on_progress is not None:
                on_progress(len(batch))
        return [score for score in scores if score is not None]

    def _batch_size(self, lengths: Sequence[int]) -> int:
        """How many of these texts, longest first, are scored together: with little padding, and as memory allows."""
        on_gpu = self.device.type == "cuda"
        longest = max(1, lengths[0])
        fitting = LOGITS_BYTES * (8 if on_gpu else 1) // (4 * self.vocab_size * longest)
        similar = sum(10 * length >= 9 * longest for length in lengths)
        return max(1, min(fitting, similar, len(lengths) if on_gpu else CPU_TOKENS // longest))

    def _score_batch(self, batch: list[list[int]], protocol: Protocol, features: bool) -> list[JudgeScore]:
        last = torch.tensor([max(1, len(self.start) + len(ids)) - 1 for ids in batch])
        if protocol == "paper":  # closed by an EOS token, the first of which counts
            batch = [[*ids, self.eos] if len(ids) < self.window else ids for ids in batch]
        lengths = torch.tensor([max(1, len(self.start) + len(ids)) for ids in batch])
        x = torch.full((len(batch), int(lengths.max())), self.eos)
        for row, ids in zip(x, batch, strict=True):
            row[: len(self.start) + len(ids)] = torch.tensor([*self.start, *ids], dtype=torch.long)
        log_p, hidden = self.forward(*(part.to(self.device) for part in (x, lengths, last)))
        first = 1 if protocol == "paper" or not self.start else 0
        scores = []
        for row, ids in enumerate(batch):
            columns = [k + len(self.start) - 1 for k in scored_positions(ids, self.eos, first)]
            nats = -float(log_p[row, columns].double().sum()) if columns else 0.0
            feature = hidden[row].float().cpu().numpy() if features else None
            scores.append(JudgeScore(nats, len(columns), 1.0, feature))
        return scores


def scored_positions(ids: Sequence[int], eos: int, first: int = 1) -> list[int]:
    """The positions whose surprisal counts, from `first` on: every token that is no EOS, and the first EOS token.

    An EOS token at position 0 is never counted; text after one is.
    """
    first_eos = next((k for k, token in enumerate(ids) if token == eos), -1)
    return [k for k in range(first, len(ids)) if ids[k] != eos or (k == first_eos and k > 0)]


def open_judge(name: str, device: Device = "auto") -> Judge:
    """The judge of that name: an installed package, a directory, or an id of the model hub."""
    chosen = pick_device(device)
    if name in PACKAGES:
        return _open_transformers(name, package_directory(name), "package", chosen, PACKAGES[name].start)
    directory = pretrained.resolve_checkpoint(Path(name))
    if not directory.is_dir():
        if "/" in name.strip("/") and Path(name).parent.exists() and name.startswith((".", "/", "~", "runs")):
            raise ValueError(f"there is no judge {name}: the directory does not exist; name {_alternatives(name)}.")
        return _open_transformers(name, name, "hub", chosen)
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{name} is no judge: it has no config.json; name a model directory, a run, or {_alternatives()}."
        )
    if read_object(directory / "config.json").get("format") == "cdlm":
        return _open_autoregressive(name, directory, chosen)
    return _open_transformers(name, directory, "hub", chosen)


def _open_autoregressive(name: str, directory: Path, device: torch.device) -> Judge:
    """A causal model of our own."""
    model = load(directory, device.type, "float32")  # type: ignore[arg-type]
    if model.denoiser.process is not None:
        raise ValueError(
            f"{name} is a diffusion model, whose likelihood is only bounded; a judge is autoregressive: name "
            f"{_alternatives()}"
        )
    tokenizer = model.tokenizer

    def forward(
        x: Int[Tensor, "b l"], lengths: Int[Tensor, "b"], last: Int[Tensor, "b"]
    ) -> tuple[Float[Tensor, "b l"], Float[Tensor, "b d"]]:
        hidden = model.denoiser.features(x, torch.ones(len(x), dtype=torch.float64))
        log_probs = model.denoiser.head(hidden[:, :-1])
        log_p = log_probs.gather(-1, x[:, 1:, None])[..., 0]
        return log_p, hidden[torch.arange(len(x), device=x.device), last]

    return Judge(
        name=model.name,
        kind="in-domain",
        encode=tokenizer.encode,
        forward=forward,
        start=(tokenizer.bos,),
        eos=tokenizer.eos,
        # the start token takes one of the learned positions
        window=min(WINDOW, (model.max_length or WINDOW) - bool(model.denoiser.config.position_embeddings)),
        vocab_size=model.denoiser.vocab,
        fingerprint=fingerprint(directory),
        device=device,
    )


def _open_transformers(
    name: str, source: str | Path, kind: Literal["hub", "package"], device: torch.device, start: tuple[int, ...] = ()
) -> Judge:
    """Any causal model that the library opens."""
    try:
        import transformers
    except ImportError:
        raise ValueError(f"the judge {name} needs transformers; run in the checkout: {install('eval')}") from None
    transformers.utils.logging.disable_progress_bar()
    offline = None if isinstance(source, Path) else hub_connection_error()
    cached = {"local_files_only": offline is not None}  # without a connection, from the hub's cache
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **cached)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            **cached,
            dtype=torch.float32,
            use_safetensors=True,  # pickles are not opened
        )
        model = model.eval().to(device)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        if offline is not None:
            raise ValueError(
                f"the judge {name} is not in the cache here, and the model hub cannot be reached ({offline}); connect "
                f"this machine, copy the model into a folder and name that, or name {_alternatives(name)}"
            ) from None
        raise ValueError(
            f"there is no judge {name} here, and the model hub did not give it ({reason}); name {_alternatives(name)}"
        ) from None
    model.requires_grad_(False)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {name} has no token that ends a text; choose another judge")
    start = start or _start_tokens(tokenizer)
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
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    commit = getattr(model.config, "_commit_hash", None)
    return Judge(
        name=name,
        kind=kind,
        encode=encode,
        forward=forward,
        start=start,
        eos=_document_end(tokenizer),
        window=min(WINDOW, longest - len(start)),
        vocab_size=model.config.vocab_size,
        fingerprint=commit or fingerprint(Path(source)),
        device=device,
        architecture=model.config.model_type,
    )


def _start_tokens(tokenizer: Any) -> tuple[int, ...]:
    """What the tokenizer itself puts before a text; nothing for GPT-2."""
    ids = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    place = next((k for k in range(len(ids)) if ids[k : k + len(plain)] == plain), 0)
    return tuple(ids[:place])


def _document_end(tokenizer: Any) -> int:
    """The token between documents: <|endoftext|> where there is one, since a chat model ends its turns with another."""
    return tokenizer.get_vocab().get(END, tokenizer.eos_token_id)


def fingerprint(directory: Path) -> str:
    """A hash of the weights and of what it takes to read them: the same model under any name."""
    kinds = ("config.json", "model*.safetensors", "*.gguf", "tokenizer.*", "vocab.json", "merges.txt")
    files = [path for kind in kinds for path in sorted(directory.glob(kind))]
    hashes = (_hash(path, path.stat().st_mtime_ns, path.stat().st_size) for path in files)
    return hashlib.sha256(b"".join(hashes)).hexdigest()[:16]


@functools.lru_cache(maxsize=256)
def _hash(path: Path, changed: int, size: int) -> bytes:
    """Of a file's bytes; remembered for as long as it does not change."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _alternatives(tried: str = "") -> str:
    """The judges to choose from, without the one that was tried."""
    packages = (f"{name} ({INSTALL})" for name in PACKAGES)
    hub = ["gpt2-large (the paper's, from the model hub)"] if tried != "gpt2-large" else []
    return f"{', '.join([*hub, *packages])}, or a run of ar"
