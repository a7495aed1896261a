"""What can be inspected: a running job, prepared or not, or the files that a job left."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ddp_notebook import files
from ddp_notebook.archive.format import Observed, SavedRun
from ddp_notebook.errors import UsageMistake, named_file
from ddp_notebook.jobs import dead, hosts, picture, prepared, stacks, unprepared
from ddp_notebook.jobs.hosts.target import Elsewhere
from ddp_notebook.jobs.outside.target import Unprepared as Unprepared  # for what asks which it is
from ddp_notebook.jobs.prepared import Job
from ddp_notebook.jobs.verdict import Verdict
from ddp_notebook.model import (
    Board,
    Case,
    Place,
    RankReport,
    Ranks,
    StackTree,
    name_ranks,
    parse_ranks,
)
from ddp_notebook.rank.prepared import job_folder
from ddp_notebook.views.ansi import plain


class Target(Protocol):
    """A job that is only observed, in its current state."""

    @property
    def name(self) -> str:
        """``job 12345 (train.py)``, ``what a job left in dumps``."""

    @property
    def about(self) -> str:
        """A line on how it is now: its ranks, and whether they run."""

    @property
    def world_size(self) -> int:
        """How many ranks it has, as far as is known."""

    def why(self) -> Verdict:
        """What is wrong with it."""

    def where(self, ranks: Ranks | None = None, locals: bool = False) -> StackTree:
        """The stacks of `ranks` (all by default), or the lines at which they were last."""

    def places(self) -> Mapping[int, tuple[Place, ...]]:
        """By rank, the user's lines where it is or was, the outermost first."""

    def board(self) -> Board:
        """What is known of each rank, in a row. Raises UsageMistake where nothing is."""

    def saved(self) -> SavedRun:
        """All that is known now, as a run to be saved. Raises UsageMistake where nothing is."""


class Prepared:
    """A job that was started with DDP_NOTEBOOK=1, known by one process of it.

    That is a rank; or the launcher, and then it is the last attempt of the launcher's.
    """

    def __init__(self, job: Job, pid: int) -> None:
        first = job.first
        own = (key for key in _keys(job) if key[0] == pid)
        self._key = next(own, (first.pid, first.began))  # its number here, of another container's
        self.pid = self._key[0]
        """The process by which it is known."""
        self._title = job.title

    @property
    def job(self) -> Job:
        """The job with the processes that it has now. Raises UsageMistake if it left no trace."""
        for job in prepared.jobs():
            if self._key in _keys(job):
                return job
        raise UsageMistake(
            f"The record of {self.name} is no more: only those of the newest jobs are kept. "
            "What there is: %ddp_attach"
        )

    @property
    def name(self) -> str:
        """Its pid, as it is where it runs, and its script."""
        return f"job {self.pid} ({self._title})"

    @property
    def _asked(self) -> Job:
        """The job, if it can be looked at from here. Raises UsageMistake."""
        job = self.job
        if job.in_another_container:
            raise UsageMistake(
                f"{self.name[:1].upper()}{self.name[1:]} runs in another container: its processes "
                f"cannot be asked from here. Type there, as by docker exec CONTAINER: "
                f"ddp-notebook why {self.pid}"
            )
        return job

    @property
    def about(self) -> str:
        """Its ranks, and which of them run."""
        job = self.job
        if job.in_another_container:
            return f"{job.ranks_words}; it runs in another container: ask there"
        if not job.alive:
            return f"{job.ranks_words}; it has ended"
        if len(job.alive) == len(job.processes):
            return f"{job.ranks_words}; it runs"
        return f"{job.ranks_words}; of these, {name_ranks(job.alive)} still run"

    @property
    def world_size(self) -> int:
        """As the ranks were told."""
        return self.job.world_size

    def why(self) -> Verdict:
        """What is wrong with it."""
        return prepared.why(self._asked)

    def where(self, ranks: Ranks | None = None, locals: bool = False) -> StackTree:
        """Asks the ranks that run; of others, what they left."""
        return stacks.of_job(self._asked, ranks, locals)

    def places(self) -> Mapping[int, tuple[Place, ...]]:
        """The lines of `where`."""
        return prepared.where(self._asked)

    def board(self) -> Board:
        """Asks the ranks that run."""
        job = self._asked
        diagnosis = prepared.why(job).diagnosis
        headline = f"{self.name}: {self.about}"
        return picture.board(prepared.case_of(job), headline, diagnosis, over=not job.alive)

    def saved(self) -> SavedRun:
        """Asks the ranks that run."""
        job = self._asked
        found = prepared.why(job)
        observed = Observed(self.name, self.about, ranks=tuple(job.processes), prepared=True)
        return picture.saved(prepared.case_of(job), found, not job.alive, observed)


def _keys(job: Job) -> set[tuple[int, int]]:
    """The processes by which a job is known: number, and when it began."""
    abouts = [process.about for process in job.processes.values()]
    return {(a.pid, a.began) for a in abouts} | {(a.parent, a.parent_began) for a in abouts}


class Left:
    """What a job left in files. They are read once. Raises UsageMistake where they are none."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = dead.read(paths)
        self._paths = paths

    @property
    def name(self) -> str:
        """The files."""
        more = f" and {len(self._paths) - 1} more" if len(self._paths) > 1 else ""
        return f"what a job left in {self._paths[0]}{more}"

    @property
    def about(self) -> str:
        """What the files are."""
        return dead.basis(self._files)

    @property
    def world_size(self) -> int:
        """As far as the files tell."""
        return len(self._reports)

    def why(self) -> Verdict:
        """What was wrong with it."""
        return dead.verdict(self._files)

    def where(self, ranks: Ranks | None = None, locals: bool = False) -> StackTree:
        """The lines at which ranks were last. Raises UsageMistake for `locals`: files have none."""
        if locals:
            raise UsageMistake(
                f"--locals needs ranks that can be asked; this is {self.name}. Type: %ddp_where"
            )
        return stacks.of_reports(self._reports, ranks)

    def places(self) -> Mapping[int, tuple[Place, ...]]:
        """The lines of `where`."""
        return {report.rank: report.path for report in self._reports if report.path}

    def board(self) -> Board:
        """As it was when it was written."""
        headline = f"{self.name}: {self.about}"
        return picture.board(self._case(), headline, self.why().diagnosis, over=True)

    def saved(self) -> SavedRun:
        """All that the files told."""
        observed = Observed(self.name, self.about)
        return picture.saved(self._case(), self.why(), True, observed)

    @property
    def _reports(self) -> tuple[RankReport, ...]:
        case = dead.case(self._files)
        return case.ranks if case is not None else ()

    def _case(self) -> Case:
        case = dead.case(self._files)
        if case is None or not case.ranks:
            raise UsageMistake(f"Nothing is known of any rank in {self.name}.")
        return case


def named(words: Sequence[str], slurm: str | None = None) -> Target:
    """What a user names by a pid, or by files; by nothing, the job that runs, or began last.

    `slurm` is the number of a job of Slurm's, with no words beside it. Raises UsageMistake.
    """
    if slurm is not None:
        if words:
            raise UsageMistake("Give --slurm or a job, not both.")
        number, nodes = hosts.of_slurm(slurm)
        return Elsewhere([(node, f"{_OF_SLURM}{number}") for node in nodes])
    if words and _is_elsewhere(words[0]):
        return _elsewhere(words)
    return on_this_host(words)


def on_this_host(words: Sequence[str]) -> Target:
    """The same, of this host alone: no other one is asked. Raises UsageMistake."""
    if not words:
        return _newest()
    first = words[0]
    if first.isascii() and first.isdigit() and not files.exists(Path(first)):
        if len(words) > 1:
            raise UsageMistake("Name one pid, or files of one job.")
        if len(first) > _LONGEST_PID:
            raise UsageMistake(f"There is no process {first[:_LONGEST_PID]}… here.")
        return _of_pid(int(first))
    if first.startswith(_OF_SLURM) and (number := first.removeprefix(_OF_SLURM)).isdecimal():
        return _of_slurm(number)
    if _is_elsewhere(first):
        raise UsageMistake(
            f"{plain(first)}: this is for jobs on this host only. In a shell: ddp-notebook why "
            f"{plain(first)}"
        )
    return Left([named_file(word) for word in words])


def _is_elsewhere(word: str) -> bool:
    return bool(_ELSEWHERE.fullmatch(word)) and not files.exists(Path(word))


def ranks_of(target: Target, words: str | None) -> Ranks | None:
    """The ranks that a user names; None for all. Raises UsageMistake for those it does not have."""
    try:
        return None if words is None else parse_ranks(words, target.world_size)
    except ValueError as error:
        raise UsageMistake(str(error)) from None


def _elsewhere(words: Sequence[str]) -> Target:
    """A job on other hosts, each named with a pid there. Raises UsageMistake."""
    named_there = [_ELSEWHERE.fullmatch(word) for word in words]
    pairs = [(match[1], match[2]) for match in named_there if match]
    if len(pairs) < len(words) or len({host for host, _ in pairs}) < len(pairs):
        raise UsageMistake("Name a job on other hosts by one HOST:PID for each of them.")
    return Elsewhere([(hosts.by_ssh(host), pid) for host, pid in pairs])


def _of_slurm(number: str) -> Target:
    """The ranks on this host of a job of Slurm's, of those that run the ones that began last."""

    def is_its(told: Mapping[str, str] | None) -> bool:
        return (told or {}).get(job_folder.SLURM_JOB) == number

    jobs = [job for job in prepared.jobs() if is_its(job.first.told)]
    if alive := [job for job in jobs if job.alive]:
        return Prepared(alive[0], alive[0].first.pid)
    for ranks in unprepared.jobs(prepared.pids()):
        first = next(iter(ranks.values()))
        if is_its(first.told):
            return Unprepared(ranks, first.pid)
    if jobs:
        return Prepared(jobs[0], jobs[0].first.pid)
    raise UsageMistake(f"Job {number} of Slurm has no rank with torch here.")


def _of_pid(pid: int) -> Target:
    try:
        return Prepared(prepared.job_of(pid), pid)
    except UsageMistake:
        if (found := _of_others(pid)) is not None:
            return found
        raise


def _of_others(pid: int) -> Target | None:
    """The job of ranks that were not prepared, or the one whose launcher `pid` has started."""
    ranks = unprepared.job_of(pid, prepared.pids())
    if ranks is not None:
        return Unprepared(ranks, pid)
    started = {}
    for child in unprepared.untold(pid):
        with contextlib.suppress(UsageMistake):
            started[child] = _of_pid(child)
    if len(started) > 1:
        pids = ", ".join(map(str, started))
        raise UsageMistake(f"Process {pid} started several jobs: name one by its pid: {pids}")
    return next(iter(started.values()), None)


def _newest() -> Target:
    jobs = prepared.jobs()
    others = prepared.others(jobs)
    if len(others) == 1 and not any(job.alive for job in jobs):
        first = next(iter(others[0].values()))
        if not jobs or first.began_s > jobs[0].first.wall_s:
            return Unprepared(others[0], first.pid)
    job = prepared.newest()
    return Prepared(job, job.first.pid)


_LONGEST_PID = 18
_ELSEWHERE = re.compile(r"([^\s/:]+):(\d{1,18})", re.ASCII)
_OF_SLURM = "slurm-job="
"""Before the number of a job of Slurm's: its ranks on this host."""
