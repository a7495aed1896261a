"""The run registry of a session: claimed ranks, the detached run, and waiting for it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import Event, LineStopped, Ranks, StepTable, name_ranks
from ddp_notebook.rank.calls import Breakpoints
from ddp_notebook.session.guards import idle_ranks
from ddp_notebook.session.interrupts import LOOK_EVERY_S, noted
from ddp_notebook.session.runs.controller import RunController, RunState, Work
from ddp_notebook.session.runs.detached import Detached
from ddp_notebook.session.runs.past import PastRuns
from ddp_notebook.session.runs.run import CellResult, CellRun, RunOptions
from ddp_notebook.session.runs.steps import Settling, paused_ranks, table

if TYPE_CHECKING:
    from ddp_notebook.cluster.rank_cluster import RankCluster
    from ddp_notebook.session.findings import LastFindings
    from ddp_notebook.session.pool import RankPool
    from ddp_notebook.session.processes.collective_logs import CollectiveLogs
    from ddp_notebook.session.record import Record

_RELEASED_WITHIN_S = 10.0
"""How long the thread that waits for a run has to notice its end and clean up."""


class RunRegistry:
    """Which run has which ranks. Thread-safe; of two concurrent claims of a rank one succeeds."""

    def __init__(self, record: Record, pool: RankPool, findings: LastFindings) -> None:
        self.controllers: list[RunController] = []
        """The last run of every rank, and those that ranks are still in; the newest last."""
        self.detached: Detached | None = None
        """The last detached run."""
        self._record = record
        self._findings = findings
        self._pool = pool
        self.past = PastRuns()
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self.before_run: Callable[[CellRun], None] = lambda run: None
        """Called before ranks are sent something to run."""
        self.breakpoints_of: Callable[[int], Breakpoints] = lambda _: Breakpoints(())
        """The breakpoints of a rank, for a process that is about to replace it."""
        pool.before_close(self.lose_all)
        record.subscribe(self._take)

    @property
    def current(self) -> RunController | None:
        """The run that ranks are in, else the last one; the newest when there are several."""
        busy = (c for c in reversed(self.controllers) if not c.run.done)
        return next(busy, self.controllers[-1] if self.controllers else None)

    def to_step(self, ranks: Ranks | None) -> RunController | None:
        """The run that a step of `ranks` is of: one in which they are paused, else the current."""
        for controller in reversed(self.controllers):
            stops = controller.run.stops
            if stops and (ranks is None or any(rank in stops for rank in ranks)):
                return controller
        return self.current

    def paused_table(self, run: CellRun) -> StepTable:
        """`Session.paused_table`."""
        logs = next((c.logs for c in self.controllers if c.run is run), None)
        return table(run, logs) if logs is not None else StepTable("", ())

    def reset(self) -> None:
        """Forget all runs: the ranks were replaced."""
        self.controllers, self.detached = [], None
        self.past.clear()

    # -- claims --------------------------------------------------------------------------

    def idle(self, ranks: Ranks | None, verb: str) -> Ranks:
        """The ranks a verb acts on, all by default. Raises UsageMistake when one is busy."""
        self._end_script_that_was_left()
        claimed = {
            rank: controller.run.title
            for controller in self.controllers
            if controller.state.claimed
            for rank in controller.run.pending
        }
        return idle_ranks(ranks, verb, self._record.snapshot, claimed, self.paused)

    @property
    def script(self) -> RunController | None:
        """The script whose processes have the ranks' places, also when it is over."""
        processes = self._pool.processes
        if processes is None or processes.script is None:
            return None
        return next((c for c in reversed(self.controllers) if c.run.script), None)

    @property
    def in_script(self) -> bool:
        """True while ranks are in a script."""
        return any(c.run.script and not c.run.done for c in self.controllers)

    @property
    def script_left(self) -> bool:
        """True of a script that no thread waits for: it is over, or stuck."""
        return not any(c.run.script and c.state.claimed for c in self.controllers)

    def _end_script_that_was_left(self) -> None:
        """Something else needs the ranks: end the script's remaining processes."""
        processes = self._pool.processes
        if processes is not None and processes.script is not None and self.script_left:
            processes.end_script()

    def restarts(self, ranks: Ranks) -> None:
        """The user has the processes of `ranks` ended: no run is to say that they died."""
        for controller in self.controllers:
            if not controller.run.done:
                pending = controller.run.pending
                controller.run.restarted = tuple(rank for rank in ranks if rank in pending)

    def paused(self) -> Mapping[int, str]:
        """The ranks that are paused in the run that ranks are in, and before what."""
        current = self.current
        if current is None or not current.run.paused:
            return {}
        stops = current.run.stops
        ranks = paused_ranks(current.run, current.logs)
        return {rank: "a line" if rank in stops else "a collective" for rank in ranks}

    @contextmanager
    def claim(
        self,
        ranks: Ranks | None,
        verb: str,
        cluster: RankCluster,
        logs: CollectiveLogs,
        options: RunOptions,
        script: str = "",
    ) -> Iterator[RunController]:
        """A context that claims ranks for a run. Raises UsageMistake.

        If nothing was sent when it ends, the claim is released.
        """
        with self._lock:
            members = self.idle(ranks, verb)
            run = CellRun(next(self._numbers), members, script, options.number)
            run.pausing, run.generation = options.hold, self._record.snapshot.generation
            for other in self.controllers:
                if other.state.claimed:
                    self._check_beside(run, other, detach=options.detach or options.hold)
            controller = RunController(run, cluster, logs, self._record)
            self._add(controller)
        try:
            yield controller
        finally:
            if not controller.watched:
                self.controllers = [c for c in self.controllers if c is not controller]
                controller.release()

    def _add(self, controller: RunController) -> None:
        """Keep it, those that ranks are in, and of each rank the last one."""
        known = [*self.controllers, controller]
        last = {rank: c for c in known for rank in c.run.ranks}
        self.controllers = [c for c in known if not c.run.done or c in last.values()]

    def _check_beside(self, run: CellRun, other: RunController, *, detach: bool) -> None:
        """Raises UsageMistake when `run` cannot be while `other` is, on other ranks.

        A script's processes replace the ranks, so nothing may run on the other ranks meanwhile.
        """
        heading, on = other.run.heading, name_ranks(other.run.ranks)
        if run.script or other.run.script:
            raise UsageMistake(
                f"{heading} is not over on {on}, and {run.script or other.run.script} needs every "
                "rank: a script runs by itself. Wait: %ddp_wait. Or abort it: %ddp_abort"
            )
        if detach and self.detached is not None and other is self.detached.controller:
            raise UsageMistake(
                f"{heading} is detached already, on {on}; one run can be. Wait for it: %ddp_wait. "
                "Or leave --detach out."
            )

    def await_released(self) -> None:
        """Wait until the threads of runs that are over or aborted have cleaned up."""

        def released() -> bool:
            ending = (RunState.INTERRUPTING, RunState.LOST)
            return not any(
                c.state.claimed and (c.run.done or c.state in ending) for c in self.controllers
            )

        self._record.wait_for(released, _RELEASED_WITHIN_S)

    def lose_all(self, reason: str) -> None:
        """The session ends: wake all threads that wait for a run before its processes end."""
        for controller in self.controllers:
            controller.lose(reason)
        self.await_released()

    def _take(self, events: Sequence[Event]) -> None:
        for controller in tuple(self.controllers) if events else ():
            controller.take(events)

    # -- to the end ----------------------------------------------------------------------

    def carry_out(
        self,
        controller: RunController,
        work: Work,
        interrupted: Callable[[], bool],
        options: RunOptions,
    ) -> CellResult:
        """Run `work`; its result, or the current state of a run that is detached or pauses."""
        self.before_run(controller.run)
        controller.assign(work, patient=options.patient)
        self._findings.begin(controller.run.found)
        self.past.begin(controller.run)
        if options.started is not None:
            options.started(controller.run)
        if not options.detach and not controller.run.pausing:
            controller.watch()
            result = controller.see_through(interrupted, until_paused=True)
            if result.steps is not None:  # from now on a thread waits for the outcome of its steps
                self.detached = Detached(controller)
            return result
        detached = self.detached = Detached(controller, by_user=options.detach)
        if not options.detach:
            return self._follow(detached, None, interrupted)
        if interrupted():
            detached.stop()
        # Without what the ranks wrote in these first moments: the caller asks for that by `wait`.
        return CellResult((), (), {}, None, pending=controller.run.pending)

    def wait(
        self, timeout_s: float | None = None, started: Callable[[CellRun], None] | None = None
    ) -> CellResult:
        """`Session.wait`."""
        with noted() as interrupted:
            detached = self._to_wait_for()
            if started is not None:
                started(detached.run)
            return self._follow(detached, timeout_s, interrupted)

    def _to_wait_for(self) -> Detached:
        detached = self.detached if self.detached and not self.detached.reported else None
        if detached is not None and not detached.left_with_ranks:
            return detached
        self._pool.need("%ddp_wait")
        for controller in reversed(self.controllers):
            is_detached = detached is not None and controller is detached.controller
            if _can_be_resumed(controller, ended_unseen=is_detached):
                self.detached = Detached(controller)
                return self.detached
        if detached is not None:
            return detached
        if any(controller.state.claimed for controller in self.controllers):
            raise UsageMistake("Another thread waits for it already. Where it is: %ddp_where")
        if self.detached is not None and self.controllers[-1:] == [self.detached.controller]:
            return self.detached  # the last run: its result again
        raise UsageMistake(
            "There is nothing to wait for: no rank is in a cell or a script. To have one that "
            "runs while the notebook is free: %%ddp --detach, or %ddp_run --detach train.py"
        )

    def _follow(
        self, detached: Detached, timeout_s: float | None, interrupted: Callable[[], bool]
    ) -> CellResult:
        """Wait for the end of a detached run, an interrupt, or until its ranks are all paused."""
        controller, run, ended = detached.controller, detached.run, detached.ended
        settling = Settling(run, controller.cluster, controller.logs)
        deadline_s = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        over = threading.Event()
        ended.add_done_callback(lambda _: over.set())
        while not over.wait(min(LOOK_EVERY_S, max(0.0, deadline_s - time.monotonic()))):
            if interrupted():
                detached.stop()
            elif run.paused and _all_paused(settling, controller):
                steps = table(run, controller.logs)
                return replace(run.standing(), error=run.error(), steps=steps)
            elif time.monotonic() >= deadline_s:
                return run.standing()
        detached.reported = True
        return ended.result()


def _can_be_resumed(controller: RunController, *, ended_unseen: bool) -> bool:
    """True when ranks are in a run that no thread waits for.

    Also for a run that was stuck: its ranks may have been unblocked since, without a waiter.
    """
    run, state = controller.run, controller.state
    if state is RunState.STUCK and ended_unseen:
        return True
    left_with_ranks = state in (RunState.STUCK, RunState.INTERRUPTED)
    return left_with_ranks and bool(run.started & set(run.pending))


def _all_paused(settling: Settling, controller: RunController) -> bool:
    """Whether all ranks of a run are paused, so that only a step resumes them."""
    try:
        return settling.done() and not controller.run.done
    except Exception:
        if not controller.lost:
            raise
        return False


def stops_in(controllers: Iterable[RunController]) -> dict[int, LineStopped]:
    """The ranks that are paused at lines in any of these runs, and where."""
    return {
        rank: at for controller in controllers for rank, at in dict(controller.run.stops).items()
    }
