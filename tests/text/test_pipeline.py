"""From text to text: what models write, fill in, rewrite, and refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cdlm
from cdlm.data import END
from cdlm.model.denoiser import Denoiser
from cdlm.model.dit import DiT
from cdlm.sample.settings import Sampling
from cdlm.text.pipeline import MASK, Model

from ..writers import BPE, BYTES, Kind, Words, small, spelled, write_model

# Writing


@pytest.mark.parametrize("kind", ["masked", "uniform", "causal"])
def test_a_text_depends_on_its_seed_and_number_alone(kind: Kind) -> None:
    model, prompts, how = small(kind), ["", "ab", "the sea", "xy"], {} if kind == "causal" else {"steps": 8}
    one, three, many = (
        model.sample(num=3, prompt=prompts, length=24, seed=5, batch=batch, **how) for batch in (1, 3, 32)
    )
    assert one == three == many
    assert model.sample(num=2, length=24, seed=5, **how) == one[:2]
    assert model.sample(num=3, prompt=prompts, length=24, seed=6, **how) != one
    assert len({text.text for text in one}) == len(one)


@pytest.mark.parametrize("kind", ["masked", "uniform", "causal"])
@pytest.mark.parametrize("words", ["bytes", "bpe"])
def test_continuations_come_in_order_behind_their_prompts(kind: Kind, words: Words) -> None:
    model, prompts = small(kind, words), ["the cat", "a", "", "the old sea é"]
    texts = model.sample(num=2, prompt=prompts, length=28, batch=3)
    assert [text.index for text in texts] == list(range(8))
    lead = [model.tokenizer.bos] if kind == "causal" else []
    for text in texts:
        given = [*lead, *model.tokenizer.encode(prompts[text.index // 2])]
        assert text.token_ids[: len(given)] == given
        assert len(text.token_ids) == 28
        assert max(text.token_ids) < model.denoiser.vocab  # no mask is left
        assert str(text) == text.text == prompts[text.index // 2] + model.tokenizer.decode(text.token_ids[len(given) :])


def test_evaluations_are_counted() -> None:
    assert [text.nfe for text in small("uniform").sample(num=3, steps=5)] == [5, 5, 5]
    assert [text.nfe for text in small("causal").sample(num=2, prompt="abc", length=20)] == [16, 16]
    calls = []
    model = small("masked")
    show = model.complete(
        model.continuations([""]), Sampling(steps=5), show=lambda state, size: calls.append((state, size))
    )
    text = next(show)
    assert [size for _, size in calls] == [1] * (text.nfe + 1)
    assert text.nfe == 5


@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_a_framed_model_sees_the_token_that_begins_a_block(kind: Kind) -> None:
    text = small(kind, framed=True).sample(prompt="ab", length=8, steps=3)[0]
    assert text.token_ids[:3] == [BYTES.bos, *b"ab"]
    assert text.text == "ab" + BYTES.decode(text.token_ids[3:])


@pytest.mark.parametrize("words", ["bytes", "bpe"])
@pytest.mark.parametrize("prompt", ["", "the cat", "the cat "])
def test_a_stream_begins_with_masks_and_ends_with_the_text(words: Words, prompt: str) -> None:
    model = small("masked", words)
    frames = list(model.stream(prompt, num=2, length=16, steps=4, seed=7))
    texts = model.sample(num=2, prompt=prompt, length=16, steps=4, seed=7)
    given = len(model.tokenizer.encode(prompt.rstrip() if words == "bpe" else prompt))
    assert frames[0].tokens == [text.token_ids[:given] + [model.denoiser.vocab] * (16 - given) for text in texts]
    assert all(text.endswith(MASK * (16 - given)) and text.count(MASK) == 16 - given for text in frames[0].texts)
    assert [frame.step for frame in frames] == list(range(len(frames)))
    assert {frame.num_steps for frame in frames} == {len(frames) - 1}
    assert frames[-1].tokens == [text.token_ids for text in texts]
    assert frames[-1].evaluations == [text.nfe for text in texts]
    assert frames[-1].texts == [text.text for text in texts]


def test_a_stream_of_an_autoregressive_model_grows() -> None:
    model = small("causal")
    frames = list(model.stream("ab", length=12, seed=2))
    assert [len(frame.token_ids[0]) for frame in frames] == list(range(3, 13))
    assert frames[0].texts == ["ab"]
    assert frames[-1].tokens[0] == model.sample(prompt="ab", length=12, seed=2)[0].tokens


def test_a_stream_fills_blanks() -> None:
    model = small("masked")
    frames = list(model.stream("a[MASK:2]b___", width=3, steps=4, seed=3))
    assert frames[0].texts == [f"a{MASK * 2}b{MASK * 3}"]
    assert frames[-1].tokens[0] == model.infill("a[MASK:2]b___", width=3, steps=4, seed=3)[0].tokens


def test_only_texts_of_one_length_are_watched_together() -> None:
    model = small("masked")
    templates = model.infillings(["a[MASK]", "ab[MASK]"])
    with pytest.raises(ValueError, match="one length"):
        model.frames(templates, Sampling())


@pytest.mark.parametrize("kind", ["masked", "uniform", "causal"])
def test_trimming_ends_a_text_at_its_end(kind: Kind) -> None:
    model = small(kind, favour=3.0)
    whole, cut = (model.sample(num=6, prompt=["", "ab"], length=24, trim=trim) for trim in (False, True))
    ends = 0
    for long, short in zip(whole, cut, strict=True):
        first = next((k for k in range(1, 24) if long.tokens[k] == BYTES.eos), None)  # one at 0 begins a block
        ends += first is not None
        assert short.tokens == long.tokens[:first]
        assert short.text == (long.text if first is None else long.text.removesuffix(BYTES.decode(long.tokens[first:])))
    assert 0 < ends < 12  # otherwise choose another `favour`


def test_an_end_of_text_that_was_given_does_not_trim() -> None:
    model = small("masked", "bpe", favour=100.0)
    text = model.sample(prompt=f"the cat{END}the", length=24, steps=4, trim=True)[0]
    assert text.text == f"the cat{END}the"
    assert text.token_ids == BPE.encode(text.text)


# Filling in


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("masked", {"order": order}) for order in ("dilated", "bit-reversed", "probability", "margin")),
        ("masked", {"order": "first-hitting", "steps": None}),
        ("masked", {"order": "entropy-bound", "bound": 1.0}),
        *((kind, {"corrector": corrector}) for kind in ("masked", "uniform") for corrector in ("constant", "loop")),
        *((kind, {"tail": tail}) for kind in ("masked", "uniform") for tail in ("none", "sample", "argmax")),
        *((kind, {"precision": "naive-fp32"}) for kind in ("masked", "uniform")),
        ("uniform", {"posterior": "mixture"}),
        ("masked", {"top_k": 3, "top_p": 0.9, "temperature": 0.5, "grid": "cosine"}),
    ],
)
def test_every_sampler_keeps_what_is_given_and_ends_no_blank(kind: Kind, how: dict[str, object]) -> None:
    """Even where the model would write nothing but the end of text."""
    model = small(kind, favour=50.0)
    for text in model.infill("ab[MASK:9]cd___", num=3, **{"steps": 6, **how}):
        assert len(text.token_ids) == 17
        assert (text.token_ids[:2], text.token_ids[11:13]) == (list(b"ab"), list(b"cd"))
        assert max(text.token_ids) < BYTES.eos


def test_several_texts_are_filled_in_order() -> None:
    """Although those of one length are written together."""
    texts = small("masked").infill(["a[MASK]", "[MASK:3]b", "c___", "d[MASK]"], num=2, width=1, steps=3)
    assert [text.index for text in texts] == list(range(8))
    assert [len(text.token_ids) for text in texts] == [2, 2, 4, 4, 2, 2, 2, 2]
    assert [text.text[-1 if text.index in (2, 3) else 0] for text in texts] == [*"aabbccdd"]


def test_bytes_are_put_between_given_text_as_they_are() -> None:
    text = small("masked").infill("é[MASK:3]é", num=1, steps=3)[0]
    assert text.token_ids[:2] == text.token_ids[-2:] == list("é".encode())
    assert text.text == f"é{bytes(text.token_ids[2:5]).decode(errors='replace')}é"


# Rewriting


TEXT = "the cat sat on the old mat."


@pytest.mark.parametrize(("kind", "clamp"), [("masked", False), ("uniform", True), ("uniform", False)])
def test_rewriting_keeps_what_the_noise_left_alone(kind: Kind, clamp: bool) -> None:
    model, given = small(kind), list(TEXT.encode())
    frames = list(model.frames(model.rewritings([TEXT], 8, 0.4, clamp), Sampling(steps=8), seed=1))
    alone = [[a == b for a, b in zip(row, given, strict=True)] for row in frames[0].tokens]
    share = sum(map(sum, alone)) / (8 * len(given))
    assert 0.45 < share < 0.75  # alpha(0.4) = 0.6, five standard errors on each side
    kept = [
        all(a == b for a, b, stays in zip(row, given, where, strict=True) if stays)
        for row, where in zip(frames[-1].tokens, alone, strict=True)
    ]
    assert all(kept) if kind == "masked" or clamp else not any(kept)
    assert all(row != given for row in frames[-1].tokens)
    assert max(max(row) for row in frames[-1].tokens) < 257
    texts = model.rewrite(TEXT, num=8, t=0.4, clamp=clamp, steps=8, seed=1)
    assert [text.token_ids for text in texts] == frames[-1].tokens
    assert [text.text for text in texts] == [BYTES.decode(row) for row in frames[-1].tokens]


@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_rewriting_from_pure_noise_forgets_the_text(kind: Kind) -> None:
    model = small(kind)
    for text in model.rewrite(TEXT, num=4, t=1.0, steps=8):
        same = sum(a == b for a, b in zip(text.token_ids, TEXT.encode(), strict=True))
        assert same < len(TEXT) / 2
        assert text.nfe > 0


def test_a_masked_model_needs_no_clamp() -> None:
    with pytest.raises(ValueError, match="leave out clamp"):
        small("masked").rewrite(TEXT, clamp=True)


# Longer than the model


def test_more_than_the_model_knows_is_refused_and_block_named() -> None:
    with pytest.raises(ValueError, match=r"50 tokens are more than the 32 .* --block 16"):
        small("masked").sample(length=50)


@pytest.mark.parametrize("kind", ["masked", "uniform"])
@pytest.mark.parametrize("prompt", ["", "ab", "x" * 40])
def test_blocks_write_longer_texts(kind: Kind, prompt: str) -> None:
    model = small(kind)
    one, two = (model.sample(num=2, prompt=prompt, length=70, block=10, steps=4, batch=batch) for batch in (1, 2))
    assert one == two
    for text in one:
        assert len(text.token_ids) == 70
        assert text.token_ids[: len(prompt)] == list(prompt.encode())
        assert max(text.token_ids) < 257
    frames = list(model.stream(prompt, length=70, block=10, steps=4))
    assert frames[-1].tokens[0] == one[0].tokens
    assert frames[-1].evaluations[0] == one[0].evaluations
    assert [frame.step for frame in frames] == sorted({frame.step for frame in frames})


# Refusals


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model.infill("a ___ b"),
        lambda model: model.infill("a ___", num=9),  # a blank holds no end of text, which this model could not promise
        lambda model: model.infill("___"),
        lambda model: model.rewrite("a b"),
        lambda model: model.stream("a ___ b"),
    ],
    ids=["within", "last", "alone", "rewrite", "stream"],
)
def test_an_autoregressive_model_only_continues(use: Callable[[Model], object]) -> None:
    with pytest.raises(ValueError, match="autoregressive"):
        use(small("causal", favour=3.0))


def test_an_autoregressive_model_has_no_windows() -> None:
    model = small("causal")
    with pytest.raises(ValueError, match=r"33 tokens are more than the 32 that small was trained on$"):
        model.sample(length=33)
    with pytest.raises(ValueError, match="block"):
        model.sample(length=40, block=8)


def test_a_prompt_given_as_the_number_of_texts_is_pointed_out() -> None:
    model: Any = small("masked")
    with pytest.raises(TypeError, match=r"how many texts to write; got 'hello'; a text to continue goes with prompt="):
        model.sample("hello")


def test_the_windows_that_a_long_prompt_is_told_of_write_it() -> None:
    assert len(small("masked").sample(prompt="x" * 40, length=56, block=16, steps=2)[0].tokens) == 56


def test_an_unknown_setting_lists_those_there_are() -> None:
    model = small("masked")
    with pytest.raises(TypeError, match=r"no setting 'temprature'; there are: steps, .*temperature, .*block"):
        model.sample(temprature=0.5)
    with pytest.raises(TypeError, match="no setting 'length'"):
        model.infill("a___", length=12)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that must not run."""

    def run(*_: object, **__: object) -> None:
        raise AssertionError("the network ran")

    for where, name in ((Denoiser, "features"), (Denoiser, "logits"), (DiT, "extend"), (DiT, "forward")):
        monkeypatch.setattr(where, name, run)


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(
    ("kind", "use", "advice"),
    [
        ("masked", lambda m: m.sample(steps=0), "--steps must be at least 1"),
        ("masked", lambda m: m.sample(length=33), "more than the 32"),
        ("masked", lambda m: m.sample(length=1), "at least 2 tokens"),
        ("masked", lambda m: m.sample(prompt="x" * 32), "room in a text of 32; .*: --length 48 --block 16"),
        ("masked", lambda m: m.sample(prompt="x" * 8, length=8), "in a text of 8; shorten it or raise --length$"),
        ("causal", lambda m: m.sample(prompt="x" * 32), "in a text of 32; shorten it$"),
        ("masked", lambda m: m.infill("x[MASK:200]yz"), "203 tokens .* its blanks have room for 29 tokens at most"),
        ("masked", lambda m: m.sample(prompt=["ab", "x" * 10], length=8), "leaves no room in a text of 8"),
        ("masked", lambda m: m.infill("x" * 30 + "___"), "34 tokens are more than the 32"),
        ("masked", lambda m: m.infill("nothing"), "nothing to fill in"),
        ("masked", lambda m: m.rewrite("x" * 33), "33 tokens are more than the 32 that small was trained on$"),
        ("masked", lambda m: m.rewrite("x", t=0.0), r"time in \(0, 1\]"),
        ("masked", lambda m: m.sample(prompt="a\ud800"), "not valid UTF-8"),
        ("masked", lambda m: m.sample(temperature=0.0), "temperature must be above 0"),
        ("masked", lambda m: m.sample(temperature=-1.0), "temperature must be above 0"),
        ("masked", lambda m: m.sample(temperature=float("nan")), "temperature must be above 0"),
        ("masked", lambda m: m.sample(top_p=0.0), r"top-p must lie in \(0, 1\]"),
        ("masked", lambda m: m.sample(top_p=1.5), r"top-p must lie in \(0, 1\]"),
        ("masked", lambda m: m.sample(top_k=-1), "top-k must be at least 1"),
        ("masked", lambda m: m.sample(block=32, length=64), "own length of 32, and shorter than that"),
        ("masked", lambda m: m.sample(block=10), "longer texts than the model's own length of 32"),
        ("masked", lambda m: m.sample(temperature=1e-300), "above 0 and finite"),
        ("masked", lambda m: m.sample(steps=10**9), "--steps must be at most 1,000,000"),
        ("masked", lambda m: m.sample(num=10**20), "at most 1,000,000"),
        ("masked", lambda m: m.sample(length=10**11), "at most 10,000,000"),
        ("causal", lambda m: m.sample(steps=4), "has no --steps"),
        ("uniform", lambda m: m.rewrite("abc", t=1e-6, tail="sample"), "leaves nothing before a tail"),
        ("masked", lambda m: m.sample(block=-1), "--block must be at least 1"),
        ("masked", lambda m: m.sample(num=0), "at least one text"),
        ("masked", lambda m: m.sample(prompt=[]), "nothing to write"),
        ("masked", lambda m: m.sample(batch=0), "at least one text"),
        ("masked", lambda m: m.sample(corrector="loop", steps=3), "at least 4 steps"),
        ("uniform", lambda m: m.sample(order="dilated"), "reveals masks, and this model has none"),
        ("uniform", lambda m: m.sample(order="first-hitting"), "reveals masks"),
        ("uniform", lambda m: m.stream(order="margin"), "reveals masks"),
        ("causal", lambda m: m.sample(tail="argmax"), "has no --tail"),
        ("causal", lambda m: m.sample(corrector="cap"), "has no --corrector"),
        ("causal", lambda m: m.sample(grid="cosine"), "has no --grid"),
        ("causal", lambda m: m.sample(prompt="x" * 31), "leaves no room"),
    ],
)
def test_bad_input_is_refused_before_the_network_runs(kind: Kind, use: Callable[[Model], object], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        use(small(kind))


@pytest.mark.usefixtures("idle")
def test_an_unknown_character_is_refused_before_the_network_runs(tmp_path: Path) -> None:
    model = cdlm.load(write_model(tmp_path, "masked", spelled("abc "), length=16))
    for use in (lambda: model.sample(prompt="abz"), lambda: model.infill("z ___"), lambda: model.rewrite("bz")):
        with pytest.raises(ValueError, match="cannot write"):
            use()


@pytest.mark.usefixtures("idle")
def test_a_posterior_that_the_race_has_not_is_refused_before_the_network_runs(tmp_path: Path) -> None:
    model = cdlm.load(write_model(tmp_path, "uniform", length=16, posterior="mixture"))
    with pytest.raises(ValueError, match="add --posterior plug-in"):
        model.sample(precision="naive-fp32")
