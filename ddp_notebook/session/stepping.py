"""One step of set-up: send paused ranks on and wait until each arrived, or waits for others."""

from __future__ import annotations

import time
from collections.abc import Callable

from ddp_notebook.analysis.steps import step_table
from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import Activity, Ranks, Stage, Status, StepTable, name_ranks
from ddp_notebook.session.bringup import BringUp

_SETTLED_S = 0.5
"""A rank that has waited so long in a stage will not arrive in this step."""


def step(
    bringup: BringUp, ranks: Ranks | None, to: Stage | None, interrupted: Callable[[], bool]
) -> StepTable:
    """Move paused ranks on. Raises UsageMistake when none of them can be moved."""
    paused = bringup.record.snapshot.with_status(Status.PAUSED)
    moving = tuple(rank for rank in paused if ranks is None or rank in ranks)
    if not moving:
        raise UsageMistake(_why_not(bringup, ranks))
    bringup.send_on(moving, to)
    _await_arrival(bringup, moving, interrupted)
    return table(bringup)


def table(bringup: BringUp) -> StepTable:
    """Where all ranks stand."""
    return step_table(bringup.record.snapshot, bringup.store)


def _await_arrival(bringup: BringUp, moving: Ranks, interrupted: Callable[[], bool]) -> None:
    """Wait until every rank in motion has arrived, failed, died, or can only wait for others."""
    record = bringup.record
    looked_at: object = None
    since_s = time.monotonic()

    def arrived() -> bool:
        states = record.snapshot.ranks
        inside = [r for r in bringup.everyone if states[r].status is Status.SETTING_UP]
        return not inside and bringup.answered(moving)

    while not record.wait_for(arrived, 0.05) and not interrupted():
        states = record.snapshot.ranks
        picture = tuple((s.status, s.stage, s.entering) for s in states)
        if picture != looked_at:
            looked_at, since_s = picture, time.monotonic()
        elif time.monotonic() - since_s > _SETTLED_S:
            since_s = time.monotonic()
            case = bringup.look()
            if not case.where(Activity.BUSY):
                return


def _why_not(bringup: BringUp, ranks: Ranks | None) -> str:
    snapshot = bringup.record.snapshot
    paused = snapshot.with_status(Status.PAUSED)
    if not paused:
        if snapshot.ready:
            return (
                "Set-up is complete: there is nothing to step. Begin again: %ddp_shutdown, "
                "then %ddp_init --step"
            )
        return "No rank is paused. %ddp_why says what they wait for, %ddp_abort frees them."
    asked = name_ranks(ranks or ())
    return f"{asked.capitalize()} is not paused; {name_ranks(paused)} can be stepped: %ddp_step"
