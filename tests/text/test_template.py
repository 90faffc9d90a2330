"""Texts with masked spans: how they become tokens, and text again."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from cdlm.data import END
from cdlm.data.tokenizer import Tokenizer
from cdlm.text.template import (
    OPEN,
    Template,
    continuation,
    has_blanks,
    infilling,
    rewriting,
    without_padding,
)

from ..writers import BPE, BYTES, TOKENIZERS, Kind, Words, small, spelled

H = OPEN


def filled(template: Template, tokenizer: Tokenizer, *words: str) -> str:
    """The text of a template whose spans hold these words, one token each."""
    tokens = iter([tokenizer.encode(word) for word in words])
    ids = [i if i != OPEN else next(tokens) for i in template.token_ids]
    assert next(tokens, None) is None
    return template.text([j for i in ids for j in (i if isinstance(i, list) else [i])], tokenizer.decode)


@pytest.mark.parametrize(
    ("text", "ids", "pieces"),
    [
        ("a[MASK]b", [97, H, 98], ["a", "b"]),
        ("a[MASK:5]b", [97, *[H] * 5, 98], ["a", "b"]),
        ("a___b", [97, *[H] * 3, 98], ["a", "b"]),
        ("a____________b", [97, *[H] * 3, 98], ["a", "b"]),
        ("___", [H] * 3, ["", ""]),
        ("[MASK]b", [H, 98], ["", "b"]),
        ("b[MASK]", [98, H], ["b", ""]),
        ("[MASK][MASK:2]", [H] * 3, ["", ""]),
        ("a___[MASK]b", [97, *[H] * 4, 98], ["a", "b"]),
        ("[MASK]a[MASK]", [H, 97, H], ["", "a", ""]),
        ("a__[MASK]", [97, 95, 95, H], ["a__", ""]),
        ("[MASK:x][mask][MASK]", [*b"[MASK:x][mask]", H], ["[MASK:x][mask]", ""]),
        ("é[MASK] [MASK]", [195, 169, H, 32, H], ["é", " ", ""]),
    ],
)
def test_blanks_become_spans(text: str, ids: list[int], pieces: list[str]) -> None:
    template = infilling(text, BYTES, span_length=3)
    assert (template.token_ids, template.pieces) == (ids, pieces)
    assert has_blanks(text)
    assert {BYTES.eos, BYTES.bos} <= set(template.banned)


@pytest.mark.parametrize("text", ["", "no blank", "a__b", "[MASK:]", "[mask]"])
def test_a_text_without_blanks_says_how_to_mark_them(text: str) -> None:
    assert not has_blanks(text)
    with pytest.raises(ValueError, match=r"no blanks.*___.*\[MASK\]"):
        infilling(text, BYTES)


def test_a_blank_has_at_least_one_token() -> None:
    with pytest.raises(ValueError, match=r"between 1 and 100,000 tokens \(got \[MASK:0\]\)"):
        infilling("a[MASK:0]b", BYTES)
    with pytest.raises(ValueError, match=r"between 1 and 100,000 tokens \(got 0\)"):
        infilling("a___b", BYTES, span_length=0)


def test_all_blanks_together_have_a_limit() -> None:
    text = "[MASK:4]a" * 3
    assert len(infilling(text, BYTES, max_length=15).token_ids) == 15
    for longest in (14, 8, 1):
        with pytest.raises(ValueError, match=rf"at most {longest} tokens .* its blanks has \d+"):
            infilling(text, BYTES, max_length=longest)


def test_spans_are_found() -> None:
    assert infilling("[MASK:2]a[MASK]bc[MASK]", BYTES).spans == [(0, 2), (3, 4), (6, 7)]
    assert rewriting("abc", BYTES).spans == []


def test_text_is_put_together_around_its_spans() -> None:
    assert filled(infilling("a[MASK]b[MASK:2]", BYTES), BYTES, "X", "Y", "Z") == "aXbYZ"
    assert filled(infilling("[MASK][MASK]é", BYTES), BYTES, "X", "Y") == "XYé"
    assert filled(infilling("the ___ sat", BYTES, 1), BYTES, "X") == "the X sat"


def test_what_is_given_is_not_decoded() -> None:
    """A byte of a span cannot join the bytes of what is given."""
    template = infilling("é[MASK]é", BYTES)
    assert template.text([*"é".encode(), 0xC3, *"é".encode()], BYTES.decode) == "é�é"
    template = infilling(f"{END}[MASK]", BYTES)
    assert filled(template, BYTES, "x") == f"{END}x"


def test_a_word_carries_the_space_before_it() -> None:
    template = infilling("the [MASK] sat", BPE)
    assert template.token_ids == [*BPE.encode("the"), H, *BPE.encode(" sat")]
    assert len(BPE.encode(" cat")) == 1
    assert filled(template, BPE, " cat") == "the cat sat"
    assert filled(template, BPE, "x") == "the x sat"  # the space was given and stays
    assert filled(infilling("the  [MASK]", BPE), BPE, " cat") == "the  cat"
    assert filled(infilling("the\n[MASK]", BPE), BPE, " cat") == "the\n cat"
    assert filled(infilling("the[MASK]", BPE), BPE, " cat") == "the cat"


def test_only_the_last_of_several_spaces_is_lent() -> None:
    assert infilling("the  [MASK]", BPE).token_ids == [*BPE.encode("the "), H]
    assert continuation("the  ", 9, BPE).token_ids[: len(BPE.encode("the "))] == BPE.encode("the ")


def test_bytes_lend_no_space() -> None:
    template = infilling("the [MASK]", BYTES)
    assert template.token_ids == [*b"the ", H]
    assert filled(template, BYTES, " ") == "the  "


def test_one_space_between_two_blanks_stays() -> None:
    assert filled(infilling("[MASK] [MASK]", BYTES), BYTES, "x", "y") == "x y"
    assert filled(infilling("the [MASK:2] [MASK] sat", BPE), BPE, "x", "x", "y") == "the xx y sat"


def test_a_space_before_the_first_blank_stays() -> None:
    assert filled(infilling(" [MASK]", BPE), BPE, " cat") == " cat"
    assert filled(infilling(" [MASK]", BPE), BPE, "x") == " x"


# Continuations


def test_a_prompt_is_followed_by_a_span() -> None:
    template = continuation("ab", 5, BYTES)
    assert (template.token_ids, template.pieces, template.prefix) == ([97, 98, H, H, H], ["ab", ""], 0)
    assert template.is_continuation
    assert template.banned == ()  # a continuation may end its text
    assert filled(template, BYTES, "X", "Y", "Z") == "abXYZ"
    assert continuation("", 3, BYTES).token_ids == [H, H, H]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("abcd", "abcd"),
        ("ab..", "ab"),
        ("....", ""),
        ("a.cdef..", "acdef"),  # an end in the midst
        ("abc..x..", "abc"),  # a word behind it
        ("ab.de..x....", "abde"),
        ("..ab", "ab"),  # as many ends as words: rather the longer text
        ("...a", ""),
    ],
)
def test_a_padded_text_ends_where_ends_prevail(written: str, said: str) -> None:
    for prompt in ("", "the "):
        template = continuation(prompt, len(prompt) + len(written) + 1, BYTES, bos_framed=True)
        lead = [BYTES.bos, *BYTES.encode(prompt)] if prompt else [BYTES.bos]
        ids = lead + [BYTES.eos if letter == "." else ord(letter) for letter in written]
        assert template.text(without_padding(ids, template, BYTES.eos), BYTES.decode) == prompt + said


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 3))
def test_no_other_cut_is_less_wrong(ends: list[bool], given: int) -> None:
    ids = [BYTES.eos] + [97] * given + [BYTES.eos if end else 98 for end in ends]
    template = Template([BYTES.bos] + [97] * given + [H] * len(ends), ["", ""], [(1 + given, len(ids))], 1)
    kept = without_padding(ids, template, BYTES.eos)
    wrong = {cut: sum(ends[:cut]) + ends[cut:].count(False) for cut in range(len(ends) + 1)}
    best = max(cut for cut in wrong if wrong[cut] == min(wrong.values()))
    assert kept == ids[: 1 + given] + [98] * ends[:best].count(False)


def test_a_trimmed_text_ends_early() -> None:
    assert continuation("ab", 6, BYTES).text([*b"abX"], BYTES.decode) == "abX"
    assert continuation("ab", 6, BYTES).text([*b"ab"], BYTES.decode) == "ab"


def test_a_prompt_lends_its_last_space() -> None:
    template = continuation("the ", 3, BPE)
    assert template.token_ids == [*BPE.encode("the"), H, H]
    assert filled(template, BPE, " cat", " sat") == "the cat sat"


@pytest.mark.parametrize(
    ("framed", "causal", "prompt", "lead"),
    [
        (False, False, "ab", 0),
        (True, False, "ab", 1),
        (False, True, "", 1),  # a causal one could not
        (True, True, "ab", 1),
    ],
)
def test_a_block_begins_with_a_token_of_its_own(framed: bool, causal: bool, prompt: str, lead: int) -> None:
    template = continuation(prompt, 6, BYTES, framed, causal)
    assert template.prefix == lead
    assert template.token_ids == [BYTES.bos] * lead + list(prompt.encode()) + [H] * (6 - lead - len(prompt))
    assert filled(template, BYTES, *"x" * template.token_ids.count(H)) == prompt + "x" * template.token_ids.count(H)


def test_without_a_prompt_the_model_writes_the_token_that_begins_a_block() -> None:
    template = continuation("", 6, BYTES, bos_framed=True)
    assert (template.token_ids, template.prefix) == ([H] * 6, 0)
    assert template.text([BYTES.bos, *b"xxxxx"], BYTES.decode) == "xxxxx"
    assert template.text([*b"yxxxxx"], BYTES.decode) == "yxxxxx"  # an unfinished model may write something else there


@pytest.mark.parametrize(
    "make", [lambda: infilling("a[MASK]b", BYTES, bos_framed=True), lambda: rewriting("acb", BYTES, bos_framed=True)]
)
def test_other_templates_of_a_framed_model_begin_with_its_token(make) -> None:
    template = make()
    assert (template.token_ids[0], template.prefix) == (BYTES.bos, 1)
    assert template.text([BYTES.bos, *b"axb"], BYTES.decode) == "axb"


@pytest.mark.parametrize(("prompt", "length", "framed"), [("abc", 3, False), ("abcd", 3, False), ("ab", 3, True)])
def test_a_prompt_without_room_behind_it_is_refused(prompt: str, length: int, framed: bool) -> None:
    with pytest.raises(ValueError, match=f"no room in {length} tokens.*--max-length"):
        continuation(prompt, length, BYTES, framed)


def test_only_a_span_at_the_end_continues() -> None:
    assert infilling("ab[MASK:2]", BYTES).is_continuation
    assert infilling("[MASK]", BYTES).is_continuation
    assert not infilling("[MASK]a", BYTES).is_continuation
    assert not infilling("[MASK]a[MASK]", BYTES).is_continuation
    assert not rewriting("ab", BYTES).is_continuation


# Noise


def test_noise_falls_on_the_whole_text() -> None:
    template = rewriting("ab", BYTES, 0.25, clamp=True)
    assert (template.token_ids, template.noise_level, template.clamp) == ([97, 98], 0.25, True)
    assert template.text([120, 121], BYTES.decode) == "xy"
    assert rewriting("the cat ", BPE).token_ids == BPE.encode("the cat ")


@pytest.mark.parametrize("t", [0.0, -0.5, 1.01, float("nan")])
def test_a_noise_level_is_a_time(t: float) -> None:
    with pytest.raises(ValueError, match=rf"--noise-level must be .*\(got {t}\)"):
        rewriting("ab", BYTES, t)


def test_nothing_cannot_be_rewritten() -> None:
    with pytest.raises(ValueError, match="no text to rewrite"):
        rewriting("", BYTES)


# Text that a model cannot take


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
@pytest.mark.parametrize("text", ["\ud800", "ab\udc80c"])
def test_half_a_character_is_refused(tokenizer: Tokenizer, text: str) -> None:
    for make in (lambda: infilling(f"{text}___", tokenizer), lambda: infilling(f"___{text}", tokenizer)):
        with pytest.raises(ValueError, match="not valid UTF-8"):
            make()
    with pytest.raises(ValueError, match="not valid UTF-8"):
        continuation(text, 20, tokenizer)
    with pytest.raises(ValueError, match="not valid UTF-8"):
        rewriting(text, tokenizer)


def test_an_unknown_character_is_named() -> None:
    letters = spelled("abc ")
    assert filled(infilling("ab c[MASK]", letters), letters, "b") == "ab cb"
    for make in (
        lambda: infilling("ab[MASK]cé", letters),
        lambda: infilling("é[MASK]", letters),
        lambda: continuation("aéb", 9, letters),
        lambda: rewriting("é", letters),
    ):
        with pytest.raises(ValueError, match=r"this model cannot write '\w*é\w*'; leave it out or replace it"):
            make()


def vocabulary(folder: Path, unknown: str | None) -> Tokenizer:
    """A tokenizer of whole words; what it does not know becomes the unknown word, if it has one."""
    words = ["the", "cat", "sat", *([unknown] if unknown else [])]
    ids = {word: i for i, word in enumerate(words)}
    model = tokenizers.Tokenizer(models.WordLevel(ids, unknown) if unknown else models.WordLevel(ids))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens([END])
    model.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def test_known_words_are_taken(tmp_path: Path) -> None:
    words = vocabulary(tmp_path, "[UNK]")
    template = infilling("the [MASK] sat", words)
    assert template.token_ids == [0, H, 2]
    assert filled(template, words, "cat") == "the cat sat"


@pytest.mark.parametrize("unknown", ["[UNK]", None])
def test_an_unknown_word_is_named(tmp_path: Path, unknown: str | None) -> None:
    words = vocabulary(tmp_path, unknown)
    with pytest.raises(ValueError, match=r"cannot write '[^']*dog"):  # not 't', the first letter of a known word
        infilling("the dog [MASK]", words)


def test_blanks_between_words_are_told_apart(tmp_path: Path) -> None:
    """Where spaces are no tokens at all."""
    words = vocabulary(tmp_path, "[UNK]")
    assert filled(infilling("the [MASK] [MASK]", words), words, "cat", "sat") == "the cat sat"


# Whatever is given stays


@pytest.mark.parametrize("kind", ["masked", "uniform"])
@pytest.mark.parametrize("words", ["bytes", "bpe"])
@given(
    pieces=st.lists(st.text(max_size=6).filter(lambda piece: not has_blanks(piece)), min_size=2, max_size=4),
    widths=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    seed=st.integers(0, 99),
)
@example(pieces=["the ", " ", ""], widths=[1, 2, 1], seed=0)
@example(pieces=["e\u0301", "\u200d👩", "\r\n\t\x00"], widths=[1, 2, 1], seed=0)
@example(pieces=[f"a{END}", END], widths=[3, 1, 1], seed=0)
@settings(max_examples=25, deadline=None)
def test_what_is_given_stays(kind: Kind, words: Words, pieces: list[str], widths: list[int], seed: int) -> None:
    model, tokenizer = small(kind, words, length=128, favour=2.0), TOKENIZERS[words]
    marks = [f"[MASK:{width}]" for width in widths[: len(pieces) - 1]]
    text = "".join(a + b for a, b in zip(pieces, [*marks, ""], strict=True))
    found = model.infill(text, steps=3, seed=seed)[0]
    (template,) = model.infillings([text])
    inside = [token for token, wanted in zip(found.token_ids, template.token_ids, strict=True) if wanted == OPEN]
    assert all(wanted in (OPEN, token) for token, wanted in zip(found.token_ids, template.token_ids, strict=True))
    assert len(inside) == sum(widths[: len(marks)])
    assert all(0 <= token < tokenizer.vocab_size and token != tokenizer.eos for token in inside)
    assert found.text.startswith(pieces[0])
    assert found.text.endswith(pieces[-1])
    at = 0
    for piece in pieces:
        assert piece in found.text[at:]
        at = found.text.index(piece, at) + len(piece)
