"""Faults on purpose: forks that may be killed, a folder to train on, and a count of what was tried."""

import dataclasses
import faulthandler
import json
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from rich.console import Console

from cdlm.data.config import PrepareConfig
from cdlm.data.prepare import prepare
from cdlm.train.config import TrainConfig
from cdlm.train.recipes import RECIPES

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """How a child ended: its status (negative: the signal that killed it), and what it printed."""

    status: int
    text: str


class Child:
    """A fork of this process that does some work: as good as a process of its own, without its start."""

    def __init__(self, work: Callable[[], object], limit: int = 60) -> None:
        self.stream, inside = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forks beside threads; nothing here needs them
            self.pid = os.fork()
        if self.pid:
            os.close(inside)
            return
        code = 1
        try:
            os.dup2(inside, 1)
            os.dup2(inside, 2)
            sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
            torch.set_num_threads(1)  # the threads that share its work did not come along
            faulthandler.dump_traceback_later(limit - 5, file=sys.stderr)
            signal.alarm(limit)  # a child that hangs is a failure, not a wait
            work()
            code = 0
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code)
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def end(self) -> Ended:
        with os.fdopen(self.stream, "rb") as stream:
            text = stream.read().decode(errors="replace")
        return Ended(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), text)


def in_child(work: Callable[[], object], limit: int = 60) -> Ended:
    return Child(work, limit).end()


def command(*arguments: object) -> Callable[[], None]:
    """`cdlm ...` as the installed program runs it, ready for a child."""

    def work() -> None:
        from cdlm.__main__ import main

        sys.argv = ["cdlm", *map(str, arguments)]
        main()

    return work


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> Callable[[str, int, str], None]:
    """Count trials of a fault: printed, and added to the file that $CDLM_TRIALS names, from which the table is made."""

    def note(fault: str, trials: int, outcome: str) -> None:
        line = {"fault": fault, "trials": trials, "outcome": outcome, "test": request.node.nodeid}
        print(json.dumps(line))
        if os.environ.get("CDLM_TRIALS"):
            with open(os.environ["CDLM_TRIALS"], "a") as file:
                file.write(json.dumps(line) + "\n")

    return note


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few sentences as bytes, prepared."""
    draw = random.Random(0)
    words = ("the", "cat", "dog", "sees", "likes", "rain", "us", "sea")
    texts = [" ".join(draw.choice(words) for _ in range(100)) for _ in range(20)]
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text("\n".join(texts))
    files = (str(folder / "text.txt"),)
    config = PrepareConfig(files, folder / "tokens", source="lines", packing="plain", seq_length=16, valid_documents=2)
    prepare(config, Console(quiet=True))
    return folder / "tokens"


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """The tiniest run: two layers of 16, four rows of 16 tokens."""

    def make(name: str = "mcdlm", **changes: object) -> TrainConfig:
        config = RECIPES[f"tiny-{name}"].config
        network = dataclasses.replace(config.network, hidden_size=16, num_layers=2, num_heads=2, cond_dim=8)
        quick = {
            "steps": 6,
            "batch_size": 4,
            "seq_length": 16,
            "log_every": 2,
            "valid_every": 0,
            "save_every": 2,
            "valid_samples": 0,
        }
        settings = {"data": corpus, "out": tmp_path / name, "network": network, "dtype": "float32", "device": "cpu"}
        return dataclasses.replace(config, **{**quick, **settings, "valid_batches": 1, **changes})

    return make
