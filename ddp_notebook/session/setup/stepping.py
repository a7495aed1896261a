"""One step of set-up: send paused ranks on and wait until each arrived, or waits for others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import Activity, Ranks, Stage, Status, StepTable, name_ranks
from ddp_notebook.session.setup.bring_up import BringUp
from ddp_notebook.state.setup_table import step_table

_SETTLED_S = 0.5
"""A rank that has waited so long in a stage will not arrive in this step."""


def step(
    bringup: BringUp, ranks: Ranks | None, to: Stage | None, interrupted: Callable[[], bool]
) -> StepTable:
    """Move paused ranks on. Raises UsageMistake when none of them can be moved."""
    moving = _short_of(bringup, ranks, None)
    if not moving:
        raise UsageMistake(_why_not(bringup, ranks))
    while moving and not interrupted():
        bringup.send_on(moving, to)
        _await_arrival(bringup, moving, interrupted)
        # Ranks that waited for these when the step began have arrived somewhere on the way.
        moving = _short_of(bringup, ranks, to) if to is not None else ()
    return table(bringup)


def _short_of(bringup: BringUp, ranks: Ranks | None, to: Stage | None) -> Ranks:
    """The paused ranks, of `ranks` (None: of all), that have not passed `to` (None: any stage)."""
    snapshot = bringup.record.snapshot
    return tuple(
        rank
        for rank in snapshot.with_status(Status.PAUSED)
        if (ranks is None or rank in ranks)
        and (to is None or (snapshot.ranks[rank].stage or Stage.LAUNCHED).number < to.number)
    )


def table(bringup: BringUp) -> StepTable:
    """Where all ranks stand, with who hosts the store and whose keys are in it."""
    made = step_table(bringup.record.snapshot, bringup.store)
    return replace(made, details=(*_the_store(bringup), *made.details))


def _the_store(bringup: BringUp) -> tuple[str, ...]:
    address = bringup.told.values.get("MASTER_ADDR", "")
    if not address:
        return ()
    port, keeper = bringup.told.values["MASTER_PORT"], bringup.processes.keeper_pid
    host = "rank 0" if bringup.store == "rank0" else f"the session (pid {keeper})"
    joined = [
        s.rank
        for s in bringup.record.snapshot.ranks
        if Stage.RENDEZVOUS in (s.entering, s.stage)
        or (s.stage is not None and s.stage.number > Stage.RENDEZVOUS.number)
    ]
    claimed = {bringup.settings.get(rank, {}).get("RANK") or str(rank) for rank in joined}
    keys = ", ".join(f"join/{rank}" for rank in sorted(claimed)) or "none yet"
    return (f"store: {address}:{port}, hosted by {host}", f"keys of ranks in it: {keys}")


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
        picture = tuple((s.status, s.stage, s.entering, s.doing) for s in states)
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
    asked = ranks or ()
    is_ = "is" if len(asked) == 1 else "are"
    return (
        f"{name_ranks(asked).capitalize()} {is_} not paused; {name_ranks(paused)} can be stepped: "
        "%ddp_step"
    )
