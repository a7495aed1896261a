"""The board as HTML without scripts, arranged as the live board is.

The finding with both sides of it, then a row for ranks in the same state, with what they did last;
nothing to press. All that a reader needs stands on the elements: a notebook that is not trusted
loses style sheets and drawings, GitHub all styles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ddp_notebook.board.still.drawings import drawings
from ddp_notebook.board.timeline import Timeline
from ddp_notebook.model import (
    Board,
    BoardRow,
    Diagnosis,
    Role,
    Stage,
    Status,
    format_ranks,
    name_ranks,
)
from ddp_notebook.views import board as board_view
from ddp_notebook.views import findings as findings_view
from ddp_notebook.views import markup
from ddp_notebook.views.ansi import plain, strip_ansi
from ddp_notebook.views.table import Cell, Column, Row, Table

ROLES = {
    Role.CULPRIT: ("✗", markup.BAD),
    Role.LATE: ("►", markup.WARN),
    Role.DEAD: ("†", markup.BAD),
    Role.FAILED: ("✗", markup.BAD),
    Role.SILENT: ("?", markup.IDLE),
    Role.PAUSED: ("‖", "150, 90, 170"),
    Role.WAITING: ("…", markup.WARN),
    Role.RUNNING: ("▶", markup.BUSY),
    Role.READY: ("✓", markup.OK),
    Role.RAISED: ("✗", markup.BAD),
    Role.REFUSED: ("✗", markup.BAD),
    Role.ENDED: ("■", markup.IDLE),
}
"""The mark and the colour of each; the page's script has the same marks."""
_TONES = {markup.BAD: "failed", markup.WARN: "late", markup.OK: "ready", markup.BUSY: "running"}
"""The class of a row, for the colours of the theme."""
_MOST_SIDES = 2
"""Of a finding, beside each other; the rest is in its evidence."""

_COLUMNS = (
    Column("ranks", names_row=True, rank_set=True),
    Column("state"),
    Column("doing", fills=True),
    Column("heard"),
)
_DRAWN = Column("last collectives", always=True)
_WIDE = '<div style="width: 26em; max-width: 40vw; white-space: normal">'
_SIDE = "vertical-align: top; text-align: left; padding: 0 12px 0 0; border: 0; color: inherit"
_CODE = (
    f"margin: 3px 0 0; padding: 4px 8px; line-height: 1.35; white-space: pre-wrap;"
    f" background: rgba({markup.IDLE}, 0.1); {markup.MONO}"
)
_SMALL = f"font-size: 0.88em; margin: 4px 0 0; {markup.MUTED}"


def html(
    board: Board,
    diagnosis: Diagnosis | None = None,
    sides: Sequence[Mapping[str, Any]] = (),
    timeline: Timeline | None = None,
) -> str:
    """The board as one element. `sides` are those of the first finding, as the page gets them."""
    finding = ""
    if diagnosis is not None and diagnosis.findings:
        shown = _sides(sides[:_MOST_SIDES])
        finding = findings_view.html(diagnosis, shown, with_doing=False)  # the rows say it
    drawn = drawings(timeline, [row.ranks for row in board.rows])
    about = f'<div style="{_SMALL}">{escape(drawn.about)}</div>' if drawn.about else ""
    return (
        f'<div class="ddp-view ddp-picture">{markup.STYLE}{_head(board)}{board_view.loading(board)}'
        f"{finding}{_to_do(board)}"
        f"{_rows(board, drawn.of_rows) if board.rows else ''}{about}{_about(board)}</div>"
    )


def _head(board: Board) -> str:
    address = board.snapshot.init_method or ""
    headline = board.headline.replace(f" · {address}", "") if address else board.headline
    style = "font-weight: 600; margin-bottom: 6px"
    return f'<div class="ddp-headline" style="{style}">{markup.words(headline)}</div>'


def _sides(sides: Sequence[Mapping[str, Any]]) -> str:
    """What ranks called, and where: beside each other."""
    if not sides:
        return ""
    cells = "".join(f'<td style="{_SIDE}">{_side(side)}</td>' for side in sides)
    style = "border-collapse: collapse; margin: 8px 0 0 1.3em; color: inherit; font: inherit"
    row = '<tr style="background: none">'
    return f'<table class="ddp-sides" style="{style}"><tbody>{row}{cells}</tr></tbody></table>'


def _side(side: Mapping[str, Any]) -> str:
    who = markup.words(f"{'rank' if side['ranks'].isdigit() else 'ranks'} {side['ranks']}")
    called = f"<code>{markup.words(side['call'])}</code>" if side["call"] else ""
    at = f"{'at ' if side['call'] else ''}{side['site']}" if side["site"] else ""
    about = " ".join(filter(None, (called, markup.words(at), markup.words(side["tensor"]))))
    lines = [line for line in side["lines"] if abs(line[0] - side["line"]) < 2]
    code = "\n".join(
        f"{'▸' if number == side['line'] else ' '}{number:>4} {escape(text, quote=False)}"
        for number, text in lines
    )
    shown = f'<pre style="{_CODE}">{code}</pre>' if code else ""
    return f"<div><b>{who}</b> {about}</div>{shown}"


def _to_do(board: Board) -> str:
    """What a reader is to do."""
    return _list([note for note in board.notes if note not in board.snapshot.notes])


def _list(notes: Sequence[str]) -> str:
    items = "".join(
        f'<li style="white-space: pre-wrap">{escape(strip_ansi(note), quote=False)}</li>'
        for note in notes
    )
    return f'<ul class="ddp-notes">{items}</ul>' if items else ""


def _rows(board: Board, drawn: Sequence[str]) -> str:
    is_drawn = any(drawn)
    rows = [
        Row(
            (
                Cell(format_ranks(row.ranks)),
                _state(row),
                _doing(row, board.snapshot.taken_ns),
                Cell(board_view.heard_words(row) if row.silent else "", bold=True),
                *([Cell("", before=f"{_WIDE}{drawing}</div>")] if is_drawn else []),
            ),
            markup.BAD if row.gone else "",
            f"ddp-{_TONES.get(ROLES[row.role][1], row.role)}",
        )
        for row, drawing in zip(board.rows, drawn, strict=True)
    ]
    columns = (*_COLUMNS, _DRAWN) if is_drawn else _COLUMNS
    return Table(columns, rows, css_class="ddp-board").html()


def _state(row: BoardRow) -> Cell:
    """A mark and a word."""
    mark, colour = ROLES[row.role]
    word: str = row.role.value
    if row.role is Role.CULPRIT and row.status is Status.DEAD:
        mark, word = "†", "dead"
    elif row.role is Role.RUNNING and row.status is not Status.RUNNING:
        word = row.word or row.status.value  # in set-up
    return Cell(f"{mark} {word}", colour=colour)


def _doing(row: BoardRow, now_ns: int) -> Cell:
    """For whom they wait, for how long, and in what; the stage, until set-up is done."""
    verb = "" if row.role is Role.WAITING else "waits "
    waits = f"{verb}for {name_ranks(row.waits_for)}" if row.waits_for else ""
    age = board_view.age_words((now_ns - row.since_ns) / 1e9) if row.since_ns else ""
    in_set_up = row.stages_passed < len(Stage) and row.role is not Role.ENDED
    stage = board_view.stage_words(row) if in_set_up else ""
    text = " · ".join(filter(None, (waits, age, stage, plain(row.text))))
    return Cell(text, before=board_view.strip(row) if stage else "")


def _about(board: Board) -> str:
    """Where the ranks meet, and what was decided for the user: folded."""
    standing = [note for note in board.notes if note in board.snapshot.notes]
    if address := board.snapshot.init_method:
        standing.insert(0, f"The ranks meet at {address}.")
    if not standing:
        return ""
    summary = '<summary style="cursor: pointer">about these ranks</summary>'
    return f'<details style="{_SMALL}">{summary}{_list(standing)}</details>'
