"""The cells of a square grid with boxes, such as a Sudoku, as a sequence: row by row."""

import math

import torch
from jaxtyping import Int
from torch import Tensor

Units = Int[Tensor, "cells"]


def box_height(side: int) -> int:
    """The height of the `side` boxes of `side` cells each, as square as possible and at least as wide as high: 2 x 2
    for side 4, 2 x 3 (two rows, three columns) for side 6, 3 x 3 for side 9."""
    return next(height for height in range(math.isqrt(side), 0, -1) if side % height == 0)


def grid_cells(side: int) -> tuple[Units, Units, Units]:
    """Row, column and box of every cell."""
    height = box_height(side)
    width = side // height
    cell = torch.arange(side * side)
    row, column = cell // side, cell % side
    return row, column, row // height * height + column // width


def sudoku_pattern(side: int) -> Int[Tensor, "side side"]:
    """A Sudoku grid by formula: every row is the one above it, shifted."""
    height = box_height(side)
    row, column = torch.arange(side)[:, None], torch.arange(side)
    return (row % height * (side // height) + row // height + column) % side
