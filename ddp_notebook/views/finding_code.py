"""The code of a finding: where each group of ranks is, and the line that decides, marked.

As text all of it is one listing, with labels below the code. A page has a column for each group,
or one for all where they are at the same lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import dedent

from ddp_notebook.model import Finding, Place, Side, name_ranks
from ddp_notebook.views import markup
from ddp_notebook.views.ansi import plain, preformatted
from ddp_notebook.views.table import WIDTH, wrapped

AT, WAY, DECIDES = "at", "way", "decides"
"""The kinds of marks: ranks are at a line, or below it; it decides who goes where."""

_SIGNS = {AT: "^", WAY: "-"}
_NARROWEST = 40
"""A label that would have less room than this stands on a line of its own."""
_COLOURS = {AT: markup.BAD, WAY: markup.IDLE, DECIDES: markup.WARN}


@dataclass(frozen=True)
class Mark:
    """A label on a line."""

    place: Place
    kind: str
    label: str


@dataclass(frozen=True)
class CodeLine:
    """A line as it is shown; with number 0 it stands for lines that are left out."""

    number: int
    text: str
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class Column:
    """What one group of ranks is at. `culprit`: one of its ranks is a culprit."""

    who: str
    at: str
    culprit: bool
    lines: tuple[CodeLine, ...]


def columns(finding: Finding) -> list[Column]:
    """Return a column for each group of ranks, or one for all where they are at the same lines."""
    sides = finding.sides
    placed = [side for side in sides if side.place is not None]
    groups = [sides] if _alike(placed) or len(sides) < 2 else [(side,) for side in sides]
    made, decides = [], _deciding(finding)
    for group in groups:
        marks = [mark for side in group for mark in _marks(side, group, nested=False)]
        # The line that decides is marked once, beside whom it sent away from the others.
        files = {mark.place.file for mark in marks} or {mark.place.file for mark in decides}
        own = [mark for mark in decides if mark.place.file in files or group is groups[-1]]
        decides = [mark for mark in decides if mark not in own]
        ranks = tuple(sorted({rank for side in group for rank in side.ranks} or finding.ranks))
        first = next((side.place for side in group if side.place is not None), None)
        at = f"{first.file}, {first.function}()" if first and first.function else ""
        told = at or (first.file if first else group[0].call if group else "")
        made.append(
            Column(
                name_ranks(ranks) if ranks else "",
                plain(told),
                bool(set(ranks) & set(finding.ranks)),
                tuple(line for _, lines in _listed(finding, [*own, *marks], 1) for line in lines),
            )
        )
    return [column for column in made if column.lines or column.at]


def _alike(sides: Sequence[Side]) -> bool:
    """True where all of these are at the same lines."""
    return len({(side.path[:1], side.place) for side in sides}) < 2


def _deciding(finding: Finding) -> list[Mark]:
    decides = finding.decides
    return [Mark(decides.place, DECIDES, plain(decides.label))] if decides is not None else []


def _marks(side: Side, group: Sequence[Side], *, nested: bool) -> Iterator[Mark]:
    """Yield the marks of a side: at its line, and at the first one of the way there.

    Of ranks at one line the label says in what they differ. `nested`: the last line is told in the
    label of the first.
    """
    place = side.place
    if place is None:
        return
    who, first = name_ranks(side.ranks), side.path[0] if side.path else place
    told = side.told
    others = [other for other in group if other is not side and other.place == place]
    for value in ("tensor", "call"):
        values = [getattr(each, value) for each in (side, *others)]
        if all(values) and len(set(values)) > 1:
            told = f"{who}: {values[0]}"
            break
    if (first.file, first.line) == (place.file, place.line):
        yield Mark(place, AT, plain(told))
    elif nested:
        line = (
            f"line {place.line}" if place.file == first.file else f"{place.file}, line {place.line}"
        )
        code = f", `{place.text}`" if place.text else ""
        yield Mark(first, WAY, plain(f"{who} {side.state} in here: {line}{code}{side.detail}"))
    else:
        yield Mark(first, WAY, "")
        yield Mark(place, AT, plain(told))


def _listed(
    finding: Finding, marks: Sequence[Mark], near: int
) -> Iterator[tuple[str, list[CodeLine]]]:
    """Yield each file with its marked lines, and up to `near` before and after each."""
    known = {excerpt.file: dict(excerpt.lines) for excerpt in finding.code}
    for file in dict.fromkeys(mark.place.file for mark in marks):
        texts = known.get(file, {})
        at: dict[int, list[Mark]] = {}
        for mark in marks:
            if mark.place.file == file:
                at.setdefault(mark.place.line, []).append(mark)
                texts.setdefault(mark.place.line, mark.place.text)
        shown = {n for line in at for n in range(line - near, line + near + 1) if n in texts}
        # One line or two between others are shown: to leave them out would save nothing.
        for first, last in zip(sorted(shown), sorted(shown)[1:], strict=False):
            between = range(first + 1, last)
            if len(between) <= 2 and texts.keys() >= set(between):
                shown.update(between)
        numbers = [n for n in sorted(shown) if n in at or texts[n].strip()]
        code = dedent("\n".join(_code(texts[n]) for n in numbers)).split("\n")
        lines: list[CodeLine] = []
        for number, text in zip(numbers, code, strict=True):
            if lines and number > lines[-1].number + 1 and not _is_blank(texts, lines[-1], number):
                lines.append(CodeLine(0, ""))
            lines.append(CodeLine(number, text, tuple(dict.fromkeys(at.get(number, ())))))
        yield file, lines


def _is_blank(texts: dict[int, str], last: CodeLine, number: int) -> bool:
    between = range(last.number + 1, number)
    return all(n in texts and not texts[n].strip() for n in between)


def _code(text: str) -> str:
    """A line of code, its indentation kept."""
    return preformatted(text)[0]


# -- text --------------------------------------------------------------------------------


def text(finding: Finding) -> str:
    """Return the listing, with labels below and behind the code; empty where no line is known."""
    marks = _deciding(finding)
    marks += [mark for side in finding.sides for mark in _marks(side, finding.sides, nested=True)]
    listings = list(_listed(finding, marks, 0))
    digits = max((len(str(line.number)) for _, lines in listings for line in lines), default=1)
    shown: list[str] = []
    for file, lines in listings:
        shown += [f"{' ' * digits}--> {plain(file)}", f"{' ' * digits} |"]
        for line in lines:
            shown += _line_text(line, digits)
    return "\n".join(line.rstrip() for line in shown)


def _line_text(line: CodeLine, digits: int) -> Iterator[str]:
    """Yield a line with what is said of it: carets below it, and the labels of the ranks there."""
    if not line.number:
        yield f"{'⋮':>{digits}} |"
        return
    gutter, margin = f"{' ' * digits} | ", f"{line.number:>{digits}} | "
    code = line.text[: WIDTH - len(margin)]
    behind = next((f"  <- {mark.label}" for mark in line.marks if mark.kind == DECIDES), "")
    fits = len(margin) + len(code) + len(behind) <= WIDTH
    yield f"{margin}{code}{behind if fits else ''}"
    indent = len(code) - len(code.lstrip())
    if not fits:
        yield from _wrapped(f"{gutter}{' ' * indent}", behind.strip())
    here = [mark for mark in line.marks if mark.kind != DECIDES]
    if not here:
        return
    signs = _SIGNS[here[0].kind] * max(1, len(code.strip()))
    start = f"{gutter}{' ' * indent}{signs} "
    labels = "   ".join(mark.label for mark in here)
    if len(start) + len(labels) <= WIDTH:
        yield f"{start}{labels}"
        return
    if WIDTH - len(start) < _NARROWEST:
        yield start
        start = f"{gutter}{' ' * indent}"
    for mark in here:
        yield from _wrapped(start, mark.label)
        start = f"{gutter}{' ' * (len(start) - len(gutter))}"


def _wrapped(start: str, label: str) -> Iterator[str]:
    further = f"{start.partition('|')[0]}|{' ' * (len(start) - start.index('|') - 1)}"
    for index, part in enumerate(wrapped(label, max(_NARROWEST, WIDTH - len(start)))):
        yield f"{further if index else start}{part}"


# -- HTML --------------------------------------------------------------------------------

_FRAME = f"margin: 8px 0 0 1.3em; border: 1px solid rgba({markup.IDLE}, 0.3); border-radius: 4px"
_COLUMN = "display: inline-block; vertical-align: top; box-sizing: border-box"
_HALF = f"{_COLUMN}; width: 50%; min-width: 21em"
_WHO = f"padding: 3px 10px; border-bottom: 1px solid rgba({markup.IDLE}, 0.3); font-size: 0.92em"
_PRE = (
    "margin: 0; padding: 4px 0; border: 0; line-height: 1.5; white-space: pre-wrap;"
    f" color: inherit; background: rgba({markup.IDLE}, 0.06); {markup.BREAKABLE}; {markup.MONO}"
)
_LINE = "padding: 0 10px 0 3.6em; text-indent: -2.8em"
_NUMBER = (
    "display: inline-block; width: 2em; margin-right: 0.8em; text-align: right; text-indent: 0"
)


def html(finding: Finding) -> str:
    """Return the columns; empty where no line is known."""
    made = columns(finding)
    if not any(column.lines for column in made):
        return ""
    style = f"{_COLUMN}; width: 100%" if len(made) == 1 else _HALF
    return f'<div style="{_FRAME}">{"".join(_column(each, style) for each in made)}</div>'


def _column(column: Column, style: str) -> str:
    colour = f"; color: rgb({markup.BAD})" if column.culprit else ""
    at = f' <span style="{markup.MUTED}">· {markup.words(column.at)}</span>' if column.at else ""
    lines = "".join(map(_line, column.lines))
    code = f'<pre style="{_PRE}">{lines}</pre>' if lines else ""
    who = f'<b style="font-weight: 600{colour}">{markup.words(column.who)}</b>{at}'
    return f'<div style="{style}"><div style="{_WHO}">{who}</div>{code}</div>'


def _line(line: CodeLine) -> str:
    number = f'<span style="{_NUMBER}; {markup.MUTED}">{line.number or "⋮"}</span>'
    kind = next((mark.kind for mark in line.marks), "")
    tone = f"; background: rgba({_COLOURS[kind]}, 0.16)" if kind in (AT, DECIDES) else ""
    labels = "".join(
        f'  <span style="color: rgb({_COLOURS[mark.kind]})">◂ '
        f"{escape(mark.label, quote=False)}</span>"
        for mark in line.marks
        if mark.label
    )
    code = escape(line.text, quote=False)
    return f'<div style="{_LINE}{tone}">{number}{code}{labels}</div>'
