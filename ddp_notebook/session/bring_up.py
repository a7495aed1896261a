"""Takes the ranks through the stages of setup: all at once, or step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddp_notebook.diagnosis import diagnose_setup, failures
from ddp_notebook.errors import SetupFailed, UsageMistake
from ddp_notebook.launch.process_ids import host_of, pid_of
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import (
    Activity,
    Case,
    Diagnosis,
    Ranks,
    RankState,
    Stage,
    StageFailed,
    Status,
    StepTable,
    name_ranks,
    verb,
)
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import Call, SetUpPlan
from ddp_notebook.session.guards import living
from ddp_notebook.session.options import Settings
from ddp_notebook.session.record import Record
from ddp_notebook.session.runs.gather import LaunchParameters, gather
from ddp_notebook.session.runs.stall_detector import StallDetector
from ddp_notebook.session.unresponsive import deaths
from ddp_notebook.views.step_rows import setup_table

if TYPE_CHECKING:
    from ddp_notebook.session.session_processes import Processes

_FREE_WITHIN_S = 2.0
"""On an idle machine. torch's client waits up to 1.9 s before it retries: a rank that does not
return in this time is replaced and loses its variables."""
_HEARD_WITHIN_S = 1.0
"""On an idle machine. A thread that holds the GIL never receives the request."""
_ANSWERED_S = 1.0
"""How long a rank takes at most to free itself: to abort a communicator of NCCL's takes 0.5 s."""
_FREE_AGAIN_S = 0.1
_SETTLED_S = 0.5
"""A rank that has waited so long in a stage will not arrive in this step."""
_LATE_S = 15.0
"""Nor will one that has not answered, or left its pause, for so long."""


class BringUp:
    """The setup of one session's ranks; begun again for each generation of the group."""

    def __init__(self, processes: Processes, record: Record) -> None:
        self.processes = processes
        self.record = record
        self.generation = 0
        self.launch = LaunchParameters()
        self.store = "session"
        self.settings: Settings = {}
        """The changes that this setup makes on single ranks."""
        self._answers: dict[int, Any] = {}

    @property
    def everyone(self) -> Ranks:
        """All ranks."""
        return tuple(range(self.processes.options.world_size))

    def _begin(self, settings: Settings, store: str, call: Call[SetUpPlan, Any]) -> None:
        """Begin a new generation: send each rank its launch parameters in a `call`.

        Each generation has a prefix of its own in the store, or a file.
        """
        # A rank that is freed late from the last setup may still write keys of it, and torch takes
        # what it finds under a key for another rank's answer. Under a prefix of its own this setup
        # sees none of them, though the session's store stays.
        self.generation += 1
        self.store, self.settings = store, settings
        options, devices = self.processes.options, self.processes.devices
        store_path = str(self.processes.folder / f"rendezvous-{self.generation}")
        host, port, store_host = "", 0, None
        values = {"WORLD_SIZE": str(options.world_size)}
        init_method = f"file://{store_path}"
        if options.init_method != "file":
            host, port = self.processes.places.master_addr, options.master_port
            if store == "rank0":
                store_host, port = 0, port or self.processes.places.free_port(0)
            else:
                host, port = self.processes.store_address()
            init_method = f"{'tcp' if options.init_method == 'tcp' else 'env'}://{host}:{port}"
            values |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        self.launch = LaunchParameters(
            values, store_host, lambda: self.store == "rank0" or self.processes.store_alive
        )
        self.record.note(
            generation=self.generation, backend=devices.backend, init_method=init_method
        )
        self.record.begin_setup()

        def plan(rank: int) -> SetUpPlan:
            return SetUpPlan(
                rank=rank,
                world_size=options.world_size,
                backend=devices.backend,
                device=devices.devices[rank],
                init_method=options.init_method,
                master_addr=host,
                master_port=port,
                store_path=store_path,
                generation=self.generation,
                timeout_s=options.timeout_s,
                threads=self.processes.places.threads(rank),
                store=store,
                patient=call is calls.PREPARE,
                settings=dict(settings.get(rank, {})),
                local=options.placement.local(rank) if options.hosts else None,
            )

        self._answers = self.processes.cluster.call(self.everyone, call, plan)

    # -- all at once -------------------------------------------------------------------

    def run(self, settings: Settings, store: str, interrupted: Callable[[], bool]) -> None:
        """Take all ranks through all stages, under a fresh prefix of the store.

        Returns when every rank has verified its all_reduce. Raises SetupFailed, with the diagnosis,
        once that is impossible; the ranks stay as they are.
        """
        self._begin(settings, store, calls.BRING_UP)
        detector, diagnosis = StallDetector(self.look), None

        def decided() -> bool:
            statuses = {state.status for state in self.record.snapshot.ranks}
            return statuses == {Status.READY} or bool(self.record.snapshot.ended)

        # The ranks time out each stage themselves; this is for a rank that cannot even do that.
        deadline_s = time.monotonic() + 2 * self.processes.options.timeout_s + 5
        while not self.record.wait_for(decided, 0.1):
            self._report_crashed_calls()
            statuses = {state.status for state in self.record.snapshot.ranks}
            # No rank is in a stage any more, and one at least did not get through.
            settled = Status.FAILED in statuses and statuses <= {Status.FAILED, Status.READY}
            if settled or Status.DEAD in statuses or time.monotonic() > deadline_s:
                break
            if (diagnosis := detector.turn()) is not None:
                break
            if interrupted():
                raise KeyboardInterrupt
        if diagnosis is None:
            if self.record.snapshot.ready:
                return
            self.record.check_not_lost()
            diagnosis = self.diagnose()
        raise SetupFailed(self._why_not_up(diagnosis), diagnosis=diagnosis)

    def _report_crashed_calls(self) -> None:
        """Name the rank of a bring-up that raised where no stage could catch it."""
        states = self.record.snapshot.ranks
        # A stage that fails says so in an event, and the wait goes by these. What raises outside of
        # all stages is only in the call's answer: unread, the rank would count as on its way until
        # the deadline.
        for rank, answer in self._answers.items():
            settled = (Status.READY, Status.FAILED, Status.PAUSED, Status.DEAD)
            if answer.done() and states[rank].status not in settled:
                error = getattr(answer, "exception", lambda: None)()
                if error is not None:
                    failed = StageFailed(
                        rank=rank,
                        stage=states[rank].entering or Stage.ENVIRONMENT,
                        cause=str(error)[:500],
                        remedy=f"The rank's log says more: %ddp_output --ranks {rank} --log",
                    )
                    self.record.add((failed,))

    def _why_not_up(self, diagnosis: Diagnosis) -> str:
        """Say which rank failed at which stage, why, and the remedy; then which ranks wait."""
        lines = deaths(self.record.snapshot)
        for finding in diagnosis.findings:
            why = finding.sentence if finding.ranks else finding.cause
            lines.append(f"{why}\n  Fix: {finding.remedy}")
        return "\n".join(lines or ["Setup did not finish."])

    # -- step by step ------------------------------------------------------------------

    def prepare(self, settings: Settings, store: str) -> None:
        """Stop all ranks before the first stage. Raises SetupFailed."""
        self._begin(settings, store, calls.PREPARE)

        def paused() -> bool:
            return len(self.record.snapshot.with_status(Status.PAUSED)) == len(self.everyone)

        if not self.record.wait_for(paused, 10.0):
            raise SetupFailed(self._why_not_up(self.diagnose()))

    def step(
        self, ranks: Ranks | None, to: Stage | None, interrupted: Callable[[], bool]
    ) -> StepTable:
        """Send paused ranks through their next stage, or through all up to and with `to`.

        Raises UsageMistake when none of them can be moved.
        """
        moving = self._paused(ranks, None)
        if not moving:
            raise UsageMistake(self.why_no_step(ranks))
        while moving and not interrupted():
            before = self.record.snapshot.ranks

            def target(rank: int, before: Sequence[RankState] = before) -> Stage:
                return to or list(Stage)[(before[rank].stage or Stage.LAUNCHED).number]

            self._answers.update(self.processes.cluster.call(moving, calls.ADVANCE, target))
            self._await_arrival([before[rank] for rank in moving], interrupted)
            # Ranks that waited for these when the step began have made progress meanwhile.
            moving = self._paused(ranks, to) if to is not None else ()
        return self.table()

    def _paused(self, ranks: Ranks | None, to: Stage | None) -> Ranks:
        """Return the paused of `ranks` (None: all) that have not passed `to` (None: any)."""
        snapshot = self.record.snapshot
        return tuple(
            rank
            for rank in snapshot.with_status(Status.PAUSED)
            if (ranks is None or rank in ranks)
            and (to is None or (snapshot.ranks[rank].stage or Stage.LAUNCHED).number < to.number)
        )

    def _await_arrival(self, before: Sequence[RankState], interrupted: Callable[[], bool]) -> None:
        """Wait until every rank in motion has arrived, failed, died, or can only wait for others.

        `before` is what these ranks were when they were sent on.
        """
        moving = tuple(state.rank for state in before)
        looked_at: object = None
        activities: tuple[Activity, ...] = ()
        since_s = changed_s = time.monotonic()

        def still_before() -> Ranks:
            states = self.record.snapshot.ranks
            paused = (state for state in before if states[state.rank].status is Status.PAUSED)
            return tuple(state.rank for state in paused if states[state.rank].stage == state.stage)

        def arrived() -> bool:
            inside = self.record.snapshot.with_status(Status.SETTING_UP)
            # A call can return before the rank's own event has arrived.
            return not inside and not self._asked(moving) and not still_before()

        while not self.record.wait_for(arrived, 0.05) and not interrupted():
            states = self.record.snapshot.ranks
            picture = tuple((s.status, s.stage, s.entering, s.doing) for s in states)
            if picture != looked_at:
                looked_at, since_s = picture, time.monotonic()
                changed_s = since_s
            elif time.monotonic() - since_s > _SETTLED_S:
                since_s = time.monotonic()
                case, doing = self.look(), activities
                activities = tuple(report.activity for report in case.ranks)
                # On a busy machine a rank may not have left its pause yet, nor answer in time;
                # what it says directly after that may be of a moment in which it goes on.
                silent = self._asked(case.where(Activity.SILENT))
                stopped = {e.rank for e in case.ranks if e.process.state == "stopped"}
                late = {*still_before(), *silent} - stopped
                settled = not case.where(Activity.BUSY) and doing in ((), activities)
                if settled and (not late or since_s - changed_s > _LATE_S):
                    return

    def table(self) -> StepTable:
        """Return where all ranks stand, with who hosts the store and whose keys are in it."""
        made = setup_table(self.record.snapshot, self.store)
        address = self.launch.values.get("MASTER_ADDR", "")
        if not address:
            return made
        port, pid = self.launch.values["MASTER_PORT"], self.processes.store_pid
        on = self.processes.options.placement.name(host_of(pid))
        where = f"pid {pid_of(pid)} on {on}" if on else f"pid {pid}"
        host = "rank 0" if self.store == "rank0" else f"the session ({where})"
        joined = [
            s.rank
            for s in self.record.snapshot.ranks
            if Stage.RENDEZVOUS in (s.entering, s.stage)
            or (s.stage is not None and s.stage.number > Stage.RENDEZVOUS.number)
        ]
        claimed = {self.settings.get(rank, {}).get("RANK") or str(rank) for rank in joined}
        keys = ", ".join(f"join/{rank}" for rank in sorted(claimed)) or "none yet"
        store = (f"store: {address}:{port}, hosted by {host}", f"keys of ranks in it: {keys}")
        return replace(made, details=(*store, *made.details))

    def why_no_step(self, ranks: Ranks | None) -> str:
        """Return why none of `ranks` can be sent on."""
        snapshot = self.record.snapshot
        if paused := snapshot.with_status(Status.PAUSED):
            asked = ranks or ()
            return (
                f"{verb(asked, 'is', 'are').capitalize()} not paused; {name_ranks(paused)} can be "
                "stepped: %ddp_step"
            )
        if not snapshot.ready:
            return "No rank is paused. %ddp_why says what they wait for, %ddp_abort frees them."
        return (
            "There is nothing to step: no rank is paused at a line, no cell runs, and setup "
            "is complete. To stop at a line: %ddp_break 2 for line 2 of the last cell, or "
            "breakpoint() in the code. To step through setup: %ddp_shutdown, then "
            "%ddp_init --step"
        )

    # -- why, and freeing --------------------------------------------------------------

    def look(self) -> Case:
        """Return the case as it is."""
        return gather(
            self.processes.cluster,
            self.record.snapshot,
            self.launch,
            asked=lambda: self._asked(self.everyone),
        )

    def _asked(self, ranks: Ranks) -> Ranks:
        """Return those of `ranks` with a call of ours that has not ended."""
        return tuple(
            rank for rank in ranks if rank in self._answers and not self._answers[rank].done()
        )

    def diagnose(self) -> Diagnosis:
        """Return the current diagnosis."""
        case = self.look()
        diagnosis = diagnose_setup(case)
        if diagnosis.wrong:
            return diagnosis
        own = failures.failed_in_set_up(self.record.snapshot.ranks, case)
        return replace(diagnosis, findings=(*own, *diagnosis.findings))

    def free(self, ranks: Ranks) -> Ranks:
        """Unblock ranks; returns those that can only be unblocked by ending their process."""
        began_s, answering = time.monotonic(), set[int]()
        # Only their current setup: one that begins meanwhile must not be aborted.
        sent = {rank: self._answers[rank] for rank in ranks if rank in self._answers}

        def stuck() -> Ranks:
            return tuple(rank for rank in ranks if self._is_inside(rank, sent.get(rank)))

        def patience_s(left: Ranks) -> float:
            """Return how long to wait for ranks to come back; not for those that cannot."""
            if answering.intersection(left):
                return scaled_for_load(_FREE_WITHIN_S)
            return 0.0 if self.stopped(left) == left else scaled_for_load(_HEARD_WITHIN_S)

        # A rank's event that it is done arrives before its call returns.
        if self.record.wait_for(lambda: not stuck(), _FREE_AGAIN_S):
            return ()
        while (left := stuck()) and time.monotonic() - began_s < patience_s(left):
            answering.update(
                self.processes.cluster.ask(left, calls.FREE, calls.Nothing(), _ANSWERED_S)
            )
            self.record.wait_for(lambda: not stuck(), _FREE_AGAIN_S)
        left = stuck()

        def none_inside() -> bool:
            states = self.record.snapshot.ranks
            return not any(
                states[rank].status is Status.SETTING_UP and states[rank].entering is not None
                for rank in ranks
                if rank not in left
            )

        # A call can return before the rank's own event has arrived.
        self.record.wait_for(none_inside, scaled_for_load(1.0))
        self.record.lose_group()
        return left

    def _is_inside(self, rank: int, answer: Any) -> bool:
        """Return whether a rank is in a cell, or in the setup whose outcome `answer` will be."""
        status = self.record.snapshot.ranks[rank].status
        if status in (Status.RUNNING, Status.DEAD):
            return status is Status.RUNNING
        return answer is not None and not answer.done()

    def stopped(self, ranks: Ranks) -> Ranks:
        """Return those of `ranks` whose process is stopped: they cannot return from any call."""
        alive = living(ranks, self.record.snapshot)
        pid = {rank: self.record.snapshot.ranks[rank].pid for rank in alive}
        found = self.processes.cluster.stopped(list(pid.values()))
        return tuple(rank for rank in alive if pid[rank] in found)
