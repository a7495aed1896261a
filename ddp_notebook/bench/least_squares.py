"""Lines of the least relative error through times, for many resamples at once.

A line is its latency and its time per byte, along the last axis. The first axis of the sums is the
term: of points (a, b) for which ``latency*a + time_per_byte*b`` should be 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_LEAST_IN_REGIME = 3
_PARAMETERS = {1: 3, 2: 6}
"""By the number of lines: two for each line, where the second begins, and the noise."""
_WORTH = 6.0
"""By how much the criterion must be better with two lines: the best cut is searched for, and even
in pure noise some cut is better than none."""
_LEAST_NOISE = 1e-6
"""The least relative error assumed: it keeps the logarithm of a perfect fit finite."""
_LEAST_FACTOR = 0.05
"""A resampled time is at least this share of the model's."""


def drawn(model: Sequence[float], errors: ArrayLike, draws: int, seed: int) -> Floats:
    """`draws` resamples of the model's times, each with resampled relative `errors`."""
    chance = np.random.default_rng(seed).choice(errors, (draws, len(model)))
    times: Floats = np.asarray(model) * np.maximum(_LEAST_FACTOR, 1 + chance)
    return times


def best_lines(sizes: Sequence[int], times: ArrayLike) -> tuple[NDArray[np.intp], Floats, Floats]:
    """For each row of `times`: the index where a second line begins, the first and the last line.

    The index is 0 if a second line is not worth its parameters: then both are the same line.
    """
    # Each point divided by its time is (1/t, x/t); alpha/t + beta*x/t should be 1.
    a = 1 / np.asarray(times, float)
    b = np.asarray(sizes, float) * a
    points = np.stack([np.ones_like(a), a, b, a * a, a * b, b * b])
    before = points.cumsum(axis=-1)
    after = points[..., ::-1].cumsum(axis=-1)[..., ::-1]
    count = len(sizes)
    cuts = np.arange(_LEAST_IN_REGIME, count - _LEAST_IN_REGIME + 1)
    whole, small, large = before[..., -1:], before[..., cuts - 1], after[..., cuts]
    one, first, last = _line(whole), _line(small), _line(large)
    error = _error(small, first) + _error(large, last)
    criteria = [_criterion(_error(whole, one), count, 1), _criterion(error, count, 2) + _WORTH]
    best = np.concatenate(criteria, axis=-1).argmin(axis=-1)
    rows = np.arange(len(a))
    index = np.concatenate([[0], cuts])[best]
    first = np.concatenate([one, first], axis=1)[rows, best]
    return index, first, np.concatenate([one, last], axis=1)[rows, best]


def _line(sums: Floats) -> Floats:
    """The latency and the time per byte of the least relative error; neither is negative."""
    _, a, b, aa, ab, bb = sums
    determinant = aa * bb - ab * ab
    solvable = determinant > 1e-12 * aa * bb
    safe = np.where(solvable, determinant, 1)
    alpha, beta = (a * bb - b * ab) / safe, (b * aa - a * ab) / safe
    inside = solvable & (alpha >= 0) & (beta >= 0)
    # On one of the two edges: the one that explains more.
    latency_alone = a * a * bb > b * b * aa
    alpha = np.where(inside, alpha, np.where(latency_alone, a / aa, 0))
    beta = np.where(inside, beta, np.where(latency_alone, 0, b / bb))
    return np.stack([alpha, beta], axis=-1)


def _error(sums: Floats, line: Floats) -> Floats:
    """The sum of the squares of the relative errors of a line."""
    points, a, b, aa, ab, bb = sums
    alpha, beta = line[..., 0], line[..., 1]
    squares = alpha * alpha * aa + 2 * alpha * beta * ab + beta * beta * bb
    error: Floats = np.maximum(0, points - 2 * (alpha * a + beta * b) + squares)
    return error


def _criterion(squared_error: Floats, count: int, lines: int) -> Floats:
    """Akaike's information criterion, corrected for few points; less is better."""
    parameters = _PARAMETERS[lines]
    free = count - parameters - 1
    if free <= 0 and lines > 1:
        return np.full_like(squared_error, np.inf)
    noise = np.maximum(squared_error / count, _LEAST_NOISE**2)
    correction = 2 * parameters * (parameters + 1) / max(free, 1)
    criterion: Floats = count * np.log(noise) + 2 * parameters + correction
    return criterion
