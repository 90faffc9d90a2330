"""Opening models: folders, runs, the hub, peers; and what does not fit together."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cdlm
from cdlm.hub import pull

from ..writers import TOKENIZERS, Words, spelled, write_model

ROOT = Path(__file__).parents[2]
PEER = Path(__file__).parents[1] / "fixtures" / "peers" / "mdlm-hf-tiny"


def test_a_folder_says_how_its_texts_are(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine", "uniform", length=24, posterior="mixture", framed=True)
    model = cdlm.load(folder)
    assert (model.name, model.max_length, model.posterior, model.bos_framed) == ("mine", 24, "mixture", True)
    assert model.tokenizer.eos == 256
    assert not any(parameter.requires_grad for parameter in model.denoiser.parameters())
    assert len(cdlm.load(str(folder)).sample(steps=2)[0].token_ids) == 24


def test_a_run_is_its_newest_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step, length in ((3, 16), (12, 20), (20, 24)):
        folder = write_model(run / f"step-{step:08}", "masked", length=length)
        (folder / "state.json").write_text("{}")
    (run / "step-00000020" / "state.json").unlink()  # not finished yet
    model = cdlm.load(run)
    assert (model.name, model.max_length) == ("run/step-00000012", 20)


def test_a_run_without_a_checkpoint_says_to_wait(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="wait for its first"):
        cdlm.load(tmp_path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the model hub, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def writer(hub: Path) -> str:
    """The id of a model in that cache."""
    repository, commit = hub / "models--lab--writer", "0123456789abcdef0123456789abcdef01234567"
    write_model(repository / "snapshots" / commit, "masked", length=16)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return "lab/writer"


def test_a_hub_id_opens_its_copy_in_the_cache(writer: str) -> None:
    assert len(cdlm.load(writer).sample(steps=2)[0].token_ids) == 16


def test_a_model_of_the_hub_goes_by_its_id(writer: str) -> None:
    assert "writer" in cdlm.load(writer).name  # not by the hash of a commit


def test_a_folder_goes_before_the_hub(hub: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "lab" / "writer", "masked", length=12)
    assert cdlm.load("lab/writer").max_length == 12


def test_what_neither_folder_nor_hub_knows_names_both(hub: Path) -> None:
    with pytest.raises(ValueError, match="there is no directory lab/nobody, and the model hub"):
        cdlm.load("lab/nobody")


def test_a_hub_id_without_the_hub_library_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"no directory lab/nobody.*pip install huggingface-hub"):
        cdlm.load("lab/nobody")


@pytest.mark.parametrize("source", ["nowhere", "/nowhere/at/all"])
def test_what_is_no_hub_id_is_a_missing_folder(source: str) -> None:
    with pytest.raises(ValueError, match=f"{source} does not exist"):
        cdlm.load(source)


@pytest.mark.parametrize("source", ["runs/tiny-mcdlm", "./mine", "../mine", "/tmp/mine", "~/mine", "here/mine"])
def test_the_hub_is_not_asked_for_a_path(source: str, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object, **__: object) -> str:
        raise AssertionError("it was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", ask)
    Path("here").mkdir()
    with pytest.raises(ValueError, match=f"^{source} does not exist; "):
        cdlm.load(source)


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("runs/tiny-mcdl", r"did you mean runs/tiny-mcdlm\?$"),
        ("tiny-mcdlm", r"does not exist; did you mean runs/tiny-mcdlm\?$"),
        ("runs/tiny-mdlm", r"did you mean runs/tiny-mcdlm\?$"),
        ("models/mine", r"did you mean models/mine2\?$"),
        ("other", r"a run \(there are: runs/tiny-mcdlm\), a model of cdlm zoo \(.*mdlm, sudoku-4\), or a hub id"),
        ("mdlmm", r"did you mean mdlm\?$"),
        ("MDLM", r"did you mean mdlm\?$"),
        ("mcdlm", r"did you mean mcdlm-guided.*\?$"),
    ],
)
def test_a_run_that_is_not_there_is_guessed(
    source: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, file in (("runs/tiny-mcdlm", "run.json"), ("models/mine2", "config.json"), ("runs/logs", "a.txt")):
        Path(folder).mkdir(parents=True)
        (Path(folder) / file).write_text("{}")
    with pytest.raises(ValueError, match=advice):
        cdlm.load(source)


def test_a_pull_without_a_network_says_so_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors of the client's network are neither its own nor the system's."""

    class ConnectError(Exception):
        pass

    class Hub:
        def HfApi(self) -> "Hub":  # noqa: N802
            return self

        def model_info(self, *_: object, **__: object) -> None:
            raise ConnectError("[Errno -2] Name or service not known\nand more")

    monkeypatch.setattr("cdlm.hub._hub", Hub)
    with pytest.raises(
        ValueError, match=r"did not give lab/writer: \[Errno -2\] Name or service not known; check"
    ) as no:
        pull("lab/writer", tmp_path / "out")
    assert "\n" not in str(no.value)
    assert list(tmp_path.iterdir()) == []


def test_the_public_layout_takes_its_length_from_model_length(tmp_path: Path) -> None:
    words = spelled("abcdefgh ").save(tmp_path / "words.json")
    model = cdlm.load(PEER, tokenizer=words)
    assert (model.max_length, model.posterior) == (24, "plug-in")
    text = model.sample(prompt="abc", steps=3)[0]
    assert len(text.token_ids) == 24
    assert model.bos_framed
    assert text.token_ids[:4] == [model.tokenizer.bos, 0, 1, 2]


def test_a_folder_without_a_tokenizer_asks_for_one() -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json.*--tokenizer"):
        cdlm.load(PEER)


def test_a_model_of_two_moons_writes_no_text(tmp_path: Path) -> None:
    shutil.copytree(PEER, tmp_path / "mdlm")
    (tmp_path / "moons.json").write_text("{}")
    with pytest.raises(ValueError, match="mdlm is a model of two moons and writes no text"):
        cdlm.load(tmp_path / "mdlm")


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no tokenizer at"):
        cdlm.load(PEER, tokenizer=tmp_path / "none.json")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"257 tokens and .* 96: they do not belong together"):
        cdlm.load(PEER, tokenizer="bytes")


def test_a_tokenizer_with_far_fewer_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"257 tokens and .*wrong 1000: they do not belong together"):
        cdlm.load(write_model(tmp_path / "wrong", "masked", vocab=1000, length=16))


def test_a_folder_keeps_its_own_tokenizer_whatever_is_given_for_others(tmp_path: Path) -> None:
    own = write_model(tmp_path / "own", "masked", TOKENIZERS["bpe"], length=16)
    plain, given = cdlm.load(own), cdlm.load(own, tokenizer="bytes")
    assert given.sample(steps=2)[0] == plain.sample(steps=2)[0]
    assert given.tokenizer.vocab_size == TOKENIZERS["bpe"].vocab_size


@pytest.mark.parametrize("name", ["last.ckpt", "pytorch_model.bin"])
def test_pickles_are_not_opened_and_the_way_out_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    (tmp_path / "config.json").write_text((PEER / "config.json").read_text())
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(ValueError, match=r"never opened; cdlm convert"):
            cdlm.load(path)


@pytest.mark.parametrize("words", ["bytes", "bpe"])
def test_a_model_with_more_tokens_than_its_tokenizer_writes(tmp_path: Path, words: Words) -> None:
    """Networks are padded to round sizes; what stands for nothing must not stop a text."""
    model = cdlm.load(write_model(tmp_path, "masked", TOKENIZERS[words], vocab=384, length=16))
    assert all(isinstance(text.text, str) for text in model.sample(num_samples=3, steps=2))


def test_a_folder_that_does_not_say_its_length_needs_one(tmp_path: Path) -> None:
    model = cdlm.load(write_model(tmp_path / "mute", "masked"))
    assert model.max_length == 0
    with pytest.raises(ValueError, match=r"mute does not say.*--max-length"):
        model.sample()
    with pytest.raises(ValueError, match="--block-length"):
        model.sample(max_length=12, block_length=4)
    assert len(model.sample(max_length=12, steps=2)[0].token_ids) == 12


def test_a_folder_that_does_not_say_its_length_fills_blanks(tmp_path: Path) -> None:
    model = cdlm.load(write_model(tmp_path, "masked"))
    assert model.infill("ab[MASK]", steps=2)[0].text.startswith("ab")


def test_precision_and_device_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path, "masked", length=16)
    monkeypatch.setattr("cdlm.devices._no_bfloat16", lambda: None)  # nothing is computed here
    for name, kind in (("float64", torch.float64), ("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        parameters = list(cdlm.load(folder, "cpu", name).denoiser.parameters())
        assert {parameter.dtype for parameter in parameters} == {kind}
        assert {parameter.device.type for parameter in parameters} == {"cpu"}
    automatic = cdlm.load(folder).denoiser
    expected = torch.bfloat16 if automatic.device.type == "cuda" else torch.float32
    assert automatic.backbone.vocab_embed.embedding.dtype == expected
    with pytest.raises(ValueError, match="unknown dtype 'float8'; choose from"):
        cdlm.load(folder, dtype="float8")
    with pytest.raises(ValueError, match="unknown device 'tpu'; choose from"):
        cdlm.load(folder, "tpu")


@pytest.mark.soak
@pytest.mark.skipif(not any(shutil.which(name) for name in ("g++", "c++", "clang++")), reason="no C++ compiler")
def test_compiled_and_eager_networks_write_the_same_texts(tmp_path: Path) -> None:
    """In a process of its own: here, shapes are checked at run time, which is not what is compiled."""
    folder = write_model(tmp_path, "masked", length=32)
    code = (
        "import cdlm, sys\n"
        "kinds = (cdlm.load(sys.argv[1], 'cpu', 'float32', compile=compiled) for compiled in (False, True))\n"
        "one, two = ([text.token_ids for text in model.sample(num_samples=3, steps=6)] for model in kinds)\n"
        "assert one == two, (one, two)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ({"max_length": 64, "foo": 1}, "foo is 1"),
        ({"posterior": "plug-in"}, 'no "max_length"'),
        (5, 'no "max_length"'),
        ({"max_length": "64"}, "max_length is '64'"),
        ({"max_length": -1}, "max_length is -1"),
        ({"max_length": 8, "bos_framed": 1}, "bos_framed is 1"),
    ],
)
def test_a_damaged_account_of_the_texts_is_named(text: object, named: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "masked", length=24)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "text": text}))
    with pytest.raises(ValueError, match=named):
        cdlm.load(folder)
