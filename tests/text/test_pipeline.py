"""From text to text: what models write, fill in, rewrite, and refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cdlm
from cdlm.data import END
from cdlm.model.denoiser import Denoiser
from cdlm.model.dit import DiT
from cdlm.sample.logits import LogitsRows
from cdlm.sample.settings import resolve
from cdlm.text.pipeline import MASK, Pipeline

from ..writers import BPE, BYTES, Kind, Words, small, spelled, write_model

# Writing


@pytest.mark.parametrize("kind", ["masked", "uniform", "causal"])
def test_a_text_depends_on_its_seed_and_number_alone(kind: Kind) -> None:
    model, prompts, how = small(kind), ["", "ab", "the sea", "xy"], {} if kind == "causal" else {"steps": 8}
    one, three, many = (
        model.sample(num_samples=3, prompt=prompts, max_length=24, seed=5, batch_size=batch, **how)
        for batch in (1, 3, 32)
    )
    assert one == three == many
    assert model.sample(num_samples=2, max_length=24, seed=5, **how) == one[:2]
    assert model.sample(num_samples=3, prompt=prompts, max_length=24, seed=6, **how) != one
    assert len({text.text for text in one}) == len(one)


@pytest.mark.parametrize("kind", ["masked", "uniform", "causal"])
@pytest.mark.parametrize("words", ["bytes", "bpe"])
def test_continuations_come_in_order_behind_their_prompts(kind: Kind, words: Words) -> None:
    model, prompts = small(kind, words), ["the cat", "a", "", "the old sea é"]
    texts = model.sample(num_samples=2, prompt=prompts, max_length=28, batch_size=3)
    assert [text.index for text in texts] == list(range(8))
    lead = [model.tokenizer.bos] if kind == "causal" else []
    for text in texts:
        given = [*lead, *model.tokenizer.encode(prompts[text.index // 2])]
        assert text.token_ids[: len(given)] == given
        assert len(text.token_ids) == 28
        assert max(text.token_ids) < model.denoiser.vocab  # no mask is left
        assert str(text) == text.text == prompts[text.index // 2] + model.tokenizer.decode(text.token_ids[len(given) :])


def test_evaluations_are_counted() -> None:
    assert [text.nfe for text in small("uniform").sample(num_samples=3, steps=5)] == [5, 5, 5]
    assert [text.nfe for text in small("causal").sample(num_samples=2, prompt="abc", max_length=20)] == [16, 16]
    calls = []
    model = small("masked")
    samples = model.complete(
        model.continuations([""]), resolve({"steps": 5}), on_state=lambda state, size: calls.append((state, size))
    )
    text = next(samples)
    assert [size for _, size in calls] == [1] * (text.nfe + 1)
    assert text.nfe == 5


@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_a_framed_model_sees_the_token_that_begins_a_block(kind: Kind) -> None:
    text = small(kind, framed=True).sample(prompt="ab", max_length=8, steps=3)[0]
    assert text.token_ids[:3] == [BYTES.bos, *b"ab"]
    assert text.text == "ab" + BYTES.decode(text.token_ids[3:])


@pytest.mark.parametrize("words", ["bytes", "bpe"])
@pytest.mark.parametrize("prompt", ["", "the cat", "the cat "])
def test_a_stream_begins_with_masks_and_ends_with_the_text(words: Words, prompt: str) -> None:
    model = small("masked", words)
    frames = list(model.stream(prompt, num_samples=2, max_length=16, steps=4, seed=7))
    texts = model.sample(num_samples=2, prompt=prompt, max_length=16, steps=4, seed=7)
    given = len(model.tokenizer.encode(prompt.rstrip() if words == "bpe" else prompt))
    assert frames[0].token_ids == [text.token_ids[:given] + [model.denoiser.vocab] * (16 - given) for text in texts]
    assert all(text.endswith(MASK * (16 - given)) and text.count(MASK) == 16 - given for text in frames[0].texts)
    assert [frame.step for frame in frames] == list(range(len(frames)))
    assert {frame.num_steps for frame in frames} == {len(frames) - 1}
    assert frames[-1].token_ids == [text.token_ids for text in texts]
    assert frames[-1].nfe == [text.nfe for text in texts]
    assert frames[-1].texts == [text.text for text in texts]


def test_a_stream_of_an_autoregressive_model_grows() -> None:
    model = small("causal")
    frames = list(model.stream("ab", max_length=12, seed=2))
    assert [len(frame.token_ids[0]) for frame in frames] == list(range(3, 13))
    assert frames[0].texts == ["ab"]
    assert frames[-1].token_ids[0] == model.sample(prompt="ab", max_length=12, seed=2)[0].token_ids


def test_a_stream_fills_blanks() -> None:
    model = small("masked")
    frames = list(model.stream("a[MASK:2]b___", span_length=3, steps=4, seed=3))
    assert frames[0].texts == [f"a{MASK * 2}b{MASK * 3}"]
    assert frames[-1].token_ids[0] == model.infill("a[MASK:2]b___", span_length=3, steps=4, seed=3)[0].token_ids


def test_only_texts_of_one_length_are_watched_together() -> None:
    model = small("masked")
    templates = model.infillings(["a[MASK]", "ab[MASK]"])
    with pytest.raises(ValueError, match="one length"):
        model.frames(templates, resolve())


@pytest.mark.parametrize("kind", ["masked", "uniform", "causal"])
def test_trimming_ends_a_text_at_its_end(kind: Kind) -> None:
    model = small(kind, favour=3.0)
    whole, cut = (
        model.sample(num_samples=6, prompt=["", "ab"], max_length=24, stop_at_eos=stop) for stop in (False, True)
    )
    ends = 0
    for long, short in zip(whole, cut, strict=True):
        first = next((k for k in range(1, 24) if long.token_ids[k] == BYTES.eos), None)  # one at 0 begins a block
        ends += first is not None
        assert short.token_ids == long.token_ids[:first]
        assert short.text == (
            long.text if first is None else long.text.removesuffix(BYTES.decode(long.token_ids[first:]))
        )
    assert 0 < ends < 12  # otherwise choose another `favour`


def test_an_end_of_text_that_was_given_does_not_trim() -> None:
    model = small("masked", "bpe", favour=100.0)
    text = model.sample(prompt=f"the cat{END}the", max_length=24, steps=4, stop_at_eos=True)[0]
    assert text.text == f"the cat{END}the"
    assert text.token_ids == BPE.encode(text.text)


# Filling in


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("masked", {"order": order}) for order in ("dilated", "bit-reversed", "probability", "margin")),
        ("masked", {"order": "first-hitting", "steps": None}),
        ("masked", {"order": "entropy-bound", "entropy_bound": 1.0}),
        *((kind, {"corrector": corrector}) for kind in ("masked", "uniform") for corrector in ("constant", "loop")),
        *((kind, {"final_step": tail}) for kind in ("masked", "uniform") for tail in ("none", "sample", "argmax")),
        *((kind, {"precision": "naive-fp32"}) for kind in ("masked", "uniform")),
        ("uniform", {"posterior": "mixture"}),
        ("masked", {"top_k": 3, "top_p": 0.9, "temperature": 0.5, "timesteps": "cosine"}),
    ],
)
def test_every_sampler_keeps_what_is_given_and_ends_no_blank(kind: Kind, how: dict[str, object]) -> None:
    """Even where the model would write nothing but the end of text."""
    model = small(kind, favour=50.0)
    for text in model.infill("ab[MASK:9]cd___", num_samples=3, **{"steps": 6, **how}):
        assert len(text.token_ids) == 17
        assert (text.token_ids[:2], text.token_ids[11:13]) == (list(b"ab"), list(b"cd"))
        assert max(text.token_ids) < BYTES.eos


def test_several_texts_are_filled_in_order() -> None:
    """Although those of one length are written together."""
    texts = small("masked").infill(["a[MASK]", "[MASK:3]b", "c___", "d[MASK]"], num_samples=2, span_length=1, steps=3)
    assert [text.index for text in texts] == list(range(8))
    assert [len(text.token_ids) for text in texts] == [2, 2, 4, 4, 2, 2, 2, 2]
    assert [text.text[-1 if text.index in (2, 3) else 0] for text in texts] == [*"aabbccdd"]


def test_bytes_are_put_between_given_text_as_they_are() -> None:
    text = small("masked").infill("é[MASK:3]é", num_samples=1, steps=3)[0]
    assert text.token_ids[:2] == text.token_ids[-2:] == list("é".encode())
    assert text.text == f"é{bytes(text.token_ids[2:5]).decode(errors='replace')}é"


# Rewriting


TEXT = "the cat sat on the old mat."


@pytest.mark.parametrize(("kind", "clamp"), [("masked", False), ("uniform", True), ("uniform", False)])
def test_rewriting_keeps_what_the_noise_left_alone(kind: Kind, clamp: bool) -> None:
    model, given = small(kind), list(TEXT.encode())
    frames = list(model.frames(model.rewritings([TEXT], 8, 0.4, clamp), resolve({"steps": 8}), seed=1))
    alone = [[a == b for a, b in zip(row, given, strict=True)] for row in frames[0].token_ids]
    share = sum(map(sum, alone)) / (8 * len(given))
    assert 0.45 < share < 0.75  # alpha(0.4) = 0.6, five standard errors on each side
    kept = [
        all(a == b for a, b, stays in zip(row, given, where, strict=True) if stays)
        for row, where in zip(frames[-1].token_ids, alone, strict=True)
    ]
    assert all(kept) if kind == "masked" or clamp else not any(kept)
    assert all(row != given for row in frames[-1].token_ids)
    assert max(max(row) for row in frames[-1].token_ids) < 257
    texts = model.rewrite(TEXT, num_samples=8, noise_level=0.4, clamp=clamp, steps=8, seed=1)
    assert [text.token_ids for text in texts] == frames[-1].token_ids
    assert [text.text for text in texts] == [BYTES.decode(row) for row in frames[-1].token_ids]


@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_rewriting_from_pure_noise_forgets_the_text(kind: Kind) -> None:
    model = small(kind)
    for text in model.rewrite(TEXT, num_samples=4, noise_level=1.0, steps=8):
        same = sum(a == b for a, b in zip(text.token_ids, TEXT.encode(), strict=True))
        assert same < len(TEXT) / 2
        assert text.nfe > 0


def test_a_masked_model_needs_no_clamp() -> None:
    with pytest.raises(ValueError, match="leave out --clamp"):
        small("masked").rewrite(TEXT, clamp=True)


# Longer than the model


def test_more_than_the_model_knows_is_refused_and_block_named() -> None:
    with pytest.raises(ValueError, match=r"50 tokens are more than the 32 .* --block-length 16 .*block_length=16"):
        small("masked").sample(max_length=50)


@pytest.mark.parametrize("kind", ["masked", "uniform"])
@pytest.mark.parametrize("prompt", ["", "ab", "x" * 40])
def test_blocks_write_longer_texts(kind: Kind, prompt: str) -> None:
    model = small(kind)
    one, two = (
        model.sample(num_samples=2, prompt=prompt, max_length=70, block_length=10, steps=4, batch_size=batch)
        for batch in (1, 2)
    )
    assert one == two
    for text in one:
        assert len(text.token_ids) == 70
        assert text.token_ids[: len(prompt)] == list(prompt.encode())
        assert max(text.token_ids) < 257
    frames = list(model.stream(prompt, max_length=70, block_length=10, steps=4))
    assert frames[-1].token_ids[0] == one[0].token_ids
    assert frames[-1].nfe[0] == one[0].nfe
    assert [frame.step for frame in frames] == sorted({frame.step for frame in frames})


# Refusals


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model.infill("a ___ b"),
        lambda model: model.infill(
            "a ___", num_samples=9
        ),  # a blank holds no end of text, which this model could not promise
        lambda model: model.infill("___"),
        lambda model: model.rewrite("a b"),
        lambda model: model.stream("a ___ b"),
    ],
    ids=["within", "last", "alone", "rewrite", "stream"],
)
def test_an_autoregressive_model_only_continues(use: Callable[[Pipeline], object]) -> None:
    with pytest.raises(ValueError, match="autoregressive"):
        use(small("causal", favour=3.0))


def test_an_autoregressive_model_has_no_windows() -> None:
    model = small("causal")
    with pytest.raises(ValueError, match=r"33 tokens are more than the 32 that small was trained on$"):
        model.sample(max_length=33)
    with pytest.raises(ValueError, match="block"):
        model.sample(max_length=40, block_length=8)


def test_a_prompt_given_as_the_number_of_texts_is_pointed_out() -> None:
    model: Any = small("masked")
    with pytest.raises(TypeError, match=r"num_samples .*'hello'.* prompt="):
        model.sample("hello")


def test_the_windows_that_a_long_prompt_is_told_of_write_it() -> None:
    assert len(small("masked").sample(prompt="x" * 40, max_length=56, block_length=16, steps=2)[0].token_ids) == 56


def test_an_unknown_setting_lists_those_there_are() -> None:
    model = small("masked")
    with pytest.raises(TypeError, match=r"'temprature'.*temperature"):
        model.sample(temprature=0.5)
    with pytest.raises(TypeError, match="'max_length'"):
        model.infill("a___", max_length=12)


# Logits processors


@pytest.mark.parametrize("kind", ["masked", "uniform", "causal"])
def test_a_logits_processor_of_the_caller_decides(kind: Kind) -> None:
    """One that leaves a single token; whatever is given stays."""

    def only_z(logits: Tensor, rows: LogitsRows) -> Tensor:
        return logits.masked_fill(torch.arange(logits.shape[-1]) != ord("z"), -torch.inf)

    model = small(kind)
    assert model.sample(prompt="ab", max_length=8, logits_processors=[only_z])[0].text == "ab" + "z" * (
        5 if kind == "causal" else 6
    )
    if kind != "causal":
        assert model.infill("a[MASK:3]b", logits_processors=[only_z])[0].text == "azzzb"
        assert model.rewrite("abc", noise_level=1.0, logits_processors=[only_z])[0].text == "zzz"


def test_a_logits_processor_of_the_caller_acts_after_guidance_and_before_the_temperature() -> None:
    """It sees f^(1 + g) / b^g of the first evaluation, in which everything behind the prompt is masked."""
    model, seen = small("masked"), []

    def watch(logits: Tensor, rows: LogitsRows) -> Tensor:
        seen.append((logits.clone(), rows.index % 8))
        return logits

    chosen = {"steps": 4, "guidance": 0.5, "temperature": 0.3, "top_k": 2, "seed": 3}
    watched = model.sample(prompt="ab", max_length=8, logits_processors=[watch], **chosen)
    assert watched == model.sample(prompt="ab", max_length=8, **chosen)
    mask = model.denoiser.vocab
    with torch.no_grad():
        prediction = model.denoiser(torch.tensor([[*b"ab"] + [mask] * 6]), 1.0)[0]
        unconditional = model.denoiser(torch.full((1, 8), mask), 1.0)[0, 0]
    logits, place = seen[0]
    guided = (1.5 * prediction - 0.5 * unconditional)[place]
    assert torch.allclose(logits.log_softmax(-1), guided.log_softmax(-1), atol=1e-9)


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
        ("masked", lambda m: m.sample(max_length=33), "33 tokens are more than the 32"),
        ("masked", lambda m: m.sample(max_length=1), r"--max-length must be .*\(got 1\)"),
        ("masked", lambda m: m.sample(max_length=10**11), r"--max-length must be .* 10,000,000 \(got 100000000000\)"),
        ("masked", lambda m: m.sample(prompt="x" * 32), "32 tokens.*--max-length 48 --block-length 16"),
        ("masked", lambda m: m.sample(prompt="x" * 8, max_length=8), r"in 8 tokens; .*raise --max-length\.$"),
        ("causal", lambda m: m.sample(prompt="x" * 32), r"in 32 tokens; shorten it\.$"),
        ("causal", lambda m: m.sample(prompt="x" * 31), "31 tokens and leaves no room in 32 tokens"),
        ("masked", lambda m: m.sample(prompt=["ab", "x" * 10], max_length=8), "no room in 8 tokens"),
        ("masked", lambda m: m.infill("x[MASK:200]yz"), "203 tokens .* its blanks have room for 29 tokens at most"),
        ("masked", lambda m: m.infill("x" * 30 + "___"), "34 tokens are more than the 32"),
        ("masked", lambda m: m.infill("nothing"), "no blanks"),
        ("masked", lambda m: m.rewrite("x" * 33), "33 tokens are more than the 32 that small was trained on$"),
        ("masked", lambda m: m.rewrite("x", noise_level=0.0), r"--noise-level must be .*\(got 0\.0\)"),
        (
            "uniform",
            lambda m: m.rewrite("abc", noise_level=1e-6, final_step="sample"),
            r"--noise-level .*\(got 1e-06\)",
        ),
        ("masked", lambda m: m.sample(prompt="a\ud800"), "not valid UTF-8"),
        ("masked", lambda m: m.sample(block_length=32, max_length=64), "--block-length must be .* 32 for 64 tokens"),
        ("masked", lambda m: m.sample(block_length=10), "--block-length must be .* 10 for 32 tokens"),
        ("masked", lambda m: m.sample(num_samples=10**20), r"--num-samples must be .* 1,000,000 \(got 1000"),
        ("masked", lambda m: m.sample(num_samples=0), r"--num-samples must be .*\(got 0\)"),
        ("masked", lambda m: m.sample(batch_size=0), r"--batch-size must be .*\(got 0\)"),
        ("masked", lambda m: m.sample(prompt=[]), "no prompt"),
        ("masked", lambda m: m.sample(temperature=1e-300), r"--temperature must be .*\(got 1e-300\)"),
        ("uniform", lambda m: m.stream(order="margin"), "--order margin.*uniform"),
        ("causal", lambda m: m.sample(steps=4), "--steps 4"),
    ],
)
def test_bad_input_is_refused_before_the_network_runs(
    kind: Kind, use: Callable[[Pipeline], object], advice: str
) -> None:
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
    with pytest.raises(
        ValueError, match=r"--precision naive-fp32.*--posterior mixture|--posterior mixture.*--precision naive-fp32"
    ):
        model.sample(precision="naive-fp32")


def test_encoded_texts_are_framed_as_in_training() -> None:
    """BOS, EOS padding and masks are where `infill` puts them."""
    model = small("masked", "bpe", length=24, framed=True, padded=True)
    (template,) = model.infillings(["the [MASK:2] sat."])
    token_ids = model.encode("the [MASK:2] sat.")
    assert len(token_ids) == 24
    assert token_ids[0] == model.tokenizer.bos
    assert [token if token != model.mask_token_id else -1 for token in token_ids] == template.token_ids
    assert model.encode("the cat")[:3] == [model.tokenizer.bos, *model.tokenizer.encode("the cat")][:3]
    assert small("uniform", "bpe").encode("the cat") == model.tokenizer.encode("the cat")
    with pytest.raises(ValueError, match="has no mask"):
        small("uniform", "bpe").encode("the ___")
