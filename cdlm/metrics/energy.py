"""The energy distance of two sets of texts on simple features: no language model has a part in it.

2 E|X - Y| - E|X - X'| - E|Y - Y'| is zero if and only if both distributions are the same (Szekely and Rizzo 2013). The
estimator is unbiased, since no text is paired with itself: around zero for two sets of one distribution, and sometimes
below it.
"""

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Rows = NDArray[np.intp]


def pairwise_distances(features: Matrix) -> Matrix:
    """The Euclidean distance of every two rows."""
    squares = (features**2).sum(-1)
    distances = np.sqrt(np.maximum(squares[:, None] + squares[None] - 2 * features @ features.T, 0))
    np.fill_diagonal(distances, 0)  # where rounding leaves something else
    return distances


def energy_distance(distances: Matrix, x: Rows, y: Rows) -> float:
    """The unbiased estimate between rows x and rows y of a matrix of distances."""
    across = distances[np.ix_(x, y)].mean()
    return float(2 * across - _within(distances, x) - _within(distances, y))


def _within(distances: Matrix, rows: Rows) -> float:
    """The mean over pairs of different rows; a distance from itself is zero."""
    return float(distances[np.ix_(rows, rows)].sum() / (len(rows) * (len(rows) - 1)))
