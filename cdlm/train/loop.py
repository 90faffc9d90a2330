"""Training, top to bottom: data, networks, the loop, and everything that must survive a crash."""

import contextlib
import copy
import dataclasses
import errno
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import torch
from torch import Tensor, nn

from cdlm import zoo
from cdlm.data.tokenizer import Tokenizer
from cdlm.data.tokens import Meta, open_tokens
from cdlm.devices import few_threads, pick_device, weight_dtype
from cdlm.files import alone_in, flush, write_whole
from cdlm.hub import model_directory
from cdlm.methods import METHODS, Method
from cdlm.methods.spec import needs_trained_model, parse_method, same_method
from cdlm.model.config import NetworkConfig
from cdlm.model.custom import CustomBackbone, masked_lm_of
from cdlm.model.denoiser import Denoiser
from cdlm.model.pretrained import (
    CUSTOM,
    LayoutError,
    custom_network,
    is_masked_lm,
    load_denoiser,
    masked_lm_network,
    migrate_model_config,
    model_config,
    read_model_config,
    resolve_checkpoint,
)
from cdlm.objective import Objective
from cdlm.sample.generation_config import read_generation_config
from cdlm.sample.settings import flags
from cdlm.train import checkpoint
from cdlm.train.config import Resume, TrainConfig, migrate, to_json
from cdlm.train.distributed import World, any_rank, broadcast_from_rank_0, join, leave, lost_contact
from cdlm.train.log import announce, console_line, open_log, summarise
from cdlm.train.prior import check_prior, make_process, same_prior
from cdlm.train.recipes import RECIPES
from cdlm.train.step import Learner, make_learner, train_step
from cdlm.train.validation import print_validation, validate
from cdlm.types import Tokens

FREE = {
    *("out", "data", "init_from", "trust_remote_code", "device", "parallel", "grad_accum_steps", "compile"),
    *("log_every", "valid_every", "valid_batches", "valid_samples", "valid_sample_steps"),
    *("save_every", "keep_checkpoints", "track"),
}
"""Settings that may change when a run resumes: they change no weight, or only its last digits. But with dropout another
layout (`parallel`, the number of processes, `grad_accum_steps`) drops other units, and the weights differ as with
another seed. (`data` is a path; the tokens themselves must be the same.)"""


def train(config: TrainConfig, resume: Resume = "no", network: nn.Module | None = None) -> Path:
    """Train from random weights, from a model, or from where the run stopped; returns the last checkpoint.

    `resume` is "no" (the output directory must not hold a run), "auto" (go on from the last checkpoint if there is one)
    or "force" (also under other settings or on other data).

    Given a `network` of your own (`cdlm.types.LogitsNetwork`), that is trained in place of the one that
    `config.network` describes, from the weights that it has. To resume, pass it again; its weights are then those of
    the checkpoint. Where `init_from` is a masked language model of transformers, that is the network.
    """
    if resume not in get_args(Resume):
        raise ValueError(f"resume must be one of {', '.join(get_args(Resume))} (got {resume!r}).")
    network = _masked_lm(config, resume) if network is None else network
    check(config, network)
    device = pick_device(config.device)
    world = join(config.parallel, device)
    with _explained(config, world), contextlib.ExitStack() as held:
        return _train(config, resume, device, world, held, network)


def check(config: TrainConfig, network: nn.Module | None = None) -> None:
    """Refuse a network or a start that does not suit the method."""
    if network is not None:
        _check_custom(config, network)
        check_prior(config)
        return
    check_prior(config)
    method, _ = parse_method(config.method)
    if config.network.causal != (method.process == "none"):
        wrong = "needs" if method.process == "none" else "does not take"
        raise ValueError(f"{method.name} {wrong} a causal network; set --network.causal accordingly")
    if method.process == "uniform" and not config.network.time_conditioning:
        raise ValueError(
            f"{method.name} needs a time-conditioned network; add --network.time-conditioning, or start from its recipe"
        )
    if method.joint_head and not config.network.joint_layers:
        raise ValueError(f"{method.name} trains a joint head; add --network.joint-layers 1")
    if config.network.joint_layers and not method.joint_head:
        heads = ", ".join(slug for slug, row in METHODS.items() if row.joint_head)
        raise ValueError(f"{method.name} does not train a joint head; leave out --network.joint-layers, or use {heads}")
    if config.freeze_trunk and not method.joint_head:
        raise ValueError(f"--freeze-trunk trains the joint head alone, and {method.name} has none; leave it out")
    if config.freeze_trunk and config.init_from is None:
        raise ValueError("--freeze-trunk keeps the weights of a trained model: give it with --init-from")
    if config.init_from is None and needs_trained_model(config.method):
        base = method.starts_from or "mdlm"
        raise ValueError(f"{method.name} distils a trained model: give --init-from a run of {base}")


def _masked_lm(config: TrainConfig, resume: Resume) -> nn.Module | None:
    """The masked language model of transformers that a run trains: that of its checkpoint, or of --init-from."""
    for _, path in reversed(checkpoint.listed(config.out) if resume != "no" else []):
        try:
            described = read_model_config(path)
        except LayoutError:  # it is damaged, and the run goes on from the one before
            continue
        return masked_lm_network(described, config.trust_remote_code) if is_masked_lm(described) else None
    if config.init_from is None or not (start := _start(config)).exists():
        return None
    described = read_model_config(start)
    if not is_masked_lm(described):
        return None
    trust = config.trust_remote_code
    backbone = load_denoiser(start, config=described, trust_remote_code=trust).backbone
    assert isinstance(backbone, CustomBackbone)
    return backbone.network


def _start(config: TrainConfig) -> Path:
    """The directory that --init-from names: one here, or a copy of a repository of the model hub."""
    assert config.init_from is not None
    path = zoo.locate(config.init_from)
    if path.exists() or path.parts[:1] == ("runs",) or len(path.parts) != 2 or path.parent.is_dir():
        return path
    return model_directory(config.init_from, config.trust_remote_code)


def _check_masked_lm(config: TrainConfig, network: nn.Module, about: dict[str, Any]) -> None:
    """Refuse methods and lengths that a masked language model cannot have."""
    method, _ = parse_method(config.method)
    name = type(getattr(network, "model", network)).__name__
    if method.process not in ("masked", "any mask") or config.prior not in ("auto", "masked"):
        fitting = ", ".join(slug for slug, row in METHODS.items() if row.process in ("masked", "any mask"))
        what = f"method {config.method}" if method.process not in ("masked", "any mask") else f"prior {config.prior}"
        raise ValueError(f"{name} is a masked language model, which --{what} cannot train; use --method with {fitting}")
    if about["max_length"] and config.seq_length > about["max_length"]:
        raise ValueError(
            f"--seq-length must be at most {about['max_length']}, the positions of {name} (got {config.seq_length})"
        )


def _check_masked_lm_data(config: TrainConfig, meta: Meta, about: dict[str, Any]) -> None:
    """Refuse tokens that were not made by the tokenizer of the model, or as it does."""
    advice = "run cdlm prepare with --tokenizer and the directory of the model"
    if meta.vocab != about["num_tokens"]:
        raise ValueError(
            f"{config.data} holds tokens of a vocabulary of {meta.vocab}, but the model has {about['num_tokens']}; "
            f"{advice}"
        )
    if meta.eos in about["special"] and meta.packing != "wrapped":
        raise ValueError(
            f"the model knows texts between two special tokens, and {config.data} has {meta.packing} packing; {advice} "
            "and --packing wrapped"
        )


def _check_custom(config: TrainConfig, network: nn.Module) -> None:
    """Refuse settings that work with the network of the package only."""
    about = masked_lm_of(network)
    if about is not None:
        _check_masked_lm(config, network, about)
    if isinstance(network, Denoiser):
        raise ValueError("network must be the network itself, not a Denoiser around it")
    if parse_method(config.method)[0].joint_head:
        raise ValueError("a joint head is part of the network of cdlm; train your own with another method")
    if config.optimizer == "muon":
        raise ValueError("--optimizer muon chooses among the matrices of the network of cdlm; use adamw with your own")
    if config.compile:
        raise ValueError("--compile compiles the network of cdlm; set compile=False with a network of your own")


def _train(
    config: TrainConfig,
    resume: Resume,
    device: torch.device,
    world: World,
    held: contextlib.ExitStack,
    custom: nn.Module | None,
) -> Path:
    if config.batch_size % (world.size * config.grad_accum_steps):
        raise ValueError(
            f"--batch-size {config.batch_size} is not divisible by {world.size} processes x --grad-accum-steps "
            f"{config.grad_accum_steps}; change one of them"
        )
    data = open_tokens(config.data, "train")
    valid = open_tokens(config.data, "valid") if "valid" in data.meta.splits else None
    data.check_vocabulary(Tokenizer.load(config.data / "tokenizer.json").vocab_size, "its tokenizer.json")
    for split in (data, valid):
        if split is not None:
            split.blocks(config.seq_length)  # too little data is found now, not at the first validation
    corpus = {"sha256": data.meta.splits["train"].sha256, "vocab": data.meta.vocab}

    def choose() -> str | None:
        config.out.mkdir(parents=True, exist_ok=True)
        held.enter_context(alone_in(config.out))  # before anything is read: another run may be removing it
        held.callback(_remove_empty, config.out)  # of a run that could not begin, nothing is left
        found = _to_resume(config, resume)
        return None if found is None else str(found)

    path = broadcast_from_rank_0(choose, world)
    last = None if path is None else _read_last(Path(path), config, resume, corpus)
    if last is not None:
        _check_same_kind(custom_network(last.model_config), custom, f"the checkpoint in {config.out}")
    about = masked_lm_of(custom)
    if about is not None:
        _check_masked_lm_data(config, data.meta, about)
    network, method, objective = build(config, data.meta.vocab, device, last, custom)
    if isinstance(network.backbone, CustomBackbone):
        network.backbone.check_interface(config.seq_length)
    held.enter_context(few_threads(device, network.count()))
    state = make_learner(config, network, objective, world)
    first, best = 0, None
    base = _base_training(config) if last is None else last.model_config.get("training", {}).get("from")
    generation_config = _base_generation_config(config) if last is None else last.generation_config
    if last is not None:
        _check_fit(last, network, objective, config)
        state.restore(last.step, last.tensors)
        first, best = last.step, last.best

    def batches(step: int, rows: Tensor) -> Tokens:
        return data.batch(step, config.seed, config.batch_size, rows, config.seq_length)

    def save(step: int) -> None:
        tensors = state.state()
        if world.is_main:
            flush(config.out / "metrics.jsonl")  # the lines before a checkpoint are as safe as it is
            tokenizer = config.data / "tokenizer.json"
            text = {
                "max_length": config.seq_length,
                "posterior": method.posterior,
                "bos_framed": data.meta.packing != "plain",
                "eos_padded": data.meta.packing == "sentences",
            }
            training = {
                "method": config.method,
                "steps": step,
                "batch_size": config.batch_size,
                "seq_length": config.seq_length,
                "from": base,
            }
            model = {**model_config(network), "text": text, "training": training}
            run_config = to_json(config)
            found = checkpoint.Checkpoint(step, tensors, model, run_config, best, corpus, tokenizer, generation_config)
            checkpoint.write(config.out, found, config.keep_checkpoints)

    recent: list[dict[str, Tensor]] = []
    regular = False
    with contextlib.ExitStack() as inner:
        record = None
        if world.is_main:
            own_network = {"network": network.custom_network} if custom is not None and about is None else {}
            described = to_json(config) | own_network
            write_whole(config.out / "run.json", json.dumps(described, indent=1) + "\n")
            announce(config, network, method, objective, data, device, world)
            if generation_config:
                settings = {name: value for name, value in generation_config.items() if name != "step_presets"}
                print(f"generation config, from the model it started from: {flags(settings)}")
            if valid is None:
                print(f"no validation, and no best checkpoint: {config.data} was prepared without a valid split")
            record = open_log(config, first)
            if first:
                done_already = "this run is complete; nothing to do" if first >= config.steps else ""
                print(done_already or f"resuming after step {first:,}", flush=True)
        inner.callback(lambda: leave(together=regular))
        asked_to_stop = inner.enter_context(_signals())
        clock, done = time.perf_counter(), first
        for step in range(first, config.steps):
            recent.append(train_step(state, batches, step))
            n, ended = step + 1, step + 1 == config.steps
            log_now = n % config.log_every == 0 or ended
            valid_now = ended or (config.valid_every > 0 and n % config.valid_every == 0)
            stopping = (world.size == 1 or n % 10 == 0) and any_rank(asked_to_stop(), world, device) and not ended
            save_now = n % config.save_every == 0 or ended or stopping
            if log_now or valid_now or save_now or device.type == "cpu":
                _check_finite(recent, step, config, device, world)
            if valid_now or save_now:
                _check_weights(state, n, config, device)
            if log_now:
                speed = (n - done) * config.batch_size * config.seq_length / (time.perf_counter() - clock)
                line = summarise(state, recent, step, speed)
                if record is not None:
                    record(line)
                    print(console_line(line, config), flush=True)
                recent = []
            if valid_now and valid is not None:
                found = validate(state, method, valid, step, math.inf if best is None else best[0])
                if math.isfinite(found["nelbo"]) and (best is None or found["nelbo"] < best[0]):
                    best, save_now = (found["nelbo"], n), True  # the best is always kept
                if record is not None:
                    record(found)
                    print_validation(found, config)
            if save_now:
                save(n)
            if log_now or valid_now or save_now:
                clock, done = time.perf_counter(), n
            if stopping:
                break
        regular = True
    end = checkpoint.latest(config.out)
    if end is None:
        raise ValueError(
            f"no checkpoint of {config.out} can be seen here; --out must be on a disk that all nodes share"
        )
    finished = int(end.name.removeprefix("step-")) >= config.steps
    if world.is_main and finished:
        in_python = custom is not None and about is None
        way = f"cdlm.load({str(config.out)!r}, network=...)" if in_python else f"cdlm sample {config.out}"
        print(f"done: {end}; try: {way}, cdlm plot {config.out}", flush=True)
    if not finished:
        raise Stopped(f"stopped; saved {end}; go on with --resume auto")
    return end


class Stopped(Exception):  # noqa: N818 (an end on request, not an error)
    """A run that saved and ended because it was asked to."""


def build(
    config: TrainConfig,
    vocab: int,
    device: torch.device,
    last: checkpoint.Checkpoint | None = None,
    custom: nn.Module | None = None,
) -> tuple[Denoiser, Method, Objective]:
    """The network and the objective of a run; the weights are random, those of a model or of a `custom` network, or
    left to the `last` checkpoint."""
    method, choices = parse_method(config.method)
    unchanged = last is not None and last.run_config["prior"] == config.prior
    saved_prior = last.tensors["model"].get("prior") if last is not None and unchanged else None
    about = masked_lm_of(custom)
    if about is not None:
        vocab = about["vocab_size"]
    process = make_process(config, method, vocab, saved_prior)
    if about is not None and process is not None:
        process = dataclasses.replace(process, special=tuple(about["special"]))
    objective = dataclasses.replace(method(process, config.steps, **choices), reference=config.reference_steps)
    torch.manual_seed(config.seed)
    network = Denoiser(config.network if custom is None else custom, process, vocab)
    if config.init_from is not None and last is None and about is None:
        start = zoo.locate(config.init_from)
        if not start.exists():
            raise ValueError(
                f"{config.out.name} starts from {config.init_from}, which does not exist; train that run first"
                f"{_command(config.init_from)}, or name another with --init-from"
            )
        described = read_model_config(start)
        _check_same_kind(custom_network(described), custom, f"--init-from {config.init_from}")
        given = load_denoiser(start, config=described, network=copy.deepcopy(custom))
        ours, theirs = _comparable(model_config(network)), _comparable(model_config(given))
        weights = given.state_dict()
        if given.vocab == vocab + 1 and network.process is not None and network.process.flat:
            # public DUO checkpoints have one id, [PAD], more than GPT-2's tokens: its rows are left out
            rows = ("vocab_embed.embedding", "output_layer.linear.weight", "output_layer.linear.bias")
            weights = {name: value[:vocab] if name.endswith(rows) else value for name, value in weights.items()}
            theirs["vocab_size"] = vocab
        new_head = config.network.joint_layers and not theirs["network"]["joint_layers"]
        if new_head:  # it starts as it was initialised: without effect
            theirs["network"]["joint_layers"] = config.network.joint_layers
        for key in ("process", "vocab_size", "network"):
            if ours[key] != theirs[key]:
                raise ValueError(
                    f"--init-from {config.init_from} does not fit: its {key} is {_show(theirs[key], ours[key])}"
                )
        if not same_prior(given.process, process):
            raise ValueError(
                f"--init-from {config.init_from} does not fit: its prior is not that of --prior {config.prior}; "
                "use the --prior and the data that it was trained with"
            )
        if new_head and network.joint_head is not None:
            weights |= {f"joint_head.{name}": value for name, value in network.joint_head.state_dict().items()}
        network.load_state_dict(weights)
    if config.freeze_trunk and network.joint_head is not None:
        network.requires_grad_(False)
        network.joint_head.requires_grad_(True)
    return network.to(device, weight_dtype(device, config.dtype)), method, objective


def _to_resume(config: TrainConfig, resume: Resume) -> Path | None:
    """The checkpoint to go on from, if any; a run is never overwritten."""
    if resume == "no" and checkpoint.latest(config.out) is not None:
        raise ValueError(f"{config.out} already holds a run; continue it with --resume auto, or choose another --out")
    return checkpoint.last_good(config.out)


def _read_last(path: Path, config: TrainConfig, resume: Resume, corpus: dict[str, Any]) -> checkpoint.Checkpoint:
    """Read what the first process has found good; a run is not continued as something else."""
    found = checkpoint.read(path, check=False)
    try:
        before, now = migrate(found.run_config), to_json(config)
    except ValueError as error:
        raise ValueError(f"the settings in {path / checkpoint.STATE} cannot be read: {error}") from None
    found = dataclasses.replace(found, run_config=dict(before), model_config=_model_config(found, config))
    if same_method(before["method"], now["method"]):
        before["method"] = now["method"]
    changed = [f"{key}: {before[key]} -> {now[key]}" for key in now if key not in FREE and before[key] != now[key]]
    if found.data != corpus:
        changed.append(f"data: {before['data']} -> {config.data} holds other tokens")
    if changed and resume != "force":
        raise ValueError(
            f"{config.out} was started with other settings ({'; '.join(changed)}); "
            "use the same, another --out, or --resume force"
        )
    return found


def _check_same_kind(name: str | None, custom: nn.Module | None, where: str) -> None:
    """Weights of a custom network need that network, and weights of the package's need none."""
    if name is not None and custom is None:
        raise ValueError(
            f"{where} is of a custom network, {name}; train it from Python, with the same network: "
            f"cdlm.train.train(config, network={name}(...))"
        )
    if name is None and custom is not None:
        raise ValueError(f"{where} is of a network of cdlm, not of {type(custom).__name__}; leave out network=...")


def _check_fit(last: checkpoint.Checkpoint, network: Denoiser, objective: Objective, config: TrainConfig) -> None:
    """Even a forced resume needs the same network, and a target where the method has one."""
    try:
        ours, theirs = _comparable(model_config(network)), _comparable(last.model_config)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the config.json of the checkpoint in {config.out} is damaged ({error!r})") from None
    if ours != theirs:
        differ = "; ".join(f"{key}: {theirs.get(key)} -> {ours[key]}" for key in ours if ours[key] != theirs.get(key))
        raise ValueError(f"the checkpoint in {config.out} is of another network ({differ}); start a new --out instead")
    wanted, found = (
        {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for tensors in (network.state_dict(), last.tensors["online"])
    )
    for name in (*wanted, *found):
        if wanted.get(name) != found.get(name):
            raise ValueError(
                f"the checkpoint in {config.out} is of another network: its tensor {name!r} has the shape "
                f"{found.get(name, 'none')}, and that of the network given {wanted.get(name, 'none')}"
            )
    if objective.network is not None and "target" not in last.tensors:
        raise ValueError(
            f"{config.method} has a target network and the checkpoint in {config.out} has none; "
            f"start a new --out with --init-from {config.out}"
        )


def _command(base: Path) -> str:
    """How to train the run that a recipe starts from."""
    return f": cdlm train {base.name} --data data" if base == Path("runs") / base.name and base.name in RECIPES else ""


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it is not empty, and stays
        folder.rmdir()


def _show(theirs: Any, ours: Any) -> str:
    """A difference in words: only the fields that differ."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        differ = [key for key in ours if ours[key] != theirs.get(key)]
        theirs, ours = ({key: side.get(key) for key in differ} for side in (theirs, ours))
    words = [
        ", ".join(f"{key} {value}" for key, value in side.items()) if isinstance(side, dict) else str(side or "none")
        for side in (theirs, ours)
    ]
    return f"{words[0]}, this run's is {words[1]}"


def _comparable(model: dict[str, Any]) -> dict[str, Any]:
    """What must agree for weights to fit: everything but the dropout, how samples are generated, and the training."""
    known = dataclasses.asdict(NetworkConfig()) | model["network"]  # an earlier version knew fewer settings
    network = {key: value for key, value in known.items() if key not in ("dropout", CUSTOM)}
    rest = {key: value for key, value in model.items() if key not in ("text", "training")}
    return {**rest, "network": network}


def _model_config(last: checkpoint.Checkpoint, config: TrainConfig) -> dict[str, Any]:
    """The config.json of a checkpoint of any version, under the present names."""
    try:
        return migrate_model_config(last.model_config)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the config.json of the checkpoint in {config.out} is damaged ({error!r})") from None


def _base_training(config: TrainConfig) -> dict[str, Any] | None:
    """How the model that this run starts from was trained, as far as its directory says."""
    if config.init_from is None:
        return None
    training: dict[str, Any] | None = read_model_config(_start(config)).get("training")
    return training


def _base_generation_config(config: TrainConfig) -> dict[str, Any]:
    """The settings that the model this run starts from is best used with, which hold for the run as well; but not those
    of another sampler, if the run adds a joint head."""
    if config.init_from is None:
        return {}
    directory = resolve_checkpoint(_start(config))
    described = read_model_config(directory)
    if config.network.joint_layers and not described.get("network", {}).get("joint_layers"):
        return {}
    return read_generation_config(directory, described)


def _check_finite(
    recent: list[dict[str, Tensor]], step: int, config: TrainConfig, device: torch.device, world: World
) -> None:
    """Stop at the first step whose loss or gradient is not a number, before it is saved."""
    bad = not all(bool(torch.isfinite(value).all()) for line in recent for value in line.values())
    if not any_rank(bad, world, device):
        return
    first, names = step, ["another process"]
    for back, line in enumerate(recent):
        wrong = [f"{name} = {value.item()}" for name, value in line.items() if not bool(torch.isfinite(value).all())]
        if wrong:
            first, names = step - len(recent) + 1 + back, wrong
            break
    raise FloatingPointError(
        f"not a finite number at step {first + 1}: {', '.join(names)}; {checkpoint.standing(config.out)}; "
        "try a lower --learning-rate"
    )


def _check_weights(state: Learner, done: int, config: TrainConfig, device: torch.device) -> None:
    """Loss and gradient may be finite and the weights that they led to not: those are neither judged nor saved."""
    wrong = state.non_finite()
    if not any_rank(bool(wrong), state.world, device):
        return
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    raise FloatingPointError(
        f"not a finite number after step {done}: {', '.join(wrong[:3]) or 'weights of another process'}{more}; "
        f"{checkpoint.standing(config.out)}; try a lower --learning-rate"
    )


@contextlib.contextmanager
def _explained(config: TrainConfig, world: World) -> Iterator[None]:
    """Say in words what torch says in a stack trace: no memory left, or a process that is gone."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
            advice = "use a smaller --batch-size, or a larger --grad-accum-steps, which splits it"
            reason = f"the run needs more memory than there is; {advice}; {checkpoint.standing(config.out)}"
            raise OSError(errno.ENOMEM, reason) from None
        if world.size > 1 and lost_contact(error):
            raise ConnectionError(
                f"process {world.rank} of {world.size} stops: another process died or no longer answers "
                f"({str(error).splitlines()[0][:200]}); {checkpoint.standing(config.out)}; "
                "see the first error above, then go on with --resume auto"
            ) from None
        raise


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """Tell whether SIGTERM or SIGINT has come, instead of dying of it; the second SIGINT interrupts at once."""
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and caught:
            raise KeyboardInterrupt
        caught.append(number)

    if threading.current_thread() is not threading.main_thread():  # signals are somebody else's there
        yield lambda: False
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
