"""Sudoku: the number of grids, their distribution and splits, the solver, and exact denoisers under our samplers."""

import hashlib
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from cdlm.data.config import PrepareConfig
from cdlm.data.prepare import prepare
from cdlm.data.sudoku import (
    GIVENS,
    ExactSudoku,
    all_grids,
    grids_at,
    held_out,
    make_puzzles,
    num_grids,
    reduce_grids,
    reduced_grids,
    sample_grids,
    solve,
    valid_grids,
)
from cdlm.data.tokenizer import Tokenizer
from cdlm.data.tokens import Meta, open_tokens
from cdlm.model.denoiser import Denoiser
from cdlm.process import masked
from cdlm.process.grid import sudoku_pattern
from cdlm.rng import seeded
from cdlm.sample.draw import last
from cdlm.sample.generate import generate
from cdlm.sample.settings import resolve

BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}


def is_grid(cells: list[int], side: int) -> bool:
    """By the rules, written out."""
    height, width = BOXES[side]
    every = set(range(side))
    rows = [cells[side * r : side * r + side] for r in range(side)]
    columns = [cells[c::side] for c in range(side)]
    boxes = [
        [rows[r + i][c + j] for i in range(height) for j in range(width)]
        for r in range(0, side, height)
        for c in range(0, side, width)
    ]
    return all(set(unit) == every for unit in (*rows, *columns, *boxes))


def test_the_number_of_grids_is_the_published_one() -> None:
    """288 and 28,200,960 (OEIS A107739); of side 4 also by the solver."""
    assert (num_grids(4), num_grids(6)) == (288, 28_200_960)
    assert len(reduced_grids(6)) == 39_168
    by_search = solve([-1] * 16, limit=1000)
    assert sorted(by_search) == sorted(all_grids(4).tolist())
    with pytest.raises(ValueError, match="too many to list"):
        num_grids(9)


@pytest.mark.parametrize("side", BOXES)
def test_validity_follows_the_rules(side: int) -> None:
    grids = sample_grids(side, 40, seed=1)
    assert all(is_grid(row, side) for row in grids.tolist())
    assert is_grid(sudoku_pattern(side).flatten().tolist(), side)
    spoiled = grids.clone()
    cell = torch.arange(40) % (side * side)
    other = (cell + 1 + torch.arange(40) % (side * side - 1)) % (side * side)  # swap two cells
    spoiled[torch.arange(40), cell], spoiled[torch.arange(40), other] = (
        grids[torch.arange(40), other],
        grids[torch.arange(40), cell],
    )
    foreign = grids.clone()
    foreign[:, 3] = side  # the token that ends a text
    for tokens in (grids, spoiled, foreign, foreign + 1):
        assert valid_grids(tokens).tolist() == [is_grid(row, side) for row in tokens.tolist()]


def test_grids_of_side_6_are_numbered_one_to_one() -> None:
    numbers = torch.randint(num_grids(6), (2000,), generator=torch.Generator().manual_seed(0)).unique()
    grids = grids_at(numbers, 6)
    assert bool(valid_grids(grids).all())
    assert len(grids.unique(dim=0)) == len(numbers)
    reduced = torch.from_numpy(reduced_grids(6).astype("int64"))
    assert torch.equal(reduce_grids(grids), reduced[numbers // math.factorial(6)])


def test_random_grids_are_uniform() -> None:
    """Chi-square over the 288 grids of side 4; over digits of cells for side 6."""
    place = 4 ** torch.arange(16)
    order = (all_grids(4) * place).sum(-1).sort().values
    drawn = torch.searchsorted(order, (sample_grids(4, 28_800, seed=0) * place).sum(-1))
    counts = torch.bincount(drawn, minlength=288).double()
    assert abs(float(((counts - 100) ** 2 / 100).sum()) - 287) < 4 * math.sqrt(2 * 287)
    six = sample_grids(6, 6000, seed=0)
    for cell in (0, 7, 35):
        counts = torch.bincount(six[:, cell], minlength=6).double()
        assert float(((counts - 1000) ** 2 / 1000).sum()) < 25  # 5 degrees of freedom


@pytest.mark.parametrize("side", [6, 9])
def test_held_out_grids_agree_on_all_names_of_the_digits(side: int) -> None:
    train, valid = sample_grids(side, 500, seed=0), sample_grids(side, 500, seed=0, valid=True)
    assert not held_out(train).any()
    assert held_out(valid).all()
    renamed = (valid + 1) % side
    assert held_out(renamed).all()
    assert not torch.equal(train, sample_grids(side, 500, seed=1))
    assert torch.equal(train, sample_grids(side, 500, seed=0))


def test_a_tenth_of_the_grids_is_held_out() -> None:
    share = held_out(torch.from_numpy(reduced_grids(6).astype("int64"))).double().mean()
    assert abs(float(share) - 0.1) < 0.01
    assert not held_out(all_grids(4)).any()


def test_the_solver_finds_every_solution() -> None:
    """Against the list of all grids, for puzzles with none, one and many solutions."""
    source, grids = random.Random(0), all_grids(4).tolist()
    seen = set()
    for _ in range(200):
        puzzle = [source.choice([-1, -1, -1, digit]) for digit in source.choice(grids)]
        if source.random() < 0.3:
            puzzle[source.randrange(16)] = source.randrange(4)
        by_list = [grid for grid in grids if all(a in (-1, b) for a, b in zip(puzzle, grid, strict=True))]
        assert sorted(solve(puzzle, limit=300)) == sorted(by_list)
        assert len(solve(puzzle)) == min(2, len(by_list))
        seen.add(min(2, len(by_list)))
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("side", BOXES)
def test_puzzles_have_one_solution(side: int) -> None:
    puzzles, solutions = make_puzzles(side, 6, seed=0)
    assert torch.equal((puzzles >= 0).sum(-1), torch.full((6,), GIVENS[side]))
    for puzzle, solution in zip(puzzles.tolist(), solutions.tolist(), strict=True):
        assert solve(puzzle) == [solution]
    assert side == 4 or held_out(solutions).all()
    again, _ = make_puzzles(side, 6, seed=0)
    other, _ = make_puzzles(side, 6, seed=1)
    assert torch.equal(puzzles, again)
    assert not torch.equal(puzzles, other)


def test_puzzles_that_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="too few puzzles of side 4 with 3 givens"):  # 4 is the least
        make_puzzles(4, 1, seed=0, givens=3)
    with pytest.raises(ValueError, match="from 1 to 16 givens"):
        make_puzzles(4, 1, seed=0, givens=17)


@pytest.mark.parametrize(("side", "visible"), [(4, (0, 4, 8, 13, 16)), (6, (22, 28, 36))])
def test_the_exact_denoiser_counts_completions(side: int, visible: tuple[int, ...]) -> None:
    """The marginals of all solutions that the search finds; uniform where there is none."""
    denoiser, cells = Denoiser(ExactSudoku(side), masked(side + 1)), side * side
    grids, source = sample_grids(side, 4, seed=0).tolist(), random.Random(0)
    for number in visible:
        for grid in grids:
            shown = set(source.sample(range(cells), number))
            puzzle = [digit if cell in shown else -1 for cell, digit in enumerate(grid)]
            solutions = torch.tensor(solve(puzzle, limit=10_000))
            wanted = torch.nn.functional.one_hot(solutions, side + 1).double().mean(0)
            x = torch.tensor([[digit if digit >= 0 else side + 1 for digit in puzzle]])
            torch.testing.assert_close(denoiser(x)[0].exp(), wanted)
    dead = torch.full((1, cells), side + 1)
    dead[0, :2] = 0
    torch.testing.assert_close(denoiser(dead)[0, 5].exp()[:side], torch.full((side,), 1 / side, dtype=torch.float64))


def valid_share(side: int, num_samples: int, **given: Any) -> float:
    process = masked(side + 1)
    denoiser = Denoiser(ExactSudoku(side), process)
    x = torch.full((num_samples, side * side), side + 1)
    settings = resolve(given, process)
    states = generate(denoiser, process, x, settings, seeded(0, settings.steps or 0, batch=num_samples))
    return float(valid_grids(last(states).x).double().mean())


REFERENCES: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "ancestral, random order": ({}, (0.0, 0.015, 0.14, 0.37, 0.61)),
    "equal steps, random order": ({"step_size": "equal"}, (0.0, 0.004, 0.20, 0.58, 1.0)),
    "equal steps, different rows, columns and boxes": (
        {"step_size": "equal", "order": "grid"},
        (0.0, 0.003, 0.50, 0.77, 1.0),
    ),
    "equal steps, most certain first": ({"order": "margin"}, (0.0, 0.003, 0.15, 0.44, 1.0)),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_valid_grids_by_the_exact_denoiser(name: str) -> None:
    given, references = REFERENCES[name]
    for steps, reference in zip((1, 2, 4, 8, 16), references, strict=True):
        share = valid_share(4, 2000, steps=steps, **given)
        error = math.sqrt(max(reference * (1 - reference), 0.002) / 2000)
        assert share == pytest.approx(reference, abs=4 * error + 0.005 if reference < 1 else 0)


def test_valid_grids_of_side_6_by_the_exact_denoiser() -> None:
    for steps, reference, num_samples in ((8, 0.08, 60), (18, 0.52, 60), (36, 1.0, 10)):
        share = valid_share(6, num_samples, steps=steps, step_size="equal")
        assert share == pytest.approx(reference, abs=0.2 if steps < 36 else 0)


def run(folder: Path, **settings: Any) -> Meta:
    return prepare(PrepareConfig((), out=folder / "tokens", **settings), Console(quiet=True))


def as_grids(folder: Path, split: Any) -> Tensor:
    data = open_tokens(folder / "tokens", split)
    return data.read(torch.arange(data.blocks()))


def test_prepared_grids_of_side_4_are_all_of_them(tmp_path: Path) -> None:
    meta = run(tmp_path, source="sudoku-4")
    assert (meta.vocab, meta.length, meta.eos) == (5, 16, 4)
    for split in ("train", "valid"):
        assert torch.equal(as_grids(tmp_path, split), all_grids(4))
    tokenizer = Tokenizer.load(tmp_path / "tokens")
    assert tokenizer.vocab_size == 5
    assert tokenizer.decode(all_grids(4)[0].tolist()) == "1234341221434321"
    assert tokenizer.encode("1234341221434321") == all_grids(4)[0].tolist()


@pytest.mark.parametrize("side", [6, 9])
def test_prepared_grids_are_the_same_for_a_seed(side: int, tmp_path: Path) -> None:
    source = f"sudoku-{side}"
    meta = run(tmp_path, source=source, num_grids=500, seed=3)
    train, valid = as_grids(tmp_path, "train"), as_grids(tmp_path, "valid")
    assert (train.shape, valid.shape) == ((500, side * side), (5, side * side))
    assert valid_grids(train).all()
    assert valid_grids(valid).all()
    assert not held_out(train).any()
    assert held_out(valid).all()
    assert meta.splits["train"].sha256 == hashlib.sha256((tmp_path / "tokens/train.bin").read_bytes()).hexdigest()
    assert run(tmp_path, source=source, num_grids=500, seed=3, overwrite=True).splits == meta.splits
    assert run(tmp_path, source=source, num_grids=500, seed=4, overwrite=True).splits != meta.splits


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"files": ("x.txt",), "source": "sudoku-4"}, "generates its grids: leave out x.txt"),
        ({"files": (), "source": "sudoku-4", "packing": "plain"}, "--packing is for text"),
        ({"files": (), "source": "sudoku-4", "num_grids": 288}, "has all 288 grids"),
        ({"files": (), "source": "sudoku-6", "num_grids": 10}, "at least 100"),
        ({"files": ("x.txt",), "num_grids": 1000}, "--num-grids is for grids of Sudoku"),
        ({"files": ("x.txt",), "seed": 1}, "--seed is for grids of Sudoku"),
    ],
)
def test_options_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrepareConfig(out=Path("tokens"), **settings)
