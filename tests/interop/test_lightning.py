"""`cdlm convert`: checkpoints that Lightning wrote, and pickles that are meant to do harm."""

import builtins
import collections
import copyreg
import io
import json
import operator
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import cdlm
from cdlm.cli.main import cli
from cdlm.interop.lightning import convert, read_weights
from cdlm.model.pretrained import LayoutError

from ..peers.layouts import HEADS, LAYOUTS, LENGTH, MDLM, peers_logits, weights

STORED = Path(__file__).parents[1] / "fixtures" / "lightning"
"""What Lightning wrote, with an OmegaConf config and a tokenizer object inside (write_checkpoint.py there)."""


@pytest.mark.parametrize("kind", ["ema", "raw"])
def test_a_checkpoint_that_lightning_wrote(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "converted"
    arguments = ["convert", str(STORED / "last.ckpt"), "--out", str(out), "--model-type", "mdlm", "--max-length", "12"]
    cli([*arguments, "--tokenizer", str(STORED / "tokenizer.json"), *(["--no-use-ema"] if kind == "raw" else [])])
    assert f"wrote {out}: the {'EMA' if kind == 'ema' else 'raw'} weights" in capsys.readouterr().out
    expected = load_file(STORED / f"{kind}.safetensors")
    found = load_file(out / "model.safetensors")
    assert expected.keys() <= found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not torch.equal(load_file(STORED / "raw.safetensors")["backbone.blocks.1.mlp.2.weight"],
                           load_file(STORED / "ema.safetensors")["backbone.blocks.1.mlp.2.weight"])  # fmt: skip
    config = json.loads((out / "config.json").read_text())
    assert [config[name] for name in ("hidden_dim", "cond_dim", "n_blocks", "n_heads")] == [8, 2, 2, 2]
    model = cdlm.load(out, "cpu", "float64")
    assert (model.max_length, model.bos_framed, model.posterior) == (12, True, "plug-in")
    x = torch.randint(0, model.denoiser.vocab + 1, (2, 12))
    x[:, ::2] = model.denoiser.vocab
    plain = {name.removeprefix("backbone."): tensor for name, tensor in expected.items()}
    logits = peers_logits(plain, 2, x, torch.zeros(2))[..., : model.denoiser.vocab].log_softmax(-1)
    masked = x == model.denoiser.vocab
    assert torch.allclose(model.denoiser(x, 0.3)[masked], logits[masked], atol=1e-9)
    assert len(model.sample(2, steps=4)) == 2


def write_checkpoint(path: Path, ema: bool = True, **more: Any) -> dict[str, Tensor]:
    """A checkpoint of MDLM's, with more in it; returns the weights that it is evaluated with."""
    tensors = {f"backbone.{name}": tensor for name, tensor in weights(LAYOUTS["mdlm-owt"]).items()}
    averages = [tensor for name, tensor in tensors.items() if not name.endswith("inv_freq")]
    replaced = [name for name in tensors if ema and not name.endswith("inv_freq")]
    state = tensors | {name: torch.zeros_like(tensors[name]) for name in replaced}
    found = {"epoch": 3, "state_dict": collections.OrderedDict(state)}
    found |= {"ema": {"decay": 0.9999, "shadow_params": averages}} if ema else {}
    torch.save({**more, **found}, path)
    return tensors


@pytest.mark.parametrize("ema", [True, False])
def test_its_law_is_that_of_the_weights(tmp_path: Path, ema: bool) -> None:
    tensors = write_checkpoint(tmp_path / "last.ckpt", ema)
    done = convert(tmp_path / "last.ckpt", tmp_path / "out", "mdlm", LENGTH, num_heads=HEADS)
    assert done.weights == ("ema" if ema else "raw")
    model = cdlm.load(done.directory, "cpu", "float64", tokenizer="bytes")
    x = torch.full((1, LENGTH), model.denoiser.vocab)
    plain = {name.removeprefix("backbone."): tensor for name, tensor in tensors.items()}
    logits = peers_logits(plain, HEADS, x, torch.zeros(1))[..., :-1].log_softmax(-1)
    assert torch.allclose(model.denoiser(x, 0.3), logits, atol=1e-9)


@pytest.mark.parametrize(("model_type", "framed"), [("mdlm", True), ("duo", True), ("udlm", False)])
def test_what_the_model_type_implies_and_what_may_be_said(tmp_path: Path, model_type: Any, framed: bool) -> None:
    path = tmp_path / "last.ckpt"
    write_checkpoint(path)
    implied = cdlm.load(convert(path, tmp_path / "implied", model_type, 12).directory, "cpu", tokenizer="bytes")
    assert implied.bos_framed == framed
    assert implied.denoiser.process.absorbing == (model_type == "mdlm")
    assert implied.denoiser.config.time_conditioning == (model_type != "mdlm")
    given = convert(path, tmp_path / "given", model_type, 12, bos_framed=not framed, time_conditioning=True)
    told = cdlm.load(given.directory, "cpu", tokenizer="bytes")
    assert told.bos_framed != framed
    assert told.denoiser.config.time_conditioning


def test_half_precision_and_views_of_one_storage_are_read(tmp_path: Path) -> None:
    tensors = {f"backbone.{name}": tensor.bfloat16() for name, tensor in weights(LAYOUTS["mdlm-owt"]).items()}
    name = "backbone.blocks.0.attn_qkv.weight"
    transposed = tensors[name].T.contiguous().T
    torch.save({"state_dict": {**tensors, name: transposed}}, tmp_path / "last.ckpt")
    found, _ = read_weights(tmp_path / "last.ckpt")
    assert all(torch.equal(found[key], tensor.float()) for key, tensor in tensors.items())


class Call:
    """Is pickled as the call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, state: Any = None) -> None:
        self.call = (function, arguments, state) if state is not None else (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def hostile(mark: Path) -> dict[str, Any]:
    """Objects that leave a mark when they are unpickled as usual."""
    touch, code = f"touch {mark}", f"__import__('os').mkdir({str(mark)!r})"
    return {
        "os.system": Call(os.system, touch),
        "eval": Call(builtins.eval, code),
        "exec": Call(builtins.exec, code),
        "a method": Call(operator.methodcaller("touch"), mark),
        "torch.save": Call(torch.save, {}, str(mark)),
        "a state": Call(collections.OrderedDict, state={"x": Call(os.mkdir, str(mark))}),
        "a key": {Call(os.system, touch): 1},
        "nested": [[({"deep": [Call(os.system, touch)]},)]],
    }


@pytest.mark.parametrize("kind", hostile(Path("mark")))
def test_a_hostile_object_is_not_run(kind: str, tmp_path: Path) -> None:
    mark, path = tmp_path / "mark", tmp_path / "last.ckpt"
    write_checkpoint(path, hyper_parameters=hostile(mark)[kind])
    expected = write_checkpoint(tmp_path / "clean.ckpt")
    found, _ = read_weights(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not mark.exists()
    torch.load(path, weights_only=False)  # it would have been
    assert mark.exists()


def raw_pickles(mark: Path) -> dict[str, bytes]:
    """Instructions that the pickler itself would not write."""
    command = f"touch {mark}".encode()
    inner = b"cos\nsystem\n(S'" + command + b"'\ntR"
    return {
        "INST": b"(S'" + command + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'" + command + b"'\no.",
        "GLOBAL and REDUCE": inner + b".",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c" + bytes([len(command)]) + command + b"\x85R.",
        "a dotted name": b"\x80\x04\x8c\x02os\x8c\x0bpath.os.system\x93\x8c".replace(b"\x0b", b"\x0e")
        + bytes([len(command)]) + command + b"\x85R.",
        "a persistent id": inner + b"Q.",
        "nested persistent ids": b"(S'storage'\n" + inner + b"QQS'0'\nS'cpu'\nI1\ntQ.",
        "a storage type": b"(S'storage'\n" + inner + b"S'0'\nS'cpu'\nI1\ntQ.",
    }  # fmt: skip


def write_archive(path: Path, program: bytes, **files: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        for name, content in files.items():
            archive.writestr(f"archive/{name}", content)
    return path


@pytest.mark.parametrize("kind", raw_pickles(Path("mark")))
def test_hostile_instructions_are_not_followed(kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    program = raw_pickles(mark)[kind]
    with pytest.raises(LayoutError, match=r"state_dict|damaged"):
        read_weights(write_archive(tmp_path / "last.ckpt", program))
    assert not mark.exists()

    class Usual(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return pid

    Usual(io.BytesIO(program)).load()  # it would have been
    assert mark.exists()


def test_what_is_allowed_cannot_be_changed_for_the_next_file(tmp_path: Path) -> None:
    """A BUILD instruction sets attributes of any object, also of the functions and classes that are known here."""
    expected = write_checkpoint(tmp_path / "clean.ckpt")
    names = [b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n", b"cos\nsystem\n"]
    names += [b"ctorch\nFloatStorage\n"]
    for name in names:
        for state in (
            b"}S'__defaults__'\n(I1\nI2\ntsS'append'\nI0\ns",
            b"(N}S'__defaults__'\n(I1\ntsS'append'\nI0\nst",
        ):
            with pytest.raises(LayoutError):
                read_weights(write_archive(tmp_path / "last.ckpt", name + state + b"b."))
    found, _ = read_weights(tmp_path / "clean.ckpt")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert collections.OrderedDict(a=1) == {"a": 1}


def test_the_extension_registry_is_not_used(tmp_path: Path) -> None:
    copyreg.add_extension("os", "system", 200)
    try:
        program = b"\x80\x02\x82\xc8X\x05\x00\x00\x00false\x85R."
        with pytest.raises(LayoutError, match="state_dict"):
            read_weights(write_archive(tmp_path / "last.ckpt", program))
    finally:
        copyreg.remove_extension("os", "system", 200)


def test_files_that_point_out_of_the_archive_stay_in_it(tmp_path: Path) -> None:
    path = tmp_path / "inside" / "last.ckpt"
    path.parent.mkdir()
    write_checkpoint(path)
    with zipfile.ZipFile(path, "a") as archive:
        for name in ("../evil", "/tmp/cdlm-evil", "last/data/../../../evil"):
            archive.writestr(name, b"evil")
    convert(path, tmp_path / "inside" / "out", "mdlm", 12)
    assert not [found for found in tmp_path.rglob("*") if "evil" in found.name]
    assert not Path("/tmp/cdlm-evil").exists()


def tensor_program(
    key: str = "0", numel: int = 4, offset: int = 0, size: str = "(I4\nt", stride: str = "(I1\nt"
) -> bytes:
    """A checkpoint with one tensor that every network of the peers has."""
    tensor = (
        f"ctorch._utils\n_rebuild_tensor_v2\n((S'storage'\nctorch\nFloatStorage\nS'{key}'\nS'cpu'\nI{numel}\ntQ"
        f"I{offset}\n{size}{stride}I00\n}}tR"
    )
    return f"}}S'state_dict'\n}}S'backbone.sigma_map.mlp.2.weight'\n{tensor}ss.".encode()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (tensor_program(numel=1000), "does not fit its storage"),
        (tensor_program(offset=1), "does not fit its storage"),
        (tensor_program(size="(I1000000000000\nt", stride="(I0\nt"), "does not fit its storage"),
        (tensor_program(size="(I-4\nt"), "size"),
        (tensor_program(size="(I4\nI4\nt"), "does not fit|damaged"),
        (tensor_program(key="../../../../etc/passwd"), "passwd"),
        (b"", "damaged"),
        (b"\x80\x04.", "damaged"),
        (b"}.", "state_dict"),
        (b"}r\xff\xff\xff\x7f.", "as much memory"),
        (b"}S'state_dict'\n}s.", "not of MDLM, UDLM, DUO or SDTT"),
        (b"(" * 100_000 + b"t" * 100_000 + b".", "state_dict"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_an_error_in_one_line(program: bytes, message: str, tmp_path: Path) -> None:
    path = write_archive(tmp_path / "last.ckpt", program, **{"data/0": bytes(16)})
    with pytest.raises(LayoutError, match=message) as caught:
        convert(path, tmp_path / "out", "mdlm", 12)
    assert "\n" not in str(caught.value)
    assert [found.name for found in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "last.ckpt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", tensor_program(numel=2**22))
        archive.writestr("archive/data/0", bytes(2**24))
    assert (tmp_path / "last.ckpt").stat().st_size < 2**20
    with pytest.raises(LayoutError, match="compressed"):
        read_weights(tmp_path / "last.ckpt")


def test_what_else_can_be_wrong(tmp_path: Path) -> None:
    path, out = tmp_path / "last.ckpt", tmp_path / "out"
    with pytest.raises(ValueError, match="there is no file"):
        convert(path, out, "mdlm", 12)
    path.write_bytes(pickle.dumps({"state_dict": {}}))
    with pytest.raises(LayoutError, match=r"not a checkpoint that torch\.save wrote"):
        convert(path, out, "mdlm", 12)
    tensors = write_checkpoint(path)
    del tensors["backbone.rotary_emb.inv_freq"]
    torch.save({"state_dict": tensors}, path)
    with pytest.raises(LayoutError, match="give --num-heads"):
        convert(path, out, "mdlm", 12)
    torch.save({"state_dict": tensors, "ema": {"shadow_params": list(tensors.values())[1:]}}, path)
    with pytest.raises(LayoutError, match=r"--no-use-ema"):
        convert(path, out, "mdlm", 12, num_heads=HEADS)
    with pytest.raises(ValueError, match="do not belong together"):
        convert(path, out, "mdlm", 12, use_ema=False, num_heads=HEADS, tokenizer=STORED / "tokenizer.json")
    assert not out.exists()
    out.mkdir()
    with pytest.raises(ValueError, match="exists"):
        convert(path, out, "mdlm", 12)
    with pytest.raises(SystemExit):
        cli(["convert", str(path), "--out", str(tmp_path / "other"), "--model-type", "mdlm", "--max-length", "0"])


def test_the_sizes_are_those_of_the_network(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "last.ckpt")
    convert(tmp_path / "last.ckpt", tmp_path / "out", "mdlm", LENGTH)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: config[name] for name in MDLM if name != "architectures"} == {
        name: value for name, value in MDLM.items() if name != "architectures"
    }
