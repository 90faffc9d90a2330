"""`cdlm prepare`: packing by hand, splits, the same bytes for any number of workers, and all or nothing on disk."""

import dataclasses
import fcntl
import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from cdlm.data import prepare as module
from cdlm.data.config import PrepareConfig
from cdlm.data.prepare import prepare
from cdlm.data.tokenizer import Tokenizer
from cdlm.data.tokens import Meta, open_tokens, read_meta

ROOT = Path(__file__).parents[2]
END = 256
QUIET = Console(quiet=True)


def run(folder: Path, text: str | None, **settings: Any) -> Meta:
    """Prepare a text as it stands in x.txt (None: leave that file alone); into `tokens` unless told otherwise."""
    if text is not None:
        (folder / "x.txt").write_text(text)
    settings = {"files": (str(folder / "x.txt"),), "out": folder / "tokens", "valid_fraction": 0.0, **settings}
    return prepare(PrepareConfig(**settings), QUIET)


def ids(folder: Path, split: str = "train") -> list[int]:
    return np.fromfile(folder / "tokens" / f"{split}.bin", "<u2").tolist()


def joined(*documents: str) -> str:
    return "\n<|endoftext|>\n".join(documents)


def test_wrapped_packing_by_hand(tmp_path: Path) -> None:
    meta = run(tmp_path, joined("ab", "cde", "f"), seq_length=5)
    a, b, c, d, e, f = b"abcdef"
    assert ids(tmp_path) == [END, a, b, END, END, END, c, d, e, END, END, END, f, END, END]
    assert meta.splits["train"].unused == 0
    meta = run(tmp_path, joined("ab", "cde", "fg"), seq_length=5, overwrite=True)
    assert ids(tmp_path) == [END, a, b, END, END, END, c, d, e, END, END, END, f, ord("g"), END]
    assert meta.splits["train"].unused == 1
    run(tmp_path, joined("ab", "cd"), seq_length=4, document_eos=False, overwrite=True)
    assert ids(tmp_path) == [END, a, b, END, END, c, d, END]


def test_plain_packing_by_hand(tmp_path: Path) -> None:
    meta = run(tmp_path, joined("ab", "  ", "c"), packing="plain")
    assert ids(tmp_path) == [*b"ab", END, *b"c", END]
    split = meta.splits["train"]
    assert (split.documents, split.empty, split.characters, split.tokens, split.unused) == (2, 1, 3, 5, 0)


def test_chunks_do_not_show_in_the_packing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = joined(*("word " * n for n in range(1, 40)))
    run(tmp_path, text, seq_length=8)
    whole = ids(tmp_path)
    for chunk in (1, 17, 100):
        monkeypatch.setattr(module, "_CHUNK", chunk)
        run(tmp_path, text, seq_length=8, overwrite=True)
        assert ids(tmp_path) == whole


def test_meta_says_what_is_there(tmp_path: Path) -> None:
    meta = run(tmp_path, joined(*"abcdefgh"), seq_length=3, valid_fraction=0.25)
    assert meta == read_meta(tmp_path / "tokens")
    assert (meta.vocab, meta.eos, meta.bos, meta.dtype, meta.tokenizer) == (257, 256, 256, "uint16", "bytes")
    assert [meta.splits[name].documents for name in ("train", "valid")] == [6, 2]
    for name, split in meta.splits.items():
        data = (tmp_path / "tokens" / f"{name}.bin").read_bytes()
        assert hashlib.sha256(data).hexdigest() == split.sha256
        assert len(data) == 2 * split.tokens
    assert meta.sources == [{"name": str(tmp_path / "x.txt"), "bytes": (tmp_path / "x.txt").stat().st_size}]
    assert meta.config["valid_fraction"] == 0.25
    saved = json.loads((tmp_path / "tokens" / "meta.json").read_text())["config"]
    assert set(saved) == {field.name for field in dataclasses.fields(PrepareConfig)}
    assert Tokenizer.load(tmp_path / "tokens").encode("é") == [0xC3, 0xA9]


@pytest.mark.parametrize(
    ("settings", "train", "valid"),
    [
        ({"valid_documents": 3}, "abcdefg", "hij"),
        ({"valid_fraction": 0.2}, "abcdefgh", "ij"),
        ({"valid_fraction": None}, "abcdefghi", "j"),
        ({"valid_fraction": 0.0}, "abcdefghij", None),
    ],
)
def test_validation_is_the_last_documents(
    settings: dict[str, Any], train: str, valid: str | None, tmp_path: Path
) -> None:
    run(tmp_path, joined(*"abcd", "", *"efghij"), packing="plain", **{"valid_fraction": None, **settings})
    assert bytes(ids(tmp_path)[::2]).decode() == train
    assert (tmp_path / "tokens" / "valid.bin").exists() == (valid is not None)
    if valid is not None:
        assert bytes(ids(tmp_path, "valid")[::2]).decode() == valid


def test_validation_from_files_of_its_own_and_several_inputs(tmp_path: Path) -> None:
    (tmp_path / "y.jsonl").write_text('{"text": "c"}\n{"text": "d"}\n')
    (tmp_path / "v.txt").write_text(joined("e", "f"))
    files = (str(tmp_path / "x.txt"), str(tmp_path / "y.jsonl"))
    own = {"files": files, "valid": (str(tmp_path / "v.txt"),), "valid_fraction": None}
    meta = run(tmp_path, joined("a", "b"), packing="plain", **own)
    assert bytes(ids(tmp_path)[::2]) == b"abcd"
    assert bytes(ids(tmp_path, "valid")[::2]) == b"ef"
    assert [source["name"] for source in meta.sources] == [*files, str(tmp_path / "v.txt")]


def test_workers_change_nothing(tmp_path: Path) -> None:
    generator = random.Random(0)
    words = ["".join(generator.choices("etaoinshrdlu", k=generator.randint(1, 9))) for _ in range(3000)]
    documents = (" ".join(generator.choices(words, k=generator.randint(1, 4000))) for _ in range(200))
    (tmp_path / "x.txt").write_text(joined(*documents))
    found = []
    for workers in (1, 2, 3):
        run(tmp_path, None, train_vocab_size=400, seq_length=64, valid_fraction=0.1, workers=workers, overwrite=True)
        names = ("train.bin", "valid.bin", "tokenizer.json")
        found.append([(tmp_path / "tokens" / name).read_bytes() for name in names])
    assert found[0] == found[1] == found[2]
    assert len(found[0][0]) > 100_000
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_a_trained_vocabulary_sees_training_documents_only(tmp_path: Path) -> None:
    documents = ["low lower lowest " * 20] * 9 + ["zyzzyva zyzzyva " * 50]
    meta = run(tmp_path, joined(*documents), train_vocab_size=270, seq_length=16, valid_fraction=None)
    tokenizer = Tokenizer.load(tmp_path / "tokens")
    assert meta.tokenizer == "trained"
    assert meta.trained_on == 9 * 340
    assert len(tokenizer.encode(" low")) == 1
    assert len(tokenizer.encode("zyzzyva")) == 7
    text = tokenizer.decode(open_tokens(tmp_path / "tokens").batch(0, 0, 1)[0].tolist())
    assert text.startswith("<|endoftext|>")
    assert "low lower lowest low" in text


def test_the_tokenizer_is_trained_on_an_even_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE", 1000)
    documents = [f"{number:03d} " * 25 for number in range(100)]
    seen: list[str] = []
    train = Tokenizer.train
    monkeypatch.setattr(Tokenizer, "train", lambda texts, vocab: train((seen.append(t) or t for t in texts), vocab))
    meta = run(tmp_path, joined(*documents), train_vocab_size=300, seq_length=8)
    assert [int(text[:3]) for text in seen] == list(range(0, 100, 10))
    assert meta.trained_on == 1000


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    library = Library(models.WordLevel({f"w{i}": i for i in range(70_000)}, unk_token="w0"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<s>", "</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    meta = run(tmp_path, "w1 w69999 w2", tokenizer=str(tmp_path / "tokenizer.json"), seq_length=6)
    assert meta.dtype == "uint32"
    found = np.fromfile(tmp_path / "tokens" / "train.bin", "<u4").tolist()
    assert found == [70_000, 1, 69_999, 2, 70_001, 70_001]
    assert open_tokens(tmp_path / "tokens").batch(0, 0, 1).tolist() == [found]


def test_the_summary_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.txt").write_text("some text")
    config = PrepareConfig(
        (str(tmp_path / "x.txt"),), tmp_path / "tokens", seq_length=5, valid_fraction=0.0, train_vocab_size=5000
    )
    prepare(config, Console(width=120))
    shown = capsys.readouterr().out
    for part in ("encoding", "trained tokenizer", "characters a token", "wrote"):
        assert part in shown


@pytest.mark.parametrize(("asked", "smaller"), [(5000, True), (258, False), (0, False)])
def test_a_vocabulary_smaller_than_asked_for_is_said(
    asked: int, smaller: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.txt").write_text("some text and some text and more")
    config = PrepareConfig(
        (str(tmp_path / "x.txt"),), tmp_path / "tokens", seq_length=5, valid_fraction=0.0, train_vocab_size=asked
    )
    meta = prepare(config, Console(width=160))
    said = f"the vocabulary has {meta.vocab:,} tokens, not the 5,000 of --train-vocab-size" in capsys.readouterr().out
    assert said == smaller == (meta.vocab < asked)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"files": ()}, "name at least one input"),
        ({"source": "c4"}, "choose from plain, lines, openwebtext"),
        ({"seq_length": 2}, "--seq-length must be at least 3"),
        ({"seq_length": 0, "packing": "plain"}, "--seq-length must be at least 1"),
        ({"train_vocab_size": 100}, "--train-vocab-size must be at least 257"),
        ({"train_vocab_size": 300, "tokenizer": "gpt2"}, "give only one of the two"),
        ({"valid_documents": 3, "valid_fraction": 0.1}, "only one of --valid, --valid-documents"),
        ({"valid_documents": -1, "valid_fraction": None}, "--valid-documents must be at least 0"),
        ({"valid_fraction": 1.0}, "--valid-fraction from 0"),
        ({"separator": "a\nb"}, "--separator is the text of one line"),
        ({"workers": -1}, "--workers must be at least 0"),
        ({"files": ("nowhere.txt",)}, "there is no file nowhere.txt"),
        ({"valid": ("nowhere.txt",), "valid_fraction": None}, "there is no file nowhere.txt"),
        ({"tokenizer": "nowhere"}, "there is no tokenizer at nowhere"),
        ({"valid_documents": 2, "valid_fraction": None}, "would leave none to train on"),
        ({"seq_length": 100}, "has 16 tokens, which fill no block; .* --seq-length of at most 18"),
        ({"valid_documents": 1, "valid_fraction": None, "seq_length": 9}, "the valid split has 6 tokens"),
        ({"out": Path("/")}, "has no name of its own"),
    ],
)
def test_bad_settings_say_what_to_type(settings: dict[str, Any], advice: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=advice):
        run(tmp_path, joined("the first", "other"), **settings)
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no documents in .*x.txt: it is empty$"):
        run(tmp_path, "")


@pytest.mark.parametrize("text", ["\n \n", joined("", " ", "\n\n")])
def test_no_documents(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no documents in .*x.txt \(\d empty ones\); see --source and --field"):
        run(tmp_path, text)


def test_invalid_utf8_is_found_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"good\n<|endoftext|>\nb\xffd")
    with pytest.raises(ValueError, match=r"x.txt is not UTF-8 at byte 20"):
        run(tmp_path, None, seq_length=3)
    assert not (tmp_path / "tokens").exists()
    run(tmp_path, None, seq_length=3, errors="replace")


def test_an_existing_folder_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    run(tmp_path, "first text", seq_length=3)
    before = ids(tmp_path)
    with pytest.raises(ValueError, match="exists; replace it with --overwrite"):
        run(tmp_path, "second", seq_length=3)
    assert ids(tmp_path) == before
    (tmp_path / "x.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        run(tmp_path, None, seq_length=3, overwrite=True)
    assert ids(tmp_path) == before
    run(tmp_path, "second", seq_length=3, overwrite=True)
    assert ids(tmp_path)[1::3] == [*b"second", END]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokens", "x.txt"]


def test_overwrite_spares_what_is_not_a_folder_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    run(tmp_path, "an empty folder is no obstacle", seq_length=3)
    (tmp_path / "tokens" / "notes.md").write_text("mine")
    with pytest.raises(ValueError, match=r"not only a directory of tokens \(notes.md\)"):
        run(tmp_path, "text", seq_length=3, overwrite=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.bin").write_text("mine")
    with pytest.raises(ValueError, match=r"not only a directory of tokens \(no meta.json\)"):
        run(tmp_path, "text", seq_length=3, overwrite=True, out=tmp_path / "other")
    with pytest.raises(ValueError, match="is a file; give a directory"):
        run(tmp_path, "text", seq_length=3, overwrite=True, out=tmp_path / "x.txt")
    assert (tmp_path / "tokens" / "notes.md").read_text() == "mine"


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "wrap", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "some text", seq_length=3)
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]


def in_a_process(folder: Path, before: str) -> subprocess.CompletedProcess[str]:
    """Prepare folder/x.txt into folder/tokens in a process of its own, after running some code in it."""
    code = (
        "import os, resource, signal\nfrom pathlib import Path\nfrom rich.console import Console\n"
        "import cdlm.data.prepare as module\nfrom cdlm.data.tokens import Meta\n"
        "die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"{before}\nfolder = Path({str(folder)!r})\n"
        "config = module.PrepareConfig((str(folder / 'x.txt'),), folder / 'tokens', seq_length=64, valid_fraction=0)\n"
        "module.prepare(config, Console(quiet=True))"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("point", ["module.wrap", "module.Tokenizer.save", "Meta.write", "Path.rename"])
def test_a_killed_run_leaves_nothing_under_the_final_name(point: str, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("some text " * 1000)
    assert in_a_process(tmp_path, f"{point} = die").returncode == -9
    assert not (tmp_path / "tokens").exists()
    assert (tmp_path / ".tokens.partial").is_dir()
    run(tmp_path, None, seq_length=64)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokens", "x.txt"]
    assert open_tokens(tmp_path / "tokens").blocks() == read_meta(tmp_path / "tokens").splits["train"].tokens // 64


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("some text " * 100_000)
    done = in_a_process(tmp_path, "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("OSError: [Errno 27]")
    assert "train.bin" in last
    assert "choose another --out" in last
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]


def test_a_disk_that_is_full_at_the_very_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Meta, "write", full)
    with pytest.raises(OSError, match=r"No space left on device; make room .*tokens"):
        run(tmp_path, "some text", seq_length=3)
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]


def test_two_runs_at_a_time_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / ".tokens.partial").mkdir()
    lock = os.open(tmp_path / ".tokens.partial", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"another run is writing .*tokens; wait for it"):
            run(tmp_path, "some text", seq_length=3)
        assert (tmp_path / ".tokens.partial").is_dir()
    finally:
        os.close(lock)
    run(tmp_path, "some text", seq_length=3)


def test_bytes_need_no_optional_library() -> None:
    code = (
        "import sys\nfor name in ('tokenizers', 'datasets', 'pyarrow'): sys.modules[name] = None\n"
        "import cdlm.data.tokens, cdlm.data.sources, cdlm.data.prepare\nfrom cdlm.data.tokenizer import Tokenizer\n"
        "print(Tokenizer.load('bytes').encode('hi'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[104, 105]", done.stderr
