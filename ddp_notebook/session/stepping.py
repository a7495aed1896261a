"""`%ddp_step`: one verb moves whatever is paused, in a run, in setup or in DDP's construction."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_notebook import files
from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import (
    LineLeft,
    Ranks,
    Stage,
    StepTable,
    name_ranks,
)
from ddp_notebook.model.ddp import WrapStage
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import How, answered
from ddp_notebook.session.bring_up import BringUp
from ddp_notebook.session.guards import check_ranks
from ddp_notebook.session.interrupts import noted, quick_switches
from ddp_notebook.session.runs.run import CellRun, Settling, paused_ranks
from ddp_notebook.views import step_rows

if TYPE_CHECKING:
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.registry import RunRegistry
    from ddp_notebook.session.set_up import SetUp
    from ddp_notebook.session.tools.ddp_construction import DdpConstruction, Wrap

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
        """The move for a rank that is paused at a line."""
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


def step_run(run: CellRun, wanted: Step, interrupted: Callable[[], bool]) -> StepTable:
    """Resume paused ranks to the next line, or past their collective to the next one.

    Raises UsageMistake when no rank is paused, or none can reach its goal, and SessionLost.
    """
    # To an operation there is no jump: which collective comes next is known once ranks pause before
    # it, so they are let go one at a time until some are before that one.
    while True:
        moving = paused_ranks(run, wanted.ranks)
        if not moving:
            if run.done:
                raise UsageMistake(
                    f"{run.heading} has finished: there is nothing to step. To stop in the next: "
                    "breakpoint() in it, or %ddp_break LINE; or %%ddp --step collective"
                )
            if paused := paused_ranks(run):
                raise UsageMistake(
                    f"These ranks are not paused; {name_ranks(paused)} can be stepped: %ddp_step"
                )
            raise UsageMistake(
                "No rank is paused. %ddp_why says what they wait for, %ddp_abort frees them."
            )
        left = _let_go(run, moving, wanted)
        settling = Settling(run, left)
        while not settling.done() and not interrupted():
            run.record.wait_for(lambda: run.stops.keys() >= set(run.pending), 0.02)
            run.record.check_not_lost()
        if not wanted.operation or interrupted() or run.done:
            break
        paused = paused_ranks(run, wanted.ranks)
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
        # Where some ranks moved, the table shows who did not. An error is right only if nothing has
        # changed on any rank.
        if problems and all(problems):
            raise UsageMistake(f"{'; '.join(sorted(problems))}. The ranks did not move.")
        left = {rank: answer.collective for rank, answer in answers.items()}
    if wanted.to == END and wanted.ranks is None:
        # Steps that are not over end, too, such as of ranks in a collective that waits for others.
        _move(run, tuple(rank for rank in run.pending if rank not in ranks), calls.Move(How.END))
    question = calls.RESUME if wanted.to == END else calls.STEP
    asked = run.cluster.ask(others, question, calls.Nothing(), _ASK_TIMEOUT_S)
    return left | {rank: paused.collective for rank, paused in answered(asked).items()}


def _move(run: CellRun, ranks: Ranks, move: calls.Move) -> dict[int, calls.Moved]:
    """Have ranks leave their lines; return their answers.

    They do not say themselves that they have left: it is known here first.
    """
    asked = run.cluster.ask(ranks, calls.MOVE, move, _ASK_TIMEOUT_S)
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


class Stepping:
    """Finds what is paused, and steps it."""

    def __init__(
        self, record: Record, runs: RunRegistry, set_up: SetUp, construction: DdpConstruction
    ) -> None:
        self._record = record
        self._runs = runs
        self._set_up = set_up
        self._construction = construction

    def table(self) -> StepTable:
        """Return where the ranks stand in setup."""
        return self._set_up.need("%ddp_step").table()

    def step(self, wanted: Step) -> StepTable:
        """Move what is paused one on, or through all up to the goal. Raises UsageMistake."""
        bring_up = self._set_up.need("%ddp_step")
        ranks, to = wanted.ranks, wanted.to
        if ranks is not None:
            check_ranks(ranks, self._record.snapshot)
        current, half_way = self._runs.to_step(ranks), self._set_up.half_way
        if current is not None and current.paused and not (current.done and half_way):
            with quick_switches(), noted() as interrupted:
                made = step_run(current, wanted, interrupted)
                self._runs.await_released()
                return made
        if wanted.by_line:
            raise UsageMistake(
                "No rank is paused at a line. Write breakpoint() in a %%ddp cell, or set one: "
                "%ddp_break LINE, %ddp_break train.py:42"
            )
        if half_way:
            return _step_stage(bring_up, ranks, to)
        if current is not None and current.pending:
            raise UsageMistake(
                f"{current.heading} is still running on {name_ranks(current.pending)}, and no "
                "rank is paused. What they wait for: %ddp_why; what they do: %ddp_where; to free "
                "them: %ddp_abort. To stop at a line that they come to: %ddp_break 7, %ddp_break "
                "train.py:42"
            )
        if self._construction.latest is not None:
            return _step_construction(self._construction.latest, ranks, to)
        return _step_stage(bring_up, ranks, to)


def _step_stage(bring_up: BringUp, ranks: Ranks | None, to: str | None) -> StepTable:
    stages = {stage.value: stage for stage in Stage} | {END: Stage.VERIFIED}
    if bring_up.record.snapshot.ready:
        raise UsageMistake(bring_up.why_no_step(ranks))
    if to is not None and to not in stages:
        raise UsageMistake(f"--to must be one of {', '.join(list(stages)[1:])}, not {to!r}.")
    with noted() as interrupted:
        return bring_up.step(ranks, stages[to] if to else None, interrupted)


def _step_construction(wrapping: Wrap, ranks: Ranks | None, to: str | None) -> StepTable:
    if wrapping.stage is None:
        raise UsageMistake(
            "There is nothing to step: setup and %ddp_wrap are complete. The buckets "
            "after a training step: %ddp_wrap --buckets"
        )
    if ranks is not None:
        raise UsageMistake("A stage of %ddp_wrap takes every rank: type %ddp_step")
    stages = {stage.value: stage for stage in WrapStage} | {END: WrapStage.REDUCER}
    if to is not None and to not in stages:
        raise UsageMistake(
            f"{wrapping.name} is being wrapped: --to is one of {', '.join(stages)}, not {to!r}."
        )
    return wrapping.step(stages[to] if to is not None else None)
