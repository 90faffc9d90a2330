"""Files that must not be lost: flushed to the disk, written by one run at a time, and read with care."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds; anything else in it is a ValueError that names the file."""
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return values


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk, so that no rename can overtake it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def take(handle: int, message: str) -> None:
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
        take(handle, f"another run is writing to {folder}; wait for it, or choose another --out")
        yield
    finally:
        os.close(handle)
