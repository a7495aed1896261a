"""What tests read off what a cell gives: its output, and the tables beside it."""

from __future__ import annotations

from typing import Any

from ddp_notebook.model import StepTable, VariableTable
from ddp_notebook.session import Session
from ddp_notebook.session.runs.run import CellResult


def texts(result: CellResult) -> str:
    """What the ranks printed; those that printed the same, once."""
    return "".join(item.text for group in result.outputs for item in group.items)


def last_values(session: Session, source: str, **how: Any) -> dict[tuple[int, ...], str]:
    """What the last expression of a cell gives, by the ranks it is the same on."""
    result = session.run_cell(source, **how)
    result.raise_for_error()
    return {g.ranks: g.items[-1].data["text/plain"] for g in result.outputs}


def rows(table: StepTable | None) -> dict[tuple[int, ...], str]:
    """By ranks, where they are."""
    assert table is not None
    return {row.ranks: row.text for row in table.rows}


def values(table: VariableTable) -> dict[tuple[int, ...], str]:
    """By ranks, a value; or why there is none."""
    cells = [cell for part in table.sections for row in part.rows for cell in row.cells]
    return {cell.ranks: cell.text for cell in cells} | {u.ranks: u.why for u in table.unread}
