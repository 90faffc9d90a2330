"""Files that must not be lost: flushed to the disk, written by one run at a time, and read with care."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

VERSION = "0.1.0"
"""Of the package; files that others read say which version wrote them."""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds; anything else in it is a ValueError that names the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return values


def rename_keys(values: dict[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """JSON values of an earlier version under the present names; a value given under both names is an error."""
    twice = [old for old, new in renamed.items() if old in values and new in values]
    if twice:
        raise ValueError(f"{twice[0]!r} is the former name of {renamed[twice[0]]!r}; give only the latter")
    return {renamed.get(name, name): value for name, value in values.items()}


def write_whole(path: Path, text: str) -> None:
    """Write a text aside, flush it and give it its name: whatever happens, there is the old file or the new one."""
    aside = path.with_suffix(".tmp")
    with naming(path):
        aside.write_text(text, encoding="utf-8")
        flush(aside)
        aside.replace(path)


@contextlib.contextmanager
def naming(path: Path, advice: str = "make room, then go on") -> Iterator[None]:
    """Name the file that could not be written; of a full disk the system says only that it is full."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:  # another file, which could not be read or opened
            raise
        raise OSError(error.errno, f"{error.strerror}; {advice}", str(path)) from None


def digest(path: Path) -> str:
    """The sha256 of a file, read piece by piece."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """JSON values with a digest of themselves, so that a single changed bit shows."""
    return {**values, "seal": _seal(values)}


def seal_holds(values: dict[str, Any]) -> bool:
    return values.get("seal") == _seal({key: value for key, value in values.items() if key != "seal"})


def _seal(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk, so that no rename can overtake it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(handle: int, message: str) -> None:
    """Lock an open file or folder until it is closed, or say who is in the way."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(message) from None
    except (ImportError, OSError):  # a system or a file system without locks
        pass


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder for this run: a second run there is refused."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock(handle, f"another run is writing to {folder}; wait for it, or choose another --out")
        yield
    finally:
        os.close(handle)
