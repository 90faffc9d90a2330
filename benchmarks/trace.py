"""Which functions and files of the package lie on two paths: a training step, and `cdlm sample`.

    python -m benchmarks.trace

Two counts are printed. *Interface* functions are those that a reader has to know to follow the path from file to file:
public functions and methods (a leading underscore marks a detail of a file), without properties, constructors and
functions within functions; the network counts once, as its forward pass. *All* are the named functions of the package
that are called, those details included (no comprehensions, lambdas or class bodies). What modules call while they are
imported is left out. The first count is also given for each package. Files are listed in the order in which the path
enters them, interface functions first, details in brackets. The last line says how often the settings are resolved and
each JSON file of the model is read. PYTHONPATH selects the tree that is traced.
"""

import argparse
import collections
import functools
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
OPTIMIZED = 1  # of a function's code, and not of a class body or a module


class Trace:
    """Calls into the package while it is switched on."""

    def __init__(self, package: Path, inside: str | None = None) -> None:
        self.package, self.inside = str(package) + os.sep, inside
        self.calls: dict[tuple[str, str], int] = {}
        self.interface: set[tuple[str, str]] = set()
        self.opened: dict[str, int] = {}
        self.importing = self.depth = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return"):
            return
        if code.co_filename.startswith("<frozen importlib") and code.co_name == "_find_and_load":
            self.importing += 1 if event == "call" else -1
        if not code.co_filename.startswith(self.package):
            return
        if code.co_name == self.inside:
            self.depth += 1 if event == "call" else -1
        counted = code.co_flags & OPTIMIZED and not code.co_name.startswith("<") and not self.importing
        if event == "call" and counted and (self.inside is None or self.depth):
            key = code.co_filename.removeprefix(self.package), code.co_qualname
            self.calls[key] = self.calls.get(key, 0) + 1
            if is_interface(frame):
                self.interface.add(key)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count the JSON files that are opened."""
        if event == "open" and isinstance(arguments[0], str) and arguments[0].endswith(".json"):
            name = os.path.basename(arguments[0])
            self.opened[name] = self.opened.get(name, 0) + 1

    def show(self, title: str, details: bool) -> None:
        files = dict.fromkeys(file for file, _ in self.calls)
        entered = {file for file, _ in self.interface}
        print(
            f"{title}: {len(self.interface)} interface functions in {len(entered)} files "
            f"(all: {len(self.calls)} functions in {len(files)} files)"
        )
        packages = collections.Counter(package_of(file) for file, _ in self.interface)
        print("  by package:", ", ".join(f"{name} {count}" for name, count in packages.most_common()))
        for file in files if details else ():
            own = {
                key: f"{key[1]} x{count}" if count > 1 else key[1]
                for key, count in self.calls.items()
                if key[0] == file
            }
            public = ", ".join(text for key, text in own.items() if key in self.interface)
            private = ", ".join(text for key, text in own.items() if key not in self.interface)
            print(f"  {file:<32} {public}{f' ({private})' if private else ''}")
        resolved = self.calls.get(("sample/settings.py", "resolve"), 0)
        if resolved:
            opened = ", ".join(f"{name} x{count}" for name, count in sorted(self.opened.items()))
            print(f"  settings resolved x{resolved}; read: {opened}")


def package_of(file: str) -> str:
    """The package that a file belongs to; modules at the top level are one."""
    package, slash, _ = file.partition("/")
    return package if slash else "top level"


def is_interface(frame: FrameType) -> bool:
    """Whether a reader has to know a function to follow the path."""
    code = frame.f_code
    if "<locals>" in code.co_qualname or (code.co_name.startswith("_") and code.co_name != "__call__"):
        return False
    if os.path.basename(code.co_filename) == "dit.py":
        return code.co_qualname == "DiT.forward"
    owner = frame.f_locals.get("self")
    return not isinstance(getattr(type(owner), code.co_name, None), property | functools.cached_property)


def traced(work: Callable[[], object], inside: str | None = None) -> Trace:
    import cdlm

    trace = Trace(Path(cdlm.__file__).parent, inside)
    sys.addaudithook(lambda event, arguments: trace.audit(event, arguments) if sys.getprofile() is trace else None)
    sys.setprofile(trace)
    try:
        work()
    except SystemExit:
        pass
    finally:
        sys.setprofile(None)
    return trace


def command(words: str) -> Callable[[], None]:
    def work() -> None:
        from cdlm.__main__ import main

        sys.argv = ["cdlm", *words.split()]
        main()

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--brief", action="store_true", help="only the two counts")
    details = not parser.parse_args().brief
    with tempfile.TemporaryDirectory() as folder:
        here, quiet = os.getcwd(), os.open(os.devnull, os.O_WRONLY)
        os.chdir(folder)
        draw = random.Random(0)
        Path("text.txt").write_text(" ".join(draw.choice(["sea", "old", "house", "rain"]) for _ in range(3000)))
        out = os.dup(1)
        os.dup2(quiet, 1)
        try:
            command("prepare text.txt --seq-length 32 --out data")()
            quick = "--steps 1 --batch-size 8 --seq-length 32 --device cpu"
            quick += " --valid-samples 0 --valid-every 0 --valid-batches 1"
            step = traced(command(f"train tiny-mcdlm --data data --out run {quick}"), inside="train_step")
            sampled = traced(command("sample --steps 8 --order dilated --guidance 1 --num-samples 1 --device cpu"))
        finally:
            sys.stdout.flush()
            os.dup2(out, 1)
            os.chdir(here)
    step.show("one MCDLM training step", details)
    sampled.show("cdlm sample --steps 8 --order dilated --guidance 1", details)


if __name__ == "__main__":
    main()
