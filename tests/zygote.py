"""A process that has imported everything once and forks for each command, so that a command costs what it computes.

`python zygote.py SOCKET` serves; `home` starts one for a process of tests. Scripts called `cdlm` and `python` (see
`shims`) stand first in the PATH of a shell; each hands its arguments, folder, environment and standard streams over,
and ends as the command ends. So documents run in a real shell, with pipes, variables and background jobs; and `run`
does the same for a single command.
"""

import atexit
import contextlib
import fnmatch
import functools
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NoReturn

import torch

DERIVED = ("cdlm.text.options", "cdlm.cli.sample", "cdlm.eval.", "cdlm.studio.")
"""Modules that derive types from the tables of samplers and orders when they are imported."""

CLIENT = """\
import json, os, signal, socket, sys

link = socket.socket(socket.AF_UNIX)
link.connect(os.environ["ZYGOTE"])
socket.send_fds(link, [json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
link.shutdown(socket.SHUT_WR)
child = int(link.recv(32, socket.MSG_WAITALL))
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(child, number))
sys.exit(int(link.recv(32) or b"1"))
"""


@functools.cache
def home() -> Path:
    """A folder with bin/, the scripts, and door, the socket of a process that serves them until the tests end."""
    folder = Path(tempfile.mkdtemp(prefix="zygote-"))
    shims(folder / "bin")
    root = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, __file__, str(folder / "door")], env=env, start_new_session=True)

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder)

    atexit.register(end)
    until = time.monotonic() + 60
    while not (folder / "door").exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    return folder


def run(*words: str, cwd: Path, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """`cdlm ...` or `python ...`, by a fork."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ZYGOTE": str(home() / "door"), **environment}
    script = str(home() / "bin" / words[0])
    return subprocess.run([script, *words[1:]], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


def shims(folder: Path) -> None:
    """Scripts that send commands to the process; `make` and `pip` do nothing, since what they name is checked apart."""
    folder.mkdir()
    (folder / "client.py").write_text(CLIENT)
    for name in ("cdlm", "python"):
        line = f'exec "{sys.executable}" -S -E "{folder}/client.py" {name} "$@"'
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
    for name in ("make", "pip"):
        (folder / name).write_text("#!/bin/sh\n")
    for script in folder.iterdir():
        script.chmod(0o755)


def shortened(words: list[str]) -> list[str]:
    """The command, with the flags that the tests add to it so that it ends soon: patterns and flags in $SHORTER."""
    given = " ".join(words[1:] if words[0] == "cdlm" else words[2:])
    for pattern, flags in json.loads(os.environ.get("SHORTER", "[]")):
        if fnmatch.fnmatch(given, pattern):
            words = [*words, *flags.split()]
    return words


def execute(words: list[str]) -> None:
    """`cdlm ...`, `python file.py ...`, `python -m module ...` or `python -c code`, in this process."""
    words = shortened(words)
    kind, rest = words[0], words[1:]
    if kind == "cdlm":
        from cdlm.__main__ import main

        sys.argv = [*words]
        main()
    elif rest[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    elif rest[0] == "-c":
        sys.path.insert(0, os.getcwd())
        exec(compile(rest[1], "<command>", "exec"), {"__name__": "__main__"})
    else:
        for name in [name for name in sys.modules if name.startswith(DERIVED)]:
            del sys.modules[name]  # the file may add rows to the tables first
        sys.path.insert(0, str(Path(rest[0]).resolve().parent))
        sys.argv = rest
        runpy.run_path(rest[0], run_name="__main__")


def child(request: list, streams: list[int]) -> NoReturn:
    """One command: its streams, its folder, its environment, its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    words, folder, environment = request
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)  # the pool of threads did not survive the fork: make it anew before two threads ask for it
    status = 0
    try:
        execute(words)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def serve(path: str) -> None:
    """Fork for each request, until killed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot
    import tokenizers
    import tyro

    import cdlm.cli.demo
    import cdlm.cli.methods
    import cdlm.cli.sample
    import cdlm.cli.train
    import cdlm.eval.moons
    import cdlm.eval.report.write
    import cdlm.eval.sweep
    import cdlm.text.pipeline
    import cdlm.train.loop

    del matplotlib, tokenizers, tyro, cdlm  # they are there for the children
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    door = socket.socket(socket.AF_UNIX)
    door.bind(path)
    door.listen(16)
    while True:
        link, _ = door.accept()
        if os.fork():
            link.close()
            continue
        door.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        body, streams, *_ = socket.recv_fds(link, 1 << 20, 3)
        while more := link.recv(1 << 20):
            body += more
        worker = os.fork()
        if not worker:
            link.close()
            child(json.loads(body), streams)
        for stream in streams:
            os.close(stream)
        link.sendall(f"{worker:<32}".encode())
        _, status = os.waitpid(worker, 0)
        link.sendall(str(os.waitstatus_to_exitcode(status) % 256).encode())
        os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
