"""From the model hub to a folder here; and whether the hub answers, which its own client tries for a minute."""

import re
from pathlib import Path

WAIT = 5.0
"""Seconds for the hub to answer at all."""


def folder_of(source: str | Path) -> Path:
    """A folder here, or a copy of a repository of the model hub."""
    path = Path(source)
    if path.exists() or path.parent.is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
        return path
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        raise ValueError(
            f"there is no folder {source}; to fetch it from the model hub: pip install huggingface-hub"
        ) from None
    try:
        return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors", "merges.txt"]))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"there is no folder {source}, and the model hub did not give it either: {reason}") from None


def hub_silence() -> str | None:
    """Why the model hub does not answer, in a few words; None if it does. One question, where its client asks again
    and again. What is in its cache can be had without it."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=WAIT)
    except Exception as error:  # of whatever its network is built on, which changes with its version
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return None
