"""The ledger of a training step: a table, those rows first that are worth a look."""

from __future__ import annotations

from ddp_notebook.model import LEDGER_COLUMNS, Ledger, LedgerRow
from ddp_notebook.views import markup
from ddp_notebook.views.table import Cell, Column, Row, Table, indented

LOOK = "!"
"""Stands before a row that is worth a look."""
_WIDTHS = (9, 16, 24, 14, 9, 16)
_COLUMNS = (
    Column(""),
    Column("parameter", always=True, names_row=True, fills=True, breaks=True, narrowest=16),
    *(Column(c.replace("_", " "), w) for c, w in zip(LEDGER_COLUMNS, _WIDTHS, strict=True)),
)


def text(ledger: Ledger) -> str:
    """Its title, the table, and what could not be seen."""
    table = Table(_COLUMNS, [*map(_row, ledger.rows)]).text()
    notes = [indented(note, "note: ") for note in ledger.notes]
    return "\n\n".join([indented(f"{ledger.title}.", ""), table, *notes])


def html(ledger: Ledger) -> str:
    """The same, rows that are worth a look in a colour; every value escaped."""
    title = f'<div style="font-weight: 600; margin: 0 0 6px">{markup.words(ledger.title)}</div>'
    notes = [f"<div>note: {markup.words(note)}</div>" for note in ledger.notes]
    table = Table(_COLUMNS, [*map(_row, ledger.rows)]).html()
    # Wider than findings may be: the table has seven columns.
    return f'<div style="padding: 4px 0; line-height: 1.45">{title}{table}{"".join(notes)}</div>'


def _row(row: LedgerRow) -> Row:
    first, *others = row.parameters
    named = f"{first} and {len(others)} more" if len(others) > 2 else ", ".join(row.parameters)
    cells = (Cell(LOOK if row.marked else ""), Cell(named), *map(Cell, row.facts.values()))
    return Row(cells, markup.WARN if row.marked else "")
