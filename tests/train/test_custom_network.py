"""A network of the user's own: every method trains it, every sampler samples it, and it is never taken for a `DiT`."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import cdlm
from cdlm.methods import METHODS
from cdlm.metrics.likelihood import nelbo
from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.model.ema import frozen_copy, update
from cdlm.model.pretrained import LayoutError, load_denoiser, save_denoiser
from cdlm.process import Cosine, Process, masked, uniform
from cdlm.rng import seeded
from cdlm.sample.draw import last
from cdlm.sample.generate import generate
from cdlm.sample.samplers import SAMPLERS
from cdlm.sample.settings import resolve
from cdlm.train import train
from cdlm.train.config import TrainConfig
from cdlm.types import HiddenStatesNetwork, LogitsNetwork

ROOT = Path(__file__).parents[2]
VOCAB, LENGTH, BYTES = 9, 12, 257
FIRST = {"sdtt": "mdlm", "duo-dcd": "udlm", "mcdlm-guided": "mdlm"}
SPECS = {"duo": "duo:curriculum=0"}
"""The curriculum of DUO feeds mixtures of tokens, which a network that takes token ids cannot read."""

ANY_NETWORK = [name for name, method in METHODS.items() if not method.joint_head]


class RecurrentNetwork(nn.Module):
    """Twenty lines that anybody could have written: it knows nothing of cdlm."""

    def __init__(self, num_ids: int, num_tokens: int, causal: bool = False, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_ids, width)
        self.time = nn.Linear(1, width)
        self.mixer = nn.GRU(width, width, batch_first=True, bidirectional=not causal)
        self.output = nn.Linear(width if causal else 2 * width, num_tokens)

    def forward(self, ids: Tensor, t: Tensor) -> Tensor:
        hidden, _ = self.mixer(self.embedding(ids) + self.time(t[:, None])[:, None])
        return self.output(hidden)


class SplitNetwork(RecurrentNetwork):
    """The same, with hidden states and a head."""

    @property
    def head(self) -> nn.Linear:
        return self.output

    def hidden_states(self, ids: Tensor, t: Tensor) -> Tensor:
        return self.mixer(self.embedding(ids) + self.time(t[:, None])[:, None])[0]


class Wrapped(nn.Module):
    """A `DiT` in the clothes of a custom network."""

    def __init__(self, denoiser: Denoiser) -> None:
        super().__init__()
        self.denoiser = denoiser

    def forward(self, ids: Tensor, t: Tensor) -> Tensor:
        process = self.denoiser.process
        alpha = torch.ones(len(t), dtype=torch.float64) if process is None else process.noise.alpha(t.double())
        return self.denoiser.logits(self.denoiser.features(ids, alpha))


def network_for(process: Process | None, vocab: int, kind: type[RecurrentNetwork] = RecurrentNetwork) -> nn.Module:
    torch.manual_seed(1)
    return kind(vocab if process is None else process.states, vocab, causal=process is None)


def data(step: int = 0, rows: int = 8) -> Tensor:
    return torch.randint(VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(step))


def choices(method: str) -> dict[str, float]:
    return {"curriculum": 0.0} if method == "duo" else {}


def loss_and_gradients(denoiser: Denoiser, method: str, plain: bool = False) -> tuple[float, list[Tensor]]:
    objective = METHODS[method](denoiser.process, total=20, **choices(method))
    target = None
    if objective.network is not None:  # other weights than the student's, or the loss of a distillation is zero
        target = frozen_copy(denoiser)
        for parameter in target.parameters():
            parameter.mul_(1.5)
    denoiser.zero_grad()
    loss = objective.loss(denoiser, target, data(), 7, seeded(0, "train", 7, batch=8), plain=plain)
    loss.total.backward()
    return loss.total.item(), [parameter.grad.clone() for parameter in denoiser.parameters()]


def sampled(denoiser: Denoiser, settings: dict[str, object], rows: int = 4) -> list[list[int]]:
    rng, process = seeded(0, "sample", batch=rows), denoiser.process
    x = torch.zeros(rows, LENGTH, dtype=torch.long) if process is None else process.start(LENGTH, rng)
    return last(generate(denoiser, process, x, resolve(settings, process), rng)).x.tolist()


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("custom")


def custom_run(recipe: Callable[..., TrainConfig], bases: Path, method: str) -> Path:
    """A run of a custom network of 4 steps, started from another one where the method distils."""
    out = bases / method
    if not out.exists():
        start = {"init_from": custom_run(recipe, bases, FIRST[method])} if method in FIRST else {}
        quick = {"steps": 4, "batch_size": 4, "seq_length": 16, "log_every": 2, "save_every": 4}
        config = recipe(method, out=out, method=SPECS.get(method, method), **quick, **start)
        train(config, network=network_for(METHODS[method].default_process(BYTES), BYTES))
    return out


@pytest.mark.parametrize("method", ANY_NETWORK)
def test_every_method_trains_and_samples_it(method: str, recipe, bases: Path) -> None:
    run = custom_run(recipe, bases, method)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [("train", 2), ("train", 4), ("valid", 4)]
    process = METHODS[method].default_process(BYTES)
    pipe = cdlm.load(run, device="cpu", network=network_for(process, BYTES))
    assert len(pipe.sample(num_samples=2, **({} if process is None else {"steps": 2}))) == 2
    assert 0 < nelbo(pipe.denoiser, [(0, torch.randint(BYTES, (4, 16)))]) < 20
    assert pipe.denoiser.custom_network == "RecurrentNetwork"


@pytest.mark.parametrize(
    "method", [method for method in ANY_NETWORK if method not in ("sdtt", "duo-dcd", "mcdlm-guided")]
)
def test_it_learns(method: str) -> None:
    """Every method that starts from nothing lowers the NELBO of a sequence that repeats."""
    process = METHODS[method].default_process(VOCAB)
    denoiser = Denoiser(network_for(process, VOCAB), process, VOCAB)
    objective = METHODS[method](process, total=10, **choices(method))
    target = frozen_copy(denoiser) if objective.network is not None else None
    optimizer = torch.optim.Adam(denoiser.parameters(), lr=0.04)
    x0 = torch.arange(LENGTH).expand(8, LENGTH) % 3
    before = nelbo(denoiser, [(0, x0)])
    for step in range(10):
        objective.loss(denoiser, target, x0, step, seeded(0, "train", step, batch=8)).total.backward()
        optimizer.step()
        optimizer.zero_grad()
        if target is not None:
            update(target, denoiser, objective.lam(step))
    assert nelbo(denoiser, [(0, x0)]) < 0.8 * before


@pytest.mark.parametrize(("name", "process"), [(n, p) for n in SAMPLERS for p in (masked(VOCAB), uniform(VOCAB), None)])
def test_every_sampler_samples_it(name: str, process: Process | None) -> None:
    if not SAMPLERS[name].fits(process):
        with pytest.raises(ValueError, match=name):
            resolve({"sampler": name}, process)
        return
    settings = {"steps": 4} if "steps" in SAMPLERS[name].settings else {}
    settings |= {"order": {"confidence": "margin"}[name]} if name == "confidence" else {}
    settings |= {"corrector": "constant", "eta": 0.2} if name == "corrector" else {}
    plain, split = (
        sampled(Denoiser(network_for(process, VOCAB, kind), process, VOCAB), {"sampler": name, **settings})
        for kind in (RecurrentNetwork, SplitNetwork)
    )
    assert plain == split
    assert len({tuple(row) for row in plain}) > 1
    assert all(0 <= token < VOCAB for row in plain for token in row)


@pytest.mark.parametrize("method", ANY_NETWORK)
def test_the_fast_path_is_the_slow_one(method: str) -> None:
    """Closed forms over hidden states, autograd over logits, and the definition: one loss, one gradient."""
    process = METHODS[method].default_process(VOCAB)
    slow, fast = (
        Denoiser(network_for(process, VOCAB, kind).double(), process, VOCAB)
        for kind in (RecurrentNetwork, SplitNetwork)
    )
    assert (slow.linear_head, fast.linear_head is None) == (None, False)
    value, gradients = loss_and_gradients(slow, method)
    assert any(bool(gradient.abs().max() > 1e-4) for gradient in gradients)
    for denoiser, plain in ((fast, False), (fast, True), (slow, True)):
        other, others = loss_and_gradients(denoiser, method, plain)
        assert other == pytest.approx(value, rel=1e-9)
        torch.testing.assert_close(others, gradients, rtol=1e-7, atol=1e-10)
    assert nelbo(slow, [(0, data())]) == pytest.approx(nelbo(fast, [(0, data())]), rel=1e-12)


@pytest.mark.parametrize("method", ["ar", "mdlm", "sdtt", "ucdlm"])
def test_a_dit_as_a_custom_network_is_itself(method: str) -> None:
    """The time that a custom network gets is the one at which the process has the noise level that a `DiT` gets."""
    process = METHODS[method].default_process(VOCAB)
    process = process and dataclasses.replace(process, noise=Cosine())
    torch.manual_seed(0)
    shape = NetworkConfig(hidden_size=16, num_layers=2, num_heads=2, cond_dim=8, dropout=0.0, causal=process is None,
                          time_conditioning=process is not None)  # fmt: skip
    native = Denoiser(shape, process, VOCAB)
    for parameter in native.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    native = native.double()
    custom = Denoiser(Wrapped(native), process, VOCAB)
    value, gradients = loss_and_gradients(native, method)
    other, others = loss_and_gradients(custom, method)
    assert other == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(others, gradients, rtol=1e-4, atol=1e-7)
    steps = {} if process is None else {"steps": 5}
    assert sampled(custom, steps) == sampled(native, steps)
    assert sampled(custom, {**steps, "temperature": 0.5}) == sampled(native, {**steps, "temperature": 0.5})
    assert nelbo(custom, [(0, data())]) == pytest.approx(nelbo(native, [(0, data())]), rel=1e-6)


@pytest.mark.parametrize("kind", [RecurrentNetwork, SplitNetwork])
def test_a_column_for_the_mask_is_ignored(kind: type[RecurrentNetwork]) -> None:
    torch.manual_seed(2)
    wide, narrow = kind(VOCAB + 1, VOCAB + 1), kind(VOCAB + 1, VOCAB)
    weights = wide.state_dict()
    narrow.load_state_dict({name: w[:VOCAB] if name.startswith("output.") else w for name, w in weights.items()})
    with torch.no_grad():
        wide.output.bias[VOCAB] = 50.0
    with_column, without = Denoiser(wide.double(), masked(VOCAB)), Denoiser(narrow.double(), masked(VOCAB))
    value, gradients = loss_and_gradients(with_column, "mcdlm")
    other, others = loss_and_gradients(without, "mcdlm")
    assert value == pytest.approx(other, rel=1e-12)
    for gradient, narrower in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient[: len(narrower)], narrower)
    assert sampled(with_column, {"steps": 4}) == sampled(without, {"steps": 4})
    assert torch.equal(with_column(data(), 0.5), without(data(), 0.5))


def test_known_tokens_are_carried_over_and_times_are_in_the_unit_interval() -> None:
    seen = []

    class Watched(RecurrentNetwork):
        def forward(self, ids: Tensor, t: Tensor) -> Tensor:
            seen.append(t)
            return super().forward(ids, t)

    denoiser = Denoiser(Watched(VOCAB + 1, VOCAB), masked(VOCAB))
    x = data()
    x[:, ::2] = VOCAB
    found = denoiser(x, 0.25)
    assert torch.equal(found[:, 1::2].argmax(-1), x[:, 1::2])
    assert torch.equal(found[:, 1::2].exp().sum(-1), torch.ones(8, 6))
    torch.testing.assert_close(found[:, ::2].exp().sum(-1), torch.ones(8, 6))
    denoiser(x, 0.0), denoiser(x, 1.0)
    assert [t.tolist() for t in seen] == [[0.25] * 8, [0.0] * 8, [1.0] * 8]
    assert all(t.dtype == torch.float32 for t in seen)
    causal = Denoiser(Watched(VOCAB, VOCAB, causal=True), vocab=VOCAB)
    causal(data())
    assert seen[-1].tolist() == [0.0] * 8


def test_networks_are_what_the_protocols_say() -> None:
    plain, split = RecurrentNetwork(3, 3), SplitNetwork(3, 3)
    assert isinstance(plain, LogitsNetwork)
    assert isinstance(split, HiddenStatesNetwork)
    assert not isinstance(plain, HiddenStatesNetwork)


class Returning(nn.Module):
    """A network that returns whatever it was given."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def forward(self, ids: Tensor, t: Tensor) -> object:
        return self.value


class Headed(RecurrentNetwork):
    def __init__(self, head: nn.Module) -> None:
        super().__init__(VOCAB + 1, VOCAB)
        self.head = head

    def hidden_states(self, ids: Tensor, t: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, 5)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (Returning(torch.zeros(8, LENGTH, VOCAB + 2)), r"logits of shape \(8, 12, 11\).*\(8, 12, 9\) or \(8, 12, 10\)"),
        (Returning(torch.zeros(8, LENGTH - 1, VOCAB)), r"logits of shape \(8, 11, 9\)"),
        (Returning(torch.zeros(8 * LENGTH, VOCAB)), r"logits of shape \(96, 9\)"),
        (Returning((torch.zeros(8, LENGTH, VOCAB),)), "logits as a tuple"),
        (Headed(nn.Sequential(nn.Linear(5, VOCAB))), "must be a torch.nn.Linear .got Sequential."),
        (Headed(nn.Linear(5, 4)), r"must have 9 or 10 outputs.*\(got 4\)"),
        (Headed(nn.Linear(6, VOCAB)), r"hidden states of shape \(8, 12, 5\).*\(8, 12, 6\)"),
    ],
)
def test_networks_that_do_not_fit_are_refused(network: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Denoiser(network, masked(VOCAB))(data(), 0.5)


def test_what_a_custom_network_cannot_do_is_one_sentence() -> None:
    denoiser = Denoiser(network_for(uniform(VOCAB), VOCAB), uniform(VOCAB))
    with pytest.raises(ValueError, match="duo:curriculum=0"):
        METHODS["duo"](denoiser.process, total=4).loss(denoiser, None, data(), 0, seeded(0, "train", 0, batch=8))
    with pytest.raises(ValueError, match=r"a DiT \(got RecurrentNetwork\)"):
        denoiser.config  # noqa: B018
    with pytest.raises(ValueError, match="not another Denoiser"):
        Denoiser(denoiser, uniform(VOCAB))
    with pytest.raises(ValueError, match="give `vocab`"):
        Denoiser(RecurrentNetwork(VOCAB, VOCAB, causal=True))


class Awkward(RecurrentNetwork):
    """Dropout, running statistics, a frozen weight, an unused one, and one weight with two names."""

    def __init__(self, num_ids: int, num_tokens: int) -> None:
        super().__init__(num_ids, num_tokens)
        self.dropout, self.norm, self.unused = nn.Dropout(0.2), nn.BatchNorm1d(32), nn.Linear(3, 3)
        self.again = self.output
        self.embedding.requires_grad_(False)

    def forward(self, ids: Tensor, t: Tensor) -> Tensor:
        hidden, _ = self.mixer(self.embedding(ids) + self.time(t[:, None])[:, None])
        hidden = self.norm(self.dropout(hidden).transpose(1, 2)).transpose(1, 2)
        return self.again(hidden)


def awkward() -> Awkward:
    torch.manual_seed(3)
    return Awkward(BYTES + 1, BYTES)


def test_it_resumes_to_the_same_bits(recipe, tmp_path: Path) -> None:
    quick = {"steps": 8, "batch_size": 4, "seq_length": 16, "ema_decay": 0.9, "reference_steps": 8}
    config = recipe("mcdlm", **quick, save_every=4, keep_checkpoints=3, valid_every=4, valid_samples=1)
    whole = train(dataclasses.replace(config, out=tmp_path / "whole"), network=awkward())
    stopped = train(dataclasses.replace(config, out=tmp_path / "stopped"), network=awkward())
    for path in stopped.iterdir():
        path.unlink()
    stopped.rmdir()
    network = awkward()
    nn.init.ones_(network.output.weight)  # the weights of the checkpoint count, not these
    again = train(dataclasses.replace(config, out=tmp_path / "stopped"), "auto", network)
    for part in ("model", "online", "target", "optimizer"):
        one, other = (load_file(end / f"{part}.safetensors") for end in (whole, again))
        assert one.keys() == other.keys()
        assert all(one[name].equal(other[name]) for name in one), part
    online = load_file(whole / "online.safetensors")
    assert torch.equal(online["backbone.network.embedding.weight"], awkward().embedding.weight)
    assert torch.equal(online["backbone.network.output.weight"], network.output.weight)  # trained in place
    kept = load_file(whole / "model.safetensors")
    assert torch.equal(kept["backbone.network.norm.running_mean"], online["backbone.network.norm.running_mean"])
    assert not torch.equal(kept["backbone.network.output.weight"], online["backbone.network.output.weight"])
    denoiser = load_denoiser(whole, network=awkward())
    saved = load_denoiser(save_denoiser(denoiser, tmp_path / "saved"), network=awkward())
    x = torch.randint(BYTES, (2, 16))
    assert torch.equal(saved(x, 0.5), denoiser(x, 0.5))


def test_a_checkpoint_is_opened_with_its_network_only(recipe, bases: Path, tmp_path: Path) -> None:
    run = custom_run(recipe, bases, "mdlm")
    with pytest.raises(LayoutError, match=r"custom network, RecurrentNetwork; .*cdlm.load\(.*network=RecurrentNetwork"):
        cdlm.load(run)
    with pytest.raises(LayoutError, match="the RecurrentNetwork that was given has"):
        cdlm.load(run, network=RecurrentNetwork(BYTES + 1, BYTES, width=8))
    with pytest.raises(LayoutError, match=r"tensor 'backbone.network.norm.weight' is missing"):
        cdlm.load(run, network=awkward())
    with pytest.raises(LayoutError, match="a network of cdlm, not of a custom one"):
        cdlm.load("mdlm", network=network_for(masked(BYTES), BYTES))
    config = recipe("mdlm", out=run)
    with pytest.raises(ValueError, match="is of a custom network, RecurrentNetwork; train it from Python"):
        train(config, "force")
    with pytest.raises(ValueError, match=r"another network: its tensor 'backbone.network.\w+.weight' has the shape"):
        train(config, "force", network=RecurrentNetwork(BYTES + 1, BYTES, width=8))
    with pytest.raises(ValueError, match="is of a custom network, RecurrentNetwork"):
        train(recipe("sdtt", out=tmp_path / "a", init_from=run))
    pipe = cdlm.load(run, device="cpu", network=network_for(masked(BYTES), BYTES))
    with pytest.raises(ValueError, match="only a network of cdlm can be exported"):
        pipe.save_pretrained(tmp_path / "exported")
    with pytest.raises(ValueError, match="a DiT"):
        cdlm.load(run, device="cpu", compile=True, network=network_for(masked(BYTES), BYTES))
    for words in (["sample", str(run)], ["train", str(run / "run.json")]):
        command = [sys.executable, "-m", "cdlm", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert "custom network, RecurrentNetwork" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "muon"}, "use adamw"),
        ({"compile": True}, "set compile=False"),
        ({"method": "joint"}, "part of the network of cdlm"),
    ],
)
def test_settings_for_the_network_of_the_package_are_refused(changes: dict[str, object], words: str, recipe) -> None:
    with pytest.raises(ValueError, match=words):
        train(recipe("mdlm", **changes), network=network_for(masked(BYTES), BYTES))


class Inconsistent(SplitNetwork):
    """Its forward does more than its head."""

    def forward(self, ids: Tensor, t: Tensor) -> Tensor:
        return 2 * super().forward(ids, t)


@pytest.mark.parametrize(
    ("method", "network", "words"),
    [
        ("mdlm", lambda: Inconsistent(BYTES + 1, BYTES), r"forward\(ids, t\) of Inconsistent is not head"),
        ("ar", lambda: RecurrentNetwork(BYTES, BYTES), "RecurrentNetwork is not causal"),
        ("mdlm", lambda: RecurrentNetwork(BYTES, BYTES), "need 258 rows, as the mask is the last id"),
    ],
)
def test_a_network_that_breaks_its_promises_is_refused_before_training(
    method: str, network: Callable[[], nn.Module], words: str, recipe
) -> None:
    with pytest.raises(ValueError, match=words):
        train(recipe(method, network=NetworkConfig(causal=method == "ar")), network=network())
