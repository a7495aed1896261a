"""The one table: columns and rows in, text of fixed width and HTML out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, zip_longest
from textwrap import TextWrapper

from ddp_notebook.views import markup
from ddp_notebook.views.ansi import plain

WIDTH = 100
"""The width of a line of text in characters, boards apart."""
_GAP = "  "
_BREAK = "\x0b"
"""A place inside a rank set at which a line may end: a space for textwrap, then taken out."""
_LONG_RANK_SET = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?){7,}")

_TABLE = (
    "border-collapse: collapse; table-layout: auto; margin: 0; color: inherit;"
    " font-variant-numeric: tabular-nums"
)
_ALIGNED = "vertical-align: baseline; padding: 5px 12px; color: inherit; line-height: 1.4"
_LINE = f"border-top: 1px solid rgba({markup.IDLE}, 0.3)"


@dataclass(frozen=True, slots=True)
class Column:
    """How the values of a column are shown.

    In text a value longer than `widest` is folded into lines, or cut if `cuts`. The column that
    `fills` has the width that the others leave, at least `narrowest`; of more than `most_lines`
    the first are shown (0: all).
    """

    header: str
    widest: int = 1_000
    cuts: bool = False
    fills: bool = False
    narrowest: int = 9
    most_lines: int = 0
    always: bool = False
    """Shown even if no row has a value in it."""
    names_row: bool = False
    """Its value names the row: a header for screen readers."""
    rank_set: bool = False
    """Lines may end behind any comma."""
    right: bool = False
    """Numbers, which are ours: their last spaces stay, and keep decimal points in line."""
    breaks: bool = False
    """A page may break values behind a comma or a slash."""

    def fold(self, cell: Cell, room: int) -> list[str]:
        """The lines that a cell takes in text. Never empty."""
        if self.right:
            return [cell.text]
        text = plain(cell.text)
        if self.cuts:
            lines = [text if len(text) <= self.widest else f"{text[: self.widest - 1]}…"]
        elif self.fills:
            lines = wrapped(text, room, self.most_lines)
        else:
            lines = wrapped(text, self.widest, any_comma=self.rank_set)
        if cell.remedy:
            first, *rest = wrapped(plain(cell.remedy), room - 2) or [""]
            lines += [f"→ {first}", *(f"  {line}" for line in rest)]
        return lines or [""]

    def align(self, text: str, width: int) -> str:
        """`text` with the spaces that make it `width` wide."""
        return text.rjust(width) if self.right else text.ljust(width)

    def style(self, text: str) -> str:
        """How a cell of a page looks."""
        if self.fills:
            wrap = f"white-space: pre-wrap; {markup.BREAKABLE}; min-width: 12em; max-width: 60em"
        # Characters of a row's name that stays on one line of a page.
        elif self.names_row and len(text) > 24:
            wrap = "max-width: 14em"
        else:  # a browser would break 0-2 behind its hyphen
            wrap = "white-space: nowrap"
        weight = "; font-weight: 600" if self.names_row else ""
        return f"text-align: {'right' if self.right else 'left'}; {_ALIGNED}; {wrap}{weight}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One value, and what a page shows with it: a chip's `colour`, markup `before` it."""

    text: str
    remedy: str = ""
    """A remedy, on lines of its own behind an arrow."""
    colour: str = ""
    before: str = ""
    bold: bool = False

    def html(self, column: Column, css_class: str) -> str:
        """The cell as an element."""
        text = escape(self.text, quote=False)
        if self.colour:
            text = markup.chip(self.text, self.colour)
        elif column.breaks or column.rank_set:
            text = markup.breakable(self.text)
        elif column.right:
            # HTML drops spaces at the end of a cell, and decimal points would not be below each
            # other: those here are as wide as a digit.
            text = text.rstrip(" ").ljust(len(text), "\N{FIGURE SPACE}")
        elif self.before:
            text = f"<span>{text}</span>"
        text = self.before + text
        if self.remedy:
            remedy = escape(plain(self.remedy), quote=False)
            text += f'<div style="font-weight: 600">→ {remedy}</div>'
        # What is cut is seen when the pointer rests on it.
        title = f' title="{escape(self.text)}"' if column.cuts else ""
        style = column.style(self.text) + "; font-weight: 600" * self.bold
        tag, scope = ("th", ' scope="row"') if column.names_row else ("td", "")
        css = f' class="{css_class}"' if css_class else ""
        return f'<{tag}{scope}{css} style="{style}"><div{title}>{text}</div></{tag}>'


@dataclass(frozen=True, slots=True)
class Row:
    """The cells of a row, one per column. `colour` tints it on a page."""

    cells: Sequence[Cell]
    colour: str = ""
    css_class: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under the headers of their columns. A column in which no row has a value is left out.

    `width` is how many columns of characters the text aims to stay within. With a `css_class`
    the cells have classes too, for a style sheet.
    """

    columns: Sequence[Column]
    rows: Sequence[Row]
    width: int = 100
    css_class: str = ""

    def text(self) -> str:
        """Header, rule and rows; every column as wide as its widest line."""
        columns, cells = self._used()
        rows = [[Cell(column.header) for column in columns], *cells]
        room = self._room(columns, rows)
        # Each cell is folded into lines first; then a column is as wide as its widest line, and a
        # row as high as its highest cell.
        folded = [
            [column.fold(row[index], room) for row in rows] for index, column in enumerate(columns)
        ]
        widths = [max(len(line) for cell in column for line in cell) for column in folded]
        blocks: list[Sequence[Sequence[str]]] = list(zip(*folded, strict=True))
        blocks.insert(1, [["─" * width] for width in widths])
        lines = chain.from_iterable(zip_longest(*block, fillvalue="") for block in blocks)
        return "\n".join(
            _GAP.join(map(Column.align, columns, texts, widths)).rstrip() for texts in lines
        )

    def html(self) -> str:
        """The table as an element that scrolls where it is too wide. Needs no style sheet."""
        columns, rows = self._used()
        head = body = ""
        for column in columns:
            style = f"text-align: {'right' if column.right else 'left'}; {_ALIGNED}; {markup.MUTED}"
            style += "; font-weight: 400; white-space: nowrap"
            head += f'<th scope="col" style="{style}">{escape(column.header)}</th>'
        for row, own in zip(self.rows, rows, strict=True):
            cells = ""
            for column, cell in zip(columns, own, strict=True):
                cells += cell.html(
                    column, f"ddp-{column.header.replace(' ', '-')}" if self.css_class else ""
                )
            tint = f"background: rgba({row.colour}, 0.09)" if row.colour else "background: none"
            css = f' class="{row.css_class}"' if row.css_class else ""
            body += f'<tr{css} style="{_LINE}; {tint}">{cells}</tr>'
        css = f' class="{self.css_class}"' if self.css_class else ""
        return (
            f'<div class="ddp-scroll" style="overflow-x: auto; margin: 2px 0 0"><table{css}'
            f' style="{_TABLE}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )

    def _used(self) -> tuple[list[Column], list[list[Cell]]]:
        """The columns in which a row has a value, and those that are always there; their cells."""
        used = [
            index
            for index, column in enumerate(self.columns)
            if column.always or any(row.cells[index].text for row in self.rows)
        ]
        cells = [[row.cells[index] for index in used] for row in self.rows]
        return [self.columns[index] for index in used], cells

    def _room(self, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> int:
        """The width that the other columns leave for the one that fills."""
        taken = len(_GAP) * (len(columns) - 1)
        narrowest = 0
        for index, column in enumerate(columns):
            # The one column that fills takes what the others leave; a long value there is folded,
            # and never pushes the table out of the page.
            if column.fills:
                narrowest = column.narrowest
            else:
                lines = (line for row in rows for line in column.fold(row[index], self.width))
                taken += max(map(len, lines))
        return max(narrowest, self.width - taken)


def wrapped(text: str, width: int, most_lines: int = 0, *, any_comma: bool = False) -> list[str]:
    """`text`, which is one line, in lines of `width`.

    A long rank set is broken behind its commas, with `any_comma` every rank set. Of more than
    `most_lines` lines (if not 0) the first are given, the last of them with an ellipsis.
    """
    # textwrap breaks lines at spaces only. A vertical tab stands for a break inside a rank set, as
    # no text of ranks can hold one (`plain`).
    if any_comma:
        text = text.replace(",", f",{_BREAK}")
    else:
        text = _LONG_RANK_SET.sub(lambda ranks: ranks[0].replace(",", f",{_BREAK}"), text)
    wrapper = TextWrapper(
        width,
        replace_whitespace=False,
        expand_tabs=False,
        break_on_hyphens=False,
        max_lines=most_lines or None,
        placeholder=" …",
    )
    if most_lines:
        # textwrap looks at all of the text before it drops lines.
        text = text[: width * (most_lines + 1)]  # a rank may raise a megabyte
    return [line.replace(_BREAK, "") for line in wrapper.wrap(text)]


def indented(text: str, first: str) -> str:
    """`text` behind `first`, its further lines indented as far."""
    lines = wrapped(text, WIDTH - len(first)) or [""]
    starts = [first, *[" " * len(first)] * (len(lines) - 1)]
    return "\n".join(f"{start}{line}".rstrip() for start, line in zip(starts, lines, strict=True))


def age_words(seconds: float) -> str:
    """Return a rounded time span: ``< 1 s``, ``12 s``, ``3 min``, ``2 h``, ``5 d``."""
    if seconds < 1:
        return "< 1 s"
    for unit, worth in (("d", 86_400), ("h", 3600), ("min", 60)):
        # From two units on, as rounded: a healthy rank's text does not change all the time.
        if seconds >= 1.9916 * worth:
            return f"{seconds / worth:.0f} {unit}"
    return f"{seconds:.0f} s"
