"""`resolve`: what it completes, and what it refuses with the name and the value of the setting."""

import dataclasses
import itertools
import typing
from typing import Any

import pytest
import torch

from cdlm.process import Process, masked, uniform, unigram
from cdlm.process.process import Posterior
from cdlm.rng import seeded
from cdlm.sample.generate import generate
from cdlm.sample.samplers import ORDERS, PENALTIES, SAMPLERS, load_function
from cdlm.sample.settings import (
    DEFAULTS,
    SPECS,
    TYPES,
    Settings,
    choices,
    describe_settings,
    explicit,
    flag,
    flags,
    resolve,
    setting_type,
    sources,
)

from .truth import PRIORS, Table, V, text

NAN, INF = float("nan"), float("inf")
Given = dict[str, Any]

VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "sampler": (["auto", "ancestral"], ["gibbs", 1]),
    "steps": ([1, 1_000_000], [0, -3, 1_000_001, 2.0, 2.5, "8", True, NAN]),
    "timesteps": (
        ["uniform", "cosine", "1,0.5,0", "1, 0.5, 0"],
        ["linear", "", "1,0.5", "0.5,0", "1,0.2,0.5,0", "1,0.5,0.5,0", "1,nan,0", "1", 4],
    ),
    "order": (["random", "dilated", "margin"], ["backwards", 0]),
    "step_size": (["random", "equal"], ["half", 2]),
    "final_step": (["none", "sample", "argmax"], ["greedy"]),
    "corrector": (["none", "cap"], ["psi"]),
    "eta": ([1e-9, 1.0, 1], [0.0, -0.1, 1.5, NAN, INF, "0.5", True]),
    "entropy_bound": ([0.0, 3], [-0.1, NAN, INF, "1"]),
    "temperature": ([1e-6, 0.5, 2], [0.0, -1.0, NAN, INF, "1", True]),
    "temperature_end": ([1e-6, 0.5, 2], [0.0, -1.0, NAN, INF, "1"]),
    "guidance": ([0.0, 2, 0.5], [-0.1, NAN, INF, "1"]),
    "guidance_end": ([0, 0.5, 2], [-0.1, NAN, INF, "1"]),
    "top_k": ([0, 5], [-1, 1.0, 2.5, "5", False]),
    "top_p": ([1e-9, 1.0, 1], [0.0, -0.1, 1.5, NAN, "0.9"]),
    "frequency_penalty": ([-2, 0.5, 2.0], [-2.1, 2.5, NAN, INF, "1", True]),
    "presence_penalty": ([-2, 0.5, 2.0], [-2.1, 2.5, NAN, INF, "1", True]),
    "log_frequency_penalty": ([-1.5, 0, 8], [-1001, 1001.0, NAN, INF, "1"]),
    "precision": (["fp64", "fp32"], ["fp16", 64]),
    "posterior": (["auto", "plug-in", "mixture"], ["exact"]),
    "block_length": ([0, 8], [-1, 0.5, "8", True]),
}
"""For every setting, values within and outside its range or type."""
NEEDED: dict[str, Given] = {
    "eta": {"corrector": "cap"},
    "entropy_bound": {"order": "entropy-bound"},
}
"""What a setting applies to."""

CONFLICTS: list[tuple[Given, tuple[str, ...]]] = [
    ({"timesteps": "1,0.5,0", "steps": 3}, ("--timesteps 1,0.5,0", "2 steps", "--steps")),
    ({"order": "dilated", "entropy_bound": 0.5}, ("--order dilated", "--entropy-bound 0.5")),
    ({"entropy_bound": 0.5}, ("--entropy-bound 0.5",)),
    ({"eta": 0.1}, ("--eta 0.1",)),
    ({"eta": 0.05}, ("--eta 0.05",)),
    ({"corrector": "cap", "order": "dilated"}, ("--corrector cap", "--order dilated")),
    ({"corrector": "constant", "order": "first-hitting"}, ("--corrector constant", "--order first-hitting")),
    ({"corrector": "rescale", "order": "margin"}, ("--corrector rescale", "--order margin")),
    ({"corrector": "rescale", "step_size": "equal"}, ("--corrector rescale", "--step-size equal")),
    ({"corrector": "cap", "precision": "naive-fp32"}, ("--corrector cap", "--precision naive-fp32")),
    ({"corrector": "loop", "timesteps": "cosine"}, ("--corrector loop", "--timesteps")),
    ({"corrector": "loop", "timesteps": "1,0.9,0.8,0.5,0"}, ("--corrector loop", "--timesteps")),
    ({"corrector": "loop", "steps": 3}, ("--corrector loop", "4", "3")),
    ({"order": "dilated", "timesteps": "cosine"}, ("--order dilated", "--timesteps")),
    ({"order": "first-hitting", "steps": 4}, ("--order first-hitting", "--steps 4")),
    ({"order": "first-hitting", "timesteps": "cosine"}, ("--order first-hitting", "--timesteps cosine")),
    ({"order": "first-hitting", "final_step": "sample"}, ("--order first-hitting", "--final-step sample")),
    ({"order": "first-hitting", "step_size": "equal"}, ("--order first-hitting", "--step-size equal")),
    ({"order": "probability", "final_step": "argmax"}, ("--order probability", "--final-step argmax")),
    ({"order": "margin", "final_step": "sample"}, ("--order margin", "--final-step sample")),
    ({"order": "entropy-bound", "final_step": "argmax"}, ("--order entropy-bound", "--final-step argmax")),
    ({"precision": "naive-fp32", "order": "dilated"}, ("--precision naive-fp32", "--order dilated")),
    ({"precision": "naive-fp32", "posterior": "mixture"}, ("--precision naive-fp32", "--posterior mixture")),
    ({"precision": "naive-fp32", "guidance": 0.5}, ("--precision naive-fp32", "--guidance 0.5")),
    ({"precision": "naive-fp32", "guidance_end": 0.5}, ("--precision naive-fp32", "--guidance-end 0.5")),
    ({"precision": "naive-fp32", "temperature_end": 0.5}, ("--precision naive-fp32", "--temperature-end 0.5")),
    ({"sampler": "plain", "order": "dilated"}, ("plain", "--order dilated")),
    ({"sampler": "ancestral", "order": "margin"}, ("ancestral", "--order margin")),
    ({"sampler": "first-hitting", "steps": 4}, ("first-hitting", "--steps 4")),
]
ACCEPTED: list[tuple[Given, str]] = [
    ({}, "ancestral"),
    ({"steps": 1}, "ancestral"),
    ({"timesteps": "cosine", "steps": 8, "final_step": "argmax"}, "ancestral"),
    ({"timesteps": "1,0.5,0"}, "ancestral"),
    ({"timesteps": "1, 0.5, 0", "steps": 2}, "ancestral"),
    ({"order": "dilated", "final_step": "sample"}, "ancestral"),
    ({"order": "bit-reversed", "final_step": "argmax", "timesteps": "cosine"}, "ancestral"),
    ({"order": "dilated", "step_size": "equal", "steps": 3}, "ancestral"),
    ({"step_size": "equal", "timesteps": "cosine"}, "ancestral"),
    ({"order": "first-hitting", "top_k": 3}, "first-hitting"),
    ({"sampler": "first-hitting"}, "first-hitting"),
    ({"order": "entropy-bound"}, "entropy-bound"),
    ({"sampler": "entropy-bound", "entropy_bound": 0.0}, "entropy-bound"),
    ({"order": "probability", "timesteps": "1,0.3,0"}, "confidence"),
    ({"sampler": "confidence"}, "confidence"),
    ({"corrector": "constant", "timesteps": "cosine", "final_step": "argmax"}, "corrector"),
    ({"corrector": "cap", "eta": 1.0, "precision": "fp32"}, "corrector"),
    ({"corrector": "loop", "steps": 4}, "corrector"),
    ({"sampler": "corrector"}, "corrector"),
    ({"precision": "naive-fp32", "final_step": "argmax", "timesteps": "cosine"}, "naive"),
    ({"sampler": "naive"}, "naive"),
    ({"sampler": "plain", "steps": 3}, "plain"),
    ({"temperature": 0.5, "top_k": 5, "top_p": 0.9}, "ancestral"),
    ({"guidance": 1.5, "temperature_end": 0.5}, "ancestral"),
    ({"guidance_end": 1.5, "order": "margin"}, "confidence"),
    ({"frequency_penalty": 0.5, "presence_penalty": -1, "log_frequency_penalty": 2.0}, "ancestral"),
    ({"corrector": "cap", "log_frequency_penalty": 2.0}, "corrector"),
    ({"steps": None, "order": None, "temperature": None}, "ancestral"),
]
"""Settings and the sampler that carries them out."""


def test_every_setting_has_its_values_here() -> None:
    assert list(VALUES) == list(SPECS) == [field.name for field in dataclasses.fields(Settings)]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (good, _) in VALUES.items() for value in good])
def test_values_within_the_range_are_taken(name: str, value: Any) -> None:
    found = getattr(resolve({**NEEDED.get(name, {}), name: value}), name)
    assert found == {"sampler": "ancestral", "posterior": found}.get(name, value)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (_, bad) in VALUES.items() for value in bad])
def test_values_of_a_wrong_type_or_outside_the_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{flag(name)} must") as caught:
        resolve({**NEEDED.get(name, {}), name: value})
    assert str(value) in str(caught.value)
    for option in choices(name):
        assert option in str(caught.value)


@pytest.mark.parametrize(("name", "near"), [("temprature", "temperature"), ("top-k", "top_k"), ("grid", None)])
def test_an_unknown_setting_is_a_type_error(name: str, near: str | None) -> None:
    with pytest.raises(TypeError, match=repr(name)) as caught:
        resolve({name: 1})
    assert (near or "timesteps") in str(caught.value)


@pytest.mark.parametrize(("given", "words"), CONFLICTS, ids=[str(case[0]) for case in CONFLICTS])
def test_what_contradicts_itself_is_refused(given: Given, words: tuple[str, ...]) -> None:
    for process in ("any", masked(V)):
        if process == "any" or "posterior" not in given:
            with pytest.raises(ValueError, match="--") as caught:
                resolve(given, process)
            assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(("given", "sampler"), ACCEPTED, ids=[str(case[0]) for case in ACCEPTED])
def test_what_fits_together_runs(given: Given, sampler: str) -> None:
    process = masked(V)
    settings = resolve(given, process)
    assert settings.sampler == sampler
    net = Table(process, 4)
    predict = net.plain if sampler == "plain" else net
    states = list(generate(predict, process, torch.full((3, 4), V), settings, seeded(0, batch=3)))
    assert bool((text(states) < V).all())
    assert states[-1].nfe != [0, 0, 0]


def test_defaults() -> None:
    assert resolve() == Settings(**{**DEFAULTS, "sampler": "ancestral", "posterior": "plug-in"})
    assert resolve(None, masked(V)) == resolve({}, masked(V)) == resolve()
    assert resolve({"sampler": "confidence"}).order == "probability"
    assert resolve({"sampler": "corrector"}).corrector == "constant"
    assert resolve({"timesteps": "1,0.25,0"}).steps == 2


def test_types_and_choices_come_from_the_schema_and_the_tables() -> None:
    assert set(TYPES) == set(SPECS)
    assert choices("sampler") == ["auto", *SAMPLERS]
    assert choices("order") == [*ORDERS, "first-hitting", "probability", "margin", "entropy-bound"]
    assert typing.get_args(setting_type("final_step")) == ("none", "sample", "argmax")
    assert (setting_type("steps"), setting_type("top_p"), setting_type("timesteps")) == (int, float, str)
    assert all(callable(load_function(row.function)) for row in SAMPLERS.values())
    assert all(callable(load_function(row.levels)) for row in ORDERS.values())
    for row in SAMPLERS.values():
        assert set(row.settings) <= set(SPECS)
        assert set(row.choices) <= set(row.settings)


# Processes


OTHERS = [uniform(V), unigram(torch.tensor([0.5, 0.3, 0.2])), PRIORS["mask and unigram"]]


@pytest.mark.parametrize("order", choices("order")[1:])
@pytest.mark.parametrize("process", OTHERS)
def test_orders_need_a_masked_process(process: Process, order: str) -> None:
    resolve({"order": order}, masked(V))
    with pytest.raises(ValueError, match=f"--order {order}.*{process.name}"):
        resolve({"order": order}, process)
    with pytest.raises(ValueError, match=f"--step-size equal.*{process.name}"):
        resolve({"step_size": "equal"}, process)


def test_guidance_needs_a_mask() -> None:
    for process in (masked(V), PRIORS["mask and unigram"]):
        assert resolve({"guidance": 0.5}, process).guidance == 0.5
    with pytest.raises(ValueError, match=r"--guidance 0\.5.*uniform"):
        resolve({"guidance": 0.5}, uniform(V))
    with pytest.raises(ValueError, match=r"--guidance-end 0\.5.*uniform"):
        resolve({"guidance_end": 0.5}, uniform(V))


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_penalties_of_sampled_tokens_need_to_know_which_tokens_were_sampled(name: str) -> None:
    for process in OTHERS:
        assert resolve({name: 0.0}, process) == resolve({}, process)
        with pytest.raises(ValueError, match=rf"{flag(name)} 0\.5 needs a masked process.*{process.name}"):
            resolve({name: 0.5}, process)


@pytest.mark.parametrize("name", PENALTIES)
def test_the_published_sampler_has_no_penalties(name: str) -> None:
    with pytest.raises(ValueError, match=r"no sampler takes .*--precision naive-fp32") as caught:
        resolve({"precision": "naive-fp32", name: 0.5}, masked(V))
    assert f"{flag(name)} 0.5" in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [{"corrector": "cap"}, {"final_step": "argmax"}, {"precision": "naive-fp32"}, {"log_frequency_penalty": 2.0}],
    ids=str,
)
@pytest.mark.parametrize("process", PRIORS.values(), ids=PRIORS)
def test_everything_else_fits_any_process(process: Process, given: Given) -> None:
    assert resolve(given, process) == resolve(given)


@pytest.mark.parametrize("sampler", ["confidence", "entropy-bound", "first-hitting", "autoregressive"])
def test_a_sampler_that_is_not_for_a_process_is_refused(sampler: str) -> None:
    with pytest.raises(ValueError, match=rf"{sampler}.*uniform|--order.*uniform"):
        resolve({"sampler": sampler}, uniform(V))


def test_posterior() -> None:
    """That of the method unless given; of no effect under masking."""
    assert resolve({}, uniform(V), "mixture").posterior == "mixture"
    assert resolve({"posterior": "plug-in"}, uniform(V), "mixture").posterior == "plug-in"
    assert resolve({"posterior": "mixture"}, uniform(V)).posterior == "mixture"
    with pytest.raises(ValueError, match="--posterior"):
        resolve({"posterior": "mixture"}, masked(V))
    with pytest.raises(
        ValueError, match=r"--precision naive-fp32.*--posterior mixture|--posterior mixture.*naive-fp32"
    ):
        resolve({"precision": "naive-fp32"}, uniform(V), "mixture")
    naive = resolve({"precision": "naive-fp32", "posterior": "plug-in"}, uniform(V), "mixture")
    assert (naive.sampler, naive.posterior) == ("naive", "plug-in")


AUTOREGRESSIVE = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "precision": "naive-fp32"}
AUTOREGRESSIVE |= {"frequency_penalty": 0.5, "presence_penalty": 1.0, "log_frequency_penalty": 2.0}
NOT_AUTOREGRESSIVE: list[Given] = [
    {"order": "dilated"},
    {"order": "probability"},
    {"step_size": "equal"},
    {"timesteps": "cosine"},
    {"final_step": "argmax"},
    {"corrector": "cap"},
    {"eta": 0.1},
    {"posterior": "mixture"},
    {"posterior": "plug-in"},
    {"block_length": 8},
    {"steps": 8},
    {"steps": 32},
    {"guidance": 0.5},
    {"guidance_end": 0.5},
    {"temperature_end": 0.5},
    {"sampler": "ancestral"},
]


def test_an_autoregressive_model_has_few_settings() -> None:
    found = resolve(AUTOREGRESSIVE, None)
    assert found.sampler == "autoregressive"
    assert found.steps is None
    assert {name: getattr(found, name) for name in AUTOREGRESSIVE} == AUTOREGRESSIVE
    assert set(SAMPLERS["autoregressive"].settings) == set(AUTOREGRESSIVE)


@pytest.mark.parametrize("given", NOT_AUTOREGRESSIVE, ids=str)
def test_an_autoregressive_model_refuses_the_others(given: Given) -> None:
    ((name, value),) = given.items()
    with pytest.raises(ValueError, match=f"{flag(name)} {value}.*autoregressive"):
        resolve(given, None)


# Generation configs


CONFIG = {
    "steps": 8,
    "order": "dilated",
    "temperature": 0.8,
    "step_presets": [
        {"steps": 4, "order": "dilated", "temperature": 0.6},
        {"steps": 16, "order": "dilated", "temperature": 0.9, "guidance": 0.5},
        {"steps": 64, "temperature": 0.95},
    ],
}
PRESETS: list[tuple[Given, Given]] = [
    ({}, {"steps": 8, "order": "dilated", "temperature": 0.8, "guidance": 0.0}),
    ({"steps": 1}, {"steps": 1, "order": "dilated", "temperature": 0.6}),
    ({"steps": 7}, {"steps": 7, "temperature": 0.6}),  # distances are ratios: sqrt(4 x 16) = 8
    ({"steps": 9}, {"steps": 9, "temperature": 0.9, "guidance": 0.5}),
    ({"steps": 16}, {"steps": 16, "temperature": 0.9, "guidance": 0.5}),
    ({"steps": 1000}, {"steps": 1000, "order": "random", "temperature": 0.95, "guidance": 0.0}),
    ({"temperature": 0.3}, {"steps": 8, "order": "dilated", "temperature": 0.3}),
    ({"top_p": 0.9, "steps": 16}, {"temperature": 0.9, "guidance": 0.5, "top_p": 0.9}),
    ({"order": "dilated"}, {"steps": 8, "temperature": 0.8}),
    ({"order": "dilated", "steps": 16}, {"temperature": 0.9, "guidance": 0.5}),
]
ANOTHER: list[Given] = [
    {"order": "random"},
    {"order": "margin"},
    {"order": "dilated", "steps": 64},
    {"corrector": "cap", "order": "random"},
    {"order": "random", "timesteps": "cosine"},
    {"step_size": "equal"},
    {"precision": "naive-fp32"},
    {"sampler": "plain"},
    {"timesteps": "1,0.5,0", "order": "random"},
]


@pytest.mark.parametrize(("given", "found"), PRESETS, ids=[str(case[0]) for case in PRESETS])
def test_the_preset_for_the_closest_number_of_steps_holds(given: Given, found: Given) -> None:
    settings = resolve(given, masked(V), generation_config=CONFIG)
    assert {name: getattr(settings, name) for name in found} == found


@pytest.mark.parametrize("given", ANOTHER, ids=str)
def test_another_sampler_ignores_the_generation_config(given: Given) -> None:
    assert resolve(given, masked(V), generation_config=CONFIG) == resolve(given, masked(V))


def test_a_field_that_is_no_setting_is_ignored() -> None:
    config = {**CONFIG, "transformers_version": "4.40", "eos_token_id": 0}
    assert resolve({}, masked(V), generation_config=config) == resolve({}, masked(V), generation_config=CONFIG)


def test_sources_of_settings() -> None:
    given = {"temperature": 0.7, "top_k": None}
    found = sources(resolve(given, masked(V), generation_config=CONFIG), given, CONFIG)
    assert found["temperature"] == "given"
    assert found["order"] == found["steps"] == "generation config"
    assert found["top_k"] == found["precision"] == "default"
    assert "eta" not in found
    assert sources(resolve({"sampler": "plain"}), {"sampler": "plain"})["sampler"] == "given"
    given = {"timesteps": "1,0.5,0"}
    assert sources(resolve(given), given)["steps"] == "given"


# Round trips

AXES: dict[str, tuple[Any, ...]] = {
    "sampler": ("auto", *SAMPLERS),
    "steps": (None, 4, 32),
    "timesteps": ("uniform", "cosine", "1,0.6,0.3,0.1,0"),
    "order": tuple(choices("order")),
    "step_size": ("random", "equal"),
    "final_step": ("none", "argmax"),
    "corrector": ("none", "cap", "loop"),
    "eta": (None, 0.05, 0.5),
    "entropy_bound": (None, 0.5, 1.0),
    "temperature": (1.0, 0.8),
    "precision": ("fp64", "naive-fp32"),
}
CONFIGS = [None, CONFIG, {"steps": 16, "corrector": "cap", "eta": 0.2}, {"steps": 4, "order": "margin", "top_k": 3}]


@pytest.mark.parametrize("config", CONFIGS, ids=["none", "presets", "corrector", "confidence"])
def test_explicit_settings_resolve_to_themselves(config: Given | None) -> None:
    """For all combinations of two settings with everything else left out, and any generation config."""
    process, found = masked(V), 0
    for first, second in itertools.combinations(AXES, 2):
        for values in itertools.product(AXES[first], AXES[second]):
            given = dict(zip((first, second), values, strict=True))
            try:
                settings = resolve(given, process, generation_config=config)
            except ValueError:
                continue
            found += 1
            asked = explicit(settings, config)
            assert resolve(asked, process, generation_config=config) == settings, given
    assert found > 300


@pytest.mark.parametrize("method", ["plug-in", "mixture"])
@pytest.mark.parametrize("process", [uniform(V), None, "any"], ids=["uniform", "autoregressive", "any"])
def test_explicit_settings_of_other_models(process: Process | str | None, method: Posterior) -> None:
    posteriors = (None, "plug-in", "mixture") if process is not None else (None,)
    for temperature, precision, posterior in itertools.product(AXES["temperature"], AXES["precision"], posteriors):
        given = {"temperature": temperature, "precision": precision, "top_p": 0.9, "posterior": posterior}
        if precision == "naive-fp32" and (posterior or method) == "mixture" and process is not None:
            continue
        settings = resolve(given, process, method)
        assert resolve(explicit(settings, posterior=method), process, method) == settings


def test_settings_in_words() -> None:
    settings = resolve({"steps": 8, "order": "dilated", "guidance": 0.5, "timesteps": "uniform"}, masked(V))
    assert describe_settings(settings) == ["8 steps", "fp64", "order dilated", "guidance 0.5"]
    assert flags(explicit(resolve({"sampler": "plain"}))) == "--sampler plain --steps 32"
    assert flags(explicit(settings)) == "--steps 8 --order dilated --guidance 0.5"
    assert describe_settings(resolve({"top_k": 5}, None)) == ["fp64", "top-k 5"]
