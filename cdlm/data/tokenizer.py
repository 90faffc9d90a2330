"""Text to ids and back: plain bytes, GPT-2's files, any `tokenizer.json`, or a byte-level BPE trained on the spot."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from cdlm import zoo
from cdlm.data import BYTES, END

if TYPE_CHECKING:
    import tokenizers

Kind = Literal["bytes", "gpt2", "json", "trained"]

FILE = "tokenizer.json"
_BROKEN = "\ufffd"
_OURS = {"format": "cdlm-bytes", "version": 1}
_MASKS = ("[MASK]", "<|mask|>")
_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
_STARTS = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "[CLS]")


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary with an end-of-text id. `model` is None for plain bytes: ids 0 to 255, and 256 for the end."""

    kind: Kind
    model: "tokenizers.Tokenizer | None"
    vocab_size: int
    eos: int
    """Ends a document."""
    bos: int
    """Starts a block; the same as `eos` where the vocabulary has no token of its own for it."""

    @property
    def in_context(self) -> bool:
        """Whether the text of a token depends on the tokens before it: a WordPiece begins a word, or continues one."""
        return self.model is not None and type(self.model.decoder).__name__ == "WordPiece"

    @property
    def unknown(self) -> int | None:
        """The token that stands for words that the vocabulary cannot spell."""
        name = None if self.model is None else getattr(self.model.model, "unk_token", None)
        return None if self.model is None or name is None else self.model.token_to_id(name)

    @staticmethod
    def load(path: str | Path) -> "Tokenizer":
        """Open `bytes`, a tokenizer.json, a directory that holds one, one with GPT-2's vocab.json and merges.txt, or
        that of a bundled model."""
        if str(path) == BYTES:
            return Tokenizer(BYTES, None, 257, 256, 256)
        path = zoo.locate(Path(path))
        if path.is_dir() and (path / FILE).is_file():
            path = path / FILE
        if path.is_dir():
            return _gpt2(path)
        if not path.is_file():
            raise ValueError(
                f"there is no tokenizer at {path}; give a {FILE}, a directory with vocab.json and merges.txt, or "
                f"the word {BYTES!r}, which needs no file"
            )
        try:
            text = path.read_text(encoding="utf-8")
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a {FILE}: {error}") from None
        if fields == _bytes_for_others():
            return Tokenizer.load(BYTES)
        if isinstance(fields, dict) and fields.get("format") == _OURS["format"]:
            if fields.get("version") != _OURS["version"]:
                raise ValueError(
                    f"{path} was written by a newer cdlm, or is damaged; upgrade, or run cdlm prepare again"
                )
            return Tokenizer.load(BYTES)
        import tokenizers

        try:
            model = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path} is not a {FILE} that the tokenizers library reads: {error}") from None
        return _wrapped("json", model, path)

    @staticmethod
    def train(texts: Iterable[str], vocab: int) -> "Tokenizer":
        """A byte-level BPE as GPT-2's, of at most `vocab` tokens, all 256 bytes and the end of text included.

        The same texts give the same vocabulary; a small corpus may run out of pairs and give a smaller one.
        """
        from tokenizers import pre_tokenizers, trainers

        model = _byte_level()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab,
            min_frequency=2,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        model.train_from_iterator(map(_without_endless_words, texts), trainer)
        return _wrapped("trained", model, Path(FILE))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, nothing added at either end."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """The ids of several texts; other Python threads run meanwhile."""
        if self.model is None:
            return [np.frombuffer(_as_bytes(text), np.uint8).astype(np.int64) for text in texts]
        encoded = self.model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int64) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens by name; bytes that are not UTF-8 show as the replacement character."""
        if self.model is not None:
            return self.model.decode(list(ids), skip_special_tokens=False)
        data = b"".join(END.encode() if i == self.eos else bytes([i]) for i in ids)
        return data.decode("utf-8", errors="replace")

    def pieces(self, ids: Sequence[int]) -> list[str | None]:
        """A text token by token, None for a mask. Where a character is spread over tokens, the first of them shows
        it."""
        found: list[str | None] = [None if one >= self.vocab_size else self.decode([one]) for one in ids]
        place = 0
        while place < len(found):
            piece, width = found[place], 1
            while piece is not None and _BROKEN in piece and width < 4:
                run = list(ids[place : place + width + 1])
                if len(run) <= width or found[place + width] is None:
                    break
                width += 1
                whole = self.decode(run)
                if _BROKEN not in whole:
                    found[place : place + width] = [whole] + [""] * (width - 1)
                    break
            place += width if found[place] is not None and _BROKEN not in (found[place] or "") else 1
        return found

    def save(self, path: str | Path) -> Path:
        """Write a tokenizer.json, or one into a directory, that `load` opens again."""
        path = Path(path)
        path = path / FILE if path.is_dir() else path
        text = json.dumps(_OURS) if self.model is None else self.model.to_str(pretty=True)
        path.write_text(text + "\n", encoding="utf-8")
        return path


def write_for_transformers(tokenizer: Tokenizer, folder: Path, mask_token_id: int | None, max_length: int) -> None:
    """What `AutoTokenizer` needs beside the files of `tokenizer` in a model directory: tokenizer_config.json, with the
    special tokens. The mask gets its id by being added after the tokens, and after names for the ids between them.

    Bytes get a tokenizer.json that other libraries read; `Tokenizer.load` knows it again.
    """
    if tokenizer.model is None:
        (folder / FILE).write_text(json.dumps(_bytes_for_others(), ensure_ascii=False) + "\n", encoding="utf-8")
    names = {END: tokenizer.eos} if tokenizer.model is None else tokenizer.model.get_vocab(with_added_tokens=True)
    special = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos, "pad_token": tokenizer.eos}
    config: dict[str, object] = {
        "tokenizer_class": "GPT2Tokenizer" if tokenizer.kind == "gpt2" else "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        **{role: _name_of(token_id, names) for role, token_id in special.items()},
    }
    if max_length:
        config["model_max_length"] = max_length
    if mask_token_id is not None:
        mask = next(name for name in _MASKS if name not in names)
        added = {token_id: f"<|unused{token_id}|>" for token_id in range(tokenizer.vocab_size, mask_token_id)}
        flags = {"single_word": False, "rstrip": False, "normalized": False, "special": True}
        config["mask_token"] = mask
        config["added_tokens_decoder"] = {
            str(token_id): {"content": name, "lstrip": name == mask, **flags}
            for token_id, name in {**added, mask_token_id: mask}.items()
        }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _name_of(token_id: int, names: Mapping[str, int]) -> str:
    return next(name for name, value in names.items() if value == token_id)


@functools.cache
def _bytes_for_others() -> dict[str, object]:
    """The tokenizer of plain bytes in the format of the tokenizers library: a BPE without merges."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + k) for k, byte in enumerate(others)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": 256, "content": END, **flags}],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {characters[byte]: byte for byte in range(256)}, "merges": []},
    }


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (FILE, "vocab.json"))


def tokenizer_of(folder: Path, given: str | Path | None) -> Tokenizer:
    """That of a model directory; the given one where it has none."""
    if has_tokenizer(folder):
        if given is not None:
            Tokenizer.load(given)  # not needed here, but a name that leads nowhere is an error
        return Tokenizer.load(folder)
    if given is None and (folder.parent / "moons.json").is_file():
        raise ValueError(
            f"{folder} is a model of two moons and writes no text; for one that does: cdlm train tiny-mcdlm --data data"
        )
    if given is None:
        raise ValueError(
            f"{folder} has no tokenizer.json to turn tokens into text: copy the one it was trained with there, or name "
            "it with --tokenizer (for GPT-2's: a directory with vocab.json and merges.txt)"
        )
    return Tokenizer.load(given)


def _as_bytes(text: str) -> bytes:
    """UTF-8, and the raw bytes that Python's `surrogateescape` has put into a text come out as they went in."""
    return text.encode("utf-8", errors="surrogateescape")


def _without_endless_words(text: str) -> str:
    """Break words beyond 1000 characters, such as encoded data: training takes a time quadratic in their length."""
    return re.sub(r"\S{1000}", r"\g<0> ", text) if re.search(r"(?<!\S)\S{1000}", text) else text


def _byte_level(vocab: str | None = None, merges: str | None = None) -> "tokenizers.Tokenizer":
    """GPT-2's pipeline: split into words with their leading space, bytes as characters, merges within a word."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    model = tokenizers.Tokenizer(models.BPE.from_file(vocab, merges) if vocab and merges else models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return model


def _gpt2(folder: Path) -> Tokenizer:
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    for path in (vocab, merges):
        if not path.is_file():
            raise ValueError(f"{folder} is no tokenizer: it needs {FILE}, or both vocab.json and merges.txt")
    try:
        model = _byte_level(str(vocab), str(merges))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{vocab} and {merges} are not a byte-level BPE: {error}") from None
    if model.token_to_id(END) is None:
        raise ValueError(f"{vocab} has no {END}, which must end every document; take GPT-2's own vocab.json")
    model.add_special_tokens([END])
    return _wrapped("gpt2", model, folder)


def _wrapped(kind: Kind, model: "tokenizers.Tokenizer", path: Path) -> Tokenizer:
    model.no_truncation()  # a tokenizer.json may ask for either, and would silently shorten documents
    model.no_padding()
    special = {token.content: i for i, token in model.get_added_tokens_decoder().items()}
    frame = model.encode("").ids  # what a post-processor puts around a text, such as [CLS] and [SEP]
    if len(frame) == 2:
        return Tokenizer(kind, model, _size(model), eos=frame[1], bos=frame[0])
    eos = next((special[name] for name in _ENDS if name in special), None)
    if eos is None:
        raise ValueError(f"{path} has no token that ends a text; add one of {', '.join(_ENDS)} to its added_tokens")
    bos = next((special[name] for name in _STARTS if name in special), eos)
    return Tokenizer(kind, model, _size(model), eos, bos)


def _size(model: "tokenizers.Tokenizer") -> int:
    return max(model.get_vocab(with_added_tokens=True).values()) + 1
