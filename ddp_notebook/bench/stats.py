"""From every rank's times to points and curves: medians, intervals, stragglers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_notebook.bench.fit import NoFit, fit
from ddp_notebook.bench.plan import DTYPE_BYTES, CurvePlan, Plan
from ddp_notebook.bench.results import BenchPoint, Curve, Fit, Samples

_LATE_FACTOR = 5.0
"""A rank is late at a size if it takes this many times as long as any other to issue its part,"""
_LATE_LEAST_US = 50.0
"""and this much longer (smaller differences come from a busy core),"""
_LATE_SHARE = 0.75
"""at this share of the sizes."""

_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t for 95 %, by degrees of freedom from 1."""
_NORMAL = 1.96
_MOST_HALF = math.log(3)
"""Two rounds that differ much would give an interval too wide to be useful."""
_AGAIN = math.sqrt(2)
"""The error of the difference of two runs, relative to the error of one of them."""

Visits = Sequence[Mapping[str, Any]]
"""A rank's measurements, a mapping for each visit to a size: see `loop.measure`."""


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` (0 to 1) of the sorted values lie below, linearly interpolated."""
    position = share * (len(ordered) - 1)
    low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
    return low + (high - low) * (position - math.floor(position))


def median_interval(rounds: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """The median of all values, between the ends of its 95 % interval: low, median, high.

    It is a prediction interval: the median of a second run lies in it 95 times of 100. Since that
    run has an error of its own, it is wider than the usual confidence interval of the median by
    the square root of two: only 83 % of the usual 95 % intervals contain the next run's median
    (G. Cumming and R. Maillardet, "Confidence Intervals and Replication", Psychological Methods
    11, 2006).

    It is the wider of two. The first is distribution-free: from the order of the values alone. The
    second is by Student's t on the logarithms of the medians of the rounds: values of one round
    were measured at about the same time, and a machine is not the same a second later.
    """
    ordered = sorted(value for values in rounds for value in values)
    count = len(ordered)
    median = statistics.median(ordered)
    reach = _AGAIN * _NORMAL * math.sqrt(count) / 2
    low = ordered[max(0, math.floor(count / 2 - reach))]
    high = ordered[min(count - 1, math.ceil(count / 2 + reach) - 1)]
    medians = [statistics.median(values) for values in rounds if values]
    if len(medians) > 1 and min(medians) > 0:
        logs = [math.log(m) for m in medians]
        half = _AGAIN * student(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        half = min(half, _MOST_HALF)
        low, high = min(low, median * math.exp(-half)), max(high, median * math.exp(half))
    return min(low, median), median, max(high, median)


def student(freedom: int) -> float:
    """Student's t for a 95 % interval."""
    return _T[freedom - 1] if freedom <= len(_T) else _NORMAL + 2.4 / freedom


def curve_of(
    curve: CurvePlan,
    ranks: Sequence[int],
    visits: Sequence[Visits],
    plan: Plan,
    *,
    fitted: bool = True,
) -> Curve:
    """One curve, from what each of `ranks` measured of it; `visits` are in their order.

    The time of an iteration is that of its slowest rank. Only visits that all ranks reported are
    used: a rank may have died, or a message may be lost. Raises ValueError if the ranks measured
    different things, since their iterations cannot be compared then.
    """
    by_number = [{visit["number"]: visit for visit in by_rank} for by_rank in visits]
    by_size: dict[int, list[tuple[Mapping[str, Any], ...]]] = {}
    for number in sorted(set.intersection(*map(set, by_number))):
        visit = tuple(by_rank[number] for by_rank in by_number)
        shapes = {(measured["size_bytes"], len(measured["times_ns"])) for measured in visit}
        if len(shapes) != 1:
            raise ValueError(f"the ranks did not measure the same: {sorted(shapes)}")
        by_size.setdefault(visit[0]["size_bytes"], []).append(visit)
    points = tuple(_point(curve, size, by_size[size], plan) for size in sorted(by_size))
    fitted_to, no_fit = _fit(curve, points) if fitted else (None, "")
    late = _straggler(points)
    return Curve(
        op=curve.op,
        dtype=curve.dtype,
        mode=curve.mode,
        ranks=tuple(ranks),
        tuned=curve.tuned,
        points=points,
        fit=fitted_to,
        no_fit=no_fit,
        straggler=ranks[late[0]] if late else None,
        straggler_late_us=late[1] if late else 0.0,
    )


def _point(
    curve: CurvePlan, size: int, visits: Sequence[tuple[Mapping[str, Any], ...]], plan: Plan
) -> BenchPoint:
    """One size, from visits that all ranks made."""
    ranks = range(curve.world_size)
    times = tuple(tuple(t for visit in visits for t in visit[r]["times_ns"]) for r in ranks)
    slowest = [
        [max(column) for column in zip(*(measured["times_ns"] for measured in visit), strict=True)]
        for visit in visits
    ]
    ordered = sorted(t for values in slowest for t in values)
    low, median, high = median_interval(slowest)
    skews = [max(column) - min(column) for column in zip(*times, strict=True)]
    # Bytes per nanosecond are GB per second. With a clock too coarse for it there is no bandwidth.
    algbw = size / median if median else 0.0
    return BenchPoint(
        size_bytes=size,
        count=size // DTYPE_BYTES[curve.dtype],
        iterations=len(ordered),
        rounds=len(visits),
        latency_us=median / 1e3,
        latency_interval_us=(low / 1e3, high / 1e3),
        mean_us=statistics.fmean(ordered) / 1e3,
        p10_us=quantile(ordered, 0.1) / 1e3,
        p90_us=quantile(ordered, 0.9) / 1e3,
        p99_us=quantile(ordered, 0.99) / 1e3,
        algbw_gb_per_s=algbw,
        busbw_gb_per_s=algbw * curve.operation.bus_factor(curve.world_size),
        wrong=sum(measured["wrong"] for visit in visits for measured in visit),
        rank_us=tuple(statistics.median(times[r]) / 1e3 for r in ranks),
        issue_us=tuple(
            quantile(sorted(t for visit in visits for t in visit[r]["issue_ns"]), 0.25) / 1e3
            for r in ranks
        ),
        skew_us=statistics.median(skews) / 1e3,
        precise=len(visits) >= plan.rounds and (high - low) / 2 <= plan.precision * median,
        samples=Samples(times, tuple(len(values) for values in slowest)),
    )


def _fit(curve: CurvePlan, points: Sequence[BenchPoint]) -> tuple[Fit | None, str]:
    """The fit, or why there is none.

    Gloo's ring cuts a tensor into two pieces for each rank. Tensors with fewer elements take fewer
    steps, so the model does not apply to them, and they are left out.
    """
    if not curve.operation.sized or not points:
        return None, ""
    if curve.world_size == 1:
        return None, "one rank sends nothing"
    enough = [p for p in points if p.count >= 2 * curve.world_size and p.latency_us > 0]
    try:
        return fit([p.size_bytes for p in enough], [p.latency_us / 1e6 for p in enough]), ""
    except NoFit as why:
        return None, str(why)


def _straggler(points: Sequence[BenchPoint]) -> tuple[int, float] | None:
    """The index of the rank that is late at most sizes, and how late it is in microseconds."""
    if not points or len(points[0].issue_us) < 2:
        return None
    for rank in range(len(points[0].issue_us)):
        late = []
        for point in points:
            others = max(t for r, t in enumerate(point.issue_us) if r != rank)
            own = point.issue_us[rank]
            if own > _LATE_FACTOR * others and own > others + _LATE_LEAST_US:
                late.append(own - others)
        if len(late) >= _LATE_SHARE * len(points):
            return rank, statistics.median(late)
    return None
