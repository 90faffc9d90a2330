"""Eq. (8) as it is written against the fast path: the same value, terms and gradient for every method."""

import functools

import pytest
import torch

from cdlm.methods import METHODS
from cdlm.objective.loss import Objective
from cdlm.process import Process, masked, uniform, unigram
from cdlm.rng import seeded

V, B, L, TOTAL = 6, 12, 7, 1000
MIXED = unigram(torch.tensor([0.1, 0.1, 0.05, 0.05, 0.2, 0.1, 0.4], dtype=torch.float64), V)
UNIGRAM = unigram(torch.tensor([0.3, 0.1, 0.2, 0.1, 0.2, 0.1], dtype=torch.float64))
CASES = [(name, method.default_process(V)) for name, method in METHODS.items()]
CASES += [(name, process) for name in ("udlm", "ucdlm") for process in (UNIGRAM, MIXED)]
CASES += [("mcdlm-guided", MIXED), ("mdlm", masked(V)), ("udlm", uniform(V))]


@pytest.mark.parametrize("step", [100, 900])
@pytest.mark.parametrize(("name", "process"), CASES)
def test_both_paths_agree(name: str, process: Process | None, step: int, tiny) -> None:
    method = METHODS[name]
    build = {"causal": process is None, "time": method.time_conditioning, "joint": method.joint_head}
    student, target = tiny(process, seed=1, **build), tiny(process, seed=2, **build).requires_grad_(False)
    objective = method(process, TOTAL)
    x0 = torch.randint(V, (B, L), generator=torch.Generator().manual_seed(3))

    def measured(loss) -> tuple[float, dict[str, float], torch.Tensor]:
        student.zero_grad(set_to_none=True)
        found = loss(student, target, x0, step, seeded(step, "step", batch=B))
        found.total.backward()
        gradient = [p.grad.flatten() for p in student.parameters() if p.grad is not None]
        return (
            float(found.total.detach()),
            {key: float(value) for key, value in found.terms.items()},
            torch.cat(gradient),
        )

    value, terms, gradient = measured(objective.loss)
    plain, plain_terms, plain_gradient = measured(functools.partial(objective.loss, plain=True))
    tolerance = 1e-6 if name == "duo" else 1e-9  # relaxed inputs are mixtures in single precision
    assert value == pytest.approx(plain, rel=tolerance)
    assert terms == pytest.approx(plain_terms, rel=tolerance)
    assert torch.allclose(gradient, plain_gradient, rtol=100 * tolerance, atol=tolerance * float(plain_gradient.norm()))
    assert float(plain_gradient.norm()) > 0


def test_it_notices_another_weight(tiny) -> None:
    """The comparison can fail: with another weight on one side the values part."""
    student, target = tiny(masked(V), seed=1), tiny(masked(V), seed=2)
    x0 = torch.randint(V, (B, L))
    one, other = (METHODS["mcdlm"](masked(V), TOTAL, kappa=kappa) for kappa in (0.4, 0.6))
    rng = seeded(0, batch=B)
    found: list[Objective] = [one, other]
    values = [float(each.loss(student, target, x0, 0, rng, plain=True).total.detach()) for each in found]
    assert values[0] != pytest.approx(values[1], rel=1e-3)
    assert float(one.loss(student, target, x0, 0, rng).total.detach()) == pytest.approx(values[0], rel=1e-9)
