"""How often the network runs: only where it is asked for a token, and no law changes for it."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from cdlm.model.denoiser import Denoiser
from cdlm.process import Process, masked, uniform
from cdlm.rng import Rng, categorical, seeded
from cdlm.sample import draw
from cdlm.sample.draw import State, last
from cdlm.sample.generate import generate
from cdlm.sample.settings import resolve
from cdlm.sample.timesteps import uniform_times

from .truth import Table, V, agrees, along, ancestor, composed, level, noise, text, tiny

ROWS, LENGTH, STEPS = 40, 9, 64
VOCAB = ROWS
"""The first token of each text is visible, and is its number: so every evaluation can be told whose it is."""


@dataclasses.dataclass
class Watch:
    """What has passed through the trunk of a network."""

    counts: Tensor
    widths: list[int]
    times: list[tuple[int, float]]
    rows: list[int | None]
    """Positions that were asked for in each sequence; None for all."""


def watched(net: Denoiser, monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch, features = Watch(torch.zeros(ROWS, dtype=torch.long), [], [], []), net.features

    def counted(x: Tensor, alpha: Tensor, rows: Tensor | None = None) -> Tensor:
        watch.counts += torch.bincount(x[:, 0].clamp(max=ROWS - 1), minlength=ROWS)
        watch.widths.append(x.shape[1])
        watch.times += list(zip(x[:, 0].tolist(), ((1 - alpha) / (1 - 1e-3)).tolist(), strict=True))
        watch.rows.append(None if rows is None else rows.shape[1])
        return features(x, alpha, rows)

    monkeypatch.setattr(net, "features", counted)
    return watch


def numbered(process: Process) -> Tensor:
    x = process.start(LENGTH, seeded(0, "start", batch=ROWS))
    x[:, 0] = torch.arange(ROWS)
    return x


def sampled(
    net, process: Process, x: Tensor, rng: Rng, given: Tensor | None = None, compiled: bool = False, **settings
) -> list[State]:
    """All states of the sampler that the settings choose."""
    resolved = resolve(settings, process)
    return list(generate(net, process, x, resolved, rng, given=given, compiled=compiled))


GIVEN = (torch.arange(LENGTH) == 0).expand(ROWS, -1)


@pytest.mark.parametrize("final_step", ["none", "sample", "argmax"])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("process", [masked(VOCAB), uniform(VOCAB)], ids=["masked", "uniform"])
def test_a_text_runs_as_often_as_it_says(
    process: Process, corrected: bool, final_step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, rng = tiny(process), seeded(1, batch=ROWS)
    watch = watched(net, monkeypatch)
    settings = {
        "steps": STEPS,
        "final_step": final_step,
        **({"corrector": "rescale", "eta": 0.02} if corrected else {}),
    }
    with along(uniform_times(STEPS, end=0.0 if final_step == "none" else 0.01)):
        state = last(sampled(net, process, numbered(process), rng, GIVEN, **settings))
    assert watch.counts.tolist() == state.nfe
    assert 0 < min(state.nfe) < max(state.nfe) < STEPS
    if process.name == "masked" and not corrected:
        assert max(state.nfe) <= LENGTH - 1
    assert set(watch.widths) == {LENGTH}


def test_other_orders_run_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    process, x, rng = masked(VOCAB), numbered(masked(VOCAB)), seeded(1, batch=ROWS)
    x[::2, 5:7] = 3
    for settings in (
        {"steps": STEPS, "order": "bit-reversed"},
        {"steps": 4, "order": "dilated"},
        {"steps": STEPS, "step_size": "equal"},
        {"order": "first-hitting"},
        {"steps": STEPS, "order": "margin"},
        {"steps": STEPS, "order": "entropy-bound", "entropy_bound": 5.0},
    ):
        net = tiny(process)
        with monkeypatch.context() as patch:
            watch = watched(net, patch)
            state = last(sampled(net, process, x, rng, **settings))
        assert watch.counts.tolist() == state.nfe
        assert max(state.nfe) <= LENGTH - 1


def test_whole_batches_run_in_every_pass_but_are_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a compiled network does; here without the compiler."""
    monkeypatch.setattr(draw, "_compiled_categorical", lambda: categorical)
    process, rng = masked(VOCAB), seeded(1, batch=ROWS)
    net = tiny(process)
    watch = watched(net, monkeypatch)
    states = sampled(net, process, numbered(process), rng, compiled=True, steps=STEPS)
    assert watch.counts.tolist() == [len(states) - 1] * ROWS
    assert max(states[-1].nfe) == len(states) - 1 > min(states[-1].nfe)


@pytest.mark.parametrize("steps", [4, 64, 1000])
def test_masked_texts_run_once_for_each_hop_that_reveals_something(steps: int) -> None:
    """l levels fall into N hops: N (1 - (1 - 1/N)^l) of them are hit on average, and at most l."""
    process, n, length = masked(V), 2000, 8
    x, net = torch.full((n, length), V), Table(process, length)
    state = last(sampled(net, process, x, seeded(0, batch=n), steps=steps))
    runs = torch.tensor(state.nfe, dtype=torch.float64)
    assert int(runs.sum()) == net.rows
    assert int(runs.max()) <= min(length, steps)
    expected = steps * (1 - (1 - 1 / steps) ** length)
    assert abs(float(runs.mean()) - expected) < 6 * float(runs.std()) / math.sqrt(n)


def test_uniform_texts_run_once_for_each_hop_in_which_a_position_may_leave() -> None:
    """A position may leave its token with (1 - a_ts) / (1 - a_t): where none may, the text does not run."""
    process, n, length, steps = uniform(V), 2000, 4, 64
    net, rng = Table(process, length), seeded(0, batch=n)
    state = last(sampled(net, process, process.start(length, rng("start")), rng, steps=steps))
    runs = torch.tensor(state.nfe, dtype=torch.float64)
    assert int(runs.sum()) == net.rows
    alphas = [level(process, 1 - hop / steps) for hop in range(steps + 1)]
    most = [(1 - a_t / a_s) / (1 - a_t) for a_t, a_s in itertools.pairwise(alphas)]
    expected = sum(1 - (1 - p) ** length for p in most)
    assert expected < steps / 2
    assert abs(float(runs.mean()) - expected) < 6 * float(runs.std()) / math.sqrt(n)


@pytest.mark.parametrize("process", [masked(V), uniform(V)], ids=["masked", "uniform"])
def test_skipping_changes_no_law(process: Process) -> None:
    """32 hops, most of them skipped."""
    net, n = Table(process), 10_000
    rng = seeded(7, batch=n)
    state = last(sampled(net, process, process.start(2, rng("start")), rng, steps=32))
    law = composed(noise(process), process, 2, ancestor(process, net.law), uniform_times(32))
    assert agrees(state.x, law, process.states)
    assert net.rows == sum(state.nfe) < n * 16


@pytest.mark.parametrize("final_step", ["sample", "argmax"])
def test_a_final_step_runs_only_where_masks_are_left(final_step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 masks, each left over with probability 0.2; the time of an evaluation tells the final step apart."""
    process = masked(VOCAB)
    net = tiny(process)
    watch = watched(net, monkeypatch)
    with along(uniform_times(8, end=0.2)):
        states = sampled(net, process, numbered(process), seeded(1, batch=ROWS), steps=8, final_step=final_step)
    ends = [row for row, t in watch.times if abs(t - 0.2) < 1e-9]
    assert len(ends) == len(set(ends))
    assert 0 < len(ends) < ROWS
    expected = ROWS * (1 - 0.8 ** (LENGTH - 1))
    assert abs(len(ends) - expected) < 5 * math.sqrt(ROWS * 0.8 ** (LENGTH - 1))
    if final_step == "argmax":
        left = (states[-2].x == VOCAB).any(-1).nonzero()[:, 0].tolist()
        assert sorted(ends) == left
        more = [after - before for before, after in zip(states[-2].nfe, states[-1].nfe, strict=True)]
        assert [row for row, one in enumerate(more) if one] == left


BLIND = {
    "ancestral": {"steps": 5},
    "final step": {"steps": 5, "final_step": "argmax"},
    "remdm": {"steps": 8, "corrector": "loop", "eta": 0.3},
    "dilated": {"steps": 5, "order": "dilated"},
    "first hitting": {"order": "first-hitting"},
    "confidence": {"steps": 5, "order": "margin"},
}


@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("settings", BLIND.values(), ids=BLIND)
def test_one_masked_position_speaks_for_all(settings: dict, conditioned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass over a blank runs on a single position, and draws what the whole text would have."""
    process = masked(7)
    net, x, rng = tiny(process, time_conditioning=conditioned), torch.full((16, 12), 7), seeded(2, batch=16)
    assert net.position_invariant
    with monkeypatch.context() as patch:
        watch = watched(net, patch)
        short = text(sampled(net, process, x, rng, **settings))
        assert watch.widths[0] == 1
        assert set(watch.widths[1:]) == {12}
    monkeypatch.setattr(Denoiser, "position_invariant", False)
    with monkeypatch.context() as patch:
        watch = watched(net, patch)
        assert torch.equal(text(sampled(net, process, x, rng, **settings)), short)
        assert set(watch.widths) == {12}


@pytest.mark.parametrize("process", [masked(7), uniform(7)], ids=["masked", "uniform"])
def test_a_few_positions_of_a_long_text_are_all_that_is_computed(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block runs where a token is drawn, and draws what it would have drawn anyway."""
    net, rng = tiny(process, time_conditioning=True), seeded(2, batch=16)
    x = process.start(40, rng("start"))
    x[:, 0] = 0
    with monkeypatch.context() as patch:
        watch = watched(net, patch)
        short = text(sampled(net, process, x, rng, steps=40))
        assert any(rows is not None and rows < 40 for rows in watch.rows)
    features = net.features

    def whole(x: Tensor, alpha: Tensor, rows: Tensor | None = None) -> Tensor:
        found = features(x, alpha)
        return found if rows is None else found[torch.arange(len(x))[:, None], rows]

    monkeypatch.setattr(net, "features", whole)
    assert torch.equal(text(sampled(net, process, x, rng, steps=40)), short)


def test_a_network_that_knows_its_positions_is_not_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    process = masked(7)
    net, x = tiny(process, position_embeddings=12), torch.full((16, 12), 7)
    law = net(x).exp().detach()
    assert float((law - law[:, :1]).abs().max()) > 0.01
    watch = watched(net, monkeypatch)
    text(sampled(net, process, x, seeded(2, batch=16), steps=5))
    assert set(watch.widths) == {12}


def test_a_single_visible_token_ends_the_shortcut(monkeypatch: pytest.MonkeyPatch) -> None:
    process, x = masked(7), torch.full((4, 12), 7)
    x[3, 5] = 0
    net = tiny(process)
    watch = watched(net, monkeypatch)
    text(sampled(net, process, x, seeded(2, batch=4), steps=5))
    assert set(watch.widths) == {12}
