"""The board and the ranks' output as plain text: what a terminal, a log and a test show.

The words here (of a stage, of an age) are the ones the HTML view uses as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import indent, wrap

from ddp_notebook.model import (
    Board,
    BoardRow,
    OutputGroup,
    OutputItem,
    OutputKind,
    Stage,
    Status,
    format_ranks,
    name_ranks,
)
from ddp_notebook.views.ansi import strip_ansi

WIDTH = 120
"""Columns a board aims to stay within."""

HEADERS = ("ranks", "stage", "state", "doing", "device", "pid", "host", "heard")
"""The board's columns, in every view."""

STREAMS = (OutputKind.STDOUT, OutputKind.STDERR)
"""Output that goes on where the last piece ended, perhaps in the middle of a line."""

_DOING = HEADERS.index("doing")
_WIDEST = {"ranks": 24, "device": 16, "host": 24}
_NARROWEST_DOING = 24
_DOING_LINES = 3
_GAP = "  "

_ENTERING = {
    Stage.LAUNCHED: "launching",
    Stage.ENVIRONMENT: "checking environment",
    Stage.STORE: "reaching store",
    Stage.RENDEZVOUS: "joining rendezvous",
    Stage.PROCESS_GROUP: "building process group",
    Stage.VERIFIED: "verifying",
}


# --------------------------------------------------------------------------- words


def stage_words(row: BoardRow) -> str:
    """How far these ranks are: ``6/6 verified``, or ``4/6 joining rendezvous…`` while they do.

    A rank that failed or died in a stage is no longer in it, so the dots are left out.
    """
    if row.entering is not None:
        dots = "" if row.status in (Status.FAILED, Status.DEAD) else "…"
        return f"{row.entering.number}/{len(Stage)} {_ENTERING[row.entering]}{dots}"
    if row.stage is None:
        return f"0/{len(Stage)} not launched"
    return f"{row.stage.number}/{len(Stage)} {row.stage.label}"


def stages_passed(row: BoardRow) -> int:
    """How many stages are behind these ranks. Those that set up once more begin again."""
    if row.entering is not None:
        return row.entering.number - 1
    return row.stage.number if row.stage else 0


def heard_words(row: BoardRow) -> str:
    """How long ago these ranks were heard: ``< 1 s``, ``12 s``; ``silent 31 s`` is too long."""
    if row.silent:
        return f"silent {_age_words(row.age_s)}"
    return "not yet" if row.status is Status.STARTING else _age_words(row.age_s)


def _age_words(seconds: float) -> str:
    """A time span for a glance: a healthy rank's never changes, so nothing is painted again."""
    if seconds < 1:
        return "< 1 s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7170 else f"{seconds / 3600:.0f} h"


def cells(row: BoardRow) -> tuple[str, ...]:
    """One row's words in the order of `HEADERS`, without escape codes; empty where unknown."""
    return (
        format_ranks(row.ranks),
        stage_words(row),
        row.status.value,
        strip_ansi(row.text).strip(),
        strip_ansi(row.device),
        str(row.pid) if row.pid else "",
        strip_ansi(row.host),
        heard_words(row),
    )


def used_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """The columns in which at least one row has something to say."""
    return [column for column in range(len(HEADERS)) if any(row[column] for row in rows)]


# --------------------------------------------------------------------------- board


def board(board: Board) -> str:
    """The headline, a table of fixed width with one row for ranks in the same state, the notes.

    A column in which no rank has anything is left out. Rank sets and what the ranks do are
    folded into lines of their column; of a long text, the first lines are shown.
    """
    parts = [strip_ansi(board.headline)]
    if board.rows:
        parts.append(_table([cells(row) for row in board.rows]))
    if board.notes:
        parts.append("\n".join(_note(note) for note in board.notes))
    return "\n\n".join(parts)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Header, rule and rows; every column as wide as its widest line."""
    columns = used_columns(rows)
    room = _room_for_doing(rows, columns)
    blocks = [[_fold(c, HEADERS[c], room) for c in columns]]
    blocks += [[_fold(c, row[c], room) for c in columns] for row in rows]
    widths = [max(len(line) for block in blocks for line in block[i]) for i in range(len(columns))]
    lines = [line for block in blocks for line in _block_lines(block, widths)]
    return "\n".join([lines[0], _GAP.join("─" * width for width in widths), *lines[1:]])


def _room_for_doing(rows: Sequence[Sequence[str]], columns: Sequence[int]) -> int:
    """The width that the other columns leave for what the ranks do."""
    texts = [HEADERS, *rows]
    others = (
        max(len(line) for text in texts for line in _fold(column, text[column], WIDTH))
        for column in columns
        if column != _DOING
    )
    return max(_NARROWEST_DOING, WIDTH - sum(others) - len(_GAP) * (len(columns) - 1))


def _fold(column: int, text: str, room: int) -> list[str]:
    """The lines one cell takes. Never empty."""
    if column == _DOING:
        short = _printable(text)[: room * (_DOING_LINES + 1)]
        folded = wrap(short, room, max_lines=_DOING_LINES, placeholder=" …", break_on_hyphens=False)
        return folded or [""]
    name = HEADERS[column]
    if name == "ranks":
        folded = wrap(text.replace(",", ", "), _WIDEST[name])
        return [line.replace(", ", ",") for line in folded] or [""]
    text, widest = _printable(text), _WIDEST.get(name, WIDTH)
    return [text if len(text) <= widest else text[: widest - 1] + "…"]


def _printable(text: str) -> str:
    """`text` on one line, what would move the cursor left out."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable())


def _block_lines(block: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """One row of cells, each of one line or more, as lines of text."""
    height = max(len(cell) for cell in block)
    return [
        _GAP.join(
            (cell[i] if i < len(cell) else "").ljust(width)
            for cell, width in zip(block, widths, strict=True)
        ).rstrip()
        for i in range(height)
    ]


def _note(note: str) -> str:
    """A note behind a bullet; its further lines are indented."""
    return "• " + indent(strip_ansi(note), "  ").removeprefix("  ")


# --------------------------------------------------------------------------- output


def outputs(groups: Sequence[OutputGroup]) -> str:
    """What the ranks wrote and displayed, each piece under the ranks that it came from."""
    return "\n\n".join(_group(group) for group in groups)


def _group(group: OutputGroup) -> str:
    """One group under its header. Streams go on where they ended; all else has its own lines."""
    body = strip_ansi("".join(pieces(group.items))).rstrip("\n") or "(no output)"
    return f"── {name_ranks(group.ranks)} ──\n{body}"


def pieces(items: Sequence[OutputItem]) -> Iterator[str]:
    """The items as text, with their colours; only a stream begins or ends within a line."""
    line_open = False
    for item in items:
        text = plain(item)
        if not text:
            continue
        yield f"\n{text}" if line_open and item.what not in STREAMS else text
        line_open = not text.endswith("\n")


def plain(item: OutputItem) -> str:
    """An item as text, with its colours: a display by its ``text/plain`` or by its type."""
    if item.what in STREAMS:
        return item.text.removesuffix("\r")  # what would overwrite the line has not come yet
    text = item.text or str(item.data.get("text/plain", ""))
    if not text and item.data:
        text = f"(display: {', '.join(sorted(item.data))})"
    return f"{text}\n" if text and not text.endswith("\n") else text
