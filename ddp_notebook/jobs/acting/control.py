"""What a program or a shell can have done to a job on this host: taken over, stepped, ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import targets
from ddp_notebook.jobs.acting.taken_over import TakenOver
from ddp_notebook.jobs.attachment import Attachment
from ddp_notebook.model import StepTable, codec
from ddp_notebook.rank.calls import How, Move
from ddp_notebook.state import collective_table

GOALS = (*collective_table.OPERATIONS, How.END.value)

STEPS_WITHIN_S = 60.0
"""A step is given up then: ranks that compute for longer are not paused yet, and will be."""


class Control:
    """Acts on one job at a time; each answer is JSON. Raises UsageMistake where it cannot.

    The ranks obey this process until they are given back, or until it ends.
    """

    def __init__(self) -> None:
        self._attachment = Attachment()

    def take_over(self, words: Sequence[str]) -> dict[str, Any]:
        """Take over the job that `words` name: nothing changes in it yet."""
        target = self._attachment.attach(words, take_over=True)
        refused = {str(rank): why for rank, why in self._taken().refused.items()}
        return {"job": target.name, "about": target.about, "not_taken_over": refused}

    def step(
        self, ranks: str | None, to: str | None, over: Callable[[], bool] = lambda: False
    ) -> StepTable:
        """Pause ranks before their next collective, or let them do it and pause before the next."""
        taken = self._taken()
        if to is not None and to not in GOALS:
            raise UsageMistake(f"There is no goal {to!r}. There are: {', '.join(GOALS)}")
        until_s = time.monotonic() + STEPS_WITHIN_S
        return taken.step(
            targets.ranks_of(self._target(), ranks),
            Move(How.END if to == How.END else How.COLLECTIVE),
            lambda: over() or time.monotonic() > until_s,
            operation=to if to in collective_table.OPERATIONS else "",
        )

    def abort(self, ranks: str | None) -> dict[str, Any]:
        """End what it runs, as Ctrl-C does; the pids of processes that run all the same."""
        left = self._taken().end(targets.ranks_of(self._target(), ranks))
        return {"job": self._target().name, "still_running": {str(r): n for r, n in left.items()}}

    def give_back(self) -> dict[str, Any]:
        """No rank stays paused, and none obeys any more, but for those that do not answer."""
        job, kept = self._attachment.detach()
        return {"job": job.name if job is not None else None, "not_given_back": list(kept or ())}

    def _taken(self) -> TakenOver:
        if self._attachment.taken_over is None:
            raise UsageMistake("No job is taken over. Take one over first.")
        return self._attachment.taken_over

    def _target(self) -> targets.Target:
        assert self._attachment.current is not None
        return self._attachment.current


def table_to_json(table: StepTable) -> dict[str, Any]:
    """Where each rank is after a step."""
    wire: dict[str, Any] = codec.encode(table)
    return wire
