"""The board and the live region as HTML: no scripts, nothing to load, every value escaped.

Colours come from the notebook's theme (its ``--jp-*`` variables); where there is none, as in
an exported page, text has the page's own colour. Whatever a colour says, a word says too.

A notebook that is not trusted loses the style sheet and every ``var()``. So what a reader
needs stands on the elements, in colours for light and dark pages, and the sheet overrides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from ddp_notebook.model import (
    Board,
    BoardRow,
    OutputGroup,
    OutputItem,
    OutputKind,
    Stage,
    Status,
    name_ranks,
)
from ddp_notebook.views.ansi import after_escape, ansi_to_html, strip_ansi
from ddp_notebook.views.text import (
    HEADERS,
    STREAMS,
    cells,
    plain,
    stages_passed,
    used_columns,
)

_CHARACTERS_PER_LINE = 200
"""Of longer lines than this on average, fewer are shown while a cell runs."""
_IMAGE_LINES = 20
"""An image takes the place of this many lines."""

_IMAGES = ("image/png", "image/jpeg")

_OK, _BUSY, _BAD, _IDLE = "43, 154, 75", "47, 127, 224", "217, 60, 60", "128, 128, 128"
"""Colours without a theme: the red, green and blue of middle tones."""
_MARKS = {OutputKind.STDERR: f'class="ddp-stderr" style="background: rgba({_BAD}, 0.12)"'}
_STATUS_COLOURS = {
    Status.READY: _OK,
    Status.RUNNING: _BUSY,
    Status.SETTING_UP: _BUSY,
    Status.PAUSED: _BUSY,
    Status.FAILED: _BAD,
    Status.DEAD: _BAD,
}
_MUTED = "opacity: 0.72"
_ALIGNED = "text-align: left; vertical-align: baseline; padding: 5px 12px"
_CELL = f"{_ALIGNED}; white-space: nowrap"
_STRIP = "display: inline-block; margin-right: 8px; white-space: nowrap"
_SEGMENT = (
    "display: inline-block; box-sizing: border-box; width: 9px; height: 9px;"
    " margin-right: 2px; border-radius: 2px"
)
_CHIP = "display: inline-block; padding: 0 8px; border-radius: 9px"
_GROUP = f"margin-bottom: 10px; padding-left: 9px; border-left: 3px solid rgba({_IDLE}, 0.3)"


# --------------------------------------------------------------------------- board


def board(board: Board) -> str:
    """The board as one element with its own style sheet; a row for ranks in the same state.

    A column in which no rank has anything is left out.
    """
    notes = "".join(f'<li style="white-space: pre-wrap">{_text(n)}</li>' for n in board.notes)
    return (
        f'<div class="ddp-view">{_STYLE}<div class="ddp-headline"'
        f' style="font-weight: 600; margin-bottom: 6px">{_text(board.headline)}</div>'
        + (_table(board.rows) if board.rows else "")
        + (f'<ul class="ddp-notes">{notes}</ul>' if notes else "")
        + "</div>"
    )


def _table(rows: Sequence[BoardRow]) -> str:
    """The rows under their headers."""
    words = [cells(row) for row in rows]
    columns = used_columns(words)
    style = f"{_CELL}; {_MUTED}"
    head = "".join(f'<th scope="col" style="{style}">{HEADERS[c]}</th>' for c in columns)
    body = "".join(_row(row, text, columns) for row, text in zip(rows, words, strict=True))
    return (
        f'<div class="ddp-scroll" style="overflow-x: auto"><table class="ddp-board"'
        f' style="border-collapse: collapse"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _row(row: BoardRow, words: Sequence[str], columns: Sequence[int]) -> str:
    """One row; its class names the ranks' status, and whether they are silent."""
    state = row.status.name.lower().replace("_", "-")
    silent = " ddp-silent" if row.silent else ""
    body = "".join(_cell(row, HEADERS[c], words[c]) for c in columns)
    tint = f' style="background: rgba({_BAD}, 0.09)"' if _failed(row) else ""
    return f'<tr class="ddp-{state}{silent}"{tint}>{body}</tr>'


def _cell(row: BoardRow, header: str, words: str) -> str:
    """One value in the form of its column."""
    text = escape(words, quote=False)
    match header:
        case "ranks":
            text = text.replace(",", ",<wbr>")
            return f'<th scope="row" style="{_ALIGNED}; font-weight: 600"><div>{text}</div></th>'
        case "stage":
            return f'<td class="ddp-stage" style="{_CELL}">{_strip(row)}<span>{text}</span></td>'
        case "state":
            return f'<td style="{_CELL}">{_chip(row, text)}</td>'
        case "doing":
            style = f"{_ALIGNED}; white-space: pre-wrap; min-width: 15em"
            return f'<td class="ddp-doing" style="{style}"><div>{text}</div></td>'
        case "host":
            title = escape(words)
            return f'<td class="ddp-host" style="{_CELL}"><div title="{title}">{text}</div></td>'
        case _:
            style = f"{_CELL}; font-weight: 600" if header == "heard" and row.silent else _CELL
            return f'<td class="ddp-{header}" style="{style}">{text}</td>'


def _chip(row: BoardRow, text: str) -> str:
    """The ranks' status in a frame of its colour."""
    colour = _STATUS_COLOURS.get(row.status, _IDLE)
    style = f"{_CHIP}; border: 1px solid rgb({colour}); background: rgba({colour}, 0.16)"
    return f'<span class="ddp-chip" style="{style}">{text}</span>'


def _strip(row: BoardRow) -> str:
    """The stages as a strip of segments, each with its name; the words stand beside it."""
    passed = stages_passed(row)
    done = f"background: rgb({_IDLE if row.status is Status.DEAD else _OK})"
    looks = {
        "passed": done,
        "entering": f"border: 2px solid rgb({_BUSY})",
        "failed": f"background: rgb({_BAD})",
        "to come": f"border: 1px solid rgba({_IDLE}, 0.7)",
    }
    segments = []
    for stage in Stage:
        state = "passed" if stage.number <= passed else "to come"
        if stage is row.entering:
            state = "failed" if _failed(row) else "entering"
        title = f"{stage.number} {stage.value}: {state}"
        segments.append(
            f'<i class="ddp-{state.replace(" ", "-")}" title="{title}"'
            f' style="{_SEGMENT}; {looks[state]}"></i>'
        )
    strip = "".join(segments)
    return f'<span class="ddp-strip" aria-hidden="true" style="{_STRIP}">{strip}</span>'


def _failed(row: BoardRow) -> bool:
    """Whether the ranks will do nothing more."""
    return row.status in (Status.FAILED, Status.DEAD)


def _text(words: str) -> str:
    """Words for a person, without escape codes, as HTML."""
    return escape(strip_ansi(words), quote=False)


# --------------------------------------------------------------------------- live region


def live(
    groups: Sequence[OutputGroup], board_html: str, elapsed_text: str, tail_lines: int = 60
) -> str:
    """What is shown while a cell runs: the end of each group's output, the time, the board.

    Of each group the last `tail_lines` lines are shown (an image counts as several) and it
    is said what is left out above them. HTML that a rank displays is not put into the page;
    its ``text/plain`` stands for it. `board_html` is empty or what `board` returned.
    """
    style = "" if _STYLE in board_html else _STYLE
    shown = "".join(_group(group, tail_lines) for group in groups)
    return (
        f'<div class="ddp-view ddp-live">{style}{shown}'
        f'<div class="ddp-elapsed" style="{_MUTED}; margin-bottom: 8px">'
        f"{_text(elapsed_text)}</div>{board_html}</div>"
    )


def _group(group: OutputGroup, tail_lines: int) -> str:
    """The end of one group's output under its ranks. It stays scrolled to its last line."""
    tail = _tail(group.items, max(tail_lines, 1))
    above = tail.left_out()
    left_out = f'<span class="ddp-left-out" style="{_MUTED}"> · {above}</span>' if above else ""
    return (
        f'<div class="ddp-group" style="{_GROUP}">'
        f'<div class="ddp-who"><b>{name_ranks(group.ranks)}</b>{left_out}</div>'
        f'<div class="ddp-tail"><div>{_blocks(tail.items)}</div></div></div>'
    )


@dataclass(slots=True)
class _Tail:
    """The end of a group's output, and how much stands above it."""

    items: list[OutputItem] = field(default_factory=list)
    lines: int = 0
    images: int = 0
    in_line: bool = False
    """True when the first line shown has lost its beginning."""

    def left_out(self) -> str:
        """What stands above, in words; empty when that is nothing."""
        parts = [
            _count(self.lines, "line"),
            _count(self.images, "image"),
            "the beginning of a line" if self.in_line else "",
        ]
        said = ", ".join(part for part in parts if part)
        return f"{said} above" if said else ""


def _count(number: int, thing: str) -> str:
    """``1 line``, ``1,204 lines``; empty for none."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}" if number else ""


def _tail(items: Sequence[OutputItem], lines: int) -> _Tail:
    """The last `lines` lines of `items`. Of the text before them only the lines are counted."""
    tail, room, characters = _Tail(), lines, lines * _CHARACTERS_PER_LINE
    for item in reversed(items):
        if _image(item):
            tail.images += room <= 0
            if room > 0:
                tail.items.append(item)
                room -= _IMAGE_LINES
            continue
        text = plain(item)
        start, used = _last_lines(text, room, characters)
        if start < len(text):
            tail.items.append(OutputItem(item.what, text[start:]))
            tail.in_line = start > 0 and text[start - 1] != "\n"
        tail.lines += text.count("\n", 0, start)
        characters -= len(text) - start
        room = room - used if start == 0 and characters > 0 else 0
    tail.items.reverse()
    return tail


def _last_lines(text: str, room: int, characters: int) -> tuple[int, int]:
    """Where the last `room` lines of `text` begin, and how many they are.

    They begin later where they would be more than `characters`.
    """
    if room <= 0 or not text:
        return len(text), 0
    start, used, end = 0, 1, len(text) - text.endswith("\n")
    while (newline := text.rfind("\n", 0, end)) >= 0:
        if used == room:
            start = newline + 1
            break
        used, end = used + 1, newline
    if len(text) - start > characters:
        start = after_escape(text, len(text) - characters)
    return start, used


def _blocks(items: Sequence[OutputItem]) -> str:
    """Text as preformatted blocks and images between them."""
    blocks: list[str] = []
    run: list[OutputItem] = []
    for item in items:
        image = _image(item)
        if image:
            blocks += [_pre(run), image]
            run = []
        else:
            run.append(item)
    blocks.append(_pre(run))
    return "".join(blocks) or f'<pre class="ddp-nothing" style="{_MUTED}">no output yet</pre>'


def _pre(items: Sequence[OutputItem]) -> str:
    """A run of text; what went to stderr is marked."""
    parts: list[str] = []
    line_open = False
    for item in items:
        newline = "\n" if line_open and item.what not in STREAMS else ""
        text = ansi_to_html(item.text)
        mark = _MARKS.get(item.what)
        parts.append(newline + (f"<span {mark}>{text}</span>" if mark else text))
        line_open = not item.text.endswith("\n")
    return f"<pre>{''.join(parts)}</pre>" if parts else ""


def _image(item: OutputItem) -> str:
    """An item's image, or nothing if it has none that a page can show."""
    if item.what in STREAMS:
        return ""
    for mime in _IMAGES:
        data = item.data.get(mime)
        if isinstance(data, str) and data:
            said = escape(str(item.data.get("text/plain", "image")))
            return f'<img src="data:{mime};base64,{escape(data)}" alt="{said}">'
    return ""


# --------------------------------------------------------------------------- style

# `.ddp-view` stands twice where the notebook's own rules for tables and code must not win;
# `!important` stands where the theme's colour goes before the one on the element.
_STYLE = """<style>
.ddp-view {
  --ddp-ok: var(--jp-success-color1, #2b9a4b); --ddp-busy: var(--jp-brand-color1, #2f7fe0);
  --ddp-warn: var(--jp-warn-color1, #d97b00); --ddp-bad: var(--jp-error-color1, #d93c3c);
  --ddp-idle: rgba(128, 128, 128, 0.75); --ddp-line: rgba(128, 128, 128, 0.3);
  --ddp-mono: var(--jp-code-font-family, ui-monospace, Menlo, Consolas, monospace);
  color: var(--jp-ui-font-color1, inherit); font-size: var(--jp-ui-font-size1, 13px);
  font-family: var(--jp-ui-font-family, system-ui, -apple-system, "Segoe UI", sans-serif);
  line-height: 1.45; padding: 4px 0; scrollbar-width: thin;
  scrollbar-color: var(--ddp-idle) transparent }
.ddp-view .ddp-view { padding: 0 }
.ddp-headline { font-size: 1.08em }
.ddp-view.ddp-view table.ddp-board { table-layout: auto; margin: 0; border: 0;
  font-size: 1em; font-variant-numeric: tabular-nums }
.ddp-view.ddp-view .ddp-board :is(th, td) { border: 0; background: none; color: inherit;
  font-weight: inherit; line-height: inherit; max-width: none }
.ddp-view.ddp-view .ddp-board thead th { font-size: 0.88em }
.ddp-view.ddp-view .ddp-board thead, .ddp-view.ddp-view .ddp-board thead tr { border: 0 }
.ddp-view.ddp-view .ddp-board tbody tr { --ddp-c: var(--ddp-idle); background: none;
  border-top: 1px solid var(--ddp-line) }
.ddp-board tbody th div { width: max-content; max-width: 12em; white-space: normal }
.ddp-view.ddp-view .ddp-board tr.ddp-ready { --ddp-c: var(--ddp-ok) }
.ddp-view.ddp-view .ddp-board tr:is(.ddp-running, .ddp-setting-up) { --ddp-c: var(--ddp-busy) }
.ddp-view.ddp-view .ddp-board tbody tr:is(.ddp-failed, .ddp-dead) { --ddp-c: var(--ddp-bad);
  background: color-mix(in srgb, var(--ddp-bad) 9%, transparent) !important;
  box-shadow: inset 3px 0 var(--ddp-bad) }
.ddp-view.ddp-view .ddp-board td.ddp-doing { max-width: 48em }
.ddp-doing div { overflow-wrap: anywhere; max-height: 12em;
  overflow-y: auto; font-family: var(--ddp-mono); font-size: 0.92em }
.ddp-host div { max-width: 12em; overflow: hidden; text-overflow: ellipsis }
.ddp-chip { font-size: 0.92em; font-weight: 500; border-color: var(--ddp-c) !important;
  background: color-mix(in srgb, var(--ddp-c) 16%, transparent) !important }
.ddp-strip .ddp-passed { background: var(--ddp-ok) !important }
.ddp-dead .ddp-strip .ddp-passed { background: var(--ddp-idle) !important }
.ddp-strip .ddp-entering { border-color: var(--ddp-busy) !important;
  animation: ddp-pulse 1.4s ease-in-out infinite }
.ddp-strip .ddp-failed { background: var(--ddp-bad) !important }
.ddp-view.ddp-view .ddp-board .ddp-silent td.ddp-heard {
  text-decoration: underline 2px var(--ddp-warn); text-underline-offset: 4px }
.ddp-view.ddp-view ul.ddp-notes { margin: 8px 0 0; padding: 0 0 0 12px; list-style: none }
.ddp-view.ddp-view .ddp-notes li { overflow-wrap: anywhere; margin: 0;
  padding-left: 12px; text-indent: -12px; opacity: 0.85 }
.ddp-notes li::before { content: "•"; display: inline-block; width: 12px; text-indent: 0 }
.ddp-who { font-size: 0.92em; margin-bottom: 2px }
.ddp-tail { max-height: 24em; overflow: auto; display: flex; flex-direction: column-reverse }
.ddp-view.ddp-view .ddp-tail pre { margin: 0; padding: 0; border: 0; background: none;
  color: inherit; font-family: var(--ddp-mono); font-size: var(--jp-code-font-size, 13px);
  line-height: 1.35; white-space: pre-wrap; overflow-wrap: anywhere }
.ddp-tail img { display: block; max-width: 100%; margin: 4px 0 }
.ddp-view.ddp-view .ddp-tail pre.ddp-nothing { font-style: italic }
.ddp-stderr { background: var(--jp-rendermime-error-background, rgba(217, 60, 60, 0.12))
  !important }
.ddp-elapsed { font-variant-numeric: tabular-nums }
.ddp-fg { color: color-mix(in srgb, var(--ddp-fg) 70%, currentColor) }
.ddp-bg { background: color-mix(in srgb, var(--ddp-bg) 35%, transparent) }
.ddp-bold { font-weight: 700 }
.ddp-italic { font-style: italic }
.ddp-underline { text-decoration: underline }
@keyframes ddp-pulse { 50% { opacity: 0.3 } }
@media (prefers-reduced-motion: reduce) { .ddp-strip .ddp-entering { animation: none } }
</style>"""
