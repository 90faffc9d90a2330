"""What the config.json of a model folder says of its texts, and of how the model writes them best."""

from pathlib import Path
from typing import Any

from cdlm.files import rename_keys
from cdlm.model.pretrained import LayoutError
from cdlm.sample.settings import sampling_of


def about_text(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """How its texts were made, checked; of a peer's, how long they are."""
    if "text" not in config:
        return {"length": _peers_length(config)}
    text = config["text"]
    kinds: dict[str, type] = {"max_length": int, "posterior": str, "bos_framed": bool, "eos_padded": bool}
    if not isinstance(text, dict) or "max_length" not in text:
        raise LayoutError(f'{folder / "config.json"} has no "max_length" in its "text": it is damaged')
    for name, value in text.items():
        if type(value) is not kinds.get(name) or (name == "max_length" and text["max_length"] < 0):
            raise LayoutError(f'{folder / "config.json"} says that {name} is {value!r} in its "text"')
    return rename_keys(text, {"max_length": "length", "bos_framed": "framed", "eos_padded": "padded"})


def own_settings(config: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """How the model writes best, checked; in a peer's config.json the word may mean something else."""
    own = config.get("sampling", []) if config.get("format") == "cdlm" else []
    try:
        own = [{name: value for name, value in dict(one).items() if value is not None} for one in own]
        if any(sampling_of(one).steps is None for one in own):
            raise ValueError("it does not say for how many steps")
    except (TypeError, ValueError) as error:
        raise LayoutError(f'{folder / "config.json"} has a damaged "sampling": {error}') from None
    return own


def _peers_length(config: dict[str, Any]) -> int:
    """Tokens in a text, by the names that MDLM, UDLM and DUO (model_length) or SDTT (model.length) give it."""
    model = config.get("model")
    return int(config.get("model_length") or (model.get("length", 0) if isinstance(model, dict) else 0))
