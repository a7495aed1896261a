"""One run of a cell or a script: its ranks are claimed, it is sent, watched, and ends.

`_NEXT` is the whole of its states. One thread at a time waits for the end (`see_through`): the one
that ran the cell, or one of its own (`detach`). Any thread may abort the run, or lose it.
"""

from __future__ import annotations

import enum
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from ddp_notebook.diagnosis import deaths, diagnose_run, failures
from ddp_notebook.errors import CellFailed, DDPError, SessionLost
from ddp_notebook.model import (
    Activity,
    Case,
    Collective,
    Diagnosis,
    Event,
    LineStopped,
    Ranks,
    StepTable,
)
from ddp_notebook.rank import calls
from ddp_notebook.session.collective_logs import READ_LAST
from ddp_notebook.session.findings import Found
from ddp_notebook.session.interrupts import LOOK_EVERY_S, quick_switches
from ddp_notebook.session.runs import endings
from ddp_notebook.session.runs.endings import CellResult
from ddp_notebook.session.runs.gather import (
    LaunchParameters,
    examine_results,
    gather,
    ledger_of,
    still_waiting,
    with_sources_in_use,
    without_earlier_failures,
)
from ddp_notebook.session.runs.run_events import RunEvents
from ddp_notebook.session.runs.stall_detector import StallDetector
from ddp_notebook.views import step_rows
from ddp_notebook.views.output_log import split_errors

if TYPE_CHECKING:
    from ddp_notebook.session.script_processes import StartedRanks
    from ddp_notebook.session.session_processes import Processes

_STOP_WITHIN_S = 0.7
"""How long to wait for interrupted ranks to stop before control returns without them."""
_CAUSE_KNOWN_WITHIN_S = 1.0
"""How long to wait, if no rank was reached, for the report that one died or the session was lost.
"""


class RunState(enum.Enum):
    """Where a run stands. While it is `claimed`, a thread is responsible for it."""

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
        """True while its ranks cannot get another run."""
        return self not in (RunState.STUCK, RunState.INTERRUPTED, RunState.ENDED)


# What happens to a run, and to which state that leads from which; any other state stays. Changed
# under the run's lock only: an abort and the end of the wait can come at the same moment, from two
# threads, and the one that is second finds the state that the first one left.
_NEXT: Mapping[str, Mapping[RunState, RunState]] = {
    # The thread that begins to wait for it: for the first time, or again for one that was left.
    "watch": {
        RunState.CLAIMED: RunState.RUNNING,
        RunState.STUCK: RunState.RUNNING,
        RunState.INTERRUPTED: RunState.INTERRUPTING,
    },
    # Any thread: an interrupt of the one that waits; %ddp_abort, %ddp_restart and setup.
    "abort": {
        RunState.CLAIMED: RunState.INTERRUPTING,
        RunState.RUNNING: RunState.INTERRUPTING,
        RunState.STUCK: RunState.INTERRUPTED,
    },
    # Any thread: the one that ends the session, or that notices that a process of it has ended.
    "lose": {
        RunState.CLAIMED: RunState.LOST,
        RunState.RUNNING: RunState.LOST,
        RunState.INTERRUPTING: RunState.LOST,
        RunState.STUCK: RunState.ENDED,
        RunState.INTERRUPTED: RunState.ENDED,
    },
    # The waiting thread, when it stops waiting while ranks are in it; who claimed and sent nothing.
    "leave": {
        RunState.CLAIMED: RunState.ENDED,
        RunState.RUNNING: RunState.STUCK,
        RunState.INTERRUPTING: RunState.INTERRUPTED,
        RunState.LOST: RunState.ENDED,
    },
    # The waiting thread, once no rank is in it.
    "end": dict.fromkeys(RunState, RunState.ENDED),
}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a cell or a script is run and waited for: see `RunRegistry.run_cell`."""

    number: int = 0
    """The notebook's prompt number; 0: the run's own."""
    wait: str = "progress"
    hold: bool = False
    detach: bool = False
    started: Callable[[CellRun], None] | None = None
    """Called once the run has begun."""
    ledger: int = 0
    """The training step of which a ledger is made; 0: none."""


class Settling:
    """A watch for when each rank of a run is paused, waits in a collective, or has finished.

    `left` holds the numbers of the collectives at which ranks were paused before.
    """

    STILL_S = 0.3
    """A rank that is not paused and has issued nothing for this long is asked what it is doing."""
    LOOKS = 2
    """Number of consecutive checks that must find it waiting."""

    def __init__(self, run: CellRun, left: Mapping[int, int | None] = MappingProxyType({})) -> None:
        self._run = run
        self._left = left
        self._picture: object = None
        self._since_s = time.monotonic()
        self._looks = 0

    def done(self) -> bool:
        """Return whether no rank can make progress without being stepped."""
        run = self._run
        pending = run.pending
        if run.stops.keys() >= set(pending):
            return True
        tails = run.logs.read(pending, run.cell, last=1).of
        paused = {*before_collectives(tails, self._left), *run.stops}
        free = tuple(rank for rank in pending if rank not in paused)
        if not free:
            return True
        picture = (pending, {rank: tails.get(rank) for rank in free})
        if picture != self._picture:
            self._picture, self._since_s, self._looks = picture, time.monotonic(), 0
            return False
        if time.monotonic() - self._since_s < self.STILL_S:
            return False
        # No record says that a rank waits elsewhere (in a sleep, for a lock), so it is asked. That
        # is slow beside a step: only ranks that have been still for some time are.
        self._since_s = time.monotonic()
        answers = run.cluster.ask(free, calls.REPORT, calls.Nothing(), 1.0)
        reports = calls.answered(answers).values()
        # A rank that does not answer in time, or waits only briefly, may be making progress.
        waiting = len(reports) == len(free) and all(
            report.activity is Activity.WAITING for report in reports
        )
        self._looks = self._looks + 1 if waiting else 0
        return self._looks >= self.LOOKS


def paused_ranks(run: CellRun, ranks: Ranks | None = None) -> Ranks:
    """Return those of `ranks` (all by default) that pause at a line or before a collective."""
    among = tuple(rank for rank in run.pending if ranks is None or rank in ranks)
    others = tuple(rank for rank in among if rank not in run.stops)
    tails = run.logs.read(others, run.cell, last=1).of if others else {}
    before = before_collectives(tails, {})
    return tuple(rank for rank in among if rank in before or rank in run.stops)


def before_collectives(
    tails: Mapping[int, Sequence[Collective]], left: Mapping[int, int | None]
) -> set[int]:
    """Return the ranks that pause before a collective, and not still before the one in `left`."""
    # A rank that was let go says so in its record a moment later: until then the record reads as if
    # it were paused there. So being paused counts at another number only.
    return {
        rank
        for rank, tail in tails.items()
        if any(step_rows.is_paused(r) and r.number != left.get(rank) for r in tail)
    }


class CellRun:
    """A cell on its ranks, from the claim to the end; `scripts.ScriptRun` is a script.

    `number` is the notebook's prompt number, by which it is called; `cell` counts the runs.
    """

    launch = LaunchParameters()
    """The launch parameters of a script's own processes."""
    seen_late: Diagnosis | None = None
    """The finding about a script's ranks when one was only late; None if none was."""

    def __init__(
        self,
        cell: int,
        ranks: Ranks,
        processes: Processes,
        options: RunOptions,
        script: str = "",
    ) -> None:
        self.cell = cell
        self.number = options.number or cell
        self.script = script
        """The file's name, when it is a script that runs."""
        self.title = script or f"cell {self.number}"
        self.ranks = ranks
        self.cluster = processes.cluster
        self.logs = processes.logs
        self.record = processes.record
        self.began_s = time.monotonic()
        self.sources: Mapping[str, str] = {}
        """The source code of the run, by the file name under which its lines are shown."""
        self.earlier: Mapping[str, str] = {}
        """The sources of earlier cells, whose functions it may call."""
        self.generation = self.record.snapshot.generation
        """Which process group its ranks had when it began, as `Snapshot.generation` counts."""
        self.pausing = options.hold
        """Every rank pauses before each collective until it is stepped."""
        self.patient = options.hold or options.wait == "forever"
        """It goes on also when no rank makes progress."""
        self.ledger = options.ledger
        """The training step of which a ledger is made; 0: none."""
        self.order: tuple[calls.Order[calls.Cell], calls.Cell] | None = None
        """The order that is sent to the ranks."""

        self.events = RunEvents(cell, ranks, script)
        """The events that its ranks have sent."""
        self.started_ranks: StartedRanks | None = None
        """The ranks that its processes start themselves, if it is a script; else None."""

        # One lock for the state and for the events: a run is released by whether ranks are in it.
        self._lock = self.events.lock
        self.state = RunState.CLAIMED
        self.watched = False
        """A thread waits for its end, or did."""
        self.over = threading.Event()
        """Set when no rank is in it any more, or the session has ended under it."""
        self.lost_reason = ""
        """Why the session has ended under it; empty if it did not."""
        self._sent = False
        self._armed = False
        """Its ranks know that one of them is paused."""
        self._signalled: set[int] = set()
        self.detector: StallDetector | None = None
        """The stall detector while a thread waits; else None."""
        self._stuck = Case(())
        """Its ranks as they were found stuck."""
        self.found = Found(self.title, self.number, self.over.is_set)
        """The problems found in it."""

        self.ended: Future[CellResult] = Future()
        """The result of the thread that `detach` began; also with ranks still in the run."""
        self.reported = False
        """That result was shown to the user."""
        self.detached_by_user = False
        """Else it paused, or had been left."""
        self._stop = threading.Event()

    @property
    def heading(self) -> str:
        """The title at the beginning of a sentence."""
        return self.script or f"Cell {self.number}"

    @property
    def pending(self) -> Ranks:
        """Ranks that are still in the run."""
        return self.events.pending

    @property
    def done(self) -> bool:
        """True when no rank is in the run any more."""
        return self.events.done

    @property
    def stops(self) -> dict[int, LineStopped]:
        """Ranks that are paused at a line, and where."""
        return self.events.stops

    @property
    def paused(self) -> bool:
        """True while ranks are paused at a line, or pause before each collective."""
        return self.pausing or bool(self.stops)

    @property
    def waits_for(self) -> str:
        """A text naming the rank that the others wait for, or that stands still; empty for none."""
        detector = self.detector  # once: another thread may take it away
        if detector is None:
            return ""
        return detector.latest.headline if detector.latest.findings else detector.standing

    # -- claim: from state to state ------------------------------------------------------

    def _enter(self, event: str) -> None:
        with self._lock:
            self.state = _NEXT[event].get(self.state, self.state)

    def watch(self) -> None:
        """Take the run over: this thread, or one that it starts, waits for the end."""
        self.watched = True
        self._enter("watch")

    def abort(self) -> None:
        """Request an interrupt: `signal_started` signals ranks in the run, others follow later."""
        detector = self.detector
        seen = detector.latest if detector is not None else None
        if seen is not None and seen.findings and self.found.diagnosis is None:
            # Freed ranks no longer show the problem: it is kept, if it is there still.
            now = diagnose_run(self.look())
            if [(f.category, f.ranks) for f in now.findings] == [
                (f.category, f.ranks) for f in seen.findings
            ]:
                self._keep(now)
        self._enter("abort")

    def lose(self, reason: str) -> None:
        """Wake the thread that waits for the run: the session ends during it."""
        self.lost_reason = reason
        self._enter("lose")
        self.over.set()

    def release(self) -> None:
        """Release the run: no thread waits for it, so its idle ranks may get another run."""
        with self._lock:  # no rank leaves between the look at `pending` and the change
            event = "leave" if self.pending else "end"
            self.state = _NEXT[event].get(self.state, self.state)
        self.detector = None
        self.record.add(())  # wakes those who wait for the release

    @property
    def aborted(self) -> bool:
        """True once its ranks are to be interrupted: by the user, or by %ddp_abort."""
        return self.state in (RunState.INTERRUPTING, RunState.INTERRUPTED)

    # -- send ----------------------------------------------------------------------------

    def send(self) -> Ranks:
        """Send it to its ranks; returns those that could not be reached."""
        assert self.order is not None
        return self.cluster.tell(self.ranks, *self.order)

    # -- watch: what its ranks tell ------------------------------------------------------

    def take(self, events: Sequence[Event]) -> None:
        """Process events of its ranks; interrupt those that begin an aborted run."""
        self.events.take(events)
        # Only now that all events of the batch are in: the waiting thread reads the output at once.
        if not self.pending:
            self.over.set()
            if self.state is RunState.STUCK and self.error() is None:
                self.found.nothing()  # they were not stuck
        self.signal_started()

    def signal_started(self) -> None:
        """Interrupt the ranks that are in an aborted run.

        Only ranks that have begun: one that is about to begin would lose the signal. And each rank
        once: the cell's own handling of the interrupt must not be interrupted.
        """
        if not self.aborted:
            return
        with self._lock:
            ranks = sorted(set(self.pending) & self.events.started - self._signalled)
            self._signalled.update(ranks)
        for rank in ranks:
            self.cluster.signal(rank, signal.SIGINT)
        if ranks and self.started_ranks is not None:  # a terminal's Ctrl-C is sent to all
            self.started_ranks.interrupt()

    def end_started_ranks(self) -> None:
        """End the processes of ranks that a script has started itself; it goes on without them."""
        if self.started_ranks is not None:
            self.started_ranks.end(self.record.snapshot.ranks[rank].pid for rank in self.ranks)

    def look(self, *, as_script: bool = True) -> Case:
        """Return the case as it is. That of a cell has all ranks of the session in it.

        So has a script's with `as_script` false: once it is over and the ranks have the
        session's group again.
        """
        snapshot = self.record.snapshot
        alone = as_script and bool(self.script)
        ranks = self.ranks if alone else tuple(range(snapshot.world_size))
        case = gather(
            self.cluster,
            snapshot,
            self.launch if alone else LaunchParameters(),
            ranks if alone else None,
            asked=lambda: self.pending,
            collectives=lambda: self.logs.read(ranks, self.cell),
            sources=self.sources,
            finished=self.events.finished,
        )
        if not alone:
            case = without_earlier_failures(case, self.cell)
        case = with_sources_in_use(case, self.earlier)
        if alone and self.started_ranks is not None:
            case = self.started_ranks.case(case) or case
        return still_waiting(case, self._stuck)

    # -- end -----------------------------------------------------------------------------

    def error(self) -> CellFailed | None:
        """Return how it failed on the ranks that have left it; None if it did not."""
        return endings.failure(self.events)

    def result(self, error: DDPError | None = None) -> CellResult:
        """Return how it ended, or how it stands; `error` in place of its ranks' own."""
        tracebacks, outputs = self.events.errors_and_output()
        error = error or self.error()
        return CellResult(
            tracebacks, outputs, dict(self.events.withheld), error, pending=self.pending
        )

    def standing(self) -> CellResult:
        """Return the state while ranks are in it: errors, and the output since the last call."""
        _, outputs = split_errors(self.events.news())
        errors, _ = self.events.errors_and_output()
        return CellResult(errors, outputs, {}, None, pending=self.pending)

    def step_table(self) -> StepTable:
        """Return where its ranks stand, as the table of a step."""
        stops = dict(self.stops)
        # A rank paused at a line is shown at that line; of its collectives only the count is shown.
        last = 1 if stops.keys() >= set(self.pending) else READ_LAST
        table = step_rows.collective_table(
            self.logs.read(self.ranks, self.cell, last),
            self.ranks,
            self.pending,
            time.monotonic_ns(),
            what=self.script or "The cell",
            failures=endings.failures(self.events),
        )
        return step_rows.line_table(stops, table) if stops else table

    def see_through(
        self, interrupted: Callable[[], bool], *, until_paused: bool = False
    ) -> CellResult:
        """Send the run if it was not yet, and wait until it is over, stuck or interrupted.

        `until_paused`: or its ranks are paused at lines; then the result has `steps`. Then it is
        released. Ranks that are stuck or do not stop are `pending` in the result.
        """
        try:
            settling = Settling(self) if until_paused else None
            with quick_switches():
                stuck = self._wait(interrupted, settling)
            # Several ends can be true at once, and the first below is told: that it was stuck is
            # found before anybody interrupts it, an interrupt of a lost session stops nobody, and
            # ranks that an interrupt has freed from a line are no longer paused there.
            if stuck is not None:
                stuck = self.events.with_tracebacks(stuck)
                result = replace(self.result(endings.stuck(stuck)), diagnosis=stuck)
            elif self.lost_reason and (self.pending or self.events.unreached):
                result = self._lost()
            elif self.pending and interrupted():
                self.abort()
                deadline_s = time.monotonic() + _STOP_WITHIN_S
                while self.pending and (left_s := deadline_s - time.monotonic()) > 0:
                    self.signal_started()
                    self.record.wait_for(lambda: self.done, min(left_s, LOOK_EVERY_S))
                # Whether or not they have stopped.
                result = self.result(endings.interruption(self.events, self.record.snapshot))
            elif self.stops and until_paused:
                result = replace(self.standing(), error=self.error(), steps=self.step_table())
            else:
                result = self.end()
                if self.ledger:
                    seen = ledger_of(self.events, self.cluster, self.ledger)
                    result = replace(result, ledger=seen)
            self._judge(result)
            self.found.judged = self.done
            return result
        except Exception:
            if not self.lost_reason:
                raise
            return self._lost()  # calls to a session that ends may fail in any way
        finally:
            self.release()

    def _wait(self, interrupted: Callable[[], bool], settling: Settling | None) -> Diagnosis | None:
        """Wait until no rank is in it, or it is stuck (the diagnosis), interrupted or settled."""

        # While this changes, as ranks issue collectives or print, no rank is asked.
        def moved() -> object:
            started = self.started_ranks.written() if self.started_ranks is not None else ()
            return self.logs.written(self.ranks), self.events.changes, started

        detector = self.detector = StallDetector(self.look, moved=moved)
        if not self._sent:
            self._sent = True
            # `over` is set by `take`, which is called for events alone; a rank that was not reached
            # will send none. So where nobody was reached nothing would ever end the wait below.
            if unreached := self.send():
                self.events.not_reached(unreached)
                if not self.pending:
                    # Ranks that cannot be reached have died. The cause is known a moment later.
                    self.over.wait(_CAUSE_KNOWN_WITHIN_S)
                    self.over.set()
        while not self.over.wait(LOOK_EVERY_S):
            if self.stops and not self._armed:
                # A rank is paused: what the others issue from now on must not time out.
                self._armed = True
                self.cluster.ask(self.pending, calls.ARM, calls.Nothing(), 1.0)
            if settling is not None and self.stops and settling.done():
                return None
            # Who waits for a paused rank waits for the user, for as long as that takes. No time
            # proves anything then, so no rank is looked at until all go on.
            diagnosis = None if self.paused else detector.turn()
            self._stuck = detector.stuck_in
            # The ranks were asked and go on meanwhile. If the last one has left the run since, it
            # has ended by itself, and what was found was of a moment.
            if diagnosis is not None and not self.patient:
                return diagnosis if self.pending else None
            if diagnosis is not None and not self.aborted:  # freed ranks look different
                self._keep(diagnosis)
            if interrupted():
                return None
        return None

    def _lost(self) -> CellResult:
        return self.result(SessionLost(f"{self.lost_reason} Start again: %ddp_init"))

    def end(self) -> CellResult:
        """Return how it ended, with a diagnosis where it failed or computed something wrong."""
        result = self.result()
        if result.error is None:
            return replace(result, diagnosis=self.examine())
        # Of one rank there is nobody to compare it with. And ranks that were interrupted stand
        # where the signal met them: that they stand apart there is no mistake of the program's.
        if not isinstance(result.error, CellFailed) or len(self.ranks) < 2 or self.aborted:
            return result
        diagnosis = diagnose_run(self.look())
        if diagnosis.wrong:
            result.error.diagnosis = diagnosis
            return replace(result, diagnosis=diagnosis)
        return result

    def examine(self) -> Diagnosis | None:
        """Return what post-run checks find in it once every rank has finished it."""
        return examine_results(self.events, self.cluster, self.logs, self.sources)

    def _judge(self, result: CellResult) -> None:
        """Keep the diagnosis, or else what its ranks raised or died of."""
        if result.diagnosis is not None and result.diagnosis.findings:
            self._keep(result.diagnosis)
        elif result.error is None and self.done:
            self.found.nothing()
        elif self.found.diagnosis is None or not self.found.diagnosis.wrong:
            ended = self.events.restarted
            died = {rank: e for rank, e in self.events.died.items() if rank not in ended}
            own = (
                *deaths.died(died, script=bool(self.script)),
                *failures.raised(
                    self.events.finished.values(), self.ranks, {**self.earlier, **self.sources}
                ),
            )
            if own:
                self._keep(Diagnosis(own, None, len(self.ranks)))

    def _keep(self, diagnosis: Diagnosis) -> None:
        """Keep a diagnosis, unless all that is wrong is what the user ended."""
        ended, findings = self.events.restarted, diagnosis.findings
        if not findings or not all(finding.died_of(ended) for finding in findings):
            self.found.take(self.events.with_tracebacks(diagnosis))

    # -- on a thread of its own ----------------------------------------------------------

    def detach(self, *, by_user: bool = False) -> None:
        """Wait for the end on a thread of its own, which gives the result to `ended`."""
        # Each wait has a future and a stop of its own: a run that was left with ranks can be waited
        # for again, while somebody still holds the outcome of the first time.
        self.ended, self.reported, self.detached_by_user = Future(), False, by_user
        self._stop = threading.Event()
        self.watch()

        def work(ended: Future[CellResult], stopped: Callable[[], bool]) -> None:
            try:
                ended.set_result(self.see_through(stopped))
            except BaseException as error:  # noqa: BLE001  # raised where it is waited for
                ended.set_exception(error)

        arguments = (self.ended, self._stop.is_set)
        threading.Thread(target=work, args=arguments, name="ddp-detached", daemon=True).start()

    def stop(self) -> None:
        """Interrupt the detached run, as interrupting the notebook does for a cell."""
        self._stop.set()

    @property
    def left_with_ranks(self) -> bool:
        """True if `ended` has ranks in it, which may have made progress or been freed since."""
        if not self.ended.done() or self.ended.exception() is not None:
            return False
        states = (RunState.STUCK, RunState.INTERRUPTED)
        return self.state in states and bool(self.ended.result().pending)

    def follow(self, timeout_s: float | None, interrupted: Callable[[], bool]) -> CellResult:
        """Wait for the end of the detached run, an interrupt, or until its ranks are all paused."""
        settling = Settling(self)
        ended, over = self.ended, threading.Event()
        deadline_s = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        ended.add_done_callback(lambda _: over.set())
        while not over.wait(min(LOOK_EVERY_S, max(0.0, deadline_s - time.monotonic()))):
            if interrupted():
                self.stop()
                continue
            try:
                if self.paused and settling.done() and not self.done:
                    return replace(self.standing(), error=self.error(), steps=self.step_table())
            except Exception:
                if not self.lost_reason:  # else `ended` says that the session has ended
                    raise
            if time.monotonic() >= deadline_s:
                return self.standing()
        self.reported = True
        return ended.result()
