"""Steps paused ranks: one stage of set-up or of DDP's construction, or one collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import (
    Activity,
    Ranks,
    RankState,
    Stage,
    Status,
    StepTable,
    name_ranks,
    verb,
)
from ddp_notebook.model.ddp import WrapStage
from ddp_notebook.session.guards import check_ranks
from ddp_notebook.session.interrupts import noted, quick_switches
from ddp_notebook.session.runs import steps
from ddp_notebook.session.runs.steps import END, Step
from ddp_notebook.session.setup.bring_up import BringUp
from ddp_notebook.state.setup_table import step_table

if TYPE_CHECKING:
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.registry import RunRegistry
    from ddp_notebook.session.runs.run import CellRun
    from ddp_notebook.session.setup.set_up import SetUp
    from ddp_notebook.session.tools.ddp_construction import DdpConstruction, Wrap

_SETTLED_S = 0.5
"""A rank that has waited so long in a stage will not arrive in this step."""
_LATE_S = 15.0
"""Nor will one that has not answered, or left its pause, for so long."""


class Stepping:
    """`%ddp_step`: one verb moves whatever is paused."""

    def __init__(
        self, record: Record, runs: RunRegistry, set_up: SetUp, construction: DdpConstruction
    ) -> None:
        self._record = record
        self._runs = runs
        self._set_up = set_up
        self._construction = construction

    def step(self, wanted: Step) -> StepTable:
        """`Session.step`."""
        bring_up = self._set_up.need("%ddp_step")
        ranks, to = wanted.ranks, wanted.to
        if ranks is not None:
            check_ranks(ranks, self._record.snapshot)
        current, half_way = self._runs.to_step(ranks), self._set_up.half_way
        if current is not None and current.paused and not (current.done and half_way):
            return self._step_run(current, wanted)
        if wanted.by_line:
            raise UsageMistake(
                "No rank is paused at a line. Write breakpoint() in a %%ddp cell, or set one: "
                "%ddp_break LINE, %ddp_break train.py:42"
            )
        if half_way:
            return _step_stage(bring_up, ranks, to)
        if current is not None and current.pending:
            raise UsageMistake(
                f"{current.heading} is not over on {name_ranks(current.pending)}, and no "
                "rank is paused. What they wait for: %ddp_why; what they do: %ddp_where; to free "
                "them: %ddp_abort. To stop at a line that they come to: %ddp_break 7, %ddp_break "
                "train.py:42"
            )
        if self._construction.latest is not None:
            return _step_construction(self._construction.latest, ranks, to)
        return _step_stage(bring_up, ranks, to)

    def _step_run(self, current: CellRun, wanted: Step) -> StepTable:
        with quick_switches(), noted() as interrupted:
            made = steps.step(current, wanted, interrupted)
            self._runs.await_released()
            return made

    def table(self) -> StepTable:
        """Where the ranks stand in set-up."""
        return table(self._set_up.need("%ddp_step"))


def _step_stage(bring_up: BringUp, ranks: Ranks | None, to: str | None) -> StepTable:
    stages = {stage.value: stage for stage in Stage} | {END: Stage.VERIFIED}
    if bring_up.record.snapshot.ready:
        raise UsageMistake(_why_not(bring_up, ranks))
    if to is not None and to not in stages:
        raise UsageMistake(f"--to is one of {', '.join(list(stages)[1:])}, not {to!r}.")
    with noted() as interrupted:
        return step(bring_up, ranks, stages[to] if to else None, interrupted)


def _step_construction(wrapping: Wrap, ranks: Ranks | None, to: str | None) -> StepTable:
    if wrapping.stage is None:
        raise UsageMistake(
            "There is nothing to step: set-up and %ddp_wrap are complete. The buckets "
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


def step(
    bring_up: BringUp, ranks: Ranks | None, to: Stage | None, interrupted: Callable[[], bool]
) -> StepTable:
    """Move paused ranks on. Raises UsageMistake when none of them can be moved."""
    moving = _short_of(bring_up, ranks, None)
    if not moving:
        raise UsageMistake(_why_not(bring_up, ranks))
    while moving and not interrupted():
        before = bring_up.record.snapshot.ranks
        bring_up.send_on(moving, to)
        _await_arrival(bring_up, [before[rank] for rank in moving], interrupted)
        # Ranks that waited for these when the step began have made progress meanwhile.
        moving = _short_of(bring_up, ranks, to) if to is not None else ()
    return table(bring_up)


def _short_of(bring_up: BringUp, ranks: Ranks | None, to: Stage | None) -> Ranks:
    """The paused ranks, of `ranks` (None: of all), that have not passed `to` (None: any stage)."""
    snapshot = bring_up.record.snapshot
    return tuple(
        rank
        for rank in snapshot.with_status(Status.PAUSED)
        if (ranks is None or rank in ranks)
        and (to is None or (snapshot.ranks[rank].stage or Stage.LAUNCHED).number < to.number)
    )


def table(bring_up: BringUp) -> StepTable:
    """Where all ranks stand, with who hosts the store and whose keys are in it."""
    made = step_table(bring_up.record.snapshot, bring_up.store)
    return replace(made, details=(*_the_store(bring_up), *made.details))


def _the_store(bring_up: BringUp) -> tuple[str, ...]:
    address = bring_up.launch.values.get("MASTER_ADDR", "")
    if not address:
        return ()
    port, pid = bring_up.launch.values["MASTER_PORT"], bring_up.processes.store_pid
    host = "rank 0" if bring_up.store == "rank0" else f"the session (pid {pid})"
    joined = [
        s.rank
        for s in bring_up.record.snapshot.ranks
        if Stage.RENDEZVOUS in (s.entering, s.stage)
        or (s.stage is not None and s.stage.number > Stage.RENDEZVOUS.number)
    ]
    claimed = {bring_up.settings.get(rank, {}).get("RANK") or str(rank) for rank in joined}
    keys = ", ".join(f"join/{rank}" for rank in sorted(claimed)) or "none yet"
    return (f"store: {address}:{port}, hosted by {host}", f"keys of ranks in it: {keys}")


def _await_arrival(
    bring_up: BringUp, before: Sequence[RankState], interrupted: Callable[[], bool]
) -> None:
    """Wait until every rank in motion has arrived, failed, died, or can only wait for others.

    `before` is what these ranks were when they were sent on.
    """
    record = bring_up.record
    moving = tuple(state.rank for state in before)
    looked_at: object = None
    activities: tuple[Activity, ...] = ()
    since_s = changed_s = time.monotonic()

    def still_before() -> Ranks:
        states = record.snapshot.ranks
        paused = (state for state in before if states[state.rank].status is Status.PAUSED)
        return tuple(state.rank for state in paused if states[state.rank].stage == state.stage)

    def arrived() -> bool:
        states = record.snapshot.ranks
        inside = [r for r in bring_up.everyone if states[r].status is Status.SETTING_UP]
        # A call can return before the rank's own event has arrived.
        return not inside and bring_up.answered(moving) and not still_before()

    while not record.wait_for(arrived, 0.05) and not interrupted():
        states = record.snapshot.ranks
        picture = tuple((s.status, s.stage, s.entering, s.doing) for s in states)
        if picture != looked_at:
            looked_at, since_s = picture, time.monotonic()
            changed_s = since_s
        elif time.monotonic() - since_s > _SETTLED_S:
            since_s = time.monotonic()
            case, doing = bring_up.look(), activities
            activities = tuple(report.activity for report in case.ranks)
            # On a busy machine a rank may not have left its pause yet, nor answer in time; what it
            # says directly after that may be of a moment in which it goes on.
            silent = [r for r in case.where(Activity.SILENT) if not bring_up.answered((r,))]
            stopped = {e.rank for e in case.ranks if e.process == "stopped"}
            late = {*still_before(), *silent} - stopped
            settled = not case.where(Activity.BUSY) and doing in ((), activities)
            if settled and (not late or since_s - changed_s > _LATE_S):
                return


def _why_not(bring_up: BringUp, ranks: Ranks | None) -> str:
    snapshot = bring_up.record.snapshot
    paused = snapshot.with_status(Status.PAUSED)
    if not paused:
        if snapshot.ready:
            return (
                "There is nothing to step: no rank is paused at a line, no cell runs, and set-up "
                "is complete. To stop at a line: %ddp_break 2 for line 2 of the last cell, or "
                "breakpoint() in the code. To step through set-up: %ddp_shutdown, then "
                "%ddp_init --step"
            )
        return "No rank is paused. %ddp_why says what they wait for, %ddp_abort frees them."
    asked = ranks or ()
    return (
        f"{verb(asked, 'is', 'are').capitalize()} not paused; {name_ranks(paused)} can be stepped: "
        "%ddp_step"
    )
