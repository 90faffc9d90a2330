"""Model folders: `config.json` beside `model.safetensors`, or beside parts of it and their index.

Ours, and those of the public checkpoints of MDLM, UDLM, DUO and SDTT.
"""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from cdlm.files import digest, read_object, seal_holds
from cdlm.model.architecture import Architecture
from cdlm.model.denoiser import Denoiser
from cdlm.process import SCHEDULES, Process, masked, uniform

FORMAT = 1
PREFIX = "backbone."
PEERS = ("mdlm", "udlm", "duo")
INDEX = "model.safetensors.index.json"
_PICKLES = (".ckpt", ".bin", ".pt", ".pth")
_CONVERT = "docs/hub.md (Checkpoints that are pickles) shows how to make a folder of it"


class LayoutError(ValueError):
    """A folder that is not a model this version can read."""


def save(denoiser: Denoiser, folder: str | Path, dtype: torch.dtype | None = None, part: int | None = None) -> Path:
    """Write a self-contained model folder; the prior travels with the weights, the rest is readable JSON.

    Weights may be rounded to a `dtype`, and split into files of at most `part` bytes.
    """
    tensors = {
        name: tensor.detach().cpu().to(dtype or tensor.dtype).contiguous()
        for name, tensor in _cut(denoiser.state_dict(), denoiser.vocab).items()
        if not (denoiser.shape.tied and name == f"{PREFIX}output_layer.linear.weight")  # `accelerate` makes a copy
    }
    if denoiser.process is not None:
        tensors["prior"] = denoiser.process.prior
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder, describe(denoiser), tensors, part)
    return folder


def describe(denoiser: Denoiser) -> dict[str, Any]:
    """What a model folder's config.json says."""
    config: dict[str, Any] = {"format": "cdlm", "version": FORMAT, "vocab": denoiser.vocab, "process": None}
    config["architecture"] = dataclasses.asdict(denoiser.shape)
    if denoiser.process is not None:
        noise = denoiser.process.noise
        name = next(name for name, kind in SCHEDULES.items() if isinstance(noise, kind))
        config["process"] = {"name": denoiser.process.name, "noise": name, **vars(noise)}
    return config


def write_model(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], part: int | None = None
) -> None:
    if part is None:
        write_tensors(tensors, folder / "model.safetensors")
    else:
        _write_parts(tensors, folder, part)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(folder: str | Path, device: torch.device | str = "cpu") -> Denoiser:
    """Open a model folder: one written by `save`, a run (its newest checkpoint), or a public checkpoint.

    Nothing is unpickled.
    """
    folder = newest(Path(folder))
    config = _read_config(folder)
    _check_digests(folder)
    tensors = _read_tensors(folder)
    try:
        if config.get("format") == "cdlm":
            denoiser = _ours(config, tensors)
        elif str(config.get("model_type")).lower() in PEERS:
            denoiser, tensors = _peer(config, tensors)
        elif "parameterization" in config and isinstance(config.get("model"), dict):
            denoiser, tensors = _sdtt(config, tensors)
        else:
            kind = config.get("format") or config.get("model_type")
            raise LayoutError(
                f"its config.json describes {kind!r}; readable are folders of cdlm, of sdtt, and of mdlm, udlm or duo "
                "(by model_type)"
            )
        _copy(tensors, denoiser)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"config.json lacks {error}" if isinstance(error, KeyError) else error
        raise LayoutError(f"cannot load {folder}: {reason}") from None
    return denoiser.to(device).eval()


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a folder, from one file or from parts."""
    names = ["model.safetensors"]
    if (folder / INDEX).is_file() and not (folder / names[0]).is_file():
        try:
            names = sorted(set(read_object(folder / INDEX)["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise LayoutError(f"{folder / INDEX} is damaged; fetch or write it again") from None
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        if Path(name).name != name:
            raise LayoutError(f"{folder / INDEX} names {name!r}, which is not a file beside it")
        try:
            tensors |= load_file(folder / name)
        except FileNotFoundError:
            if any(path.suffix in _PICKLES for path in folder.iterdir()):
                raise LayoutError(f"{folder} has its weights as a pickle, which is never opened; {_CONVERT}") from None
            raise LayoutError(f"{folder} has a config.json but no {name}; copy the weights beside it") from None
        except SafetensorError as error:
            raise LayoutError(f"{folder / name} is damaged ({error}); fetch or write it again") from None
    return tensors


def count(folder: Path) -> int:
    """Parameters of a model folder, from the heads of its files alone."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as held:
            total += sum(math.prod(held.get_slice(name).get_shape()) for name in held.keys() if name != "prior")  # noqa: SIM118
    return total


def _write_parts(tensors: dict[str, torch.Tensor], folder: Path, most: int) -> None:
    """Files of at most so many bytes, with an index as other libraries write it."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    room = most
    for name, tensor in tensors.items():
        if tensor.nbytes > most:
            raise ValueError(f"tensor {name!r} alone has {tensor.nbytes:,} bytes; parts of {most:,} are too small")
        if tensor.nbytes > room:
            parts.append({})
            room = most
        parts[-1][name] = tensor
        room -= tensor.nbytes
    names = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    for name, held in zip(names, parts, strict=True):
        write_tensors(held, folder / name)
    size = sum(tensor.nbytes for tensor in tensors.values())
    where = {tensor: name for name, held in zip(names, parts, strict=True) for tensor in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2) + "\n")


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write tensors; whatever is wrong with the disk is an OSError.

    Whoever may read other new files may read this one: safetensors alone would keep it for its owner.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from None
    path.chmod(mode)


def newest(folder: Path) -> Path:
    """The model folder meant: itself, or the newest checkpoint of a run, by its number and not by its clock."""
    if (folder / "config.json").exists():
        return folder
    names = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in folder.glob("step-*"))
    found = [(int(name[1]), path) for name, path in names if name and (path / "state.json").is_file()]
    return max(found)[1] if found else folder


def _check_digests(folder: Path) -> None:
    """A checkpoint's state.json keeps a digest of every file of the model; other folders have none to compare."""
    path = folder / "state.json"
    if not path.is_file():
        return
    way = f"name an earlier checkpoint beside it, or, if you changed it yourself, a copy of {folder} without state.json"
    try:
        state = read_object(path)
    except ValueError as error:
        raise LayoutError(f"{error}; {way}") from None
    if "seal" not in state:
        return
    if not seal_holds(state):
        raise LayoutError(f"{path} is damaged (its digest differs); {way}")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        value = state.get("files", {}).get(name)
        if value and (folder / name).is_file() and digest(folder / name) != value:
            raise LayoutError(f"{folder / name} is damaged (its digest differs from that in state.json); {way}")


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        if folder.suffix in _PICKLES:
            raise LayoutError(f"{folder} is a pickle, which can run any code and is never opened; {_CONVERT}")
        why = "does not exist" if not folder.exists() else "is not a model folder: it has no config.json"
        if (folder / "run.json").is_file():
            why = "is a run without a checkpoint yet: wait for its first --save-every steps"
        raise LayoutError(f"{folder} {why}; give a folder with config.json and model.safetensors, or a run")
    try:
        return read_object(path)
    except ValueError as error:
        raise LayoutError(str(error)) from None


def _ours(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Denoiser:
    if config["version"] > FORMAT:
        raise LayoutError(
            f"written by a newer version (format {config['version']}, this one reads {FORMAT}); upgrade cdlm"
        )
    shape = Architecture(**config["architecture"])
    _check_size(shape, config["vocab"], tensors)
    if config["process"] is None:
        return Denoiser(shape, vocab=config["vocab"])
    if "prior" not in tensors:
        raise LayoutError("tensor 'prior' is missing from model.safetensors")
    name = config["process"]["noise"]
    if name not in SCHEDULES:
        raise LayoutError(f"unknown noise schedule {name!r}; there are: {', '.join(SCHEDULES)}")
    noise = SCHEDULES[name](eps=config["process"]["eps"])
    return Denoiser(shape, Process(config["vocab"], tensors.pop("prior"), noise))


def _peer(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[Denoiser, dict[str, torch.Tensor]]:
    """The layouts of kuleshov-group/mdlm-owt, kuleshov-group/udlm-lm1b, s-sahoo/duo and s-sahoo/duo-distilled.

    In MDLM's the last id is the mask; its row of the head is not in our law. The others' are uniform over all ids, and
    told the time: DUO's does not say so.
    """
    masks = config["model_type"].lower() == "mdlm"
    if config.get("cfg"):
        raise LayoutError("it is guided by classes (cfg), which is not supported here")
    shape = Architecture(
        hidden=config["hidden_dim"],
        blocks=config["n_blocks"],
        heads=config["n_heads"],
        cond=config["cond_dim"],
        dropout=config["dropout"],
        time_conditioning=config["time_conditioning"] if masks else config.get("time_conditioning", True),
    )
    return _stripped(shape, config["vocab_size"] - masks, masks, tensors)


def _sdtt(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[Denoiser, dict[str, torch.Tensor]]:
    """The layout of jdeschena/sdtt: the configuration of its run, and MDLM's network, once or twice wrapped."""
    model = config["model"]
    shape = Architecture(
        hidden=model["hidden_size"],
        blocks=model["n_blocks"],
        heads=model["n_heads"],
        cond=model["cond_dim"],
        dropout=model.get("dropout", 0.0),
        time_conditioning=bool(config.get("time_conditioning", False)),
    )
    inner = {f"{PREFIX}{name.split(PREFIX)[-1]}": tensor for name, tensor in tensors.items() if PREFIX in name}
    name = f"{PREFIX}vocab_embed.embedding"
    if name not in inner:
        raise LayoutError(f"tensor {name!r} is missing from model.safetensors")
    return _stripped(shape, len(inner[name]) - 1, True, inner)


def _stripped(
    shape: Architecture, vocab: int, masks: bool, tensors: dict[str, torch.Tensor]
) -> tuple[Denoiser, dict[str, torch.Tensor]]:
    """The network, and its tensors without what we do not keep."""
    _check_size(shape, vocab, tensors)
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    return Denoiser(shape, masked(vocab) if masks else uniform(vocab)), _cut(kept, vocab)


def _cut(tensors: dict[str, torch.Tensor], vocab: int) -> dict[str, torch.Tensor]:
    """The head without rows that stand for no token: that of the mask, or those that `accelerate` pads it with."""
    head = f"{PREFIX}output_layer.linear."
    return {name: tensor[:vocab] if name.startswith(head) else tensor for name, tensor in tensors.items()}


def _check_size(shape: Architecture, vocab: int, tensors: dict[str, torch.Tensor]) -> None:
    """A damaged config.json may describe a network far beyond its weights, and beyond memory: it is not even built."""
    for name, value in {**vars(shape), "vocab": vocab}.items():
        if name != "dropout" and type(value) not in (int, bool):
            raise LayoutError(f"config.json says that {name} is {value!r}, which is no whole number")
    tables = 1 if shape.tied else 2
    least = shape.hidden * (12 * shape.hidden * shape.blocks + tables * vocab + shape.absolute)
    least += 0 if shape.causal else shape.cond * (shape.cond + 6 * shape.hidden * shape.blocks)
    held = sum(tensor.numel() for tensor in tensors.values())
    if least > 4 * held + 1_000_000:
        raise LayoutError(
            f"config.json describes a network of {least:,} parameters or more, and model.safetensors holds {held:,}"
        )


def _copy(tensors: dict[str, torch.Tensor], denoiser: Denoiser) -> None:
    """Every tensor must be there, be wanted, and fit; the first that is not is named."""
    wanted = denoiser.state_dict()
    for name in wanted:
        if name not in tensors:
            raise LayoutError(f"tensor {name!r} is missing from model.safetensors")
        if tensors[name].shape != wanted[name].shape:
            have, want = tuple(tensors[name].shape), tuple(wanted[name].shape)
            raise LayoutError(f"tensor {name!r} has the shape {have}, but config.json implies {want}")
        if not tensors[name].is_floating_point() or not bool(torch.isfinite(tensors[name]).all()):
            raise LayoutError(f"tensor {name!r} holds numbers that are not finite weights; take an earlier checkpoint")
    for name in tensors:
        if name not in wanted:
            raise LayoutError(f"unknown tensor {name!r} in model.safetensors")
    denoiser.load_state_dict(tensors)
