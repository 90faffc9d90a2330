"""Sudoku: grids whose distribution is known exactly, puzzles with one solution, and exact denoisers.

A grid of side k (4, 6 or 9) is a sequence of k * k tokens, row by row; token d is the digit d + 1, and token k ends a
text, which no grid contains. The symmetric group acts on the digits, so the grids with the first row 1, 2, ..., k stand
for all of them: 12 of 288 for side 4, and 39,168 of 28,200,960 for side 6. A uniform grid is one of these and a
permutation of the digits. The grids of side 9 cannot be listed; `sample_grids` says what is drawn instead.
"""

import functools
import hashlib
import math
import random
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from cdlm.data.tokenizer import Tokenizer
from cdlm.process.grid import box_height, grid_cells
from cdlm.rng import Rng, seeded

SIDES = (4, 6, 9)
LISTED = (4, 6)
"""Sides whose grids are listed, up to the names of the digits."""
GIVENS = {4: 6, 6: 12, 9: 30}
"""Givens of a puzzle unless told otherwise."""
HELD_OUT = 0.1
"""The share of grids that training never sees, for sides 6 and 9."""
BASES_9 = 1000
"""Different grids that those of side 9 are made of, by symmetries."""

Grids = Int[Tensor, "n cells"]


@functools.cache
def reduced_grids(side: int) -> NDArray[np.uint8]:
    """Every grid with the first row 0, 1, ..., side - 1, in lexicographic order, found row by row."""
    if side not in LISTED:
        raise ValueError(f"the grids of side {side} are too many to list; choose from {', '.join(map(str, LISTED))}")
    rows = _permutations(side)
    columns = _one_hot_bits(rows, np.arange(side), side)
    box = grid_cells(side)[2]
    height = box_height(side)
    in_box = _one_hot_bits(rows, box[:side].numpy(), side)  # boxes side by side; the same for every band
    grids, used, used_in_band = np.zeros((1, 1), np.int64), columns[:1], in_box[:1]
    for row in range(1, side):
        used_in_band = np.zeros_like(used_in_band) if row % height == 0 else used_in_band
        parents, choices = [], []
        for start in range(0, len(grids), 4096):
            part = slice(start, start + 4096)
            clash = used[part, None] & columns | used_in_band[part, None] & in_box
            parent, choice = (clash == 0).nonzero()
            parents.append(parent + start)
            choices.append(choice)
        parent, new = np.concatenate(parents), np.concatenate(choices)
        grids = np.concatenate([grids[parent], new[:, None]], 1)
        used, used_in_band = used[parent] | columns[new], used_in_band[parent] | in_box[new]
    return rows[grids].reshape(len(grids), -1).astype(np.uint8)


def _permutations(side: int) -> NDArray[np.int64]:
    """All permutations of the digits, in lexicographic order."""
    found = np.zeros((1, 0), np.int64)
    for size in range(1, side + 1):
        first = np.repeat(np.arange(size), len(found))[:, None]
        rest = np.tile(found, (size, 1))
        found = np.concatenate([first, rest + (rest >= first)], 1)
    return found


def _one_hot_bits(rows: NDArray[np.int64], place: NDArray[np.int64], side: int) -> NDArray[np.int64]:
    """For each row, a bit for every pair of a place (a column, or a box) and a digit in it."""
    return (np.int64(1) << (place * side + rows)).sum(1)


def num_grids(side: int) -> int:
    return len(reduced_grids(side)) * math.factorial(side)


def grids_at(index: Int[Tensor, "n"], side: int) -> Grids:
    """The grids of these numbers, from 0 to num_grids - 1: the reduced grid, then the names of its digits."""
    names = math.factorial(side)
    reduced = torch.from_numpy(reduced_grids(side)[(index // names).numpy()].astype(np.int64))
    return torch.from_numpy(_permutations(side))[index % names].gather(1, reduced)


def all_grids(side: int) -> Grids:
    """Every grid; for side 4, as those of side 6 fill a gigabyte per byte and cell."""
    if side != 4:
        raise ValueError(f"only the grids of side 4 are few enough to list (got side {side})")
    return grids_at(torch.arange(num_grids(side)), side)


def reduce_grids(grids: Grids) -> Grids:
    """The same grids with their digits renamed so that the first row is 0, 1, ..., side - 1."""
    side = math.isqrt(grids.shape[1])
    return grids[:, :side].argsort(-1).gather(1, grids)


def held_out(grids: Grids) -> Bool[Tensor, "n"]:
    """Whether a grid is kept from training: by a hash of the reduced grid, so that all ways to name its digits agree.
    No grid of side 4 is: there are only 288."""
    if grids.shape[1] == 16:
        return torch.zeros(len(grids), dtype=torch.bool)
    reduced = reduce_grids(grids).to(torch.uint8).numpy()
    hashes = [hashlib.blake2b(row.tobytes(), digest_size=4).digest() for row in reduced]
    return torch.tensor([int.from_bytes(value, "little") < HELD_OUT * 2**32 for value in hashes], dtype=torch.bool)


@functools.cache
def _reduced_of_split(side: int, valid: bool) -> Int[Tensor, "k"]:
    """The numbers of the reduced grids of a split; side 4 has no split."""
    out = held_out(torch.from_numpy(reduced_grids(side).astype(np.int64)))
    return (out == (valid and side != 4)).nonzero()[:, 0]


def sample_grids(side: int, count: int, seed: int, *, valid: bool = False) -> Grids:
    """Random grids, of the training split or of the held-out one.

    Sides 4 and 6: uniform over the split, independent. Side 9: one of 1,000 grids that a randomised search has found
    (the same ones for every seed), with a random symmetry: digits renamed; bands and stacks, rows within bands and
    columns within stacks permuted; transposed or not. This is not uniform over all 6.67e21 grids.
    """
    rng = seeded(seed, "sudoku", side, "valid" if valid else "train", batch=count)
    if side in LISTED:
        return _uniform_grids(side, rng, _reduced_of_split(side, valid))
    grids, found, batch = torch.empty(0, side * side, dtype=torch.long), 0, 0
    while found < count:  # a held-out grid is one in ten: draw until there are enough
        drawn = _symmetric_grids(side, seeded(seed, "sudoku", side, batch, batch=max(64, count)))
        drawn = drawn[held_out(drawn) == valid]
        grids, found, batch = torch.cat([grids, drawn]), found + len(drawn), batch + 1
    return grids[:count]


def _uniform_grids(side: int, rng: Rng, reduced: Int[Tensor, "k"]) -> Grids:
    chosen = reduced[rng("grid").integers(1, len(reduced))[:, 0]]
    names = rng("digits").integers(1, math.factorial(side))[:, 0]
    return grids_at(chosen * math.factorial(side) + names, side)


@functools.cache
def _base_grids(side: int) -> Grids:
    """Solutions of the empty grid by a search in random order."""
    source = random.Random(side)
    return torch.tensor([solve([-1] * side * side, 1, source)[0] for _ in range(BASES_9)])


def _symmetric_grids(side: int, rng: Rng) -> Grids:
    """Base grids with random symmetries."""
    n, box = rng.batch, math.isqrt(side)
    bases = _base_grids(side)
    grids = bases[rng("base").integers(1, len(bases))[:, 0]].view(n, side, side)

    def shuffled_lines(name: str) -> Int[Tensor, "n side"]:
        outer = rng(name, "outer").uniform(box).argsort(-1)
        inner = rng(name, "inner").uniform(side).view(n, box, box).argsort(-1)
        return (outer[:, :, None] * box + inner).flatten(1)

    rows, columns = shuffled_lines("rows"), shuffled_lines("columns")
    every = torch.arange(n)[:, None, None]
    grids = grids[every, rows[:, :, None], columns[:, None, :]]
    flip = rng("transpose").uniform(1)[:, :, None] < 0.5
    grids = torch.where(flip, grids.transpose(1, 2), grids).flatten(1)
    return rng("digits").uniform(side).argsort(-1).gather(1, grids)


def valid_grids(tokens: Grids) -> Bool[Tensor, "n"]:
    """Which sequences are grids: every row, column and box has every digit once."""
    side = math.isqrt(tokens.shape[1])
    digits = torch.where(tokens < side, tokens, side).cpu()
    seen = torch.zeros(len(tokens), 3 * side, side + 1, dtype=torch.long)
    for kind, unit in enumerate(grid_cells(side)):
        place = (kind * side + unit) * (side + 1) + digits
        seen.view(len(tokens), -1).scatter_add_(1, place, torch.ones_like(place))
    return (seen[..., :side] == 1).all(-1).all(-1)


def solve(puzzle: Sequence[int], limit: int = 2, source: random.Random | None = None) -> list[list[int]]:
    """The solutions of a puzzle, at most `limit` of them, by a search that fills the cell with the fewest candidates
    first. Empty cells are -1; candidates come in order, or shuffled by `source`."""
    side = math.isqrt(len(puzzle))
    units = _units(side)
    grid = list(puzzle)
    used = [0] * (3 * side)
    for cell, digit in enumerate(grid):
        if digit >= 0:
            if any(used[unit] >> digit & 1 for unit in units[cell]):
                return []
            for unit in units[cell]:
                used[unit] |= 1 << digit
    solutions: list[list[int]] = []

    def search() -> None:
        best, best_options, fewest = -1, 0, side + 1
        for cell, digit in enumerate(grid):
            if digit < 0:
                row, column, box = units[cell]
                options = ~(used[row] | used[column] | used[box]) & (1 << side) - 1
                if options.bit_count() < fewest:
                    best, best_options, fewest = cell, options, options.bit_count()
                    if fewest <= 1:
                        break
        if best < 0:
            solutions.append(grid.copy())
            return
        candidates = [digit for digit in range(side) if best_options >> digit & 1]
        if source is not None:
            source.shuffle(candidates)
        for digit in candidates:
            grid[best] = digit
            for unit in units[best]:
                used[unit] ^= 1 << digit
            search()
            for unit in units[best]:
                used[unit] ^= 1 << digit
            grid[best] = -1
            if len(solutions) >= limit:
                return

    search()
    return solutions


@functools.cache
def _units(side: int) -> list[tuple[int, int, int]]:
    """Row, column and box of every cell, numbered from 0 to 3 * side - 1."""
    row, column, box = (unit.tolist() for unit in grid_cells(side))
    return [(r, side + c, 2 * side + b) for r, c, b in zip(row, column, box, strict=True)]


def make_puzzles(side: int, count: int, seed: int, givens: int | None = None) -> tuple[Grids, Grids]:
    """Puzzles with this number of givens and exactly one solution, and their solutions. Empty cells are -1.

    Cells are emptied in random order as long as the solution stays unique; where too few can be, another grid is tried.
    Solutions are held-out grids (of side 4, any grid).
    """
    givens = GIVENS[side] if givens is None else givens
    if not 0 < givens <= side * side:
        raise ValueError(f"a puzzle of side {side} has from 1 to {side * side} givens (got {givens})")
    puzzles: list[list[int]] = []
    solutions: list[list[int]] = []
    for attempt in range(100):
        grids = sample_grids(side, count, seed * 100 + attempt, valid=True).tolist()
        source = random.Random(f"{seed} {attempt}")
        for solution in grids:
            puzzle = _emptied(solution, givens, source)
            if puzzle is not None:
                puzzles.append(puzzle)
                solutions.append(solution)
            if len(puzzles) == count:
                return torch.tensor(puzzles), torch.tensor(solutions)
    raise ValueError(f"found too few puzzles of side {side} with {givens} givens and one solution; ask for more givens")


def _emptied(solution: list[int], givens: int, source: random.Random) -> list[int] | None:
    puzzle = solution.copy()
    cells = list(range(len(solution)))
    source.shuffle(cells)
    left = len(solution)
    for cell in cells:
        if left == givens:
            break
        digit, puzzle[cell] = puzzle[cell], -1
        if len(solve(puzzle)) == 1:
            left -= 1
        else:
            puzzle[cell] = digit
    return puzzle if left == givens else None


def digits_tokenizer(side: int) -> Tokenizer:
    """One token per digit, 1 to side, and one that ends a text: a grid is written as its digits."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {str(digit + 1): digit for digit in range(side)}
    end = "<|endoftext|>"
    model = tokenizers.Tokenizer(models.WordLevel({**vocab, end: side}, unk_token=end))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model.decoder = decoders.Fuse()
    model.add_special_tokens([end])
    return Tokenizer("json", model, side + 1, side, side)


class ExactSudoku(nn.Module):
    """The exact posterior of a uniform grid, as a network (`cdlm.types.LogitsNetwork`) for the masked process:

        Denoiser(ExactSudoku(4), masked(5))

    For every cell the distribution of its digit over all grids that agree with the visible cells. Where none does, a
    sampler has made a mistake before, and every digit is equally likely.
    """

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side
        grids = all_grids(4) if side == 4 else torch.from_numpy(reduced_grids(side).astype(np.int64))
        self._columns = np.ascontiguousarray(grids.numpy().T.astype(np.uint8))
        self._one_hot = nn.functional.one_hot(grids, side).flatten(1).float()

    def forward(self, ids: Int[Tensor, "b l"], t: Float[Tensor, "b"]) -> Float[Tensor, "b l v"]:
        different, inverse = ids.cpu().unique(dim=0, return_inverse=True)
        if self.side == 4:
            counts = self._counts(different)
        else:
            counts = torch.stack([self._reduced_counts(row) for row in different.numpy()])
        counts[counts.sum((1, 2)) == 0] = 1.0
        digits = (counts / counts.sum(-1, keepdim=True)).log()
        end = torch.full_like(digits[..., :1], -torch.inf)
        return torch.cat([digits, end], -1)[inverse].to(ids.device)

    def _counts(self, ids: Int[Tensor, "b l"]) -> Float[Tensor, "b l k"]:
        """How many of the listed grids have each digit in each cell."""
        visible = ids <= self.side
        shown = nn.functional.one_hot(ids.clamp(max=self.side), self.side + 1) * visible[..., None]
        agree = shown[..., : self.side].flatten(1).float() @ self._one_hot.T == visible.sum(-1, keepdim=True)
        return (agree.float() @ self._one_hot).view(len(ids), -1, self.side).double()

    def _reduced_counts(self, ids: NDArray[np.int64]) -> Float[Tensor, "l k"]:
        """The same from reduced grids. A grid agrees if cells that show the same digit have the same one in it, and
        cells that show different digits do not: then it does so under (side - m)! namings for m visible digits."""
        k, columns = self.side, self._columns
        cells = {digit: (ids == digit).nonzero()[0].tolist() for digit in np.unique(ids[ids <= k]).tolist()}
        if k in cells:
            return torch.zeros(len(ids), k, dtype=torch.float64)
        agree = np.arange(columns.shape[1])
        for first, *others in cells.values():
            for cell in others:
                agree = agree[columns[cell, agree] == columns[first, agree]]
        seen = np.zeros(len(agree), np.uint8)
        for first, *_ in cells.values():
            seen |= np.uint8(1) << columns[first, agree]
        agree = agree[np.bitwise_count(seen) == len(cells)]
        hidden = [digit for digit in range(k) if digit not in cells]
        counts = np.zeros((len(ids), k))
        remaining = np.full(len(ids), float(len(agree)))
        for digit, (first, *_) in cells.items():
            counts[:, digit] = (columns[:, agree] == columns[first, agree]).sum(1)
            remaining -= counts[:, digit]
        counts[:, hidden] = (remaining / max(1, len(hidden)))[:, None]
        return torch.from_numpy(counts)
