"""Plots. They draw numbers that are already there and decide nothing.

Figures are made without pyplot: nothing global changes, no window opens, nothing is left over.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ddp_notebook.model import BenchPoint, BenchResult, format_bytes
from ddp_notebook.views.bench import title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart in all common kinds of colour blindness.
_BLUE = "#0072B2"
_GREEN = "#007A5A"
_VERMILLION = "#D55E00"
_INK = "#333333"
_FAINT = "#D9D9D9"

_INCHES = (9.0, 4.0)
_DPI = 100
"""900 by 400 pixels: as wide as a notebook's output."""

_LEAST_US = 1e-3
"""A nanosecond: a time of 0, from a clock too coarse, has no place on a log axis."""

_SIZE_LABELS = 7
"""How many sizes are written under a panel; more would run into each other."""


def all_reduce_figure(result: BenchResult, figure: Figure | None = None) -> Figure:
    """Latency and bus bandwidth against tensor size, side by side.

    `figure` is drawn over when given, so that a figure already shown can be kept up to date.
    """
    figure = _new_figure() if figure is None else figure
    figure.clear()
    figure.set_facecolor("white")
    figure.suptitle(title(result), fontsize=12, fontweight="bold", color=_INK)
    latency, bandwidth = figure.subplots(1, 2)
    _draw_latency(latency, result.points)
    _draw_bandwidth(bandwidth, result)
    for axes in (latency, bandwidth):
        _dress(axes, result.points)
    return figure


def _new_figure() -> Figure:
    """An empty figure; matplotlib is loaded when the first one is asked for."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    return Figure(figsize=_INCHES, dpi=_DPI, layout=layout)


def _draw_latency(axes: Axes, points: tuple[BenchPoint, ...]) -> None:
    """Median time with the band that four fifths of the iterations lie in, log-log."""
    sizes = [p.size_bytes for p in points]
    axes.set_title("Time of one all_reduce on the slowest rank")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_format_us)
    axes.yaxis.set_minor_formatter(_format_nothing)
    if not points:
        return
    axes.set_ylim(_time_range(min(p.p10_us for p in points), max(p.p90_us for p in points)))
    axes.fill_between(
        sizes,
        [p.p10_us for p in points],
        [p.p90_us for p in points],
        color=_BLUE,
        alpha=0.2,
        linewidth=0,
        label="p10 to p90",
    )
    latencies = [p.latency_us for p in points]
    axes.plot(sizes, latencies, color=_BLUE, marker="o", markersize=4.5, label="median")
    wrong = [p for p in points if p.wrong]
    if wrong:
        _mark_wrong(axes, [p.size_bytes for p in wrong], [p.latency_us for p in wrong])
    axes.legend(loc="best", frameon=False, fontsize=9, labelcolor=_INK, reverse=True)


def _draw_bandwidth(axes: Axes, result: BenchResult) -> None:
    """Bus bandwidth from 0 up, so that heights can be compared."""
    points = result.points
    axes.set_title("Bus bandwidth in GB/s")
    if result.world_size == 1:
        axes.text(
            0.5, 0.5, "one rank sends nothing", transform=axes.transAxes, ha="center", color=_INK
        )
    if not points:
        return
    sizes = [p.size_bytes for p in points]
    rates = [p.busbw_gb_per_s for p in points]
    axes.plot(sizes, rates, color=_GREEN, marker="s", markersize=4.5, label="bus bandwidth")
    wrong = [p for p in points if p.wrong]
    if wrong:
        _mark_wrong(axes, [p.size_bytes for p in wrong], [p.busbw_gb_per_s for p in wrong])
    axes.set_ylim(bottom=0, top=None if any(rates) else 1)


def _mark_wrong(axes: Axes, sizes: list[int], heights: list[float]) -> None:
    """A cross over every size whose results were wrong."""
    axes.plot(
        sizes,
        heights,
        color=_VERMILLION,
        marker="X",
        markersize=10,
        linestyle="none",
        label="wrong results",
        zorder=3,
    )


def _dress(axes: Axes, points: tuple[BenchPoint, ...]) -> None:
    """What both panels share: sizes below, a quiet frame and grid."""
    axes.set_xscale("log", base=2)
    sizes = [p.size_bytes for p in points]
    every = -(-len(sizes) // _SIZE_LABELS) or 1
    labelled = sizes[::every]
    axes.set_xticks(labelled, [format_bytes(size) for size in labelled])
    axes.set_xticks(sizes, [""] * len(sizes), minor=True)
    axes.set_xlabel("tensor size", fontsize=9.5, color=_INK)
    axes.title.set(fontsize=10.5, color=_INK)
    axes.margins(x=0.04)
    axes.tick_params(which="both", labelsize=8.5, colors=_INK)
    axes.grid(which="major", color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_INK)
    if not points:
        axes.yaxis.set_visible(False)
        axes.text(
            0.5, 0.5, "nothing was measured", transform=axes.transAxes, ha="center", color=_INK
        )


def _time_range(low: float, high: float) -> tuple[float, float]:
    """A range around two times that holds at least two powers of ten, which have labels."""
    low, high = max(low, _LEAST_US) / 1.25, max(high, _LEAST_US) * 1.25
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    if first == last:
        last += 1
    return min(low, 10.0 ** min(first, last)), max(high, 10.0 ** max(first, last))


def _format_us(value: float, _position: float) -> str:
    """A time in microseconds as an axis says it: ``50 µs``, ``10 ms``, ``2 s``."""
    for unit, worth in (("s", 1e6), ("ms", 1e3)):
        if value >= worth:
            return f"{value / worth:g} {unit}"
    return f"{value:g} µs"


def _format_nothing(_value: float, _position: float) -> str:
    """No label."""
    return ""
