"""The doctor's report as a table, the worst first: as text and as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ddp_notebook.model.doctor import Check, DoctorReport, Verdict
from ddp_notebook.views import markup
from ddp_notebook.views.ansi import plain
from ddp_notebook.views.board import WIDTH
from ddp_notebook.views.table import Cell, Column, Row, Table

_SIGNS = {
    Verdict.OK: ("✓", markup.OK),
    Verdict.WARNING: ("!", markup.WARN),
    Verdict.FAILURE: ("✗", markup.BAD),
}
_COLUMNS = (
    Column("verdict"),
    Column("check", names_row=True),
    Column("found", fills=True, narrowest=40),
)


def text(report: DoctorReport) -> str:
    """Return the headline, and one or more lines for each check, with remedies behind arrows."""
    headline = plain(report.headline)
    return f"{headline}\n\n{_table(report.checks).text()}" if report.checks else headline


def html(report: DoctorReport) -> str:
    """The report as an HTML table. Needs no style sheet; every value is escaped."""
    headline = escape(plain(report.headline), quote=False)
    table = _table(report.checks).html() if report.checks else ""
    style = "font-weight: 600; margin-bottom: 6px"
    return f'<div class="ddp-doctor"><div style="{style}">{headline}</div>{table}</div>'


def _table(checks: Sequence[Check]) -> Table:
    """Failures, warnings, then successful checks, each in the order in which they ran."""
    rows = []
    for check in sorted(checks, key=lambda check: -check.verdict.severity):
        sign, colour = _SIGNS[check.verdict]
        verdict = Cell(f"{sign} {check.verdict.value}", colour=colour)
        found = Cell(plain(check.found), remedy=check.remedy)
        rows.append(Row((verdict, Cell(plain(check.name)), found)))
    return Table(_COLUMNS, rows, WIDTH)
