"""Ranks that a script starts itself, as by mp.spawn: a job of its own, seen from its files.

The script's process is no rank of it, or one among others. It reports for whose end it waits, which
tells whether more ranks may come.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_notebook import jobs
from ddp_notebook.launch.process_groups import (
    is_resource_tracker,
    parent,
    send_signal,
    session_members,
)
from ddp_notebook.model import Activity, Case, Diagnosis, RankReport

if TYPE_CHECKING:
    from ddp_notebook.jobs.prepared import Job


class StartedRanks:
    """The ranks that the processes of a script have started, with their files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def job(self) -> Job | None:
        """Those that run, with the others of their job; the newest job. None without any."""
        return next((job for job in self._jobs() if job.alive), None)

    def _jobs(self) -> list[Job]:
        """All jobs that it started, the newest first."""
        with contextlib.suppress(OSError):
            if any(self._folder.iterdir()):
                return jobs.prepared.jobs(self._folder)
        return []

    def written(self) -> tuple[tuple[int, int], ...]:
        """A value that changes whenever one of them has issued a collective."""
        job = self.job
        return jobs.prepared.written(job) if job is not None else ()

    def case(self, of_script: Case) -> Case | None:
        """All that is known of them; None while none runs. `of_script` is that of its process."""
        job = self.job
        if job is None:
            return None
        case = jobs.prepared.case_of(job)
        if any(rank not in job.processes for rank in range(job.world_size)):
            absent = _absent(job, of_script)
            ranks = (
                e if e.rank in job.processes else replace(absent, rank=e.rank) for e in case.ranks
            )
            case = replace(case, ranks=tuple(ranks))
        return replace(case, script=True)

    def ended(self, *, failed: bool) -> Diagnosis | None:
        """What was wrong with those that ran last; None for nothing, or where none ran.

        Where the script has `failed`; else what ranks raised, and what they trained, is told.
        """
        job = next(iter(self._jobs()), None)
        if job is None or job.alive:
            return None
        found = jobs.prepared.ended(job, failed=failed)
        return found if found.wrong else None

    def signal(self, number: int) -> None:
        """Signal those that run."""
        for job in self._jobs():
            for rank in job.alive:
                pid = job.processes[rank].about.pid
                if pid != job.processes[rank].about.parent:  # the script's own process
                    send_signal(pid, number)


def _absent(job: Job, of_script: Case) -> RankReport:
    """What is known of a rank that has not called init_process_group: whether it may yet do so."""
    waits = all(report.children for report in of_script.ranks)  # the script, for the end of others
    if waits and not any(_coming(job, report.pid) for report in of_script.ranks):
        return RankReport(0, Activity.IDLE, doing="its process has ended, or was not started")
    return RankReport(0, Activity.BUSY, doing="it has not called init_process_group yet")


def _coming(job: Job, script: int) -> list[int]:
    """Processes of a script's that may become ranks: neither are they, nor launchers or helpers."""
    abouts = [process.about for process in job.processes.values()]
    ranks = {about.pid for about in abouts}
    others = {script, *ranks, *(about.parent for about in abouts)}
    return [
        pid
        for pid in session_members(script)
        if pid not in others and parent(pid) not in ranks and not is_resource_tracker(pid)
    ]
