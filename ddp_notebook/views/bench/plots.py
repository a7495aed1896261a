"""A benchmark of collectives as a figure: time, bandwidth, iterations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddp_notebook.bench.notes import duration
from ddp_notebook.bench.results import BenchPoint, BenchRun, Curve, Floor
from ddp_notebook.model import format_bytes
from ddp_notebook.views.bench.style import (
    INK,
    PURPLE,
    QUIET,
    TEXT,
    VERMILLION,
    colour_of,
    dress,
    legend,
    log_times,
    marker_of,
    new_figure,
    say,
)
from ddp_notebook.views.bench.table import title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INCHES = (10.0, 4.4)

_LEAST_US = 1e-3
"""A nanosecond: a log axis cannot show the time 0 of a clock that is too coarse."""
_SIZE_LABELS = 7
"""How many sizes are labelled under a panel; more would overlap."""
_CEILING_WITHIN = 3.0
"""A ceiling higher than this times the measured maximum is named and not drawn: it would flatten
the curves."""
_DISTRIBUTIONS = 5
"""The number of sizes whose iterations are drawn."""


def figure(run: BenchRun, kind: str = "size", baseline: BenchRun | None = None) -> Figure:
    """The figure ``size``: time and bus bandwidth against size; or ``iterations``: their spread.

    Raises ValueError for another kind.
    """
    kinds = {"size": _against_size, "iterations": _iterations}
    if kind not in kinds:
        raise ValueError(f"there is no plot {kind!r}: there are {', '.join(kinds)}.")
    made = new_figure(title(run), *_INCHES)
    left, right = made.subplots(1, 2)
    kinds[kind](left, right, run, baseline)
    return made


# -- against size ------------------------------------------------------------------------


def _against_size(left: Axes, right: Axes, run: BenchRun, baseline: BenchRun | None) -> None:
    """Time on the left, bus bandwidth on the right."""
    sized = [curve for curve in run.curves if curve.operation.sized and curve.points]
    before = {curve.key: curve for curve in baseline.curves} if baseline is not None else {}
    left.set_yscale("log")
    log_times(left.yaxis)
    for number, curve in enumerate(sized):
        style = colour_of(number), marker_of(number)
        _draw_time(left, curve, style, alone=len(sized) == 1)
        _draw_bandwidth(right, curve, style)
        if curve.key in before:
            _draw_baseline(left, right, before[curve.key], style)
    points = [p for curve in sized for p in curve.points]
    _dress(left, "Time on the slowest rank: median, 95 % interval", "time", points)
    _dress(right, "Bus bandwidth: what each rank sends", "bus bandwidth in GB/s", points)
    if not points:
        return
    left.set_ylim(_time_range([_time(p) for p in points], points))
    if len(sized) == 1 and sized[0].fit is not None:
        _explain(left, sized[0])
    reached = max(p.busbw_gb_per_s for p in points)
    right.set_ylim(0, 1.1 * reached or 1)
    _ceilings(right, run.floors, reached)
    _buckets(right, run.buckets_bytes, points)
    if all(curve.world_size == 1 for curve in sized):
        say(right, "one rank sends nothing")
    legend(left, loc="upper left")
    legend(right, loc="center left")


def _draw_time(axes: Axes, curve: Curve, style: tuple[str, str], *, alone: bool) -> None:
    colour, marker = style
    sizes = [p.size_bytes for p in curve.points]
    times = [_time(p) for p in curve.points]
    if alone:
        low, high = (
            [max(p.p10_us, _LEAST_US) for p in curve.points],
            [p.p90_us for p in curve.points],
        )
        axes.fill_between(sizes, low, high, color=colour, alpha=0.15, lw=0, label="p10 to p90")
    ends = [p.latency_interval_us for p in curve.points]
    below = [max(t - low, 0.0) for t, (low, _) in zip(times, ends, strict=True)]
    above = [max(high - t, 0.0) for t, (_, high) in zip(times, ends, strict=True)]
    axes.errorbar(
        sizes,
        times,
        yerr=[below, above],
        color=colour,
        marker=marker,
        markersize=4.5,
        linewidth=1.2,
        elinewidth=1.0,
        capsize=2,
        label="median" if alone else curve.name,
    )
    if curve.fit is not None:
        fit = curve.fit
        fine = _between(fit.from_bytes, fit.to_bytes)
        label = f"fit, off by {fit.median_error:.0%}" if alone else None
        axes.plot(fine, [fit.predict(x) * 1e6 for x in fine], "--", color=INK, lw=1, label=label)
    _mark_wrong(axes, curve.points, times)


def _draw_bandwidth(axes: Axes, curve: Curve, style: tuple[str, str]) -> None:
    colour, marker = style
    sizes = [p.size_bytes for p in curve.points]
    rates = [p.busbw_gb_per_s for p in curve.points]
    axes.plot(sizes, rates, color=colour, marker=marker, markersize=4.5, linewidth=1.2)
    _mark_wrong(axes, curve.points, rates)


def _draw_baseline(left: Axes, right: Axes, curve: Curve, style: tuple[str, str]) -> None:
    """The baseline: hollow and grey."""
    sizes = [p.size_bytes for p in curve.points]
    look: dict[str, Any] = {
        "color": QUIET,
        "marker": style[1],
        "markersize": 4.5,
        "lw": 0.9,
        "mfc": "white",
    }
    left.plot(sizes, [_time(p) for p in curve.points], ":", label="baseline", **look)
    right.plot(sizes, [p.busbw_gb_per_s for p in curve.points], ":", label="baseline", **look)


def _explain(axes: Axes, curve: Curve) -> None:
    """The fit's latency as a floor, and the size that gets half of the bandwidth."""
    fit = curve.fit
    assert fit is not None
    floor_us = fit.latency_s * 1e6
    axes.axhline(floor_us, color=QUIET, lw=0.9, ls=(0, (1, 2)))
    axes.annotate(
        f"latency {duration(fit.latency_s)}",
        (0.01, floor_us),
        xycoords=("axes fraction", "data"),
        xytext=(0, -14),
        textcoords="offset points",
        va="top",
        fontsize=TEXT,
        color=INK,
    )
    half = fit.half_bandwidth_bytes
    if fit.from_bytes <= half <= fit.to_bytes:
        axes.axvline(half, color=QUIET, lw=0.9, ls=(0, (1, 2)))
        axes.annotate(
            "half of the\nbandwidth",
            (half, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=TEXT,
            color=INK,
        )


def _ceilings(axes: Axes, floors: Sequence[Floor], reached: float) -> None:
    """The machine's own limits, with the source of each."""
    beyond = []
    for floor in floors:
        rate = floor.bandwidth_gb_per_s
        if reached and rate > _CEILING_WITHIN * reached:
            beyond.append(f"{floor.what} {rate:.3g} GB/s ↑")
        elif rate:
            axes.axhline(rate, color=QUIET, lw=0.9, ls="--")
            axes.set_ylim(top=max(axes.get_ylim()[1], rate * 1.12))
            axes.annotate(
                f"{floor.what} {rate:.3g} GB/s",
                (0.01, rate),
                xycoords=("axes fraction", "data"),
                xytext=(0, 2),
                textcoords="offset points",
                fontsize=TEXT,
                color=INK,
            )
    if beyond:
        axes.text(
            0.99, 0.99, "\n".join(beyond), transform=axes.transAxes, ha="right", va="top",
            fontsize=TEXT, color=QUIET,
        )  # fmt: skip


def _buckets(axes: Axes, buckets: Sequence[int], points: Sequence[BenchPoint]) -> None:
    """The sizes of the user's own buckets, marked on the curve."""
    low, high = min(p.size_bytes for p in points), max(p.size_bytes for p in points)
    inside = [size for size in dict.fromkeys(buckets) if low <= size <= high]
    for number, size in enumerate(inside):
        label = "buckets of your model" if number == 0 else None
        axes.axvline(size, ymax=0.92, color=PURPLE, lw=1.4, alpha=0.7, label=label)


# -- iterations --------------------------------------------------------------------------


def _iterations(left: Axes, right: Axes, run: BenchRun, _: BenchRun | None) -> None:
    """All iterations of some sizes on the left; on the right when each rank issues its part."""
    curve = next((c for c in run.curves if c.points), None)
    arrival = "How long each rank takes to bring its part"
    left.set_title("Every iteration, on its slowest rank")
    right.set_title(arrival)
    if curve is None:
        for axes in (left, right):
            say(axes, "nothing was measured")
        return
    _distributions(left, curve)
    if not curve.operation.sized:
        say(right, f"{curve.op} has no size")
        return
    for number, rank in enumerate(curve.ranks):
        right.plot(
            [p.size_bytes for p in curve.points],
            [p.issue_us[number] for p in curve.points],
            color=colour_of(number),
            marker=marker_of(number),
            markersize=4,
            lw=1,
            label=f"rank {rank}" + (" comes late" if rank == curve.straggler else ""),
        )
    _dress(right, arrival, "time until issued, lower quartile", curve.points)
    right.set_yscale("log")
    log_times(right.yaxis)
    issued = [max(t, _LEAST_US) for p in curve.points for t in p.issue_us]
    right.set_ylim(_time_range(issued, ()))
    legend(right, ncols=2)


def _distributions(axes: Axes, curve: Curve) -> None:
    """The share of iterations that took at most a given time, for a few sizes."""
    sampled = [p for p in curve.points if p.samples is not None]
    step = max(1, -(-len(sampled) // _DISTRIBUTIONS))
    for number, point in enumerate(sampled[::step]):
        assert point.samples is not None
        columns = zip(*point.samples.times_ns, strict=True)
        ordered = sorted(max(*column, _LEAST_US * 1e3) / 1e3 for column in columns)
        shares = [(n + 1) / len(ordered) for n in range(len(ordered))]
        axes.step(
            ordered,
            shares,
            where="post",
            color=colour_of(number),
            lw=1.4,
            ls=("-", "--", "-.", ":", (0, (5, 1, 1, 1)))[number % 5],
            label=format_bytes(point.size_bytes),
        )
    axes.set_xscale("log")
    heading = "Every iteration, on its slowest rank"
    dress(axes, heading, "time", "share of iterations that took less")
    axes.axhline(0.5, color=QUIET, lw=0.8, ls=(0, (1, 2)))
    log_times(axes.xaxis)
    legend(axes, loc="lower right")


# -- what panels share -------------------------------------------------------------------


def _time(point: BenchPoint) -> float:
    return max(point.latency_us, _LEAST_US)


def _mark_wrong(axes: Axes, points: Sequence[BenchPoint], heights: Sequence[float]) -> None:
    """A cross over every size whose results were wrong."""
    wrong = [(p.size_bytes, h) for p, h in zip(points, heights, strict=True) if p.wrong]
    if wrong:
        sizes, tops = zip(*wrong, strict=True)
        axes.plot(
            sizes, tops, "X", color=VERMILLION, markersize=10, label="wrong results", zorder=3
        )


def _dress(axes: Axes, title: str, y: str, points: Sequence[BenchPoint]) -> None:
    """Sizes below, a quiet frame and grid."""
    axes.set_xscale("log", base=2)
    sizes = sorted({p.size_bytes for p in points})
    every = -(-len(sizes) // _SIZE_LABELS) or 1
    axes.set_xticks(sizes[::every], [format_bytes(size) for size in sizes[::every]])
    axes.set_xticks(sizes, [""] * len(sizes), minor=True)
    axes.margins(x=0.04)
    dress(axes, title, "tensor size", y)
    if not points:
        axes.yaxis.set_visible(False)
        say(axes, "nothing was measured")


def _between(low: float, high: float, count: int = 100) -> list[float]:
    """Sizes from low to high, evenly on a logarithmic axis."""
    return [low * (high / low) ** (n / (count - 1)) for n in range(count)]


def _time_range(times_us: Sequence[float], points: Sequence[BenchPoint]) -> tuple[float, float]:
    """A range around times that holds at least two powers of ten, which have labels."""
    ends = [p.p90_us for p in points] + [end for p in points for end in p.latency_interval_us]
    low = max(min(times_us), _LEAST_US) / 2.5
    high = max(*times_us, *ends, _LEAST_US) * 1.6
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    if first == last:
        last += 1
    return min(low, 10.0 ** min(first, last)), max(high, 10.0 ** max(first, last))
