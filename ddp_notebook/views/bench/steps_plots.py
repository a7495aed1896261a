"""Where the time of a training step goes, as a figure of panels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ddp_notebook.bench.steps.results import StepBenchResult, StepPoint, name_bucket
from ddp_notebook.bench.steps.trust import PERFECT
from ddp_notebook.model import format_bytes
from ddp_notebook.views.bench.steps_text import html, ms, text, title
from ddp_notebook.views.bench.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    SKY,
    TEXT,
    VERMILLION,
    categories,
    colour_of,
    dress,
    figure_bundle,
    legend,
    log_times,
    marker_of,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panel = Callable[["Axes", StepBenchResult], None]

_WIDTH_IN, _ROW_IN = 9.6, 3.5
_COLUMNS = 2
_DARK_CELL = 0.45
"""Cells of the heat map that are darker than this have light text."""
_FLOAT_BYTES = 4
_MOST_DOTS = 200
_MOST_LINES = 6


def bundles(result: StepBenchResult) -> list[dict[str, Any]]:
    """The figure and the tables as a notebook shows them, each in all its forms."""
    return [
        figure_bundle(partial(step_figure, result), title(result)),
        {"text/plain": text(result), "text/html": html(result)},
    ]


def step_figure(result: StepBenchResult) -> Figure:
    """All panels for which something was measured, two in a row."""
    chosen = panels(result)
    rows = -(-len(chosen) // _COLUMNS) or 1
    figure = new_figure(_folded(title(result)), _WIDTH_IN, 0.4 + _ROW_IN * rows, size=11)
    for number, panel in enumerate(chosen):
        last = number == len(chosen) - 1
        place = (number + 1, rows * _COLUMNS) if last else number + 1  # the last fills its row
        panel(figure.add_subplot(rows, _COLUMNS, place), result)
    return figure


def _folded(heading: str) -> str:
    """The title on two lines: what, and where."""
    what, _, where = heading.partition(" of gradients, ")
    return f"{what} of gradients\n{where}" if where else heading


def panels(result: StepBenchResult) -> list[Panel]:
    """The panels for which there are numbers, in the order of explanation."""
    seen = any(point.arrivals for point in result.points)
    prediction = result.prediction
    return [
        panel
        for panel, there in (
            (draw_steps, bool(result.points)),
            (draw_efficiency, result.world_size > 1 and bool(result.points)),
            (draw_exposed_share, len(result.buckets) > 1),
            (draw_reduces, bool(result.reduces)),
            (draw_distribution, bool(result.points)),
            (draw_arrivals, seen),
            (draw_prediction, prediction is not None and bool(prediction.steps)),
        )
        if there
    ]


def draw_steps(axes: Axes, result: StepBenchResult) -> None:
    """The step at each batch size as stacked parts, with the overlapped communication beside it."""
    points = result.main_points
    below = [0.0] * len(points)
    for name, label, colour, hatch in (
        ("forward_us", "forward", SKY, ""),
        ("backward_us", "backward", BLUE, "//"),
        ("optimizer_us", "optimizer", GREEN, ".."),
        ("exposed_us", "exposed communication", VERMILLION, "xx"),
    ):
        heights = [max(0.0, getattr(point, name)) / 1e3 for point in points]
        axes.bar(
            range(len(points)),
            heights,
            0.6,
            below,
            label=label,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.5,
        )
        below = [a + b for a, b in zip(below, heights, strict=True)]
    _draw_overlapped(axes, result)
    for place, point in enumerate(points):
        axes.annotate(
            ms(point.step_us),
            (place, below[place]),
            textcoords="offset points",
            xytext=(0, 3),
            ha="center",
            fontsize=TEXT,
            color=INK,
        )
    heading = f"Where a step's time goes ({name_bucket(result.main_bucket)})"
    dress(axes, heading, "batch per rank", "ms")
    categories(axes, [f"{point.batch:,}" for point in points])
    axes.set_ylim(top=max(below, default=1) * 1.12 or 1)
    legend(axes, reverse=True, loc="upper left")


def _draw_overlapped(axes: Axes, result: StepBenchResult) -> None:
    """A bracket beside each bar: communication that the backward hides."""
    shown = False
    for place, point in enumerate(result.main_points):
        if not point.overlapped_us:
            continue
        # It runs during the backward and ends with it.
        top = (point.forward_us + point.backward_us) / 1e3
        low = max(point.forward_us / 1e3, top - point.overlapped_us / 1e3)
        axes.plot(
            [place + 0.37] * 2,
            [low, top],
            color=ORANGE,
            linewidth=4,
            solid_capstyle="butt",
            label="" if shown else "overlapped communication",
        )
        shown = True


def draw_efficiency(axes: Axes, result: StepBenchResult) -> None:
    """Efficiency relative to one rank, and the break-even batch size."""
    points = result.main_points
    batches = [point.batch for point in points]
    possible = [point for point in points if point.efficiency <= PERFECT]
    noise = [point for point in points if point.efficiency > PERFECT]
    axes.plot(
        [point.batch for point in possible],
        [100 * point.efficiency for point in possible],
        color=BLUE,
        marker="o",
        label=f"{result.world_size} ranks",
    )
    # Where it cannot be told it stands at the edge, as what it is: its height means nothing.
    for point in noise:
        axes.plot([point.batch], [100], color=INK, marker="x", linestyle="none", clip_on=False)
        axes.annotate(
            "noise",
            (point.batch, 100),
            textcoords="offset points",
            xytext=(0, -12),
            ha="center",
            fontsize=TEXT,
            color=INK,
        )
    least = 100 / result.world_size
    axes.axhline(least, color=VERMILLION, linestyle="--", linewidth=1.2)
    axes.annotate(
        "below: slower than one rank alone",
        (1, least),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        xytext=(0, -11),
        ha="right",
        fontsize=TEXT,
        color=VERMILLION,
    )
    if result.break_even:
        axes.axvline(result.break_even, color=GREEN, linestyle=":", linewidth=1.6)
        axes.annotate(
            f" break-even at batch {result.break_even:.0f}",
            (result.break_even, 0.93),
            xycoords=("data", "axes fraction"),
            fontsize=TEXT,
            color=INK,
        )
    dress(axes, "Samples per second against one rank alone", "batch per rank", "efficiency (%)")
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.set_ylim(0, 105)


def draw_exposed_share(axes: Axes, result: StepBenchResult) -> None:
    """The exposed part of a step over batch and bucket, as numbers on a heat map."""
    batches, buckets = result.batches, result.buckets
    shares = {(p.batch, p.bucket): 100 * p.exposed_share for p in result.points}
    table = [[shares.get((batch, bucket), float("nan")) for batch in batches] for bucket in buckets]
    top = max(5.0, *shares.values())
    axes.imshow(table, cmap="cividis_r", vmin=0, vmax=top, aspect="auto")
    for row, line in enumerate(table):
        for column, value in enumerate(line):
            axes.text(
                column,
                row,
                "" if value != value else f"{value:.0f} %",
                ha="center",
                va="center",
                fontsize=9.5,
                color="white" if value > _DARK_CELL * top else INK,
            )
    dress(axes, "Exposed communication, % of the step", "batch per rank", "bucket size (MiB)")
    axes.grid(visible=False)
    axes.set_xticks(range(len(batches)), [f"{batch:,}" for batch in batches])
    axes.set_yticks(range(len(buckets)), buckets)


def draw_reduces(axes: Axes, result: StepBenchResult) -> None:
    """Why buckets: the time to reduce all gradients against parameters per all_reduce."""
    sizes = [point.size_bytes / _FLOAT_BYTES for point in result.reduces]
    times = [point.total_us / 1e3 for point in result.reduces]
    axes.plot(sizes, times, color=BLUE, linewidth=1.4)
    for scaled, face, label in ((False, BLUE, "measured"), (True, "white", "from a part of them")):
        chosen = [
            (size, time)
            for size, time, point in zip(sizes, times, result.reduces, strict=True)
            if point.scaled is scaled
        ]
        if chosen:
            axes.plot(
                *zip(*chosen, strict=True),
                linestyle="none",
                marker="o",
                color=BLUE,
                markerfacecolor=face,
                label=label,
            )
    for number, size in enumerate(_bucket_sizes(result)):
        axes.axvline(
            size / _FLOAT_BYTES,
            color=ORANGE,
            linestyle=":",
            linewidth=1.6,
            label="" if number else "the model's buckets",
        )
    title = f"Why buckets: reducing all {format_bytes(result.gradient_bytes)}"
    dress(axes, title, "parameters per all_reduce", "total time (log)")
    axes.set_xscale("log")
    _log_ms(axes)
    legend(axes)


def _bucket_sizes(result: StepBenchResult) -> list[int]:
    """The distinct sizes of the buckets that DDP makes."""
    points = [p for p in result.main_points if p.arrivals]
    return sorted({arrival.size_bytes for arrival in points[0].arrivals}) if points else []


def draw_distribution(axes: Axes, result: StepBenchResult) -> None:
    """A dot for every timed step, with the median and the 10th and 90th percentiles."""
    points = result.main_points
    for place, point in enumerate(points):
        times = sorted(time / 1e3 for time in point.times_us)
        shown = times[:: -(-len(times) // _MOST_DOTS)]
        spread = [place + 0.36 * ((7 * i % 11) / 10 - 0.5) for i in range(len(shown))]
        axes.plot(
            spread,
            shown,
            linestyle="none",
            marker="o",
            markersize=3,
            color=BLUE,
            alpha=0.45,
            markeredgewidth=0,
            label="" if place else "one step",
        )
        axes.hlines(
            point.step_us / 1e3,
            place - 0.3,
            place + 0.3,
            color=VERMILLION,
            linewidth=2,
            label="" if place else "median",
        )
    _draw_skew(axes, points)
    dress(axes, "Every step, on its slowest rank", "batch per rank", "time (log)")
    _log_ms(axes)
    categories(axes, [f"{point.batch:,}" for point in points])
    legend(axes)


def _draw_skew(axes: Axes, points: tuple[StepPoint, ...]) -> None:
    """How far apart the ranks reached the last bucket of each step."""
    first = True
    for place, point in enumerate(points):
        skew = [max(time, 1.0) / 1e3 for time in point.skew_us][:_MOST_DOTS]
        if not skew:
            continue
        axes.plot(
            [place + 0.42] * len(skew),
            skew,
            linestyle="none",
            marker="_",
            markersize=7,
            color=GREEN,
            alpha=0.6,
            label="arrival, first to last rank" if first else "",
        )
        first = False


def draw_arrivals(axes: Axes, result: StepBenchResult) -> None:
    """How late each rank is at each bucket; a rank that the others wait for is highlighted."""
    points = [p for p in result.main_points if p.arrivals] or [
        p for p in result.points if p.arrivals
    ]
    point = points[len(points) // 2]
    late = result.straggler
    ranks = range(result.world_size)
    if len(ranks) > _MOST_LINES:
        last = point.arrivals[-1].late_us
        ranks = sorted(sorted(ranks, key=lambda rank: -last[rank])[:_MOST_LINES])  # type: ignore[assignment]
    for number, rank in enumerate(ranks):
        named = late is not None and late.rank == rank
        axes.plot(
            range(len(point.arrivals)),
            [arrival.late_us[rank] / 1e3 for arrival in point.arrivals],
            color=VERMILLION if named else colour_of(number if number != 1 else 4),
            marker="X" if named else marker_of(number),
            markersize=9 if named else 5,
            linewidth=2.2 if named else 1.3,
            label=f"rank {rank}{' (late)' if named else ''}",
        )
    title = f"Arrival of the buckets, batch {point.batch} ({name_bucket(point.bucket)})"
    dress(axes, title, "bucket, in the order they are ready", "ms after the first rank")
    axes.set_xticks(
        range(len(point.arrivals)),
        [f"{i}\n{format_bytes(arrival.size_bytes)}" for i, arrival in enumerate(point.arrivals)]
        if len(point.arrivals) <= _MOST_LINES
        else [str(i) for i in range(len(point.arrivals))],
    )
    axes.margins(x=0.15)
    axes.set_ylim(bottom=0)
    legend(axes)


def draw_prediction(axes: Axes, result: StepBenchResult) -> None:
    """The model against the measurements, and its prediction for another number of ranks."""
    prediction = result.prediction
    assert prediction is not None
    bucket = result.main_bucket
    checked = [point for point in prediction.checked if point.bucket == bucket]
    predicted = [point for point in prediction.steps if point.bucket == bucket]
    batches = [point.batch for point in checked]
    axes.plot(
        batches,
        [(point.measured_us or 0) / 1e3 for point in checked],
        linestyle="none",
        marker="o",
        markersize=7,
        color=BLUE,
        label=f"measured, {result.world_size} ranks",
    )
    axes.plot(
        batches,
        [point.step_us / 1e3 for point in checked],
        color=ORANGE,
        marker="s",
        markerfacecolor="white",
        label=f"model, {result.world_size} ranks",
    )
    axes.plot(
        [point.batch for point in predicted],
        [point.step_us / 1e3 for point in predicted],
        color=VERMILLION,
        marker="^",
        markerfacecolor="white",
        linestyle="--",
        label=f"model, {prediction.world_size} ranks: not measured",
    )
    worst = max(prediction.errors, default=0.0)
    dress(axes, "Predicted by a model", "batch per rank", "step (log)")
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    _log_ms(axes, (1, 2, 5))
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.annotate(
        f"off by at most {worst:.0%} where measured,\n"
        f"perhaps by {prediction.within:.0%} at {prediction.world_size} ranks",
        (0.98, 0.03),
        xycoords="axes fraction",
        ha="right",
        fontsize=TEXT,
        color=INK,
    )
    legend(axes)


def _log_ms(axes: Axes, subs: tuple[int, ...] = (1,)) -> None:
    """A logarithmic axis of times in ms, with labels at these parts of a decade."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    log_times(axes.yaxis, unit_us=1000)
