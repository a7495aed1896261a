"""Training steps while they are measured: a progress bar, and the steps there are so far.

Drawn by hand as in `bench_live`, and for the same reason: the ranks need the cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ddp_notebook.bench.steps.results import StepBenchResult, StepPoint
from ddp_notebook.views.bench.live import progress_bundle
from ddp_notebook.views.bench.steps_text import ms

_PARTS = (
    ("forward_us", "forward", "#56B4E9"),
    ("backward_us", "backward", "#2E8FCF"),
    ("optimizer_us", "optimizer", "#009E73"),
    ("exposed_us", "exposed communication", "#D55E00"),
)
"""From the bottom. Okabe and Ito's colours as in `bench_live`."""
_WIDTH, _HEIGHT = 640, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 12, 200, 22, 48
_MOST_BARS = 16
_BAR_SHARE = 0.66
"""Of the place that a bar has."""


def live_steps(
    what: str, result: StepBenchResult | None, done: float, left_s: float | None
) -> dict[str, str]:
    """What to show now of the steps of the model `what`. `done` is 0 to 1."""
    points = result.points if result is not None else ()
    plot = _plot(points[-_MOST_BARS:]) if points else ""
    return progress_bundle(f"training steps of {what}", done, left_s, plot)


def _plot(points: Sequence[StepPoint]) -> str:
    """A bar for each batch and bucket size, stacked of the step's parts."""
    top_us = max(sum(max(0.0, getattr(p, name)) for name, *_ in _PARTS) for p in points) or 1.0
    scale = (_HEIGHT - _TOP - _BOTTOM) / top_us
    room = (_WIDTH - _LEFT - _RIGHT) / len(points)
    several = len({point.bucket for point in points}) > 1
    parts = []
    for number, point in enumerate(points):
        x = _LEFT + room * (number + 0.5)
        parts += _bar(point, x, room * _BAR_SHARE, scale)
        parts.append(_text(x, _HEIGHT - _BOTTOM + 14, f"{point.batch:,}", "middle"))
        if several:
            parts.append(_text(x, _HEIGHT - _BOTTOM + 27, point.bucket, "middle"))
    for number, (_, label, colour) in enumerate(reversed(_PARTS)):
        x, y = _WIDTH - _RIGHT + 14, _TOP + 18 * number
        parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(x + 17, y + 10, label, "start"))
    about = "batch per rank" + (", bucket size (MiB)" if several else "") + "; step in ms"
    parts.append(_text(_LEFT, _HEIGHT - 6, about, "start"))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        'style="display: block; max-width: 100%" role="img" '
        f'aria-label="where a step\'s time goes">{"".join(parts)}</svg>'
    )


def _bar(point: StepPoint, x: float, width: float, scale: float) -> list[str]:
    """The parts of one step on each other, and how long it takes above them."""
    drawn, y = [], float(_HEIGHT - _BOTTOM)
    for name, _, colour in _PARTS:
        height = max(0.0, getattr(point, name)) * scale
        y -= height
        drawn.append(
            f'<rect x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" fill="{colour}"/>'
        )
    return [*drawn, _text(x, y - 4, ms(point.step_us), "middle")]


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor" '
        f'font-size="11">{escape(words)}</text>'
    )
