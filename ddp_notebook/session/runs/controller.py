"""One run of a cell or a script, from the claim of its ranks to its end."""

from __future__ import annotations

import enum
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ddp_notebook.diagnosis import deaths, diagnose_run, failures
from ddp_notebook.errors import CellInterrupted, SessionLost, Stuck
from ddp_notebook.model import Case, Diagnosis, Event, Ranks
from ddp_notebook.rank import calls
from ddp_notebook.session.interrupts import LOOK_EVERY_S, quick_switches
from ddp_notebook.session.runs.gather import (
    LaunchParameters,
    gather,
    still_waiting,
    with_sources_in_use,
)
from ddp_notebook.session.runs.interruption import interruption
from ddp_notebook.session.runs.run import CellResult, CellRun
from ddp_notebook.session.runs.stall_detector import StallDetector
from ddp_notebook.session.runs.steps import Settling, table

if TYPE_CHECKING:
    from ddp_notebook.cluster.rank_cluster import RankCluster
    from ddp_notebook.session.processes.collective_logs import CollectiveLogs
    from ddp_notebook.session.record import Record

_ARMED_WITHIN_S = 1.0
_STOP_WITHIN_S = 0.7
"""How long to wait for interrupted ranks to stop before control returns without them."""


class RunState(enum.Enum):
    """The state of a run. While it is claimed, its ranks cannot get another run."""

    CLAIMED = "claimed"
    """Its ranks are reserved; nothing was sent."""
    RUNNING = "running"
    """It was sent, and a thread waits for its end."""
    INTERRUPTING = "interrupting"
    """Its ranks are being interrupted, and a thread waits for them."""
    LOST = "lost"
    """The session ended during the run; the waiting thread is about to notice."""
    STUCK = "stuck"
    """Released with ranks in it that made no progress."""
    INTERRUPTED = "interrupted"
    """Released with ranks in it that did not stop in time."""
    ENDED = "ended"
    """Released: no rank is in it, or the session has ended."""

    @property
    def claimed(self) -> bool:
        """True while a thread is responsible for the run."""
        return self in _CLAIMED


_CLAIMED = frozenset({RunState.CLAIMED, RunState.RUNNING, RunState.INTERRUPTING, RunState.LOST})
_WATCHED = {
    RunState.CLAIMED: RunState.RUNNING,
    RunState.STUCK: RunState.RUNNING,
    RunState.INTERRUPTED: RunState.INTERRUPTING,
}
_ABORTED = {
    RunState.CLAIMED: RunState.INTERRUPTING,
    RunState.RUNNING: RunState.INTERRUPTING,
    RunState.STUCK: RunState.INTERRUPTED,
}
_WITHOUT_SESSION = {
    RunState.CLAIMED: RunState.LOST,
    RunState.RUNNING: RunState.LOST,
    RunState.INTERRUPTING: RunState.LOST,
    RunState.STUCK: RunState.ENDED,
    RunState.INTERRUPTED: RunState.ENDED,
}
_RELEASED_WITH_RANKS = {
    RunState.RUNNING: RunState.STUCK,
    RunState.INTERRUPTING: RunState.INTERRUPTED,
}


class Work(Protocol):
    """What ranks run: a cell or a script. They differ in what is sent and in how they end."""

    @property
    def launch(self) -> LaunchParameters:
        """The launch parameters that are specific to this run."""

    def send(self, ranks: Ranks) -> Ranks:
        """Send it to `ranks`; returns those that could not be reached."""

    def end(self, controller: RunController) -> CellResult:
        """How it ended, once no rank is in it."""


class RunController:
    """Takes one run from the claim of its ranks to its end; owns its `state`.

    One thread waits for the end (`see_through`); any thread may abort or lose the run.
    """

    def __init__(
        self, run: CellRun, cluster: RankCluster, logs: CollectiveLogs, record: Record
    ) -> None:
        self.run = run
        self.cluster = cluster
        self.logs = logs
        self.state = RunState.CLAIMED
        self.work: Work | None = None
        """What the ranks run; None until it is set."""
        self._patient = False
        self._record = record
        self._lock = threading.Lock()
        self.watched = False
        """A thread waits for its end, or did."""
        self._sent = False
        self._armed = False
        """Its ranks know that one of them is paused."""
        self._signalled: set[int] = set()
        self._lost_reason = ""
        self._stuck = Case(())
        """Its ranks as they were found stuck."""

    # -- changes of state ----------------------------------------------------------------

    def assign(self, work: Work, *, patient: bool) -> None:
        """Say what to run. A `patient` run goes on also when no rank makes progress."""
        self.work, self._patient = work, patient

    def watch(self) -> None:
        """From now on this thread, or one that it starts, waits for the end."""
        self.watched = True
        self._enter(_WATCHED)

    def abort(self) -> None:
        """Request an interrupt: `signal_started` signals ranks in the run, others follow later."""
        self._look_a_last_time()
        self._enter(_ABORTED)

    def _look_a_last_time(self) -> None:
        """Keep the last diagnosis if it still holds: freed ranks no longer show the problem."""
        detector = self.run.detector
        seen = detector.latest if detector is not None else None
        if seen is None or not seen.findings or self.run.found.diagnosis is not None:
            return
        now = diagnose_run(self.look())
        if [(f.category, f.ranks) for f in now.findings] == [
            (f.category, f.ranks) for f in seen.findings
        ]:
            self._keep(now)

    def lose(self, reason: str) -> None:
        """The session ends during the run: wake the thread that waits for it."""
        self._lost_reason = reason
        self._enter(_WITHOUT_SESSION)
        self.run.over.set()

    def release(self) -> None:
        """Release the run: no thread waits for it, so its idle ranks may get another run."""
        with self._lock:
            left = bool(self.run.pending)
            after = _RELEASED_WITH_RANKS if left else {}
            self.state = after.get(self.state, RunState.ENDED)
            self.run.detector = None
        self._record.add(())  # wakes those who wait for the release

    def _enter(self, table: dict[RunState, RunState]) -> None:
        with self._lock:
            self.state = table.get(self.state, self.state)

    @property
    def aborted(self) -> bool:
        """True once its ranks are to be interrupted: by the user, or by %ddp_abort."""
        return self.state in (RunState.INTERRUPTING, RunState.INTERRUPTED)

    @property
    def lost(self) -> bool:
        """True once the session has ended under it."""
        return bool(self._lost_reason)

    # -- what its ranks tell -------------------------------------------------------------

    def take(self, events: Sequence[Event]) -> None:
        """Process events of its ranks; interrupt those that begin an aborted run."""
        self.run.take(events)
        if self.state is RunState.STUCK and self.run.done and self.run.error() is None:
            self.run.found.nothing()  # they were not stuck
        self.signal_started()

    def signal_started(self) -> None:
        """Interrupt the ranks that are in an aborted run.

        Only ranks that have begun: one that is about to begin would lose the signal. And each rank
        once: the cell's own handling of the interrupt must not be interrupted.
        """
        if not self.aborted:
            return
        with self._lock:
            ranks = sorted(set(self.run.pending) & self.run.started - self._signalled)
            self._signalled.update(ranks)
        for rank in ranks:
            self.cluster.signal(rank, signal.SIGINT)
        if ranks and self.run.started_ranks is not None:  # a terminal's Ctrl-C is sent to all
            self.run.started_ranks.interrupt()

    def end_started_ranks(self) -> None:
        """End the processes of ranks that a script has started itself; it goes on without them."""
        started = self.run.started_ranks
        if started is not None:
            started.end(self._record.snapshot.ranks[rank].pid for rank in self.run.ranks)

    def look(self, *, as_script: bool = True) -> Case:
        """The case as it is. That of a cell has all ranks of the session in it.

        So has a script's with `as_script` false: once it is over and the ranks have the
        session's group again.
        """
        run, snapshot = self.run, self._record.snapshot
        alone = as_script and bool(run.script)
        ranks = run.ranks if alone else tuple(range(snapshot.world_size))
        case = gather(
            self.cluster,
            snapshot,
            self.work.launch if alone and self.work is not None else LaunchParameters(),
            ranks if alone else None,
            asked=lambda: run.pending,
            collectives=lambda: self.logs.read(ranks, run.cell),
            sources=run.sources,
            finished=run.finished,
        )
        case = with_sources_in_use(case, run.earlier)
        started = run.started_ranks.case(case) if alone and run.started_ranks is not None else None
        return still_waiting(started if started is not None else case, self._stuck)

    # -- to the end ----------------------------------------------------------------------

    def see_through(
        self, interrupted: Callable[[], bool], *, until_paused: bool = False
    ) -> CellResult:
        """Send the run if it was not yet, and wait until it is over, stuck or interrupted.

        `until_paused`: or its ranks are paused at lines; then the result has `steps`. Then it is
        released. Ranks that are stuck or do not stop are `pending` in the result.
        """
        assert self.work is not None
        try:
            settling = Settling(self.run, self.cluster, self.logs) if until_paused else None
            result = self._to_end(self.work, interrupted, settling)
            self._judge(result)
            self.run.found.judged = self.run.done
            return result
        except Exception:
            if not self.lost:
                raise
            return self._lost()  # calls to a session that ends may fail in any way
        finally:
            self.release()

    def _to_end(
        self, work: Work, interrupted: Callable[[], bool], settling: Settling | None
    ) -> CellResult:
        diagnosis = self._wait(work, interrupted, settling)
        if diagnosis is not None:
            diagnosis = self.run.with_tracebacks(diagnosis)
            return replace(self.run.result(_stuck(diagnosis)), diagnosis=diagnosis)
        if self.lost and not self.run.done:
            return self._lost()
        if interrupted() and not self.run.done:
            return self.run.result(self._interrupt())
        if self.run.stops and settling is not None:
            steps = table(self.run, self.logs)
            return replace(self.run.standing(), error=self.run.error(), steps=steps)
        return work.end(self)

    def _judge(self, result: CellResult) -> None:
        """Keep the diagnosis, or else what its ranks raised or died of."""
        run = self.run
        findings = result.diagnosis.findings if result.diagnosis is not None else ()
        if result.diagnosis is not None and findings:
            self._keep(result.diagnosis)
        elif result.error is None and run.done:
            self.run.found.nothing()
        elif self.run.found.diagnosis is None or not self.run.found.diagnosis.wrong:
            died = {rank: e for rank, e in run.died.items() if rank not in run.restarted}
            own = (
                *deaths.died(died, script=bool(run.script)),
                *failures.raised(run.finished.values(), run.ranks),
            )
            if own:
                self._keep(Diagnosis(own, None, len(run.ranks)))

    def _keep(self, diagnosis: Diagnosis) -> None:
        """Keep a diagnosis, unless all that is wrong is what the user ended."""
        ended, findings = self.run.restarted, diagnosis.findings
        if not findings or not all(finding.died_of(ended) for finding in findings):
            self.run.found.take(self.run.with_tracebacks(diagnosis))

    def _lost(self) -> CellResult:
        return self.run.result(SessionLost(f"{self._lost_reason} Start again: %ddp_init"))

    def _wait(
        self, work: Work, interrupted: Callable[[], bool], settling: Settling | None
    ) -> Diagnosis | None:
        """Wait until no rank is in it, or it is stuck (the diagnosis), interrupted or settled."""
        run = self.run
        detector = run.detector = self._detector()
        with quick_switches():
            if not self._sent:
                self._sent = True
                run.lost.update(work.send(run.ranks))
            while not run.over.wait(LOOK_EVERY_S) and not run.done:
                self._arm_others()
                if settling is not None and run.stops and settling.done():
                    return None
                diagnosis = None if run.paused else detector.turn()
                self._stuck = detector.stuck_in
                if diagnosis is not None and not self._patient:
                    return None if run.done else diagnosis
                if diagnosis is not None and not self.aborted:  # freed ranks look different
                    self._keep(diagnosis)
                if interrupted():
                    return None
        return None

    def _arm_others(self) -> None:
        """A rank is paused: what the others issue from now on must not time out."""
        if self._armed or not self.run.stops:
            return
        self._armed = True
        self.cluster.ask(self.run.pending, calls.ARM, calls.Nothing(), _ARMED_WITHIN_S)

    def _detector(self) -> StallDetector:
        """Detects stuck ranks; asks no rank while they issue collectives or print."""
        run, logs = self.run, self.logs

        def moved() -> object:
            started = run.started_ranks.written() if run.started_ranks is not None else ()
            return logs.written(run.ranks), run.changes, started

        return StallDetector(self.look, moved=moved)

    def _interrupt(self) -> CellInterrupted:
        """Interrupt its ranks; returns whether or not they stop."""
        self.abort()
        deadline_s = time.monotonic() + _STOP_WITHIN_S
        while self.run.pending and (left_s := deadline_s - time.monotonic()) > 0:
            self.signal_started()
            self._record.wait_for(lambda: self.run.done, min(left_s, LOOK_EVERY_S))
        return interruption(self.run, self._record.snapshot)


def _stuck(diagnosis: Diagnosis) -> Stuck:
    """The error of a run whose ranks no longer make progress."""
    lines = [f"{diagnosis.headline.removesuffix('.')}."]
    if diagnosis.findings:
        lines.append(f"What to do: {diagnosis.findings[0].remedy}")
    lines.append("The ranks stay as they are: %ddp_why, %ddp_status. Free them: %ddp_abort")
    return Stuck("\n".join(lines), diagnosis)
