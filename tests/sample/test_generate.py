"""Every sampler behind one signature: settings, logits processors and noise reach the sampler that they name."""

import functools

import pytest
import torch
from torch import Tensor

from cdlm.process import Process, masked, uniform
from cdlm.rng import categorical, seeded
from cdlm.sample import draw
from cdlm.sample.ancestral import ancestral, ancestral_with_corrector, plain_ancestral
from cdlm.sample.confidence import confidence, entropy_bound
from cdlm.sample.draw import Draw, last
from cdlm.sample.generate import generate
from cdlm.sample.logits import LogitsRows, keep_top_k, keep_top_p, temper
from cdlm.sample.naive import naive_ancestral
from cdlm.sample.order import first_hitting
from cdlm.sample.samplers import SAMPLERS
from cdlm.sample.settings import resolve
from cdlm.types import LogLaw, Tokens

from .truth import Table, V, text

SHAPED = {"temperature": 0.9, "top_k": 2, "top_p": 0.95}
PROCESSORS = (
    functools.partial(temper, start=0.9, end=None),
    functools.partial(keep_top_k, k=2),
    functools.partial(keep_top_p, p=0.95),
)
ROUTES = {
    "default": ({}, ancestral),
    "few steps": ({"steps": 4}, ancestral),
    "fp32": ({"steps": 4, "precision": "fp32"}, ancestral),
    "final step": ({"steps": 4, "final_step": "argmax"}, ancestral),
    "corrector": ({"timesteps": "cosine", "steps": 6, "corrector": "rescale", "eta": 0.6}, ancestral_with_corrector),
    "loop": ({"steps": 12, "corrector": "loop"}, ancestral_with_corrector),
    "naive": ({"steps": 4, "precision": "naive-fp32", "final_step": "sample"}, naive_ancestral),
}
MASKED_ROUTES = {
    "equal": ({"steps": 4, "step_size": "equal"}, ancestral),
    "dilated": ({"steps": 4, "order": "dilated"}, ancestral),
    "bit-reversed": ({"steps": 4, "order": "bit-reversed", "final_step": "sample"}, ancestral),
    "first-hitting": ({"order": "first-hitting"}, first_hitting),
    "probability": ({"steps": 3, "order": "probability"}, confidence),
    "margin": ({"steps": 3, "order": "margin"}, confidence),
    "entropy-bound": ({"steps": 6, "order": "entropy-bound"}, entropy_bound),
    "low bound": ({"steps": 6, "order": "entropy-bound", "entropy_bound": 0.1}, entropy_bound),
}
PROCESSES = ((masked(V), ROUTES | MASKED_ROUTES), (uniform(V), ROUTES))
CASES = [
    pytest.param(process, *route, id=f"{process.name}, {name}")
    for process, routes in PROCESSES
    for name, route in routes.items()
]


@pytest.mark.parametrize(("process", "given", "sampler"), CASES)
def test_settings_reach_their_sampler(process: Process, given: dict, sampler) -> None:
    net, rng = Table(process, 6), seeded(4, batch=64)
    x, settings = process.start(6, rng("start")), resolve({**given, **SHAPED}, process)
    states = list(generate(net, process, x, settings, rng))
    how = Draw(PROCESSORS, precision=settings.precision)
    truth = list(sampler(net, process, x, settings, rng, draw=how))
    assert [state.x.tolist() for state in states] == [state.x.tolist() for state in truth]
    assert states[-1].nfe == truth[-1].nfe
    assert (states[-1].step, states[-1].num_steps) == (truth[-1].step, truth[-1].num_steps)


def test_no_two_routes_draw_the_same_samples() -> None:
    """Unless they should: the tests above can tell the samplers apart."""
    for process, routes in PROCESSES:
        net, rng = Table(process, 6), seeded(4, batch=64)
        x = process.start(6, rng("start"))
        alike = {"fp32", "final step"} if process.absorbing else {"fp32"}  # no masks are left at NEAR_ZERO
        resolved = [resolve({**given, **SHAPED}, process) for name, (given, _) in routes.items() if name not in alike]
        samples = {str(text(generate(net, process, x, settings, rng)).tolist()) for settings in resolved}
        assert len(samples) == len(resolved)


def test_the_plain_sampler_by_name() -> None:
    for process in (masked(V), uniform(V)):
        net, rng, settings = Table(process, 3).plain, seeded(4, batch=64), resolve({"sampler": "plain", "steps": 4})
        x = process.start(3, rng("start"))
        truth = text(plain_ancestral(net, process, x, settings, rng))
        assert torch.equal(text(generate(net, process, x, settings, rng)), truth)


def test_posterior_start_and_given_are_handed_on() -> None:
    process, rng = uniform(V), seeded(4, batch=64)
    net, x = Table(process, 3), uniform(V).start(3, rng("start"))
    given = torch.tensor([True, False, False]).expand(64, -1)

    def sampled(sampler=generate, method: str = "plug-in", **chosen) -> Tensor:
        settings = resolve({"steps": 4, **chosen}, process, method)
        return text(sampler(net, process, x, settings, rng, given=given, start=0.8))

    mixture = sampled(ancestral, "mixture")
    assert torch.equal(sampled(method="mixture"), mixture)
    assert torch.equal(sampled(posterior="mixture"), mixture)
    plugged = sampled(posterior="plug-in", method="mixture")
    assert torch.equal(plugged, sampled(ancestral))
    assert not torch.equal(plugged, mixture)
    raced = sampled(precision="naive-fp32")
    assert torch.equal(raced, sampled(naive_ancestral, precision="naive-fp32"))
    for drawn in (mixture, plugged, raced):
        assert bool((drawn[:, 0] == x[:, 0]).all())


def test_the_whole_batch_runs_for_a_compiled_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "_compiled_categorical", lambda: categorical)
    process, rng = masked(V), seeded(4, batch=64)
    x = process.start(3, rng("start"))
    few, whole = Table(process, 3), Table(process, 3)
    steps = len(list(generate(few, process, x, resolve(), rng))) - 1
    assert len(list(generate(whole, process, x, resolve(), rng, compiled=True))) - 1 == steps
    assert few.rows < whole.rows == steps * 64


ALL_SAMPLERS = [{}, {"order": "margin"}, {"precision": "naive-fp32"}, {"corrector": "cap"}, {"order": "first-hitting"}]


@pytest.mark.parametrize("given", ALL_SAMPLERS, ids=str)
def test_some_tokens_are_never_drawn(given: dict) -> None:
    """`banned` takes them out of the prediction; x may still contain them."""
    process, rng = masked(V), seeded(4, batch=64)
    net, x, settings = Table(process, 3), process.start(3, rng("start")), resolve(given)
    x[:, 0] = 1
    drawn = text(generate(net, process, x, settings, rng, banned=(1,)))
    assert bool((drawn[:, 0] == 1).all())
    assert drawn[:, 1:].unique().tolist() == [0, 2]
    assert len(text(generate(net, process, x, settings, rng))[:, 1:].unique()) == V


@pytest.mark.parametrize("given", ALL_SAMPLERS, ids=str)
def test_logits_processors_of_the_caller_see_time_tokens_and_positions(given: dict) -> None:
    """One that allows position i only the token i; its rows are those of the batch before the draw."""
    process, rng = masked(V), seeded(4, batch=16)
    times: list[float] = []

    def token_of_position(logits: Tensor, rows: LogitsRows) -> Tensor:
        times.extend(rows.t.tolist())
        assert rows.x.shape == (16, 3)
        assert len(rows.t) == len(rows.index) == len(logits)
        if given.get("precision") != "naive-fp32":  # which asks for every position
            assert bool((rows.x.flatten()[rows.index] == V).all())
        return logits.masked_fill(torch.arange(V) != (rows.index % 3)[:, None], -torch.inf)

    x = process.start(3, rng("start"))
    states = generate(Table(process, 3), process, x, resolve(given), rng, logits_processors=[token_of_position])
    assert text(states).tolist() == [[0, 1, 2]] * 16
    assert max(times) <= 1
    assert min(times) >= 0


def test_first_hitting_starts_where_it_is_told() -> None:
    process, rng = masked(V), seeded(4, batch=64)
    net, x, settings = Table(process, 3), process.start(3, rng), resolve({"order": "first-hitting"})
    started = text(generate(net, process, x, settings, rng, start=0.3))
    assert torch.equal(started, text(first_hitting(net, process, x, settings, rng, start=0.3)))
    assert not torch.equal(started, text(first_hitting(net, process, x, settings, rng)))


@pytest.mark.parametrize(
    "name", [name for name, row in SAMPLERS.items() if row.process != "none" and not row.joint_head]
)
def test_every_sampler_heeds_banned_tokens_and_processors_of_the_caller(name: str) -> None:
    process = masked(5)

    def predict(x: Tokens, t: float) -> LogLaw:
        """A uniform prediction, with carry-over."""
        certain = torch.nn.functional.one_hot(x.clamp(max=4), 5).double().log()
        even = torch.full((*x.shape, 5), 0.2, dtype=torch.float64).log()
        return torch.where(process.positions(x)[..., None], even, certain)

    def forbid_three(logits: LogLaw, rows: LogitsRows) -> LogLaw:
        return logits.index_fill(-1, torch.tensor([3]), -torch.inf)

    settings = resolve({"sampler": name} | ({} if name == "first-hitting" else {"steps": 4}), process)
    x = process.start(8, seeded(0, batch=50))
    states = generate(predict, process, x, settings, seeded(1, batch=50), banned=[2], logits_processors=[forbid_three])
    assert set(last(states).x.flatten().tolist()) == {0, 1, 4}


def test_a_sampler_that_yields_nothing_is_named_as_the_mistake() -> None:
    with pytest.raises(ValueError, match="yielded no state; it must yield the initial state"):
        last(iter(()))
