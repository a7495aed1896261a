"""Ranks that a script starts itself, as by mp.spawn: a job of its own, seen from its files.

The script's process is no rank of it, or one among others. It reports for whose end it waits, which
tells whether more ranks may come.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_notebook import jobs
from ddp_notebook.launch.process_groups import (
    is_resource_tracker,
    parent,
    send_signal,
    session_members,
)
from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.model import Activity, Case, Collectives, Diagnosis, Place, RankReport, Remark
from ddp_notebook.views.board_rows import BoardFacts

if TYPE_CHECKING:
    from ddp_notebook.jobs.records import Job

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
        """Those that run, with the others of their job; the newest job. None without any."""
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
        text = (
            f"{count} of the script's {self._processes} ranks have started ranks themselves, "
            f"{len(abouts)} in all. If one process is to start them, run the script once, with "
            "%ddp_run --python."
        )
        return (Remark("ranks-start-ranks", tuple(range(self._processes)), text),)

    def shown(self, title: str, diagnosis: Diagnosis | None = None) -> BoardFacts | None:
        """Return what a board shows of them, as they were seen last; None while none runs.

        `title` names the script. Looks at them again, on a thread, when that was a while ago.
        """
        job, case = self.job, self._seen
        if job is None:
            return None
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
        """What was wrong with those that ran last, once the script is over; it may have `failed`.

        None where it started none, or where the script alone is to be judged.
        """
        job = next(iter(self._jobs()), None)
        if job is None:
            return None
        deadline_s = time.monotonic() + scaled_for_load(_END_WITHIN_S)
        while (left := _started(job)) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_EVERY_S)
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
            for pid in session_members(script):
                if pid != script and not is_resource_tracker(pid):
                    send_signal(pid, signal.SIGKILL)


def _own(job: Job) -> list[int]:
    """Return the rank that the script's own process is; none where it is no rank."""
    return [rank for rank, p in job.processes.items() if p.about.pid == p.about.parent]


def _started(job: Job) -> list[int]:
    """Return the processes of it that run, without the script's own if that is a rank as well."""
    own = _own(job)
    return [job.processes[rank].about.pid for rank in job.alive if rank not in own]


def _absent(job: Job, of_script: Case) -> RankReport:
    """What is known of a rank that has not called init_process_group: whether it may yet do so."""
    ranks = {process.about.pid for process in job.processes.values()}
    waits = bool(
        of_script.ranks
    ) and all(  # the script's process, for the end of others, or for others as a rank itself
        report.joins or (report.activity is Activity.WAITING and report.pid in ranks)
        for report in of_script.ranks
    )
    if waits and not any(_coming(job, report.pid) for report in of_script.ranks):
        return RankReport(0, Activity.IDLE, doing="its process has ended, or was not started")
    return RankReport(0, Activity.BUSY, doing="it has not called init_process_group yet")


def _coming(job: Job, script: int) -> list[int]:
    """Processes of a script's that may become ranks: neither are they, nor launchers or helpers."""
    abouts = [process.about for process in job.processes.values()]
    ranks = {about.pid for about in abouts}
    others = {script, *ranks, *(about.parent for about in abouts)}
    workers_of = ranks - {script}
    return [
        pid
        for pid in session_members(script)
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
