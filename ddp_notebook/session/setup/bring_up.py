"""Takes the ranks through the stages of set-up: all at once, or step by step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ddp_notebook.diagnosis import diagnose_setup, failures
from ddp_notebook.errors import SessionLost, SetupFailed
from ddp_notebook.launch.addresses import free_port
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import Case, Diagnosis, Ranks, Stage, StageFailed, Status
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import SetUpPlan
from ddp_notebook.session.options import Settings
from ddp_notebook.session.processes.unresponsive import deaths, process_of
from ddp_notebook.session.record import Record
from ddp_notebook.session.runs.gather import LaunchParameters, gather
from ddp_notebook.session.runs.stall_detector import StallDetector

if TYPE_CHECKING:
    from ddp_notebook.session.processes.processes import Processes

_FREE_WITHIN_S = 2.0
"""On an idle machine. torch's client waits up to 1.9 s before it retries: a rank that does not
return in this time is replaced and loses its variables."""
_HEARD_WITHIN_S = 1.0
"""On an idle machine. A thread that holds the GIL never receives the request."""
_FREE_AGAIN_S = 0.1
_LAST_WORD_S = 1.0
_PREPARED_WITHIN_S = 10.0


class BringUp:
    """The set-up of one session's ranks; begun anew for each generation of the group."""

    def __init__(self, processes: Processes, record: Record) -> None:
        self.processes = processes
        self.record = record
        self.generation = 0
        self.launch = LaunchParameters()
        self.store = "session"
        self.settings: Settings = {}
        """What this set-up changes on single ranks."""
        self._answers: dict[int, Any] = {}

    @property
    def everyone(self) -> Ranks:
        """All ranks."""
        return tuple(range(self.processes.options.world_size))

    # -- all at once -------------------------------------------------------------------

    def run(self, settings: Settings, store: str, interrupted: Callable[[], bool]) -> None:
        """Take all ranks through all stages, under a fresh prefix of the store.

        Returns when every rank has verified its all_reduce. Raises SetupFailed, with the diagnosis,
        once that is impossible; the ranks stay as they are.
        """
        plans = self._plans(settings, store, patient=False)
        self._answers = self.processes.cluster.call(
            self.everyone, calls.BRING_UP, plans.__getitem__
        )
        self._await_end(interrupted)

    def _plans(self, settings: Settings, store: str, *, patient: bool) -> dict[int, SetUpPlan]:
        """The launch parameters of each rank."""
        self.generation += 1
        self.store, self.settings = store, settings
        options = self.processes.options
        host, port = self._store_address(store)
        self._note(host, port)
        self.record.begin_setup()
        plan = SetUpPlan(
            rank=0,
            world_size=options.world_size,
            backend=self.processes.devices.backend,
            device=self.processes.devices.device,
            init_method=options.init_method,
            master_addr=host,
            master_port=port,
            store_path=str(self.processes.folder / f"rendezvous-{self.generation}"),
            generation=self.generation,
            timeout_s=options.timeout_s,
            threads=options.threads,
            store=store,
            patient=patient,
        )
        return {
            rank: structs.replace(plan, rank=rank, settings=dict(settings.get(rank, {})))
            for rank in self.everyone
        }

    def _store_address(self, store: str) -> tuple[str, int]:
        options = self.processes.options
        if options.init_method == "file":
            return "", 0
        if store == "rank0":
            return options.master_addr, options.master_port or free_port(options.master_addr)
        return self.processes.store_address()

    def _note(self, host: str, port: int) -> None:
        options = self.processes.options
        values = {"WORLD_SIZE": str(options.world_size)}
        if options.init_method == "file":
            text = f"file://{self.processes.folder / f'rendezvous-{self.generation}'}"
        else:
            scheme = "tcp" if options.init_method == "tcp" else "env"
            text = f"{scheme}://{host}:{port}"
            values |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        self.launch = LaunchParameters(
            values,
            0 if self.store == "rank0" and options.init_method != "file" else None,
            lambda: self.store == "rank0" or self.processes.store_alive,
        )
        self.record.note(
            generation=self.generation,
            backend=self.processes.devices.backend,
            init_method=text,
        )

    def _await_end(self, interrupted: Callable[[], bool]) -> None:
        self._wait_until_decided(interrupted)
        snapshot = self.record.snapshot
        if snapshot.ready:
            return
        if snapshot.ended:
            raise SessionLost(f"{snapshot.ended} Start again: %ddp_init")
        diagnosis = self.diagnose()
        raise SetupFailed(self._why_not_up(diagnosis), diagnosis=diagnosis)

    def _wait_until_decided(self, interrupted: Callable[[], bool]) -> None:
        """Wait until all ranks are ready or one failed. Raises SetupFailed when they are stuck."""
        detector = StallDetector(self.look)

        def decided() -> bool:
            statuses = {state.status for state in self.record.snapshot.ranks}
            return statuses == {Status.READY} or bool(self.record.snapshot.ended)

        # The ranks time out each stage themselves; this is for a rank that cannot even do that.
        deadline = time.monotonic() + 2 * self.processes.options.timeout_s + 5
        while not self.record.wait_for(decided, 0.1):
            self._report_crashed_calls()
            if self.record.snapshot.with_status(Status.DEAD) or self._all_settled():
                break
            if (diagnosis := detector.turn()) is not None:
                raise SetupFailed(self._why_not_up(diagnosis), diagnosis=diagnosis)
            if interrupted():
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                break

    def _all_settled(self) -> bool:
        """No rank is in a stage any more, and one at least did not get through."""
        statuses = {state.status for state in self.record.snapshot.ranks}
        return Status.FAILED in statuses and statuses <= {Status.FAILED, Status.READY}

    def _report_crashed_calls(self) -> None:
        """A bring-up that raised where no stage could catch it still names its rank."""
        states = self.record.snapshot.ranks
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
        """Which rank failed at which stage, why, and what to do; then which ranks wait."""
        lines = []
        for finding in diagnosis.findings:
            why = finding.sentence if finding.ranks else finding.cause
            lines.append(f"{why}\n  What to do: {finding.remedy}")
        dead = self.record.snapshot.with_status(Status.DEAD)
        return "\n".join(
            [*deaths(self.record.snapshot), *lines] if dead or lines else ["Set-up did not finish."]
        )

    # -- step by step ------------------------------------------------------------------

    def prepare(self, settings: Settings, store: str) -> None:
        """Stop all ranks before the first stage. Raises SetupFailed."""
        plans = self._plans(settings, store, patient=True)
        self._answers = self.processes.cluster.call(self.everyone, calls.PREPARE, plans.__getitem__)

        def paused() -> bool:
            return len(self.record.snapshot.with_status(Status.PAUSED)) == len(self.everyone)

        if not self.record.wait_for(paused, _PREPARED_WITHIN_S):
            raise SetupFailed(self._why_not_up(self.diagnose()))

    def send_on(self, ranks: Ranks, to: Stage | None) -> None:
        """Send paused ranks through their next stage, or through all up to `to`."""
        states = self.record.snapshot.ranks

        def target(rank: int) -> Stage:
            passed = states[rank].stage or Stage.LAUNCHED
            return to or list(Stage)[passed.number]

        self._answers.update(self.processes.cluster.call(ranks, calls.ADVANCE, target))

    def answered(self, ranks: Ranks) -> bool:
        """True when these ranks are out of the stage they were sent into."""
        return all(rank not in self._answers or self._answers[rank].done() for rank in ranks)

    # -- why, and freeing --------------------------------------------------------------

    def look(self) -> Case:
        """The case as it is."""
        return gather(
            self.processes.cluster, self.record.snapshot, self.launch, asked=self._still_asked
        )

    def _still_asked(self) -> Ranks:
        """Ranks with a call of ours that has not ended."""
        return tuple(rank for rank in self._answers if not self.answered((rank,)))

    def diagnose(self) -> Diagnosis:
        """The current diagnosis."""
        case = self.look()
        diagnosis = diagnose_setup(case)
        if diagnosis.wrong:
            return diagnosis
        own = failures.failed_in_set_up(self.record.snapshot.ranks, case)
        return replace(diagnosis, findings=(*own, *diagnosis.findings))

    def free(self, ranks: Ranks) -> Ranks:
        """Unblock ranks; returns those that can only be unblocked by ending their process."""
        began_s, answering = time.monotonic(), set[int]()
        # Only their current set-up: one that begins meanwhile must not be aborted.
        sent = {rank: self._answers[rank] for rank in ranks if rank in self._answers}

        def stuck() -> Ranks:
            states = self.record.snapshot.ranks
            return tuple(
                rank
                for rank in ranks
                if states[rank].status is Status.RUNNING
                or (states[rank].status is not Status.DEAD and not _ended(sent.get(rank)))
            )

        # A rank's event that it is done arrives before its call returns.
        if self.record.wait_for(lambda: not stuck(), _FREE_AGAIN_S):
            return ()
        while (left := stuck()) and time.monotonic() - began_s < self._patience_s(left, answering):
            answering.update(self.processes.cluster.ask(left, calls.FREE, calls.Nothing(), 0.5))
            self.record.wait_for(lambda: not stuck(), _FREE_AGAIN_S)
        left = stuck()
        # A call can return before the rank's own event has arrived.
        self.record.wait_for(lambda: not self._inside(ranks, left), scaled_for_load(_LAST_WORD_S))
        self.record.lose_group()
        return left

    def _patience_s(self, ranks: Ranks, heard: set[int]) -> float:
        """How long to wait for ranks to return, without those that cannot do so."""
        if heard.intersection(ranks):
            return scaled_for_load(_FREE_WITHIN_S)
        return 0.0 if self.stopped(ranks) == ranks else scaled_for_load(_HEARD_WITHIN_S)

    def stopped(self, ranks: Ranks) -> Ranks:
        """Ranks whose process is stopped: they cannot return from any call."""
        states = self.record.snapshot.ranks
        return tuple(
            rank
            for rank in ranks
            if states[rank].status is not Status.DEAD
            and process_of(states[rank].pid)[0] == "stopped"
        )

    def _inside(self, ranks: Ranks, but: Ranks) -> bool:
        states = self.record.snapshot.ranks
        return any(
            states[rank].status is Status.SETTING_UP and states[rank].entering is not None
            for rank in ranks
            if rank not in but
        )


def _ended(answer: Any) -> bool:
    return answer is None or bool(answer.done())
