"""The description of a training run: plain values that a JSON file holds.

Values are checked when a configuration is made. What needs the table of methods is checked when training begins
(`check` in loop.py): a configuration, and with it the command line, imports no torch.
"""

import dataclasses
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from cdlm.devices import Device, Dtype
from cdlm.files import read_object
from cdlm.model.architecture import Architecture
from cdlm.schedules import PAPER_STEPS

Optimizer = Literal["adamw", "muon"]
Parallel = Literal["none", "ddp", "fsdp"]
Track = Literal["tensorboard", "wandb"]
Resume = Literal["no", "auto", "force"]


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A training run. The defaults are the paper's."""

    method: str = "mcdlm"
    """A row of the table of methods, with choices after a colon: mcdlm:kappa=0.2,steps=staged."""
    data: Path = Path("data")
    """Folder written by `cdlm prepare`."""
    out: Path = Path("runs/run")
    """Folder of the run: checkpoints, metrics, samples."""
    init_from: Path | None = None
    """A model folder, a run or a model of cdlm zoo to start from; methods that distil need one. Otherwise weights are
    random."""
    network: Architecture = dataclasses.field(default_factory=Architecture)
    noise: Literal["log-linear", "cosine"] = "log-linear"
    """The noise schedule alpha(t)."""
    steps: int = PAPER_STEPS
    """Optimiser steps; every schedule is a function of step / steps."""
    batch: int = 2048
    """Sequences in a step, over all processes and micro-batches."""
    length: int = 1024
    """Tokens in a sequence."""
    accumulate: int = 1
    """Micro-batches that each process splits its part of a batch into, to save memory."""
    optimizer: Optimizer = "adamw"
    """adamw as in the paper, or muon: that for the matrices of the blocks, with adamw for the other weights."""
    lr: float = 3e-4
    """Peak learning rate, held between warm-up and cool-down; of muon's updates too, made as large as adamw's."""
    warmup: float = 1 / 60
    """Share of the run in which the learning rate rises (2,500 of the paper's 150,000 steps)."""
    cooldown: float = 0.0
    """Share of the run, at its end, in which the learning rate falls to zero; the paper's is held."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    weight_decay: float = 0.0
    """Of either optimiser."""
    average: float = 0.9999
    """Decay of the averaged weights, which are the ones evaluated."""
    reference: int = PAPER_STEPS
    """The run length that decays (average, lam) are quoted for; in a shorter run they keep their share of it."""
    seed: int = 0
    """Fixes weights, data order and noise."""
    device: Device = "auto"
    """Where to compute."""
    dtype: Dtype = "bfloat16"
    """Precision of the network: bfloat16 is mixed, with fp32 weights."""
    compile: bool = False
    """Compile the trunk of the network: slower to start, faster on a GPU."""
    parallel: Parallel = "none"
    """Under torchrun: ddp replicates the weights, fsdp shards them."""
    log_every: int = 50
    """Steps between console lines."""
    valid_every: int = 1000
    """Steps between validations; 0 for none but the last."""
    valid_batches: int = 8
    """Batches of validation data that the NELBO is measured on."""
    samples: int = 4
    """Texts drawn at each validation; 0 for none."""
    sample_steps: int = 32
    """Denoising steps of those texts."""
    save_every: int = 1000
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints kept, besides the best one."""
    track: tuple[Track, ...] = ()
    """Also write metrics to these."""

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch",
            "accumulate",
            "reference",
            "log_every",
            "save_every",
            "keep",
            "sample_steps",
            "valid_batches",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1; got {getattr(self, name)}")
        for name in ("valid_every", "samples"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 0; got {getattr(self, name)}")
        if self.length < 2:
            raise ValueError(f"--length must be at least 2; got {self.length}")
        if not (0 < self.lr < 1e30 and self.clip > 0 and 0 <= self.warmup <= 1 and 0 <= self.cooldown <= 1):
            raise ValueError(
                "--lr and --clip must be positive numbers, and --warmup and --cooldown shares of the run in [0, 1]"
            )
        if not 0 <= self.weight_decay < 1e30:
            raise ValueError(f"--weight-decay must be at least 0; got {self.weight_decay}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must be at least 0 and below 2**63; got {self.seed}")
        if max(self.steps, self.reference) * self.batch * self.length >= 2**63:
            raise ValueError(
                f"--steps {self.steps} of --batch {self.batch} x --length {self.length} tokens are more than can be "
                "counted (2**63); use smaller ones"
            )
        if not 0 <= self.average < 1:
            raise ValueError(f"--average is a decay in [0, 1); got {self.average}")
        if self.batch % self.accumulate:
            raise ValueError(f"--batch {self.batch} does not divide into --accumulate {self.accumulate} micro-batches")
        if self.optimizer == "muon" and self.parallel == "fsdp":
            raise ValueError("--optimizer muon needs whole matrices, and fsdp splits them: use adamw, or ddp")


def to_json(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain JSON values."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value

    return plain(dataclasses.asdict(config))


def from_json(values: dict[str, Any]) -> RunConfig:
    """The configuration that those values describe; unknown settings and values of a wrong type are errors."""
    known = sorted(_FIELDS | {f"network.{name}" for name in _NETWORK_FIELDS})
    for name in (*values, *(f"network.{name}" for name in _network(values))):
        if name not in known:
            raise ValueError(f"unknown setting {name!r}; known are: {', '.join(known)}")
    try:
        config: RunConfig = msgspec.convert(values, RunConfig, dec_hook=_path)
    except msgspec.ValidationError as error:
        reason, _, name = str(error).rpartition(" - at `$.")
        raise ValueError(_misfit(values, name.rstrip("`").partition("[")[0]) if reason else str(error)) from None
    return config


def migrate(values: dict[str, Any]) -> dict[str, Any]:
    """The settings that a checkpoint of any version was trained with, in today's names.

    Nothing is guessed: names that no version knew are errors, and so are missing ones, except those that a version
    did not have yet. The method string is kept as it was written.
    """
    values = _with_added(values)
    missing = sorted(
        (_FIELDS - values.keys()) | {f"network.{name}" for name in _NETWORK_FIELDS - _network(values).keys()}
    )
    if missing:
        raise ValueError(f"settings are missing: {', '.join(missing)}")
    return to_json(from_json(values))


def read_config(path: Path) -> RunConfig:
    """The configuration in a run.json; one written by hand may leave settings to their defaults."""
    if not path.is_file():
        raise ValueError(f"there is no {path}; give a recipe (see `cdlm recipes`) or the run.json of a run")
    return from_json(_with_added(read_object(path)))


def _with_added(values: dict[str, Any]) -> dict[str, Any]:
    return {**_ADDED, **values, "network": {**_ADDED_TO_NETWORK, **_network(values)}}


def _network(values: dict[str, Any]) -> dict[str, Any]:
    network = values.get("network", {})
    if not isinstance(network, dict):
        raise ValueError(f"setting 'network' takes an object; got {network!r}")
    return network


def _misfit(values: dict[str, Any], name: str) -> str:
    """What a setting takes, and what it got instead."""
    kind, value = (RunConfig, values) if "." not in name else (Architecture, values["network"])
    value, hint = value[name.rpartition(".")[2]], typing.get_type_hints(kind)[name.rpartition(".")[2]]
    takes = ", ".join(map(str, get_args(hint))) if get_origin(hint) is Literal else getattr(hint, "__name__", str(hint))
    return f"setting {name!r} takes {takes}; got {value!r}"


def _path(kind: type, value: Any) -> Any:
    """How msgspec reads the one type that JSON lacks."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"expected a path, got {value!r}")


_FIELDS = {field.name for field in dataclasses.fields(RunConfig)}
_NETWORK_FIELDS = {field.name for field in dataclasses.fields(Architecture)}
_ADDED: dict[str, Any] = {"optimizer": "adamw", "cooldown": 0.0}
_ADDED_TO_NETWORK: dict[str, Any] = {"absolute": 0, "tied": False}
"""Settings that were added later, with the values that reproduce the versions without them."""
