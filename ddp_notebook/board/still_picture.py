"""The board as HTML without scripts: what a saved notebook, nbviewer and GitHub show.

It is arranged as the live board is: the state, a row for ranks in the same state with what they did
last, then the finding with both sides of it; nothing to press. All that a reader needs stands on
the elements: a notebook that is not trusted loses style sheets and drawings, GitHub all styles.
Where drawings are taken out, their titles stay as words. Their colours are middle tones, for light
and dark pages; how high a bar is says as well what it is.
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
from ddp_notebook.model import (
    Board,
    Diagnosis,
    Phase,
    Ranks,
    Role,
    Stage,
    Status,
    counted,
    format_ranks,
    name_ranks,
)
from ddp_notebook.views import board as board_view
from ddp_notebook.views import findings as findings_view
from ddp_notebook.views import markup
from ddp_notebook.views.ansi import plain, strip_ansi
from ddp_notebook.views.table import Cell, Column, Row, Table, age_words

STATES = {
    "ready": ("✓", markup.OK),
    "running": ("▶", markup.BUSY),
    "waiting": ("…", markup.WARN),
    "slow": ("►", markup.WARN),
    "paused": ("‖", "150, 90, 170"),
    "error": ("✗", markup.BAD),
    "ended": ("■", markup.IDLE),
}
"""The mark and the colour of each; the page's script has the same."""
STATE_OF = {
    **dict.fromkeys((Role.CULPRIT, Role.DEAD, Role.FAILED, Role.RAISED), "error"),
    **dict.fromkeys((Role.REFUSED, Role.GROUPLESS), "error"),
    Role.LATE: "slow",
}
"""The roles of which it is not the name."""
_TONES = {markup.BAD: "failed", markup.WARN: "late", markup.OK: "ready", markup.BUSY: "running"}
"""The class of a row, for the colours of the theme."""

_COLUMNS = (
    Column("ranks", names_row=True, rank_set=True),
    Column("state"),
    Column("doing", fills=True),
    Column("last seen"),
)
_DRAWN = Column("last collectives", always=True)
_WIDE_CELL = '<div style="width: 26em; max-width: 40vw; white-space: normal">'
_SMALL = f"font-size: 0.88em; margin: 4px 0 0; {markup.MUTED}"
MOST_ROWS = 12
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


def html(
    board: Board,
    diagnosis: Diagnosis | None = None,
    timeline: Timeline | None = None,
) -> str:
    """The board as one element."""
    finding = ""
    if diagnosis is not None and diagnosis.findings:
        finding = findings_view.html(diagnosis, with_doing=False)  # the rows say it
    drawn = drawings(timeline, [row.ranks for row in board.rows])
    about = f'<div style="{_SMALL}">{escape(drawn.about)}</div>' if drawn.about else ""
    # Notes that stand are folded at the end; the others ask the reader to do something.
    to_do = [note for note in board.notes if note not in board.snapshot.notes]
    headline = markup.words(board_view.headline_alone(board))
    return (
        f'<div class="ddp-view ddp-picture">{markup.STYLE}<div class="ddp-headline"'
        f' style="font-weight: 600; margin-bottom: 6px">{headline}</div>'
        f"{board_view.loading(board)}"
        f"{_rows(board, drawn.of_rows) if board.rows else ''}{about}"
        f"{finding}{_list(to_do)}{_about(board)}</div>"
    )


def _list(notes: Sequence[str]) -> str:
    items = "".join(
        f'<li style="white-space: pre-wrap">{escape(strip_ansi(note), quote=False)}</li>'
        for note in notes
    )
    return f'<ul class="ddp-notes">{items}</ul>' if items else ""


def _rows(board: Board, drawn: Sequence[str]) -> str:
    is_drawn = any(drawn)
    rows = []
    for row, drawing in zip(board.rows, drawn, strict=True):
        word = STATE_OF.get(row.role, row.role.value)
        mark, colour = STATES.get(word, ("?", markup.IDLE))
        # Of a silent rank the last that is known; in setup, what it does there.
        set_up = row.role is Role.RUNNING and row.status is not Status.RUNNING
        word = (row.word or row.status.value) if set_up or row.role is Role.SILENT else word
        # The ranks that they wait for, how long and where; the stage, until setup is done.
        verb = "" if row.role is Role.WAITING else "waits "
        waits = f"{verb}for {name_ranks(row.waits_for)}" if row.waits_for else ""
        since_s = (board.snapshot.taken_ns - row.since_ns) / 1e9
        unfinished = row.stages_passed < len(Stage) and row.role is not Role.ENDED
        stage = board_view.stage_words(row) if unfinished else ""
        words = (waits, age_words(since_s) if row.since_ns else "", stage, plain(row.text))
        cells = [
            Cell(format_ranks(row.ranks)),
            Cell(f"{mark} {word}", colour=colour),
            Cell(" · ".join(filter(None, words)), before=board_view.strip(row) if stage else ""),
            Cell(board_view.heard_words(row) if row.silent else "", bold=True),
        ]
        if is_drawn:
            cells.append(Cell("", before=f"{_WIDE_CELL}{drawing}</div>"))
        tone = f"ddp-{_TONES.get(colour, row.role)}"
        rows.append(Row(cells, markup.BAD if row.gone else "", tone))
    columns = (*_COLUMNS, _DRAWN) if is_drawn else _COLUMNS
    return Table(columns, rows, css_class="ddp-board").html()


def _about(board: Board) -> str:
    """Where the ranks meet, and what was decided for the user: folded."""
    standing = [note for note in board.notes if note in board.snapshot.notes]
    if address := board.snapshot.init_method:
        standing.insert(0, f"The ranks meet at {address}.")
    if not standing:
        return ""
    summary = '<summary style="cursor: pointer">about these ranks</summary>'
    return f'<details style="{_SMALL}">{summary}{_list(standing)}</details>'


@dataclass(frozen=True)
class Drawings:
    """A drawing for each row, in their order; empty strings when there is nothing to draw."""

    of_rows: Sequence[str]
    about: str = ""
    """A caption; empty when no rank has issued anything."""


def drawings(timeline: Timeline | None, rows: Sequence[Ranks]) -> Drawings:
    """Draw the first rank of each of `rows`, which are ranks in the same state."""
    if timeline is None:
        return Drawings([""] * len(rows))
    # Of each row the newest 24 collectives of its first rank are drawn.
    last = [timeline.last(ranks[0], 24) for ranks in rows[:MOST_ROWS]]
    # Of the newest run: minutes may lie between two, as empty space.
    newest = max((timeline.run_of(each) for slices in last for each in slices), default=0)
    last = [[each for each in slices if timeline.run_of(each) == newest] for slices in last]
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
    of = ", of an earlier run" if newest != timeline.run else ""
    span = duration((scale.done_us - scale.first_us) / 1e6)
    return Drawings(
        [*drawn, *[""] * (len(rows) - len(drawn))],
        f"The last collectives{of}, {span}: {_LEGEND}.{more}",
    )


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
    paths = ""
    for look, spans in drawn.items():
        # One path for all bars that look the same; those that touch are one bar.
        colour, top, high = _LOOKS[look]
        merged: list[tuple[int, int]] = []
        for start, end in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        bars = "".join(f"M{a} {top}h{b - a}v{high}h{a - b}z" for a, b in merged)
        if bars:
            paths += f'<path fill="rgb({colour})" d="{bars}"></path>'
    return (
        # Where a sanitizer removes SVG, its title stays as text: GitHub does so.
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_HIGH}" width="100%"'
        f' height="{_HIGH}" preserveAspectRatio="none" role="img"'
        f' style="{_DRAWING}"><title>{title}</title>{paths}</svg>'
    )


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
        elif phase == Phase.DONE:
            last = scale.x(arrived.get(timeline.collective(slice_), 0))
            begins = min(end, max(start, last))
            if begins > start:
                bars_of["waits"].append((start, begins))
            bars_of["communicates"].append((begins, max(end, begins + 2)))
        else:
            look, narrowest = {PAUSED: ("paused", 2), FREED: ("freed", 4)}.get(phase, ("failed", 4))
            bars_of[look].append((start, max(end, start + narrowest)))
    return bars_of


def hidden_beside(mark: str) -> str:
    """A style sheet that hides lost widgets in a cell's output that has an element of class `mark`.

    Where a notebook is opened again, there is no model, and JupyterLab says so in words in place of
    the widget: nothing else makes a widget's view that has no element in it.
    """
    view = "> .jp-OutputArea-output.jupyter-widgets"
    # JupyterLab's message for a widget without a model cannot be told from the widget by its class,
    # only by being empty.
    lost = f".jp-OutputArea-child:has({view}):not(:has({view} *))"
    return f"<style>.jp-OutputArea:has(.{mark}) > {lost} {{ display: none }}</style>"
