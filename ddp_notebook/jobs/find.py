"""Finds a user's jobs on this host: listed as a table and as JSON, or named by a process.

Where a process is no rank of a prepared job, it says what the process is, and what to type.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import outside, prepared, records
from ddp_notebook.jobs.outside import Seen, how_to_see, untold, was_set
from ddp_notebook.jobs.records import Job
from ddp_notebook.jobs.verdict import VERSION
from ddp_notebook.launch.session_folder import is_private
from ddp_notebook.model import Category, Diagnosis, Ranks, counted, format_ranks, name_ranks
from ddp_notebook.rank.prepared import job_folder, processes
from ddp_notebook.rank.prepared.processes import has_torch
from ddp_notebook.views.ansi import plain
from ddp_notebook.views.table import Cell, Column, Row, Table, age_words

# -- named -------------------------------------------------------------------------------


def others(among: Sequence[Job]) -> list[dict[int, Seen]]:
    """Return the running jobs that are none of these: they were not prepared."""
    found = outside.jobs(records.pids(among))
    return [
        ranks for ranks in found if not any(records.known(r.pid, among) for r in ranks.values())
    ]


def job_of(pid: int) -> Job:
    """Return the job of which a process is a rank or the launcher.

    Raises UsageMistake, which says what another process is.
    """
    everything = records.jobs()
    job = records.known(pid, everything)
    if job is None:
        job = next((job for job in everything if pid in job.pids()), None)  # another container's
    if job is not None:
        return job
    # It is no rank of a prepared job. What it is then, and what to type:
    if not job_folder.began(pid):
        parent = job_folder.waited_for_by(pid)
        ended = f"Process {pid} has ended, and process {parent} has not asked yet how."
        gone = ended if parent else f"There is no process {pid} here."
        known = ", ".join(str(job.first.pid) for job in everything if job.alive)
        raise UsageMistake(gone + (f" Prepared jobs: {known}." if known else ""))
    if processes.other_user(pid) is not None:
        raise UsageMistake(f"Process {pid} belongs to another user, and only that user can ask it.")
    if outside.is_torchrun(pid) and processes.children(pid) == ():
        raise UsageMistake(
            f"Process {pid} is torchrun and has started no rank yet: it has just begun, or is "
            "waiting for its other nodes (--nnodes, --rdzv-endpoint). Start torchrun on each of "
            "them with the same address, then ask again."
        )
    if (started := untold(pid)) and not was_set(pid):
        pids = ", ".join(map(str, started[:8]))
        raise UsageMistake(
            f"Process {pid} started processes with torch ({pids}) without RANK in their "
            "environment, as mp.spawn does, so their ranks cannot be seen from outside. "
            f"{HOW_TO_PREPARE} The stack of one now: {how_to_see(started[0])}"
        )
    if not was_set(pid) and not has_torch(pid):
        raise UsageMistake(
            f"Process {pid} has not loaded torch: it is neither a rank nor a launcher. "
            "Your jobs: ddp-notebook jobs"
        )
    how = outside.why_not_prepared(pid) or HOW_TO_PREPARE
    raise UsageMistake(
        f"Process {pid} is not prepared, and cannot be asked. {how} Its stacks, if it "
        f"runs Python and py-spy is installed: {how_to_see(pid)}"
    )


HOW_TO_PREPARE = (
    "Start one with DDP_NOTEBOOK=1 in its environment, as in: DDP_NOTEBOOK=1 torchrun …"
)


def looked_in() -> str:
    """Say where prepared jobs are looked for: one that was told another folder is not seen."""
    # The commonest reason for an empty list: the job was started with another TMPDIR, or the folder
    # can be entered by others, and then no rank writes into it.
    folder = job_folder.root()
    named = f", of {job_folder.FOLDER_VARIABLE}" if job_folder.FOLDER_VARIABLE in os.environ else ""
    if os.path.lexists(folder) and not is_private(folder):
        named += "; no rank is prepared there until it is a folder of yours of mode 0700: others"
        named += " can enter it, or it is theirs"
    return f"looked for in {plain(str(folder))}{named}"


# -- listed ------------------------------------------------------------------------------

_PID = Column("pid", names_row=True, right=True)
_CALL = Column("to look at it", always=True)
_COLUMNS = (
    Column("script", widest=28, cuts=True),
    Column("ranks", widest=20, rank_set=True),
    Column("age"),
    Column("prepared"),
    Column("state", fills=True),
)


@dataclass(frozen=True, slots=True)
class Listed:
    """A job and its state; `stuck` is None while that is unknown."""

    script: str
    world_size: int
    pids: Mapping[int, int]
    """By rank."""
    alive: Ranks
    began_s: float
    """Since 1970."""
    prepared: bool
    stuck: bool | None
    state: str


def listed() -> list[Listed]:
    """Return this user's jobs on this host: those that were prepared, newest first, and others.

    Running, prepared jobs are asked for their state.
    """
    jobs = records.jobs()
    listed = []
    for job in jobs:
        # Each running job is asked, twice where something is wrong, so a list of five jobs that
        # hang takes seconds. It is worth that: which job hangs is what the list is looked at for.
        stuck: bool | None
        if job.alive:
            stuck, state = _running(prepared.why(job).diagnosis)
        elif job.in_another_container:
            stuck, state = None, "runs in another container: ask there"
        else:
            stuck, state = False, "has ended"
        pids = {rank: process.about.pid for rank, process in job.processes.items()}
        script, began_s = job.first.script, job.first.wall_s
        size = job.world_size
        listed.append(Listed(script, size, pids, job.alive, began_s, True, stuck, state))
    for ranks in others(jobs):
        first = ranks[min(ranks)]
        state = f"runs; looked at from outside: ddp-notebook why {first.pid}"
        if outside.was_set(first.pid):
            state = outside.elsewhere(first.pid) or (
                f"has DDP_NOTEBOOK=1, but is not prepared, or not yet: ddp-notebook why {first.pid}"
            )
        size = max(first.world_size, max(ranks) + 1)
        pids = {rank: seen.pid for rank, seen in ranks.items()}
        alive = tuple(ranks)
        listed.append(Listed(first.script, size, pids, alive, first.began_s, False, None, state))
    return listed


def _running(diagnosis: Diagnosis) -> tuple[bool | None, str]:
    """Return whether a job that runs is stuck, and a text for its state."""
    wrong = [finding for finding in diagnosis.findings if not finding.passing]
    for finding in wrong:
        if finding.category is not Category.UNDECIDED:
            who = f": {name_ranks(finding.ranks)}" if finding.ranks else ""
            return bool(finding.waiting), f"runs, {finding.category.value}{who}"
    # Undecided is not "stuck": a program that polls this list should not restart a job for it.
    if wrong:
        who = name_ranks(wrong[0].waiting)
        return None, f"runs, perhaps stuck: {who}" if who else "runs, perhaps stuck"
    late = next((f.ranks for f in diagnosis.findings), ())
    return False, f"runs; the others wait for {name_ranks(late)}" if late else "runs"


def text(jobs: Sequence[Listed]) -> str:
    """Return the table; without prepared jobs, how to have one."""
    return "\n\n".join(filter(None, (_table(jobs).text() if jobs else "", _how_to_have_one(jobs))))


def html(jobs: Sequence[Listed]) -> str:
    """Return the same for a page: a call to copy in each row, and jobs that ended folded away."""
    running = [job for job in jobs if job.alive]
    ended = [job for job in jobs if not job.alive]
    said = _how_to_have_one(jobs)
    over = f"{counted(len(ended), 'job')} ended"
    return "".join(
        [
            _table(running, calls=True).html() if running else "<p>No job of yours runs here.</p>",
            f"<details><summary>{over}</summary>{_table(ended, calls=True).html()}</details>"
            if ended
            else "",
            f"<p>{escape(said, quote=False)}</p>" if said else "",
        ]
    )


def _table(jobs: Sequence[Listed], *, calls: bool = False) -> Table:
    """Return a table of jobs, the running ones first; with `calls` the magic in place of a pid."""
    now_s = time.time()
    rows = []
    for job in sorted(jobs, key=lambda job: not job.alive):
        pid = job.pids[min(job.pids)]
        texts = (
            plain(Path(job.script).name) or "python",
            f"{format_ranks(tuple(job.pids))} of {job.world_size}",
            age_words(now_s - job.began_s),
            "yes" if job.prepared else "no",
            job.state,
        )
        # One click selects the call.
        call = f'<code style="user-select: all">%ddp_attach {pid}</code>'
        first = Cell("", before=call) if calls else Cell(str(pid))
        rows.append(Row([first, *map(Cell, texts)]))
    return Table((_CALL if calls else _PID, *_COLUMNS), rows)


def _how_to_have_one(jobs: Sequence[Listed]) -> str:
    if any(job.prepared or outside.was_set(min(job.pids.values())) for job in jobs):
        return ""
    return f"No job of yours on this host was prepared ({looked_in()}). {HOW_TO_PREPARE}"


def to_json(jobs: Sequence[Listed]) -> dict[str, Any]:
    """Return a JSON object of the form in ``schema_jobs.json``."""
    return {
        "format": "ddp_notebook jobs",
        "version": VERSION,
        "jobs": [
            {
                "script": job.script,
                "world_size": job.world_size,
                "pids": {str(rank): pid for rank, pid in job.pids.items()},
                "alive": list(job.alive),
                "began": job.began_s,
                "prepared": job.prepared,
                "stuck": job.stuck,
                "state": job.state,
            }
            for job in jobs
        ],
    }
