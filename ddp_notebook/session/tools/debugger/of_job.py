"""The debugger of a job that was taken over: what `Session` has for its own ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ddp_notebook.session.runs.steps import Step
from ddp_notebook.session.tools.debugger.breakpoints import Breakpoints
from ddp_notebook.session.tools.debugger.evaluating import evaluate
from ddp_notebook.session.tools.debugger.looking import Looking
from ddp_notebook.session.tools.debugger.subjects import JobRanks

if TYPE_CHECKING:
    from ddp_notebook.jobs.acting import TakenOver
    from ddp_notebook.model import Ranks, StepTable, VariableTable


class JobDebugger:
    """Breakpoints, frames, expressions and steps of `taken`."""

    def __init__(self, taken: TakenOver) -> None:
        self.taken = taken
        self._ranks = ranks = JobRanks(taken)
        self.breakpoints = Breakpoints(ranks)
        self.looking = Looking(ranks)
        self._evaluate = partial(evaluate, ranks, self.looking)

    def evaluate(
        self,
        source: str,
        ranks: Ranks | None = None,
        up: int | None = None,
        *,
        assign: bool = False,
        own_text: bool = False,
    ) -> VariableTable:
        """As `evaluating.evaluate`. Raises UsageMistake."""
        return self._evaluate(source, ranks, up, assign=assign, own_text=own_text)

    def step(self, wanted: Step, interrupted: Callable[[], bool]) -> StepTable:
        """As `TakenOver.step`; with the watched expressions. Raises UsageMistake."""
        self.breakpoints.renew()
        self.breakpoints.ranks_move()
        table = self.taken.step(
            wanted.ranks,
            wanted.move,
            interrupted,
            operation=wanted.operation,
            by_line=wanted.by_line,
            to_stop=self.breakpoints.stop_ranks,
        )
        return self.looking.with_watched(table, self._evaluate)

    def wait(self, timeout_s: float | None, interrupted: Callable[[], bool]) -> StepTable:
        """As `TakenOver.wait`; with the watched expressions."""
        self.breakpoints.renew()
        return self.looking.with_watched(self.taken.wait(timeout_s, interrupted), self._evaluate)
