"""The processes of a script: starts them, receives their events, calls and ends them.

And the ranks that these start themselves, as by mp.spawn: a job of its own, seen from its files.
The script's process is then no rank of it, or one among others. It reports for whose end it waits,
which tells whether more ranks may come.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_notebook import files, jobs
from ddp_notebook.diagnosis import catalogue
from ddp_notebook.launch.process_groups import (
    descendants,
    is_resource_tracker,
    parent,
    send_signal,
)
from ddp_notebook.launch.session_folder import remove
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import (
    Activity,
    Case,
    CellFinished,
    Collectives,
    Diagnosis,
    Event,
    Output,
    OutputKind,
    Place,
    RankExited,
    RankReport,
    Ranks,
    Remark,
    codec,
)
from ddp_notebook.rank.calls import Script
from ddp_notebook.rank.rank_process import questions_of, started_in, streams_of
from ddp_notebook.session.unresponsive import MemoryKills
from ddp_notebook.views.board_rows import BoardFacts
from ddp_notebook.views.output_log import STREAMS

if TYPE_CHECKING:
    from ddp_notebook.cluster.channels import EventReceiver
    from ddp_notebook.cluster.rank_cluster import RankCluster
    from ddp_notebook.jobs.records import Job
    from ddp_notebook.launch.hosts_client import ProcessStarter
    from ddp_notebook.launch.placement import Placement
    from ddp_notebook.session.collective_logs import CollectiveLogs
    from ddp_notebook.session.record import Record

_END_WITHIN_S, _LOOK_EVERY_S = 2.0, 0.02
"""How long ranks may take to end once the script that has started them is over."""


class StartedRanks:
    """The ranks that the processes of a script have started, with their files in `folder`.

    `processes` is in how many it runs: one, unless torchrun's way was taken by mistake. `over`
    tells whether the script has ended; its processes stay.
    """

    def __init__(self, folder: Path, processes: int, over: Callable[[], bool]) -> None:
        self._folder = folder
        self._processes = processes
        self._over = over
        self._seen: Case | None = None
        self._looked_s = -math.inf

    @property
    def job(self) -> Job | None:
        """The newest job with running processes; None without any."""
        return None if self._over() else next((job for job in self._jobs() if job.alive), None)

    def _jobs(self) -> list[Job]:
        """Return all jobs that it started, the newest first."""
        with contextlib.suppress(OSError):
            if any(self._folder.iterdir()):
                return jobs.records.jobs(self._folder)
        return []

    def written(self) -> tuple[tuple[int, int], ...]:
        """A value that changes whenever one of them has issued a collective."""
        job = self.job
        return jobs.prepared.written(job) if job is not None else ()

    def case(self, of_script: Case) -> Case | None:
        """All that is known of them; None while none runs. `of_script` is that of its process."""
        job = self.job
        if job is None:
            self._seen = None
            return None
        self._looked_s = time.monotonic()
        case = jobs.prepared.case_of(job)
        if any(rank not in job.processes for rank in range(job.world_size)):
            absent = _absent(job, of_script)
            ranks = (
                e if e.rank in job.processes else replace(absent, rank=e.rank) for e in case.ranks
            )
            case = replace(case, ranks=tuple(ranks))
        collectives = _begun_as_others(job, case.collectives)
        remarks = self.remarks()
        self._seen = replace(case, collectives=collectives, script=True, remarks=remarks)
        return self._seen

    def remarks(self) -> tuple[Remark, ...]:
        """That several ranks of the script start ranks, where one process is meant to."""
        if self._processes < 2:
            return ()
        abouts = [process.about for job in self._jobs() for process in job.processes.values()]
        count = len({about.parent for about in abouts})
        if count < 2:
            return ()
        text = catalogue.words("remarks.ranks-start-ranks.text", times=count, all=len(abouts))
        return (Remark("ranks-start-ranks", tuple(range(self._processes)), text),)

    def shown(self, title: str, diagnosis: Diagnosis | None = None) -> BoardFacts | None:
        """Return what a board shows of them, as they were seen last; None while none runs.

        `title` names the script. Looks at them again, on a thread, when that was a while ago.
        """
        job, case = self.job, self._seen
        if job is None:
            return None
        # Stamped before the thread begins and not when it ends: a board asks several times a
        # second, and each time would start one more.
        if time.monotonic() - self._looked_s > 1.0:
            self._looked_s = time.monotonic()
            look = partial(self.case, Case(()))
            threading.Thread(target=look, name="ddp-started", daemon=True).start()
        if case is None:
            return None
        note = f"These are the ranks that {title} has started itself."
        notes = (note, *(remark.text for remark in case.remarks))
        snapshot = replace(jobs.target.snapshot(case, over=False), notes=notes)
        return BoardFacts(snapshot, case.collectives, job.alive, diagnosis, case.sources)

    @property
    def looked(self) -> float:
        """Changes whenever they were looked at."""
        return self._looked_s

    def ended(self, *, failed: bool) -> Diagnosis | None:
        """Return what was wrong with the ranks that ran last, once the script is over.

        It may have `failed`. None where it started none, or where the script alone is to be judged.
        """
        job = next(iter(self._jobs()), None)
        if job is None:
            return None
        deadline_s = time.monotonic() + scaled_for_load(_END_WITHIN_S)
        while (left := _started(job)) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_EVERY_S)
        # Ranks that outlive a script which ended well were left running on purpose: of them nothing
        # is judged that may still change.
        diagnosis = Diagnosis() if left and not failed else jobs.prepared.ended(job, failed=failed)
        return diagnosis if diagnosis.wrong or _own(job) else None

    def interrupt(self) -> None:
        """Interrupt those that run, as a terminal does with all that a script has started."""
        for job in self._jobs():
            for pid in _started(job):
                send_signal(pid, signal.SIGINT)

    def end(self, scripts: Iterable[int]) -> None:
        """End them, with all else that these processes of the script have started; if any run."""
        if self.job is None:
            return
        for script in scripts:
            for pid in descendants(script):
                if not is_resource_tracker(pid):
                    send_signal(pid, signal.SIGKILL)


def _own(job: Job) -> list[int]:
    """Return the rank that the script's own process is; none where it is no rank."""
    return [rank for rank, p in job.processes.items() if p.about.pid == p.about.parent]


def _started(job: Job) -> list[int]:
    """Return the processes of it that run, without the script's own if that is a rank as well."""
    own = _own(job)
    return [job.processes[rank].about.pid for rank in job.alive if rank not in own]


def _absent(job: Job, of_script: Case) -> RankReport:
    """Report a rank that has not called init_process_group: whether it may yet do so."""
    ranks = {process.about.pid for process in job.processes.values()}
    waits = bool(
        of_script.ranks
    ) and all(  # the script's process, for the end of others, or for others as a rank itself
        report.awaits.processes
        or (report.activity is Activity.WAITING and report.process.pid in ranks)
        for report in of_script.ranks
    )
    if waits and not any(_coming(job, report.process.pid) for report in of_script.ranks):
        return RankReport(0, Activity.IDLE, doing="its process has ended, or was not started")
    return RankReport(0, Activity.BUSY, doing="its own code, before init_process_group")


def _coming(job: Job, script: int) -> list[int]:
    """Processes of a script's that may become ranks: neither are they, nor launchers or helpers."""
    abouts = [process.about for process in job.processes.values()]
    ranks = {about.pid for about in abouts}
    others = {script, *ranks, *(about.parent for about in abouts)}
    workers_of = ranks - {script}
    return [
        pid
        for pid in descendants(script)
        if pid not in others and parent(pid) not in workers_of and not is_resource_tracker(pid)
    ]


def _begun_as_others(job: Job, collectives: Collectives) -> Collectives:
    """`collectives`, with paths of the script's own process that begin where others' begin.

    It calls the function that others are started with, from lines that these do not have.
    """
    own = _own(job)
    others = (of for rank, of in collectives.of.items() if rank not in own)
    first = {(e.path[0].file, e.path[0].function) for of in others for e in of if e.path}
    if not own or not first:
        return collectives
    paths: dict[tuple[Place, ...], tuple[Place, ...]] = {}

    def cut(path: tuple[Place, ...]) -> tuple[Place, ...]:
        begins = (i for i, at in enumerate(path) if (at.file, at.function) in first)
        return paths.setdefault(path, path[next(begins, 0) :])

    changed = {
        rank: tuple(replace(e, path=cut(e.path)) for e in collectives.of.get(rank, ()))
        for rank in own
    }
    return replace(collectives, of={**collectives.of, **changed})


class ScriptProcesses:
    """One process per rank of a script. They stay after the script is over, until `end`.

    `folder` belongs to the run and is created here; output too long to send goes to
    `output_folder`.
    """

    def __init__(
        self,
        fork_server: ProcessStarter,
        placement: Placement,
        record: Record,
        cluster: RankCluster,
        logs: CollectiveLogs,
        receiver: EventReceiver,
        folder: Path,
        output_folder: Path,
        ranks: Ranks,
    ) -> None:
        self.ranks = ranks
        self._fork_server = fork_server
        self._placement = placement
        self._record = record
        self._cluster = cluster
        self._logs = logs
        self._receiver = receiver
        self._folder = folder
        self._output_folder = output_folder
        self._cell = 0
        self._pids: dict[int, int] = {}
        self._exits: dict[int, int] = {}
        self._lock = threading.Lock()
        self._gone = threading.Condition(self._lock)
        self._told: set[int] = set()
        """Ranks whose processes have ended and were reported, which reads their files."""
        self._read: set[int] = set()
        """Ranks whose processes have ended and whose output was read from their files."""
        self._finished: set[int] = set()
        """Ranks whose script is over; the end of their processes is not reported again."""
        self._telling = threading.RLock()
        self._given_back = False
        """The session's own processes are the ranks again."""
        self._memory_kills = MemoryKills(fork_server)
        self._memory_kills.begin(placement)
        folder.mkdir(mode=0o700)
        self._made = folder.stat()
        # It is over once it has ended on a rank.
        self.started_ranks = StartedRanks(
            started_in(folder), len(ranks), lambda: bool(self._finished or self._exits)
        )
        """The ranks that these processes have started themselves."""
        self._sent: dict[tuple[int, OutputKind], int] = {}
        """Bytes received of each stream."""
        self._source = receiver.add_source(self._hear)
        record.lend(ranks)
        logs.lend(ranks, folder)

    def start(
        self,
        scripts: Mapping[int, Script],
        environments: Mapping[int, Mapping[str, str]],
        namespaces: Mapping[int, Mapping[str, str]],
        folder_on: Callable[[int], str],
    ) -> None:
        """Start the script on every rank. Raises SessionLost, OSError.

        `namespaces` are those of the lab's hosts; `folder_on` gives the current folder of a host.
        """
        for rank, script in scripts.items():
            self._cell = script.cell
            out, errors = streams_of(self._folder, rank)
            arguments = {
                "rank": rank,
                "events": self._receiver.url,
                "source": self._source,
                "folder": str(self._folder),
                "output_folder": str(self._output_folder),
                "script": codec.encode(script),
            }
            spec = {
                "calls": [["ddp_notebook.rank.cells.scripts:main", arguments]],
                "env": dict(environments[rank]),
                "cwd": folder_on(self._placement.host(rank)),
                "log": str(out),
                "errors": str(errors),
                "namespaces": dict(namespaces.get(rank, {})),
                "host": self._placement.host(rank),
                "asked_at": str(questions_of(self._folder, rank)),
            }
            exited, begun = partial(self._exited, rank), partial(self._begun, rank)
            self._fork_server.spawn(spec, exited, begun)

    def _begun(self, rank: int, pid: int) -> None:
        # Before its end can be told: an end is of the process that is known to be this rank.
        with self._lock:
            self._pids[rank] = pid
        self._cluster.lend(rank, pid, questions_of(self._folder, rank))
        self._record.lent_to(rank, pid)

    def kill(self, ranks: Ranks) -> None:
        """End the processes of `ranks`."""
        with self._lock:
            alive = [r for r in ranks if r in self._pids and r not in self._exits]
        for rank in alive:
            self._fork_server.signal(self._pids[rank], signal.SIGKILL)

    def end(self) -> None:
        """End the remaining processes; the session's own processes are the ranks again."""
        # The order matters. Every end is told first, while the places are still the script's: its
        # run has to hear of it. Then nothing is received from there any more, and what a thread
        # has in hand is passed to the run alone. Only then do the ranks' own processes get their
        # places: an event of the script's would change the state of a process that lives on.
        self.kill(self.ranks)
        deadline_s = time.monotonic() + 5.0
        with self._gone:
            # The fork server reports each end; if it is lost, nobody does.
            while not self._told >= self._pids.keys() and self._fork_server.alive:
                if time.monotonic() >= deadline_s:
                    break
                self._gone.wait(0.1)
        self._receiver.remove_source(self._source)
        with self._telling:
            self._given_back = True
        self._cluster.take_back()
        self._logs.take_back(self.ranks)
        self._record.take_back()
        remove(self._folder, self._made)

    def _hear(self, events: Sequence[Event]) -> None:
        """Events of the processes; those of a dead one were already read from its files."""
        with self._lock:
            kept = [e for e in events if not isinstance(e, Output) or e.rank not in self._read]
            for event in kept:
                if isinstance(event, CellFinished):
                    self._finished.add(event.rank)
                elif isinstance(event, Output) and event.what in STREAMS:
                    key = (event.rank, event.what)
                    self._sent[key] = self._sent.get(key, 0) + len(event.text.encode())
        if kept:
            self._add(kept)

    def _add(self, events: Sequence[Event]) -> None:
        """Add events to the record; late ones are none of the ranks', but of the script's run."""
        with self._telling:
            (self._record.pass_on if self._given_back else self._record.add)(events)

    def _exited(self, rank: int, code: int) -> None:
        """Report the end of a process, unless its script was over before.

        On the fork server client's thread, or where it is started.
        """
        with self._lock:
            self._exits[rank] = code
        try:
            if rank in self._finished:
                return
            now_ns, events = time.monotonic_ns(), list[Event]()
            # A killed process leaves in its files what it had not sent, and perhaps events on the
            # way that were sent before. From here on the files count: output that still arrives for
            # this rank is dropped by `_hear`, under the same lock, or it would be shown twice.
            with self._lock:
                self._read.add(rank)
                sent = dict(self._sent)
            streams = streams_of(self._folder, rank)
            for what, path in zip(STREAMS, streams, strict=True):
                if text := files.tail(path, 16_000, sent.get((rank, what), 0)):
                    events.append(Output(rank=rank, cell=self._cell, what=what, text=text))
            if code == 0:  # it exited without Python's normal shutdown
                end = CellFinished(rank=rank, cell=self._cell, outcome="ok", heard_ns=now_ns)
                events.append(end)
            # The last output: of stderr, else of stdout.
            texts = [files.tail(path, 4000) for path in reversed(streams)]
            exited = RankExited(
                rank=rank,
                pid=self._pids[rank],
                exit_code=code,
                last_words=next(filter(str.strip, texts), ""),
                peak_bytes=self._fork_server.peak_bytes.get(self._pids[rank], 0),
                oom_kills=self._memory_kills.since(self._placement.host(rank)),
                cell=self._cell,
                heard_ns=now_ns,
            )
            self._add([*events, exited])
        finally:
            with self._gone:
                self._told.add(rank)
                self._gone.notify_all()

    def logs(self, rank: int) -> tuple[Path, ...]:
        """Return the files with all output of a process: stdout, then stderr."""
        return streams_of(self._folder, rank)
