"""How an interrupted run stands, in words: who stopped, who had finished, who is still in it."""

from __future__ import annotations

from ddp_notebook.errors import CellInterrupted
from ddp_notebook.model import Snapshot, format_ranks, name_ranks
from ddp_notebook.session.guards import doings
from ddp_notebook.session.runs.run import CellRun


def interruption(run: CellRun, snapshot: Snapshot) -> CellInterrupted:
    """What a run that the user interrupted raises."""
    return CellInterrupted(
        f"The cell was interrupted: {_who_does_what(run, snapshot)}.", run.pending
    )


def _who_does_what(run: CellRun, snapshot: Snapshot) -> str:
    pending = run.pending
    lines = []
    stopped = tuple(r for r, f in run.finished.items() if f.outcome == "interrupted")
    if stopped:
        lines.append(f"{name_ranks(stopped)} stopped{_at_lines(run)}")
    for outcome, what in (("ok", "had finished"), ("error", "had raised an error")):
        before = tuple(r for r, f in run.finished.items() if f.outcome == outcome)
        if before:
            lines.append(f"{name_ranks(before)} {what}")
    if run.died:
        lines.append(f"{name_ranks(run.died)} died")
    begun = tuple(rank for rank in pending if rank in run.started)
    for doing, ranks in doings(begun, snapshot).items():
        lines.append(f"{name_ranks(ranks)} still in {doing}")
    if begun:
        it = "it" if len(begun) == 1 else "them"
        lines.append(
            f"get {it} back with %ddp_abort, or with new processes: %ddp_restart --ranks "
            f"{format_ranks(begun)}"
        )
    late = tuple(rank for rank in pending if rank not in run.started)
    if late:
        lines.append(f"{name_ranks(late)} did not begin it yet, and will be stopped then")
    return "; ".join(lines)


def _at_lines(run: CellRun) -> str:
    lines = sorted({f.line for f in run.finished.values() if f.outcome == "interrupted"} - {0})
    if not lines:
        return ""
    where = f"{run.script}, line" if run.script else "cell line"
    return f" at {where}{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}"
