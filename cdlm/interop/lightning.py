"""Checkpoints that Lightning wrote (.ckpt files of MDLM, UDLM, DUO and SDTT) as model directories.

    cdlm convert last.ckpt --out my-mdlm --model-type mdlm --max-length 1024

A .ckpt is a pickle, which can run any code when it is loaded. Here its instructions are followed by an unpickler that
knows containers, numbers, strings and tensors alone. Whatever else a checkpoint names (an OmegaConf config, a
tokenizer, `os.system`) is replaced by an inert placeholder: never imported, never called. Only the tensors are kept.
"""

import collections
import dataclasses
import io
import math
import pickle
import pickletools
import shutil
import zipfile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cdlm.data.tokenizer import Tokenizer
from cdlm.model.pretrained import PREFIX, LayoutError, load_denoiser, write_model
from cdlm.text.pipeline import load

ModelType = Literal["mdlm", "udlm", "duo"]

DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
}
"""The storage types of weights, as torch.save names them. Tensors of integers are not needed, and dropped."""


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What `convert` has written."""

    directory: Path
    weights: Literal["ema", "raw"]
    num_parameters: int


def convert(
    checkpoint: Path,
    out: Path,
    model_type: ModelType,
    max_length: int,
    *,
    use_ema: bool = True,
    bos_framed: bool | None = None,
    time_conditioning: bool | None = None,
    num_heads: int | None = None,
    tokenizer: str | Path | None = None,
) -> Conversion:
    """Write a model directory, in the layout that the public checkpoints have, from the tensors of a .ckpt file.

    The EMA weights are taken where the checkpoint has them, as in the evaluations of its authors. The tensors tell the
    sizes of the network; what they cannot tell is an argument. The directory is written aside, opened as `cdlm.load`
    does, and renamed: it is there whole, or not at all.
    """
    if out.exists():
        raise ValueError(f"{out} exists; choose another directory, or remove it first.")
    tensors, weights = read_weights(checkpoint, use_ema)
    masks = model_type == "mdlm"
    config: dict[str, Any] = {
        "model_type": model_type,
        **_network_sizes(tensors, num_heads),
        "model_length": max_length,
        "time_conditioning": not masks if time_conditioning is None else time_conditioning,
        "text": {
            "max_length": max_length,
            "posterior": "plug-in",
            "bos_framed": model_type != "udlm" if bos_framed is None else bos_framed,
            "eos_padded": False,
        },
    }
    aside = out.with_name(f"{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        write_model(aside, config, tensors)
        if tokenizer is None:
            denoiser = load_denoiser(aside)
        else:
            Tokenizer.load(tokenizer).save(aside)
            denoiser = load(aside, "cpu").denoiser
        aside.rename(out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return Conversion(out, weights, denoiser.count())


def read_weights(checkpoint: Path, use_ema: bool = True) -> tuple[dict[str, Tensor], Literal["ema", "raw"]]:
    """The tensors of the network by the names of the public layouts: EMA weights if there are any, else raw ones.

    The EMA is a list, in the order of the network's parameters; the rotary frequencies are a buffer and not in it.
    """
    try:
        archive = zipfile.ZipFile(checkpoint)
    except FileNotFoundError:
        raise ValueError(f"there is no file {checkpoint}.") from None
    except (zipfile.BadZipFile, IsADirectoryError):
        raise LayoutError(
            f"{checkpoint} is not a checkpoint that torch.save wrote (PyTorch 1.6 or newer); give a .ckpt file."
        ) from None
    with archive:
        try:
            return _weights(archive, use_ema)
        except LayoutError as error:
            raise LayoutError(f"cannot convert {checkpoint}: {error}") from None
        except Exception as error:  # whatever a damaged or hostile pickle makes the unpickler raise
            raise LayoutError(f"{checkpoint} is damaged ({type(error).__name__}: {error}).") from None


def _weights(archive: zipfile.ZipFile, use_ema: bool) -> tuple[dict[str, Tensor], Literal["ema", "raw"]]:
    root, found = _unpickle(archive)
    state = found.get("state_dict") if isinstance(found, dict) else None
    if not isinstance(state, dict):
        raise LayoutError('it has no "state_dict"; it is not a checkpoint of Lightning.')
    views = {
        f"{PREFIX}{name.split(PREFIX)[-1]}": view
        for name, view in state.items()
        if isinstance(name, str) and isinstance(view, _View) and name.startswith(PREFIX)
    }
    if f"{PREFIX}sigma_map.mlp.2.weight" not in views:
        raise LayoutError(f"it has no tensor {PREFIX}sigma_map.mlp.2.weight; it is not of MDLM, UDLM, DUO or SDTT.")
    ema = found.get("ema")
    shadow = ema.get("shadow_params") if use_ema and isinstance(ema, dict) else None
    if isinstance(shadow, list) and shadow:
        names = [name for name in views if not name.endswith("rotary_emb.inv_freq")]
        if [view.size if isinstance(view, _View) else None for view in shadow] != [views[name].size for name in names]:
            raise LayoutError(
                f"its EMA has {len(shadow)} tensors, which are not those of the {len(names)} parameters of the "
                "network; convert the raw weights with --no-use-ema."
            )
        views |= dict(zip(names, shadow, strict=True))
    tensors = {name: _read_tensor(view, archive, root) for name, view in views.items()}
    return tensors, "ema" if shadow else "raw"


def _network_sizes(tensors: dict[str, Tensor], num_heads: int | None) -> dict[str, Any]:
    """The sizes of MDLM's network, by the names that the public config.json gives them."""
    embedding = tensors.get(f"{PREFIX}vocab_embed.embedding")
    if embedding is None or embedding.ndim != 2:
        raise LayoutError(f"it has no tensor {PREFIX}vocab_embed.embedding; it is not of MDLM, UDLM, DUO or SDTT.")
    vocab_size, hidden_size = embedding.shape
    frequencies = tensors.get(f"{PREFIX}rotary_emb.inv_freq")
    if num_heads is None and (frequencies is None or not frequencies.numel()):
        raise LayoutError(f"it has no tensor {PREFIX}rotary_emb.inv_freq, which tells the heads; give --num-heads.")
    if num_heads is None and frequencies is not None:
        num_heads = hidden_size // (2 * frequencies.numel())  # one frequency for each pair of a head's dimensions
    return {
        "hidden_dim": hidden_size,
        "cond_dim": tensors[f"{PREFIX}sigma_map.mlp.2.weight"].shape[0],
        "n_blocks": len({name.split(".")[2] for name in tensors if name.startswith(f"{PREFIX}blocks.")}),
        "n_heads": num_heads,
        "dropout": 0.1,
        "vocab_size": vocab_size,
    }


class _Stored(NamedTuple):
    """A storage: a file of the archive. It is a tuple, as is a view of it: a pickle cannot set attributes of either."""

    dtype: torch.dtype
    key: str
    numel: int


class _View(NamedTuple):
    """A tensor that has not been read yet."""

    storage: _Stored
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Dropped:
    """Stands for everything that is not a container or a tensor: it can be made, called and filled, to no effect."""

    def __new__(cls, *arguments: Any, **keywords: Any) -> "_Dropped":
        return object.__new__(cls)

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **keywords: Any) -> "_Dropped":
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    extend = add = append


class _TensorUnpickler(pickle.Unpickler):
    """Follows the instructions of a pickle without importing anything that it names."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.allowed: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): lambda *arguments: _view(arguments),  # new ones for each file, as
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,  # a pickle can set attributes of functions
            **{("torch", name): dtype for name, dtype in DTYPES.items()},
        }

    def find_class(self, module: str, name: str) -> Any:
        return self.allowed.get((module, name), _Dropped)

    def persistent_load(self, pid: Any) -> Any:
        """A storage, as torch.save writes it: ("storage", type, key, device, number of elements)."""
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
            return _Dropped()
        _, dtype, key, _, numel = pid
        known = isinstance(dtype, torch.dtype) and type(key) is str and type(numel) is int
        return _Stored(dtype, key, numel) if known else _Dropped()


def _view(arguments: tuple[Any, ...]) -> Any:
    """The arguments of torch._utils._rebuild_tensor_v2, checked; a tensor whose storage was dropped is dropped, too."""
    storage, offset, size, stride = arguments[:4]
    if not isinstance(storage, _Stored):
        return _Dropped()
    for values in ((offset,), size, stride):
        if type(values) is not tuple or not all(type(value) is int and value >= 0 for value in values):
            raise ValueError(f"a tensor has the offset {offset!r}, the size {size!r} and the stride {stride!r}")
    return _View(storage, offset, size, stride)


def _unpickle(archive: zipfile.ZipFile) -> tuple[str, Any]:
    """The directory in the archive, and the object in its data.pkl. Nothing of the archive is extracted to the disk."""
    roots = [name.removesuffix("/data.pkl") for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise LayoutError(f"it has {len(roots)} files data.pkl, where torch.save writes one.")
    byte_order = f"{roots[0]}/byteorder"
    if byte_order in archive.namelist() and _read_file(archive, byte_order) != b"little":
        raise LayoutError("it was written on a big-endian machine; load and save it again on a little-endian one.")
    program = _read_file(archive, f"{roots[0]}/data.pkl")
    for opcode, argument, _ in pickletools.genops(program):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(program):
            raise LayoutError(f"it numbers an object {argument}, which would take as much memory.")
    return roots[0], _TensorUnpickler(io.BytesIO(program)).load()


def _read_file(archive: zipfile.ZipFile, name: str) -> bytes:
    """A file of the archive. torch.save compresses none, so a small archive cannot become large."""
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise LayoutError(f"its file {name} is compressed, which torch.save never does.")
    return archive.read(name)


def _read_tensor(view: _View, archive: zipfile.ZipFile, root: str) -> Tensor:
    """A tensor in float32, after a check that it lies within its storage."""
    dtype, key, numel = view.storage
    data = _read_file(archive, f"{root}/data/{key}")
    last = view.offset + sum((n - 1) * step for n, step in zip(view.size, view.stride, strict=True))
    if len(data) != numel * dtype.itemsize or not 0 < math.prod(view.size) <= numel or last >= numel:
        raise LayoutError(f"a tensor of size {view.size} does not fit its storage {key} of {len(data):,} bytes.")
    return torch.frombuffer(bytearray(data), dtype=dtype).as_strided(view.size, view.stride, view.offset).float()
