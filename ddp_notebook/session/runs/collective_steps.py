"""Steps through a cell collective by collective: let ranks go, and wait until each stands again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import (
    Activity,
    Collective,
    Ranks,
    StepTable,
    evidence_from_json,
    name_ranks,
)
from ddp_notebook.session.runs.run import CellRun
from ddp_notebook.state import collective_table

if TYPE_CHECKING:
    from ddp_notebook.session.processes.processes import Processes
    from ddp_notebook.session.record import Record

END = "end"
"""As a goal: hold nobody any more."""
_STILL_S = 0.3
"""A rank that is not held and has issued nothing for so long is asked what it does."""
_LOOKS = 2
"""So often in a row it must be said to wait."""
_LOOK_EVERY_S = 0.02
_ASK_TIMEOUT_S = 1.0


class Settling:
    """Whether every rank of a cell stands before a collective, waits in one, or has finished."""

    def __init__(
        self, run: CellRun, processes: Processes, left: Mapping[int, int | None] | None = None
    ) -> None:
        """`left` are the numbers of the collectives before which ranks were held until now."""
        self._left = left or {}
        self._run = run
        self._processes = processes
        self._picture: object = None
        self._since_s = time.monotonic()
        self._looks = 0

    def done(self) -> bool:
        """True when no rank can get on without being stepped."""
        pending = self._run.pending
        tails = self._processes.rings.read(pending, self._run.cell, last=1).of
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
        answers = self._processes.cluster.ask(free, "evidence", _ASK_TIMEOUT_S)
        evidence = [evidence_from_json(a) for a in answers.values() if "error" not in a]
        # One that does not answer in time, or waits for a moment only, may be getting on.
        waiting = len(evidence) == len(free) and all(
            each.activity is Activity.WAITING for each in evidence
        )
        self._looks = self._looks + 1 if waiting else 0
        return self._looks >= _LOOKS

    def _stands(self, rank: int, tail: Sequence[Collective]) -> bool:
        return any(
            collective_table.is_paused(each) and each.number != self._left.get(rank, -1)
            for each in tail
        )


def table(run: CellRun, processes: Processes) -> StepTable:
    """Where the ranks of a cell stand."""
    collectives = processes.rings.read(run.ranks, run.cell)
    return collective_table.step_table(collectives, run.ranks, run.pending, time.monotonic_ns())


def step(
    run: CellRun,
    processes: Processes,
    record: Record,
    ranks: Ranks | None,
    to: str | None,
    interrupted: Callable[[], bool],
) -> StepTable:
    """Let held ranks (all, or `ranks`) issue their collective and go on to the next.

    `to` is an operation, or "end". Raises UsageMistake when none of them is held.
    """
    while True:
        moving = held(run, processes, ranks)
        if not moving:
            raise UsageMistake(_why_not(run, processes, ranks))
        question = "let go for good" if to == END else "let go"
        answers = processes.cluster.ask(moving, question, _ASK_TIMEOUT_S)
        left = {rank: answer.get("at") for rank, answer in answers.items()}
        settling = Settling(run, processes, left)
        while not settling.done() and not interrupted():
            record.wait_for(lambda: run.done, _LOOK_EVERY_S)
        if to in (None, END) or interrupted() or run.done:
            break
        standing = held(run, processes, ranks)
        tails = processes.rings.read(standing, run.cell, last=1).of
        if not standing or any(tails[rank][-1].operation == to for rank in standing):
            break
    made = table(run, processes)
    return replace(made, next_call="") if run.done else made


def held(run: CellRun, processes: Processes, ranks: Ranks | None = None) -> Ranks:
    """Those of `ranks` (all by default) that stand before a collective until they are stepped."""
    tails = processes.rings.read(run.pending, run.cell, last=1).of
    return tuple(
        rank
        for rank in run.pending
        if (ranks is None or rank in ranks)
        and any(map(collective_table.is_paused, tails.get(rank, ())))
    )


def _why_not(run: CellRun, processes: Processes, ranks: Ranks | None) -> str:
    if run.done:
        return "The cell has finished: there is nothing to step. The next: %%ddp --step collective"
    standing = held(run, processes)
    if standing:
        return f"Those ranks are not held; {name_ranks(standing)} can be stepped: %ddp_step"
    return "No rank is paused. %ddp_why says what the ranks wait for, %ddp_abort frees them."
