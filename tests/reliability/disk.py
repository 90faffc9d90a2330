"""A disk that fails on purpose: count every touch of it, and end the process at a chosen one."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from cdlm.model import pretrained

EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "shutil.copyfile")


def watch(touch: Callable[[str], None], synced: list[int] | None = None) -> None:
    """Call `touch` at every write, rename, removal and flush of this process; note the files that were flushed.

    There is no way back, so this is for a child. Tensors are written in two halves with a touch between them.
    """
    real_sync, real_save = os.fsync, pretrained.save_file

    def hook(event: str, arguments: tuple) -> None:
        writing = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in EVENTS or (writing and "/dev/" not in str(arguments[0])):
            touch(event)

    def sync(handle: int) -> None:
        touch("before fsync")
        real_sync(handle)
        if synced is not None:
            synced.append(os.fstat(handle).st_ino)
        touch("after fsync")

    def save(tensors: dict, path: Path) -> None:
        real_save(tensors, path)
        data = Path(path).read_bytes()
        Path(path).write_bytes(data[: len(data) // 2])
        touch("half of a file")
        Path(path).write_bytes(data)

    os.fsync, pretrained.save_file = sync, save
    sys.addaudithook(hook)


def die_at(number: int, how: int = signal.SIGKILL, synced: list[int] | None = None) -> None:
    """End this process at its touch of that number; `synced` is printed first, for a disk that forgets the rest."""
    count = 0

    def touch(_: str) -> None:
        nonlocal count
        count += 1
        if count == number:
            if synced is not None:
                os.write(1, f"synced {synced}\n".encode())
            os.kill(os.getpid(), how)

    watch(touch, synced)


def forget(folder: Path, kept: set[int]) -> int:
    """A power cut: of every file that was not flushed, only half has reached the disk."""
    lost = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_ino not in kept]
    for path in lost:
        os.truncate(path, path.stat().st_size // 2)
    return len(lost)
