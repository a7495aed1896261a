"""A benchmark in the forms that other tools read: rows, CSV, nccl-tests.

nccl-tests report the mean over iterations, so their formats have the mean, and bandwidths computed
from it; `rows` has the median, which the other views show.
"""

from __future__ import annotations

import csv as csv_writer
import io
import statistics
from collections.abc import Sequence
from typing import Any

from ddp_notebook.bench.plan import op_named
from ddp_notebook.bench.result import BenchPoint, BenchRun, Curve
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


_NCCL_HEADING = (
    f"# {'':>10}  {'':>12}  {'':>8}  {'':>6}  {'':>6}  {'out-of-place':^31}  {'in-place':^31}",
    f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}"
    + 2 * f"  {'time':>7}  {'algbw':>6}  {'busbw':>6}  {'#wrong':>6}",
    f"# {'(B)':>10}  {'(elements)':>12}  {'':>8}  {'':>6}  {'':>6}"
    + 2 * f"  {'(us)':>7}  {'(GB/s)':>6}  {'(GB/s)':>6}  {'':>6}",
)


def nccl_text(run: BenchRun) -> str:
    """nccl-tests' table, one for each curve: tools find its columns by position."""
    lines = []
    for curve in run.curves:
        name = f"{_nccl_name(curve)}_perf"
        sizes = [p.size_bytes for p in curve.points]
        wrong = sum(p.wrong for p in curve.points)
        lines += [
            f"# Collective test starting: {name}",
            f"# nThread 1 nGpus 1 minBytes {min(sizes, default=0)} "
            f"maxBytes {max(sizes, default=0)} step: {run.plan.get('factor', 2)}(factor) "
            f"warmup iters: {run.plan.get('warmup', 0)} "
            "iters: adaptive agg iters: 1 validation: 1 graph: 0",
            f"# measured by ddp_notebook: {run.backend} on {run.device}, {curve.mode}",
            "#",
            "# Using devices",
            *(f"#  Rank {rank:2d} Group  0 on {run.device}" for rank in curve.ranks),
            "#",
            *_NCCL_HEADING,
        ]
        for point in curve.points:
            head, mean = _nccl_head(curve, point), _by_mean(point)
            measured = (
                f"  {_width(mean['time'], 7)}  {_width(mean['alg_bw'], 6)}"
                f"  {_width(mean['bus_bw'], 6)}  {point.wrong:>6}"
            )
            # The width of nccl-tests' columns for one placement (in-place or out-of-place). Tools
            # that read this table find values by the position of their column.
            nothing = " " * 33
            places = nothing + measured if curve.operation.in_place else measured + nothing
            line = (
                f"{head['size']:>12}  {head['count']:>12}  {head['type']:>8}  {head['redop']:>6}"
                f"  {head['root']:>6}{places}"
            )
            lines.append(line.rstrip())
        lines += [
            f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
            f"# Avg bus bandwidth    : {_average_rate(curve.points):g} ",
            "#",
            f"# Collective test concluded: {name}",
        ]
    return "\n".join(lines)


def _width(value: float, width: int) -> str:
    """Return a number with as many decimals as fit, at most two."""
    text = next((t for d in (2, 1, 0) if len(t := f"{value:.{d}f}") <= width), f"{value:.1e}")
    return f"{text:>{width}}"


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
    plan = run.plan
    config = {
        "minimum_bytes": plan.get("min_bytes", 0),
        "maximum_bytes": plan.get("max_bytes", 0),
        "step_factor": plan.get("factor", 2),
        "warmup_iters": plan.get("warmup", 0),
    }
    results = [_nccl_result(curve, point) for curve in run.curves for point in curve.points]
    wrong = sum(point.wrong for point in run.all_points)
    return _nccl_file(run, config, results) | {
        "start_time": run.started,
        "out_of_bounds": {"count": wrong, "okay": "false" if wrong else "true"},
        "average_bus_bandwidth": {"bandwidth": _average_rate(run.all_points), "okay": "unchecked"},
        "errors": [run.ended] if run.ended else [],
    }


def steps_nccl_json(result: StepBenchResult) -> dict[str, Any]:
    """Training steps in nccl-tests' JSON: a step as what all_reduces the model's gradients.

    Its time is the whole step's, so its bandwidth is that of gradients in training, and not of a
    network. The keys that are not nccl-tests' tell of the step.
    """
    size = result.gradient_bytes
    factor = op_named("all_reduce").bus_factor(result.world_size)
    results = []
    for point, row in zip(result.points, step_rows(result), strict=True):
        mean_us = statistics.fmean(point.times_us) if point.times_us else point.step_us
        rate = size / mean_us / 1e3
        head = {"size": size, "count": result.parameters, "type": "float", "redop": "avg"}
        time = {"time": mean_us, "alg_bw": rate, "bus_bw": rate * factor, "nwrong": 0.0}
        made = {**head, "root": "-1", "in_place": time, "actual_iterations": point.steps, **row}
        if point.times_us:
            made["in_place_per_iter"] = _per_iteration(point.times_us)
        name = f"training step of {result.model} batch {point.batch} bucket {point.bucket}"
        results.append(made | {"experiment_name": name})
    config = {"minimum_bytes": size, "maximum_bytes": size, "step_factor": 1, "warmup_iters": 1}
    return _nccl_file(result, config, results) | {
        "errors": [result.problem] if result.problem else []
    }


def _nccl_file(
    of: BenchRun | StepBenchResult, config: dict[str, Any], results: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return what nccl-tests write around results."""
    most = max((each["actual_iterations"] for each in results), default=0)
    return {
        "version": 2,
        "start_time": "",
        "args": ["ddp_notebook"],
        "env": [],
        "nccl_version": 0,
        "config": {
            "nthreads": 1,
            "ngpus": 1,
            **config,
            "iterations": most,
            "aggregated_iterations": 1,
            "validation": 1,
            "graph": 0,
            "blocking_collectives": "false",
            "per_iter_timing": "true",
            "parallel_init": "false",
            "devices": [
                {"rank": rank, "group": 0, "device": 0, "device_info": of.device}
                for rank in range(of.world_size)
            ],
        },
        "results": results,
    }


def _nccl_result(curve: Curve, point: BenchPoint) -> dict[str, Any]:
    place = "in_place" if curve.operation.in_place else "out_of_place"
    result = {**_nccl_head(curve, point), place: _by_mean(point)}
    if point.samples is not None:
        times_ns = point.samples.times_ns
        slowest = [max(column) / 1e3 for column in zip(*times_ns, strict=True)]
        result[f"{place}_per_iter"] = per_iteration = _per_iteration(slowest)
        if len(times_ns) > 1:
            of_ranks = [[time / 1e3 for time in times] for times in times_ns]
            per_iteration["per_process_max_times_us"] = of_ranks
    name = f"{_nccl_name(curve)} {curve.world_size} ranks {curve.mode}"
    return {**result, "actual_iterations": point.iterations, "experiment_name": name}


def _per_iteration(times_us: Sequence[float]) -> dict[str, Any]:
    """Return what nccl-tests tell of the times of the slowest rank."""
    ordered, mean, deviation = (
        sorted(times_us),
        statistics.fmean(times_us),
        statistics.pstdev(times_us),
    )
    return {
        "min_us": ordered[0],
        "max_us": ordered[-1],
        "avg_us": mean,
        "p50_us": statistics.median(ordered),
        "p95_us": ordered[min(len(ordered) - 1, -(-len(ordered) * 95 // 100) - 1)],
        "p99_us": ordered[min(len(ordered) - 1, -(-len(ordered) * 99 // 100) - 1)],
        "stdev_us": deviation,
        "cv_pct": 100 * deviation / mean if mean else 0.0,
        "times_us": list(times_us),
    }
