"""From measured times to a latency and a bandwidth, with intervals.

The model is Hockney's, ``time = latency + size / bandwidth`` (R. W. Hockney, "The communication
challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20, 1994), whose half-bandwidth
size is his n1/2. Errors are relative: sizes span eight powers of ten, and in ordinary least
squares the largest size alone would decide. Where a library changes its algorithm with the size,
one line does not fit; a second line is added if it is worth its three parameters by the corrected
information criterion of Akaike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from ddp_notebook.bench.results import Fit, Interval, Regime

MOST_ERROR = 0.25
"""A model whose typical relative error is larger explains nothing."""
LEAST_SIZES = 4
"""Through fewer points any line fits."""
_RESAMPLES = 500


class NoFit(ValueError):
    """No latency and bandwidth explain the times; `str()` says why, for the user."""


def fit(sizes_bytes: Sequence[int], times_s: Sequence[float], *, seed: int = 0) -> Fit:
    """The latency and bandwidth that give `times_s` at `sizes_bytes`, by relative least squares.

    Sizes are different from each other and more than 0, in any order; times are in seconds and
    more than 0, one for each size (for example, the median of its iterations). Leave out sizes to
    which the model does not apply, such as fewer elements than ranks.

    Intervals are 95 % by bootstrap: the relative errors are resampled `_RESAMPLES` times and
    everything is fitted again each time; `seed` is that of the random numbers. Raises NoFit if
    there are too few sizes, if the error of the model (root mean square) is above `MOST_ERROR`, or
    if the times hardly grow with the size, so that no bandwidth can be known.
    """
    if len(sizes_bytes) != len(times_s) or len(set(sizes_bytes)) != len(sizes_bytes):
        raise ValueError("fit needs one time for each of its sizes, and each size once")
    points = sorted(zip(sizes_bytes, times_s, strict=True))
    if len(points) < LEAST_SIZES:
        raise NoFit(f"a fit needs at least {LEAST_SIZES} sizes, and there are {len(points)}")
    if points[0][0] <= 0 or min(times_s) <= 0:
        raise NoFit("a fit needs sizes and times of more than 0")
    sizes, times = [p[0] for p in points], [p[1] for p in points]
    regimes = _best(sizes, [times])[0]
    errors = _relative_errors(regimes, sizes, times)
    typical = math.sqrt(statistics.fmean(e * e for e in errors))
    if typical > MOST_ERROR:
        raise NoFit(f"the times do not follow them, the best fit is off by {typical:.0%}")
    latency, bandwidth, half = _intervals(regimes, sizes, errors, seed)
    if not regimes[-1].s_per_byte or math.isinf(bandwidth[1]):
        raise NoFit("the times hardly grow with the size")
    return Fit(
        regimes=regimes,
        latency_s=regimes[0].latency_s,
        latency_interval_s=latency,
        bandwidth_bytes_per_s=1 / regimes[-1].s_per_byte,
        bandwidth_interval_bytes_per_s=bandwidth,
        half_bandwidth_bytes=_half_bandwidth(regimes),
        half_bandwidth_interval_bytes=half,
        from_bytes=sizes[0],
        to_bytes=sizes[-1],
        median_error=statistics.median(abs(e) for e in errors),
        max_error=max(abs(e) for e in errors),
    )


def _best(sizes: Sequence[int], draws: Any) -> list[tuple[Regime, ...]]:
    """For each resample of the times one line, or two if the second is worth its parameters."""
    from ddp_notebook.bench.least_squares import best_lines  # numpy: only where there are times

    return [
        (Regime(sizes[0], *first), Regime(sizes[cut], *last))[: 2 if cut else 1]
        for cut, first, last in zip(*(a.tolist() for a in best_lines(sizes, draws)), strict=True)
    ]


def _predict(regimes: Sequence[Regime], size_bytes: float) -> float:
    line = max((r for r in regimes if r.from_bytes <= size_bytes), key=lambda r: r.from_bytes)
    return line.latency_s + size_bytes * line.s_per_byte


def _relative_errors(
    regimes: Sequence[Regime], sizes: Sequence[int], times: Sequence[float]
) -> list[float]:
    """The relative error of the model at each size."""
    return [1 - _predict(regimes, x) / t for x, t in zip(sizes, times, strict=True)]


def _intervals(
    regimes: tuple[Regime, ...], sizes: Sequence[int], errors: Sequence[float], seed: int
) -> tuple[Interval, Interval, Interval]:
    """Latency, bandwidth and half-bandwidth size: the ranges of 95 % of the fits to resamples.

    Errors are resampled and the sizes kept, since few of the sizes are large: a resample of whole
    points would often contain none of these. The residuals of a fit are smaller than the errors of
    the data, by the number of its parameters: they are scaled up.
    """
    from ddp_notebook.bench.least_squares import drawn

    free = max(len(sizes) - 2 * len(regimes), 1)
    scale = math.sqrt(len(sizes) / free)
    model = [_predict(regimes, x) for x in sizes]
    fits = []
    for again in _best(sizes, drawn(model, [scale * e for e in errors], _RESAMPLES, seed)):
        per_byte = again[-1].s_per_byte
        bandwidth = 1 / per_byte if per_byte else math.inf
        fits.append((again[0].latency_s, bandwidth, _half_bandwidth(again)))
    latencies, bandwidths, halves = (sorted(values) for values in zip(*fits, strict=True))
    return _middle(latencies), _middle(bandwidths), _middle(halves)


def _middle(ordered: Sequence[float]) -> Interval:
    """The middle 95 % of sorted values."""
    tail = len(ordered) // 40
    return ordered[tail], ordered[-1 - tail]


def _half_bandwidth(regimes: Sequence[Regime]) -> float:
    """The smallest size, in bytes, that gets half of the last line's asymptotic bandwidth."""
    wanted = 2 * regimes[-1].s_per_byte  # seconds per byte at half of the bandwidth
    for number, line in enumerate(regimes):
        end = regimes[number + 1].from_bytes if number + 1 < len(regimes) else math.inf
        if wanted > line.s_per_byte:
            size = line.latency_s / (wanted - line.s_per_byte)
            start = line.from_bytes if number else 0
            if size < end:
                return max(size, start)
    return math.inf
