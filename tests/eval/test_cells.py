"""The grid of an evaluation: what is asked for, what makes sense, and what is refused before anything is computed."""

from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdlm.eval.cells import EvalCell, make_cells
from cdlm.eval.config import EvalConfig
from cdlm.eval.results import file_name
from cdlm.process import SCHEDULES, masked, uniform
from cdlm.rng import seeded
from cdlm.sample.settings import Settings, describe_settings, resolve

from ..writers import BYTES, Kind, small

ALL = {kind: small(kind) for kind in ("masked", "uniform", "causal")}


def grid(*kinds: Kind, **changes: Any) -> tuple[list[EvalCell], list[str]]:
    config = EvalConfig(models=kinds, judge=("j",), **changes)
    return make_cells(config, {kind: ALL[kind] for kind in kinds})


def settings_of(cells: list[EvalCell], label: str) -> list[Settings]:
    return [cell.settings for cell in cells if cell.label == label and cell.settings is not None]


def test_every_combination_is_a_cell() -> None:
    found, skipped = grid(
        "masked", "uniform", steps=(1, 2, 4), precision=("fp64", "fp32"), final_step=("none", "argmax")
    )
    assert not skipped
    assert len(found) == 2 * 3 * 2 * 2
    assert len(set(settings_of(found, "masked"))) == 12
    assert {(one.steps, one.precision, one.final_step) for one in settings_of(found, "uniform")} == {
        (n, p, t) for n in (1, 2, 4) for p in ("fp64", "fp32") for t in ("none", "argmax")
    }


def test_controls_are_not_multiplied_with_each_other() -> None:
    """Temperatures at top-p 1, and top-p at temperature 1; what they share is one cell."""
    found, _ = grid("masked", steps=(2,), temperature=(1.0, 0.8), top_p=(1.0, 0.9))
    assert [(one.temperature, one.top_p) for one in settings_of(found, "masked")] == [
        (1.0, 1.0),
        (0.8, 1.0),
        (1.0, 0.9),
    ]


def test_an_autoregressive_model_has_one_cell_whatever_the_steps() -> None:
    found, skipped = grid(
        "causal", steps=(1, 2, 4, 8), final_step=("none", "argmax"), precision=("fp64", "fp32"), temperature=(1.0, 0.7)
    )
    assert not skipped
    assert {(one.steps, one.final_step, one.order) for one in settings_of(found, "causal")} == {
        (None, "none", "random")
    }
    assert sorted((one.precision, one.temperature) for one in settings_of(found, "causal")) == [
        ("fp32", 0.7),
        ("fp32", 1.0),
        ("fp64", 0.7),
        ("fp64", 1.0),
    ]


def test_first_hitting_has_no_steps() -> None:
    found, _ = grid("masked", steps=(2, 4, 8), order=("random", "first-hitting"))
    assert [one.steps for one in settings_of(found, "masked") if one.order == "first-hitting"] == [None]
    assert [one.steps for one in settings_of(found, "masked") if one.order == "random"] == [2, 4, 8]


def test_an_axis_holds_for_the_samplers_that_read_it() -> None:
    """It neither multiplies the cells of other samplers nor drops them; a named sampler reads its axes too."""
    found, skipped = grid("masked", steps=(4,), order=("random", "entropy-bound"), entropy_bound=(0.1, 0.5, 1.0))
    assert not skipped
    assert [(one.sampler, one.entropy_bound) for one in settings_of(found, "masked")] == [
        ("ancestral", 0.5),
        *(("entropy-bound", bound) for bound in (0.1, 0.5, 1.0)),
    ]
    found, skipped = grid("masked", steps=(4,), corrector=("none", "constant"), eta=(0.1, 0.2))
    assert not skipped
    assert [(one.corrector, one.eta) for one in settings_of(found, "masked")] == [
        ("none", 0.05),
        ("constant", 0.1),
        ("constant", 0.2),
    ]
    found, skipped = grid("masked", "causal", steps=(4,), sampler=("corrector", "plain"), eta=(0.1, 0.2))
    assert not skipped
    assert [(one.sampler, one.eta) for one in settings_of(found, "masked")] == [
        ("corrector", 0.1),
        ("corrector", 0.2),
        ("plain", 0.05),
    ]
    assert [one.sampler for one in settings_of(found, "causal")] == ["autoregressive"]
    assert [cell.name for cell in found] == [
        "masked 4 steps fp64 corrector constant eta 0.1",
        "masked 4 steps fp64 corrector constant eta 0.2",
        "masked 4 steps fp64 sampler plain",
        "causal fp64",
    ]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"order": ("random", "margin")}, "uniform: --order margin needs a masked process"),
        ({"order": ("random", "first-hitting"), "final_step": ("none", "argmax")}, "no sampler takes"),
        ({"corrector": ("none", "cap"), "precision": ("fp64", "naive-fp32")}, "no sampler takes"),
    ],
)
def test_what_does_not_fit_is_listed_and_the_rest_is_kept(changes: dict[str, Any], why: str) -> None:
    found, skipped = grid("masked", "uniform", steps=(2, 4), **changes)
    assert any(why in line for line in skipped), skipped
    assert len(skipped) == len(set(skipped))
    assert {(cell.label, cell.settings.steps) for cell in found if cell.settings} >= {
        (label, n) for label in ("masked", "uniform") for n in (2, 4)
    }


def test_tasks_have_their_texts(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("text\n")
    texts = tuple(f"{name}={tmp_path / name}.txt" for name in ("a", "b"))
    tasks = ("unconditional", "conditional", "likelihood", "consistency")
    found, skipped = grid("masked", "causal", steps=(2,), tasks=tasks, texts=texts)
    assert sorted((cell.label, cell.task, cell.dataset.name if cell.dataset else "") for cell in found) == sorted(
        [("masked", "unconditional", ""), ("causal", "unconditional", "")]
        + [("masked", task, name) for task in tasks[1:] for name in ("a", "b")]
        + [("causal", "likelihood", name) for name in ("a", "b")]
    )
    assert skipped == [f"causal: an autoregressive model has no {task} task" for task in ("conditional", "consistency")]
    assert "masked a likelihood" in {cell.name for cell in found}


def test_two_sets_of_one_name(tmp_path: Path) -> None:
    """As two models of one label: refused, or told apart; never lost."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test.txt").write_text(f"text {folder}\n")
    texts = tuple(str(tmp_path / folder / "test.txt") for folder in ("one", "two"))
    try:
        config = EvalConfig(models=("masked",), tasks=("likelihood",), texts=texts)
    except ValueError:
        return
    assert len(make_cells(config, {"masked": ALL["masked"]})[0]) == 2


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"judge": ()}, "name a judge: --judge gpt2-large .*smollm2.*a run of ar"),
        ({"models": (), "judge": ()}, "name .*a judge"),
        ({"models": ("runs/a", "other/a")}, "two models are called a; give each a name: NAME=MODEL"),
        ({"models": ("x=runs/a", "x=other/b")}, "two models are called x"),
        ({"protocol": "paper", "num_samples": 64}, "--protocol paper has 32 samples; use --protocol robust"),
        ({"tasks": ("unheard",)}, "--tasks must be among unconditional, conditional.*'unheard'"),
        ({"tasks": ("conditional",)}, "the task conditional needs texts; add --texts NAME=FILE"),
        ({"tasks": ("likelihood",)}, "the task likelihood needs texts"),
        ({"num_samples": 0}, "--num-samples must be at least 1"),
        ({"likelihood_samples": 0}, "--likelihood-samples must be at least 1"),
        ({"batch_size": 0}, "--batch-size must be at least 1"),
        ({"steps": ()}, "--steps needs at least one value"),
        ({"temperature": ()}, "--temperature needs at least one value"),
        ({"reference": Path("nowhere.txt")}, r"--reference must be a file .*nowhere\.txt"),
        ({"texts": ("ptb=nowhere.txt",)}, r"there is no file nowhere\.txt"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        EvalConfig(**{"models": ("runs/a",), "judge": ("j",), **changes})


def test_a_judge_with_nothing_to_judge(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text\n")
    with pytest.raises(ValueError, match="likelihood needs no judge; leave out --judge"):
        EvalConfig(models=("m",), judge=("j",), tasks=("likelihood",), texts=(str(tmp_path / "a.txt"),))


def test_counts_and_labels() -> None:
    assert EvalConfig(models=("a",), judge=("j",)).samples_per_cell == 256
    assert EvalConfig(models=("a",), judge=("j",), protocol="paper").samples_per_cell == 32
    assert EvalConfig(models=("a",), judge=("j",), num_samples=7).samples_per_cell == 7
    assert EvalConfig(models=("runs/a", "B=runs/a"), judge=("j",)).sources() == [("a", "runs/a"), ("B", "runs/a")]
    assert file_name("MDLM a/b, 8 steps fp64") == "MDLM-a-b-8-steps-fp64"
    assert describe_settings(resolve({"steps": 8, "final_step": "argmax", "temperature": 0.9})) == [
        "8 steps",
        "fp64",
        "final-step argmax",
        "temperature 0.9",
    ]


@hypothesis.settings(deadline=None, derandomize=True, max_examples=40)
@given(st.integers(1, 30), st.floats(0.01, 0.99), st.integers(0, 5), st.sampled_from(list(SCHEDULES)))
def test_evenly_noised_is_exactly_the_share(words: int, share: float, seed: int, noise: str) -> None:
    """The number of positions is the expected one, rounded, among those that may be noised, and no others."""
    process = uniform(5, SCHEDULES[noise]())
    t = float(process.noise.inverse(torch.tensor(1 - share, dtype=torch.float64)))
    among = torch.zeros(3, 40, dtype=torch.bool)
    for row in range(3):
        among[row, torch.randperm(40)[:words]] = True
    kept = process.kept_evenly(torch.zeros(3, 40, dtype=torch.long), t, seeded(seed, "noise", batch=3), among)
    assert kept[~among].all()
    assert ((~kept).sum(-1) - share * words).abs().max() <= 0.5 + 1e-6


def test_evenly_noised_positions_are_drawn_at_random() -> None:
    """Each word as often as any other; as many as before, whatever else is in the batch."""
    x, among = torch.zeros(4000, 10, dtype=torch.long), torch.ones(4000, 10, dtype=torch.bool)
    among[:, 0] = among[:, 9] = False
    rng = seeded(0, "noise", batch=4000)
    lost = ~masked(3).kept_evenly(x, 0.5005005, rng, among)
    assert (lost.sum(-1) == 4).all()
    share = lost.double().mean(0)
    assert (share[[0, 9]] == 0).all()
    assert (share[1:9] - 0.5).abs().max() < 0.03
    part = ~masked(3).kept_evenly(x[:5], 0.5005005, rng[torch.arange(5)], among[:5])
    assert torch.equal(part, lost[:5])


@pytest.mark.parametrize("kind", ["masked", "uniform"])
@pytest.mark.parametrize("framed", [False, True])
def test_exactly_half_of_the_words_are_noise(kind: Kind, framed: bool) -> None:
    """Ends, starts and the token that begins a block are no words; the first state of the sampler shows the noise."""
    model = small(kind, bos_framed=framed)
    blocks = torch.randint(97, 123, (6, 32), generator=torch.Generator().manual_seed(1))
    blocks[1:, 5] = blocks[2:, 17] = BYTES.eos
    if framed:
        blocks[:, 0] = blocks[:, -1] = BYTES.eos
    templates = model.perturbations(blocks.tolist())
    assert all(
        float(model.denoiser.process.noise.alpha(torch.tensor(one.noise_level))) == pytest.approx(0.5)
        for one in templates
    )
    first = next(
        iter(model.states(templates, resolve({"steps": 2}, model.denoiser.process), seeded(0, "sample", batch=6)))
    )
    changed, words = first.x != blocks, blocks != BYTES.eos
    assert not (changed & ~words).any()
    half = words.sum(-1) / 2
    if kind == "masked":
        assert ((changed.sum(-1) - half).abs() <= 0.5).all()
        assert (first.x[changed] == 257).all()
    else:  # a draw from the prior is the same token again once in 257 times
        assert ((changed.sum(-1) - half).abs() <= 2.5).all()


def test_an_autoregressive_model_recovers_nothing() -> None:
    with pytest.raises(ValueError, match="is autoregressive: it cannot recover words within a text"):
        small("causal").perturbations([[1, 2, 3]])
