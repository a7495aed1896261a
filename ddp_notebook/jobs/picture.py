"""A job as a board and as a run to be saved, as a session would show and save it."""

from __future__ import annotations

import time
from dataclasses import replace

from ddp_notebook.archive.format import Observed, SavedRun
from ddp_notebook.archive.history import Kept
from ddp_notebook.archive.save import saved_run
from ddp_notebook.diagnosis.progress import doing
from ddp_notebook.jobs.verdict import Verdict
from ddp_notebook.model import (
    Activity,
    Board,
    BoardRow,
    Case,
    Diagnosis,
    RankReport,
    RankState,
    Role,
    Snapshot,
    Status,
)
from ddp_notebook.state.board_rows import BoardFacts, board_rows

_OVER = "the job has ended"


def board(
    case: Case, headline: str, diagnosis: Diagnosis | None = None, over: bool = False
) -> Board:
    """What is known of each rank, a row each. `over`: nothing of the job runs any more."""
    shown = snapshot(case, over)
    facts = BoardFacts(
        shown, case.collectives, shown.with_status(Status.RUNNING), diagnosis, case.sources
    )
    gone = {report.rank for report in case.ranks if _has_ended(report)}
    waiting = {report.rank for report in case.ranks if report.activity is Activity.WAITING}

    def word(row: BoardRow) -> str:
        # also those whom a finding names
        if row.status is Status.RUNNING and (over or gone.issuperset(row.ranks)):
            return Role.ENDED.value
        waits = row.word == Status.RUNNING.value and waiting.issuperset(row.ranks)
        return Role.WAITING.value if waits else row.word

    rows = tuple(replace(row, word=word(row)) for row in board_rows(facts))
    return Board(headline, rows, (), shown)


def _has_ended(report: RankReport) -> bool:
    """True of a rank that has no process any more and left nothing that tells of a failure."""
    return report.activity is Activity.IDLE and not report.initialized


def snapshot(case: Case, over: bool) -> Snapshot:
    """The same as a session's state."""
    now_ns = time.monotonic_ns()
    ranks = tuple(_state(report, now_ns, over) for report in case.ranks)
    backend = next((r.arguments.backend for r in case.ranks if r.arguments.backend), "")
    return Snapshot(ranks, backend, ended=_OVER if over else "", taken_ns=now_ns, external=True)


def _state(report: RankReport, now_ns: int, over: bool) -> RankState:
    state = RankState(report.rank, Status.RUNNING, doing=doing(report), host=report.host)
    match report.activity:
        case Activity.FAILED:
            return replace(state, status=Status.FAILED, cause=state.doing)
        case Activity.HELD:
            return replace(state, status=Status.PAUSED, detail=state.doing, heard_ns=now_ns)
        case Activity.DEAD:
            return replace(
                state,
                status=Status.DEAD,
                exit_code=report.exit_code,
                last_words=report.last_words,
            )
        case _ if _has_ended(report):
            return replace(state, doing="")
        case Activity.SILENT:
            return replace(state, doing=report.doing or state.doing)
        case _:
            return replace(state, heard_ns=0 if over else now_ns)


def saved(case: Case, verdict: Verdict, over: bool, observed: Observed) -> SavedRun:
    """What is known, and what was found, as a run; no events were heard."""
    shown = snapshot(case, over)
    run = saved_run(shown, Kept(shown, (), (), 0, 0), case)
    observed = replace(observed, basis=verdict.basis, unread=verdict.unread)
    return replace(run, diagnosis=verdict.diagnosis, stands=True, observed=observed)
