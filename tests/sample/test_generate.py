"""Every sampler behind one signature: what contradicts itself is refused, and what is left goes to its sampler."""

import importlib.util
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

import cdlm
from cdlm.process import Process, masked, uniform, unigram
from cdlm.rng import categorical, seeded
from cdlm.sample import plan as passes
from cdlm.sample.ancestral import ancestral
from cdlm.sample.confidence import confident
from cdlm.sample.corrector import Corrector
from cdlm.sample.generate import generate, timesteps
from cdlm.sample.logits import Shape
from cdlm.sample.naive import race
from cdlm.sample.order import first_hitting, ordered
from cdlm.sample.plan import Drawing
from cdlm.sample.settings import Sampling
from cdlm.sample.timesteps import NEAR_ZERO, cosine_times, custom_times, loop_times, uniform_times

from .truth import PRIORS, Table, V, text

NAN = float("nan")
ORDERS = get_args(get_type_hints(Sampling)["order"])
"""As `Sampling` offers them; the first, random, is no order of masks."""
REFUSED = [
    ({"steps": 0}, "--steps must be at least 1; got 0"),
    ({"steps": -3}, "--steps must be at least 1; got -3"),
    ({"grid": "linear"}, "--grid is uniform, cosine, or times from 1 to 0 such as 1,0.6,0.2,0; got 'linear'"),
    ({"grid": ""}, "--grid is uniform, cosine, or times"),
    ({"grid": "1,0.5"}, "falls from 1 to 0"),
    ({"grid": "1,0.2,0.5,0"}, "falls from 1 to 0"),
    ({"grid": "1,nan,0"}, "falls from 1 to 0"),
    ({"grid": "1,0.5,0", "steps": 3}, "has 2 steps; leave out --steps 3"),
    ({"order": "backwards"}, f"--order is one of {', '.join(ORDERS)}; got 'backwards'"),
    ({"order": "dilated", "bound": 0.5}, "goes with --order entropy-bound"),
    ({"bound": 0.5}, "goes with --order entropy-bound"),
    ({"order": "entropy-bound", "bound": -0.1}, "--bound is at least 0"),
    ({"order": "entropy-bound", "bound": NAN}, "--bound is at least 0"),
    ({"tail": "greedy"}, "--tail is one of none, sample, argmax; got 'greedy'"),
    ({"corrector": "psi"}, "--corrector is one of none, constant, cap, rescale, loop; got 'psi'"),
    ({"eta": 0.1}, "add --corrector rescale, or leave it out"),
    ({"corrector": "cap", "eta": 0.0}, r"lies in \(0, 1\]; got 0"),
    ({"corrector": "cap", "eta": 1.5}, r"lies in \(0, 1\]; got 1.5"),
    ({"corrector": "cap", "eta": NAN}, r"lies in \(0, 1\]"),
    ({"corrector": "cap", "order": "dilated"}, "does not go with"),
    ({"corrector": "constant", "order": "first-hitting"}, "does not go with"),
    ({"corrector": "rescale", "order": "margin"}, "does not go with"),
    ({"corrector": "cap", "precision": "naive-fp32"}, "does not go with"),
    ({"corrector": "loop", "grid": "cosine"}, "brings its own grid; leave out --grid"),
    ({"corrector": "loop", "grid": "1,0.5,0"}, "brings its own grid; leave out --grid"),
    ({"corrector": "loop", "steps": 3}, "at least 4 steps; got 3"),
    ({"order": "first-hitting", "steps": 4}, "leave out --steps, --grid and --tail"),
    ({"order": "first-hitting", "grid": "cosine"}, "leave out --steps, --grid and --tail"),
    ({"order": "first-hitting", "tail": "sample"}, "leave out --steps, --grid and --tail"),
    ({"order": "probability", "tail": "argmax"}, "leaves no mask for a tail; leave out --tail"),
    ({"order": "margin", "tail": "sample"}, "leaves no mask for a tail; leave out --tail"),
    ({"order": "entropy-bound", "tail": "argmax"}, "leaves no mask for a tail; leave out --tail"),
    ({"precision": "naive-fp32", "order": "dilated"}, "--precision naive-fp32"),
    ({"precision": "naive-fp32", "posterior": "mixture"}, "--precision naive-fp32"),
    ({"precision": "fp16"}, "--precision is one of fp64, fp32, naive-fp32; got 'fp16'"),
    ({"posterior": "exact"}, "--posterior is one of auto, plug-in, mixture; got 'exact'"),
    ({"temperature": 0.0}, "use top-k 1"),
    ({"temperature": NAN}, "above 0 and finite"),
    ({"block": -1}, "--block must be at least 1, or 0 for none; got -1"),
    ({"top_k": -1}, "0 to keep every token"),
    ({"top_p": 0.0}, "1 keeps every token"),
    ({"top_p": 1.5}, "1 keeps every token"),
]
ACCEPTED = [
    {},
    {"steps": 1},
    {"grid": "cosine", "steps": 8, "tail": "argmax"},
    {"grid": "1,0.5,0"},
    {"grid": "1, 0.5, 0", "steps": 2},
    {"order": "dilated", "tail": "sample"},
    {"order": "bit-reversed", "tail": "argmax", "grid": "cosine"},
    {"order": "first-hitting", "top_k": 3},
    {"order": "entropy-bound"},
    {"order": "entropy-bound", "bound": 0.0},
    {"order": "probability", "grid": "1,0.3,0"},
    {"corrector": "constant", "grid": "cosine", "tail": "argmax"},
    {"corrector": "cap", "eta": 1.0, "precision": "fp32"},
    {"corrector": "loop", "steps": 4},
    {"precision": "naive-fp32", "tail": "argmax", "grid": "cosine"},
    {"temperature": 0.5, "top_k": 5, "top_p": 0.9},
]


@pytest.fixture(scope="module")
def plain():
    """`Sampling` without the type checks of these tests, which would catch an unknown word before it does."""
    name, path = "generate_as_users_see_it", Path(cdlm.__file__).parent / "sample" / "generate.py"
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.Sampling
    del sys.modules[name]


@pytest.mark.parametrize(("settings", "advice"), REFUSED, ids=[str(case[0]) for case in REFUSED])
def test_what_contradicts_itself_is_refused_with_advice(settings: dict, advice: str, plain) -> None:
    with pytest.raises(ValueError, match=advice):
        plain(**settings)


@pytest.mark.parametrize("settings", ACCEPTED, ids=str)
def test_what_fits_together_is_accepted_and_runs(settings: dict) -> None:
    sampling, process = Sampling(**settings), masked(V)
    sampling.check(process)
    drawn = text(generate(Table(process, 4), process, torch.full((3, 4), V), sampling, seeded(0, batch=3)))
    assert bool((drawn < V).all())


@pytest.mark.parametrize("order", ORDERS[1:])
@pytest.mark.parametrize("process", [uniform(V), unigram(torch.tensor([0.5, 0.3, 0.2])), PRIORS["mask and unigram"]])
def test_orders_need_masks(process: Process, order: str) -> None:
    sampling = Sampling(order=order)
    sampling.check(masked(V))
    with pytest.raises(ValueError, match=f"--order {order} reveals masks.*its process is {process.name}.*order random"):
        sampling.check(process)
    with pytest.raises(ValueError, match="reveals masks"):
        generate(Table(process), process, process.start(2, seeded(0, batch=1)), sampling, seeded(0, batch=1))


def test_everything_else_fits_any_process() -> None:
    for settings in ({"corrector": "cap"}, {"tail": "argmax"}, {"precision": "naive-fp32"}):
        for process in PRIORS.values():
            Sampling(**settings).check(process)
    Sampling(posterior="mixture").check(uniform(V))
    with pytest.raises(ValueError, match="under masking plug-in and mixture are the same"):
        Sampling(posterior="mixture").check(masked(V))


def test_an_autoregressive_model_has_few_settings() -> None:
    Sampling(temperature=0.7, top_k=5, top_p=0.9, precision="naive-fp32").check(None)
    for settings, flag in (
        ({"order": "dilated"}, "--order"),
        ({"grid": "cosine"}, "--grid"),
        ({"tail": "argmax"}, "--tail"),
        ({"corrector": "cap"}, "--corrector"),
        ({"posterior": "mixture"}, "--posterior"),
        ({"block": 8}, "--block"),
        ({"steps": 8}, "--steps"),
    ):
        with pytest.raises(ValueError, match=f"one token after another and has no {flag}; leave it out"):
            Sampling(**settings).check(None)


def test_the_grid_of_the_settings() -> None:
    """32 steps unless told otherwise; above 0 before a tail; from wherever one starts."""
    assert torch.equal(timesteps(Sampling()), uniform_times(32))
    assert torch.equal(timesteps(Sampling(steps=5, tail="sample")), uniform_times(5, end=NEAR_ZERO))
    assert torch.equal(timesteps(Sampling(steps=5, grid="cosine", tail="argmax"), 0.4), cosine_times(5, 0.4, NEAR_ZERO))
    assert torch.equal(timesteps(Sampling(grid="1,0.25,0"), 0.8), custom_times([1.0, 0.25, 0.0], 0.8))
    assert torch.equal(timesteps(Sampling(corrector="loop", steps=8), 0.9), loop_times(8, 0.9))
    assert Sampling(grid="1,0.25,0").times() == [1.0, 0.25, 0.0]
    assert Sampling().times() == []


SHAPE = Shape(0.9, 2, 0.95)
SHAPED = {"temperature": 0.9, "top_k": 2, "top_p": 0.95}
HOW = Drawing(SHAPE)
LOW = uniform_times(4, end=NEAR_ZERO)
ROUTES = {
    "ancestral": ({"steps": 4}, lambda n, p, x, r: ancestral(n, p, x, uniform_times(4), r, HOW)),
    "default": ({}, lambda n, p, x, r: ancestral(n, p, x, uniform_times(32), r, HOW)),
    "fp32": (
        {"steps": 4, "precision": "fp32"},
        lambda n, p, x, r: ancestral(n, p, x, uniform_times(4), r, Drawing(SHAPE, precision="fp32")),
    ),
    "tail": ({"steps": 4, "tail": "argmax"}, lambda n, p, x, r: ancestral(n, p, x, LOW, r, HOW, "argmax")),
    "corrector": (
        {"grid": "cosine", "steps": 6, "corrector": "rescale", "eta": 0.6},
        lambda n, p, x, r: ancestral(n, p, x, cosine_times(6), r, HOW, corrector=Corrector("rescale", 0.6)),
    ),
    "loop": (
        {"steps": 12, "corrector": "loop"},
        lambda n, p, x, r: ancestral(n, p, x, loop_times(12), r, HOW, corrector=Corrector("loop", 0.05)),
    ),
    "naive": (
        {"steps": 4, "precision": "naive-fp32", "tail": "sample"},
        lambda n, p, x, r: race(n, p, x, LOW, r, "naive-fp32", SHAPE, "sample"),
    ),
}
MASKED_ROUTES = {
    "dilated": ({"steps": 4, "order": "dilated"}, lambda n, p, x, r: ordered(n, p, x, uniform_times(4), r, drawing=HOW)),
    "bit-reversed": (
        {"steps": 4, "order": "bit-reversed", "tail": "sample"},
        lambda n, p, x, r: ordered(n, p, x, LOW, r, "bit-reversed", HOW, "sample"),
    ),
    "first-hitting": ({"order": "first-hitting"}, lambda n, p, x, r: first_hitting(n, p, x, r, 1.0, HOW)),
    "probability": (
        {"steps": 3, "order": "probability"},
        lambda n, p, x, r: confident(n, p, x, uniform_times(3), r, "probability", HOW),
    ),
    "margin": (
        {"steps": 3, "order": "margin"},
        lambda n, p, x, r: confident(n, p, x, uniform_times(3), r, "margin", HOW),
    ),
    "entropy-bound": (
        {"steps": 6, "order": "entropy-bound"},
        lambda n, p, x, r: confident(n, p, x, uniform_times(6), r, "entropy-bound", HOW, 0.5),
    ),
    "bound": (
        {"steps": 6, "order": "entropy-bound", "bound": 0.1},
        lambda n, p, x, r: confident(n, p, x, uniform_times(6), r, "entropy-bound", HOW, 0.1),
    ),
}
CASES = [
    pytest.param(process, *route, id=f"{process.name}, {name}")
    for process, routes in ((masked(V), ROUTES | MASKED_ROUTES), (uniform(V), ROUTES))
    for name, route in routes.items()
]


@pytest.mark.parametrize(("process", "settings", "direct"), CASES)
def test_settings_reach_their_sampler(process: Process, settings: dict, direct) -> None:
    net, rng = Table(process, 6), seeded(4, batch=64)
    x = process.start(6, rng("start"))
    states = list(generate(net, process, x, Sampling(**settings, **SHAPED), rng))
    truth = list(direct(net, process, x, rng))
    assert [state.x.tolist() for state in states] == [state.x.tolist() for state in truth]
    assert states[-1].evaluations == truth[-1].evaluations
    assert (states[-1].step, states[-1].steps) == (truth[-1].step, truth[-1].steps)


def test_no_two_routes_draw_the_same_texts() -> None:
    """Unless they should: the tests above can tell the samplers apart."""
    for process, routes in ((masked(V), ROUTES | MASKED_ROUTES), (uniform(V), ROUTES)):
        net, rng = Table(process, 6), seeded(4, batch=64)
        x = process.start(6, rng("start"))
        alike = {"fp32", "tail"} if process.name == "masked" else {"fp32"}  # no masks are left at NEAR_ZERO
        asked = [Sampling(**settings) for name, (settings, _) in routes.items() if name not in alike]
        texts = {str(text(generate(net, process, x, sampling, rng)).tolist()) for sampling in asked}
        assert len(texts) == len(asked)


def test_posterior_start_and_given_are_handed_on() -> None:
    process, rng = uniform(V), seeded(4, batch=64)
    net, x = Table(process, 3), uniform(V).start(3, rng("start"))
    given = torch.tensor([True, False, False]).expand(64, -1)
    mixed = Drawing(posterior="mixture")
    truth = text(ancestral(net, process, x, uniform_times(4, 0.8), rng, mixed, given=given))
    drawn = text(generate(net, process, x, Sampling(steps=4), rng, "mixture", 0.8, given))
    assert torch.equal(drawn, truth)
    asked = Sampling(steps=4, posterior="mixture")
    assert torch.equal(text(generate(net, process, x, asked, rng, "plug-in", 0.8, given)), truth)
    plugged = text(generate(net, process, x, Sampling(steps=4, posterior="plug-in"), rng, "mixture", 0.8, given))
    assert torch.equal(plugged, text(ancestral(net, process, x, uniform_times(4, 0.8), rng, given=given)))
    assert not torch.equal(plugged, truth)
    raced = Sampling(steps=4, precision="naive-fp32")
    assert torch.equal(
        text(generate(net, process, x, raced, rng, start=0.8, given=given)),
        text(race(net, process, x, uniform_times(4, 0.8), rng, given=given)),
    )
    assert bool((drawn[:, 0] == x[:, 0]).all())


def test_the_whole_batch_runs_for_a_compiled_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_compiled_categorical", lambda: categorical)
    process, rng = masked(V), seeded(4, batch=64)
    x = process.start(3, rng("start"))
    few, whole = Table(process, 3), Table(process, 3)
    hops = len(list(generate(few, process, x, Sampling(), rng))) - 1
    assert len(list(generate(whole, process, x, Sampling(), rng, compiled=True))) - 1 == hops
    assert few.rows < whole.rows == hops * 64


@pytest.mark.parametrize(
    "settings", [{}, {"order": "margin"}, {"precision": "naive-fp32"}, {"corrector": "cap"}], ids=str
)
def test_some_tokens_are_never_drawn(settings: dict) -> None:
    """`without` takes them out of the prediction; x may still contain them."""
    process, rng = masked(V), seeded(4, batch=64)
    net, x = Table(process, 3), process.start(3, rng("start"))
    x[:, 0] = 1
    drawn = text(generate(net, process, x, Sampling(**settings), rng, without=(1,)))
    assert bool((drawn[:, 0] == 1).all())
    assert drawn[:, 1:].unique().tolist() == [0, 2]
    assert len(text(generate(net, process, x, Sampling(**settings), rng))[:, 1:].unique()) == V


def test_first_hitting_starts_where_it_is_told() -> None:
    process, rng = masked(V), seeded(4, batch=64)
    net, x = Table(process, 3), process.start(3, seeded(4, batch=64))
    sampling = Sampling(order="first-hitting")
    assert torch.equal(
        text(generate(net, process, x, sampling, rng, start=0.3)), text(first_hitting(net, process, x, rng, 0.3))
    )


def test_the_race_refuses_a_mixture_that_the_method_calls_for() -> None:
    process, rng = uniform(V), seeded(0, batch=1)
    with pytest.raises(ValueError, match="add --posterior plug-in"):
        generate(Table(process), process, process.start(2, rng), Sampling(precision="naive-fp32"), rng, "mixture")
