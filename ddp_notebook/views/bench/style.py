"""How the plots of benchmarks look: figures, colours, axes, units.

Figures are made without pyplot: nothing global changes, no window opens, nothing is left over.
They have a white background, so that they look the same on any page and in print.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ddp_notebook.bench.notes import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's palette for the colour-blind. Hatches and markers repeat what colours say, for
# print without colour.
BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
VERMILLION, ORANGE, PURPLE = "#D55E00", "#E69F00", "#CC79A7"
INK, QUIET, FAINT = "#333333", "#707070", "#D9D9D9"
_CYCLE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
_MARKERS = ("o", "s", "^", "D", "v", "P")
TEXT, LABEL = 8.5, 9.5
"""Font sizes in points: of text in a plot, and of the labels of its axes."""
_DPI = 100


def new_figure(title: str, width_in: float, height_in: float, size: float = 12) -> Figure:
    """A figure without axes; matplotlib is loaded when the first one is asked for."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(width_in, height_in), dpi=_DPI, layout=layout)
    figure.set_facecolor("white")
    figure.suptitle(title, fontsize=size, fontweight="bold", color=INK)
    return figure


def figure_bundle(draw: Callable[[], Figure], caption: str) -> dict[str, str]:
    """A figure as a notebook shows it; where only text can be shown, its caption."""
    buffer = io.BytesIO()
    try:
        draw().savefig(buffer, format="png")
    except ImportError as error:
        return {"text/plain": f"<figure: {caption}> (not drawn: {error})"}
    image = base64.b64encode(buffer.getvalue()).decode("ascii")
    return {"image/png": image, "text/plain": f"<figure: {caption}>"}


def dress(axes: Axes, title: str, x: str, y: str) -> None:
    """Title, names of the axes with their units, a quiet frame and grid."""
    axes.set_title(title, fontsize=10.5, color=INK)
    axes.set_xlabel(x, fontsize=LABEL, color=INK)
    axes.set_ylabel(y, fontsize=LABEL, color=INK)
    axes.tick_params(which="both", labelsize=TEXT, colors=INK)
    axes.grid(which="major", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)


def say(axes: Axes, text: str) -> None:
    """A sentence instead of a panel that cannot be drawn."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=INK)


def categories(axes: Axes, names: Sequence[str]) -> None:
    """One position on the x axis for each name; grid lines for the y axis only."""
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.grid(axis="x", visible=False)


def legend(axes: Axes, **options: object) -> None:
    """The legend, without a frame, if there is something to explain."""
    if axes.get_legend_handles_labels()[0]:
        chosen = {"loc": "best", "frameon": False, "fontsize": TEXT, "labelcolor": INK}
        axes.legend(**{**chosen, **options})


def log_times(axis: Axis, unit_us: float = 1) -> None:
    """Label a logarithmic axis of times, in units of `unit_us` microseconds, with units."""
    axis.set_major_formatter(lambda value, _position: duration(value * unit_us / 1e6))
    axis.set_minor_formatter(lambda *_: "")


def colour_of(number: int) -> str:
    """A colour for each of several lines."""
    return _CYCLE[number % len(_CYCLE)]


def marker_of(number: int) -> str:
    """A marker for each of several lines."""
    return _MARKERS[number % len(_MARKERS)]
