"""The recipes of the paper's ablations, and what they leave alone."""

import dataclasses
import math

import pytest
import torch

from cdlm.methods import METHODS
from cdlm.methods.spec import parse_method
from cdlm.objective.divergence import FLOOR, reverse_kl, reverse_kl_above
from cdlm.objective.loss import Objective
from cdlm.process import masked, uniform
from cdlm.rng import seeded
from cdlm.train.recipes import RECIPES

from ..sample.truth import tiny

TOTAL = 150_000
PEERS = -1e6


def objective(name: str) -> Objective:
    method, choices = parse_method(RECIPES[name].config.method)
    return method(masked(5), TOTAL, **choices)


def shares(name: str, progress: float) -> list[float]:
    return [term.share(progress) for term in objective(name).terms]


def test_the_readings_of_kappa_1() -> None:
    """Convex, kappa 1 would leave no consistency at all; both readings have some."""
    assert shares("ablation-kappa-1-additive", 0.0) == shares("ablation-kappa-1-additive", 1.0) == [1, 1]
    assert shares("ablation-kappa-1-annealed", 0.0) == shares("ablation-kappa-1-annealed", 2 / 3) == [0, 1]
    assert shares("ablation-kappa-1-annealed", 1.0) == pytest.approx([0.8, 0.2])
    assert shares("ablation-kappa-0.4", 1.0) == pytest.approx([0.8, 0.2])


def at_zero(name: str, n: int = 20_000) -> float:
    """The share of consistency rows with s = 0."""
    s, t = objective(name).terms[0].times(0.0, torch.arange(n), n, seeded(0, batch=n))
    assert bool((s < t).all())
    return float((s == 0).double().mean())


def test_clip_puts_37_percent_of_the_consistency_rows_at_the_data() -> None:
    """P(t < delta) with t in [1e-3, 1] and delta in [1/8, 5/8] is (E[delta] - 1e-3) / (1 - 1e-3)."""
    expected = (3 / 8 - 1e-3) / (1 - 1e-3)
    assert round(100 * expected) == 37
    for name in ("mcdlm", "mcdlm-pplopt", "ablation-kappa-0"):
        assert at_zero(name) == pytest.approx(expected, abs=0.005)
    assert at_zero("ablation-overshoot-conditional") == 0


def test_the_floor_decides_the_sign_of_the_reverse_kl() -> None:
    """For data with probabilities p the best q is softmax(-floor p): nearly uniform, or the argmax."""
    p = torch.full((200,), 0.9 / 199, dtype=torch.float64)
    p[7] = 0.1
    tokens = torch.arange(200)

    def expected(log_q: torch.Tensor, floor: float) -> float:
        found = reverse_kl_above(floor)(target=tokens, student=log_q.expand(200, -1))
        return float((p * found).sum())

    flat, sharp = torch.full((200,), -math.log(200), dtype=torch.float64), (1e3 * p).log_softmax(-1)
    assert expected(flat, FLOOR) < expected(p.log(), FLOOR) < expected(sharp, FLOOR)
    assert expected(sharp, PEERS) < expected(p.log(), PEERS) < expected(flat, PEERS)
    for floor, entropy in ((FLOOR, (5.2, math.log(200))), (PEERS, (0, 1e-6))):
        best = (-floor * p).log_softmax(-1)
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):
            other = (best + 0.1 * torch.randn(200, generator=generator, dtype=torch.float64)).log_softmax(-1)
            assert expected(best, floor) <= expected(other, floor) + 1e-6
        assert entropy[0] <= float(-(best.exp() * best.clamp(min=-1e9)).sum()) <= entropy[1]


def test_the_floor_of_the_peers_is_in_that_ablation_alone() -> None:
    (consistency, _) = objective("ablation-reverse-kl").terms
    assert str(consistency.divergence) == str(reverse_kl_above(PEERS))
    for name, recipe in RECIPES.items():
        assert ("floor" in recipe.config.method) == (name == "ablation-reverse-kl")


@pytest.mark.parametrize("name", ["sdtt", "duo-dcd"])
def test_distillation_keeps_its_loss_to_the_bit(name: str) -> None:
    """That of a reverse KL written out with log 1e-6."""
    process = masked(5) if name == "sdtt" else uniform(5)
    student, teacher = tiny(process, 5, seed=1), tiny(process, 5, seed=2)
    x0 = torch.randint(5, (8, 12), generator=torch.Generator().manual_seed(0))
    row = METHODS[name](process, TOTAL)
    (term,) = row.terms
    assert term.divergence is reverse_kl
    assert math.log(1e-6) == FLOOR

    def loss(floor: float) -> torch.Tensor:
        other = dataclasses.replace(row, terms=(dataclasses.replace(term, divergence=reverse_kl_above(floor)),))
        return other.loss(student, teacher, x0, 0, seeded(3, batch=8)).total.detach()

    found = row.loss(student, teacher, x0, 0, seeded(3, batch=8)).total.detach()
    assert torch.equal(found, loss(math.log(1e-6)))
