"""Describes an interrupted run: which ranks stopped, had finished, or are still in it."""

from __future__ import annotations

from ddp_notebook.errors import CellInterrupted
from ddp_notebook.model import Snapshot, format_ranks, name_ranks, them
from ddp_notebook.session.guards import doings
from ddp_notebook.session.runs.run import CellRun


def interruption(run: CellRun, snapshot: Snapshot) -> CellInterrupted:
    """The error of a run that the user interrupted."""
    return CellInterrupted(
        f"The cell was interrupted: {_who_does_what(run, snapshot)}.", run.pending
    )


def _who_does_what(run: CellRun, snapshot: Snapshot) -> str:
    begun = tuple(rank for rank in run.pending if rank in run.started)
    late = tuple(rank for rank in run.pending if rank not in run.started)
    lines = _who_left(run)
    lines += [f"{name_ranks(r)} still in {doing}" for r, doing in doings(begun, snapshot)]
    if begun:
        lines.append(
            f"get {them(begun)} back with %ddp_abort, or with new processes: %ddp_restart --ranks "
            f"{format_ranks(begun)}"
        )
    if late:
        lines.append(f"{name_ranks(late)} did not begin it yet, and will be stopped then")
    return "; ".join(lines)


def _who_left(run: CellRun) -> list[str]:
    """The ranks that have left the run, and how."""
    ways = (
        ("interrupted", f"stopped{_at_lines(run)}"),
        ("ok", "had finished"),
        ("error", "had raised an error"),
    )
    lines = []
    for outcome, what in ways:
        if ranks := tuple(r for r, f in run.finished.items() if f.outcome == outcome):
            lines.append(f"{name_ranks(ranks)} {what}")
    if run.died:
        lines.append(f"{name_ranks(run.died)} died")
    return lines


def _at_lines(run: CellRun) -> str:
    lines = sorted({f.line for f in run.finished.values() if f.outcome == "interrupted"} - {0})
    if not lines:
        return ""
    where = f"{run.script}, line" if run.script else "cell line"
    return f" at {where}{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}"
