"""Rows of numbers: by what to multiply some so that they add up to another, how far two are apart.

For a rank each at most. Without numpy, which a kernel that judges runs need not load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_SINGULAR, _LEFT = 1e-7, 1e-3
"""From when on two rows count as one; how much may be left over, as a part of the sum."""


def solved(
    rows: Sequence[Sequence[float]], wanted: Sequence[float], at_most_left: float = _LEFT
) -> tuple[float, ...] | None:
    """These factors; None where there are none, or more than one choice of them."""
    if not all(math.isfinite(value) for row in (*rows, wanted) for value in row):
        return None
    factors = _eliminated([[_dot(a, b) for b in rows] + [_dot(a, wanted)] for a in rows])
    if factors is None:
        return None
    sums = [_dot(factors, column) for column in zip(*rows, strict=True)]
    left = [w - total for w, total in zip(wanted, sums, strict=True)]
    return factors if _dot(left, left) <= at_most_left**2 * _dot(wanted, wanted) else None


def _eliminated(matrix: list[list[float]]) -> tuple[float, ...] | None:
    """The solution of as many equations as unknowns, by Gauss and Jordan; it changes `matrix`."""
    n = len(matrix)
    largest = max(matrix[i][i] for i in range(n))
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(matrix[k][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) <= _SINGULAR * largest:
            return None
        for k in (k for k in range(n) if k != i):
            times = matrix[k][i] / matrix[i][i]
            matrix[k] = [b - times * a for a, b in zip(matrix[i], matrix[k], strict=True)]
    return tuple(matrix[i][n] / matrix[i][i] for i in range(n))


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Between two rows of as many numbers, as a part of the larger one's size."""
    size = max(math.hypot(*one), math.hypot(*other))
    return math.dist(one, other) / size if size else 0.0
