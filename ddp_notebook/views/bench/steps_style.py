"""How the plots of training steps look: colours, axes, units. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette: told apart in all common kinds of colour blindness. Hatches and
# markers say the same again, for print without colour.
BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
VERMILLION, ORANGE, PURPLE = "#D55E00", "#E69F00", "#CC79A7"
INK, FAINT = "#333333", "#D9D9D9"
CYCLE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P")
TEXT = 8.5


def dress(axes: Axes, title: str, x: str, y: str) -> None:
    """Title, names of the axes with their units, a quiet frame and grid."""
    axes.set_title(title, fontsize=10.5, color=INK)
    axes.set_xlabel(x, fontsize=9.5, color=INK)
    axes.set_ylabel(y, fontsize=9.5, color=INK)
    axes.tick_params(which="both", labelsize=TEXT, colors=INK)
    axes.grid(which="major", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)


def categories(axes: Axes, names: Sequence[str]) -> None:
    """One place on the x axis for each name; the grid is of the y axis alone."""
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.grid(axis="x", visible=False)


def legend(axes: Axes, **options: object) -> None:
    """The legend, without a frame, where there is something to explain."""
    if axes.get_legend_handles_labels()[0]:
        chosen = {"loc": "best", "frameon": False, "fontsize": TEXT, "labelcolor": INK}
        axes.legend(**{**chosen, **options})


def log_time(axes: Axes, subs: Sequence[int] = (1,)) -> None:
    """A logarithmic axis of times in ms, written with their unit at these parts of a decade."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(_format_ms)
    axes.yaxis.set_minor_formatter(_format_nothing)


def _format_ms(value: float, _position: float) -> str:
    """A time in ms as a log axis says it: ``50 µs``, ``10 ms``, ``2 s``."""
    if value >= 1000:
        return f"{value / 1000:g} s"
    return f"{value:g} ms" if value >= 1 else f"{value * 1000:g} µs"


def _format_nothing(_value: float, _position: float) -> str:
    """No label."""
    return ""


def colour(number: int) -> str:
    """A colour for each of several lines."""
    return CYCLE[number % len(CYCLE)]


def marker(number: int) -> str:
    """A marker for each of several lines."""
    return MARKERS[number % len(MARKERS)]
