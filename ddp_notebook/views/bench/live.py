"""A benchmark while it runs: a progress bar, and the points so far.

Drawn as SVG without matplotlib, which would take a core for a fifth of a second while the ranks
are measured. Lines and text have the page's own colour, so that they are readable on light and dark
pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ddp_notebook.bench.notes import duration
from ddp_notebook.bench.results import BenchPoint, BenchRun
from ddp_notebook.bench.steps.results import StepBenchResult, StepPoint
from ddp_notebook.model import format_bytes
from ddp_notebook.views.bench.steps_text import ms
from ddp_notebook.views.bench.table import title

_COLOURS = ("#2E8FCF", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's palette for the colour-blind, with a lighter blue for dark pages."""
_WIDTH, _HEIGHT = 640, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 30, 12, 34
_BAR = 30

_PARTS = (
    ("forward_us", "forward", "#56B4E9"),
    ("backward_us", "backward", "#2E8FCF"),
    ("optimizer_us", "optimizer", "#009E73"),
    ("exposed_us", "exposed communication", "#D55E00"),
)
"""The parts of a training step, from the bottom of a bar."""
_STEPS_LEFT, _STEPS_RIGHT, _STEPS_TOP, _STEPS_BOTTOM = 12, 200, 22, 48
_MOST_BARS = 16
_BAR_SHARE = 0.66
"""The width of a bar, as a share of its slot."""


def live_steps(
    what: str, result: StepBenchResult | None, done: float, elapsed_s: float
) -> dict[str, str]:
    """A benchmark of training steps of the model `what` so far. `done` is 0 to 1."""
    left_s = elapsed_s * (1 - done) / done if done else None
    points = result.points if result is not None else ()
    plot = _bars(points[-_MOST_BARS:]) if points else ""
    about = f"training steps of {what}"
    if not done:
        about += (
            f": each rank makes the model and tries every batch size, for {elapsed_s:.0f} s so far"
        )
    return _bundle(about, done, left_s, plot)


def live_bundle(run: BenchRun | None, done: float, left_s: float | None) -> dict[str, str]:
    """A benchmark of collectives so far. `done` is 0 to 1, `left_s` None if not known."""
    what = title(run) if run is not None else "the benchmark begins"
    plot = _lines(run) if run is not None and any(c.points for c in run.curves) else ""
    return _bundle(what, done, left_s, plot)


def _bundle(what: str, done: float, left_s: float | None, plot: str) -> dict[str, str]:
    """A progress bar, and below it `plot`, which is SVG or empty."""
    filled = round(_BAR * done)
    left = f", about {left_s:.0f} s left" if left_s is not None else ""
    bar = f"[{'█' * filled}{'·' * (_BAR - filled)}] {done:.0%}{left}"
    hint = "Interrupt the cell to stop, or press Cancel on the board: what is measured is kept."
    return {
        "text/plain": f"{what} {bar}",
        "text/html": (
            f"<div><div><b>{escape(what)}</b></div>"
            f'<progress max="1" value="{done:.3f}" style="width: 300px"></progress> '
            f"{done:.0%}{escape(left)}<div><small>{hint}</small></div>{plot}</div>"
        ),
    }


def _lines(run: BenchRun) -> str:
    """Time against size, both logarithmic."""
    points = [p for c in run.curves for p in c.points if p.size_bytes and p.latency_us > 0]
    if not points:
        return ""
    x = _Axis([p.size_bytes for p in points], 2.0, _LEFT, _WIDTH - _RIGHT)
    y = _Axis([p.latency_us for p in points], 10.0, _HEIGHT - _BOTTOM, _TOP)
    parts = [_grid(x, y)]
    for number, curve in enumerate(run.curves):
        colour = _COLOURS[number % len(_COLOURS)]
        shown = [p for p in curve.points if p.size_bytes and p.latency_us > 0]
        places = [(x.at(p.size_bytes), y.at(p.latency_us)) for p in shown]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" opacity="0.7"/>')
        parts += [_dot(p, a, b, y, colour) for p, (a, b) in zip(shown, places, strict=True)]
        if len(run.curves) > 1:
            parts.append(
                f'<text x="{_LEFT + 8}" y="{_TOP + 14 * (number + 1)}" fill="{colour}" '
                f'font-size="11">{escape(curve.name)}</text>'
            )
    return _svg(parts, "time against size")


def _dot(point: BenchPoint, x: float, y: float, axis: _Axis, colour: str) -> str:
    """A point with its interval."""
    low, high = (axis.at(end) for end in point.latency_interval_us)
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'
    )


class _Axis:
    """A logarithmic axis from pixel `start` to pixel `end`."""

    def __init__(self, values: list[float] | list[int], base: float, start: int, end: int) -> None:
        logs = [math.log(v, base) for v in values]
        self.first, self.last = math.floor(min(logs)), math.ceil(max(logs))
        if self.first == self.last:
            self.last += 1
        self._base, self._start, self._end = base, start, end

    def at(self, value: float) -> float:
        """The pixel of a value, limited to the ends of the axis."""
        place = math.log(max(value, 1e-9), self._base) - self.first
        share = min(max(place / (self.last - self.first), 0.0), 1.0)
        return self._start + (self._end - self._start) * share

    def ticks(self, most: int) -> list[float]:
        """Powers of the base, at most `most` of them."""
        every = -(-(self.last - self.first + 1) // most)
        return [self._base**n for n in range(self.first, self.last + 1, every)]


def _grid(x: _Axis, y: _Axis) -> str:
    """Axes with their labels, in the page's colour."""
    line = 'stroke="currentColor" stroke-opacity="0.2"'
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for size in x.ticks(8):
        at = round(x.at(size))
        parts.append(f'<line x1="{at}" x2="{at}" y1="{_TOP}" y2="{bottom}" {line}/>')
        parts.append(_text(at, bottom + 14, "middle", format_bytes(int(size))))
    for time_us in y.ticks(6):
        at = round(y.at(time_us))
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}" {line}/>')
        parts.append(_text(_LEFT - 6, at + 4, "end", duration(time_us / 1e6)))
    about = "tensor size; time of the slowest rank"
    return "".join([*parts, _text((_LEFT + right) // 2, _HEIGHT - 4, "middle", about)])


# -- training steps ------------------------------------------------------------------------


def _bars(points: Sequence[StepPoint]) -> str:
    """A bar for each batch and bucket size, stacked of the step's parts."""
    top_us = max(sum(max(0.0, getattr(p, name)) for name, *_ in _PARTS) for p in points) or 1.0
    scale = (_HEIGHT - _STEPS_TOP - _STEPS_BOTTOM) / top_us
    room = (_WIDTH - _STEPS_LEFT - _STEPS_RIGHT) / len(points)
    several = len({point.bucket for point in points}) > 1
    parts = []
    for number, point in enumerate(points):
        x = _STEPS_LEFT + room * (number + 0.5)
        parts += _bar(point, x, room * _BAR_SHARE, scale)
        parts.append(_text(x, _HEIGHT - _STEPS_BOTTOM + 14, "middle", f"{point.batch:,}"))
        if several:
            parts.append(_text(x, _HEIGHT - _STEPS_BOTTOM + 27, "middle", point.bucket))
    for number, (_, label, colour) in enumerate(reversed(_PARTS)):
        x, y = _WIDTH - _STEPS_RIGHT + 14, _STEPS_TOP + 18 * number
        parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(x + 17, y + 10, "start", label))
    about = "batch per rank" + (", bucket size (MiB)" if several else "") + "; step in ms"
    parts.append(_text(_STEPS_LEFT, _HEIGHT - 6, "start", about))
    return _svg(parts, "where a step's time goes")


def _bar(point: StepPoint, x: float, width: float, scale: float) -> list[str]:
    """The stacked parts of one step, and its time above them."""
    drawn, y = [], float(_HEIGHT - _STEPS_BOTTOM)
    for name, _, colour in _PARTS:
        height = max(0.0, getattr(point, name)) * scale
        y -= height
        drawn.append(
            f'<rect x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" fill="{colour}"/>'
        )
    return [*drawn, _text(x, y - 4, "middle", ms(point.step_us))]


# -- what both share ----------------------------------------------------------------------


def _text(x: float, y: float, anchor: str, words: str) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="currentColor" '
        f'font-size="11">{escape(words)}</text>'
    )


def _svg(parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'style="display: block; max-width: 100%" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )
