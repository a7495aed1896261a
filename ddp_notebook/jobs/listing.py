"""A user's jobs on this host, as a table and as JSON: which run, and which of them are stuck."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddp_notebook.jobs import prepared
from ddp_notebook.jobs.prepared import Job
from ddp_notebook.jobs.verdict import VERSION
from ddp_notebook.model import Category, format_ranks, name_ranks
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
    """A job, and how it is. `stuck` is None where that is not known."""

    job: Job
    stuck: bool | None
    state: str


def listed() -> list[Listed]:
    """This user's prepared jobs on this host, the newest first. Those that run are asked."""
    return [_looked_at(job) for job in prepared.jobs()]


def _looked_at(job: Job) -> Listed:
    if not job.alive:
        return Listed(job, False, "has ended")
    diagnosis = prepared.why(job).diagnosis
    wrong = [finding for finding in diagnosis.findings if not finding.passing]
    for finding in wrong:
        if finding.category is not Category.UNDECIDED:
            who = f": {name_ranks(finding.ranks)}" if finding.ranks else ""
            return Listed(job, bool(finding.waiting), f"runs, {finding.category.value}{who}")
    if wrong:
        who = name_ranks(wrong[0].waiting)
        return Listed(job, None, f"runs, perhaps stuck: {who}" if who else "runs, perhaps stuck")
    late = next((f.ranks for f in diagnosis.findings), ())
    return Listed(job, False, f"runs; the others wait for {name_ranks(late)}" if late else "runs")


def text(jobs: Sequence[Listed]) -> str:
    """The table; without jobs, how to have one."""
    if not jobs:
        return f"No job of yours on this host was prepared. {prepared.HOW_TO_PREPARE}"
    now_s = time.time()
    return Table(_COLUMNS, [_row(each, now_s) for each in jobs]).text()


def _row(listed: Listed, now_s: float) -> Row:
    job = listed.job
    texts = (
        str(job.first.pid),
        job.title,
        f"{format_ranks(tuple(job.processes))} of {job.world_size}",
        _age(now_s - job.first.wall_s),
        "yes",
        listed.state,
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
                "script": each.job.first.script,
                "world_size": each.job.world_size,
                "pids": {str(r): p.about.pid for r, p in each.job.processes.items()},
                "alive": list(each.job.alive),
                "began": each.job.first.wall_s,
                "prepared": True,
                "stuck": each.stuck,
                "state": each.state,
            }
            for each in jobs
        ],
    }
