"""The output of ranks: as text, and as the HTML of a running cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape

from ddp_notebook.model import (
    OutputGroup,
    OutputItem,
    OutputKind,
    Ranks,
    counted,
    format_ranks,
    name_ranks,
)
from ddp_notebook.views import markup
from ddp_notebook.views.ansi import after_escape, ansi_to_html, strip_ansi
from ddp_notebook.views.output_log import STREAMS, bars_apart

_IMAGES = ("image/png", "image/jpeg")
_MARKS = {OutputKind.STDERR: f'class="ddp-stderr" style="background: rgba({markup.BAD}, 0.12)"'}
GROUP = f"margin-bottom: 10px; padding-left: 9px; border-left: 3px solid rgba({markup.IDLE}, 0.3)"


# -- text --------------------------------------------------------------------------------


def outputs(groups: Sequence[OutputGroup]) -> str:
    """Return the output of ranks, each piece under the ranks that it came from."""
    shown = []
    for group in groups:
        body = ""
        for item in group.items:
            # Streams continue where they ended; anything else begins on a new line.
            text = item_text(item)
            on_new_line = text and body and body[-1] != "\n" and item.what not in STREAMS
            body += f"\n{text}" if on_new_line else text
        body = strip_ansi(body).rstrip("\n") or "(no output)"
        shown.append(f"── {name_ranks(group.ranks)} ──\n{body}")
    return "\n\n".join(shown)


def item_text(item: OutputItem) -> str:
    """An item as text, with its colours: a display by its ``text/plain`` or by its type."""
    if item.what in STREAMS:
        return item.text.removesuffix("\r")  # what would overwrite the line has not come yet
    text = item.text or str(item.data.get("text/plain", ""))
    if not text and item.data:
        text = f"(display: {', '.join(sorted(item.data))})"
    return f"{text}\n" if text and not text.endswith("\n") else text


# -- a running cell ------------------------------------------------------------------------


def live(groups: Sequence[OutputGroup], below_html: str, doing: str, tail_lines: int = 60) -> str:
    """Return the display of a running cell: the end of each group's output, the line on its
    activity, and more.

    Of each group the last `tail_lines` lines are shown (an image counts as several), and above them
    how much is left out. HTML that a rank displays is not put into the page: its ``text/plain`` is
    shown. `below_html` is empty or a view's.
    """
    style = "" if markup.STYLE in below_html else markup.STYLE
    shown = ""
    for group in groups:
        tail, above = _tail(group.items, max(tail_lines, 1))
        left_out = f'<span class="ddp-left-out" style="{markup.MUTED}"> · {above}</span>'
        left_out = left_out if above else ""
        shown += (  # scrolled to its last line by the style of ddp-tail
            f'<div class="ddp-group" style="{GROUP}">'
            f'<div class="ddp-who"><b>{name_ranks(group.ranks)}</b>{left_out}</div>'
            f'<div class="ddp-tail"><div>{blocks(tail)}</div></div></div>'
        )
    return (
        f'<div class="ddp-view ddp-live">{style}{shown}'
        f'<div class="ddp-elapsed" style="{markup.MUTED}; margin-bottom: 8px">'
        f"{escape(strip_ansi(doing), quote=False)}</div>{below_html}</div>"
    )


def _tail(items: Sequence[OutputItem], lines: int) -> tuple[list[OutputItem], str]:
    """The last `lines` lines of `items`, and how much is above them in words; empty for nothing.

    Of the text above only the lines are counted.
    """
    tail: list[OutputItem] = []
    lines_above = images_above = 0
    in_line = False  # whether the beginning of the first line is cut off
    # Where lines have more than 200 characters on average, fewer are shown.
    room, characters = lines, lines * 200
    # From the end: a rank may have written a million lines, and only the last ones are looked at.
    for item in reversed(items):
        if _image(item):
            images_above += room <= 0
            if room > 0:
                tail.append(item)
                # An image is about as high as 20 lines.
                room -= 20
            continue
        text = item_text(item)
        start, used = _last_lines(text, room, characters)
        # What is cut must not begin within an escape code (`after_escape`), or its rest would be
        # shown as text.
        if start < len(text):
            tail.append(OutputItem(item.what, text[start:]))
            in_line = start > 0 and text[start - 1] != "\n"
        lines_above += text.count("\n", 0, start)
        characters -= len(text) - start
        room = room - used if start == 0 and characters > 0 else 0
    counts = ((lines_above, "line"), (images_above, "image"))
    above = [counted(count, what) for count, what in counts if count]
    above += ["the beginning of a line"] * in_line
    return tail[::-1], f"{', '.join(above)} above" if above else ""


def _last_lines(text: str, room: int, characters: int) -> tuple[int, int]:
    """Where the last `room` lines of `text` begin, and how many they are.

    Fewer lines if they have more than `characters`.
    """
    if room <= 0 or not text:
        return len(text), 0
    start, used, end = 0, 1, len(text) - text.endswith("\n")
    while (newline := text.rfind("\n", 0, end)) >= 0:
        if used == room:
            start = newline + 1
            break
        used, end = used + 1, newline
    # A rank may write a megabyte without a newline.
    if len(text) - start > characters:
        start = after_escape(text, len(text) - characters)
    return start, used


def blocks(items: Sequence[OutputItem]) -> str:
    """Text as preformatted blocks and images between them."""
    parts: list[str] = []
    run: list[OutputItem] = []
    for item in bars_apart(items):
        image = _image(item)
        if image:
            parts += [_pre(run), image]
            run = []
        else:
            run.append(item)
    parts.append(_pre(run))
    return "".join(parts) or f'<pre class="ddp-nothing" style="{markup.MUTED}">no output yet</pre>'


def _pre(items: Sequence[OutputItem]) -> str:
    """A piece of text; stderr is marked."""
    parts: list[str] = []
    # A traceback after `print(x, end="")` begins on a line of its own.
    line_open = False
    for item in items:
        newline = "\n" if line_open and item.what not in STREAMS else ""
        text = ansi_to_html(item.text)
        mark = _MARKS.get(item.what)
        parts.append(newline + (f"<span {mark}>{text}</span>" if mark else text))
        line_open = not item.text.endswith("\n")
    return f"<pre>{''.join(parts)}</pre>" if parts else ""


def _image(item: OutputItem) -> str:
    """An item's image; nothing without one that a page can show."""
    if item.what in STREAMS:
        return ""
    for mime in _IMAGES:
        # Only images: HTML of a rank would run in the page with the rights of the notebook, and a
        # script in it could press the board's buttons.
        data = item.data.get(mime)
        if isinstance(data, str) and data:
            alt = escape(str(item.data.get("text/plain", "image")))
            return f'<img src="data:{mime};base64,{escape(data)}" alt="{alt}">'
    return ""


# -- long output, folded -----------------------------------------------------------------


Piece = tuple[OutputItem, ...]


def are_long(groups: Sequence[OutputGroup]) -> bool:
    """True when there is so much text that it is to be folded."""
    return sum(_lines(item) for group in groups for item in group.items) > 150


def pieces(items: Sequence[OutputItem]) -> Iterator[Piece]:
    """The text between displays as one piece; each display by itself."""
    text: list[OutputItem] = []
    for item in items:
        if item.what in STREAMS:
            text.append(item)
            continue
        if text:
            yield tuple(text)
        text = []
        yield (item,)
    if text:
        yield tuple(text)


def is_long(piece: Piece) -> bool:
    """True of text that is folded where there is much of it."""
    return piece[0].what in STREAMS and sum(map(_lines, piece)) > 40


def bundle(ranks: Ranks, piece: Piece) -> dict[str, str]:
    """A long piece of text as HTML with all of it, and as text that says how to get it."""
    # More is seen of the end: an error stands there.
    first, rest = _cut(piece, 6)
    middle, last = _cut(rest, sum(map(_lines, rest)) - 12)
    # The middle is in the page, too, and a click opens it: nothing is lost that a notebook is to
    # keep.
    count = sum(map(_lines, middle))
    summary = f"{count:,} more lines"
    html = (
        f'<div class="ddp-view">{markup.STYLE}<div class="ddp-folded" style="{GROUP}">'
        f'{blocks(first)}<details><summary style="cursor: pointer; {markup.MUTED}">{summary} of '
        f"{name_ranks(ranks)}</summary>{blocks(middle)}</details>{blocks(last)}</div></div>"
    )
    lines = sum(map(_lines, piece))
    left_out = (
        f"[... {summary}. All of it: %ddp_output --ranks {format_ranks(ranks[:1])} "
        f"--tail {lines}]\n"
    )
    text = "".join((*map(item_text, first), left_out, *map(item_text, last)))
    return {"text/plain": strip_ansi(text).rstrip("\n"), "text/html": html}


def whole(groups: Sequence[OutputGroup]) -> dict[str, str]:
    """All that ranks wrote as one MIME bundle; with much text the long pieces are folded."""
    long, html, text = are_long(groups), [], []
    for group in groups:
        who = name_ranks(group.ranks)
        text.append(f"── {who} ──")
        html.append(f'<div class="ddp-who"><b>{who}</b></div>')
        for piece in pieces(group.items):
            if long and is_long(piece):
                folded = bundle(group.ranks, piece)
                html.append(folded["text/html"])
                text.append(folded["text/plain"])
                continue
            html.append(f'<div class="ddp-folded" style="{GROUP}">{blocks(piece)}</div>')
            text.append(strip_ansi("".join(map(item_text, piece))).rstrip("\n"))
    style = markup.STYLE if html else ""
    return {
        "text/plain": "\n".join(text),
        "text/html": f'<div class="ddp-view">{style}{"".join(html)}</div>',
    }


def _lines(item: OutputItem) -> int:
    text = item_text(item) if item.what in STREAMS else ""
    return text.count("\n") + (not text.endswith("\n") if text else 0)


def _cut(piece: Piece, lines: int) -> tuple[Piece, Piece]:
    """The first `lines` lines of a text, and the others."""
    before: list[OutputItem] = []
    for index, item in enumerate(piece):
        count = _lines(item)
        if count <= lines:
            before.append(item)
            lines -= count
            continue
        end = 0
        for _ in range(lines):
            end = item.text.index("\n", end) + 1
        head = (replace(item, text=item.text[:end]),) if end else ()
        return (*before, *head), (replace(item, text=item.text[end:]), *piece[index + 1 :])
    return tuple(before), ()
