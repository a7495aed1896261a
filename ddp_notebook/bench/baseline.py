"""A run against one that was kept: which sizes changed, by intervals that do not touch. Pure."""

from __future__ import annotations

import math
import statistics

from ddp_notebook.model.bench import (
    BenchPoint,
    BenchRun,
    Change,
    Curve,
    CurveChange,
    PointChange,
    Trust,
)

_LEAST_RATIO = 1.05
"""A change of less is none, however well it is known."""
_SHARE = 0.25
"""A curve changed when at least this share of its sizes did, and two of them,"""
_LEAST_SIZES = 2
_ONE_WAY = 3
"""and this many times as many one way as the other."""


def compare(run: BenchRun, baseline: BenchRun) -> tuple[CurveChange, ...]:
    """Each curve of `run` that `baseline` has too, against it.

    Raises ValueError, with a message for the user, when nothing can be compared.
    """
    if (run.backend, run.device.split(":")[0]) != (baseline.backend, baseline.device.split(":")[0]):
        raise ValueError(
            f"the baseline is of {baseline.backend} on {baseline.device}, and this run of "
            f"{run.backend} on {run.device}"
        )
    kept = {curve.key: curve for curve in baseline.curves}
    noisy = Trust.NOISY in (run.trust, baseline.trust)
    found = tuple(
        _compare(curve, kept[curve.key], noisy) for curve in run.curves if curve.key in kept
    )
    found = tuple(each for each in found if each.points)
    if not found:
        raise ValueError(
            "the baseline has no size of an operation, dtype, mode and number of ranks that was "
            "measured now"
        )
    return found


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
