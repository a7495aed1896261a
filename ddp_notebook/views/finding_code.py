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
    """What one group of ranks is at; `culprit` if one of them is to blame."""

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
    ways = {(side.path[:1], side.place) for side in sides if side.place is not None}
    decides, made = _deciding(finding), []
    for group in [[side] for side in sides] if len(ways) > 1 else [sides]:
        marks = [_marks(side, group, named=len(group) > 1) for side in group]
        files = {mark.place.file for each in marks for mark in each}
        # The line that decides is marked once, beside the first who come by it.
        own = [mark for mark in decides if not files or mark.place.file in files]
        decides = [mark for mark in decides if mark not in own]
        # The call first, as it is made, and then the line that it leads to.
        calls = [*own, *(each[0] for each in marks if each)]
        ends = [each[1] for each in marks if len(each) > 1]
        parts = [part for of in (calls, ends) for _, part in _listed(finding, of, before)]
        ranks = sorted({rank for side in group for rank in side.ranks} or finding.ranks)
        place = next(iter([*ends, *calls[len(own) :], *own]), None)
        made.append(
            Column(
                name_ranks(ranks) if ranks else "",
                plain(str(place.place) if place is not None else group[0].call),
                bool(set(ranks) & set(finding.ranks)),
                tuple(line for part in parts for line in (CodeLine(0), *part))[1:],
            )
        )
    return made


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
    told = side.told if named else f"{side.state or side.call} here{side.detail}"
    there = [each for each in group if each is side or each.place == place]
    for values in ([each.tensor for each in there], [each.call for each in there]):
        if all(values) and len(set(values)) > 1:
            told = f"{name_ranks(side.ranks)}: {values[there.index(side)]}"
            break
    at = Mark(place, AT, plain(told))
    first = side.path[0] if side.path else place
    is_there = (first.file, first.line) == (place.file, place.line)
    way = Mark(first, WAY, f"{name_ranks(side.ranks)} in here" if named else "")
    return [at] if is_there else [way, at]


def _listed(
    finding: Finding, marks: Sequence[Mark], before: int
) -> Iterator[tuple[str, list[CodeLine]]]:
    """Yield each file with its marked lines, and so many before each."""
    known = {excerpt.file: dict(excerpt.lines) for excerpt in finding.code}
    for file in dict.fromkeys(mark.place.file for mark in marks):
        texts, at = known.get(file, {}), dict[int, list[Mark]]()
        for mark in dict.fromkeys(mark for mark in marks if mark.place.file == file):
            at.setdefault(mark.place.line, []).append(mark)
            texts.setdefault(mark.place.line, mark.place.text)
        shown = {n for line in at for n in range(line - before, line + 1)}
        for first, last in zip(sorted(shown), sorted(shown)[1:], strict=False):
            if last - first - 1 <= _FILLED:
                shown.update(range(first, last))
        # Neither empty lines nor the cell's own magic say anything.
        says = {n for n, code in texts.items() if code.strip() and not code.startswith("%%")}
        numbers = [n for n in sorted(shown) if n in at or n in says]
        code = dedent("\n".join(preformatted(texts[n])[0] for n in numbers)).split("\n")
        lines: list[CodeLine] = []
        for number, text in zip(numbers, code, strict=True):
            if lines and number - lines[-1].number - 1 > _FILLED:
                lines.append(CodeLine(0))
            lines.append(CodeLine(number, text, tuple(at.get(number, ()))))
        yield file, lines


# -- text --------------------------------------------------------------------------------


def text(finding: Finding) -> str:
    """Return the listing, with labels below and behind the code; empty where no line is known."""
    marks = _deciding(finding)
    decided = [(mark.place.file, mark.place.function) for mark in marks]
    for side in finding.sides:
        own = _marks(side, finding.sides, named=True)
        # One label, at the first line, tells the last; not where that is near what decides.
        if len(own) > 1 and (own[1].place.file, own[1].place.function) not in decided:
            first, place = (mark.place for mark in own)
            line = f"line {place.line}"
            line = line if place.file == first.file else f"{place.file}, {line}"
            code = f", `{place.text}`" if place.text else ""
            who = f"{name_ranks(side.ranks)} {side.state}"
            own = [Mark(first, WAY, plain(f"{who} in here: {line}{code}{side.detail}"))]
        marks += own
    listings = list(_listed(finding, marks, 0))
    digits = max((len(str(line.number)) for _, lines in listings for line in lines), default=1)
    shown: list[str] = []
    for file, lines in listings:
        shown += [indented(plain(file), f"{' ' * digits}--> "), f"{' ' * digits} |"]
        shown += [row for line in lines for row in _line_text(line, digits)]
    return "\n".join(row.rstrip() for row in shown)


def _line_text(line: CodeLine, digits: int) -> Iterator[str]:
    """Yield a line with what is said of it: carets below it, and the labels of the ranks there."""
    margin = f"{line.number or '⋮':>{digits}} | "
    code = line.text[: WIDTH - len(margin)]
    below = f"{' ' * digits} | {' ' * (len(code) - len(code.lstrip()))}"
    decides = [f"<- {mark.label}" for mark in line.marks if mark.kind == DECIDES]
    labels = [mark.label for mark in line.marks if mark.kind != DECIDES]
    behind = "  ".join([f"{margin}{code}", *decides])
    fits = len(behind) <= WIDTH
    yield behind if fits else f"{margin}{code}"
    if labels:
        signs = _SIGNS[line.marks[-1].kind] * max(1, len(code.strip()))
        signs, beside = f"{below}{signs}", f"{below}{signs} {'   '.join(labels)}"
        yield beside if len(beside) <= WIDTH else signs
        labels = labels if len(beside) > WIDTH else []
    for label in [*(() if fits else decides), *labels]:
        yield from (f"{below}{part}" for part in wrapped(label, max(20, WIDTH - len(below))))


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
