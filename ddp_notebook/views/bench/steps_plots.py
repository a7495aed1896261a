"""Where the time of a DDP step goes, as a figure of panels. They draw and decide nothing.

The figure is made without pyplot: nothing global changes, no window opens. Its ground is white in
dark notebooks too, and in print.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ddp_notebook.bench.steps.results import StepBenchResult, name_bucket
from ddp_notebook.views.bench import steps_panels
from ddp_notebook.views.bench.steps_style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    SKY,
    TEXT,
    VERMILLION,
    categories,
    dress,
    legend,
)
from ddp_notebook.views.bench.steps_text import ms, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panel = Callable[["Axes", StepBenchResult], None]

_WIDTH_IN, _ROW_IN = 9.6, 3.5
_DPI = 100
_COLUMNS = 2
_DARK_CELL = 0.45
"""Of the darkest cell of the heat map on, text is light."""


def step_figure(result: StepBenchResult) -> Figure:
    """All panels for which something was measured, two in a row."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    chosen = panels(result)
    rows = -(-len(chosen) // _COLUMNS) or 1
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(_WIDTH_IN, 0.4 + _ROW_IN * rows), dpi=_DPI, layout=layout)
    figure.set_facecolor("white")
    figure.suptitle(_folded(title(result)), fontsize=11, fontweight="bold", color=INK)
    for number, panel in enumerate(chosen):
        last = number == len(chosen) - 1
        place = (number + 1, rows * _COLUMNS) if last else number + 1  # the last fills its row
        panel(figure.add_subplot(rows, _COLUMNS, place), result)
    return figure


def _folded(text: str) -> str:
    """The title on two lines: what, and where."""
    what, _, where = text.partition(" of gradients, ")
    return f"{what} of gradients\n{where}" if where else text


def panels(result: StepBenchResult) -> list[Panel]:
    """The panels for which there are numbers, in the order in which they teach."""
    seen = any(point.arrivals for point in result.points)
    prediction = result.prediction
    return [
        panel
        for panel, there in (
            (draw_steps, bool(result.points)),
            (draw_efficiency, result.world_size > 1 and bool(result.points)),
            (draw_exposed_share, len(result.buckets) > 1),
            (steps_panels.draw_reduces, bool(result.reduces)),
            (steps_panels.draw_distribution, bool(result.points)),
            (steps_panels.draw_arrivals, seen),
            (steps_panels.draw_prediction, prediction is not None and bool(prediction.steps)),
        )
        if there
    ]


def draw_steps(axes: Axes, result: StepBenchResult) -> None:
    """The step at each batch, stacked of its parts, with what overlaps beside it."""
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
    dress(
        axes,
        f"Where a step's time goes ({name_bucket(result.main_bucket)})",
        "batch per rank",
        "ms",
    )
    categories(axes, [f"{point.batch:,}" for point in points])
    axes.set_ylim(top=max(below, default=1) * 1.12 or 1)
    legend(axes, reverse=True, loc="upper left")


def _draw_overlapped(axes: Axes, result: StepBenchResult) -> None:
    """A bracket beside each bar: communication that the backward hides."""
    shown = False
    for place, point in enumerate(result.main_points):
        if not point.overlapped_us:
            continue
        # It runs while the backward does, and ends with it.
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
    """Efficiency against one rank alone, and where all ranks together begin to pay."""
    points = result.main_points
    batches = [point.batch for point in points]
    axes.plot(
        batches,
        [100 * point.efficiency for point in points],
        color=BLUE,
        marker="o",
        label=f"{result.world_size} ranks",
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
    axes.set_ylim(0, max(105.0, *(105 * point.efficiency for point in points)))


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
