"""What tests read of a session: what a cell shows and returns, its tables, the ranks' processes."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.interactiveshell import ExecutionResult

from ddp_notebook.model import StepTable, VariableTable
from ddp_notebook.session import Session
from ddp_notebook.session.runs.endings import CellResult
from ddp_notebook.views.ansi import strip_ansi


def shown_by(
    shell: Any, capsys: pytest.CaptureFixture[str], source: str
) -> tuple[ExecutionResult, str]:
    """The result of a cell in IPython's shell, and all that it shows, without colours."""
    capsys.readouterr()
    result = shell.run_cell(source)
    shown = capsys.readouterr()
    return result, strip_ansi(shown.out + shown.err).strip()


def said(shell: Any, capsys: pytest.CaptureFixture[str], source: str, *, ok: bool = False) -> str:
    """What the user reads of a cell that fails, or ends `ok`: no stack of ours."""
    result, text = shown_by(shell, capsys, source)
    assert result.success is ok, f"{source}\n{text}"
    assert "Traceback" not in text
    return text


def rank_pids(session: Session) -> list[int]:
    """The processes of the ranks."""
    return [state.pid for state in session.record.snapshot.ranks]


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
