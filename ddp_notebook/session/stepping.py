"""`%ddp_step`: one verb moves whatever is paused, in a run, in set-up or in DDP's construction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import Ranks, Stage, StepTable, name_ranks
from ddp_notebook.model.ddp import WrapStage
from ddp_notebook.session.bring_up import BringUp
from ddp_notebook.session.guards import check_ranks
from ddp_notebook.session.interrupts import noted, quick_switches
from ddp_notebook.session.runs import steps
from ddp_notebook.session.runs.steps import END, Step

if TYPE_CHECKING:
    from ddp_notebook.session.record import Record
    from ddp_notebook.session.runs.registry import RunRegistry
    from ddp_notebook.session.set_up import SetUp
    from ddp_notebook.session.tools.ddp_construction import DdpConstruction, Wrap


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
        """Return where the ranks stand in set-up."""
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
                made = steps.step(current, wanted, interrupted)
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
                f"{current.heading} is not over on {name_ranks(current.pending)}, and no "
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
        raise UsageMistake(f"--to is one of {', '.join(list(stages)[1:])}, not {to!r}.")
    with noted() as interrupted:
        return bring_up.step(ranks, stages[to] if to else None, interrupted)


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
