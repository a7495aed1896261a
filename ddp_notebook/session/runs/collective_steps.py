"""Steps a run from collective to collective: lets ranks go, waits until each is paused again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import Activity, Collective, Ranks, StepTable, name_ranks
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import CannotAnswer
from ddp_notebook.session.runs.run import CellRun
from ddp_notebook.state import collective_table

if TYPE_CHECKING:
    from ddp_notebook.cluster.cluster import RankCluster
    from ddp_notebook.session.processes.collective_logs import CollectiveLogs
    from ddp_notebook.session.record import Record

END = "end"
"""As a goal: pause no rank any more."""
_STILL_S = 0.3
"""A rank that is not paused and has issued nothing for so long is asked what it does."""
_LOOKS = 2
"""So many looks in a row must find it waiting."""
_LOOK_EVERY_S = 0.02
_ASK_TIMEOUT_S = 1.0


class Settling:
    """Whether every rank of a run is paused before a collective, waits in one, or has finished."""

    def __init__(
        self,
        run: CellRun,
        cluster: RankCluster,
        logs: CollectiveLogs,
        left: Mapping[int, int | None] | None = None,
    ) -> None:
        """`left` are the numbers of the collectives before which ranks were paused until now."""
        self._left = left or {}
        self._run = run
        self._cluster = cluster
        self._logs = logs
        self._picture: object = None
        self._since_s = time.monotonic()
        self._looks = 0

    def done(self) -> bool:
        """True when no rank can make progress without being stepped."""
        pending = self._run.pending
        tails = self._logs.read(pending, self._run.cell, last=1).of
        free = tuple(rank for rank in pending if not self._stands(rank, tails.get(rank, ())))
        if not free:
            return True
        picture = (pending, {rank: tails.get(rank) for rank in free})
        if picture != self._picture:
            self._picture, self._since_s, self._looks = picture, time.monotonic(), 0
            return False
        if time.monotonic() - self._since_s < _STILL_S:
            return False
        self._since_s = time.monotonic()
        answers = self._cluster.ask(free, calls.REPORT, calls.Nothing(), _ASK_TIMEOUT_S)
        reports = [a for a in answers.values() if not isinstance(a, CannotAnswer)]
        # One that does not answer in time, or waits for a moment only, may be making progress.
        waiting = len(reports) == len(free) and all(
            report.activity is Activity.WAITING for report in reports
        )
        self._looks = self._looks + 1 if waiting else 0
        return self._looks >= _LOOKS

    def _stands(self, rank: int, tail: Sequence[Collective]) -> bool:
        return any(
            collective_table.is_paused(record) and record.number != self._left.get(rank, -1)
            for record in tail
        )


def table(run: CellRun, logs: CollectiveLogs) -> StepTable:
    """Where the ranks of a run stand."""
    collectives = logs.read(run.ranks, run.cell)
    return collective_table.step_table(collectives, run.ranks, run.pending, time.monotonic_ns())


def step(
    run: CellRun,
    cluster: RankCluster,
    logs: CollectiveLogs,
    record: Record,
    ranks: Ranks | None,
    to: str | None,
    interrupted: Callable[[], bool],
) -> StepTable:
    """Let paused ranks (all, or `ranks`) issue their collective and go on to the next.

    `to` is an operation, or "end". Raises UsageMistake when none of them is paused.
    """
    while True:
        moving = paused_ranks(run, logs, ranks)
        if not moving:
            raise UsageMistake(_why_not(run, logs))
        settling = Settling(run, cluster, logs, _let_go(cluster, moving, for_good=to == END))
        while not settling.done() and not interrupted():
            record.wait_for(lambda: run.done, _LOOK_EVERY_S)
        if to in (None, END) or interrupted() or run.done:
            break
        paused = paused_ranks(run, logs, ranks)
        tails = logs.read(paused, run.cell, last=1).of
        if not paused or any(tails[rank][-1].operation == to for rank in paused):
            break
    made = table(run, logs)
    return replace(made, next_call="") if run.done else made


def _let_go(cluster: RankCluster, ranks: Ranks, *, for_good: bool) -> dict[int, int | None]:
    """Let paused ranks go on; the collective before which each was paused."""
    question = calls.RESUME if for_good else calls.STEP
    answers = cluster.ask(ranks, question, calls.Nothing(), _ASK_TIMEOUT_S)
    return {
        rank: answer.collective
        for rank, answer in answers.items()
        if not isinstance(answer, CannotAnswer)
    }


def paused_ranks(run: CellRun, logs: CollectiveLogs, ranks: Ranks | None = None) -> Ranks:
    """Those of `ranks` (all by default) that are paused before a collective."""
    tails = logs.read(run.pending, run.cell, last=1).of
    return tuple(
        rank
        for rank in run.pending
        if (ranks is None or rank in ranks)
        and any(map(collective_table.is_paused, tails.get(rank, ())))
    )


def _why_not(run: CellRun, logs: CollectiveLogs) -> str:
    if run.done:
        return "The cell has finished: there is nothing to step. The next: %%ddp --step collective"
    paused = paused_ranks(run, logs)
    if paused:
        return f"Those ranks are not paused; {name_ranks(paused)} can be stepped: %ddp_step"
    return "No rank is paused. %ddp_why says what they wait for, %ddp_abort frees them."
