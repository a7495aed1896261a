"""The code of a finding: where each group of ranks is, and the line that decides, marked.

As text all of it is one listing, with labels below the code. A page has a column for each group,
or one for all where they are at the same lines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, pairwise
from textwrap import dedent

from ddp_notebook.model import Finding, Place, Side, name_ranks
from ddp_notebook.views import markup
from ddp_notebook.views.ansi import plain, preformatted
from ddp_notebook.views.table import WIDTH, indented, wrapped

AT, WAY, DECIDES = "at", "way", "decides"
"""The kinds of marks: ranks are at a line, or below it; it decides who goes where."""

_SIGNS = {AT: "^", WAY: "-"}
_COLOURS = {AT: markup.BAD, WAY: markup.IDLE, DECIDES: markup.WARN}
_FILLED = 2
"""So many lines between two others are shown: to leave them out would save nothing."""


@dataclass(frozen=True)
class Mark:
    """A label on a line; `kind` is one of the three above."""

    place: Place
    kind: str
    label: str


@dataclass(frozen=True)
class CodeLine:
    """A line as it is shown; with number 0 it stands for lines that are left out."""

    number: int
    text: str = ""
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class Column:
    """The code of one group of ranks; `culprit` if one of them is to blame."""

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
    # The culprits stand first, on the left, and the line that decides beside them.
    sides = sorted(
        finding.sides or (Side(finding.ranks, ""),),
        key=lambda side: set(side.ranks).isdisjoint(finding.ranks),
    )
    ways = {(side.path[:1], side.place) for side in sides if side.place is not None}
    groups = [[side] for side in sides] if len(ways) > 1 else [sides]
    first = _column(finding, groups[0], _deciding(finding), before)
    return [first, *(_column(finding, group, [], before) for group in groups[1:])]


def _column(
    finding: Finding, group: Sequence[Side], decides: Sequence[Mark], before: int
) -> Column:
    marks = [_marks(side, group, named=len(group) > 1) for side in group]
    # The call first, as it is made, and then the line that it leads to.
    calls = [*decides, *(mark for each in marks for mark in each[:1])]
    ends = [each[1] for each in marks if len(each) > 1]
    lines: list[CodeLine] = []
    for part in (*_listed(finding, calls, before), *_listed(finding, ends, before)):
        lines += [CodeLine(0), *part[1]]
    ranks = sorted({*chain.from_iterable(side.ranks for side in group)})
    at = [*ends, *calls[len(decides) :], *decides]
    return Column(
        name_ranks(ranks) if ranks else "",
        plain(str(at[0].place) if at else group[0].call),
        not set(ranks).isdisjoint(finding.ranks),
        tuple(lines[1:]),
    )


def _deciding(finding: Finding) -> list[Mark]:
    decides = finding.decides
    return [Mark(decides.place, DECIDES, plain(decides.label))] if decides is not None else []


def _marks(side: Side, group: Sequence[Side], *, named: bool) -> list[Mark]:
    """Return the marks of a side: at its line and, before it, the first one on the way there.

    The labels are `named` by the ranks where those of several sides stand below each other.
    """
    if side.place is None:
        return []
    who, told = name_ranks(side.ranks), f"{side.state or side.call} here{side.detail}"
    if named:
        told = _difference(side, group) or f"{who} {told}"
    way = [place for place in side.path[:1] if str(place) != str(side.place)]
    before = [Mark(place, WAY, f"{who} in here" if named else "") for place in way]
    return [*before, Mark(side.place, AT, plain(told))]


def _difference(side: Side, group: Sequence[Side]) -> str:
    """Say in what ranks differ that are at one line: ``rank 2: float32 [5]``; empty for nothing."""
    there = [each for each in group if each is side or each.place == side.place]
    for values in ([each.tensor for each in there], [each.call for each in there]):
        if all(values) and len(set(values)) > 1:
            return f"{name_ranks(side.ranks)}: {values[there.index(side)]}"
    return ""


def _listed(
    finding: Finding, marks: Sequence[Mark], before: int
) -> Iterator[tuple[str, list[CodeLine]]]:
    """Yield each file with its marked lines, and so many before each."""
    known = {excerpt.file: dict(excerpt.lines) for excerpt in finding.code}
    at: dict[str, dict[int, list[Mark]]] = {}
    for mark in dict.fromkeys(marks):
        at.setdefault(mark.place.file, {}).setdefault(mark.place.line, []).append(mark)
    for file, of in at.items():
        texts = {line: own[0].place.text for line, own in of.items()} | known.get(file, {})
        numbers = _numbers(texts, of, before)
        code = dedent("\n".join(preformatted(texts[n])[0] for n in numbers)).split("\n")
        lines: list[CodeLine] = []
        for number, text in zip(numbers, code, strict=True):
            if lines and number - lines[-1].number - 1 > _FILLED:
                lines.append(CodeLine(0))
            lines.append(CodeLine(number, text, tuple(of.get(number, ()))))
        yield file, lines


def _numbers(texts: Mapping[int, str], marked: Collection[int], before: int) -> list[int]:
    """Return which lines are shown. Neither empty ones nor the cell's own magic say anything."""
    shown = sorted({n for line in marked for n in range(line - before, line + 1)})
    gaps = (pair for pair in pairwise(shown) if pair[1] - pair[0] - 1 <= _FILLED)
    filled = {*shown, *(n for first, last in gaps for n in range(first, last))}
    says = {n for n, code in texts.items() if code.strip() and not code.startswith("%%")}
    return sorted(filled & says | set(marked))


# -- text --------------------------------------------------------------------------------


def text(finding: Finding) -> str:
    """Return the listing, with labels below and behind the code; empty where no line is known."""
    marks = _deciding(finding)
    decided = [(mark.place.file, mark.place.function) for mark in marks]
    for side in finding.sides:
        own = _marks(side, finding.sides, named=True)
        # One label, at the first line, tells the last; not where that is near what decides.
        if len(own) > 1 and (own[1].place.file, own[1].place.function) not in decided:
            own = [_told_together(side, own[0].place, own[1].place)]
        marks += own
    listings = list(_listed(finding, marks, 0))
    digits = max((len(str(line.number)) for _, lines in listings for line in lines), default=1)
    shown: list[str] = []
    for file, lines in listings:
        shown += [indented(plain(file), f"{' ' * digits}--> "), f"{' ' * digits} |"]
        shown += [row.rstrip() for line in lines for row in _line_text(line, digits)]
    return "\n".join(shown)


def _told_together(side: Side, first: Place, at: Place) -> Mark:
    """``rank 0 waits in here: line 4, `dist.all_reduce(x)`, collective 9``."""
    line = f"line {at.line}" if at.file == first.file else f"{at.file}, line {at.line}"
    code = f", `{at.text}`" if at.text else ""
    who = f"{name_ranks(side.ranks)} {side.state}"
    return Mark(first, WAY, plain(f"{who} in here: {line}{code}{side.detail}"))


def _line_text(line: CodeLine, digits: int) -> list[str]:
    """Return a line with what is said of it: carets below it, and the labels of ranks there."""
    margin = f"{line.number or '⋮':>{digits}} | "
    code = line.text[: WIDTH - len(margin)]
    below = f"{' ' * digits} | {' ' * (len(code) - len(code.lstrip()))}"
    decides = [f"<- {mark.label}" for mark in line.marks if mark.kind == DECIDES]
    labels = [mark.label for mark in line.marks if mark.kind != DECIDES]
    first = _beside(f"{margin}{code}", "  ", decides, below)
    if not labels:
        return first
    signs = _SIGNS[line.marks[-1].kind] * max(1, len(code.strip()))
    return first + _beside(f"{below}{signs}", " ", ["   ".join(labels)], below, labels)


def _beside(
    start: str, gap: str, labels: Sequence[str], below: str, instead: Sequence[str] = ()
) -> list[str]:
    """Return `start` with labels behind it or, where these do not fit, `below` it, one by one."""
    behind = gap.join([start, *labels])
    if len(behind) <= WIDTH:
        return [behind]
    parts = (part for each in instead or labels for part in wrapped(each, WIDTH - len(below)))
    return [start, *(f"{below}{part}" for part in parts)]


# -- HTML --------------------------------------------------------------------------------

_LINES = f"1px solid rgba({markup.IDLE}, 0.35)"
_FRAME = (
    f"border: {_LINES}; border-width: 1px 0; background: rgba({markup.IDLE}, 0.06);"
    " display: flex; flex-wrap: wrap"
)
# Where a page takes no flex, in a notebook that is not trusted, columns are half as wide as it.
_COLUMN = "display: inline-block; vertical-align: top; box-sizing: border-box; width: 100%"
_HALF = f"{_COLUMN}; width: 50%; min-width: 24em; flex: 1 1 24em"
_WHO = "padding: 3px 10px; font-size: 0.92em"
_PRE = (
    "margin: 0; padding: 0 0 6px; border: 0; background: none; color: inherit; line-height: 1.5;"
    f" white-space: pre-wrap; word-break: normal; {markup.BREAKABLE}; {markup.MONO}"
)
_LINE = "padding: 0 10px 0 3.6em; text-indent: -3em"
_NUMBER = (
    "display: inline-block; width: 2.2em; margin-right: 0.8em; text-align: right; text-indent: 0;"
    f" {markup.MUTED}"
)


def html(finding: Finding) -> str:
    """Return the columns; empty where no line is known."""
    made = columns(finding)
    shown = []
    for column in made:
        colour = f"; color: rgb({markup.BAD})" if column.culprit else ""
        who = f'<b style="font-weight: 600{colour}">{markup.words(column.who)}</b>'
        at = f'<span style="{markup.MUTED}">· {markup.words(column.at)}</span>'
        shown.append(
            f'<div style="{_COLUMN if len(made) == 1 else _HALF}"><div style="{_WHO}">{who} {at}'
            f'</div><pre style="{_PRE}">{"".join(map(_line, column.lines))}</pre></div>'
        )
    return f'<div style="{_FRAME}">{"".join(shown)}</div>' if shown else ""


def _line(line: CodeLine) -> str:
    code = line.text.lstrip()
    indent, shown = line.text[: len(line.text) - len(code)], escape(code, quote=False)
    if line.marks:
        shown = (
            f'<span style="background: rgba({_COLOURS[line.marks[0].kind]}, 0.2)">{shown}</span>'
        )
    for mark in line.marks:
        label = escape(mark.label, quote=False)
        said = f'  <span style="color: rgb({_COLOURS[mark.kind]})">◂ {label}</span>'
        shown += said if label else ""
    number = f'<span style="{_NUMBER}">{line.number or "⋮"}</span>'
    return f'<div style="{_LINE}">{number}{indent}{shown}</div>'
