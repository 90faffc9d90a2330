"""What is not here yet: models of the model hub, whether it answers (its own client tries for a minute), libraries."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from cdlm import zoo

WAIT = 5.0
"""Seconds for the hub to answer at all."""
NEEDED = ["*.json", "*.safetensors", "merges.txt"]
"""All that `cdlm.load` fetches."""


def folder_of(source: str | Path) -> Path:
    """A folder here, a model that comes with the package, or a copy of a repository of the model hub; the hub is not
    asked for what is meant as a path."""
    path = zoo.found(Path(source).expanduser())
    if path.exists():
        return path
    if path.parent.is_dir() or path.parts[:1] == ("runs",) or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
        raise ValueError(f"{source} does not exist; {_instead(path)}")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        raise ValueError(
            f"there is no folder {source}; to fetch it from the model hub: pip install huggingface-hub"
        ) from None
    try:
        return Path(snapshot_download(str(source), allow_patterns=NEEDED))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(
            f"there is no folder {source}, and the model hub did not give it either: {reason(error)}"
        ) from None


def hub_silence() -> str | None:
    """Why the model hub does not answer, in a few words; None if it does. One question, where its client asks again
    and again. What is in its cache can be had without it."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=WAIT)
    except Exception as error:  # of whatever its network is built on, which changes with its version
        return reason(error)
    return None


def install(extra: str) -> str:
    """What to type in the checkout for a group of libraries that not everybody needs."""
    return f'pip install -c constraints.txt -e ".[{extra}]"'


def reason(error: Exception) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def labelled(models: Iterable[str]) -> list[tuple[str, str]]:
    """Labels and models of a command: LABEL=MODEL, or a model that is called by the name of its folder."""
    words = (word.partition("=") for word in models)
    found = [(first, source) if equals else (Path(first).name, first) for first, equals, source in words]
    labels = [label for label, _ in found]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice:
        raise ValueError(f"two models are called {twice}; give each a name: NAME=MODEL")
    return found


def _instead(missing: Path) -> str:
    """What may have been meant by a folder that is not there: a run to train first, or one of a similar name."""
    from cdlm.recipes import RECIPES

    folders = [folder for place in {missing.parent, Path("runs")} for folder in sorted(place.glob("*/"))]
    known = {
        str(one): one.name for one in folders if any((one / file).is_file() for file in ("run.json", "config.json"))
    }
    there = known | {name: name for name in zoo.names() if missing.parent == Path()}
    near = [missing.name] * (missing.name in there.values())
    near = near or [name for name in there.values() if name.startswith(missing.name.lower())]
    near = near or difflib.get_close_matches(missing.name.lower(), there.values(), n=3)
    meant = ", ".join(sorted(path for path, name in there.items() if name in near))
    if missing.name in RECIPES and missing.name not in near and str(missing.parent) in (".", "runs"):
        train = f"train it first: cdlm train {missing.name} --data data"
        return f"{train}; or did you mean {meant}?" if meant else train
    if meant:
        return f"did you mean {meant}?"
    runs = f" (there are: {', '.join(sorted(known))})" if 0 < len(known) <= 10 else ""
    models = f"a model of cdlm zoo ({', '.join(zoo.names())})"
    return f"give a folder with config.json and model.safetensors, a run{runs}, {models}, or a hub id, owner/name"
