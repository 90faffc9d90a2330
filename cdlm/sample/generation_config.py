"""generation_config.json: the sampler settings that a model is best used with.

    {"max_denoising_steps": 8, "order": "dilated", "guidance": 0.5, "temperature": 0.8,
     "step_presets": [{"max_denoising_steps": 8, ...}, {"max_denoising_steps": 32, ...}]}

The top level holds where a call gives no number of steps; with a number of steps, the preset for the closest one.

The file is shared with transformers: a field that its `GenerationConfig` or one of its diffusion models defines has the
meaning it has there (`temperature`, `top_k` and `top_p` are the same; our `steps` are its `max_denoising_steps`), and
settings that it does not know have names that it does not use. Fields that are no settings of ours are kept, but not
used.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdlm.files import read_object, rename_keys
from cdlm.model.pretrained import LayoutError, is_masked_lm, peer_text_config
from cdlm.sample.settings import SPECS, check_value

FILE = "generation_config.json"
_NAMES = {"max_denoising_steps": "steps"}
"""Settings that have another name in the file. Earlier versions wrote our own."""


def read_generation_config(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The generation config of a model directory, checked; empty if it has none.

    Version 0.1 had it in config.json, as a list of settings under "sampling".
    """
    path = directory / FILE
    if is_masked_lm(config) and config.get("format") != "cdlm":
        return {}  # its fields are those of transformers
    if not path.is_file():
        old = config.get("sampling") or [] if config.get("format") == "cdlm" else []
        try:
            return check_generation_config(from_version_1(old))
        except (TypeError, ValueError, KeyError) as error:
            raise LayoutError(f'{directory / "config.json"} has a damaged "sampling" ({error}).') from None
    try:
        found = _renamed(read_object(path), _NAMES)
        kept = {name: found[name] for name in (*SPECS, "step_presets") if found.get(name) is not None}
        return check_generation_config(kept)
    except (TypeError, ValueError, KeyError) as error:
        raise LayoutError(f"{path} is damaged ({error}).") from None


def text_config(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """How the sequences were made that a model was trained on, checked; a public checkpoint implies it."""
    if "text" not in config:
        return peer_text_config(config)
    text = config["text"]
    kinds: dict[str, type] = {"max_length": int, "posterior": str, "bos_framed": bool, "eos_padded": bool}
    if not isinstance(text, dict) or "max_length" not in text:
        raise LayoutError(f'{directory / "config.json"} is damaged: its "text" has no "max_length".')
    for name, value in text.items():
        if type(value) is not kinds.get(name) or (name == "max_length" and text["max_length"] < 0):
            raise LayoutError(f'{directory / "config.json"} is damaged: {name} is {value!r} in its "text".')
    return text


def check_generation_config(config: dict[str, Any]) -> dict[str, Any]:
    """Refuse unknown settings and values out of range; `resolve` checks what goes with what, when they are used."""
    presets = config.get("step_presets", [])
    if not isinstance(presets, list) or not all(isinstance(preset, dict) for preset in presets):
        raise ValueError(f"step_presets must be a list of settings (got {presets!r})")
    for preset in (config, *presets):
        for name, value in preset.items():
            if name != "step_presets":
                check_value(name, value)
    if any("steps" not in preset for preset in presets):
        raise ValueError("a preset does not say for how many steps")
    return config


def from_version_1(sampling: list[dict[str, Any]]) -> dict[str, Any]:
    """The "sampling" of config.json in version 0.1: settings for several numbers of steps, the usual ones first."""
    renamed = {"grid": "timesteps", "tail": "final_step", "cool": "temperature_end", "bound": "entropy_bound"}
    renamed |= {"block": "block_length"}
    presets: list[dict[str, Any]] = [
        {renamed.get(name, name): value for name, value in preset.items() if value is not None}
        for preset in map(dict, sampling)
    ]
    if not presets:
        return {}
    return {**presets[0]} | ({"step_presets": presets} if len(presets) > 1 else {})


def write_generation_config(
    directory: Path, config: Mapping[str, Any], others: Mapping[str, Any] | None = None
) -> None:
    """Write generation_config.json, with `others` of its fields, unless there is nothing to say."""
    written = _renamed(config, {ours: theirs for theirs, ours in _NAMES.items()}) | dict(others or {})
    if written:
        (directory / FILE).write_text(json.dumps(written, indent=2) + "\n")


def transformers_fields(directory: Path | None, eos: int, bos: int, unused: Sequence[int]) -> dict[str, Any]:
    """The fields of a generation_config.json that are no settings of ours: those of the file in `directory`, and those
    without which `generate` of transformers does not know the special tokens. It draws no token in `unused`."""
    path = directory / FILE if directory is not None else None
    kept = read_object(path) if path is not None and path.is_file() else {}
    kept = {name: value for name, value in kept.items() if name not in (*SPECS, *_NAMES, "step_presets")}
    found: dict[str, Any] = {"do_sample": True, "eos_token_id": eos, "bos_token_id": bos, "pad_token_id": eos}
    return found | ({"suppress_tokens": list(unused)} if unused else {}) | kept


def _renamed(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A generation config and its presets under other names."""
    found = rename_keys(dict(config), names)
    presets = found.get("step_presets")
    if isinstance(presets, list) and all(isinstance(preset, dict) for preset in presets):
        found["step_presets"] = [rename_keys(preset, names) for preset in presets]
    return found
