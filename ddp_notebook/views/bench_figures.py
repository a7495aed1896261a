"""Benchmarks as figures: time and bandwidth against size, and training steps against batch size.

A figure is some panels, each a function that draws on axes. On a page every panel is an SVG of its
own, so that narrow pages have them below each other; in a file they are one figure. Figures are
made without pyplot: nothing global changes, no window opens, nothing is left over.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ddp_notebook.bench.intervals import median_interval
from ddp_notebook.bench.result import BenchPoint, BenchRun, Curve, Interval, duration
from ddp_notebook.bench.steps import PERFECT, StepBenchResult, StepPoint
from ddp_notebook.model import format_bytes
from ddp_notebook.views.bench import name_bucket, steps_title, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Panel: TypeAlias = Callable[[Axes], None]

# Okabe and Ito's palette for the colour-blind. Markers repeat what colours say, for print without
# colour.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_VERMILLION = _COLOURS[1]
_INK, _QUIET = "#333333", "#808080"
"""Of words, which a page replaces by its own colour; of thin lines, seen on white and on black."""
_TEXT = 10.0
"""The size of text in a plot, in points: about as many pixels in a column of 365 pixels."""
_PANEL_IN = (5.0, 3.9)
_LEAST_US = 1e-3
"""A nanosecond: a log axis cannot show the time 0 of a clock that is too coarse."""
_FAR_ABOVE = 4.0
"""A ceiling this many times above what was reached would flatten the curve: it is only told."""
_HOVER = "hover: "
"""Begins the id of what tells something where the pointer rests on it."""


def on_page(panels: Sequence[Panel], about: str) -> str:
    """Return the panels as HTML, side by side where there is room. Raises ImportError."""
    style = "flex: 1 1 320px; min-width: 0; max-width: 620px"
    drawn = ""
    for panel in panels:
        svg = re.sub(r' height="[\d.]+pt"', "", _svg(_figure([panel])), count=1)
        svg = re.sub(r' width="[\d.]+pt"', ' width="100%"', svg, count=1)
        # The page's own colour for words, which is right in dark as well.
        drawn += f'<div style="{style}">{svg.replace(_INK, "currentColor")}</div>'
    return (
        f'<div role="img" aria-label="{escape(about)}" '
        f'style="display: flex; flex-wrap: wrap; gap: 8px">{drawn}</div>'
    )


def save(figure: Figure, path: Path) -> None:
    """Write the figure in the form of the name's ending."""
    if path.suffix.lower() == ".svg":
        path.write_text(_svg(figure) + os.linesep, "utf-8")
    else:
        figure.savefig(path)


def _svg(figure: Figure) -> str:
    """Return an SVG in which nothing can touch what is around it on a page."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):  # text stays text, found by a search
        figure.savefig(buffer, format="svg")
    drawn = "<svg" + buffer.getvalue().partition("<svg")[2]
    # Its style sheet would be one for everything on the page.
    for part in ("<metadata>.*?</metadata>", "<style.*?</style>", "<!--.*?-->"):
        drawn = re.sub(part, "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"\s*\n\s*", " ", drawn)
    drawn = drawn.replace("<svg", '<svg stroke-linejoin="round"', 1)
    drawn = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px system-ui, sans-serif", drawn)
    drawn = re.sub(f'<g id="{_HOVER}([^"]*)">', r"<g><title>\1</title>", drawn)
    # The ids of what nothing refers to would be there again in the next figure.
    used = set(re.findall(r'#([^")]+)', drawn))
    return re.sub(r' id="([^"]*)"', lambda found: found[0] * (found[1] in used), drawn)


def _figure(panels: Sequence[Panel], heading: str = "") -> Figure:
    """Return the panels as one figure; matplotlib is loaded when the first one is asked for."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    width, height = _PANEL_IN
    layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
    size = (width * columns, height * rows)
    figure = Figure(figsize=size, layout=layout, facecolor="none")
    if heading:
        figure.set_facecolor("white")
        figure.suptitle(heading, fontsize=11, fontweight="bold", color=_INK)
    for number, panel in enumerate(panels, 1):
        panel(figure.add_subplot(rows, columns, number))
    return figure


# -- collectives against size ------------------------------------------------------------


def against_size(run: BenchRun, baseline: BenchRun | None = None) -> Figure:
    """Draw time on the left, bus bandwidth on the right, a row for each operation."""
    return _figure(size_panels(run, baseline), title(run))


def size_panels(run: BenchRun, baseline: BenchRun | None = None) -> list[Panel]:
    """Return two panels for each operation: time, and bus bandwidth; a baseline is in grey."""
    before = {curve.key: curve for curve in baseline.curves} if baseline is not None else {}
    name = f"baseline, {baseline.backend} on {baseline.device}" if baseline is not None else ""
    by_op: dict[str, list[Curve]] = {}
    for curve in run.curves:
        if curve.points:
            by_op.setdefault(curve.op, []).append(curve)
    sized = {op: curves for op, curves in by_op.items() if curves[0].operation.sized}
    panels: list[Panel] = []
    for curves in sized.values():
        shown = [(curve, before.get(curve.key)) for curve in curves]
        panels += [partial(_times, run, shown, name), partial(_rates, run, shown, name)]
    return panels or [
        partial(_say, run.notes[0] if by_op and run.notes else "Nothing was measured.")
    ]


Shown: TypeAlias = "Sequence[tuple[Curve, Curve | None]]"
"""Curves of one operation, each with that of a baseline."""


def _times(run: BenchRun, shown: Shown, baseline: str, axes: Axes) -> None:
    """Draw the time of every size on two log axes, with the two lines that it approaches."""
    curves = [curve for curve, _ in shown]
    _dress(axes, f"{curves[0].op}: time on the slowest rank", "tensor size", "")
    _size_axis(axes, run)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _position: duration(value / 1e6))
    axes.yaxis.set_minor_formatter(lambda *_: "")
    axes.set_ylim(_time_range([p for curve in run.curves for p in curve.points]))
    for number, (curve, before) in enumerate(shown):
        if before is not None:
            _draw(axes, before, _time, number, baseline)
        _draw(axes, curve, _time, number, _label(run, shown, curve))
        if curve.fit is not None:
            _asymptotes(axes, curve, _COLOURS[number % len(_COLOURS)], named=len(shown) == 1)
    if len(shown) == 1 and curves[0].op == "all_reduce":
        _mark_buckets(axes, run.bucket_bytes, curves[0])
    for barrier in [curve for curve in run.curves if not curve.operation.sized][-1:]:
        time_us = barrier.points[0].latency_us
        label = f"{barrier.name}: {duration(time_us / 1e6)}"
        axes.axhline(time_us, color=_QUIET, lw=1.4, ls=":", label=label)
    _legend(axes, "upper left")


def _asymptotes(axes: Axes, curve: Curve, colour: str, *, named: bool) -> None:
    """Draw what small sizes approach, the latency, and what large ones do, size / bandwidth."""
    fit, least = curve.fit, axes.get_ylim()[0]
    if fit is None:
        return
    thin: dict[str, Any] = {"color": _QUIET if named else colour, "lw": 0.9, "ls": (0, (4, 2))}
    rate = fit.bandwidth_bytes_per_s
    # From where the line enters the panel: a log axis has no 0 to begin at.
    first, last = max(fit.from_bytes, least * rate / 1e6), fit.to_bytes
    floor = max(fit.latency_s * 1e6, _LEAST_US)
    axes.plot([fit.from_bytes, last], [floor] * 2, **thin)
    axes.plot([first, last], [first / rate * 1e6, last / rate * 1e6], **thin)
    if named:
        _note(axes, f"latency {duration(fit.latency_s)}", last, floor, below=True, right=True)
        middle = math.sqrt(first * last)
        axes.annotate(
            f"size / {rate / 1e9:.3g} GB/s",
            (middle, middle / rate * 1e6),
            xytext=(6, -3),
            textcoords="offset points",
            va="top",
            fontsize=_TEXT,
            color=_INK,
        )


def _mark_buckets(axes: Axes, sizes: Sequence[int], curve: Curve) -> None:
    """Mark the buckets of the user's models where the fit predicts them; the largest is named."""
    fit = curve.fit
    inside = [size for size in sizes if fit and fit.from_bytes <= size <= fit.to_bytes]
    if fit is None or not inside:
        return
    for size in inside:
        words = f"your {format_bytes(size)} bucket: {duration(fit.predict(size))}"
        at = ([size], [fit.predict(size) * 1e6])
        axes.plot(*at, "D", mfc="none", mec=_COLOURS[3], mew=1.8, ms=8)
        _hover(axes, *at, [f"{words}, by latency and bandwidth"])
        if size == inside[-1]:
            _note(axes, f"{words} ", size, at[1][0], right=True)


def _rates(run: BenchRun, shown: Shown, baseline: str, axes: Axes) -> None:
    """Draw the bus bandwidth of every size, below what the same run says is possible."""
    curves = [curve for curve, _ in shown]
    _dress(axes, f"{curves[0].op}: bus bandwidth", "tensor size", "GB/s that each rank sends")
    _size_axis(axes, run)
    for number, (curve, before) in enumerate(shown):
        if before is not None:
            _draw(axes, before, _rate, number, baseline)
        _draw(axes, curve, _rate, number, _label(run, shown, curve))
    reached = max((p.busbw_gb_per_s for p in run.all_points), default=0.0)
    fit = curves[0].fit if len(curves) == 1 else None
    ceilings = [
        (run.limit_gb_per_s, "a GPU sends at most"),
        (run.copy_gb_per_s, "each rank copies memory at"),
    ]
    if fit is not None:
        factor = curves[0].operation.bus_factor(curves[0].world_size)
        ceilings.append((fit.bandwidth_bytes_per_s / 1e9 * factor, "large tensors approach"))
    near = [top for top, _ in ceilings if top <= _FAR_ABOVE * reached or top == run.limit_gb_per_s]
    axes.set_ylim(0, 1.15 * max(reached, *near, 0.0) or 1)
    for top, words in ceilings:
        if top and top in near:
            _ceiling(axes, top, f"{words} {top:.3g} GB/s")
        elif top:
            _note(axes, f"↑ {words} {top:.3g} GB/s", y=axes.get_ylim()[1], below=True)
    if all(curve.world_size == 1 for curve in curves):
        _say("one rank sends nothing", axes)
    _legend(axes, "center left")


Reading: TypeAlias = "tuple[float, Interval]"


def _time(point: BenchPoint) -> Reading:
    low, high = point.latency_interval_us
    return max(point.latency_us, _LEAST_US), (max(low, _LEAST_US), max(high, _LEAST_US))


def _rate(point: BenchPoint) -> Reading:
    """The bandwidth, and its interval: that of the time, the other way round."""
    low, high = point.latency_interval_us
    bus, middle = point.busbw_gb_per_s, point.latency_us
    return bus, (bus * middle / high if high else bus, bus * middle / low if low else bus)


def _draw(
    axes: Axes, curve: Curve, read: Callable[[BenchPoint], Reading], number: int, label: str
) -> None:
    """Draw a marker and an interval for each size, and a cross over every one that was wrong."""
    old = label.startswith("baseline")
    colour = _QUIET if old else _COLOURS[number % len(_COLOURS)]
    sizes = [p.size_bytes for p in curve.points]
    _series(
        axes,
        sizes,
        [read(p) for p in curve.points],
        color=colour,
        marker=_MARKERS[number % len(_MARKERS)],
        mfc="none" if old else colour,
        label=label or None,
    )
    words = [
        f"{format_bytes(p.size_bytes)}: {_in_us(p)}, {p.busbw_gb_per_s:.3g} GB/s"
        + (f" ({label})" if label else "")
        for p in curve.points
    ]
    _hover(axes, sizes, [read(p)[0] for p in curve.points], words)
    wrong = [(p.size_bytes, read(p)[0]) for p in curve.points if p.wrong]
    if wrong:
        axes.plot(*zip(*wrong, strict=True), "X", color=_VERMILLION, ms=10, label="wrong results")


def _in_us(point: BenchPoint) -> str:
    low, high = (duration(end / 1e6) for end in point.latency_interval_us)
    return f"{duration(point.latency_us / 1e6)} (95 %: {low} to {high})"


def _label(run: BenchRun, shown: Shown, curve: Curve) -> str:
    """Return what distinguishes a curve from others in its panel, with its two numbers."""
    if len(shown) == 1:
        return f"this run, {run.backend} on {run.device}" if shown[0][1] is not None else ""
    name = curve.name.removeprefix(f"{curve.op} of ")
    if (fit := curve.fit) is None:
        return name
    return f"{name}: {duration(fit.latency_s)}, {fit.bandwidth_bytes_per_s / 1e9:.3g} GB/s"


def _size_axis(axes: Axes, run: BenchRun) -> None:
    """A log axis of all sizes of the run, the same in every panel, not all of them named."""
    sizes = sorted({p.size_bytes for p in run.all_points if p.size_bytes})
    every = -(-len(sizes) // 6)  # more names would overlap
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes[::every], [format_bytes(size) for size in sizes[::every]])
    axes.set_xticks(sizes, [""] * len(sizes), minor=True)
    axes.set_xlim(sizes[0] / 1.5, sizes[-1] * 1.5)


def _time_range(points: Sequence[BenchPoint]) -> tuple[float, float]:
    """Return a range around the times that holds at least two powers of ten, which have labels."""
    times = [p.latency_us for p in points]
    ends = [end for p in points for end in p.latency_interval_us]
    # matplotlib labels powers of ten. Times within one decade, as a few small sizes have them,
    # would leave an axis without any number on it. An interval without an end would flatten all.
    low = max(min(times), _LEAST_US) / 2.5
    high = max(min(max(*times, *ends), 10 * max(times)), _LEAST_US) * 1.6
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    if first == last:
        last += 1
    return min(low, 10.0 ** min(first, last)), max(high, 10.0 ** max(first, last))


# -- training steps against batch size ---------------------------------------------------


def against_batch(result: StepBenchResult) -> Figure:
    """Draw the share of communication on the left, scaling on the right."""
    heading = steps_title(result).replace(" gradients, ", " gradients\n", 1)
    return _figure(batch_panels(result), heading)


def batch_panels(result: StepBenchResult) -> list[Panel]:
    """Return the panels of training steps: the share of communication, and samples per second."""
    return [partial(_shares, result), partial(_scaling, result)]


def _shares(result: StepBenchResult, axes: Axes) -> None:
    """Draw a bar for each batch and bucket size; one that may be 0 is hatched."""
    _dress(axes, "Communication that is not hidden", "batch per rank", "% of a step, 95 % interval")
    buckets = result.buckets
    wide = 0.8 / max(len(buckets), 1)
    tops = [5.0]
    for number, bucket in enumerate(buckets):
        colour = _COLOURS[number % len(_COLOURS)]
        for place, batch in enumerate(result.batches):
            point = next((p for p in result.points if (p.batch, p.bucket) == (batch, bucket)), None)
            if point is None:
                continue
            x = place + wide * (number - (len(buckets) - 1) / 2)
            share, low, high = (100 * part for part in (point.exposed_share, *point.share_interval))
            tops.append(high)
            look: dict[str, Any] = {"color": colour}
            if point.unsure:
                look = {"facecolor": "none", "edgecolor": colour, "hatch": "////"}
            label = name_bucket(bucket) if len(buckets) > 1 and place == 0 else None
            axes.bar(x, share, 0.9 * wide, lw=1, label=label, **look)
            whiskers = [[max(share - low, 0.0)], [max(high - share, 0.0)]]
            axes.errorbar(x, share, yerr=whiskers, fmt="none", ecolor=_INK, lw=1.2, capsize=3)
            _hover(axes, [x], [share], [_about_step(point, low, high)])
    axes.set_xticks(range(len(result.batches)), [f"{batch:,}" for batch in result.batches])
    axes.set_ylim(0, min(1.1 * max(tops), 105))
    if any(p.unsure for p in result.points):
        _note(axes, "hatched: within the noise", y=axes.get_ylim()[1], below=True)
    if result.world_size == 1 or not result.points:
        _say("one rank sends nothing" if result.points else "nothing was measured", axes)
    _legend(axes)


def _about_step(point: StepPoint, low: float, high: float) -> str:
    share = f"{point.exposed_share:.0%} of a step of {duration(point.step_us / 1e6)}"
    return f"batch {point.batch:,}: {share} (95 %: {low:.0f} to {high:.0f} %)"


def _scaling(result: StepBenchResult, axes: Axes) -> None:
    """Draw the samples per second of all ranks, of one rank alone, and of as many times that."""
    from matplotlib.ticker import LogLocator

    _dress(axes, "Samples per second, and efficiency", "batch per rank", "samples per second")
    main, ranks = result.main_points, result.world_size
    if not main:
        _say("nothing was measured", axes)
        return
    batches = [point.batch for point in main]
    rates = [point.samples_per_s for point in main]
    _series(
        axes,
        batches,
        [(rate, _rate_interval(point)) for point, rate in zip(main, rates, strict=True)],
        color=_COLOURS[0],
        marker="o",
        mfc=_COLOURS[0],
        label=f"{ranks} ranks",
    )
    _hover(axes, batches, rates, [f"batch {p.batch:,}: {p.samples_per_s:,.0f}/s" for p in main])
    if ranks > 1:
        alone = [point.batch / point.alone_us * 1e6 for point in main]
        axes.plot(batches, alone, color=_VERMILLION, marker="s", ms=5, label="one rank alone")
        ideal = [ranks * rate for rate in alone]
        axes.plot(batches, ideal, "--", color=_QUIET, lw=1, label=f"{ranks} times that: ideal")
        for point, rate in zip(main, rates, strict=True):
            # An efficiency that cannot be says that the step of the single rank was disturbed.
            known = point.efficiency <= PERFECT
            words = f"{point.efficiency:.0%}" if known else "noise"
            _note(axes, words, point.batch, rate, below=True)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.minorticks_off()
    axes.set_xticks(result.batches, [f"{batch:,}" for batch in result.batches])
    axes.yaxis.set_major_formatter(lambda value, _position: f"{value:,.0f}")
    axes.margins(x=0.12, y=0.12)
    _legend(axes)


def _rate_interval(point: StepPoint) -> Interval:
    if not point.times_us:
        return point.samples_per_s, point.samples_per_s
    low, middle, high = median_interval([point.times_us])
    return point.samples_per_s * middle / high, point.samples_per_s * middle / low


# -- what both share ---------------------------------------------------------------------


def _series(axes: Axes, xs: Sequence[float], readings: Sequence[Reading], **look: Any) -> None:
    """Draw markers with whiskers; a line joins neighbours unless their intervals overlap.

    Where they do, nothing is known about which is higher, and a line would say that it is.
    """
    heights = [height for height, _ in readings]
    below = [max(height - low, 0.0) for height, (low, _) in readings]
    above = [max(high - height, 0.0) for height, (_, high) in readings]
    colour = look["color"]
    axes.errorbar(xs, heights, yerr=[below, above], fmt="none", ecolor=colour, lw=1, capsize=2)
    axes.plot(xs, heights, ls="none", ms=5, **look)
    points = list(zip(xs, readings, strict=True))
    for (x, (height, (low, high))), (right, (next_height, (least, most))) in pairwise(points):
        if high < least or most < low:
            axes.plot([x, right], [height, next_height], color=colour, lw=1.2)


def _hover(axes: Axes, xs: Sequence[float], ys: Sequence[float], words: Sequence[str]) -> None:
    """Tell `words` where the pointer rests near a point, by something large that is not seen."""
    for x, y, text in zip(xs, ys, words, strict=True):
        axes.plot([x], [y], "o", ms=16, mew=0, alpha=0, zorder=9, gid=f"{_HOVER}{text}")


def _dress(axes: Axes, heading: str, x: str, y: str) -> None:
    """Title, names of the axes with their units, a quiet frame and grid."""
    axes.set_title(heading, fontsize=_TEXT + 1, color=_INK)
    axes.set_xlabel(x, fontsize=_TEXT, color=_INK)
    axes.set_ylabel(y, fontsize=_TEXT, color=_INK)
    axes.tick_params(which="both", labelsize=_TEXT, labelcolor=_INK, color=_QUIET)
    axes.grid(which="major", color=_QUIET, alpha=0.25, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_QUIET)


def _ceiling(axes: Axes, height: float, words: str) -> None:
    """A thin line across the panel that says what it is, at its left end."""
    axes.axhline(height, color=_QUIET, lw=0.9, ls=(0, (4, 2)))
    _note(axes, words, y=height, below=True)


def _note(
    axes: Axes,
    words: str,
    x: float | None = None,
    y: float | None = None,
    *,
    below: bool = False,
    right: bool = False,
) -> None:
    """Words at a point, to the left of it if `right`; without `x` at the left edge."""
    axes.annotate(
        words,
        (0.01 if x is None else x, 0.02 if y is None else y),
        xycoords=("axes fraction" if x is None else "data", "data"),
        xytext=(-4 if right else 4, -3 if below else 3),
        textcoords="offset points",
        va="top" if below else "bottom",
        ha="right" if right else "left",
        fontsize=_TEXT,
        color=_INK,
    )


def _say(text: str, axes: Axes) -> None:
    """A sentence instead of what cannot be drawn."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=_INK, wrap=True)


def _legend(axes: Axes, loc: str = "best") -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc=loc, frameon=False, fontsize=_TEXT - 1, labelcolor=_INK)
