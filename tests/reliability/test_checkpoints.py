"""Checkpoints under fire: whatever happens, what was finished is there, and the next run says what it does."""

import ast
import contextlib
import dataclasses
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cdlm.files import alone_in
from cdlm.model import pretrained
from cdlm.model.pretrained import LayoutError, load_denoiser
from cdlm.train import checkpoint
from cdlm.train.checkpoint import Checkpoint, DamageError
from cdlm.train.config import TrainConfig, to_json
from cdlm.train.loop import train

from .conftest import Child, command, in_child
from .disk import die_at, forget, watch

FILES = (*(f"{part}.safetensors" for part in checkpoint.PARTS), "config.json", "tokenizer.json", "state.json")


def small(step: int, best: tuple[float, int] | None = (1.0, 2)) -> Checkpoint:
    """A checkpoint of a few numbers, which depend on its step."""
    parts = {part: {"w": torch.full((40,), float(step)), "b": torch.arange(7.0)} for part in checkpoint.PARTS}
    return Checkpoint(step, parts, {"kind": step}, {"lr": 0.1}, best, {"vocab": 257}, None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the best checkpoint, 2, and the last one, 4."""
    folder = tmp_path / "run"
    folder.mkdir()
    for step in (2, 4):
        checkpoint.write(folder, small(step), keep=1)
    return folder


def assert_sound(run: Path, allowed: tuple[list[int], ...]) -> list[int]:
    """Every checkpoint that has a name is whole, and there are those that must be."""
    found = checkpoint.listed(run)
    for step, path in found:
        again = checkpoint.read(path)
        assert again.step == step
        assert again.tensors["online"]["w"].equal(small(step).tensors["online"]["w"])
    steps = [step for step, _ in found]
    assert steps in allowed, steps
    return steps


def same_bits(one: Path, other: Path) -> None:
    for part in checkpoint.PARTS:
        a, b = (checkpoint.read(path).tensors.get(part, {}) for path in (one, other))
        assert a.keys() == b.keys()
        assert all(a[name].equal(b[name]) for name in a), part


@pytest.mark.parametrize("cut", ["process", "power"])
def test_death_at_every_touch_of_the_disk(cut: str, run: Path, tmp_path: Path, tried) -> None:
    """kill -9 at each write, rename, removal and flush of writing a checkpoint; or the power fails there too."""
    count = in_child(lambda: (watch(lambda event: print("touch", event)), checkpoint.write(run, small(6), 1)))
    total = count.text.count("touch")
    assert total > 30, count.text
    shutil.rmtree(run / "step-00000006")
    checkpoint.write(run, small(4), keep=1)
    trials = 0
    for number in range(1, total + 1):
        folder = tmp_path / f"trial-{number}"
        shutil.copytree(run, folder)
        old = {path.stat().st_ino for path in folder.rglob("*") if path.is_file()}
        synced: list[int] | None = [] if cut == "power" else None

        def work(folder: Path = folder, number: int = number, synced: list[int] | None = synced) -> None:
            die_at(number, synced=synced)
            checkpoint.write(folder, small(6), keep=1)

        end = in_child(work)
        assert end.status == -signal.SIGKILL, (number, end)
        if cut == "power":
            flushed = ast.literal_eval(end.text.partition("synced ")[2].splitlines()[0])
            forget(folder, old | set(flushed))
        assert_sound(folder, ([2, 4], [2, 4, 6], [2, 6]))
        assert checkpoint.last_good(folder) == checkpoint.latest(folder)
        checkpoint.write(folder, small(8), keep=1)
        assert_sound(folder, ([2, 8],))
        assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000008"]  # nothing is left
        shutil.rmtree(folder)
        trials += 1
    fault = "kill -9" if cut == "process" else "power cut (unflushed files lose their second half)"
    tried(f"{fault} at each touch of the disk in writing a checkpoint", trials, "nothing finished is lost")


def killed_and_resumed(config: TrainConfig, whole: Path, number: int) -> None:
    """A real run that dies at a touch of the disk, then goes on: it ends with the bits of one that did not."""

    def work() -> None:
        die_at(number)
        train(config, "auto")

    end = in_child(work)
    assert end.status in (0, -signal.SIGKILL), end.text
    same_bits(whole, train(config, "auto"))


@pytest.fixture
def whole(recipe, tmp_path: Path) -> Path:
    return train(recipe(out=tmp_path / "whole"))


def test_a_run_that_dies_while_it_writes_ends_with_the_same_bits(recipe, whole: Path, tmp_path: Path, tried) -> None:
    draw = random.Random(3)
    numbers = [draw.randrange(1, 200) for _ in range(5)]
    for number in numbers:
        killed_and_resumed(recipe(out=tmp_path / f"at-{number}"), whole, number)
    tried("kill -9 of a run at random touches of the disk, then --resume auto", len(numbers), "the same bits")


@pytest.mark.soak
def test_a_run_that_dies_at_any_touch_ends_with_the_same_bits(recipe, whole: Path, tmp_path: Path, tried) -> None:
    numbers, until = range(1, 240, 2), time.monotonic() + 150
    done = 0
    for number in numbers:
        killed_and_resumed(recipe(out=tmp_path / f"at-{number}"), whole, number)
        shutil.rmtree(tmp_path / f"at-{number}")
        done += 1
        if time.monotonic() > until:
            break
    assert done >= 20
    tried("kill -9 of a run at every second touch of the disk, then --resume auto", done, "the same bits")


@pytest.mark.parametrize("number", [15, 40, 70])
def test_sigterm_while_it_writes(number: int, recipe, whole: Path, tried) -> None:
    """A polite signal in the middle of a checkpoint: the checkpoint is finished first."""
    config = recipe()

    def work() -> None:
        die_at(number, signal.SIGTERM)
        command("train", config.out.with_suffix(".json"))()

    config.out.with_suffix(".json").write_text(json.dumps(to_json(config)))
    end = in_child(work)
    assert end.status == 143, end.text
    assert "go on with --resume auto" in end.text
    assert "Traceback" not in end.text
    same_bits(whole, train(config, "auto"))
    tried("SIGTERM inside the writing of a checkpoint", 1, "saved, status 143, then the same bits")


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then there is an error, as of a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_takes_no_more(run: Path, tried) -> None:
    sizes = range(0, 700, 50)
    for size in sizes:
        with largest_file(size), pytest.raises(OSError, match="could not write checkpoint") as caught:
            checkpoint.write(run, small(6), keep=1)
        assert "step-00000006" in str(caught.value)
        assert "last good checkpoint is" in str(caught.value)
        assert "free some space" in str(caught.value)
        assert_sound(run, ([2, 4],))
        assert not list(run.glob(".writing*"))  # what was begun does not fill the disk further
    checkpoint.write(run, small(6), keep=1)
    tried("full disk (the system refuses to write beyond n bytes)", len(sizes), "an error that names both checkpoints")


def test_a_disk_that_fills_up_under_a_run(recipe, whole: Path, tried) -> None:
    """Metrics, settings or a checkpoint: what could not be written is named, and the run goes on when there is room."""
    sizes, named = (0, 300, 1000, 5000, 20_000), []
    config = recipe()
    config.out.with_suffix(".json").write_text(json.dumps(to_json(config)))
    for size in sizes:

        def work(size: int = size) -> None:
            with largest_file(size):
                command("train", config.out.with_suffix(".json"), "--resume", "auto")()

        end = in_child(work)
        assert end.status == 1, (size, end.text)
        assert "Traceback" not in end.text, end.text
        named.append(next(line for line in end.text.splitlines() if line.startswith("cdlm:")))
        assert str(config.out) in named[-1]
    assert "run.json" in named[0]
    assert "could not write checkpoint" in named[-1]
    same_bits(whole, train(config, "auto"))
    tried("full disk under a run", len(sizes), "an error that names the file; then the same bits")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", folder], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("a small disk cannot be mounted here (needs the right to mount)")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_small_disk_that_is_full(tiny_disk: Path, tried) -> None:
    fill = dataclasses.replace(small(2), tensors={part: {"w": torch.ones(2000)} for part in checkpoint.PARTS})
    checkpoint.write(tiny_disk, fill, keep=2)
    checkpoint.write(tiny_disk, dataclasses.replace(fill, step=4), keep=2)
    checkpoint.write(tiny_disk, dataclasses.replace(fill, step=6), keep=9)
    with pytest.raises(OSError, match=r"No space left.*last good checkpoint is .*step-00000006.*free some space"):
        checkpoint.write(tiny_disk, dataclasses.replace(fill, step=8), keep=9)
    assert [checkpoint.read(path).step for _, path in checkpoint.listed(tiny_disk)] == [2, 4, 6]
    tried("a full disk of 128 KiB", 1, "an error that names the last good checkpoint")


def test_a_disk_that_is_read_only(tiny_disk: Path, recipe, tried) -> None:
    checkpoint.write(tiny_disk, small(2), keep=2)
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    with pytest.raises(OSError, match=r"Read-only file system.*last good checkpoint is .*step-00000002"):
        checkpoint.write(tiny_disk, small(4), keep=2)
    end = in_child(lambda: train(recipe(out=tiny_disk / "new")))
    assert "Read-only file system" in end.text
    assert_sound(tiny_disk, ([2],))
    tried("a read-only disk", 2, "an error that names the folder")


def damaged(data: bytes, draw: random.Random, flips: int) -> Iterator[tuple[str, bytes | None]]:
    """Ways to spoil a file: gone, empty, cut short, and single bits turned over."""
    yield "missing", None
    for size in {0, len(data) // 2, len(data) - 1}:
        yield f"cut to {size}", data[:size]
    for _ in range(flips):
        at, bit = draw.randrange(len(data)), draw.randrange(8)
        changed = bytearray(data)
        changed[at] ^= 1 << bit
        yield f"bit {bit} of byte {at}", bytes(changed)


def attempt(path: Path) -> tuple[Checkpoint | None, LayoutError | None]:
    try:
        return checkpoint.read(path), None
    except LayoutError as error:
        return None, error


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_damage_to_every_file(name: str, run: Path, corpus: Path, tried, capsys) -> None:
    """A spoilt checkpoint is never taken for a good one: the one before is, and the spoilt one is kept and named."""
    checkpoint.write(run, dataclasses.replace(small(6), tokenizer=corpus / "tokenizer.json"), keep=2)
    path = run / "step-00000006" / name
    data, trials, harmless = path.read_bytes(), 0, 0
    good = checkpoint.read(path.parent)
    for what, content in damaged(data, random.Random(name), flips=60):
        path.write_bytes(content) if content is not None else path.unlink()
        trials += 1
        again, error = attempt(path.parent)
        if again is not None:  # white space between JSON values
            assert name == "state.json", what
            assert (again.step, again.best, again.run_config) == (good.step, good.best, good.run_config)
            harmless += 1
        elif isinstance(error, DamageError):
            assert name in str(error), (what, error)
            assert checkpoint.last_good(run) == run / "step-00000004", what
            said = capsys.readouterr().out
            if path.parent.is_dir():  # without state.json it was no checkpoint to begin with
                assert (name, content) == ("state.json", None)
            else:
                assert name in said
                assert "going on from step-00000004" in said
                (run / "damaged-step-00000006").rename(path.parent)
        else:  # a bit that makes it look newer: nothing is touched
            assert "newer version" in str(error)
        path.write_bytes(data)
    assert harmless < trials / 4
    tried(f"{name}: missing, cut short, one bit changed", trials, "named; the run goes on from the one before")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "state.json"])
def test_a_model_with_a_changed_bit_is_not_opened(name: str, recipe, tried) -> None:
    config = recipe(steps=2)
    path = train(config) / name
    data, draw, seen = path.read_bytes(), random.Random(1), 0
    for _ in range(25):
        at = draw.randrange(len(data))
        changed = bytearray(data)
        changed[at] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        if changed.split() != data.split():
            with contextlib.suppress(ValueError):
                if json.loads(changed) == json.loads(data):
                    continue
            with pytest.raises(LayoutError) as caught:
                load_denoiser(config.out)
            assert name in str(caught.value)
            seen += 1
    assert seen > 10
    tried(f"cdlm.load of a checkpoint with a changed bit in {name}", seen, "an error that names the file")


def test_a_run_goes_on_from_the_one_before_with_the_same_bits(recipe, whole: Path, tried) -> None:
    names = ("online.safetensors", "optimizer.safetensors", "config.json", "state.json")
    for name in names:
        config = recipe(out=whole.parent.parent / name, keep_checkpoints=3)
        train(config)
        (config.out / "step-00000006" / name).write_bytes(b"{}")
        end = in_child(lambda config=config: train(config, "auto"))
        assert end.status == 0, end.text
        assert f"step-00000006/{name} is damaged" in end.text or f"{name} is not" in end.text
        assert "resuming after step 4" in end.text
        assert (config.out / "damaged-step-00000006").is_dir()
        same_bits(whole, checkpoint.latest(config.out))
    tried("the newest checkpoint is damaged, then --resume auto", len(names), "the one before; the same bits")


def test_a_run_without_a_good_checkpoint_never_starts_anew(recipe, tried) -> None:
    config = recipe()
    train(config)
    before = sorted(path.name for path in config.out.iterdir())
    for _, path in checkpoint.listed(config.out):
        (path / "online.safetensors").write_bytes(b"")
    with pytest.raises(DamageError, match=r"online\.safetensors is damaged.*put that file back.*another --out"):
        train(config, "auto")
    assert sorted(path.name for path in config.out.iterdir()) == before
    tried("every checkpoint is damaged", 1, "an error; nothing is touched")


def test_a_newer_version_is_left_alone(recipe, tried) -> None:
    config = recipe()
    last = train(config)
    state = json.loads((last / "state.json").read_text())
    for change in ({"format": 3}, {"format": 99, "parts": ["weights"], "seal": "of another kind"}):
        (last / "state.json").write_text(json.dumps({**state, **change}))
        with pytest.raises(LayoutError, match=r"state\.json was written by a newer version.*upgrade cdlm"):
            train(config, "auto")
    assert last.is_dir()
    tried("a checkpoint of a newer version", 2, "an error that says to upgrade; nothing is touched")


def test_checkpoints_of_the_version_before_still_open(recipe, whole: Path, tried) -> None:
    config = recipe()
    last = train(config)
    shutil.rmtree(last)
    path = checkpoint.latest(config.out) / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**{key: state[key] for key in state if key not in ("seal", "files")}, "format": 1}))
    same_bits(whole, train(config, "auto"))
    tried("a checkpoint of the format before", 1, "goes on, with the same bits")


@pytest.mark.parametrize("offset", [-40 * 365 * 86400, 86400 * 365 * 10])
def test_clocks_do_not_choose_the_checkpoint(offset: int, run: Path, tried) -> None:
    """The oldest looks the newest, or all are in the future: the number decides."""
    for age, (_, path) in enumerate(checkpoint.listed(run)):
        for inside in (path, *path.iterdir()):
            moment = time.time() + offset - 86400 * age
            os.utime(inside, (moment, moment))
    assert checkpoint.last_good(run) == run / "step-00000004"
    assert pretrained.resolve_checkpoint(run) == run / "step-00000004"
    (run / "step-00000002").rename(run / "step-100000002")  # nine digits come after eight
    assert pretrained.resolve_checkpoint(run) == checkpoint.latest(run) == run / "step-100000002"
    tried("clocks that go backwards or stand in the future", 1, "the number of a checkpoint decides")


@pytest.mark.parametrize("begun", [False, True])
def test_three_runs_in_one_folder(begun: bool, recipe, whole: Path, tried) -> None:
    """They start at once; one trains, the others are told, and nobody disturbs it."""
    config = recipe(steps=6)
    if begun:
        train(config)
        shutil.rmtree(checkpoint.latest(config.out))
    path = config.out.with_suffix(".json")
    path.write_text(json.dumps(to_json(config)))

    def slowly() -> None:
        from cdlm.train import loop

        real = loop.train_step
        loop.train_step = lambda *how: (time.sleep(0.3), real(*how))[1]
        command("train", path, "--resume", "auto")()

    ends = [child.end() for child in [Child(slowly) for _ in range(3)]]
    assert sorted(end.status for end in ends) == [0, 1, 1], ends
    for end in ends:
        assert end.status == 0 or "another run is writing to" in end.text
    same_bits(whole, checkpoint.latest(config.out))
    tried("three runs in one folder at once", 3, "one trains, two are refused")


def test_a_folder_is_free_again_when_its_run_was_killed(run: Path) -> None:
    def hold() -> None:
        with alone_in(run):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(hold).status == -signal.SIGKILL
    with alone_in(run):
        pass


def test_damaged_metrics_do_not_stop_a_run(recipe, capsys, tried) -> None:
    config = recipe()
    train(config)
    path = config.out / "metrics.jsonl"
    shutil.rmtree(checkpoint.latest(config.out))
    data, trials = path.read_bytes(), 0
    for change in (b"\xff\xfe", b"[]\n", b'{"kind": "train"}\n', b"\0\0\0\n", b"[" * 5000 + b"\n"):
        path.write_bytes(change + data)
        train(config, "auto")
        assert "damaged and left out: line 1" in capsys.readouterr().out
        shutil.rmtree(checkpoint.latest(config.out))
        trials += 1
    tried("damaged metrics.jsonl", trials, "the run goes on; the lines left out are named")
