"""Benchmarks as figures: time and bandwidth against size, and training steps against batch size.

Figures are made without pyplot: nothing global changes, no window opens, nothing is left over.
They have a white background, so that they look the same on any page and in print.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ddp_notebook.bench.result import BenchPoint, BenchRun, Curve, duration
from ddp_notebook.bench.steps import PERFECT, StepBenchResult
from ddp_notebook.model import format_bytes
from ddp_notebook.views.bench import name_bucket, steps_title, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette for the colour-blind. Markers repeat what colours say, for print without
# colour.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_VERMILLION = _COLOURS[1]
_INK, _QUIET = "#333333", "#707070"
_TEXT = 8.5
"""The size of text in a plot, in points."""
_LEAST_US = 1e-3
"""A nanosecond: a log axis cannot show the time 0 of a clock that is too coarse."""


def bundle(draw: Callable[[], Figure], caption: str) -> dict[str, str]:
    """Return a figure as a notebook shows it; where only text can be shown, its caption."""
    buffer = io.BytesIO()
    try:
        draw().savefig(buffer, format="png")
    except ImportError as error:
        return {"text/plain": f"<figure: {caption}> (not drawn: {error})"}
    image = base64.b64encode(buffer.getvalue()).decode("ascii")
    return {"image/png": image, "text/plain": f"<figure: {caption}>"}


# -- collectives against size ------------------------------------------------------------


def against_size(run: BenchRun, baseline: BenchRun | None = None) -> Figure:
    """Draw time on the left, bus bandwidth on the right; those of a baseline in grey."""
    figure, (left, right) = _two_panels(title(run))
    curves = [curve for curve in run.curves if curve.operation.sized and curve.points]
    before = {curve.key: curve for curve in baseline.curves} if baseline is not None else {}
    points = [p for curve in curves for p in curve.points]
    alone = len(curves) == 1
    for number, curve in enumerate(curves):
        sizes = [p.size_bytes for p in curve.points]
        times = [max(p.latency_us, _LEAST_US) for p in curve.points]
        colour = _COLOURS[number % len(_COLOURS)]
        if alone:
            p10 = [max(p.p10_us, _LEAST_US) for p in curve.points]
            p90 = [p.p90_us for p in curve.points]
            left.fill_between(sizes, p10, p90, color=colour, alpha=0.15, lw=0, label="p10 to p90")
        ends = [p.latency_interval_us for p in curve.points]
        below = [max(t - low, 0.0) for t, (low, _) in zip(times, ends, strict=True)]
        above = [max(high - t, 0.0) for t, (_, high) in zip(times, ends, strict=True)]
        left.errorbar(sizes, times, yerr=[below, above], fmt="none", ecolor=colour, lw=1, capsize=2)
        _draw(left, curve, times, number, label="median" if alone else curve.name)
        if (fit := curve.fit) is not None:
            span = fit.to_bytes / fit.from_bytes
            fine = [fit.from_bytes * span ** (n / 99) for n in range(100)]
            label = f"fit, off by {fit.median_error:.0%}" if alone else None
            predicted = [fit.predict(x) * 1e6 for x in fine]
            left.plot(fine, predicted, "--", color=_INK, lw=1, label=label)
        _draw(right, curve, [p.busbw_gb_per_s for p in curve.points], number)
        if curve.key in before:
            look: dict[str, Any] = {"color": _QUIET, "mfc": "white", "ls": ":", "label": "baseline"}
            old = before[curve.key]
            _draw(left, old, [max(p.latency_us, _LEAST_US) for p in old.points], number, **look)
            _draw(right, old, [p.busbw_gb_per_s for p in old.points], number, **look)
    _dress(left, "Time on the slowest rank: median, 95 % interval", "tensor size", "time")
    _dress(right, "Bus bandwidth: what each rank sends", "tensor size", "bus bandwidth in GB/s")
    if not points:
        for axes in (left, right):
            _say(axes, "nothing was measured")
        return figure
    sizes = sorted({p.size_bytes for p in points})
    every = -(-len(sizes) // 7)  # more labels would overlap
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes[::every], [format_bytes(size) for size in sizes[::every]])
        axes.set_xticks(sizes, [""] * len(sizes), minor=True)
        axes.margins(x=0.04)
    left.set_yscale("log")
    left.yaxis.set_major_formatter(lambda value, _position: duration(value / 1e6))
    left.yaxis.set_minor_formatter(lambda *_: "")
    left.set_ylim(_time_range(points))
    if alone and (fit := curves[0].fit) is not None:
        # Its latency as a floor, and the size that gets half of the bandwidth.
        dotted: dict[str, Any] = {"color": _QUIET, "lw": 0.9, "ls": (0, (1, 2))}
        floor_us, half = fit.latency_s * 1e6, fit.half_bandwidth_bytes
        left.axhline(floor_us, **dotted)
        _note(left, f"latency {duration(fit.latency_s)}", y=floor_us, below=True)
        if fit.from_bytes <= half <= fit.to_bytes:
            left.axvline(half, **dotted)
            _note(left, "half of the\nbandwidth", x=half)
    reached = max(p.busbw_gb_per_s for p in points)
    right.set_ylim(0, 1.1 * max(reached, run.limit_gb_per_s) or 1)
    if run.limit_gb_per_s:
        right.axhline(run.limit_gb_per_s, color=_QUIET, lw=0.9, ls="--")
        most = f"a GPU sends at most {run.limit_gb_per_s:.3g} GB/s"
        _note(right, most, y=run.limit_gb_per_s, below=True)
    if all(curve.world_size == 1 for curve in curves):
        _say(right, "one rank sends nothing")
    _legend(left, loc="upper left")
    _legend(right, loc="center left")
    return figure


def _draw(axes: Axes, curve: Curve, heights: Sequence[float], number: int, **look: Any) -> None:
    """A line with a marker at each size, and a cross over every size with wrong results."""
    style: dict[str, Any] = {
        "color": _COLOURS[number % len(_COLOURS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "markersize": 4.5,
        "lw": 1.2,
    }
    sizes = [p.size_bytes for p in curve.points]
    axes.plot(sizes, heights, **(style | look))
    wrong = [n for n, p in enumerate(curve.points) if p.wrong]
    if wrong:
        at, tops = [sizes[n] for n in wrong], [heights[n] for n in wrong]
        axes.plot(at, tops, "X", color=_VERMILLION, markersize=10, label="wrong results", zorder=3)


def _time_range(points: Sequence[BenchPoint]) -> tuple[float, float]:
    """Return a range around the times that holds at least two powers of ten, which have labels."""
    times = [p.latency_us for p in points]
    ends = [p.p90_us for p in points] + [end for p in points for end in p.latency_interval_us]
    # matplotlib labels powers of ten. Times within one decade, as a few small sizes have them,
    # would leave an axis without any number on it.
    low = max(min(times), _LEAST_US) / 2.5
    high = max(*times, *ends, _LEAST_US) * 1.6
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    if first == last:
        last += 1
    return min(low, 10.0 ** min(first, last)), max(high, 10.0 ** max(first, last))


# -- training steps against batch size ---------------------------------------------------


def against_batch(result: StepBenchResult) -> Figure:
    """Draw the share of communication on the left, scaling on the right."""
    figure, (left, right) = _two_panels(
        steps_title(result).replace(" gradients, ", " gradients\n", 1)
    )
    # Exposed communication as a share of the step, for each bucket size.
    for number, bucket in enumerate(result.buckets):
        points = [point for point in result.points if point.bucket == bucket]
        shares = [100 * point.exposed_share for point in points]
        ends = [
            [min(max(100 * end / p.step_us, 0.0), 100.0) for end in p.exposed_interval_us]
            for p in points
        ]
        left.errorbar(
            [point.batch for point in points],
            shares,
            yerr=[
                [max(share - low, 0.0) for share, (low, _) in zip(shares, ends, strict=True)],
                [max(high - share, 0.0) for share, (_, high) in zip(shares, ends, strict=True)],
            ],
            color=_COLOURS[number % len(_COLOURS)],
            marker=_MARKERS[number % len(_MARKERS)],
            capsize=3,
            label=name_bucket(bucket),
        )
    heading = "Communication that is not hidden, 95 % interval"
    _dress(left, heading, "batch per rank", "% of the step")
    left.set_ylim(0, max(5.0, *left.get_ylim()))
    _legend(left)
    # Samples per second of all ranks, of one rank alone, and of as many times that.
    main, ranks = result.main_points, result.world_size
    batches = [point.batch for point in main]
    alone = [point.batch / point.alone_us * 1e6 for point in main]
    rates = [point.samples_per_s for point in main]
    right.plot(batches, rates, color=_COLOURS[0], marker="o", label=f"{ranks} ranks")
    if ranks > 1:
        right.plot(batches, alone, color=_VERMILLION, marker="s", label="one rank alone")
        ideal = [ranks * rate for rate in alone]
        right.plot(batches, ideal, "--", color=_QUIET, lw=1, label=f"{ranks} times that")
        for point, rate in zip(main, rates, strict=True):
            # An efficiency that cannot be says that the step of the single rank was disturbed.
            known = point.efficiency <= PERFECT
            _note(right, f"{point.efficiency:.0%}" if known else "noise", point.batch, rate)
        if result.break_even:
            right.axvline(result.break_even, color=_COLOURS[2], ls=":", lw=1.6, label="break-even")
    heading = "Scaling: samples per second, and efficiency"
    _dress(right, heading, "batch per rank", "samples per second")
    right.set_ylim(bottom=0)
    _legend(right)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.set_xticks(result.batches, [f"{batch:,}" for batch in result.batches])
        axes.margins(x=0.08)
        if not result.points:
            _say(axes, "nothing was measured")
    return figure


# -- what both share ---------------------------------------------------------------------


def _two_panels(heading: str) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with two axes; matplotlib is loaded when the first one is asked for."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(10.0, 4.4), dpi=100, layout=layout)
    figure.set_facecolor("white")
    figure.suptitle(heading, fontsize=11, fontweight="bold", color=_INK)
    return figure, figure.subplots(1, 2)


def _dress(axes: Axes, heading: str, x: str, y: str) -> None:
    """Title, names of the axes with their units, a quiet frame and grid."""
    axes.set_title(heading, fontsize=10.5, color=_INK)
    axes.set_xlabel(x, fontsize=9.5, color=_INK)
    axes.set_ylabel(y, fontsize=9.5, color=_INK)
    axes.tick_params(which="both", labelsize=_TEXT, colors=_INK)
    axes.grid(which="major", color="#D9D9D9", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _note(
    axes: Axes, words: str, x: float | None = None, y: float | None = None, *, below: bool = False
) -> None:
    """Words at a point; without `x` at the left edge, without `y` at the bottom."""
    axes.annotate(
        words,
        (0.01 if x is None else x, 0.02 if y is None else y),
        xycoords=(
            "axes fraction" if x is None else "data",
            "axes fraction" if y is None else "data",
        ),
        xytext=(4, -4 if below else 4),
        textcoords="offset points",
        va="top" if below else "bottom",
        fontsize=_TEXT,
        color=_INK,
    )


def _say(axes: Axes, text: str) -> None:
    """A sentence instead of what cannot be drawn."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=_INK)


def _legend(axes: Axes, loc: str = "best") -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc=loc, frameon=False, fontsize=_TEXT, labelcolor=_INK)
