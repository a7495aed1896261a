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
from ddp_notebook.views.table import WIDTH, indented, wrapped

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


def columns(finding: Finding, before: int = 1) -> list[Column]:
    """Return a column for each group of ranks, or one for all where they are at the same lines.

    `before` each marked line so many others are shown.
    """
    if not finding.places:
        return []
    # The culprits stand first, on the left.
    sides = sorted(finding.sides, key=lambda side: not set(side.ranks) & set(finding.ranks))
    together = len(sides) < 2 or _alike([side for side in sides if side.place is not None])
    decides = _deciding(finding)
    made = []
    for group in [sides] if together else [(side,) for side in sides]:
        pairs = [_marks(side, group, named=len(group) > 1) for side in group]
        files = {mark.place.file for marks in pairs for mark in marks}
        # The line that decides is marked once, beside the first who come by it.
        own = [mark for mark in decides if not files or mark.place.file in files]
        decides = [mark for mark in decides if mark not in own]
        # The call first, as it is made, and then the line that it leads to.
        calls = [marks[0] for marks in pairs if marks]
        ends = [marks[-1] for marks in pairs if len(marks) > 1]
        parts = [_listed(finding, [*own, *calls], before), _listed(finding, ends, before)]
        lines = [line for part in parts for _, each in part for line in (CodeLine(0, ""), *each)]
        ranks = tuple(sorted({rank for side in group for rank in side.ranks} or finding.ranks))
        place = next((side.place for side in group if side.place is not None), None)
        made.append(
            Column(
                name_ranks(ranks) if ranks else "",
                plain(str(place or own[0].place if place or own else group[0].call)),
                bool(set(ranks) & set(finding.ranks)),
                tuple(lines[1:]),
            )
        )
    return made


def _alike(sides: Sequence[Side]) -> bool:
    """True where all of these are at the same lines."""
    return len({(side.path[:1], side.place) for side in sides}) < 2


def _deciding(finding: Finding) -> list[Mark]:
    decides = finding.decides
    return [Mark(decides.place, DECIDES, plain(decides.label))] if decides is not None else []


def _marks(side: Side, group: Sequence[Side], *, named: bool) -> list[Mark]:
    """Return the marks of a side: at its line and, before it, the first one on the way there.

    The label is `named` by the ranks, and says in what those of a group at one line differ.
    """
    place = side.place
    if place is None:
        return []
    told = f"{side.state or side.call} here{side.detail}"
    if named:
        told = side.told
        others = [other for other in group if other is not side and other.place == place]
        for value in ("tensor", "call"):
            values = [getattr(each, value) for each in (side, *others)]
            if all(values) and len(set(values)) > 1:
                told = f"{name_ranks(side.ranks)}: {values[0]}"
                break
    at = Mark(place, AT, plain(told))
    first = side.path[0] if side.path else place
    is_there = (first.file, first.line) == (place.file, place.line)
    return [at] if is_there else [Mark(first, WAY, ""), at]


def _told_at_first(side: Side, group: Sequence[Side]) -> list[Mark]:
    """Return one mark of a side, at the first line of its way: its label tells the last."""
    marks = _marks(side, group, named=True)
    if len(marks) < 2:
        return marks
    first, at = (mark.place for mark in marks)
    line = f"line {at.line}" if at.file == first.file else f"{at.file}, line {at.line}"
    code = f", `{at.text}`" if at.text else ""
    told = f"{name_ranks(side.ranks)} {side.state} in here: {line}{code}{side.detail}"
    return [Mark(first, WAY, plain(told))]


def _listed(
    finding: Finding, marks: Sequence[Mark], before: int
) -> Iterator[tuple[str, list[CodeLine]]]:
    """Yield each file with its marked lines, and so many before each."""
    known = {excerpt.file: dict(excerpt.lines) for excerpt in finding.code}
    for file in dict.fromkeys(mark.place.file for mark in marks):
        texts = known.get(file, {})
        at: dict[int, list[Mark]] = {}
        for mark in marks:
            if mark.place.file == file:
                at.setdefault(mark.place.line, []).append(mark)
                texts.setdefault(mark.place.line, mark.place.text)
        shown = {n for line in at for n in range(line - before, line + 1) if n in texts}
        # One line or two between others are shown: to leave them out would save nothing.
        for first, last in zip(sorted(shown), sorted(shown)[1:], strict=False):
            between = range(first + 1, last)
            if len(between) <= 2 and texts.keys() >= set(between):
                shown.update(between)
        numbers = [
            n for n in sorted(shown) if n in at or (texts[n].strip() and texts[n][:2] != "%%")
        ]
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
    marks += [m for side in finding.sides for m in _told_at_first(side, finding.sides)]
    listings = list(_listed(finding, marks, 0))
    digits = max((len(str(line.number)) for _, lines in listings for line in lines), default=1)
    shown: list[str] = []
    for file, lines in listings:
        shown += [indented(plain(file), f"{' ' * digits}--> "), f"{' ' * digits} |"]
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

_LINES = f"1px solid rgba({markup.IDLE}, 0.35)"
_FRAME = f"border: {_LINES}; border-width: 1px 0; background: rgba({markup.IDLE}, 0.06)"
_COLUMN = "display: inline-block; vertical-align: top; box-sizing: border-box; width: 100%"
# Where a page takes no flex, in a notebook that is not trusted, columns are half as wide as it.
_HALF = f"{_COLUMN}; width: 50%; min-width: 24em; flex: 1 1 24em"
_WHO = "padding: 3px 10px; font-size: 0.92em"
_PRE = (
    "margin: 0; padding: 0 0 6px; border: 0; background: none; color: inherit; line-height: 1.5;"
    f" white-space: pre-wrap; {markup.BREAKABLE}; {markup.MONO}"
)
_LINE = "padding: 0 10px 0 3.6em; text-indent: -3em"
_NUMBER = "display: inline-block; width: 2.2em; margin-right: 0.8em; text-align: right"


def html(finding: Finding) -> str:
    """Return the columns; empty where no line is known."""
    made = columns(finding)
    if not made:
        return ""
    style = _COLUMN if len(made) == 1 else _HALF
    frame = f"{_FRAME}; display: flex; flex-wrap: wrap"
    return f'<div style="{frame}">{"".join(_column(each, style) for each in made)}</div>'


def _column(column: Column, style: str) -> str:
    colour = f"; color: rgb({markup.BAD})" if column.culprit else ""
    at = f' <span style="{markup.MUTED}">· {markup.words(column.at)}</span>' if column.at else ""
    lines = "".join(map(_line, column.lines))
    code = f'<pre style="{_PRE}">{lines}</pre>' if lines else ""
    who = f'<b style="font-weight: 600{colour}">{markup.words(column.who)}</b>{at}'
    return f'<div style="{style}"><div style="{_WHO}">{who}</div>{code}</div>'


def _line(line: CodeLine) -> str:
    number = f'<span style="{_NUMBER}; {markup.MUTED}; text-indent: 0">{line.number or "⋮"}</span>'
    code = line.text.lstrip()
    indent, shown = line.text[: len(line.text) - len(code)], escape(code, quote=False)
    if line.marks:
        shown = (
            f'<span style="background: rgba({_COLOURS[line.marks[0].kind]}, 0.2)">{shown}</span>'
        )
    labels = "".join(
        f'  <span style="color: rgb({_COLOURS[mark.kind]})">◂ '
        f"{escape(mark.label, quote=False)}</span>"
        for mark in line.marks
        if mark.label
    )
    return f'<div style="{_LINE}">{number}{indent}{shown}{labels}</div>'
