"""More panels on the time of a DDP step: buckets, single steps, arrivals, and the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_notebook.bench.steps.results import StepBenchResult, StepPoint, name_bucket
from ddp_notebook.model import format_bytes
from ddp_notebook.views.bench.steps_style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    TEXT,
    VERMILLION,
    categories,
    colour,
    dress,
    legend,
    log_time,
    marker,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FLOAT_BYTES = 4
_MOST_DOTS = 200
_MOST_LINES = 6


def draw_reduces(axes: Axes, result: StepBenchResult) -> None:
    """Why buckets: the time to reduce all gradients against parameters per all_reduce."""
    sizes = [each.size_bytes / _FLOAT_BYTES for each in result.reduces]
    times = [each.total_us / 1e3 for each in result.reduces]
    axes.plot(sizes, times, color=BLUE, linewidth=1.4)
    for scaled, face, label in ((False, BLUE, "measured"), (True, "white", "from a part of them")):
        chosen = [
            (size, time)
            for size, time, each in zip(sizes, times, result.reduces, strict=True)
            if each.scaled is scaled
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
    log_time(axes)
    legend(axes)


def _bucket_sizes(result: StepBenchResult) -> list[int]:
    """The sizes of the buckets that DDP makes, each once."""
    points = [p for p in result.main_points if p.arrivals]
    return sorted({each.size_bytes for each in points[0].arrivals}) if points else []


def draw_distribution(axes: Axes, result: StepBenchResult) -> None:
    """Every timed step: a dot each, with the median and the tenth and ninetieth of a hundred."""
    points = result.main_points
    for place, point in enumerate(points):
        times = sorted(each / 1e3 for each in point.times_us)
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
    log_time(axes)
    categories(axes, [f"{point.batch:,}" for point in points])
    legend(axes)


def _draw_skew(axes: Axes, points: tuple[StepPoint, ...]) -> None:
    """Beside the steps, how far apart the ranks came to the last bucket in each."""
    first = True
    for place, point in enumerate(points):
        skew = [max(each, 1.0) / 1e3 for each in point.skew_us][:_MOST_DOTS]
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
    """How late each rank comes to each bucket; a rank that the others wait for stands out."""
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
            [each.late_us[rank] / 1e3 for each in point.arrivals],
            color=VERMILLION if named else colour(number if number != 1 else 4),
            marker="X" if named else marker(number),
            markersize=9 if named else 5,
            linewidth=2.2 if named else 1.3,
            label=f"rank {rank}{' (late)' if named else ''}",
        )
    title = f"Arrival of the buckets, batch {point.batch} ({name_bucket(point.bucket)})"
    dress(axes, title, "bucket, in the order they are ready", "ms after the first rank")
    axes.set_xticks(
        range(len(point.arrivals)),
        [f"{i}\n{format_bytes(each.size_bytes)}" for i, each in enumerate(point.arrivals)]
        if len(point.arrivals) <= _MOST_LINES
        else [str(i) for i in range(len(point.arrivals))],
    )
    axes.margins(x=0.15)
    axes.set_ylim(bottom=0)
    legend(axes)


def draw_prediction(axes: Axes, result: StepBenchResult) -> None:
    """The model against what was measured, and what it says of other ranks."""
    prediction = result.prediction
    assert prediction is not None
    bucket = result.main_bucket
    checked = [each for each in prediction.checked if each.bucket == bucket]
    there = [each for each in prediction.steps if each.bucket == bucket]
    batches = [each.batch for each in checked]
    axes.plot(
        batches,
        [(each.measured_us or 0) / 1e3 for each in checked],
        linestyle="none",
        marker="o",
        markersize=7,
        color=BLUE,
        label=f"measured, {result.world_size} ranks",
    )
    axes.plot(
        batches,
        [each.step_us / 1e3 for each in checked],
        color=ORANGE,
        marker="s",
        markerfacecolor="white",
        label=f"model, {result.world_size} ranks",
    )
    axes.plot(
        [each.batch for each in there],
        [each.step_us / 1e3 for each in there],
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
    log_time(axes, (1, 2, 5))
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
