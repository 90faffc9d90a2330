"""The studies train the objectives that version fef84f3 trained under its own method strings.

`tests/fixtures/fef84f3/losses.json` has, for every row, the method string of that version, and the loss, the loss of
each term, and the norm and a projection of the gradient at two steps of a run, computed by that version.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cdlm.methods import METHODS
from cdlm.methods.spec import parse_method, same_method
from cdlm.model.config import SIZES
from cdlm.model.denoiser import Denoiser
from cdlm.model.ema import frozen_copy
from cdlm.rng import seeded
from studies import ablations, anchor, search
from studies.mcdlm_search import ROWS

BEFORE = json.loads((Path(__file__).parents[1] / "fixtures" / "fef84f3" / "losses.json").read_text())
NOW = {f"search/{row}": method for row, method in {**search.TRIALS, **search.UNIFORM}.items()}
for slug, table in (("mcdlm-pplopt", ablations.TABLES), ("mcdlm", ablations.QUESTIONS)):
    NOW |= {f"ablations/{row}": f"{slug}:{words}" if words else slug for row, words in table.items()}
NOW |= {f"anchor/{row}": method for row, method in anchor.READINGS.items()}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, row in ROWS.items():
        monkeypatch.setitem(METHODS, name, row)


def numbers(measured: list) -> Iterator[float]:
    for total, terms, norm, projection in measured:
        yield from (total, *terms.values(), norm, projection)


def measure(spec: str) -> list:
    """Losses and gradients of a tiny network in double precision, at the start and late in a run."""
    method, choices = parse_method(spec)
    process = method.default_process(11)
    torch.manual_seed(3)
    size = {
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "cond_dim": 8,
        "time_conditioning": method.time_conditioning,
    }
    student = Denoiser(dataclasses.replace(SIZES["tiny"], **size), process).double()
    for parameter in student.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    target = frozen_copy(student)
    for parameter in target.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    x0 = seeded(0, "x", batch=8).integers(12, 11)
    objective = method(process, 1000, **choices)
    found = []
    for step in (0, 700):
        student.zero_grad()
        loss = objective.loss(student, target, x0, step, seeded(1, "train", step, batch=8))
        loss.total.backward()
        gradient = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])
        projection = (gradient * torch.arange(len(gradient)).double().cos()).sum()
        terms = {name: value.item() for name, value in loss.terms.items()}
        found.append([loss.total.item(), terms, gradient.norm().item(), projection.item()])
    return found


def test_every_row_is_there() -> None:
    assert NOW.keys() == BEFORE.keys()


@pytest.mark.parametrize("row", BEFORE)
def test_a_row_has_the_losses_that_it_had(row: str) -> None:
    expected = list(numbers(BEFORE[row]["losses"]))
    # a time-conditioned network embeds the time in single precision, whose last bit depends on the machine
    rel = 1e-6 if parse_method(NOW[row])[0].time_conditioning else 1e-9
    assert list(numbers(measure(NOW[row]))) == pytest.approx(expected, rel=rel, abs=1e-12)


@pytest.mark.parametrize("row", BEFORE)
def test_its_old_method_string_stands_for_it(row: str) -> None:
    assert same_method(BEFORE[row]["method"], NOW[row])
