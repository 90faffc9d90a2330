"""Model folders: `config.json` beside `model.safetensors`, or beside parts of it and their index.

Ours, and those of the public checkpoints of MDLM, UDLM, DUO and SDTT.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from cdlm.files import digest, read_object, rename_keys, seal_holds
from cdlm.model.config import RENAMED_NETWORK, NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.process import SCHEDULES, Process, masked, uniform

FORMAT = 2
"""Version of our config.json; `migrate_model_config` reads version 1."""
PREFIX = "backbone."
CUSTOM = "custom"
"""Under "network" in config.json: the name of the class of a network of the user's own, whose weights these are."""
MASKED_LM = "masked_lm"
"""Under "network" in config.json, beside the class: the description of a masked language model of transformers."""
PEERS = {"mdlm": True, "udlm": False, "duo": True}
"""The public layouts by their model_type, and whether their models were trained on BOS-framed blocks. UDLM's public
model was trained on single sentences, padded."""
INDEX = "model.safetensors.index.json"
_PICKLES = (".ckpt", ".bin", ".pt", ".pth")
_CONVERT = "cdlm convert reads the tensors of a .ckpt file and writes a model directory (docs/hub.md)"


class LayoutError(ValueError):
    """A folder that is not a model this version can read."""


def save_denoiser(
    denoiser: Denoiser, folder: str | Path, dtype: torch.dtype | None = None, part: int | None = None
) -> Path:
    """Write a self-contained model folder; the prior travels with the weights, the rest is readable JSON.

    Weights may be rounded to a `dtype`, and split into files of at most `part` bytes.
    """
    tensors = _custom_tensors(denoiser, dtype) if denoiser.custom_network else _dit_tensors(denoiser, dtype)
    if denoiser.process is not None:
        tensors["prior"] = denoiser.process.prior
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder, model_config(denoiser), tensors, part)
    return folder


def _dit_tensors(denoiser: Denoiser, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().cpu().to(dtype or tensor.dtype).contiguous()
        for name, tensor in _cut(denoiser.state_dict(), denoiser.vocab).items()
        if not (
            denoiser.config.tie_embeddings and name == f"{PREFIX}output_layer.linear.weight"
        )  # `accelerate` makes a copy
    }


def _custom_tensors(denoiser: Denoiser, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """They may be integers, and one tensor may have several names, of which files keep copies."""
    return {
        name: tensor.detach().to("cpu", dtype if dtype and tensor.is_floating_point() else tensor.dtype, copy=True)
        for name, tensor in denoiser.state_dict().items()
    }


def model_config(denoiser: Denoiser) -> dict[str, Any]:
    """The contents of config.json, as far as the denoiser itself determines them."""
    config: dict[str, Any] = {"format": "cdlm", "version": FORMAT, "vocab_size": denoiser.vocab, "process": None}
    custom = denoiser.custom_network
    config["network"] = {CUSTOM: custom} if custom else dataclasses.asdict(denoiser.config)
    for name in ("grid_embeddings", "joint_layers"):  # earlier versions read models that have neither
        if config["network"].get(name) == 0:
            del config["network"][name]
    if denoiser.masked_lm is not None:
        config["network"][MASKED_LM] = denoiser.masked_lm
    if denoiser.process is not None:
        noise = denoiser.process.noise
        schedule = next(name for name, kind in SCHEDULES.items() if type(noise) is kind)
        config["process"] = {"name": denoiser.process.name, "noise_schedule": schedule, **vars(noise)}
    return config


def write_model(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], part: int | None = None
) -> None:
    if part is None:
        write_tensors(tensors, folder / "model.safetensors")
    else:
        _write_parts(tensors, folder, part)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_denoiser(
    folder: str | Path,
    device: torch.device | str = "cpu",
    config: dict[str, Any] | None = None,
    network: nn.Module | None = None,
    trust_remote_code: bool = False,
) -> Denoiser:
    """Open a model directory: one written by `save_denoiser`, a run (its newest checkpoint), a public checkpoint, or a
    masked language model of transformers, which may be one with code of its own if `trust_remote_code` is set.

    Nothing is unpickled. A `config` that `read_model_config` has already read is not read again. Weights of a network
    of your own need that `network`, and are copied into it.
    """
    folder = resolve_checkpoint(Path(folder))
    config = read_model_config(folder) if config is None else config
    _check_custom(folder, config, network)
    _check_digests(folder)
    if is_masked_lm(config) and config.get("format") != "cdlm":
        from cdlm.interop.masked_lm import open_masked_lm

        return open_masked_lm(folder, config, trust_remote_code).to(device).eval()
    if network is None and is_masked_lm(config):
        network = masked_lm_network(config, trust_remote_code)
    tensors = _read_tensors(folder)
    try:
        if config.get("format") == "cdlm":
            denoiser = _ours(config, tensors, network)
        elif str(config.get("model_type")).lower() in PEERS:
            denoiser, tensors = _peer(config, tensors)
        elif "parameterization" in config and isinstance(config.get("model"), dict):
            denoiser, tensors = _sdtt(config, tensors)
        else:
            raise LayoutError(
                f"its config.json describes {config.get('format')!r}; readable are model directories of cdlm, of sdtt, "
                "of mdlm, udlm or duo (by model_type), and masked language models of transformers"
            )
        _copy(tensors, denoiser)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"config.json lacks {error}" if isinstance(error, KeyError) else error
        raise LayoutError(f"cannot load {folder}: {reason}") from None
    return denoiser.to(device).eval()


def custom_network(config: dict[str, Any]) -> str | None:
    """The class of the user's own network that a config.json describes; None if it is a network of this package."""
    network = config.get("network")
    return network.get(CUSTOM) if config.get("format") == "cdlm" and isinstance(network, dict) else None


def is_masked_lm(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a model of transformers, or a run that started from one."""
    network = config.get("network")
    if config.get("format") == "cdlm":
        return isinstance(network, dict) and MASKED_LM in network
    return "model_type" in config and not config.get("format") and str(config["model_type"]).lower() not in PEERS


def masked_lm_network(config: dict[str, Any], trust_remote_code: bool = False) -> nn.Module:
    """The network of a run that started from a masked language model, with random weights."""
    from cdlm.interop.masked_lm import rebuild

    return rebuild(config["network"][MASKED_LM], trust_remote_code)


def _check_custom(folder: Path, config: dict[str, Any], network: nn.Module | None) -> None:
    """The weights of another network are never opened as a `DiT`, or the other way round."""
    name = custom_network(config)
    if name and network is None and not is_masked_lm(config):
        raise LayoutError(
            f"{folder} holds the weights of a custom network, {name}; open it in Python with the same network: "
            f"cdlm.load({str(folder)!r}, network={name}(...))"
        )
    if network is not None and not name:
        raise LayoutError(f"{folder} holds the weights of a network of cdlm, not of a custom one; leave out `network`")


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


def resolve_checkpoint(folder: Path) -> Path:
    """The directory itself if it holds a model, else the newest checkpoint of a run, by its number and not its date."""
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


def read_model_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of a model directory; ours under the present names, whichever version wrote it."""
    folder = resolve_checkpoint(Path(folder))
    path = folder / "config.json"
    if not path.is_file():
        if folder.suffix in _PICKLES:
            raise LayoutError(f"{folder} is a pickle, which can run any code and is never opened; {_CONVERT}")
        why = "does not exist" if not folder.exists() else "is not a model directory: it has no config.json"
        if (folder / "run.json").is_file():
            why = "is a run without a checkpoint yet: wait for its first --save-every steps"
        raise LayoutError(f"{folder} {why}; give a directory with config.json and model.safetensors, or a run")
    try:
        config = read_object(path)
    except ValueError as error:
        raise LayoutError(str(error)) from None
    try:
        return migrate_model_config(config) if config.get("format") == "cdlm" else config
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"config.json lacks {error}" if isinstance(error, KeyError) else error
        raise LayoutError(f"cannot load {folder}: {reason}") from None


def migrate_model_config(config: dict[str, Any]) -> dict[str, Any]:
    """Our config.json as version 2 writes it. Version 1 had other names; keys that neither defines stay as they are."""
    if type(config["version"]) is not int:
        raise LayoutError(f"config.json says that version is {config['version']!r}, which is not an integer")
    if config["version"] > FORMAT:
        raise LayoutError(
            f"written by a newer version (format {config['version']}, this one reads {FORMAT}); upgrade cdlm"
        )
    if config["version"] == FORMAT:
        return config
    config = rename_keys(config, {"vocab": "vocab_size", "architecture": "network", "trained": "training"})
    config["version"] = FORMAT
    config["network"] = rename_keys(config["network"], RENAMED_NETWORK)
    if config["process"] is not None:
        config["process"] = rename_keys(config["process"], {"noise": "noise_schedule", "states": "num_states"})
    if isinstance(config.get("text"), dict):
        renamed = {"length": "max_length", "framed": "bos_framed", "padded": "eos_padded"}
        config["text"] = rename_keys(config["text"], renamed)
    if config.get("training"):
        config["training"] = _migrate_training(config["training"])
    return config


def _migrate_training(training: dict[str, Any]) -> dict[str, Any]:
    """How a model was trained, and the model that it started from, and so on."""
    training = rename_keys(training, {"batch": "batch_size", "length": "seq_length"})
    return {**training, "from": _migrate_training(training["from"])} if training.get("from") else training


def _ours(config: dict[str, Any], tensors: dict[str, torch.Tensor], custom: nn.Module | None = None) -> Denoiser:
    network = NetworkConfig(**config["network"]) if custom is None else custom
    vocab = config["vocab_size"]
    if isinstance(network, NetworkConfig):
        _check_size(network, vocab, tensors)
    if config["process"] is None:
        return Denoiser(network, vocab=vocab)
    if "prior" not in tensors:
        raise LayoutError("tensor 'prior' is missing from model.safetensors")
    name = config["process"]["noise_schedule"]
    if name not in SCHEDULES:
        raise LayoutError(f"unknown noise schedule {name!r}; choose from {', '.join(SCHEDULES)}")
    noise = SCHEDULES[name](eps=config["process"]["eps"])
    special = tuple(config["network"][MASKED_LM]["special"]) if is_masked_lm(config) else ()
    return Denoiser(network, Process(vocab, tensors.pop("prior"), noise, special))


def _peer(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[Denoiser, dict[str, torch.Tensor]]:
    """The layouts of kuleshov-group/mdlm-owt, kuleshov-group/udlm-lm1b, s-sahoo/duo and s-sahoo/duo-distilled.

    In MDLM's the last id is the mask; its row of the head is not in our law. The others' are uniform over all ids, and
    told the time: DUO's does not say so.
    """
    masks = config["model_type"].lower() == "mdlm"
    if config.get("cfg"):
        raise LayoutError("it is guided by classes (cfg), which is not supported here")
    network = NetworkConfig(
        hidden_size=config["hidden_dim"],
        num_layers=config["n_blocks"],
        num_heads=config["n_heads"],
        cond_dim=config["cond_dim"],
        dropout=config["dropout"],
        time_conditioning=config["time_conditioning"] if masks else config.get("time_conditioning", True),
    )
    return _stripped(network, config["vocab_size"] - masks, masks, tensors)


def _sdtt(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[Denoiser, dict[str, torch.Tensor]]:
    """The layout of jdeschena/sdtt: the configuration of its run, and MDLM's network, once or twice wrapped."""
    model = config["model"]
    network = NetworkConfig(
        hidden_size=model["hidden_size"],
        num_layers=model["n_blocks"],
        num_heads=model["n_heads"],
        cond_dim=model["cond_dim"],
        dropout=model.get("dropout", 0.0),
        time_conditioning=bool(config.get("time_conditioning", False)),
    )
    inner = {f"{PREFIX}{name.split(PREFIX)[-1]}": tensor for name, tensor in tensors.items() if PREFIX in name}
    name = f"{PREFIX}vocab_embed.embedding"
    if name not in inner:
        raise LayoutError(f"tensor {name!r} is missing from model.safetensors")
    return _stripped(network, len(inner[name]) - 1, True, inner)


def peer_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """How the sequences were made that a public checkpoint was trained on: their length, and whether they are framed.

    MDLM, DUO and SDTT train and evaluate on blocks of 1024 tokens that begin with BOS and end with EOS.
    """
    model = config.get("model")
    length = config.get("model_length") or (model.get("length") if isinstance(model, dict) else None)
    bos_framed = PEERS.get(str(config.get("model_type")).lower(), "parameterization" in config)
    return {"max_length": int(length or 0), "bos_framed": bos_framed}


def _stripped(
    network: NetworkConfig, vocab: int, masks: bool, tensors: dict[str, torch.Tensor]
) -> tuple[Denoiser, dict[str, torch.Tensor]]:
    """The network, and its tensors without what we do not keep."""
    _check_size(network, vocab, tensors)
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    return Denoiser(network, masked(vocab) if masks else uniform(vocab)), _cut(kept, vocab)


def _cut(tensors: dict[str, torch.Tensor], vocab: int) -> dict[str, torch.Tensor]:
    """The head without rows that stand for no token: that of the mask, or those that `accelerate` pads it with."""
    head = f"{PREFIX}output_layer.linear."
    return {name: tensor[:vocab] if name.startswith(head) else tensor for name, tensor in tensors.items()}


def _check_size(network: NetworkConfig, vocab: int, tensors: dict[str, torch.Tensor]) -> None:
    """A damaged config.json may describe a network far beyond its weights, and beyond memory: it is not even built."""
    for name, value in {**vars(network), "vocab_size": vocab}.items():
        if name != "dropout" and type(value) not in (int, bool):
            raise LayoutError(f"config.json says that {name} is {value!r}, which is not an integer")
    width, layers, tables = network.hidden_size, network.num_layers, 1 if network.tie_embeddings else 2
    places = network.position_embeddings + 3 * network.grid_embeddings
    least = width * (12 * width * layers + tables * vocab + places)
    least += 0 if network.causal else network.cond_dim * (network.cond_dim + 6 * width * layers)
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
            custom = denoiser.custom_network
            source = "config.json implies" if custom is None else f"the {custom} that was given has"
            raise LayoutError(f"tensor {name!r} has the shape {have}, but {source} {want}")
        same_kind = tensors[name].is_floating_point() == wanted[name].is_floating_point()
        if not same_kind or not bool(torch.isfinite(tensors[name]).all()):
            raise LayoutError(f"tensor {name!r} holds numbers that are not finite weights; take an earlier checkpoint")
    for name in tensors:
        if name not in wanted:
            raise LayoutError(f"unknown tensor {name!r} in model.safetensors")
    denoiser.load_state_dict(tensors)
