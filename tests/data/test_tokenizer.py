"""Tokenizers: text survives the round trip, ids are those of the formats' own rules, files that are none are named."""

import json
import string
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from cdlm.data import END
from cdlm.data.tokenizer import Tokenizer

PROSE = "the cat sat on the mat, the hat sat on the cat.\n\nÜber naïve café — 東京 😀\n" * 20


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer.train([PROSE] * 3, 290)


@given(st.binary())
def test_bytes_are_their_own_ids(data: bytes) -> None:
    tokenizer = Tokenizer.load("bytes")
    ids = tokenizer.encode(data.decode("utf-8", "surrogateescape"))
    assert bytes(ids) == data
    assert tokenizer.decode(ids) == data.decode("utf-8", "replace")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_bytes(text: str) -> None:
    tokenizer = Tokenizer.load("bytes")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_a_trained_vocabulary(trained: Tokenizer, text: str) -> None:
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert all(0 <= i < trained.vocab_size for i in ids)


def test_bytes_need_257_ids_and_the_last_ends_a_text() -> None:
    tokenizer = Tokenizer.load("bytes")
    assert (tokenizer.vocab_size, tokenizer.eos, tokenizer.bos) == (257, 256, 256)
    assert tokenizer.decode([104, 105, 256]) == "hi" + END


def test_a_batch_is_the_texts_one_by_one(trained: Tokenizer) -> None:
    texts = ["the cat", "", "sat on\nthe mat"]
    for tokenizer in (trained, Tokenizer.load("bytes")):
        for ids, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
            assert ids.dtype == np.int64
            assert ids.tolist() == tokenizer.encode(text)


def test_training_merges_what_is_frequent_and_is_deterministic(trained: Tokenizer) -> None:
    assert trained.vocab_size == 290
    assert trained.decode([trained.eos]) == END
    assert len(trained.encode(" the")) == 1
    again = Tokenizer.train([PROSE] * 3, 290)
    assert again.model is not None
    assert trained.model is not None
    assert again.model.to_str() == trained.model.to_str()


def test_training_on_little_text_gives_a_smaller_vocabulary() -> None:
    tokenizer = Tokenizer.train(["abab"], 5000)
    assert 257 <= tokenizer.vocab_size < 300
    assert tokenizer.decode(tokenizer.encode("zebra")) == "zebra"


def test_training_survives_a_word_without_end() -> None:
    assert Tokenizer.train(["a" * 300_000], 280).vocab_size > 257


@pytest.mark.parametrize("kind", ["bytes", "trained"])
def test_saved_tokenizers_load_again(kind: str, trained: Tokenizer, tmp_path: Path) -> None:
    tokenizer = trained if kind == "trained" else Tokenizer.load("bytes")
    assert tokenizer.save(tmp_path) == tmp_path / "tokenizer.json"
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        again = Tokenizer.load(path)
        assert (again.vocab_size, again.eos, again.bos) == (tokenizer.vocab_size, tokenizer.eos, tokenizer.bos)
        assert again.encode(PROSE) == tokenizer.encode(PROSE)


def gpt2_folder(folder: Path, end: str = END) -> Path:
    """A small vocabulary in GPT-2's two files: the visible bytes, the space as Ġ, and merges for ` the` and `he`."""
    letters = [*string.ascii_letters, "Ġ", ".", "he", "Ġt", "Ġthe", end]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(letters)}))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nĠ t\nĠt he\n")
    return folder


def test_gpt2_files_split_and_merge_as_gpt2(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(gpt2_folder(tmp_path))
    names = {i: token for token, i in json.loads((tmp_path / "vocab.json").read_text()).items()}
    assert [names[i] for i in tokenizer.encode("the hat. the")] == ["t", "he", "Ġ", "h", "a", "t", ".", "Ġthe"]
    assert tokenizer.decode(tokenizer.encode("the hat. the")) == "the hat. the"
    assert tokenizer.vocab_size == len(names)
    assert names[tokenizer.eos] == END
    assert tokenizer.bos == tokenizer.eos
    assert tokenizer.kind == "gpt2"


def word_level(**settings: object) -> Library:
    library = Library(models.WordLevel({word: i for i, word in enumerate(["a", "b", "c", "?"])}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.decoder = decoders.Fuse()
    return library


def test_a_foreign_tokenizer_brings_its_own_start_and_end_and_shortens_nothing(tmp_path: Path) -> None:
    library = word_level()
    library.add_special_tokens(["[CLS]", "[SEP]"])
    library.enable_truncation(2)
    library.enable_padding(length=9)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (tokenizer.bos, tokenizer.eos, tokenizer.vocab_size) == (4, 5, 6)
    assert tokenizer.encode("a b c a b") == [0, 1, 2, 0, 1]


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    word_level().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"no token that ends a text; add one of <\|endoftext\|>"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "advice"),
    [
        ("tokenizer.json", "{not json", "is not a tokenizer.json"),
        ("tokenizer.json", "[1, 2]", "tokenizers library"),
        ("tokenizer.json", '{"version": "1.0"}', "tokenizers library"),
        ("tokenizer.json", '{"format": "cdlm-bytes", "version": 2}', "newer cdlm"),
        ("vocab.json", "{}", "both vocab.json and merges.txt"),
        ("other.txt", "", "both vocab.json and merges.txt"),
    ],
)
def test_what_is_no_tokenizer_is_named(name: str, content: str, advice: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=advice) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_bad_gpt2_files_are_named(tmp_path: Path) -> None:
    gpt2_folder(tmp_path, end="<end>")
    with pytest.raises(ValueError, match=r"has no <\|endoftext\|>"):
        Tokenizer.load(tmp_path)
    (tmp_path / "merges.txt").write_text("x y z\n")
    with pytest.raises(ValueError, match="not a byte-level BPE"):
        Tokenizer.load(tmp_path)


def test_a_missing_file_says_what_to_give() -> None:
    with pytest.raises(ValueError, match="'bytes', which needs no file"):
        Tokenizer.load("nowhere/tokenizer.json")
