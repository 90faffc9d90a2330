"""Judges against transformers' own loss, against a loop over tokens, and against our own network directly."""

import dataclasses
import shutil
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import cdlm
from cdlm.data import END
from cdlm.eval import scorer as code
from cdlm.eval.config import Protocol
from cdlm.eval.scorer import JudgeScore, fingerprint, open_judge, scored_positions

from ..writers import BPE, write_model
from .judges import WINDOW, tiny, transformers

TEXTS = [
    "the cat sat on the mat.",
    "",
    "a",
    f"the old sea{END}a dog likes the rain",
    f"a{END}b{END}{END}the cat{END}",
    f"{END}the cat sat on{END}the mat",
    END,
    f"{END}{END}rain",
    "the dog likes the old cat and the sea and the rain. " * 4,
    f"the mat {'rain ' * 30}{END}the sea",
]


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each family, saved once."""
    return tiny(request.param, tmp_path_factory.mktemp("judges") / request.param)


def by_hand(folder: Path, text: str, protocol: Protocol) -> tuple[float, int]:
    """ANCHORS 1.13 read literally, and the loss that transformers itself computes at what is counted.

    Positions 1 and up where the id is not the end of text, and the first end of text if it is not at position 0; under
    the paper's protocol the text is padded to the window with ends. Where a start comes before the text, the robust
    protocol also counts position 0, which has a context then.
    """
    words = transformers.AutoTokenizer.from_pretrained(folder)
    net = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    eos, start = words.convert_tokens_to_ids(END), [words.bos_token_id] if words.bos_token_id is not None else []
    ids = words(text, add_special_tokens=False)["input_ids"][:WINDOW]
    if protocol == "paper":
        ids = ids + [eos] * (WINDOW - len(ids))
    labels, seen = [], False
    for position, token in enumerate(ids):
        first_end = token == eos and not seen
        seen = seen or token == eos
        context = position > 0 or (protocol == "robust" and bool(start))
        counts = context and (token != eos or (first_end and position > 0))
        labels.append(token if counts else -100)
    inputs, labels = torch.tensor([start + ids]), torch.tensor([[-100] * len(start) + labels])
    n = int((labels != -100).sum())
    if not n:
        return 0.0, 0
    with torch.no_grad():
        return float(net(input_ids=inputs, labels=labels).loss) * n, n


@pytest.mark.parametrize("protocol", ["paper", "robust"])
def test_surprise_is_transformers_own_loss(folder: Path, protocol: Protocol) -> None:
    """Text by text, with zero, one and several ends of text, one at the start, empty, and beyond the window."""
    found = open_judge(str(folder), "cpu").score(TEXTS, protocol)
    for text, reading in zip(TEXTS, found, strict=True):
        nats, tokens = by_hand(folder, text, protocol)
        assert reading.num_tokens == tokens, text
        assert reading.nats == pytest.approx(nats, rel=1e-5, abs=1e-6), text


@pytest.mark.parametrize("protocol", ["paper", "robust"])
def test_batches_do_not_change_the_numbers(folder: Path, protocol: Protocol, monkeypatch: pytest.MonkeyPatch) -> None:
    judge, texts = open_judge(str(folder), "cpu"), [text for text in TEXTS if text]
    together = judge.score(texts, protocol, features=True)
    monkeypatch.setattr(code, "LOGITS_BYTES", 1)  # one text at a time
    told: list[int] = []
    alone = judge.score(texts, protocol, features=True, on_progress=told.append)
    assert sum(told) == len(texts)
    for one, other in zip(together, alone, strict=True):
        same_numbers(one, other)


def same_numbers(one: JudgeScore, other: JudgeScore) -> None:
    assert one.num_tokens == other.num_tokens
    assert one.scored_fraction == other.scored_fraction
    assert one.nats == pytest.approx(other.nats, rel=1e-5, abs=1e-6)
    assert np.allclose(one.feature, other.feature, atol=1e-4)


def test_features_are_the_last_hidden_state_of_the_last_token(folder: Path) -> None:
    judge = open_judge(str(folder), "cpu")
    net = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    texts = [text for text in TEXTS if text]
    for text, reading in zip(texts, judge.score(texts, features=True), strict=True):
        ids = [*judge.start, *judge.encode_documents(text)[:WINDOW]]
        with torch.no_grad():
            hidden = net(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
        assert np.allclose(reading.feature, hidden[0, -1].numpy(), atol=1e-4), text
    assert judge.score(["a"])[0].feature is None


def test_features_do_not_depend_on_the_protocol(folder: Path) -> None:
    """mauve-text takes the last token of the text; an end of text that was put behind it says less about it."""
    judge = open_judge(str(folder), "cpu")
    paper, robust = (judge.score(["the cat sat"], protocol, features=True)[0] for protocol in ("paper", "robust"))
    assert np.allclose(paper.feature, robust.feature, atol=1e-4)


def test_all_of_an_empty_text_is_read(folder: Path) -> None:
    assert [open_judge(str(folder), "cpu").score([""], how)[0].scored_fraction for how in ("paper", "robust")] == [
        1.0,
        1.0,
    ]


def test_the_feature_of_an_empty_text_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    judge = open_judge(str(tiny("gpt2", tmp_path)), "cpu")
    alone, among = judge.score([""], features=True)[0], judge.score(["", "the cat sat on"], features=True)[0]
    same_numbers(alone, among)


def test_a_start_comes_only_from_the_tokenizer(folder: Path) -> None:
    judge, words = open_judge(str(folder), "cpu"), transformers.AutoTokenizer.from_pretrained(folder)
    assert judge.start == ((words.convert_tokens_to_ids("<s>"),) if folder.name == "llama" else ())
    assert judge.window == WINDOW  # the start is not taken from the text's room
    assert judge.eos == words.convert_tokens_to_ids(END)  # not </s>, where there is a token between documents
    for text in TEXTS:
        assert judge.encode_documents(text) == words(text, add_special_tokens=False)["input_ids"]
    assert (judge.kind, judge.label, judge.name) == ("hub", str(folder), str(folder))


def test_share_says_how_much_was_read(folder: Path) -> None:
    judge = open_judge(str(folder), "cpu")
    whole = len(judge.encode_documents(TEXTS[8]))
    long, short = judge.score([TEXTS[8], TEXTS[0]])
    assert whole > WINDOW
    assert (long.scored_fraction, short.scored_fraction) == (pytest.approx(WINDOW / whole), 1.0)


def test_counted_by_hand() -> None:
    """0 is the end of text."""
    for ids, wanted in {
        (5, 6, 7): [1, 2],
        (5, 0, 7): [1, 2],
        (5, 0, 7, 0, 8): [1, 2, 4],
        (0, 6, 0, 7): [1, 3],
        (0, 0, 7): [2],
        (0,): [],
        (5,): [],
        (): [],
    }.items():
        assert scored_positions(ids, eos=0) == wanted
    assert scored_positions((5, 6), 0, first=0) == [0, 1]
    assert scored_positions((0, 6), 0, first=0) == [1]


def test_an_in_domain_judge_is_the_network(tmp_path: Path) -> None:
    """Our own causal model: log-probabilities of the network itself, a token at a time, after its start."""
    path = write_model(tmp_path / "ours", "causal", BPE, length=WINDOW)
    judge, model = open_judge(str(path), "cpu"), cdlm.load(path, "cpu", "float64")
    assert (judge.kind, judge.label, judge.start) == ("in-domain", "ours (in-domain)", (BPE.bos,))
    assert (judge.window, judge.eos) == (WINDOW, BPE.eos)
    for text, reading in zip(TEXTS, judge.score(TEXTS, features=True), strict=True):
        ids = [BPE.bos, *judge.encode_documents(text)[:WINDOW]]
        nats, tokens, first = 0.0, 0, True
        for k in range(1, len(ids)):
            scores = model.denoiser.logits(model.denoiser.features(torch.tensor([ids[:k]]), torch.ones(1)))[0, -1]
            if ids[k] != BPE.eos or (first and k > 1):
                nats, tokens = nats - float((scores - scores.logsumexp(-1))[ids[k]]), tokens + 1
            first = first and ids[k] != BPE.eos
        assert reading.num_tokens == tokens, text
        assert reading.nats == pytest.approx(nats, rel=1e-4, abs=1e-5), text
        hidden = model.denoiser.features(torch.tensor([ids]), torch.ones(1))[0, -1]
        assert np.allclose(reading.feature, hidden.numpy(), atol=1e-3), text


def test_a_fingerprint_is_of_the_weights_not_of_the_name(tmp_path: Path) -> None:
    one, same, other = tmp_path / "one", tmp_path / "same", tmp_path / "other"
    for path in (one, other):
        write_model(path, "causal", BPE, favour=float(path == other), length=WINDOW)
    shutil.copytree(one, same)
    assert open_judge(str(one), "cpu").fingerprint == open_judge(str(same), "cpu").fingerprint == fingerprint(one)
    assert fingerprint(other) != fingerprint(one)


def test_a_judge_is_never_unpickled(tmp_path: Path) -> None:
    """A pickle can run whatever it likes: weights are safetensors, or there is no judge."""
    folder = tiny("gpt2", tmp_path / "judge")
    open_judge(str(folder), "cpu")
    (folder / "model.safetensors").unlink()
    net = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    torch.save(net.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        open_judge(str(folder), "cpu")


def test_a_reading_is_kept_whole(folder: Path) -> None:
    """Nothing about a judge changes between texts, and its order of work is not the order of the answers."""
    judge = open_judge(str(folder), "cpu")
    forwards, backwards = judge.score(TEXTS), judge.score(TEXTS[::-1])[::-1]
    assert [dataclasses.replace(r, nats=0) for r in forwards] == [dataclasses.replace(r, nats=0) for r in backwards]
    assert [r.nats for r in forwards] == pytest.approx([r.nats for r in backwards], rel=1e-5, abs=1e-6)


@pytest.fixture
def closed_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model hub that cannot be reached, and its empty cache."""
    constants = pytest.importorskip("huggingface_hub.constants")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "cache"


@pytest.mark.parametrize("name", ["gpt2-large", "lab/nobody"])
def test_a_hub_that_cannot_be_reached_is_noticed_at_once(
    name: str, closed_hub: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line that says what to do; not a minute of "retrying"."""
    began = time.monotonic()
    with pytest.raises(ValueError, match=rf"the judge {name} is not in the cache here.*cannot be reached \(") as caught:
        open_judge(name, "cpu")
    assert time.monotonic() - began < 15  # a second, on a machine that has nothing else to do
    assert "smollm2 (make judges" in str(caught.value)
    assert ("gpt2-large (the paper's" in str(caught.value)) == (name != "gpt2-large")
    assert "etry" not in "".join(capfd.readouterr())


def test_a_judge_in_the_cache_needs_no_hub(closed_hub: Path) -> None:
    repository, commit = closed_hub / "models--lab--reader", "0123456789abcdef0123456789abcdef01234567"
    tiny("gpt2", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert open_judge("lab/reader", "cpu").score(["the cat sat"])[0].num_tokens > 0
