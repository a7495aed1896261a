"""`ddp-notebook jobs | why | where`: arguments, texts, JSON, exit codes."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import dead, prepared
from ddp_notebook.jobs.prepared import Job
from ddp_notebook.jobs.verdict import VERSION, Verdict
from ddp_notebook.model import Place, codec, format_ranks
from ddp_notebook.views import findings as view

_TARGET = (
    "a pid of a job that was started with DDP_NOTEBOOK=1, a rank's or the launcher's; or the "
    "folder or files that a job left: dumps of torch's flight recorder, torchrun's log folder, "
    "logs, a run written by %%ddp_save. Without one: the job that runs, or the last one"
)
_CODES = "Exit codes: 0 no problem, 1 a finding, 2 undecided, 3 wrong usage."


def add(commands: Any) -> None:
    """Add the commands to a parser's."""
    for name, about, run in (
        ("jobs", "list your jobs on this host that were started with DDP_NOTEBOOK=1", _jobs),
        ("why", "say what is wrong with a job, alive or ended", _why),
        ("where", "say where each rank of a job is in its code, or was", _where),
    ):
        command = commands.add_parser(
            name, help=about, description=f"{about.capitalize()}. {_CODES}", allow_abbrev=False
        )
        if run is not _jobs:
            command.add_argument("target", nargs="*", help=_TARGET)
        command.add_argument("--json", action="store_true", help="print it as JSON")
        command.set_defaults(run=run)


def _jobs(args: argparse.Namespace) -> int:
    jobs = prepared.jobs()
    _print(_jobs_json(jobs) if args.json else _jobs_text(jobs))
    return 0


def _why(args: argparse.Namespace) -> int:
    target = _target(args.target)
    verdict = prepared.why(target) if isinstance(target, Job) else dead.why(target)
    _print(verdict.to_json() if args.json else _as_text(verdict))
    return verdict.outcome.value


def _where(args: argparse.Namespace) -> int:
    target = _target(args.target)
    paths = prepared.where(target) if isinstance(target, Job) else dead.where(target)
    _print(_places_json(paths) if args.json else _places_text(paths))
    return 0


def _target(targets: Sequence[str]) -> Job | list[Path]:
    """The job that a pid names, or the files. Raises UsageMistake."""
    if not targets:
        return prepared.newest()
    first = targets[0]
    if first.isascii() and first.isdigit() and not Path(first).exists():
        if len(targets) > 1:
            raise UsageMistake("Name one pid, or files of one job.")
        return prepared.job_of(int(first[:10]))
    return [Path(target).expanduser() for target in targets]


def _jobs_text(jobs: Sequence[Job]) -> str:
    if not jobs:
        return f"No job of yours on this host was prepared. {prepared.HOW_TO_PREPARE}"
    now_s = time.time()
    return "\n".join(
        f"{job.first.pid:>8}  {job.title:24} ranks {format_ranks(tuple(job.processes))} of "
        f"{job.world_size}, begun {_age(now_s - job.first.wall_s)} ago, "
        + ("runs" if job.alive else "has ended")
        for job in jobs
    )


def _age(age_s: float) -> str:
    for unit, worth in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * worth:
            return f"{age_s / worth:.0f} {unit}"
    return f"{age_s:.0f} s"


def _jobs_json(jobs: Sequence[Job]) -> dict[str, Any]:
    return {
        "format": "ddp_notebook jobs",
        "version": VERSION,
        "jobs": [
            {
                "script": job.first.script,
                "world_size": job.world_size,
                "pids": {str(r): process.about.pid for r, process in job.processes.items()},
                "alive": list(job.alive),
                "began": job.first.wall_s,
            }
            for job in jobs
        ],
    }


def _as_text(verdict: Verdict) -> str:
    lines = [view.text(verdict.diagnosis), "", f"This stands on: {verdict.basis}."]
    return "\n".join([*lines, *(f"Note: {note}" for note in verdict.unread)])


def _places_text(paths: Mapping[int, tuple[Place, ...]]) -> str:
    if not paths:
        return "No line of the user's code is known of any rank."
    return "\n".join(
        f"rank {rank}: {' → '.join(map(str, path))}"
        + (f": {path[-1].text}" if path[-1].text else "")
        for rank, path in paths.items()
    )


def _places_json(paths: Mapping[int, tuple[Place, ...]]) -> dict[str, Any]:
    return {
        "format": "ddp_notebook places",
        "version": VERSION,
        "ranks": {str(rank): codec.encode(path) for rank, path in paths.items()},
    }


def _print(what: str | dict[str, Any]) -> None:
    print(what if isinstance(what, str) else json.dumps(what, indent=2))
