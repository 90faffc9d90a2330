"""The description of a training run: plain values that a JSON file holds.

Values are checked when a configuration is made. What needs the table of methods is checked when training begins
(`check` in loop.py): a configuration, and with it the command line, imports no torch.
"""

import contextlib
import dataclasses
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from cdlm.devices import Device, Dtype
from cdlm.files import read_object, rename_keys
from cdlm.model.config import RENAMED_NETWORK, NetworkConfig
from cdlm.schedules import PAPER_STEPS

Optimizer = Literal["adamw", "muon"]
Parallel = Literal["none", "ddp", "fsdp"]
Track = Literal["tensorboard", "wandb"]
Resume = Literal["no", "auto", "force"]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A training run. Steps, batch and sequence length are the paper's; optimizer, learning rate, warmup, clipping and
    EMA, of which it says nothing, are those of MDLM and DUO."""

    method: str = "mcdlm"
    """A row of the table of methods, with options after a colon: mcdlm:kappa=0.2,steps=staged."""
    data: Path = Path("data")
    """Directory written by `cdlm prepare`."""
    out: Path = Path("runs/run")
    """Run directory: checkpoints, metrics, samples."""
    init_from: Path | None = None
    """Model directory, run, bundled model (see `cdlm zoo`), or a masked language model of transformers (a directory or
    hub id), to start from; required by methods that distil a model. Weights are random otherwise."""
    trust_remote_code: bool = False
    """Run the code that the model of --init-from comes with."""
    freeze_trunk: bool = False
    """Train the joint head alone; all other weights stay those of the model to start from."""
    network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)
    prior: str = "auto"
    """Distribution of pure noise: auto (the method's own), masked, uniform, unigram (token frequencies of the training
    split), or mixed:M, a mixture of the mask, with probability M, and uniform tokens."""
    noise_schedule: str = "log-linear"
    """Noise schedule alpha(t): log-linear, cosine, or one of your own (docs/extend.md)."""
    steps: int = PAPER_STEPS
    """Optimizer steps; every schedule is a function of step / steps."""
    batch_size: int = 2048
    """Sequences per step, over all processes and micro-batches."""
    seq_length: int = 1024
    """Tokens per sequence."""
    grad_accum_steps: int = 1
    """Gradient accumulation: micro-batches per step in each process, to save memory."""
    optimizer: Optimizer = "adamw"
    """adamw as MDLM and DUO, or muon for the matrices of the blocks with adamw for the other weights."""
    learning_rate: float = 3e-4
    """Peak learning rate, constant between warmup and cooldown. Updates of muon are scaled to those of adamw."""
    warmup_ratio: float = 1 / 60
    """Fraction of the run with a rising learning rate (2,500 of 150,000 steps, as many as MDLM and DUO take)."""
    cooldown_ratio: float = 0.0
    """Fraction of the run, at its end, in which the learning rate falls to zero; MDLM and DUO have none."""
    max_grad_norm: float = 1.0
    """Gradient clipping: the largest norm of the gradient."""
    weight_decay: float = 0.0
    """Weight decay of either optimizer."""
    ema_decay: float = 0.9999
    """Decay of the exponential moving average of the weights, which is the model that is evaluated and saved."""
    reference_steps: int = PAPER_STEPS
    """Run length that the decays (ema_decay, lam) are quoted for; runs of another length rescale them."""
    seed: int = 0
    """Random seed of weights, data order and noise."""
    device: Device = "auto"
    """Where to compute."""
    dtype: Dtype = "bfloat16"
    """Precision of the network: bfloat16 is mixed, with fp32 weights."""
    compile: bool = False
    """Compile the network: slower to start, faster on a GPU."""
    parallel: Parallel = "none"
    """Under torchrun: ddp replicates the weights, fsdp shards them."""
    log_every: int = 50
    """Steps between console lines."""
    valid_every: int = 1000
    """Steps between validations; 0 validates at the end only."""
    valid_batches: int = 8
    """Batches of validation data that the NELBO is estimated on."""
    valid_samples: int = 4
    """Samples generated at each validation; 0 for none."""
    valid_sample_steps: int = 32
    """Sampling steps of these samples."""
    save_every: int = 1000
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """Checkpoints to keep, besides the best one."""
    track: tuple[Track, ...] = ()
    """Also report metrics to these."""

    def __post_init__(self) -> None:
        parse_prior(self.prior)
        for name in (
            "steps",
            "batch_size",
            "grad_accum_steps",
            "reference_steps",
            "log_every",
            "save_every",
            "keep_checkpoints",
            "valid_sample_steps",
            "valid_batches",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} must be at least 1 (got {getattr(self, name)})")
        for name in ("valid_every", "valid_samples"):
            if getattr(self, name) < 0:
                raise ValueError(f"{_flag(name)} must be at least 0 (got {getattr(self, name)})")
        if self.seq_length < 2:
            raise ValueError(f"--seq-length must be at least 2 (got {self.seq_length})")
        if not 0 < self.learning_rate < 1e30:
            raise ValueError(f"--learning-rate must be a positive number (got {self.learning_rate})")
        if not self.max_grad_norm > 0:
            raise ValueError(f"--max-grad-norm must be a positive number (got {self.max_grad_norm})")
        for name in ("warmup_ratio", "cooldown_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{_flag(name)} is a fraction of the run in [0, 1] (got {getattr(self, name)})")
        if not 0 <= self.weight_decay < 1e30:
            raise ValueError(f"--weight-decay must be at least 0 (got {self.weight_decay})")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must be at least 0 and below 2**63 (got {self.seed})")
        if max(self.steps, self.reference_steps) * self.batch_size * self.seq_length >= 2**63:
            raise ValueError(
                f"--steps {self.steps} of --batch-size {self.batch_size} x --seq-length {self.seq_length} tokens are "
                "more than can be counted (2**63); use smaller values"
            )
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"--ema-decay must be in [0, 1) (got {self.ema_decay})")
        if self.batch_size % self.grad_accum_steps:
            raise ValueError(
                f"--batch-size {self.batch_size} is not divisible by --grad-accum-steps {self.grad_accum_steps}; "
                "change either of them"
            )
        if self.optimizer == "muon" and self.parallel == "fsdp":
            raise ValueError("--optimizer muon needs full matrices, which fsdp shards; use adamw, or --parallel ddp")


def parse_prior(prior: str) -> tuple[str, float]:
    """The kind of a prior and the probability of the mask in a mixed one: `mixed:0.8` is ("mixed", 0.8)."""
    if prior in ("auto", "masked", "uniform", "unigram"):
        return prior, 0.0
    kind, _, value = prior.partition(":")
    with contextlib.suppress(ValueError):
        mask_probability = float(value)
        if kind == "mixed" and 0 < mask_probability < 1:
            return kind, mask_probability
    raise ValueError(
        "--prior must be auto, masked, uniform, unigram or mixed:M, with a probability M between 0 and 1 for the mask, "
        f"such as mixed:0.8 (got {prior!r})"
    )


def to_json(config: TrainConfig) -> dict[str, Any]:
    """The configuration as plain JSON values."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value

    return plain(dataclasses.asdict(config))


def from_json(values: dict[str, Any]) -> TrainConfig:
    """The configuration that those values describe; unknown settings and values of a wrong type are errors."""
    known = sorted(_FIELDS | {f"network.{name}" for name in _NETWORK_FIELDS})
    for name in (*values, *(f"network.{name}" for name in _network(values))):
        if name not in known:
            raise ValueError(f"unknown setting {name!r}; known are: {', '.join(known)}")
    try:
        config: TrainConfig = msgspec.convert(values, TrainConfig, dec_hook=_path)
    except msgspec.ValidationError as error:
        reason, _, name = str(error).rpartition(" - at `$.")
        raise ValueError(_misfit(values, name.rstrip("`").partition("[")[0]) if reason else str(error)) from None
    return config


def migrate(values: dict[str, Any]) -> dict[str, Any]:
    """The settings that a checkpoint of any version was trained with, under the present names.

    Nothing is guessed: names that no version knew are errors, and so are missing ones, except those that a version did
    not have yet. The method string is kept as it was written.
    """
    values = _renamed(values)
    missing = sorted(
        (_FIELDS - values.keys()) | {f"network.{name}" for name in _NETWORK_FIELDS - _network(values).keys()}
    )
    if missing:
        raise ValueError(f"settings are missing: {', '.join(missing)}")
    return to_json(from_json(values))


def read_config(path: Path) -> TrainConfig:
    """The configuration in a run.json of any version; one written by hand may leave settings to their defaults."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a recipe (see `cdlm recipes`) or the run.json of a run")
    return from_json(_renamed(read_object(path)))


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Settings of any version under the present names, with those that were added later."""
    network = rename_keys(_network(values), RENAMED_NETWORK)
    return {**_ADDED, **rename_keys(values, RENAMED), "network": {**_ADDED_TO_NETWORK, **network}}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _network(values: dict[str, Any]) -> dict[str, Any]:
    network = values.get("network", {})
    if isinstance(network, str):
        raise ValueError(
            f"the run has a custom network, {network}: train it from Python, with "
            f"cdlm.train.train(config, network={network}(...))"
        )
    if not isinstance(network, dict):
        raise ValueError(f"setting 'network' takes an object; got {network!r}")
    return network


def _misfit(values: dict[str, Any], name: str) -> str:
    """What a setting takes, and what it got instead."""
    kind, value = (TrainConfig, values) if "." not in name else (NetworkConfig, values["network"])
    value, hint = value[name.rpartition(".")[2]], typing.get_type_hints(kind)[name.rpartition(".")[2]]
    takes = ", ".join(map(str, get_args(hint))) if get_origin(hint) is Literal else getattr(hint, "__name__", str(hint))
    return f"setting {name!r} takes {takes}; got {value!r}"


def _path(kind: type, value: Any) -> Any:
    """How msgspec reads the one type that JSON lacks."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"expected a path, got {value!r}")


_FIELDS = {field.name for field in dataclasses.fields(TrainConfig)}
_NETWORK_FIELDS = {field.name for field in dataclasses.fields(NetworkConfig)}
RENAMED = {
    "noise": "noise_schedule",
    "batch": "batch_size",
    "length": "seq_length",
    "accumulate": "grad_accum_steps",
    "lr": "learning_rate",
    "warmup": "warmup_ratio",
    "cooldown": "cooldown_ratio",
    "clip": "max_grad_norm",
    "average": "ema_decay",
    "reference": "reference_steps",
    "samples": "valid_samples",
    "sample_steps": "valid_sample_steps",
    "keep": "keep_checkpoints",
}
"""Settings of earlier versions and their present names."""
_ADDED: dict[str, Any] = {
    "optimizer": "adamw",
    "cooldown_ratio": 0.0,
    "prior": "auto",
    "trust_remote_code": False,
    "freeze_trunk": False,
}
_ADDED_TO_NETWORK: dict[str, Any] = {
    "position_embeddings": 0,
    "grid_embeddings": 0,
    "tie_embeddings": False,
    "joint_layers": 0,
}
"""Settings that were added later, with the values that reproduce the versions without them."""
