"""Long output of ranks, folded: the first and the last lines are seen, a click shows all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ddp_notebook.model import OutputGroup, OutputItem, Ranks, format_ranks, name_ranks
from ddp_notebook.views import markup
from ddp_notebook.views.ansi import strip_ansi
from ddp_notebook.views.output import GROUP, blocks, item_text
from ddp_notebook.views.output_log import STREAMS

_FOLD_FROM = 150
"""Up to this many lines of all ranks together nothing is folded."""
_LONG = 40
"""With more lines, a piece of text that is longer than this is folded."""
_FIRST, _LAST = 6, 12
"""Lines of it that are seen."""

Piece = tuple[OutputItem, ...]


def are_long(groups: Sequence[OutputGroup]) -> bool:
    """True when there is so much text that it is to be folded."""
    return sum(_lines(item) for group in groups for item in group.items) > _FOLD_FROM


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
    return piece[0].what in STREAMS and sum(map(_lines, piece)) > _LONG


def bundle(ranks: Ranks, piece: Piece) -> dict[str, str]:
    """A long piece of text as HTML with all of it, and as text that says how to get it."""
    first, rest = _cut(piece, _FIRST)
    middle, last = _cut(rest, sum(map(_lines, rest)) - _LAST)
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
        end = _end_of_line(item.text, lines)
        head = (replace(item, text=item.text[:end]),) if end else ()
        return (*before, *head), (replace(item, text=item.text[end:]), *piece[index + 1 :])
    return tuple(before), ()


def _end_of_line(text: str, lines: int) -> int:
    end = 0
    for _ in range(lines):
        end = text.index("\n", end) + 1
    return end
