"""Steps a run by lines or by collectives: resumes ranks and waits until each is paused again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_notebook import files
from ddp_notebook.errors import SessionLost, UsageMistake
from ddp_notebook.model import (
    Activity,
    Collective,
    LineLeft,
    Ranks,
    StepTable,
    name_ranks,
)
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import How, answered
from ddp_notebook.session.processes.collective_logs import READ_LAST
from ddp_notebook.session.runs.run import CellRun
from ddp_notebook.state import collective_table
from ddp_notebook.state.line_table import line_table

if TYPE_CHECKING:
    from ddp_notebook.cluster.rank_cluster import RankCluster
    from ddp_notebook.session.processes.collective_logs import CollectiveLogs
    from ddp_notebook.session.record import Record

END = "end"
"""As a goal: do not pause any rank again."""
_STILL_S = 0.3
"""A rank that is not paused and has issued nothing for this long is asked what it is doing."""
_LOOKS = 2
"""Number of consecutive checks that must find it waiting."""
_LOOK_EVERY_S = 0.02
_ASK_TIMEOUT_S = 1.0


class Settling:
    """Whether every rank of a run is paused, waits in a collective, or has finished."""

    def __init__(
        self,
        run: CellRun,
        cluster: RankCluster,
        logs: CollectiveLogs,
        left: Mapping[int, int | None] | None = None,
    ) -> None:
        """`left` holds the numbers of the collectives at which ranks were paused before."""
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
        if self._run.stops.keys() >= set(pending):
            return True
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
        reports = answered(answers).values()
        # A rank that does not answer in time, or waits only briefly, may be making progress.
        waiting = len(reports) == len(free) and all(
            report.activity is Activity.WAITING for report in reports
        )
        self._looks = self._looks + 1 if waiting else 0
        return self._looks >= _LOOKS

    def _stands(self, rank: int, tail: Sequence[Collective]) -> bool:
        return rank in self._run.stops or any(
            collective_table.is_paused(record) and record.number != self._left.get(rank, -1)
            for record in tail
        )


def table(run: CellRun, logs: CollectiveLogs) -> StepTable:
    """Where the ranks of a run stand."""
    stops = dict(run.stops)
    # A rank paused at a line is shown at that line; of its collectives only the count is shown.
    last = 1 if stops.keys() >= set(run.pending) else READ_LAST
    collectives = logs.read(run.ranks, run.cell, last)
    made = collective_table.step_table(
        collectives,
        run.ranks,
        run.pending,
        time.monotonic_ns(),
        what=run.script or "The cell",
        failures=run.failures,
    )
    return line_table(stops, made) if stops else made


def source_of(run: CellRun, file: str) -> str:
    """The text of a cell or a file, with the same line numbers as on the ranks."""
    known = run.sources.get(file) or run.earlier.get(file)
    if known is not None:
        magic, _, text = known.partition("\n")
        return f"\n{text}" if magic.startswith("%%") else known
    return files.source(Path(file))


@dataclass(frozen=True, slots=True)
class Step:
    """How far paused ranks continue. `to` is a stage, an operation, collective, a line or end."""

    ranks: Ranks | None = None
    to: str | None = None
    how: How = How.NEXT

    @property
    def by_line(self) -> bool:
        """True when the goal is about lines, also for ranks paused at a collective."""
        return self.how is not How.NEXT or (self.to is not None and self.to.isdecimal())

    @property
    def move(self) -> calls.Move:
        """The same for a rank that is paused at a line."""
        if self.to is None:
            return calls.Move(self.how)
        if self.to == END:
            return calls.Move(How.END)
        if self.to.isdecimal():
            return calls.Move(How.LINE, int(self.to))
        return calls.Move(How.COLLECTIVE)

    @property
    def operation(self) -> str:
        """The operation before which ranks are to be paused; empty for none."""
        return self.to if self.to in collective_table.OPERATIONS else ""


def step(
    run: CellRun,
    cluster: RankCluster,
    logs: CollectiveLogs,
    record: Record,
    wanted: Step,
    interrupted: Callable[[], bool],
) -> StepTable:
    """Resume paused ranks to the next line, or past their collective to the next one.

    Raises UsageMistake when no rank is paused, or none can reach its goal, and SessionLost.
    """
    while True:
        moving = paused_ranks(run, logs, wanted.ranks)
        if not moving:
            raise UsageMistake(_why_not(run, logs))
        settling = Settling(run, cluster, logs, _let_go(run, cluster, record, moving, wanted))
        while not settling.done() and not interrupted():
            record.wait_for(lambda: run.done or _all_at_lines(run), _LOOK_EVERY_S)
            if ended := record.snapshot.ended:
                raise SessionLost(f"{ended} Start again: %ddp_init")
        if not wanted.operation or interrupted() or run.done:
            break
        paused = paused_ranks(run, logs, wanted.ranks)
        tails = logs.read(paused, run.cell, last=1).of
        if not paused or any(tails[rank][-1].operation == wanted.operation for rank in paused):
            break
    made = table(run, logs)
    title = f"{made.title}{_not_reached(run, moving, wanted)}"
    return replace(made, title=title, next_call="" if run.done else made.next_call)


def _not_reached(run: CellRun, moved: Ranks, wanted: Step) -> str:
    """A sentence on ranks that went to a line, and have ended without it; empty for none."""
    ended = tuple(rank for rank in moved if rank not in run.pending)
    if wanted.move.how is not How.LINE or not ended:
        return ""
    return f" {name_ranks(ended).capitalize()} did not reach line {wanted.to}."


def _all_at_lines(run: CellRun) -> bool:
    return run.stops.keys() >= set(run.pending)


def _let_go(
    run: CellRun, cluster: RankCluster, record: Record, ranks: Ranks, wanted: Step
) -> dict[int, int | None]:
    """Resume paused ranks; returns the collective before which each was paused."""
    at_lines = tuple(rank for rank in ranks if rank in run.stops or wanted.by_line)
    others = tuple(rank for rank in ranks if rank not in at_lines)
    if wanted.move.how == How.COLLECTIVE:
        run.pausing = True
    left = _move(run, cluster, record, at_lines, wanted.move) if at_lines else {}
    if wanted.to == END and wanted.ranks is None:
        others_in_run = tuple(rank for rank in run.pending if rank not in ranks)
        _release(run, cluster, record, others_in_run)
    question = calls.RESUME if wanted.to == END else calls.STEP
    asked = cluster.ask(others, question, calls.Nothing(), _ASK_TIMEOUT_S) if others else {}
    return left | {rank: paused.collective for rank, paused in answered(asked).items()}


def _release(run: CellRun, cluster: RankCluster, record: Record, ranks: Ranks) -> None:
    """Cancel unfinished steps, such as of ranks in a collective that waits for others."""
    moved = cluster.ask(ranks, calls.MOVE, calls.Move(How.END), _ASK_TIMEOUT_S) if ranks else {}
    _have_left(run, record, answered(moved))


def _move(
    run: CellRun, cluster: RankCluster, record: Record, ranks: Ranks, move: calls.Move
) -> dict[int, int | None]:
    """Resume ranks paused at lines; returns the collective before which each was paused."""
    moved = cluster.ask(ranks, calls.MOVE, move, _ASK_TIMEOUT_S)
    answers = answered(moved)
    problems = {answer.problem for answer in answers.values()}
    if problems and all(problems):
        raise UsageMistake(f"{'; '.join(sorted(problems))}. The ranks did not move.")
    _have_left(run, record, answers)
    return {rank: answer.collective for rank, answer in answers.items()}


def _have_left(run: CellRun, record: Record, answers: Mapping[int, calls.Moved]) -> None:
    """Ranks have left their stops. They do not say it themselves: it is known here first."""
    now_ns = time.monotonic_ns()
    left = [
        LineLeft(rank=rank, cell=run.cell, stop=answer.stop, heard_ns=now_ns)
        for rank, answer in answers.items()
        if answer.stop
    ]
    if left:
        record.add(left)


def paused_ranks(run: CellRun, logs: CollectiveLogs, ranks: Ranks | None = None) -> Ranks:
    """Those of `ranks` (all by default) that are paused, at a line or before a collective."""
    among = tuple(rank for rank in run.pending if ranks is None or rank in ranks)
    others = tuple(rank for rank in among if rank not in run.stops)
    tails = logs.read(others, run.cell, last=1).of if others else {}
    held = {rank for rank, tail in tails.items() if any(map(collective_table.is_paused, tail))}
    return tuple(rank for rank in among if rank in held or rank in run.stops)


def _why_not(run: CellRun, logs: CollectiveLogs) -> str:
    if run.done:
        return (
            f"{run.heading} has finished: there is nothing to step. To stop in the next: "
            "breakpoint() in it, or %ddp_break LINE; or %%ddp --step collective"
        )
    paused = paused_ranks(run, logs)
    if paused:
        return f"Those ranks are not paused; {name_ranks(paused)} can be stepped: %ddp_step"
    return "No rank is paused. %ddp_why says what they wait for, %ddp_abort frees them."
