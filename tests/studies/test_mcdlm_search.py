"""The experiments of the search as objectives: each loss written out over rows, and what is refused."""

import pytest
import torch
from torch import Tensor

from cdlm.methods import METHODS
from cdlm.methods.spec import parse_method, same_method, split_method
from cdlm.objective import Bridge, Objective, Ordered, inverse_step, unit
from cdlm.objective.divergence import jsd
from cdlm.objective.loss import split
from cdlm.process import masked, uniform
from cdlm.process.order import bit_reversed_order
from cdlm.rng import Rng, seeded
from cdlm.types import Pair
from studies.mcdlm_search import ROWS, mcdlm_search

from ..paper.enumeration import tiny as network

PROCESS = masked(5)


@pytest.fixture
def tiny():
    return network


@pytest.mark.parametrize(
    ("choice", "value", "field"),
    [("revealed", "kl", "divergence"), ("weight", "unit", "weight"), ("order", "bit-reversed", "coupling")],
)
def test_a_choice_changes_one_ingredient(choice: str, value: str, field: str) -> None:
    plain, (term, anchor) = METHODS["mcdlm"](PROCESS).terms, mcdlm_search(PROCESS, **{choice: value}).terms
    assert anchor == plain[1]
    for other in ("times", "coupling", "target", "divergence", "weight", "share"):
        assert (getattr(term, other) == getattr(plain[0], other)) == (other != field)
    assert plain[0].weight is inverse_step
    assert mcdlm_search(PROCESS, weight="unit").terms[0].weight is unit
    assert mcdlm_search(PROCESS, order="bit-reversed").terms[0].coupling == Ordered(PROCESS, bit_reversed_order, 2)


def test_without_choices_it_is_mcdlm() -> None:
    assert mcdlm_search(PROCESS) == METHODS["mcdlm"](PROCESS)


def test_a_sharpened_target_and_another_divergence_where_tokens_are_revealed(tiny) -> None:
    """The loss, written out over rows: kl against revealed tokens, jsd against the tempered law elsewhere."""
    process, b, l = masked(6), 5, 7
    student, target = tiny(process, seed=1), tiny(process, seed=2)
    x0 = torch.randint(6, (b, l))
    objective = mcdlm_search(process, total=10, revealed="kl", sharpen=0.5, kappa=0.0, weight="unit")
    found, pair, _ = consistency(objective, student, target, x0)
    q = student.head(student.features(pair.x_t, pair.alpha_t))
    p = (target.head(target.features(pair.x_s, pair.alpha_s)) / 0.5).log_softmax(-1)
    total = 0.0
    for row in range(b):
        for i in range(l):
            if int(pair.x_t[row, i]) != 6:
                continue
            if int(pair.x_s[row, i]) != 6 or float(pair.s[row]) == 0:
                total -= float(q[row, i, x0[row, i]])
            else:
                total += float(jsd(target=p[row, i][None], student=q[row, i][None]))
    assert float(found.detach()) == pytest.approx(total / (b * l), rel=1e-9)


@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_a_target_averaged_over_bridges(tiny, kind: str) -> None:
    """The loss, written out: the mean law over the bridges that leave a position noisy, as the first must."""
    process, b, l = (masked if kind == "masked" else uniform)(6), 5, 7
    student, target = tiny(process, seed=1), tiny(process, seed=2)
    x0 = torch.randint(6, (b, l))
    objective = mcdlm_search(process, total=10, bridges=3, kappa=0.0, weight="unit")
    found, pair, own = consistency(objective, student, target, x0)
    draws = [pair.x_s, *(other.x_s for other in pair.others)]
    assert len(draws) == 3
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], Bridge(process)(x0, pair.s, pair.t, own).x_s)
    q = student.head(student.features(pair.x_t, pair.alpha_t))
    laws = [target.head(target.features(x_s, pair.alpha_s)).softmax(-1) for x_s in draws]
    total, several = 0.0, 0
    for row in range(b):
        for i in range(l):
            if kind == "masked" and int(pair.x_t[row, i]) != 6:
                continue
            if float(pair.s[row]) == 0 or (kind == "masked" and int(draws[0][row, i]) != 6):
                goal = x0[row, i]
            else:
                noisy = [k for k in range(3) if kind == "uniform" or int(draws[k][row, i]) == 6]
                several += 1 < len(noisy) < 3
                goal = (sum(laws[k][row, i] for k in noisy) / len(noisy)).log()
            total += float(jsd(target=goal[None], student=q[row, i][None]))
    assert several or kind == "uniform"
    assert float(found.detach()) == pytest.approx(total / (b * l), rel=1e-9)


def consistency(objective: Objective, student, target, x0: Tensor) -> tuple[Tensor, Pair, Rng]:
    """The first term's loss, alone in its batch; the pair it was taken at, and the noise that this was drawn with."""
    b = len(x0)
    rng = seeded(2, batch=b)
    found = objective.loss(student, target, x0, 0, rng).terms["consistency"]
    for net in (student, target):
        net.requires_grad_(False)
    ((rows, stratum, _), _) = split([1.0, 0.0], rng)
    assert torch.equal(rows, torch.arange(b))
    term, own = objective.terms[0], rng[rows]("consistency")
    return found, term.coupling(x0, *term.times(0.0, stratum, b, own), own), own


@pytest.mark.parametrize(
    ("process", "choices", "advice"),
    [
        (PROCESS, {"bridges": 0}, "at least one bridge"),
        (PROCESS, {"bridges": 2, "order": "dilated"}, "leaves a hop one bridge"),
        (PROCESS, {"sharpen": 0.0}, "temperature of a target must be above 0"),
        (uniform(5), {"order": "dilated"}, "is one of masks"),
        (uniform(5), {"guide": 0.5}, "leave out guide"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(process, choices: dict, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        mcdlm_search(process, **choices)


@pytest.mark.parametrize(
    ("old", "row", "words"),
    [
        ("mcdlm:weight=step,order=random,bridges=1", "mcdlm", {}),
        ("mcdlm:divergence=kl,lam=1,guide=1,sharpen=0.85", "mcdlm-guided", {"guidance": "1", "temperature": "0.85"}),
        ("mcdlm:divergence=kl,guide=0.5", "mcdlm-guided", {"lam": "0.999", "guidance": "0.5", "temperature": "1"}),
        ("mcdlm:divergence=kl,guide=1,anneal=0.5", "mcdlm-search", {"guide": "1", "anneal": "0.5"}),
        ("mcdlm:bridges=4,kappa=0.2", "mcdlm-search", {"bridges": "4", "kappa": "0.2"}),
        ("ucdlm:weight=unit", "ucdlm-search", {"weight": "unit"}),
        ("mcdlm-guided", "mcdlm-guided", {}),
        ("few-step:order=dilated", "few-step", {"order": "dilated"}),
    ],
)
def test_every_old_string_stands_for_a_row(old: str, row: str, words: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    found, choices = split_method(old)
    assert found == row
    assert words.items() <= choices.items()
    if row.endswith("-search"):
        with pytest.raises(ValueError, match=r"no longer has the option .*studies/search\.py"):
            parse_method(old)
        for name, method in ROWS.items():
            monkeypatch.setitem(METHODS, name, method)
    parse_method(old)
    assert same_method(old, old)
    assert not same_method(old, "mdlm")
