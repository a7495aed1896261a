"""The lines of the least relative error through times, for many draws of them at once: numpy's.

A line is its latency and its time per byte, in the last axis. Of sums the first axis says of what:
points (a, b) that each want ``latency*a + time_per_byte*b`` to be 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_LEAST_IN_REGIME = 3
_PARAMETERS = {1: 3, 2: 6}
"""By the number of lines: two for each, where one gives way to the other, and the noise."""
_WORTH = 6.0
"""By how much the criterion must be better with two lines: where to cut is searched for, and
noise alone finds a cut of some use."""
_LEAST_NOISE = 1e-6
"""Times are not known better than this share of them: keeps a perfect fit's logarithm finite."""
_LEAST_FACTOR = 0.05
"""A drawn error never makes a time less than this share of what the model says."""


def drawn(model: Sequence[float], errors: ArrayLike, draws: int, seed: int) -> Floats:
    """`draws` times what the model says, each time with some of the relative `errors`."""
    chance = np.random.default_rng(seed).choice(errors, (draws, len(model)))
    times: Floats = np.asarray(model) * np.maximum(_LEAST_FACTOR, 1 + chance)
    return times


def best_lines(sizes: Sequence[int], times: ArrayLike) -> tuple[NDArray[np.intp], Floats, Floats]:
    """For each row of `times`: the index where a second line begins, the first and the last line.

    The index is 0 where a second one is not worth its parameters: both are the same line then.
    """
    # Each point divided by its time is (1/t, x/t), and wants alpha/t + beta*x/t to be 1.
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
    told = determinant > 1e-12 * aa * bb
    safe = np.where(told, determinant, 1)
    alpha, beta = (a * bb - b * ab) / safe, (b * aa - a * ab) / safe
    inside = told & (alpha >= 0) & (beta >= 0)
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
