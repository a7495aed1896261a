"""A user's jobs on this host, as a table and as JSON: which run, and which of them are stuck."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_notebook.jobs import prepared, unprepared
from ddp_notebook.jobs.prepared import Job
from ddp_notebook.jobs.unprepared import Seen
from ddp_notebook.jobs.verdict import VERSION
from ddp_notebook.model import Category, Ranks, format_ranks, name_ranks
from ddp_notebook.views.ansi import plain
from ddp_notebook.views.table import Cell, Column, Row, Table

_COLUMNS = (
    Column("pid", names_row=True, right=True),
    Column("script", widest=28, cuts=True),
    Column("ranks", widest=20, rank_set=True),
    Column("age"),
    Column("prepared"),
    Column("state", fills=True),
)


@dataclass(frozen=True, slots=True)
class Listed:
    """A job and its state. `stuck` is None if unknown."""

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
    """This user's jobs on this host: those that were prepared, the newest first, and others.

    Running, prepared jobs are asked for their state.
    """
    jobs = prepared.jobs()
    return [*map(_prepared, jobs), *map(_unprepared, prepared.others(jobs))]


def _prepared(job: Job) -> Listed:
    stuck, state = _state(job)
    pids = {rank: process.about.pid for rank, process in job.processes.items()}
    first = job.first
    return Listed(first.script, job.world_size, pids, job.alive, first.wall_s, True, stuck, state)


def _unprepared(ranks: Mapping[int, Seen]) -> Listed:
    first = ranks[min(ranks)]
    pids = {rank: seen.pid for rank, seen in ranks.items()}
    state = f"runs; looked at from outside: ddp-notebook why {first.pid}"
    if unprepared.was_set(first.pid):
        state = f"has DDP_NOTEBOOK=1, but is not prepared, or not yet: ddp-notebook why {first.pid}"
        state = unprepared.elsewhere(first.pid) or state
    size = max(first.world_size, max(ranks) + 1)
    return Listed(first.script, size, pids, tuple(ranks), first.began_s, False, None, state)


def _state(job: Job) -> tuple[bool | None, str]:
    """Whether it is stuck, and a text for its state."""
    if not job.alive:
        return _state_of_ended(job)
    diagnosis = prepared.why(job).diagnosis
    wrong = [finding for finding in diagnosis.findings if not finding.passing]
    for finding in wrong:
        if finding.category is not Category.UNDECIDED:
            who = f": {name_ranks(finding.ranks)}" if finding.ranks else ""
            return bool(finding.waiting), f"runs, {finding.category.value}{who}"
    if wrong:
        who = name_ranks(wrong[0].waiting)
        return None, f"runs, perhaps stuck: {who}" if who else "runs, perhaps stuck"
    late = next((f.ranks for f in diagnosis.findings), ())
    return False, f"runs; the others wait for {name_ranks(late)}" if late else "runs"


def _state_of_ended(job: Job) -> tuple[bool | None, str]:
    if job.in_another_container:
        return None, "runs in another container: ask there"
    return False, "has ended"


def text(jobs: Sequence[Listed]) -> str:
    """The table; without prepared jobs, how to have one."""
    parts = []
    if jobs:
        now_s = time.time()
        parts.append(Table(_COLUMNS, [_row(job, now_s) for job in jobs]).text())
    if not any(job.prepared or unprepared.was_set(min(job.pids.values())) for job in jobs):
        where = prepared.looked_in()
        parts.append(
            f"No job of yours on this host was prepared ({where}). {prepared.HOW_TO_PREPARE}"
        )
    return "\n\n".join(parts)


def _row(job: Listed, now_s: float) -> Row:
    texts = (
        str(job.pids[min(job.pids)]),
        plain(Path(job.script).name) or "python",
        f"{format_ranks(tuple(job.pids))} of {job.world_size}",
        _age(now_s - job.began_s),
        "yes" if job.prepared else "no",
        job.state,
    )
    return Row([Cell(text) for text in texts])


def _age(age_s: float) -> str:
    for unit, worth in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * worth:
            return f"{age_s / worth:.0f} {unit}"
    return f"{max(0.0, age_s):.0f} s"


def to_json(jobs: Sequence[Listed]) -> dict[str, Any]:
    """As a JSON object, of the form in ``schema_jobs.json``."""
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
