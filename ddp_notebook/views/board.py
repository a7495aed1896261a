"""The board, a row for ranks in the same state: as text and as HTML."""

from __future__ import annotations

from html import escape
from textwrap import indent

from ddp_notebook.model import Board, BoardRow, Role, Stage, Status, format_ranks
from ddp_notebook.views import markup
from ddp_notebook.views.ansi import strip_ansi
from ddp_notebook.views.board_rows import loading_text
from ddp_notebook.views.table import Cell, Column, Row, Table, age_words

WIDTH = 120
"""The width of a board in characters, if possible."""

_COLUMNS = (
    Column("ranks", widest=24, names_row=True, rank_set=True),
    Column("stage"),
    Column("state"),
    Column("doing", fills=True, narrowest=24, most_lines=3),
    Column("device", widest=16, cuts=True),
    Column("pid"),
    Column("host", widest=24, cuts=True),
    Column("last seen"),
)

_ENTERING = {
    Stage.LAUNCHED: "launching",
    Stage.ENVIRONMENT: "checking environment",
    Stage.STORE: "reaching store",
    Stage.RENDEZVOUS: "joining rendezvous",
    Stage.PROCESS_GROUP: "building process group",
    Stage.VERIFIED: "verifying",
}
_STATUS_COLOURS = {
    Status.STARTING: markup.IDLE,
    Status.READY: markup.OK,
    Status.RUNNING: markup.BUSY,
    Status.SETTING_UP: markup.BUSY,
    Status.PAUSED: markup.BUSY,
    Status.FAILED: markup.BAD,
    Status.DEAD: markup.BAD,
}
_ROLE_LOOKS = {
    Role.CULPRIT: (markup.BAD, "failed"),
    Role.RAISED: (markup.BAD, "failed"),
    Role.REFUSED: (markup.BAD, "failed"),
    Role.GROUPLESS: (markup.WARN, "late"),
    Role.ENDED: (markup.IDLE, "ended"),
}
"""The colour and the class of roles that say more than the status."""
_STRIP = "display: inline-block; margin-right: 8px; white-space: nowrap"
_SEGMENT = (
    "display: inline-block; box-sizing: border-box; width: 9px; height: 9px;"
    " margin-right: 2px; border-radius: 2px"
)


def text(board: Board) -> str:
    """The board for a terminal, a log and a test."""
    parts = [strip_ansi(board.headline), *filter(None, [loading_text(board.snapshot)])]
    if board.rows:
        parts.append(_table(board).text())
    if board.notes:
        parts.append("\n".join(_note(note) for note in board.notes))
    return "\n\n".join(parts)


def headline_alone(board: Board) -> str:
    """The headline without the address at which the ranks meet, which is shown elsewhere."""
    address = board.snapshot.init_method
    return board.headline.replace(f" · {address}", "") if address else board.headline


def brief(board: Board) -> str:
    """Return the result of a button, for a reader who sees the rows of the board anyway."""
    return "\n".join([strip_ansi(board.headline), *map(_note, board.notes)])


def html(board: Board) -> str:
    """The board as one element with its own style sheet: no scripts, nothing to load."""
    notes = "".join(f'<li style="white-space: pre-wrap">{_text(n)}</li>' for n in board.notes)
    return (
        f'<div class="ddp-view">{markup.STYLE}<div class="ddp-headline"'
        f' style="font-weight: 600; margin-bottom: 6px">{_text(board.headline)}</div>'
        + loading(board)
        + (_table(board).html() if board.rows else "")
        + (f'<ul class="ddp-notes">{notes}</ul>' if notes else "")
        + "</div>"
    )


def loading(board: Board) -> str:
    """For how long torch has been loading, beside a bar that only moves; empty when it is there."""
    words = escape(loading_text(board.snapshot), quote=False)
    bar = '<progress aria-label="torch"></progress>'
    style = "margin-bottom: 6px"
    return f'<div class="ddp-loading" style="{style}">{bar} {words}</div>' if words else ""


def _table(board: Board) -> Table:
    """A row's class names its look, and whether it is silent."""
    rows = []
    for row in board.rows:
        of_status = _STATUS_COLOURS[row.status], row.status.name.lower().replace("_", "-")
        colour, look = _ROLE_LOOKS.get(row.role, of_status)
        cells = (
            Cell(format_ranks(row.ranks)),
            Cell(stage_words(row), before=strip(row) if stage_words(row) else ""),
            Cell(row.word or row.status.value, colour=colour),
            Cell(strip_ansi(row.text).strip()),
            Cell(strip_ansi(row.device)),
            Cell(str(row.pid) if row.pid else ""),
            Cell(strip_ansi(row.host)),
            Cell(heard_words(row), bold=row.silent),
        )
        # A rank that says nothing is marked by the text, by bold type and by the style sheet: the
        # last is lost in a notebook that is not trusted.
        silent = " ddp-silent" if row.silent else ""
        rows.append(Row(cells, markup.BAD if row.gone else "", f"ddp-{look}{silent}"))
    return Table(_COLUMNS, rows, WIDTH, css_class="ddp-board")


def stage_words(row: BoardRow) -> str:
    """How far these ranks are: ``6/6 verified``, or ``4/6 joining rendezvous…`` while they do.

    Ranks that failed or died in a stage are no longer in it, so the dots are left out. Empty where
    no stage is known.
    """
    if not row.staged:
        return ""
    if row.entering is not None:
        dots = "" if row.gone else "…"
        return f"{row.entering.number}/{len(Stage)} {_ENTERING[row.entering]}{dots}"
    if row.stage is None:
        return f"0/{len(Stage)} not launched"
    return f"{row.stage.number}/{len(Stage)} {row.stage.label}"


def heard_words(row: BoardRow) -> str:
    """The age of the last message: ``now``, ``12 s``; ``silent 31 s`` is too long."""
    if Role.ENDED in (row.role, row.word):
        return ""
    if row.silent:
        return f"silent {age_words(row.age_s)}"
    if row.status is Status.STARTING:
        return "not yet"
    return "now" if row.age_s < 1 else age_words(row.age_s)


def strip(row: BoardRow) -> str:
    """The stages as a strip of named segments; the words are beside it."""
    # The strip repeats the words beside it: it is hidden from screen readers.
    dead = row.status is Status.DEAD or row.role is Role.ENDED
    looks = {
        "passed": f"background: rgb({markup.IDLE if dead else markup.OK})",
        "entering": f"border: 2px solid rgb({markup.BUSY})",
        "failed": f"background: rgb({markup.BAD})",
        "to come": f"border: 1px solid rgba({markup.IDLE}, 0.7)",
    }
    segments = []
    for stage in Stage:
        state = "passed" if stage.number <= row.stages_passed else "to come"
        if stage is row.entering:
            state = "failed" if row.gone else "entering"
        title = f"{stage.number} {stage.value}: {state}"
        segments.append(
            f'<i class="ddp-{state.replace(" ", "-")}" title="{title}"'
            f' style="{_SEGMENT}; {looks[state]}"></i>'
        )
    strip = "".join(segments)
    return f'<span class="ddp-strip" aria-hidden="true" style="{_STRIP}">{strip}</span>'


def _note(note: str) -> str:
    """A note behind a bullet; its further lines are indented."""
    return "• " + indent(strip_ansi(note), "  ").removeprefix("  ")


def _text(words: str) -> str:
    """Text without escape codes, as HTML. Notes keep their line breaks."""
    return escape(strip_ansi(words), quote=False)
