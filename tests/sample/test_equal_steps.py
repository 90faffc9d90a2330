"""Steps of equal size: how many positions each step unmasks, which ones, and that it pays on an exact task."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from cdlm.process import masked
from cdlm.process.order import equal_steps
from cdlm.rng import seeded
from cdlm.sample.draw import State
from cdlm.sample.generate import generate
from cdlm.sample.samplers import ORDERS, load_function
from cdlm.sample.settings import resolve

from .truth import V, agrees, text

MASK = V


def flat(x: Tensor, t: float) -> Tensor:
    return torch.zeros(*x.shape, V, dtype=torch.float64)


def states_of(x: Tensor, **settings) -> list[State]:
    resolved = resolve({"step_size": "equal", **settings}, masked(V))
    return list(generate(flat, masked(V), x, resolved, seeded(0, batch=len(x))))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("length", "steps"), [(1, 1), (3, 2), (5, 4), (8, 8), (17, 6), (17, 16), (24, 16), (100, 7), (100, 32), (5, 12)]
)
def test_each_step_unmasks_the_rounded_share(order: str, length: int, steps: int) -> None:
    """After step k of N, k l / N positions are unmasked, rounded half up: in integers, floor((2 k l + N) / (2 N))."""
    states = states_of(torch.full((8, length), MASK), steps=steps, order=order)
    done = [(2 * k * length + steps) // (2 * steps) for k in range(steps + 1)]
    sizes = [after - before for before, after in itertools.pairwise(done)]
    assert max(sizes) - min(sizes) <= 1
    visible = torch.stack([(state.x != MASK).sum(-1) for state in states])
    assert visible.T.tolist() == [sorted(set(done))] * 8  # steps without a position do not run
    assert states[-1].nfe == [len(set(done)) - 1] * 8


@pytest.mark.parametrize("order", ORDERS)
def test_the_positions_come_in_the_same_order(order: str) -> None:
    """Levels are replaced by their ranks; visible positions do not count."""
    is_mask = torch.rand(16, 50, generator=torch.Generator().manual_seed(0)) < 0.7
    level = load_function(ORDERS[order].levels)(is_mask, 6, seeded(1, batch=16))
    even = equal_steps(level, is_mask)
    for row in range(16):
        before, after = level[row, is_mask[row]], even[row, is_mask[row]]
        assert torch.equal(before.argsort(), after.argsort())
        spaced = (torch.arange(len(after), dtype=torch.float64) + 0.5) / len(after)
        assert torch.allclose(after.sort().values, spaced, atol=1e-9, rtol=0)


def test_the_random_order_unmasks_every_subset_equally_often() -> None:
    """Of the 15 pairs that the first of three steps can take out of six positions, each is as likely as the others."""
    n = 30_000
    first = states_of(torch.full((n, 6), MASK), steps=3)[1].x != MASK
    assert bool((first.sum(-1) == 2).all())
    pairs = {pair: k for k, pair in enumerate(itertools.combinations(range(6), 2))}
    drawn = torch.tensor([pairs[tuple(row.nonzero()[:, 0].tolist())] for row in first])
    assert agrees(drawn[:, None], torch.full((15,), 1 / 15, dtype=torch.float64), 15)


def grids_of_sudoku() -> Tensor:
    """The 288 grids of 4 x 4 sudoku: every row, column and 2 x 2 block has four different digits."""
    rows = list(itertools.permutations(range(4)))
    found = []
    for top in itertools.product(rows, repeat=2):
        if all(len({*top[0][k : k + 2], *top[1][k : k + 2]}) == 4 for k in (0, 2)):
            for bottom in itertools.product(rows, repeat=2):
                grid = (*top, *bottom)
                blocks = all(len({*bottom[0][k : k + 2], *bottom[1][k : k + 2]}) == 4 for k in (0, 2))
                if blocks and all(len(set(column)) == 4 for column in zip(*grid, strict=True)):
                    found.append(sum(grid, ()))
    return torch.tensor(found)


GRIDS = grids_of_sudoku()
CELLS = torch.nn.functional.one_hot(GRIDS, 4).flatten(1).double()


def solver(x: Tensor, t: float) -> Tensor:
    """The exact posterior: digits of the grids that agree with everything visible; anything where none does."""
    visible = torch.nn.functional.one_hot(x, 5)[..., :4].flatten(1).double()
    agreeing = (visible @ CELLS.T == (x < 4).sum(-1, keepdim=True)).double()
    return (agreeing @ CELLS + 1e-9).view(*x.shape, 4).log()


def share_of_valid_grids(steps: int, step_size: str, n: int) -> float:
    process = masked(4)
    x = torch.full((n, 16), 4)
    settings = resolve({"steps": steps, "step_size": step_size}, process)
    drawn = text(generate(solver, process, x, settings, seeded(steps, step_size, batch=n)))
    valid = set(map(tuple, GRIDS.tolist()))
    return sum(tuple(row) in valid for row in drawn.tolist()) / n


def exact_share(steps: int, step_size: str, plans: int) -> tuple[float, float]:
    """The probability of a valid grid by enumeration, averaged over random plans, and its standard error.

    A plan says in which step each cell is drawn. Given the plan, the probability of a grid is a product over its cells:
    the share of the grids agreeing with everything drawn in earlier steps that also agree in this cell. Relabelling
    digits makes 24 equally likely grids out of each whose first row is 1234.
    """
    first_row = GRIDS[(GRIDS[:, :4] == torch.arange(4)).all(-1)]
    equal = first_row[:, None] == GRIDS[None]  # 12 x 288 x 16
    generator, values = torch.Generator().manual_seed(0), []
    for _ in range(plans):
        if step_size == "equal":
            step = torch.randperm(16, generator=generator) * steps // 16
        else:
            step = torch.randint(steps, (16,), generator=generator)
        chance = torch.ones(len(first_row), dtype=torch.float64)
        for cell in range(16):
            agreeing = equal[..., step < step[cell]].all(-1)
            chance *= (agreeing & equal[..., cell]).sum(-1) / agreeing.sum(-1)
        values.append(24 * float(chance.sum()))
    found = torch.tensor(values)
    return float(found.mean()), float(found.std()) / math.sqrt(plans)


@pytest.mark.parametrize(
    ("steps", "step_size", "share"),
    [(4, "random", 0.14), (4, "equal", 0.20), (8, "random", 0.37), (8, "equal", 0.60), (16, "random", 0.61)],
)
def test_valid_sudoku_grids_become_more_frequent(steps: int, step_size: str, share: float) -> None:
    """Independent draws within a step cost the exact predictor its grids: fewer collisions, more valid grids."""
    n = 3000
    truth, error = exact_share(steps, step_size, plans=300)
    assert truth == pytest.approx(share, abs=0.03)
    found = share_of_valid_grids(steps, step_size, n)
    assert abs(found - truth) < 5 * math.hypot(error, math.sqrt(truth * (1 - truth) / n))


def test_one_cell_at_a_time_makes_every_grid_valid() -> None:
    assert len(GRIDS) == 288
    assert share_of_valid_grids(16, "equal", 1000) == 1.0
