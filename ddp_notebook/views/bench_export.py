"""A benchmark in the forms that other tools read: rows, CSV, nccl-tests.

nccl-tests report the mean over iterations, so their formats have the mean, and bandwidths computed
from it; `rows` has the median, which the other views show.
"""

from __future__ import annotations

import csv as csv_writer
import io
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ddp_notebook.bench.plan import CurvePlan, Plan
from ddp_notebook.bench.result import BenchPoint, BenchRun, Curve, Samples
from ddp_notebook.bench.stats import curve_of
from ddp_notebook.bench.steps import StepBenchResult

_COUNTS = ("size_bytes", "count", "iterations", "rounds")
_COLUMNS = (
    *("mean_us", "p10_us", "p90_us", "p99_us"),
    *("algbw_gb_per_s", "busbw_gb_per_s", "wrong", "skew_us"),
)
"""The fields of a point, as they are called there."""
_NCCL_TYPES = {"float32": "float", "float64": "double", "float16": "half"}


def rows(run: BenchRun) -> list[dict[str, Any]]:
    """A dict for each size of each curve. Times in microseconds, bandwidths in GB/s (1e9)."""
    made = []
    for curve in run.curves:
        what = {name: getattr(curve, name) for name in ("op", "dtype", "mode", "world_size")}
        for point in curve.points:
            slowest = max(range(len(point.rank_us)), key=point.rank_us.__getitem__, default=0)
            low, high = point.latency_interval_us
            made.append(
                {
                    **what,
                    **{name: getattr(point, name) for name in _COUNTS},
                    "latency_us": point.latency_us,
                    "latency_low_us": low,
                    "latency_high_us": high,
                    **{name: getattr(point, name) for name in _COLUMNS},
                    "slowest_rank": curve.ranks[slowest],
                    "precise": point.precise,
                }
            )
    return made


_OF_STEPS = (
    *("bucket", "batch", "world_size", "steps", "step_us", "local_us", "forward_us"),
    *("backward_us", "optimizer_us", "exposed_us", "exposed_share", "overlapped_us", "alone_us"),
    *("samples_per_s", "efficiency"),
)


def step_rows(result: StepBenchResult) -> list[dict[str, Any]]:
    """Return a dict for each bucket and batch size of training steps; times in microseconds."""
    return [
        {
            **{name: getattr(point, name) for name in _OF_STEPS},
            "exposed_low_us": point.exposed_interval_us[0],
            "exposed_high_us": point.exposed_interval_us[1],
        }
        for point in result.points
    ]


def csv(table: Sequence[dict[str, Any]]) -> str:
    """Return rows with a header."""
    if not table:
        return ""
    text = io.StringIO()
    writer = csv_writer.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue().rstrip("\n")


def _nccl_name(curve: Curve) -> str:
    return curve.operation.nccl_name or curve.op


def _nccl_head(curve: Curve, point: BenchPoint) -> dict[str, Any]:
    return {
        "size": point.size_bytes,
        "count": point.count,
        "type": _NCCL_TYPES.get(curve.dtype, curve.dtype),
        "redop": "sum" if curve.operation.reduces else "none",
        "root": "-1" if curve.operation.root is None else str(curve.operation.root),
    }


def _by_mean(point: BenchPoint) -> dict[str, Any]:
    """Time and bandwidths by the mean over iterations."""
    share = point.latency_us / point.mean_us if point.mean_us else 0.0
    return {
        "time": point.mean_us,
        "alg_bw": point.algbw_gb_per_s * share,
        "bus_bw": point.busbw_gb_per_s * share,
        "nwrong": float(point.wrong),
    }


def _average_rate(points: Sequence[BenchPoint]) -> float:
    rates = [_by_mean(point)["bus_bw"] for point in points]
    return statistics.fmean(rates) if rates else 0.0


def nccl_json(run: BenchRun) -> dict[str, Any]:
    """nccl-tests' JSON. Several curves are one list of results with different names."""
    points = [point for curve in run.curves for point in curve.points]
    wrong = sum(point.wrong for point in points)
    return {
        "version": 2,
        "start_time": run.started,
        "args": ["ddp_notebook"],
        "env": [],
        "nccl_version": 0,
        "config": {
            "nthreads": 1,
            "ngpus": 1,
            "minimum_bytes": run.plan.get("min_bytes", 0),
            "maximum_bytes": run.plan.get("max_bytes", 0),
            "step_factor": run.plan.get("factor", 2),
            "warmup_iters": run.plan.get("warmup", 0),
            "iterations": max((point.iterations for point in points), default=0),
            "aggregated_iterations": 1,
            "validation": 1,
            "graph": 0,
            "blocking_collectives": "false",
            "per_iter_timing": "true",
            "parallel_init": "false",
            "devices": [
                {"rank": rank, "group": 0, "device": 0, "device_info": run.device}
                for rank in range(run.world_size)
            ],
        },
        "results": [_nccl_result(curve, point) for curve in run.curves for point in curve.points],
        "out_of_bounds": {"count": wrong, "okay": "false" if wrong else "true"},
        "average_bus_bandwidth": {"bandwidth": _average_rate(points), "okay": "unchecked"},
        "errors": [run.ended] if run.ended else [],
    }


def steps_as_run(result: StepBenchResult) -> BenchRun:
    """Return training steps as what nccl-tests measure: each step all_reduces the gradients.

    The time is the whole step's, so the bandwidth is that of gradients in training, and not of a
    network.
    """
    curves = []
    for point in result.points:
        what = f"training step, batch {point.batch}, {point.bucket} bucket"
        plan = CurvePlan("all_reduce", "float32", what, result.world_size)
        times_ns = tuple(round(time * 1e3) for time in point.times_us)
        visit = {"number": 0, "size_bytes": result.gradient_bytes, "times_ns": times_ns}
        visits = [[visit | {"issue_ns": (0,), "wrong": 0}]] * result.world_size
        curve = curve_of(plan, range(result.world_size), visits, Plan())
        # Only the slowest rank's times are known.
        slowest = Samples((times_ns,), (len(times_ns),))
        curves.append(replace(curve, points=(replace(curve.points[0], samples=slowest),)))
    ranks, ended = result.world_size, result.problem
    return BenchRun(result.backend, result.device, ranks, tuple(curves), ended=ended)


def _nccl_result(curve: Curve, point: BenchPoint) -> dict[str, Any]:
    place = "in_place" if curve.operation.in_place else "out_of_place"
    result = {**_nccl_head(curve, point), place: _by_mean(point)}
    if point.samples is not None:
        times_ns = point.samples.times_ns
        slowest = [max(column) / 1e3 for column in zip(*times_ns, strict=True)]
        ordered, deviation = sorted(slowest), statistics.pstdev(slowest)
        result[f"{place}_per_iter"] = per_iteration = {
            "min_us": ordered[0],
            "max_us": ordered[-1],
            "avg_us": point.mean_us,
            "p50_us": point.latency_us,
            "p95_us": ordered[min(len(ordered) - 1, -(-len(ordered) * 95 // 100) - 1)],
            "p99_us": ordered[min(len(ordered) - 1, -(-len(ordered) * 99 // 100) - 1)],
            "stdev_us": deviation,
            "cv_pct": 100 * deviation / point.mean_us if point.mean_us else 0.0,
            "times_us": slowest,
        }
        if len(times_ns) > 1:
            of_ranks = [[time / 1e3 for time in times] for times in times_ns]
            per_iteration["per_process_max_times_us"] = of_ranks
    name = f"{_nccl_name(curve)} {curve.world_size} ranks {curve.mode}"
    return {**result, "actual_iterations": point.iterations, "experiment_name": name}
