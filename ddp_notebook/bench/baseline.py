"""A run against a saved one: which sizes changed, by intervals that do not overlap.

On a machine with few cores a single size is known to a few per cent at best. All sizes of a curve
together are known better: each round measures all of them, so a round has a level, the mean of the
logarithms of its medians, and the levels of two runs are compared by Welch's test (Biometrika 34,
1947). The runs are minutes apart, and a machine drifts: hence 99.9 %, not 95 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from ddp_notebook.bench.results import (
    BenchPoint,
    BenchRun,
    Change,
    Curve,
    CurveChange,
    PointChange,
    Trust,
)
from ddp_notebook.bench.trust import disturbed

_LEAST_RATIO = 1.05
"""A smaller change is ignored, however certain it is."""
_SHARE = 0.25
"""A curve changed when at least this share of its sizes did, and two of them,"""
_LEAST_SIZES = 2
_ONE_WAY = 3
"""and this many times as many one way as the other."""
_LEAST_ROUNDS = 4
"""With fewer rounds sizes are not combined: their spread is not known."""
_NORMAL_999 = 3.2905


def compare(run: BenchRun, baseline: BenchRun) -> tuple[CurveChange, ...]:
    """Compare each curve of `run` with the same curve of `baseline`, if it has it.

    Raises ValueError, with a message for the user, when nothing can be compared.
    """
    if (run.backend, run.device.split(":")[0]) != (baseline.backend, baseline.device.split(":")[0]):
        raise ValueError(
            f"the baseline is of {baseline.backend} on {baseline.device}, and this run of "
            f"{run.backend} on {run.device}"
        )
    before = {curve.key: curve for curve in baseline.curves}
    noisy = Trust.NOISY in (run.trust, baseline.trust)
    busy = disturbed(run.conditions) or disturbed(baseline.conditions)
    changes = tuple(
        _together(_compare(curve, before[curve.key], noisy), busy)
        for curve in run.curves
        if curve.key in before
    )
    changes = tuple(change for change in changes if change.points)
    if not changes:
        raise ValueError(
            "the baseline has no size of an operation, dtype, mode and number of ranks that was "
            "measured now"
        )
    return changes


def _compare(curve: Curve, baseline: Curve, noisy: bool) -> CurveChange:
    before = {p.size_bytes: p for p in baseline.points}
    points = tuple(
        _compare_point(p, before[p.size_bytes]) for p in curve.points if p.size_bytes in before
    )
    changed = {
        change: [p for p in points if p.change is change]
        for change in (Change.SLOWER, Change.FASTER)
    }
    verdict, counted = Change.SAME, list(points)
    for change, other in ((Change.SLOWER, Change.FASTER), (Change.FASTER, Change.SLOWER)):
        ours = changed[change]
        needed = max(min(_LEAST_SIZES, len(points)), math.ceil(_SHARE * len(points)))
        if len(ours) >= needed and len(ours) >= _ONE_WAY * len(changed[other]):
            verdict, counted = Change.UNDECIDED if noisy else change, ours
    ratio = statistics.median(p.ratio for p in counted) if counted else 1.0
    if noisy:  # a size can be believed no more than all of them
        points = tuple(
            p if p.change is Change.SAME else replace(p, change=Change.UNDECIDED) for p in points
        )
    return CurveChange(curve, baseline, verdict, ratio, points)


def _compare_point(now: BenchPoint, before: BenchPoint) -> PointChange:
    (low, high), (low_before, high_before) = now.latency_interval_us, before.latency_interval_us
    ratio = now.latency_us / before.latency_us if before.latency_us else 1.0
    change = Change.SAME
    if low > high_before and ratio > _LEAST_RATIO:
        change = Change.SLOWER
    elif high < low_before and ratio < 1 / _LEAST_RATIO:
        change = Change.FASTER
    return PointChange(now.size_bytes, ratio, change)


# -- all sizes of a curve together -------------------------------------------------------


def _together(compared: CurveChange, busy: bool) -> CurveChange:
    """`compared`, decided by all sizes together where they do not decide one by one."""
    if compared.change in (Change.SLOWER, Change.FASTER):
        return compared
    sizes = [point.size_bytes for point in compared.points]
    now, before = _levels(compared.curve, sizes), _levels(compared.baseline, sizes)
    if min(len(now), len(before)) < _LEAST_ROUNDS:
        return compared
    moved = statistics.fmean(now) - statistics.fmean(before)
    half = _half_interval(now, before)
    if abs(moved) <= max(half, math.log(_LEAST_RATIO)):
        return compared
    change = Change.UNDECIDED if busy else Change.SLOWER if moved > 0 else Change.FASTER
    interval = (math.exp(moved - half), math.exp(moved + half))
    return replace(compared, change=change, ratio=math.exp(moved), together=interval)


def _levels(curve: Curve, sizes: Sequence[int]) -> list[float]:
    """Of each round that measured all of `sizes`: the mean logarithm of its medians."""
    wanted = set(sizes)
    by_size = [_medians(point) for point in curve.points if point.size_bytes in wanted]
    # Sizes that are precise enough are left out of later rounds.
    return [
        statistics.fmean(map(math.log, medians))
        for medians in zip(*by_size, strict=False)
        if all(medians)
    ]


def _medians(point: BenchPoint) -> list[float]:
    """The median of each round, over its iterations, of the slowest rank."""
    if point.samples is None:
        return []
    slowest = list(map(max, zip(*point.samples.times_ns, strict=True)))
    medians, first = [], 0
    for count in point.samples.rounds:
        if count:
            medians.append(statistics.median(slowest[first : first + count]))
        first += count
    return medians


def _half_interval(now: Sequence[float], before: Sequence[float]) -> float:
    """Half the 99.9 % interval of the difference of two means: Welch."""
    parts = [statistics.variance(levels) / len(levels) for levels in (now, before)]
    if not sum(parts):
        return 0.0
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(levels) - 1) for part, levels in zip(parts, (now, before), strict=True)
    )
    return _student_999(freedom) * math.sqrt(sum(parts))


def _student_999(freedom: float) -> float:
    """Student's t for a 99.9 % interval: Abramowitz and Stegun, 26.7.5."""
    z = _NORMAL_999
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))
