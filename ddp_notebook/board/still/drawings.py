"""The last collectives of each row as a drawing: the timeline of pages without scripts.

Where drawings are taken out, as in a notebook that is not trusted and on GitHub, their titles stay
as words. Colours are middle tones, for light and dark pages; how high a bar is says as well what
it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ddp_notebook.bench.result import duration
from ddp_notebook.board.timeline import (
    DONE,
    FREED,
    HELD,
    ISSUED,
    PAUSED,
    PHASE,
    PHASES,
    SEQ_ID,
    Slice,
    Timeline,
    is_pause,
)
from ddp_notebook.model import Phase, Ranks, counted, name_ranks

MOST_ROWS = 12
_LAST = 24
"""How many collectives of each rank are drawn."""
_WIDE, _HIGH = 1000, 14
_FULL, _THIN = (1, 12), (5, 4)
"""Where bars begin, and how high they are."""
_LOOKS = {
    "communicates": ("47, 127, 224", *_FULL),
    "waits": ("217, 123, 0", *_THIN),
    "paused": ("150, 90, 170", *_THIN),
    "failed": ("217, 60, 60", *_FULL),
    "freed": ("128, 128, 128", *_THIN),
}
_LEGEND = (
    "high bars: communicates; low bars: waits for others; high and red: failed; low and violet:"
    " paused (by you); low and grey: freed, no rank waits any more"
)
_DRAWING = "display: block; width: 100%; border-left: 1px solid rgba(128, 128, 128, 0.6)"

_PENDING = (Phase.HELD, Phase.ISSUED)

Bars = dict[str, list[tuple[int, int]]]
"""By their look: from where to where, of `_WIDE`."""


@dataclass(frozen=True)
class Drawings:
    """A drawing for each row, in their order; empty strings when there is nothing to draw."""

    of_rows: Sequence[str]
    about: str = ""
    """A caption; empty when no rank has issued anything."""


def drawings(timeline: Timeline | None, rows: Sequence[Ranks]) -> Drawings:
    """Draw `rows`, ranks in the same state, of which the first is drawn."""
    if timeline is None:
        return Drawings([""] * len(rows))
    last = _newest(timeline, [timeline.last(ranks[0], _LAST) for ranks in rows[:MOST_ROWS]])
    issued = [slice_ for slices in last for slice_ in slices]
    if not issued:
        return Drawings([""] * len(rows))
    scale = _Scale.of(issued)
    arrived = timeline.last_arrivals()
    drawn = [
        _drawing(ranks, slices, _bars(slices, arrived, timeline, scale), timeline)
        for ranks, slices in zip(rows[:MOST_ROWS], last, strict=True)
    ]
    left = [rank for ranks in rows[MOST_ROWS:] for rank in ranks]
    more = f" Not drawn: {name_ranks(tuple(left))}." if left else ""
    span = duration((scale.done_us - scale.first_us) / 1e6)
    return Drawings(
        [*drawn, *[""] * (len(rows) - len(drawn))],
        f"The last collectives, {span}: {_LEGEND}.{more}",
    )


def _newest(timeline: Timeline, rows: Sequence[Sequence[Slice]]) -> list[list[Slice]]:
    """The slices of the newest run: minutes may lie between two, and both would be two dots."""
    newest = max((timeline.run_of(each) for slices in rows for each in slices), default=0)
    return [[each for each in slices if timeline.run_of(each) == newest] for slices in rows]


@dataclass(frozen=True)
class _Scale:
    """Which part of time the drawing shows."""

    first_us: int
    done_us: int
    span_us: int

    @classmethod
    def of(cls, slices: Sequence[Slice]) -> _Scale:
        """All of `slices`; with room behind those that are pending."""
        first_us = min(slice_[ISSUED] - slice_[HELD] for slice_ in slices)
        open_ = [slice_ for slice_ in slices if PHASES[slice_[PHASE]] in (*_PENDING, FREED)]
        # How long one waited that was freed must not squeeze the others.
        over = [slice_ for slice_ in slices if slice_ not in open_]
        done_us = max([each[ISSUED] for each in slices] + [each[DONE] for each in over])
        pending = bool(open_)
        return cls(
            first_us, done_us, max(1, int((done_us - first_us) * (1.4 if pending else 1.02)))
        )

    def x(self, at_us: int) -> int:
        """Where in the drawing a time is, from 0 to its width."""
        return max(0, min(_WIDE, round((at_us - self.first_us) / self.span_us * _WIDE)))


def _drawing(ranks: Ranks, slices: Sequence[Slice], drawn: Bars, timeline: Timeline) -> str:
    issued = [slice_ for slice_ in slices if not is_pause(slice_)]
    if issued:
        operation, phase = timeline.operation(issued[-1]), PHASES[issued[-1][PHASE]]
        count = counted(len(issued), "collective")
        about = f"{count}, the last: {operation} #{issued[-1][SEQ_ID]}, {phase}"
    else:
        about = "no collective"
    if issued != list(slices):
        about += f", {counted(len(slices) - len(issued), 'pause')} at lines"
    title = escape(f"{name_ranks(ranks[:1])}: {about}")
    paths = "".join(_path(look, spans) for look, spans in drawn.items() if spans)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_HIGH}" width="100%"'
        f' height="{_HIGH}" preserveAspectRatio="none" role="img"'
        f' style="{_DRAWING}"><title>{title}</title>{paths}</svg>'
    )


def _path(look: str, spans: Sequence[tuple[int, int]]) -> str:
    """One path for all bars that look the same; those that touch are one bar."""
    colour, top, high = _LOOKS[look]
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    drawn = "".join(f"M{a} {top}h{b - a}v{high}h{a - b}z" for a, b in merged)
    return f'<path fill="rgb({colour})" d="{drawn}"></path>'


def _bars(
    slices: Sequence[Slice],
    arrived: Mapping[tuple[int, str, int], int],
    timeline: Timeline,
    scale: _Scale,
) -> Bars:
    """The bars of a rank's collectives: each waits until the last rank has issued it."""
    bars_of: Bars = {look: [] for look in _LOOKS}
    for slice_ in slices:
        start, end = scale.x(slice_[ISSUED]), scale.x(slice_[DONE] or slice_[ISSUED])
        phase = PHASES[slice_[PHASE]]
        if slice_[HELD]:
            bars_of["paused"].append((scale.x(slice_[ISSUED] - slice_[HELD]), start))
        if phase in _PENDING:
            bars_of["paused" if phase == Phase.HELD else "waits"].append((start, _WIDE))
        elif phase == PAUSED:
            bars_of["paused"].append((start, max(end, start + 2)))
        elif phase == FREED:
            bars_of["freed"].append((start, max(end, start + 4)))
        elif phase == Phase.DONE:
            last = scale.x(arrived.get(timeline.collective(slice_), 0))
            begins = min(end, max(start, last))
            if begins > start:
                bars_of["waits"].append((start, begins))
            bars_of["communicates"].append((begins, max(end, begins + 2)))
        else:
            bars_of["failed"].append((start, max(end, start + 4)))
    return bars_of
