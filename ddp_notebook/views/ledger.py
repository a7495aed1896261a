"""The ledger of a training step: a table, those rows first that are worth a look."""

from __future__ import annotations

from ddp_notebook.model import Ledger, LedgerRow, counted
from ddp_notebook.views import markup
from ddp_notebook.views.table import Cell, Column, Row, Table, indented

LOOK = "!"
"""Stands before a row that is worth a look."""
_COLUMNS = (
    Column(""),
    Column("parameter", widest=24, always=True, names_row=True),
    Column("in", widest=9),
    Column("own gradients", widest=16),
    Column("the optimizer used", fills=True, breaks=True, narrowest=16),
    Column("held by", widest=14),
    Column("changed", widest=9),
    Column("across ranks", widest=14),
)


def text(ledger: Ledger) -> str:
    """Its title, the table, and what could not be seen."""
    notes = [indented(note, "note: ") for note in ledger.notes]
    table = _table(ledger).text() if ledger.rows else ""
    return "\n\n".join(filter(None, [indented(_title(ledger), ""), table, "\n".join(notes)]))


def html(ledger: Ledger) -> str:
    """The same, rows that are worth a look in a colour; every value escaped."""
    title = f'<div style="font-weight: 600; margin: 0 0 6px">{markup.words(_title(ledger))}</div>'
    notes = [f"<div>note: {markup.words(note)}</div>" for note in ledger.notes]
    return markup.view([title, _table(ledger).html() if ledger.rows else "", *notes])


def _title(ledger: Ledger) -> str:
    looks = sum(len(row.parameters) for row in ledger.rows if row.marked)
    whole = sum(len(row.parameters) for row in ledger.rows)
    about = f"{looks} of {counted(whole, 'parameter')} worth a look" if looks else "nothing unusual"
    return f"{ledger.title}: {about if whole else 'no parameter was trained'}."


def _table(ledger: Ledger) -> Table:
    return Table(_COLUMNS, [_row(row) for row in ledger.rows])


def _row(row: LedgerRow) -> Row:
    first, *others = row.parameters
    named = f"{first} and {len(others)} more" if len(others) > 2 else ", ".join(row.parameters)
    facts = (row.within, row.own, row.used, row.optimizer, row.changed, row.after)
    cells = [Cell(LOOK if row.marked else ""), Cell(named), *map(Cell, facts)]
    return Row(cells, markup.WARN if row.marked else "")
