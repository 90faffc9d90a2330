"""The worked example of `cdlm/sample/plan.py`: levels, evaluations and states, as printed there."""

import torch
from torch import Tensor

from cdlm.process import masked
from cdlm.rng import seeded
from cdlm.sample import plan
from cdlm.sample.order import plan_by_level
from cdlm.sample.plan import execute
from cdlm.sample.timesteps import uniform_times

LEVEL = torch.tensor([[0.9, 0.1, 0.3, 0.8], [0.6, 0.2, 0.7, 0.55]], dtype=torch.float64)
VOCAB, MASK = 8, 8
LETTERS = "AHFBCGDE_"


def evaluations() -> list[plan.Evaluation]:
    is_mask = torch.ones(2, 4, dtype=torch.bool)
    return plan_by_level(masked(VOCAB), is_mask, LEVEL, uniform_times(4), seeded(0, batch=2))


def test_the_evaluations_of_the_example() -> None:
    found = evaluations()
    assert [evaluation.counts for evaluation in found] == [[2, 3], [1, 1], [1, 0]]
    assert [evaluation.index.tolist() for evaluation in found] == [[0, 3, 4, 6, 7], [2, 5], [1]]
    assert [evaluation.t.tolist() for evaluation in found[:2]] == [[1.0, 0.75], [0.5, 0.25]]
    assert found[2].t[0] == 0.25


def test_the_states_of_the_example() -> None:
    """With a predictor that is certain of a letter at each position, on those sequences alone that draw something."""
    letters = torch.tensor([[LETTERS.index(letter) for letter in row] for row in ("AHFB", "CGDE")])
    seen: list[int] = []

    def predict(x: Tensor, t: float) -> Tensor:
        seen.append(len(x))
        which = [0 if t == 1 or LETTERS.index("A") in row else 1 for row in x.tolist()]
        return torch.nn.functional.one_hot(letters[which], VOCAB).double().log()

    states = list(execute(predict, masked(VOCAB), torch.full((2, 4), MASK), evaluations()))
    shown = [["".join(LETTERS[token] for token in row) for row in state.x.tolist()] for state in states]
    assert shown == [["____", "____"], ["A__B", "C_DE"], ["A_FB", "CGDE"], ["AHFB", "CGDE"]]
    assert states[-1].nfe == [3, 2]
    assert sum(seen) == 5


def test_the_docstring_has_these_numbers() -> None:
    text = " ".join(plan.__doc__.split())
    for evaluation in evaluations():
        counts, index = (" ".join(map(str, each)) for each in (evaluation.counts, evaluation.index.tolist()))
        assert f"{counts} {index} " in text
    for row in LEVEL.tolist():
        assert " ".join(f"{value:g}".lstrip("0") for value in row) in text
    assert "1 4 3 1" in text
    assert "2 4 2 2" in text
    assert "2 + 2 + 1 sequences" in text
    assert "8 positions, where the plain sampler runs 8 and 32" in text
