"""What the doctor found, as a table: text for a terminal, HTML for a notebook.

The worst comes first. A verdict is a sign and a word; its colour only repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from textwrap import wrap

from ddp_notebook.model.doctor import Check, DoctorReport, Verdict
from ddp_notebook.views.ansi import strip_ansi
from ddp_notebook.views.text import WIDTH

_HEADERS = ("verdict", "check", "found")
_SIGNS = {Verdict.OK: "✓", Verdict.WARNING: "!", Verdict.FAILURE: "✗"}
_GAP = "  "
_NARROWEST_FOUND = 40

# Middle tones, readable on light and on dark pages; an untrusted notebook keeps no more than this.
_COLOURS = {
    Verdict.OK: "43, 154, 75",
    Verdict.WARNING: "217, 123, 0",
    Verdict.FAILURE: "217, 60, 60",
}
_LINE = "border-top: 1px solid rgba(128, 128, 128, 0.3)"
_CELL = "text-align: left; vertical-align: baseline; padding: 4px 12px; font-weight: inherit"
_HEAD = f"{_CELL}; opacity: 0.72"
_ONE_LINE = f"{_CELL}; white-space: nowrap"
_FOLDED = f"{_CELL}; white-space: normal; overflow-wrap: anywhere; max-width: 60em"
_CHIP = "display: inline-block; padding: 0 8px; border-radius: 9px"


def text(report: DoctorReport) -> str:
    """The headline, and a line or more for each check; what to do stands behind an arrow."""
    headline = _clean(report.headline)
    if not report.checks:
        return headline
    rows = [_words(check) for check in _worst_first(report.checks)]
    widths = [max(len(row[i]) for row in (_HEADERS, *rows)) for i in (0, 1)]
    room = max(_NARROWEST_FOUND, WIDTH - sum(widths) - len(_GAP) * 2)
    body = [line for row in rows for line in _lines(row, widths, room)]
    longest = max(len(line) for line in body) - sum(widths) - len(_GAP) * 2
    rule = _GAP.join("─" * width for width in (*widths, max(longest, len(_HEADERS[2]))))
    return "\n".join([headline, "", _line(_HEADERS, widths), rule, *body])


def html(report: DoctorReport) -> str:
    """The report as an HTML table. Needs no style sheet; every value is escaped."""
    headline = f'<div style="font-weight: 600; margin-bottom: 6px">{_text(report.headline)}</div>'
    if not report.checks:
        return f'<div class="ddp-doctor">{headline}</div>'
    head = "".join(f'<th scope="col" style="{_HEAD}">{header}</th>' for header in _HEADERS)
    body = "".join(_row(check) for check in _worst_first(report.checks))
    return (
        f'<div class="ddp-doctor">{headline}<div style="overflow-x: auto">'
        f'<table style="border-collapse: collapse; margin: 0"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></div>"
    )


def _worst_first(checks: Sequence[Check]) -> list[Check]:
    """Failures, warnings, then what is ok, each in the order they were made."""
    return sorted(checks, key=lambda check: -check.verdict.severity)


def _verdict(check: Check) -> str:
    """``✗ failure``."""
    return f"{_SIGNS[check.verdict]} {check.verdict.value}"


def _clean(words: str) -> str:
    """`words` on one line, without escape codes and what else would move the cursor."""
    return "".join(c for c in " ".join(strip_ansi(words).split()) if c.isprintable())


# --------------------------------------------------------------------------- text


def _words(check: Check) -> tuple[str, str, str, str]:
    """Verdict, name, what was found, what to do."""
    return _verdict(check), _clean(check.name), _clean(check.found), _clean(check.remedy)


def _lines(row: tuple[str, str, str, str], widths: Sequence[int], room: int) -> list[str]:
    """The lines one check takes: what was found, and below it what to do."""
    verdict, name, found, remedy = row
    folded = _fold(found, room) or [""]
    if remedy:
        first, *rest = _fold(remedy, room - 2)
        folded += [f"→ {first}", *(f"  {line}" for line in rest)]
    marks = [(verdict, name), *[("", "")] * (len(folded) - 1)]
    return [_line((*mark, line), widths) for mark, line in zip(marks, folded, strict=True)]


def _fold(words: str, room: int) -> list[str]:
    """`words` in lines of `room`; a command's words are not cut at their hyphens."""
    return wrap(words, room, break_on_hyphens=False)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """One line, its first two cells as wide as their columns."""
    first, second, third = cells
    return _GAP.join((first.ljust(widths[0]), second.ljust(widths[1]), third)).rstrip()


# --------------------------------------------------------------------------- HTML


def _row(check: Check) -> str:
    """One check as a table row."""
    colour = _COLOURS[check.verdict]
    chip = f"{_CHIP}; border: 1px solid rgb({colour}); background: rgba({colour}, 0.16)"
    remedy = f'<div style="font-weight: 600">→ {_text(check.remedy)}</div>' if check.remedy else ""
    return (
        f'<tr class="ddp-{check.verdict.value}" style="{_LINE}">'
        f'<td style="{_ONE_LINE}"><span style="{chip}">{_verdict(check)}</span></td>'
        f'<th scope="row" style="{_ONE_LINE}">{_text(check.name)}</th>'
        f'<td style="{_FOLDED}">{_text(check.found)}{remedy}</td></tr>'
    )


def _text(words: str) -> str:
    """Words for a person as HTML."""
    return escape(_clean(words), quote=False)
