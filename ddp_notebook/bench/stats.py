"""From what every rank measured to a benchmark's result: points, curves, conditions.

A rank tells of each visit to a size: see `rank.bench.collectives.measure`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddp_notebook.bench import trust
from ddp_notebook.bench.intervals import median_interval, quantile
from ddp_notebook.bench.plan import DTYPE_BYTES, CurvePlan, Plan
from ddp_notebook.bench.result import BenchPoint, BenchRun, Curve, Fit, Samples
from ddp_notebook.model import codec

Visits = Sequence[Mapping[str, Any]]


def summarise(
    about: BenchRun,
    plan: Plan,
    ranks: Sequence[int],
    visits: Mapping[int, Visits],
    answers: Mapping[int, Mapping[str, Any]],
) -> BenchRun:
    """Return what all ranks measured together: `about`, which is known before, with its curves.

    `visits` are those received, by rank; `answers` are the answers to `calls.BENCH` of the ranks
    that finished.
    """
    curves = []
    for number, each in enumerate(plan.curves(len(ranks))):
        members = ranks[: each.world_size]
        measured_by = [[v for v in visits.get(r, ()) if v["curve"] == number] for r in members]
        curves.append(curve_of(each, members, measured_by, plan))
    measured = tuple(curve for curve in curves if curve.points)
    hosts = [answer["host"] for answer in answers.values()]
    conditions = replace(
        about.conditions,
        ranks_per_host=max(map(hosts.count, hosts), default=len(ranks)),
        others_cpu=others_cpu(answers.values()),
        seconds=max((answer["seconds"] for answer in answers.values()), default=0.0),
    )
    badge, reasons = trust.judge(measured, conditions)
    return replace(
        about,
        world_size=len(ranks),
        curves=measured,
        trust=badge,
        reasons=reasons,
        notes=trust.notes(replace(about, curves=measured, trust=badge)),
        conditions=conditions,
        copy_gb_per_s=min((a.get("copy_gb_per_s", 0.0) for a in answers.values()), default=0.0),
        plan=codec.encode(plan),
    )


def others_cpu(answers: Iterable[Mapping[str, Any]]) -> float | None:
    """Cores that other processes kept busy, on the host with most of that; None if not known.

    Each rank tells its own CPU time and that of its host during the run, as `machine.Meter` does.
    """
    hosts: dict[str, list[Mapping[str, Any]]] = {}
    for answer in answers:
        hosts.setdefault(answer["host"], []).append(answer)
    busy = [
        max(0.0, (here[0]["host_cpu_s"] - sum(rank["cpu_s"] for rank in here)) / here[0]["seconds"])
        for here in hosts.values()
        if here[0]["host_cpu_s"] is not None and here[0]["seconds"]
    ]
    return max(busy, default=None)


def curve_of(curve: CurvePlan, ranks: Sequence[int], visits: Sequence[Visits], plan: Plan) -> Curve:
    """Return a curve, from what each of `ranks` measured of it; `visits` are in their order.

    The time of an iteration is that of its slowest rank. Only visits that all ranks reported are
    used: a rank may have died, or a message may be lost. Raises ValueError if the ranks measured
    different things, since their iterations cannot be compared then.
    """
    # By their numbers, which are the same on all ranks: messages may be lost, or a rank has died.
    by_number = [{visit["number"]: visit for visit in by_rank} for by_rank in visits]
    by_size: dict[int, list[tuple[Mapping[str, Any], ...]]] = {}
    for number in sorted(set.intersection(*map(set, by_number))):
        visit = tuple(by_rank[number] for by_rank in by_number)
        shapes = {(measured["size_bytes"], len(measured["times_ns"])) for measured in visit}
        if len(shapes) != 1:
            raise ValueError(f"the ranks did not measure the same: {sorted(shapes)}")
        by_size.setdefault(visit[0]["size_bytes"], []).append(visit)
    points = tuple(_point(curve, size, by_size[size], plan) for size in sorted(by_size))
    fitted, no_fit = _fit(curve, points)
    late = _straggler(points)
    return Curve(
        op=curve.op,
        dtype=curve.dtype,
        mode=curve.mode,
        ranks=tuple(ranks),
        points=points,
        fit=fitted,
        no_fit=no_fit,
        straggler=ranks[late[0]] if late else None,
        straggler_late_us=late[1] if late else 0.0,
    )


def _point(
    curve: CurvePlan, size: int, visits: Sequence[tuple[Mapping[str, Any], ...]], plan: Plan
) -> BenchPoint:
    """Return the point of one size, from visits that all ranks made."""
    ranks = range(curve.world_size)
    times = tuple(tuple(t for visit in visits for t in visit[r]["times_ns"]) for r in ranks)
    issued = [sorted(t for visit in visits for t in visit[r]["issue_ns"]) for r in ranks]
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
        issue_us=tuple(quantile(each, 0.25) / 1e3 for each in issued),
        skew_us=statistics.median(skews) / 1e3,
        precise=len(visits) >= plan.rounds and (high - low) / 2 <= plan.precision * median,
        samples=Samples(times, tuple(len(values) for values in slowest)),
    )


def _fit(curve: CurvePlan, points: Sequence[BenchPoint]) -> tuple[Fit | None, str]:
    """Return the fit, or why the model does not fit.

    Gloo's ring cuts a tensor into two pieces for each rank. Tensors with fewer elements take fewer
    steps, so the model does not apply to them, and they are left out.
    """
    from ddp_notebook.bench.fit import NoFit, fit  # numpy: only where something was measured

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
    """Return the index of the rank that is late at most sizes, and how late it is in microseconds.

    It takes five times as long as any other to issue its part, and 50 us longer, since smaller
    differences come from a busy core: at three quarters of the sizes.
    """
    if not points or len(points[0].issue_us) < 2:
        return None
    # By the times to issue and not by those to complete, which are equal on all ranks: all wait for
    # the one that is late.
    for rank in range(len(points[0].issue_us)):
        late = []
        for point in points:
            others = max(t for r, t in enumerate(point.issue_us) if r != rank)
            own = point.issue_us[rank]
            if own > 5 * others and own > others + 50:
                late.append(own - others)
        if len(late) >= 0.75 * len(points):
            return rank, statistics.median(late)
    return None
