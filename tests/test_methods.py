"""The table of methods: what each is, what it refuses, and that an ablation is one field."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cdlm.methods import METHODS
from cdlm.objective import (
    MAX_STEP,
    Bridge,
    Data,
    Network,
    Objective,
    Ordered,
    Relaxed,
    Revealed,
    Rollout,
    SharedNoise,
    TeacherForced,
    inverse_noise,
    inverse_step,
    unit,
)
from cdlm.objective.divergence import jsd, kl, rate_kl, reverse_kl, tv
from cdlm.process import masked, uniform, unigram
from cdlm.schedules import constant

V = 11
MASKED, UNIFORM, UNIGRAM = masked(V), uniform(V), unigram(torch.arange(1.0, V + 1))
MIXED = unigram(torch.arange(1.0, V + 2), vocab=V)
HOME = {"masked": MASKED, "any mask": MASKED, "uniform": UNIFORM, "none": None}
every_method = pytest.mark.parametrize("name", METHODS)


def at_home(name: str, **choices) -> Objective:
    return METHODS[name](HOME[METHODS[name].process], **choices)


def differences(one: Objective, two: Objective) -> set[str]:
    """Which fields of which terms differ."""
    assert [term.name for term in one.terms] == [term.name for term in two.terms]
    fields = ("times", "coupling", "target", "divergence", "weight", "share", "reduction")
    return {
        f"{a.name}.{field}"
        for a, b in zip(one.terms, two.terms, strict=True)
        for field in fields
        if getattr(a, field) != getattr(b, field)
    }


# The paper's section 3.3 as a table: coupling, target, divergence, weight for each term.
TABLE = {
    "ar": {"next token": (TeacherForced, Data, kl, unit)},
    "mdlm": {"nelbo": (Bridge, Data, rate_kl, unit)},
    "udlm": {"nelbo": (Bridge, Data, rate_kl, unit)},
    "duo": {"curriculum": (Relaxed, Data, rate_kl, unit), "nelbo": (Bridge, Data, rate_kl, unit)},
    "mcdlm": {"consistency": (Bridge, Network, jsd, inverse_step), "anchor": (Bridge, Data, kl, inverse_noise)},
    "mcdlm-pplopt": {"consistency": (Bridge, Network, jsd, inverse_step), "anchor": (Bridge, Data, kl, inverse_noise)},
    "ucdlm": {"consistency": (Bridge, Network, jsd, inverse_step), "anchor": (Bridge, Data, kl, inverse_noise)},
    "mcdlm-guided": {"consistency": (Bridge, Network, kl, inverse_step), "anchor": (Bridge, Data, kl, inverse_noise)},
    "few-step": {"hop": (Bridge, Revealed, kl, inverse_step)},
    "joint": {
        **{f"{n} steps": (Ordered, Revealed, kl, inverse_step) for n in (1, 2, 4, 8, 16, 32)},
        **{f"{n} steps, dilated": (Ordered, Revealed, kl, inverse_step) for n in (2, 4, 8, 16, 32)},
    },
    "sdtt": {"distillation": (Rollout, Network, reverse_kl, unit)},
    "duo-dcd": {"distillation": (SharedNoise, Network, reverse_kl, unit)},
}


def test_the_table_is_complete():
    assert not TABLE.keys() - METHODS.keys(), "rows of TABLE, above, that METHODS in cdlm/methods.py does not have"


@every_method
def test_ingredients(name):
    assert name in TABLE, f"write down what {name} is made of, term by term, in TABLE above (docs/extend.md)"
    found = {
        term.name: (type(term.coupling), type(term.target), term.divergence, term.weight)
        for term in at_home(name).terms
    }
    assert found == TABLE[name]


@pytest.mark.parametrize(
    ("name", "steps"),
    [("ar", 75_000), ("sdtt", 50_000), ("duo-dcd", 50_000)]
    + [(name, 150_000) for name in ("mdlm", "udlm", "duo", "mcdlm", "mcdlm-pplopt", "ucdlm", "few-step", "joint")],
)
def test_length_of_the_papers_runs(name, steps):
    assert at_home(name).total == steps
    assert at_home(name, total=77).total == 77


@every_method
def test_boundary_terms_take_the_largest_step(name):
    for term in at_home(name).terms:
        assert (term.times == MAX_STEP) == isinstance(term.target, Data)


@every_method
def test_shares_add_up_to_one_all_along(name):
    objective = at_home(name)
    for progress in (0, 0.3, 0.4999, 0.5, 2 / 3, 0.8, 1):
        assert sum(term.share(progress) for term in objective.terms) == pytest.approx(1)


@every_method
def test_time_is_told_to_networks_of_the_uniform_process_only(name):
    assert METHODS[name].time_conditioning == (METHODS[name].process == "uniform")


def test_mcdlm_has_the_papers_numbers():
    consistency, anchor = at_home("mcdlm").terms
    assert (consistency.times.low, consistency.times.high) == (constant(1 / 8), constant(5 / 8))
    assert consistency.share(0.5) == pytest.approx(0.6)
    assert anchor.share(0.5) == pytest.approx(0.4)
    assert consistency.target == Network(constant(0.999))
    assert consistency.times.overshoot == "clip"


@pytest.mark.parametrize(
    ("step", "kappa", "high"), [(0, 0.4, 5 / 8), (100_000, 0.4, 5 / 8), (125_000, 0.3, 1 / 2), (150_000, 0.2, 3 / 8)]
)
def test_mcdlm_pplopt_fades_over_the_last_third(step, kappa, high):
    consistency, anchor = at_home("mcdlm-pplopt").terms
    progress = step / 150_000
    assert anchor.share(progress) == pytest.approx(kappa)
    assert consistency.share(progress) == pytest.approx(1 - kappa)
    assert consistency.times.high(progress) == pytest.approx(high)
    assert consistency.times.low(progress) == 1 / 8


@pytest.mark.parametrize("step", [0, 30_000, 150_000])
def test_ucdlm_grows_its_steps(step):
    times = at_home("ucdlm").terms[0].times
    assert times.low(step / 150_000) == times.high(step / 150_000) == pytest.approx(0.125 + 0.25 * step / 150_000)


def test_duo_has_a_curriculum_in_the_first_half_alone():
    curriculum, plain = at_home("duo").terms
    assert [curriculum.share(p) for p in (0, 0.4999, 0.5, 1)] == [1, 1, 0, 0]
    assert [plain.share(p) for p in (0, 0.4999, 0.5, 1)] == [0, 0, 1, 1]
    gaussian = curriculum.coupling.gaussian
    assert (gaussian.vocab, gaussian.gamma_min, gaussian.gamma_max) == (V, -3.55, -1.85)
    assert curriculum.coupling.tau == 1e-3


def test_duo_dcd_spans_a_wider_range_and_shifts():
    (term,) = at_home("duo-dcd").terms
    assert (term.coupling.gaussian.gamma_min, term.coupling.gaussian.gamma_max) == (-4.0, -1.0)
    assert term.times.overshoot == "shift"


WRONG = [
    *((name, process, "a masked process, such as masked") for name in ("mdlm", "mcdlm", "mcdlm-pplopt", "sdtt")
      for process in (UNIFORM, UNIGRAM, MIXED, None)),
    *((name, process, "a process without absorbing mask, such as uniform") for name in ("udlm", "ucdlm")
      for process in (MASKED, None)),
    *((name, process, "the uniform process, uniform") for name in ("duo", "duo-dcd")
      for process in (MASKED, UNIGRAM, MIXED, None)),
    *(("ar", process, "no process: it predicts next tokens") for process in (MASKED, UNIFORM, UNIGRAM)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "process", "need"), WRONG)
def test_the_wrong_process_is_refused_with_what_to_use(name, process, need):
    with pytest.raises(ValueError, match=need) as error:
        METHODS[name](process)
    assert str(error.value).startswith(f"{METHODS[name].name} needs ")


@pytest.mark.parametrize(
    ("name", "process"),
    [("udlm", MASKED), ("mdlm", UNIFORM), ("mdlm", UNIGRAM), ("mdlm", MIXED), ("mdlm", None)],
    ids=["masked", "uniform", "unigram", "mask-and-unigram", "none"],
)
def test_every_method_that_the_refusal_offers_takes_the_process(name, process):
    with pytest.raises(ValueError, match="there are: ") as error:
        METHODS[name](process)
    offered = [slug.strip() for slug in str(error.value).rsplit(":", 1)[1].split(",")]
    takes = []
    for slug in METHODS:
        with contextlib.suppress(ValueError):
            METHODS[slug](process)
            takes.append(slug)
    assert sorted(offered) == sorted(takes)


@pytest.mark.parametrize("process", [UNIGRAM, MIXED], ids=["unigram", "mask-and-unigram"])
@pytest.mark.parametrize("name", ["udlm", "ucdlm"])
def test_other_priors_take_the_uniform_rows(name, process):
    assert METHODS[name](process).terms[0].coupling.process is process


@every_method
def test_unknown_choices_are_refused_with_those_there_are(name):
    with pytest.raises(ValueError, match=f"{METHODS[name].name} has no choice 'colour'; it has: ".replace("+", r"\+")):
        at_home(name, colour=3)


def test_the_message_lists_the_choices():
    with pytest.raises(ValueError, match="it has: kappa, steps, low, high, overshoot, divergence, floor, anchor"):
        at_home("mcdlm", delta=0.3)
    with pytest.raises(ValueError, match="it has: none"):
        at_home("mdlm", kappa=0.3)


CDLM = pytest.mark.parametrize("name", ["mcdlm", "mcdlm-pplopt", "ucdlm"])


@CDLM
@pytest.mark.parametrize("found", ["kl", "reverse_kl", "tv"])
def test_divergence_changes_the_divergence_alone(name, found):
    changed = at_home(name, divergence=found)
    assert differences(at_home(name), changed) == {"consistency.divergence"}
    assert changed.terms[0].divergence is {"kl": kl, "reverse_kl": reverse_kl, "tv": tv}[found]


@CDLM
@pytest.mark.parametrize("kappa", [0.0, 0.1, 1.0])
def test_kappa_changes_the_shares_alone(name, kappa):
    changed = at_home(name, kappa=kappa)
    assert differences(at_home(name), changed) == {"consistency.share", "anchor.share"}
    assert changed.terms[1].share(0.0) == pytest.approx(kappa)
    assert changed.terms[0].share(0.0) == pytest.approx(1 - kappa)


@CDLM
@pytest.mark.parametrize("steps", ["random", "increasing", "decreasing", "staged"])
def test_steps_change_the_times_alone(name, steps):
    default = "increasing" if name == "ucdlm" else "random"
    assert differences(at_home(name), at_home(name, steps=steps)) == (
        set() if steps == default else {"consistency.times"}
    )


@CDLM
def test_other_choices_change_one_ingredient_each(name):
    base = at_home(name)
    assert differences(base, at_home(name, overshoot="conditional")) == {"consistency.times"}
    assert differences(base, at_home(name, low=1 / 16)) == {"consistency.times"}
    assert differences(base, at_home(name, lam=0.99)) == {"consistency.target"}
    assert differences(base, at_home(name, anchor="jsd")) == {"anchor.divergence"}
    # The rate KL brings its own weight.
    assert differences(base, at_home(name, anchor="rate_kl")) == {"anchor.divergence", "anchor.weight"}
    assert differences(base, at_home(name, additive=True)) == {"consistency.share"}
    assert at_home(name, additive=True).terms[0].share(0.7) == 1
    with pytest.raises(ValueError, match="floor belongs to the reverse KL"):
        at_home(name, floor=-3.0)


@pytest.mark.parametrize("name", ["mcdlm", "ucdlm"])
def test_kappa_may_fall_from_one(name):
    annealed = at_home(name, kappa=0.4, anneal=0.5)
    assert differences(at_home(name), annealed) == {"anchor.share", "consistency.share"}
    shares = [(term.share(0.0), term.share(0.25), term.share(0.5), term.share(1.0)) for term in annealed.terms]
    assert shares == [pytest.approx((0, 0.3, 0.6, 0.6)), pytest.approx((1, 0.7, 0.4, 0.4))]
    with pytest.raises(ValueError, match="anneal is a share of the run"):
        at_home(name, anneal=1.5)


def test_choices_of_the_floor_and_of_the_distillers():
    a, b = (at_home("mcdlm", divergence="reverse_kl", floor=floor).terms[0].divergence for floor in (-3.0, -30.0))
    q, y = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([0])
    assert float(b(target=y, student=q) - a(target=y, student=q)) == pytest.approx(27 / 2)
    assert differences(at_home("sdtt"), at_home("sdtt", rounds=7)) == {"distillation.times", "distillation.target"}
    assert differences(at_home("sdtt"), at_home("sdtt", smallest=1 / 512)) == {"distillation.times"}
    assert differences(at_home("duo"), at_home("duo", tau=0.1)) == {"curriculum.coupling"}
    assert differences(at_home("duo"), at_home("duo", curriculum=0.25)) == {"curriculum.share", "nelbo.share"}


@CDLM
@pytest.mark.parametrize("kappa", [-0.1, 1.1])
def test_kappa_outside_the_unit_interval_is_refused(name, kappa):
    with pytest.raises(ValueError, match=r"kappa is a share in \[0, 1\], .* only the additive anchor takes more"):
        at_home(name, kappa=kappa)
    if kappa > 1:
        assert at_home(name, kappa=kappa, additive=True).terms[1].share(0.0) == kappa


def test_a_curriculum_of_no_length_is_udlm():
    """The natural ablation of DUO."""
    curriculum, plain = at_home("duo", curriculum=0.0).terms
    assert curriculum.share(0.0) == 0
    assert plain.share(0.0) == 1


MISFITS = {
    "divergence": "js",
    "anchor": "ce",
    "steps": "linear",
    "overshoot": "bounce",
}


@pytest.fixture(scope="module")
def messages() -> dict[str, str]:
    """What users see, without the checks of types that tests put around the package."""
    script = """
import json, sys
from cdlm.methods import METHODS
from cdlm.process import masked
found = {}
for choice, value in json.loads(sys.argv[1]):
    try:
        METHODS["mcdlm"](masked(5), **{choice: value})
        found[f"{choice}={value}"] = "accepted"
    except Exception as error:
        found[f"{choice}={value}"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""
    asked = [*MISFITS.items(), ("anchor", "tv"), ("divergence", "rate_kl"), ("low", 0.7), ("high", 1.5)]
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(asked)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(("choice", "value"), MISFITS.items())
def test_unknown_values_are_refused_by_name(choice, value, messages):
    message = messages[f"{choice}={value}"]
    assert message.startswith("ValueError: unknown")
    assert repr(value) in message
    assert "choose from" in message


def test_impossible_step_sizes_are_refused(messages):
    assert "0 < low <= high <= 1" in messages["low=0.7"]
    assert "0 < low <= high <= 1" in messages["high=1.5"]


@pytest.mark.parametrize(("choice", "value"), [("anchor", "tv"), ("divergence", "rate_kl")])
def test_values_that_the_signature_does_not_offer_are_refused(choice, value, messages):
    """The annotations are the contract: an anchor is kl, jsd or rate_kl; consistency is anything but rate_kl."""
    assert messages[f"{choice}={value}"].startswith("ValueError")
