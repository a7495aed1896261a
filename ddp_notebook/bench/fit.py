"""From measured times to a latency and a bandwidth.

The model is Hockney's, ``time = latency + size / bandwidth`` (R. W. Hockney, "The communication
challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20, 1994), whose half-bandwidth
size is his n1/2. Where a library changes its algorithm with the size, one line does not fit; a
second line is added if it is worth its three parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ddp_notebook.bench.result import Fit, Regime

MOST_ERROR = 0.25
"""A model whose typical relative error is larger explains nothing."""
LEAST_SIZES = 4
"""Through fewer points any line fits."""
_LEAST_IN_REGIME = 3

Floats: TypeAlias = NDArray[np.float64]


class NoFit(ValueError):
    """No latency and bandwidth explain the times; `str()` says why, for the user."""


def fit(sizes_bytes: Sequence[int], times_s: Sequence[float]) -> Fit:
    """The latency and bandwidth that give `times_s` at `sizes_bytes`, by relative least squares.

    Sizes are different from each other and more than 0, in any order; times are in seconds and
    more than 0, one for each size (for example, the median of its iterations). Leave out sizes to
    which the model does not apply, such as fewer elements than ranks.

    Raises NoFit if there are too few sizes, if the error of the model (root mean square) is above
    `MOST_ERROR`, or if the times hardly grow with the size, so that no bandwidth can be known.
    """
    if len(sizes_bytes) != len(times_s) or len(set(sizes_bytes)) != len(sizes_bytes):
        raise ValueError("fit needs one time for each of its sizes, and each size once")
    points = sorted(zip(sizes_bytes, times_s, strict=True))
    if len(points) < LEAST_SIZES:
        raise NoFit(f"expected at least {LEAST_SIZES} sizes, got {len(points)}")
    if points[0][0] <= 0 or min(times_s) <= 0:
        raise NoFit("a fit needs sizes and times of more than 0")
    sizes, times = (np.array(column, float) for column in zip(*points, strict=True))
    regimes, errors = _best(sizes, times)
    typical = math.sqrt(float(np.mean(errors**2)))
    if typical > MOST_ERROR:
        raise NoFit(f"the curve does not fit (typical error {typical:.0%})")
    # By an F-test at about 5 %: do the bytes explain more of the last line's sizes than a latency
    # alone would? Of a perfect fit nothing is left to explain, so a little is assumed.
    last = sizes >= regimes[-1].from_bytes
    inverse, left = 1 / times[last], max(float(errors[last] @ errors[last]), 1e-12)
    without_bytes = len(inverse) - float(inverse.sum() ** 2 / (inverse @ inverse))
    explained = without_bytes - left > 4 * left / max(len(inverse) - 2, 1)
    if not regimes[-1].s_per_byte or not explained:
        raise NoFit("the times hardly grow with the size")
    return Fit(
        regimes=regimes,
        latency_s=regimes[0].latency_s,
        bandwidth_bytes_per_s=1 / regimes[-1].s_per_byte,
        half_bandwidth_bytes=_half_bandwidth(regimes),
        from_bytes=points[0][0],
        to_bytes=points[-1][0],
        median_error=float(np.median(np.abs(errors))),
    )


def _best(sizes: Floats, times: Floats) -> tuple[tuple[Regime, ...], Floats]:
    """One line, or two if the second is worth its parameters; the relative error at each size."""
    count = len(sizes)
    cuts = range(_LEAST_IN_REGIME, count - _LEAST_IN_REGIME + 1)
    candidates = []
    for starts in [(0,), *((0, cut) for cut in cuts)]:
        regimes, errors = [], []
        for start, end in zip(starts, (*starts[1:], count), strict=True):
            # The latency and the time per byte of the least relative error; neither is negative.
            # Errors are relative: sizes span eight powers of ten, and in ordinary least squares the
            # largest size alone would decide. Divided by its time, a point is (1/t, x/t), and what
            # is fitted, latency/t + per_byte*x/t, should be 1. Both columns are scaled to a length
            # of 1, since they differ by so many powers of ten that lstsq would take one of them for
            # zero.
            columns = np.stack([1 / times[start:end], sizes[start:end] / times[start:end]], axis=1)
            scales = np.linalg.norm(columns, axis=0)
            unit = columns / scales
            both = np.linalg.lstsq(unit, np.ones(end - start), rcond=None)[0]
            if (both < 0).any():
                # The best line lies on an edge: of the two numbers the one that explains more.
                alone = unit.sum(axis=0)
                both = np.where(np.arange(2) == alone.argmax(), alone, 0.0)
            latency, per_byte = both / scales
            regimes.append(Regime(int(sizes[start]), float(latency), float(per_byte)))
            errors.append(1 - unit @ both)
        error = np.concatenate(errors)
        # Akaike's information criterion, corrected for few points; less is better. A line has two
        # parameters, each further one also the size where it begins, and all share the noise. A
        # second line must be better by 6 more: the best cut is searched for, and even in pure noise
        # some cut is better than none.
        lines, parameters = len(regimes), 3 * len(regimes)
        free = count - parameters - 1
        noise = max(float(np.mean(error**2)), 1e-12)  # of a perfect fit the logarithm stays finite
        correction = 2 * parameters * (parameters + 1) / max(free, 1)
        criterion = count * math.log(noise) + 2 * parameters + correction + 6 * (lines - 1)
        if free > 0 or lines == 1:
            candidates.append((criterion, tuple(regimes), error))
    _, best, error = min(candidates, key=lambda candidate: candidate[0])
    return best, error


def _half_bandwidth(regimes: Sequence[Regime]) -> float:
    """The smallest size, in bytes, that gets half of the last line's asymptotic bandwidth."""
    wanted = 2 * regimes[-1].s_per_byte  # seconds per byte at half of the bandwidth
    for number, line in enumerate(regimes):
        end = regimes[number + 1].from_bytes if number + 1 < len(regimes) else math.inf
        if wanted > line.s_per_byte:
            size = line.latency_s / (wanted - line.s_per_byte)
            if size < end:
                return max(size, line.from_bytes if number else 0)
    return math.inf
