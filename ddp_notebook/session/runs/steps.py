"""Steps a run by lines or by collectives: resumes ranks and waits until each is paused again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_notebook import files
from ddp_notebook.errors import SessionLost, UsageMistake
from ddp_notebook.model import (
    LineLeft,
    Ranks,
    StepTable,
    name_ranks,
)
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import How, answered
from ddp_notebook.session.runs.settling import Settling, paused_ranks
from ddp_notebook.views import step_rows

if TYPE_CHECKING:
    from ddp_notebook.session.runs.run import CellRun

END = "end"
"""As a goal: do not pause any rank again."""
_ASK_TIMEOUT_S = 1.0


def source_of(run: CellRun, file: str) -> str:
    """Return the text of a cell or a file, with the same line numbers as on the ranks."""
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
        return self.to if self.to in step_rows.OPERATIONS else ""


def step(run: CellRun, wanted: Step, interrupted: Callable[[], bool]) -> StepTable:
    """Resume paused ranks to the next line, or past their collective to the next one.

    Raises UsageMistake when no rank is paused, or none can reach its goal, and SessionLost.
    """
    while True:
        moving = paused_ranks(run.events, run.logs, wanted.ranks)
        if not moving:
            raise UsageMistake(_why_not(run))
        left = _let_go(run, moving, wanted)
        settling = Settling(run.events, run.logs, run.cluster, left)
        while not settling.done() and not interrupted():
            run.record.wait_for(lambda: run.stops.keys() >= set(run.pending), 0.02)
            if ended := run.record.snapshot.ended:
                raise SessionLost(f"{ended} Start again: %ddp_init")
        if not wanted.operation or interrupted() or run.done:
            break
        paused = paused_ranks(run.events, run.logs, wanted.ranks)
        tails = run.logs.read(paused, run.cell, last=1).of
        if not paused or any(tails[rank][-1].operation == wanted.operation for rank in paused):
            break
    made = run.step_table()
    title, gone = made.title, tuple(rank for rank in moving if rank not in run.pending)
    if wanted.move.how is How.LINE and gone:
        title += f" {name_ranks(gone).capitalize()} did not reach line {wanted.to}."
    return replace(made, title=title, next_call="" if run.done else made.next_call)


def _let_go(run: CellRun, ranks: Ranks, wanted: Step) -> dict[int, int | None]:
    """Resume paused ranks; returns the collective before which each was paused."""
    at_lines = tuple(rank for rank in ranks if rank in run.stops or wanted.by_line)
    others = tuple(rank for rank in ranks if rank not in at_lines)
    if wanted.move.how == How.COLLECTIVE:
        run.pausing = True
    left: dict[int, int | None] = {}
    if at_lines:
        answers = _move(run, at_lines, wanted.move)
        problems = {answer.problem for answer in answers.values()}
        if problems and all(problems):
            raise UsageMistake(f"{'; '.join(sorted(problems))}. The ranks did not move.")
        left = {rank: answer.collective for rank, answer in answers.items()}
    if wanted.to == END and wanted.ranks is None:
        # Steps that are not over end, too, such as of ranks in a collective that waits for others.
        _move(run, tuple(rank for rank in run.pending if rank not in ranks), calls.Move(How.END))
    question = calls.RESUME if wanted.to == END else calls.STEP
    asked = run.cluster.ask(others, question, calls.Nothing(), _ASK_TIMEOUT_S) if others else {}
    return left | {rank: paused.collective for rank, paused in answered(asked).items()}


def _move(run: CellRun, ranks: Ranks, move: calls.Move) -> dict[int, calls.Moved]:
    """Have ranks leave their lines; return their answers.

    They do not say themselves that they have left: it is known here first.
    """
    asked = run.cluster.ask(ranks, calls.MOVE, move, _ASK_TIMEOUT_S) if ranks else {}
    answers = answered(asked)
    now_ns = time.monotonic_ns()
    left = [
        LineLeft(rank=rank, cell=run.cell, stop=answer.stop, heard_ns=now_ns)
        for rank, answer in answers.items()
        if answer.stop
    ]
    if left:
        run.record.add(left)
    return answers


def _why_not(run: CellRun) -> str:
    if run.done:
        return (
            f"{run.heading} has finished: there is nothing to step. To stop in the next: "
            "breakpoint() in it, or %ddp_break LINE; or %%ddp --step collective"
        )
    paused = paused_ranks(run.events, run.logs)
    if paused:
        return f"Those ranks are not paused; {name_ranks(paused)} can be stepped: %ddp_step"
    return "No rank is paused. %ddp_why says what they wait for, %ddp_abort frees them."
