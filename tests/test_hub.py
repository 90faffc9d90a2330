"""Folders for others: what is saved comes back, transformers opens it, cards tell the truth, push and pull meet."""

import hashlib
import json
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import cdlm
from cdlm.cli.pull import PullConfig
from cdlm.cli.push import PushConfig, upload
from cdlm.files import digest
from cdlm.hub import CODE, card, pull
from cdlm.model import pretrained
from cdlm.model.pretrained import LayoutError

from .writers import BPE, write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "model", "masked", BPE, length=16, framed=True)
    config = json.loads((folder / "config.json").read_text())
    training = {"method": "mcdlm:kappa=0.2", "steps": 300, "batch_size": 16, "seq_length": 16, "from": None}
    (folder / "config.json").write_text(json.dumps({**config, "training": training}))
    return folder


@pytest.mark.parametrize("part", [None, 20_000])
def test_a_saved_model_writes_the_same_texts(model: Path, tmp_path: Path, part: int | None) -> None:
    one = cdlm.load(model, "cpu")
    folder = one.save_pretrained(tmp_path / "copy", max_shard_size=part)
    assert (len(list(folder.glob("model*.safetensors"))) > 1) == (part is not None)
    other = cdlm.load(folder, "cpu")
    assert (other.max_length, other.bos_framed, other.training) == (16, True, one.training)
    assert [text.text for text in other.sample(3, steps=4)] == [text.text for text in one.sample(3, steps=4)]
    with pytest.raises(ValueError, match="holds a model already"):
        one.save_pretrained(folder)


@pytest.mark.filterwarnings("default")
def test_a_compiled_model_saves_what_it_was(model: Path, tmp_path: Path) -> None:
    """Compiling pads the head to a multiple of 128 tokens, of which a folder knows nothing."""
    plain, compiled = cdlm.load(model, "cpu"), cdlm.load(model, "cpu", compile=True)
    assert compiled.denoiser.count() == plain.denoiser.count()
    one, other = plain.save_pretrained(tmp_path / "a" / "copy"), compiled.save_pretrained(tmp_path / "b" / "copy")
    for name in ("model.safetensors", "config.json", "README.md"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    assert cdlm.load(other, "cpu").sample(steps=4)[0].text == plain.sample(steps=4)[0].text


def test_half_the_bytes(model: Path, tmp_path: Path) -> None:
    whole, half = (cdlm.load(model, "cpu").save_pretrained(tmp_path / kind, kind) for kind in ("float32", "bfloat16"))
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (whole, half)]
    assert sizes[1] < 0.65 * sizes[0]
    x = torch.randint(0, BPE.vocab_size, (2, 8))
    one, other = (cdlm.load(folder, "cpu").denoiser(x, 0.5) for folder in (whole, half))
    assert torch.allclose(one.exp(), other.exp(), atol=0.05)


@pytest.mark.parametrize("spoil", ["missing", "escape", "broken"])
def test_damaged_parts_are_named(model: Path, tmp_path: Path, spoil: str) -> None:
    folder = cdlm.load(model, "cpu").save_pretrained(tmp_path / "copy", max_shard_size=20_000)
    index = folder / "model.safetensors.index.json"
    if spoil == "missing":
        second = sorted(folder.glob("model-*.safetensors"))[1]
        second.unlink()
        match = f"no {second.name}"
    elif spoil == "escape":
        index.write_text(json.dumps({"weight_map": {"prior": "../model/model.safetensors"}}))
        match = "not a file beside it"
    else:
        index.write_text("[]")
        match = "index.json is damaged"
    with pytest.raises(LayoutError, match=match):
        cdlm.load(folder, "cpu")


def test_too_small_parts_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="are too small"):
        cdlm.load(model, "cpu").save_pretrained(tmp_path / "copy", max_shard_size=100)


def as_version_1(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json as version 0.1 of the package wrote it."""
    process, network, text = config["process"], config["network"], config["text"]
    return {
        **{key: value for key, value in config.items() if key not in ("vocab_size", "network", "training")},
        "version": 1,
        "vocab": config["vocab_size"],
        "process": {
            "name": process["name"],
            "noise": process["noise_schedule"],
            "eps": process["eps"],
            "states": process["num_states"],
        },
        "architecture": {
            "hidden": network["hidden_size"],
            "blocks": network["num_layers"],
            "heads": network["num_heads"],
            "cond": network["cond_dim"],
            "dropout": network["dropout"],
            "time_conditioning": network["time_conditioning"],
            "causal": network["causal"],
            "absolute": network["position_embeddings"],
            "tied": network["tie_embeddings"],
        },
        "text": {
            "length": text["max_length"],
            "posterior": text["posterior"],
            "framed": text["bos_framed"],
            "padded": text["eos_padded"],
        },
        "trained": {"method": "mdlm", "steps": 3, "batch": 2, "length": 16, "from": None},
    }


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_transformers_opens_what_version_1_wrote(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    one = cdlm.load(write_model(tmp_path / "model", kind, BPE, length=16), "cpu")
    folder = one.save_pretrained(tmp_path / f"first-{kind}")
    config = as_version_1(json.loads((folder / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / CODE).write_text("from cdlm.model.hf import CDLMConfig, CDLMForMaskedLM\n")
    other = transformers.AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True).eval()
    x, t = torch.randint(0, BPE.vocab_size, (2, 8)), torch.tensor([0.3, 0.9])
    assert torch.allclose(other(x, timesteps=t).logits.exp(), one.denoiser(x, t).exp(), atol=1e-6)
    assert cdlm.load(folder, "cpu").max_length == 16
    assert "3 steps" in card("x", pretrained.read_model_config(folder), 1)
    again = one.save_pretrained(tmp_path / "again")
    other.config.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["network"] == json.loads((again / "config.json").read_text())["network"]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("kind", "part", "tied"),
    [("masked", None, False), ("uniform", None, False), ("masked", 20_000, False), ("masked", 20_000, True)],
)
def test_transformers_gives_the_same_logits(
    kind: Any, part: int | None, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    one = cdlm.load(write_model(tmp_path / "model", kind, BPE, length=16, tied=tied), "cpu")
    folder = one.save_pretrained(tmp_path / f"copy-{kind}", max_shard_size=part)
    assert (folder / CODE).is_file()
    other = transformers.AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True).eval()
    x, t = torch.randint(0, BPE.vocab_size, (2, 8)), torch.tensor([0.3, 0.9])
    found = other(x, timesteps=t)
    assert torch.allclose(found.logits.exp(), one.denoiser(x, t).exp(), atol=1e-6)
    labels = torch.full_like(x, -100)
    labels[:, 3] = 5
    loss = other(x, timesteps=t, labels=labels).loss
    assert loss.item() == pytest.approx(-found.logits[:, 3, 5].mean().item(), rel=1e-4)
    assert torch.equal(other(x, timesteps=t, attention_mask=torch.ones_like(x)).logits, found.logits)
    with pytest.raises(TypeError, match="no timestep"):
        other(x, timestep=t)
    if kind == "uniform":
        with pytest.raises(ValueError, match="time-conditioned"):
            other(x)
    else:
        assert torch.equal(other(x).logits, other(x, timesteps=0.9, return_dict=False)[0])


def test_a_card_says_how_it_was_made_and_measured(model: Path, tmp_path: Path) -> None:
    row = {
        "task": "unconditional",
        "ppl": 123.4,
        "entropy": 4.2,
        "num_samples": 64,
        "judge": "SmolLM2",
        "sampling": {"steps": 8},
    }
    bound = {"task": "likelihood", "nelbo": 5.0, "dataset": "ptb"}
    page = (cdlm.load(model, "cpu").save_pretrained(tmp_path / "copy", results=[row, bound]) / "README.md").read_text()
    assert page.startswith("---\nlibrary_name: cdlm")
    assert "Trained by MCDLM (`mcdlm:kappa=0.2`): 300 steps, 0M tokens." in page
    assert "| 64 | 8 | SmolLM2 | 123.4 | 4.20 |" in page
    assert "NELBO on ptb: 5.000 nats per token (148.4)." in page
    causal = card("x", {"process": None}, 1_000_000)
    assert "autoregressive" in causal
    assert "AutoModelForCausalLM.from_pretrained(" in causal
    assert "transformers" not in card("x", {"format": "cdlm", "network": {"custom": "Mine"}, "process": None}, 1)


def test_the_readme_of_another_hand_is_kept(model: Path, tmp_path: Path) -> None:
    one, folder = cdlm.load(model, "cpu"), tmp_path / "copy"
    folder.mkdir()
    readme = folder / "README.md"
    readme.write_text("# My model\n\nwritten by cdlm and me\n")
    one.save_pretrained(folder)
    assert readme.read_text() == "# My model\n\nwritten by cdlm and me\n"
    readme.write_text(card("an old name", {"process": None}, 1))  # our own may go
    (folder / "config.json").unlink()
    one.save_pretrained(folder)
    assert "# copy" in readme.read_text()


class Hub:
    """A folder that stands for the hub; a commit is named after the files that it has."""

    class errors:  # noqa: N801
        class HfHubHTTPError(Exception): ...

        class HFValidationError(Exception): ...

    def __init__(self, root: Path, room: int = 1000) -> None:
        self.root, self.room = root, room

    def HfApi(self) -> "Hub":  # noqa: N802
        return self

    def create_repo(self, repo_id: str, private: bool, exist_ok: bool) -> None:
        (self.root / repo_id).mkdir(parents=True, exist_ok=exist_ok)

    def upload_folder(self, repo_id: str, folder_path: str, commit_message: str) -> None:
        shutil.copytree(folder_path, self.root / repo_id, dirs_exist_ok=True)

    def model_info(self, repo_id: str, revision: str | None) -> types.SimpleNamespace:
        if not (self.root / repo_id).is_dir():
            raise self.errors.HfHubHTTPError("404: no such repository\nmore")
        files = [(path.name, digest(path)) for path in sorted((self.root / repo_id).iterdir())]
        return types.SimpleNamespace(sha=hashlib.sha1(str((revision, files)).encode()).hexdigest())

    def snapshot_download(self, repo_id: str, revision: str | None, local_dir: str, allow_patterns: list[str]) -> str:
        """Files that are there are taken to be what is wanted; after `room` of them the line is cut."""
        wanted = {path for pattern in allow_patterns for path in (self.root / repo_id).glob(pattern)}
        missing = [path for path in sorted(wanted) if not (Path(local_dir) / path.name).exists()]
        Path(local_dir).mkdir(parents=True, exist_ok=True)
        for path in missing[: self.room]:
            shutil.copyfile(path, Path(local_dir) / path.name)
        if len(missing) > self.room:
            raise ConnectionError("the line is cut")
        return local_dir


def test_push_and_pull_meet(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdlm.hub._hub", lambda: Hub(tmp_path / "hub"))
    assert "me/mine" in upload(PushConfig(str(model), "me/mine"))
    page = (tmp_path / "hub" / "me" / "mine" / "README.md").read_text()
    assert "# me/mine\n" in page
    assert 'cdlm.load("me/mine")' in page
    assert 'from_pretrained("me/mine", ' in page
    out = pull("me/mine", tmp_path / "copy")
    assert cdlm.load(out, "cpu").sample(steps=4)[0].text == cdlm.load(model, "cpu").sample(steps=4)[0].text
    with pytest.raises(ValueError, match=r"did not give me/other: 404: no such repository; check"):
        pull("me/other", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match="exists"):
        PullConfig("me/mine", tmp_path / "copy")
    for name in ("mine", "a/b/c", "/x"):
        with pytest.raises(ValueError, match="is owner/name"):
            PushConfig(str(model), name)


def test_an_interrupted_pull_is_not_taken_for_another_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdlm.hub._hub", lambda: Hub(tmp_path / "hub"))
    other = write_model(tmp_path / "other", "uniform", BPE, length=16)
    for name, folder in (("me/a", model), ("me/b", other)):
        upload(PushConfig(str(folder), name))
    out = tmp_path / "copy"
    for source, room in (("me/a", 2), ("me/b", 1), ("me/b", 3)):
        monkeypatch.setattr("cdlm.hub._hub", lambda room=room: Hub(tmp_path / "hub", room))
        with pytest.raises(ValueError, match=r"did not give me/[ab]: the line is cut"):
            pull(source, out)
    assert not out.exists()
    assert pull("me/b", out) == out  # what came before is not fetched again
    for path in (tmp_path / "hub" / "me" / "b").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the hub's own client, which may not ask the hub; it keeps blobs, and links to them by commit."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def keep(cache: Path, name: str, folder: Path, commit: str = "0123456789" * 4) -> None:
    repository = cache / f"models--{name.replace('/', '--')}"
    for kind in ("blobs", "refs", f"snapshots/{commit}"):
        (repository / kind).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for path in folder.iterdir():
        blob = repository / "blobs" / digest(path)
        shutil.copyfile(path, blob)
        (repository / "snapshots" / commit / path.name).symlink_to(Path("..", "..", "blobs", blob.name))


@pytest.mark.parametrize("revision", [None, "0123456789" * 4])
@pytest.mark.filterwarnings("default")
def test_what_the_client_keeps_is_pulled_offline(
    model: Path, offline: Path, tmp_path: Path, revision: str | None
) -> None:
    keep(offline, "me/mine", model)
    out = pull("me/mine", tmp_path / "new" / "copy", revision)
    assert {path.name for path in out.iterdir()} == {path.name for path in model.iterdir()}
    assert [path.name for path in out.parent.iterdir()] == ["copy"]
    shutil.rmtree(offline / "models--me--mine" / "blobs")  # the copy is one, not links
    assert cdlm.load(out, "cpu").sample(steps=4)[0].text == cdlm.load(model, "cpu").sample(steps=4)[0].text


@pytest.mark.filterwarnings("default")
def test_half_a_model_in_the_cache_is_not_handed_over(model: Path, offline: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").unlink()
    keep(offline, "me/half", model)
    with pytest.raises(LayoutError, match=r"no model\.safetensors"):
        pull("me/half", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "model"]


@pytest.mark.filterwarnings("default")
def test_the_client_offline_says_so(model: Path, offline: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the model hub did not give nobody/nothing"):
        pull("nobody/nothing", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"the model hub did not take me/mine.*offline mode is enabled"):
        upload(PushConfig(str(model), "me/mine"))
