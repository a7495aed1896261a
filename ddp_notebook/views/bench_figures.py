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
from ddp_notebook.bench.result import BenchPoint, BenchRun, Curve, Fit, duration
from ddp_notebook.bench.steps import PERFECT, StepBenchResult
from ddp_notebook.model import format_bytes
from ddp_notebook.views.bench import name_bucket, steps_title
from ddp_notebook.views.bench import title as title_of

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
_THIN: dict[str, Any] = {"color": _QUIET, "lw": 0.9, "ls": (0, (4, 2))}
_LOOK: dict[str, Any] = (
    {"font.size": 10, "axes.titlesize": 11, "legend.fontsize": 9, "grid.alpha": 0.25}
    | {"axes.facecolor": "none", "svg.fonttype": "none", "axes.grid": True, "axes.axisbelow": True}
    | dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), _INK)
    | dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), _QUIET)
    | dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False)
    | {"text.parse_math": False}  # a name may have dollar signs
)
"""Quiet frames and grids. A text of 10 points has about 10 pixels in a column of 365 pixels."""
_LEAST_US = 1e-3
"""A nanosecond: a log axis cannot show the time 0 of a clock that is too coarse."""
_HOVER = "hover: "
"""Begins the id of what tells something where the pointer rests on it."""


def on_page(panels: Sequence[Panel], about: str, plain: str) -> str:
    """Return the panels as HTML, side by side where there is room. Raises ImportError.

    Where a page is not trusted and its drawings are removed, `plain` text is seen instead.
    """
    style = "flex: 1 1 320px; min-width: 0; max-width: 620px"
    drawn = ""
    for panel in panels:
        svg = re.sub(r' height="[\d.]+pt"', "", _svg(_figure([panel])), count=1)
        svg = re.sub(r' width="[\d.]+pt"', ' width="100%"', svg, count=1)
        # The page's own colour for words, which is right in dark as well.
        drawn += f'<div style="{style}">{svg.replace(_INK, "currentColor")}</div>'
    # With the drawings a sanitizer removes this style sheet, which hides the plain text. It keeps
    # the words of the drawings, but outside of them letters have no size.
    return (
        f"<style>.ddp-plain {{display: none}}</style>"
        f'<pre class="ddp-plain">{escape(plain)}</pre><div role="img" aria-label="{escape(about)}" '
        f'style="display: flex; flex-wrap: wrap; gap: 8px; font-size: 0px">{drawn}</div>'
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
    with rc_context(_LOOK):
        figure.savefig(buffer, format="svg")
    drawn = "<svg" + buffer.getvalue().partition("<svg")[2]
    # Its style sheet would be one for everything on the page.
    for part in ("<metadata>.*?</metadata>", "<style.*?</style>", "<!--.*?-->"):
        drawn = re.sub(part, "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"\s*\n\s*", " ", drawn)
    drawn = drawn.replace("<svg", '<svg stroke-linejoin="round"', 1)
    drawn = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", drawn)
    drawn = re.sub(f'<g id="{_HOVER}([^"]*)">', r"<g><title>\1</title>", drawn)
    # The ids of what nothing refers to would be there again in the next figure.
    used = set(re.findall(r'#([^")]+)', drawn))
    return re.sub(r' id="([^"]*)"', lambda found: found[0] * (found[1] in used), drawn)


def _figure(panels: Sequence[Panel], heading: str = "") -> Figure:
    """Return the panels as one figure; matplotlib is loaded when the first one is asked for."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
    back = "white" if heading else "none"
    with rc_context(_LOOK):
        figure = Figure(figsize=(5.0 * columns, 3.9 * rows), layout=layout, facecolor=back)
        figure.suptitle(heading, fontsize=11, fontweight="bold")
        for number, panel in enumerate(panels, 1):
            panel(figure.add_subplot(rows, columns, number))
    return figure


# -- collectives against size ------------------------------------------------------------


def against_size(run: BenchRun, baseline: BenchRun | None = None) -> Figure:
    """Draw time on the left, bus bandwidth on the right, a row for each operation."""
    return _figure(size_panels(run, baseline), title_of(run))


def size_panels(run: BenchRun, baseline: BenchRun | None = None) -> list[Panel]:
    """Return two panels for each operation: time, and bus bandwidth; a baseline is in grey."""
    by_op: dict[str, list[Curve]] = {}
    for curve in run.curves:
        if curve.points and curve.operation.sized:
            by_op.setdefault(curve.op, []).append(curve)
    panels: list[Panel] = []
    for curves in by_op.values():
        keys = [curve.key for curve in curves]
        before = [c for c in baseline.curves if c.key in keys] if baseline is not None else []
        old = f"baseline, {baseline.backend} on {baseline.device}" if baseline is not None else ""
        new = f"this run, {run.backend} on {run.device}" if before else ""
        named = [(_label(curve) if len(curves) > 1 else new, curve) for curve in curves]
        named += [(old, curve) for curve in before]
        panels += [partial(_times, run, named, curves), partial(_rates, run, named, curves)]
    return panels or [partial(_say, run.notes[0] if run.notes else "nothing was measured")]


Named: TypeAlias = "Sequence[tuple[str, Curve]]"
"""Curves of one operation, and what they are called in a panel; those of a baseline are last."""
Reading: TypeAlias = tuple[float, float, float]
"""A value between the ends of its interval."""


def _label(curve: Curve) -> str:
    """Return what distinguishes a curve from others of its operation, with its two numbers."""
    name, fit = curve.name.removeprefix(f"{curve.op} of "), curve.fit
    if fit is None:
        return name
    return f"{name}: {duration(fit.latency_s)}, {fit.bandwidth_bytes_per_s / 1e9:.3g} GB/s"


def _times(run: BenchRun, named: Named, curves: Sequence[Curve], axes: Axes) -> None:
    """Draw the time of every size on two log axes, with the two lines that it approaches."""
    axes.set(title=f"{curves[0].op}: time on the slowest rank", xlabel="tensor size")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _position: duration(value / 1e6))
    axes.yaxis.set_minor_formatter(lambda *_: "")
    axes.set_ylim(_time_range(run.all_points))
    _draw(axes, run, named, _time)
    for curve in curves:
        _asymptotes(axes, curve, named=len(curves) == 1)
    if len(curves) == 1 and curves[0].op == "all_reduce":
        _mark_buckets(axes, run.bucket_bytes, curves[0].fit)
    for barrier in [curve for curve in run.curves if not curve.operation.sized][-1:]:
        time_us = barrier.points[0].latency_us
        label = f"{barrier.name}: {duration(time_us / 1e6)}"
        axes.axhline(time_us, color=_QUIET, lw=1.4, ls=":", label=label)
    _legend(axes, "upper left")


def _asymptotes(axes: Axes, curve: Curve, *, named: bool) -> None:
    """Draw what small sizes approach, the latency, and what large ones do, size / bandwidth."""
    if (fit := curve.fit) is None:
        return
    rate, last = fit.bandwidth_bytes_per_s, fit.to_bytes
    # From where the line enters the panel: a log axis has no 0 to begin at.
    first = max(fit.from_bytes, axes.get_ylim()[0] * rate / 1e6)
    floor = max(fit.latency_s * 1e6, _LEAST_US)
    axes.plot([fit.from_bytes, last], [floor] * 2, **_THIN)
    axes.plot([first, last], [first / rate * 1e6, last / rate * 1e6], **_THIN)
    if named:
        _note(axes, f"latency {duration(fit.latency_s)}", last, floor, below=True, left=True)
        middle = math.sqrt(first * last)
        _note(axes, f"size / {rate / 1e9:.3g} GB/s", middle, middle / rate * 1e6, below=True)


def _mark_buckets(axes: Axes, sizes: Sequence[int], fit: Fit | None) -> None:
    """Mark the buckets of the user's models where the fit predicts them; the largest is named."""
    if fit is None:
        return
    inside = [size for size in sizes if fit.from_bytes <= size <= fit.to_bytes]
    for size in inside:
        time_us = fit.predict(size) * 1e6
        words = f"your {format_bytes(size)} bucket: {duration(time_us / 1e6)}"
        axes.plot(size, time_us, "D", mfc="none", mec=_COLOURS[3], mew=1.8, ms=8)
        _hover(axes, size, time_us, f"{words}, by latency and bandwidth")
        if size == inside[-1]:
            _note(axes, f"{words} ", size, time_us, left=True)


def _rates(run: BenchRun, named: Named, curves: Sequence[Curve], axes: Axes) -> None:
    """Draw the bus bandwidth of every size, below what the same run says is possible."""
    title = f"{curves[0].op}: bus bandwidth"
    axes.set(title=title, xlabel="tensor size", ylabel="GB/s that each rank sends")
    _draw(axes, run, named, _rate)
    reached = max(p.busbw_gb_per_s for p in run.all_points)
    # A line far above would flatten the curve: it is only told. What links can carry is always one.
    ceilings = [(run.copy_gb_per_s, 4 * reached, "each rank copies memory at")]
    ceilings += [(run.limit_gb_per_s, math.inf, "a GPU sends at most")]
    if len(curves) == 1 and (fit := curves[0].fit) is not None:
        factor = curves[0].operation.bus_factor(curves[0].world_size)
        rate = fit.bandwidth_bytes_per_s / 1e9 * factor
        ceilings += [(rate, 4 * reached, "large tensors approach")]
    tops = [top for top, most, _ in ceilings if top <= most]
    axes.set_ylim(0, 1.15 * max(reached, *tops, 0.0) or 1)
    for top, most, words in ceilings:
        if top > most:
            _note(axes, f"↑ {words} {top:.3g} GB/s", y=axes.get_ylim()[1], below=True)
        elif top:
            axes.axhline(top, **_THIN)
            _note(axes, f"{words} {top:.3g} GB/s", y=top, below=True)
    if all(curve.world_size == 1 for curve in curves):
        _say("one rank sends nothing", axes)
    _legend(axes, "center left")


def _time(point: BenchPoint) -> Reading:
    low, high = point.latency_interval_us
    return max(low, _LEAST_US), max(point.latency_us, _LEAST_US), max(high, _LEAST_US)


def _rate(point: BenchPoint) -> Reading:
    """The bandwidth, and its interval: that of the time, the other way round."""
    (low, high), bus = point.latency_interval_us, point.busbw_gb_per_s
    sent = bus * point.latency_us
    return (sent / high if high else bus), bus, (sent / low if low else bus)


def _draw(axes: Axes, run: BenchRun, named: Named, read: Callable[[BenchPoint], Reading]) -> None:
    """Draw curves against a log axis of all sizes, with a cross over every one that was wrong."""
    sizes = sorted({p.size_bytes for p in run.all_points if p.size_bytes})
    every = -(-len(sizes) // 6)  # more names would overlap
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes[::every], [format_bytes(size) for size in sizes[::every]])
    axes.set_xticks(sizes, [""] * len(sizes), minor=True)
    axes.set_xlim(sizes[0] / 1.5, sizes[-1] * 1.5)
    for number, (label, curve) in enumerate(named):
        old = label.startswith("baseline")
        colour = _QUIET if old else _COLOURS[number % len(_COLOURS)]
        look: dict[str, Any] = {"color": colour, "mfc": "none" if old else colour}
        look |= {"marker": _MARKERS[number % len(_MARKERS)], "label": label or None}
        words = []
        for p in curve.points:
            low, middle, high = (duration(us / 1e6) for us in _time(p))
            at = f"{format_bytes(p.size_bytes)}: {middle} (95 %: {low} to {high})"
            words.append(f"{at}, {p.busbw_gb_per_s:.3g} GB/s" + (f" ({label})" if label else ""))
        xs = [p.size_bytes for p in curve.points]
        _series(axes, xs, [read(p) for p in curve.points], words, **look)
        wrong = [(p.size_bytes, read(p)[1]) for p in curve.points if p.wrong]
        if wrong:
            at_y = zip(*wrong, strict=True)
            axes.plot(*at_y, "X", color=_VERMILLION, ms=10, label="wrong results")


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
    axes.set(title="Exposed communication", xlabel="batch per rank", ylabel="% of a step (95 %)")
    buckets, batches = result.buckets, result.batches
    wide = 0.8 / max(len(buckets), 1)
    for number, bucket in enumerate(buckets):
        points = [point for point in result.points if point.bucket == bucket]
        colour = _COLOURS[number % len(_COLOURS)]
        left = wide * (number - (len(buckets) - 1) / 2)
        xs = [batches.index(point.batch) + left for point in points]
        shares = [100 * point.exposed_share for point in points]
        ends = [[100 * end for end in point.share_interval] for point in points]
        axes.bar(
            xs,
            shares,
            0.9 * wide,
            color=["none" if point.unsure else colour for point in points],
            edgecolor=colour,
            hatch=["////" if point.unsure else "" for point in points],
            label=name_bucket(bucket) if len(buckets) > 1 else None,
        )
        readings = [(low, share, high) for share, (low, high) in zip(shares, ends, strict=True)]
        _whiskers(axes, xs, readings, _INK)
        for x, point, (low, share, high) in zip(xs, points, readings, strict=True):
            what = f"batch {point.batch:,}, step of {duration(point.step_us / 1e6)}"
            _hover(axes, x, share, f"{what}: {share:.0f} % (95 %: {low:.0f} to {high:.0f} %)")
    axes.set_xticks(range(len(batches)), [f"{batch:,}" for batch in batches])
    axes.set_ylim(0, min(1.1 * max([5, *(100 * p.share_interval[1] for p in result.points)]), 105))
    if any(point.unsure for point in result.points):
        _note(
            axes,
            "hatched: within the noise",
            y=axes.get_ylim()[1],
            below=True,
        )
    if result.world_size == 1 or not result.points:
        _say("one rank sends nothing" if result.points else "nothing was measured", axes)
    _legend(axes)


def _scaling(result: StepBenchResult, axes: Axes) -> None:
    """Draw the samples per second of all ranks, of one rank alone, and of as many times that."""
    from matplotlib.ticker import LogLocator

    axes.set(
        title="Throughput, and efficiency", xlabel="batch per rank", ylabel="samples per second"
    )
    main, ranks = result.main_points, result.world_size
    if not main:
        _say("nothing was measured", axes)
        return
    batches = [point.batch for point in main]
    readings = []
    for point in main:
        low, middle, high = median_interval([point.times_us or (point.step_us,)])
        rate = point.samples_per_s
        readings.append((rate * middle / high, rate, rate * middle / low))
    words = [f"batch {p.batch:,}: {p.samples_per_s:,.0f} samples per second" for p in main]
    look = {"color": _COLOURS[0], "marker": "o", "label": f"{ranks} ranks"}
    _series(axes, batches, readings, words, **look)
    if ranks > 1:
        alone = [point.batch / point.alone_us * 1e6 for point in main]
        axes.plot(batches, alone, color=_VERMILLION, marker="s", ms=5, label="one rank alone")
        ideal = [ranks * rate for rate in alone]
        axes.plot(batches, ideal, "--", color=_QUIET, lw=1, label=f"{ranks} times that: ideal")
        for point in main:
            # An efficiency that cannot be says that the step of the single rank was disturbed.
            share = f"{point.efficiency:.0%}" if point.efficiency <= PERFECT else "noise"
            _note(axes, share, point.batch, point.samples_per_s, below=True)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.minorticks_off()
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.yaxis.set_major_formatter(lambda value, _position: f"{value:,.0f}")
    axes.margins(x=0.12, y=0.12)
    _legend(axes)


# -- what both share ---------------------------------------------------------------------


def _series(
    axes: Axes, xs: Sequence[float], readings: Sequence[Reading], words: Sequence[str], **look: Any
) -> None:
    """Draw markers that tell `words`; a line joins neighbours unless their intervals overlap.

    Where they do, nothing is known about which is higher, and a line would say that it is.
    """
    _whiskers(axes, xs, readings, look["color"])
    axes.plot(xs, [middle for _, middle, _ in readings], ls="none", ms=5, **look)
    points = list(zip(xs, readings, strict=True))
    for (x, (low, y, high)), (next_x, (least, next_y, most)) in pairwise(points):
        if high < least or most < low:
            axes.plot([x, next_x], [y, next_y], color=look["color"], lw=1.2)
    for (x, (_, y, _)), text in zip(points, words, strict=True):
        _hover(axes, x, y, text)


def _whiskers(axes: Axes, xs: Sequence[float], readings: Sequence[Reading], colour: str) -> None:
    heights = [middle for _, middle, _ in readings]
    below = [max(middle - low, 0.0) for low, middle, _ in readings]
    above = [max(high - middle, 0.0) for _, middle, high in readings]
    axes.errorbar(xs, heights, yerr=[below, above], fmt="none", ecolor=colour, lw=1.2, capsize=2)


def _hover(axes: Axes, x: float, y: float, words: str) -> None:
    """Tell `words` where the pointer rests near a point, by something large that is not seen."""
    axes.plot([x], [y], "o", ms=16, mew=0, alpha=0, zorder=9, gid=f"{_HOVER}{words}")


def _note(
    axes: Axes,
    words: str,
    x: float | None = None,
    y: float = 0.0,
    *,
    below: bool = False,
    left: bool = False,
) -> None:
    """Words beside a point; without `x` at the left edge."""
    axes.annotate(
        words,
        (0.01 if x is None else x, y),
        xycoords=("axes fraction" if x is None else "data", "data"),
        xytext=(-4 if left else 4, -3 if below else 3),
        textcoords="offset points",
        va="top" if below else "bottom",
        ha="right" if left else "left",
    )


def _say(text: str, axes: Axes) -> None:
    """A sentence instead of what cannot be drawn."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", wrap=True)


def _legend(axes: Axes, loc: str = "best") -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc=loc)
