"""Text that ranks wrote, made safe: without what moves a cursor, or as HTML.

Colours are written as CSS variables on spans of class ``ddp-fg`` and ``ddp-bg``; the style
sheet in `views.markup` mixes them with the theme's text colour, so that a dark green is
readable on a dark page too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from html import escape

# A rank may print anything. In a terminal an escape code could move the cursor over our own words,
# set the title or, by OSC 52, the clipboard; in a page it would be garbage. So all are known here,
# and all but colours are dropped.
_ESCAPE = re.compile(
    r"\x1b\[(?P<codes>[0-?]*)[ -/]*(?P<final>[@-~]|\Z)"  # CSI: colours, cursor; or cut at the end
    r"|\x1b[\]P^_][^\x07\x1b\n]*(?:\x07|\x1b\\|\Z)"  # OSC and its like: titles, hyperlinks
    r"|\x1b[ -/]*[0-~]?"  # two-character escapes, and a lone ESC
)


# JupyterLab's own sixteen, so that a traceback looks as it does elsewhere in the notebook.
_BASIC = (
    *("#3e424d", "#e75c58", "#00a250", "#ddb62b", "#208ffb", "#d160c4", "#60c6c8", "#c5c1b4"),
    *("#282c36", "#b22b31", "#007427", "#b27d12", "#0065ca", "#a03196", "#258f8f", "#a1a6b2"),
)

# The pen is a value that is replaced, so equal looks are made once (lru_cache).
_SETS: dict[int, dict[str, str | bool]] = {
    1: {"bold": True},
    3: {"italic": True},
    4: {"underline": True},
    **{30 + n: {"fg": _BASIC[n]} for n in range(8)},
    **{90 + n: {"fg": _BASIC[8 + n]} for n in range(8)},
    **{40 + n: {"bg": _BASIC[n]} for n in range(8)},
    **{100 + n: {"bg": _BASIC[8 + n]} for n in range(8)},
    22: {"bold": False},
    23: {"italic": False},
    24: {"underline": False},
    39: {"fg": ""},
    49: {"bg": ""},
}
_EXTENDED = {38: "fg", 48: "bg"}


@dataclass(frozen=True, slots=True)
class _Pen:
    """The style of the following text. Colours are ``#rrggbb``, or empty for the theme's."""

    bold: bool = False
    italic: bool = False
    underline: bool = False
    fg: str = ""
    bg: str = ""

    def write(self, text: str) -> str:
        """`text`, escaped, in a span if it has any style."""
        body = escape(text, quote=False)
        span = _span(self) if body else ""
        return f"{span}{body}</span>" if span else body


@lru_cache(maxsize=256)
def _span(pen: _Pen) -> str:
    """The tag that begins text of this look; empty for plain text."""
    names = {
        "ddp-fg": pen.fg,
        "ddp-bg": pen.bg,
        "ddp-bold": pen.bold,
        "ddp-italic": pen.italic,
        "ddp-underline": pen.underline,
    }
    classes = " ".join(name for name, on in names.items() if on)
    colours = (("fg", pen.fg), ("bg", pen.bg))
    style = ";".join(f"--ddp-{name}:{colour}" for name, colour in colours if colour)
    inline = f' style="{style}"' if style else ""
    return f'<span class="{classes}"{inline}>' if classes else ""


def strip_ansi(text: str) -> str:
    """`text` without its escape codes."""
    return _ESCAPE.sub("", text) if "\x1b" in text else text


def plain(text: str) -> str:
    """`text` on one line, without escape codes and what would move the cursor."""
    return " ".join("".join(map(_in_a_line, strip_ansi(text))).split())


def visible(name: str) -> str:
    """A name as given, in which what is not printable is written as in Python's repr: `\\x1b`."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)


def preformatted(text: str) -> list[str]:
    """The lines of `text`, spaces as they are, without what would move the cursor."""
    lines = strip_ansi(text).expandtabs(4).splitlines() or [""]
    return ["".join(map(_in_a_line, line)).rstrip() for line in lines]


def _in_a_line(character: str) -> str:
    """A printable character itself, a space for other whitespace, nothing for control codes."""
    # Also bidirectional marks and zero-width characters are not printable: they could make a name
    # read as another one.
    if character.isprintable():
        return character
    return " " if character.isspace() else ""


def ansi_to_html(text: str) -> str:
    """`text` escaped for HTML, its colours and its bold, italic and underlined parts as spans.

    Every other escape code is dropped. Spans do not nest and are always closed.
    """
    # Most text has no colours, and this runs for each drawing of a live cell.
    if "\x1b" not in text:
        return escape(text, quote=False)
    parts: list[str] = []
    pen, end = _Pen(), 0
    for match in _ESCAPE.finditer(text):
        parts.append(pen.write(text[end : match.start()]))
        end = match.end()
        # Every other code moves the cursor or changes the terminal, which a page has not.
        if match["final"] == "m":
            pen = _apply(pen, match["codes"])
    parts.append(pen.write(text[end:]))
    return "".join(parts)


def after_escape(text: str, cut: int) -> int:
    """`cut`, moved if it lies within an escape code."""
    # The longest escape code that a cut may split, in characters.
    start = text.rfind("\x1b", max(0, cut - 64), cut)
    match = _ESCAPE.match(text, start) if start >= 0 else None
    return max(cut, match.end()) if match else cut


@lru_cache(maxsize=256)
def _apply(pen: _Pen, codes: str) -> _Pen:
    """The pen after the colour codes between ``ESC[`` and ``m``; unknown ones change nothing."""
    # With a 0 before each, an empty code means 0. What is not a number becomes -1, no code.
    words = f"0{codes}".replace(";", ";0").split(";")
    numbers = iter([int(word) if len(word) < 5 and word.isdecimal() else -1 for word in words])
    for number in numbers:
        if number == 0:
            pen = _Pen()
        elif number in _EXTENDED:
            if colour := _extended(numbers):
                pen = replace(pen, **{_EXTENDED[number]: colour})  # type: ignore[arg-type]
        elif number in _SETS:
            pen = replace(pen, **_SETS[number])  # type: ignore[arg-type]
    return pen


def _extended(numbers: Iterator[int]) -> str:
    """The colour after 38 or 48 (``5;n`` or ``2;r;g;b``); empty for another code.

    The terminal's 256 colours are 16 basic ones, a 6x6x6 cube and a ramp of greys.
    """
    mode = next(numbers, -1)
    values = [next(numbers, -1) for _ in range({5: 1, 2: 3}.get(mode, 0))]
    if not values or not all(0 <= value <= 255 for value in values):
        return ""
    if mode == 5:
        (index,) = values
        if index < 16:
            return _BASIC[index]
        levels = (0, 95, 135, 175, 215, 255)  # of each of red, green and blue
        cube = [levels[(index - 16) // step % 6] for step in (36, 6, 1)]
        values = cube if index < 232 else [8 + 10 * (index - 232)] * 3
    return "#{:02x}{:02x}{:02x}".format(*values)
