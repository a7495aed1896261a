"""The jobs that can be looked at: a running one, prepared or not, or the files that one left.

Each kind says which ranks it has and what is known of them now: a case and a verdict. How that is
shown, as stacks, as a board or as a run to be saved, is the same for all kinds.
"""

from __future__ import annotations

import contextlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ddp_notebook import files
from ddp_notebook.archive.format import Observed, SavedRun
from ddp_notebook.archive.history import Kept
from ddp_notebook.archive.replay import Replay, is_saved_run
from ddp_notebook.archive.save import saved_run
from ddp_notebook.cluster.questions import ask
from ddp_notebook.diagnosis.progress import doing
from ddp_notebook.errors import UsageMistake, named_file
from ddp_notebook.jobs import find, left, outside, prepared, records
from ddp_notebook.jobs.outside import Outside, Seen
from ddp_notebook.jobs.records import Job
from ddp_notebook.jobs.verdict import Verdict, for_others
from ddp_notebook.model import (
    Activity,
    Board,
    BoardRow,
    Case,
    Diagnosis,
    Doing,
    Frame,
    Local,
    Place,
    RankReport,
    Ranks,
    RankStack,
    RankState,
    Role,
    Snapshot,
    StackTree,
    Status,
    name_ranks,
    parse_ranks,
)
from ddp_notebook.rank import calls
from ddp_notebook.rank.prepared import job_folder
from ddp_notebook.views import stack_tree
from ddp_notebook.views.ansi import plain
from ddp_notebook.views.board_rows import BoardFacts, board_rows


class Target(ABC):
    """A job that is only observed, in its current state.

    All raise UsageMistake where it is no more, and nothing of it is known.
    """

    over = False
    """Nothing of it runs any more."""

    @property
    @abstractmethod
    def name(self) -> str:
        """``job 12345 (train.py)``, ``what a job left in dumps``."""

    @property
    @abstractmethod
    def about(self) -> str:
        """A line on how it is now: its ranks, and whether they run."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """How many ranks it has, as far as is known."""

    @abstractmethod
    def look(self) -> tuple[Case, Verdict]:
        """Return what is known of it now, and what is wrong with it."""

    def why(self) -> Verdict:
        """Return what is wrong with it."""
        return self.look()[1]

    @abstractmethod
    def reports(self) -> Sequence[RankReport]:
        """Return what is known of each rank now, without a verdict, which may take longer."""

    def observed(self) -> Observed:
        """Return how it was looked at, for the file in which that is saved."""
        return Observed(self.name, self.about)

    def where(self, ranks: Ranks | None = None, locals: bool = False) -> StackTree:
        """Return the stacks of `ranks` (all by default), or the lines at which they were last."""
        wanted = (r for r in self.reports() if ranks is None or r.rank in ranks)
        return stack_tree.merge([stack_of(r, self.over) for r in wanted], self.world_size)

    def places(self) -> Mapping[int, tuple[Place, ...]]:
        """Return by rank the user's lines where it is or was, or where it raised an error; the
        outermost first."""
        paths = {report.rank: report.path or report.error.at for report in self.reports()}
        return {rank: path for rank, path in paths.items() if path}

    def board(self) -> Board:
        """Return what is known of each rank, in a row."""
        return self.shown()[0]

    def shown(self) -> tuple[Board, Diagnosis]:
        """Return that, and what is wrong with it, of one look."""
        case, verdict = self.look()
        about = f"{self.name}: {self.about}"
        return board(case, about, verdict.diagnosis, self.over), verdict.diagnosis

    def saved(self) -> SavedRun:
        """Return all that is known now, as a run to be saved, without events."""
        return saved(*self.look(), self.over, self.observed())


class Prepared(Target):
    """A job that was started with DDP_NOTEBOOK=1, known by one process of it.

    That is a rank; or the launcher, and then it is the last attempt of the launcher's.
    """

    def __init__(self, job: Job, pid: int) -> None:
        # torchrun that restarts its ranks starts new processes. A job that was named by torchrun's
        # pid is the newest attempt; one that was named by a rank's stays that attempt. Pids are
        # reused, so each is kept with its start time.
        first = job.first
        own = (key for key in _keys(job) if key[0] == pid)
        self._key = next(own, (first.pid, first.began))  # its number here, of another container's
        self._name = f"job {self._key[0]} ({job.title})"

    @property
    def job(self) -> Job:
        """The job with the processes that it has now. Raises UsageMistake if it left no trace."""
        for job in records.jobs():
            if self._key in _keys(job):
                return job
        raise UsageMistake(
            f"The record of {self.name} is gone: only those of the newest jobs are kept. "
            "List them: %ddp_attach"
        )

    def _asked(self) -> Job:
        """Return the job, if it can be looked at from here. Raises UsageMistake."""
        job = self.job
        if job.in_another_container:
            raise UsageMistake(
                f"{self.name[:1].upper()}{self.name[1:]} runs in another container: its processes "
                f"cannot be asked from here. Type: docker exec CONTAINER ddp-notebook why "
                f"{self._key[0]}"
            )
        return job

    @property
    def over(self) -> bool:  # type: ignore[override]
        """True when none of its ranks runs any more."""
        return not self.job.alive

    @property
    def name(self) -> str:
        """Its pid, as it is where it runs, and its script."""
        return self._name

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

    def look(self) -> tuple[Case, Verdict]:
        """Ask the ranks that run, twice where something is wrong; read what others left."""
        return prepared.judged(self._asked())

    def reports(self) -> Sequence[RankReport]:
        """Ask the ranks that run; read what others left."""
        return prepared.case_of(self._asked()).ranks

    def observed(self) -> Observed:
        """Return how it was looked at."""
        return replace(super().observed(), ranks=tuple(self.job.processes), prepared=True)

    def where(self, ranks: Ranks | None = None, locals: bool = False) -> StackTree:
        """Ask the ranks that run for their stacks; of others, return the last known lines."""
        return stacks_of(self._asked(), ranks, locals)


def _keys(job: Job) -> set[tuple[int, int]]:
    """Return the processes by which a job is known: number, and when it began."""
    abouts = [process.about for process in job.processes.values()]
    return {(a.pid, a.began) for a in abouts} | {(a.parent, a.parent_began) for a in abouts}


class Unprepared(Target):
    """A job that was not prepared; each question is answered by a new look, from outside."""

    def __init__(self, ranks: Mapping[int, Seen], pid: int) -> None:
        self._pid = pid
        self._ranks = ranks

    @property
    def name(self) -> str:
        """Its pid, as it was given, and its script."""
        script = plain(Path(next(iter(self._ranks.values())).script).name)
        return f"job {self._pid} ({script or 'python'})"

    @property
    def about(self) -> str:
        """Its ranks, and how it was started."""
        was_set = any(outside.was_set(seen.pid) for seen in self._ranks.values())
        how = "not prepared, or not yet," if was_set else "started without DDP_NOTEBOOK=1"
        folder = outside.elsewhere(next(iter(self._ranks.values())).pid) if was_set else ""
        seen = f"{name_ranks(self._ranks)} of {self.world_size}, {how} and seen from outside"
        return f"{seen}. {folder}".rstrip(". ")

    @property
    def world_size(self) -> int:
        """As the ranks were told."""
        return max(*self._ranks, *(process.world_size - 1 for process in self._ranks.values())) + 1

    def look(self) -> tuple[Case, Verdict]:
        """Look at it twice: what stacks prove."""
        seen = self._look()
        return seen.case, seen.verdict()

    def reports(self) -> Sequence[RankReport]:
        """Look at it once."""
        return self._look(twice=False).case.ranks

    def observed(self) -> Observed:
        """Return how it was looked at."""
        return replace(super().observed(), ranks=tuple(self._ranks))

    def where(self, ranks: Ranks | None = None, locals: bool = False) -> StackTree:
        """Return the lines of `ranks`; with `locals` the variables of the user's frames."""
        seen = self._look(twice=False)
        stacks = [
            stack_of(report, False, seen.variables(report.rank) if locals else ())
            for report in seen.case.ranks
            if ranks is None or report.rank in ranks
        ]
        return stack_tree.merge(stacks, self.world_size)

    def _look(self, twice: bool = True) -> Outside:
        present = outside.job_of(self._pid, frozenset())
        if present is None:
            raise UsageMistake(f"{self.name} has ended. List the jobs: %ddp_attach")
        self._ranks = present
        return outside.look(present, twice)


class Left(Target):
    """Files that a job left: dumps and logs, or a saved run. They are read once.

    Raises UsageMistake for other files.
    """

    over = True

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._unread: tuple[str, ...] = ()
        if len(paths) == 1 and is_saved_run(paths[0]):
            run = Replay.read(paths[0])
            observed = run.saved.observed
            stood = f" ({plain(observed.basis)})" if observed and observed.basis else ""
            self._about = f"the saved run {run.name}{stood}"
            self._case, self._diagnosed = run.saved.case or Case(()), run.why
        else:
            found = left.gather(paths)
            self._about, self._unread = found.basis, found.unread
            self._case, self._diagnosed = found.case, partial(left.judged, found)

    @property
    def name(self) -> str:
        """The files."""
        more = f" and {len(self._paths) - 1} more" if len(self._paths) > 1 else ""
        return f"what a job left in {self._paths[0]}{more}"

    @property
    def about(self) -> str:
        """The kind of the files."""
        return self._about

    @property
    def world_size(self) -> int:
        """As far as the files tell."""
        return self._case.world_size

    def look(self) -> tuple[Case, Verdict]:
        """Return what is in the files. Raises UsageMistake where they know no rank."""
        if not self._case.ranks:
            raise UsageMistake(f"Nothing is known of any rank in {self.name}.")
        return self._case, self.why()

    def why(self) -> Verdict:
        """Return what was wrong. Raises UsageMistake where a saved run knows no ranks."""
        return for_others(self._diagnosed(), self._about, self._unread)

    def reports(self) -> Sequence[RankReport]:
        """Return what the files tell of each rank."""
        return self._case.ranks

    def where(self, ranks: Ranks | None = None, locals: bool = False) -> StackTree:
        """Return the lines at which ranks were last. Raises UsageMistake for `locals`."""
        if locals:
            raise UsageMistake(
                f"--locals needs ranks that can be asked; this is {self.name}. Type: %ddp_where"
            )
        return super().where(ranks)


# -- as stacks, as a board and as a state ----------------------------------------------------


def stacks_of(job: Job, ranks: Ranks | None = None, locals: bool = False) -> StackTree:
    """Return the stacks of a prepared job's ranks that answer, the last known lines of others.

    `ranks` are all by default; with `locals` there are variables of those that answer.
    """
    wanted = set(range(job.world_size) if ranks is None else ranks)
    sockets = {rank: at for rank, at in prepared.sockets_of(job).items() if rank in wanted}
    answers = ask(sockets, calls.STACK, calls.StackRequest(locals), prepared.ASK_TIMEOUT_S)
    stacks = [
        RankStack(rank, answer.doing, answer.frames)
        for rank, answer in answers.items()
        if isinstance(answer, RankStack)
    ]
    if others := wanted.difference(stack.rank for stack in stacks):
        reports = prepared.case_of(job).ranks
        stacks += (stack_of(r, over=not job.alive) for r in reports if r.rank in others)
    return stack_tree.merge(stacks, job.world_size)


def stack_of(
    report: RankReport, over: bool, variables: Sequence[tuple[Local, ...]] = ()
) -> RankStack:
    """Return a report's lines as a stack: the user's own, as it leaves out the others.

    `over`: the job has ended, so that who says nothing is no more; `variables` are those of
    each line of the report's path.
    """
    activity, operation, text = report.activity, "", report.doing
    path = report.path
    if activity is Activity.FAILED:
        lines = report.error.text.strip().splitlines()[:1]
        text, path = ": ".join((report.error.type, *lines)), report.error.at or path
    elif activity is Activity.WAITING:
        operation, text = report.inside, text.removeprefix(f"{report.inside}: ")
    elif over and activity is Activity.SILENT:
        activity, text = Activity.DEAD, text or "what it did then is not recorded"
    own = variables or ((),) * len(path)
    frames = tuple(
        Frame(at.file, at.line, at.function, at.text, locals=of)
        for at, of in zip(path, own, strict=False)
    )
    return RankStack(report.rank, Doing(activity, operation, text[:300]), frames)


def board(
    case: Case, headline: str, diagnosis: Diagnosis | None = None, over: bool = False
) -> Board:
    """Return what is known of each rank, a row each. `over`: nothing of the job runs any more."""
    shown = snapshot(case, over)
    facts = BoardFacts(
        shown, case.collectives, shown.with_status(Status.RUNNING), diagnosis, case.sources
    )
    gone = {report.rank for report in case.ranks if _has_ended(report)}
    waiting = {report.rank for report in case.ranks if report.activity is Activity.WAITING}

    def word(row: BoardRow) -> str:
        # Also of ranks whose word is a finding's: of a job that is over, and of a rank that has
        # left it, no word may say that something goes on.
        if row.status is Status.RUNNING and (over or gone.issuperset(row.ranks)):
            return Role.ENDED.value
        waits = row.word == Status.RUNNING.value and waiting.issuperset(row.ranks)
        return Role.WAITING.value if waits else row.word

    rows = tuple(replace(row, word=word(row)) for row in board_rows(facts))
    return Board(headline, rows, (), shown)


def _has_ended(report: RankReport) -> bool:
    """True of a rank that has no process any more and left nothing that tells of a failure."""
    return report.activity is Activity.IDLE and not report.initialized


def snapshot(case: Case, over: bool) -> Snapshot:
    """Return what is known of each rank as a session's state."""
    now_ns = time.monotonic_ns()
    ranks = tuple(_state(report, now_ns, over) for report in case.ranks)
    backend = next((r.arguments.backend for r in case.ranks if r.arguments.backend), "")
    ended = "the job has ended" if over else ""
    return Snapshot(ranks, backend, ended=ended, taken_ns=now_ns, external=True)


def _state(report: RankReport, now_ns: int, over: bool) -> RankState:
    state = RankState(report.rank, Status.RUNNING, doing=doing(report), host=report.network.host)
    match report.activity:
        case Activity.FAILED:
            return replace(state, status=Status.FAILED, cause=state.doing)
        case Activity.HELD:
            return replace(state, status=Status.PAUSED, detail=state.doing, heard_ns=now_ns)
        case Activity.DEAD:
            return replace(
                state,
                status=Status.DEAD,
                exit_code=report.end.code,
                last_words=report.end.last_words,
            )
        case _ if _has_ended(report):
            return replace(state, doing="")
        case Activity.SILENT:
            return replace(state, doing=report.doing or state.doing)
        case _:
            return replace(state, heard_ns=0 if over else now_ns)


def saved(case: Case, verdict: Verdict, over: bool, observed: Observed) -> SavedRun:
    """Return what is known, and what was found, as a run to be saved, without events."""
    shown = snapshot(case, over)
    run = saved_run(shown, Kept(shown, (), (), 0, 0), case)
    observed = replace(observed, basis=verdict.basis, unread=verdict.unread)
    return replace(run, diagnosis=verdict.diagnosis, stands=True, observed=observed)


# -- named by the user -----------------------------------------------------------------------

OF_SLURM = "slurm-job="
"""Before the number of a job of Slurm's: its ranks on this host."""


def on_this_host(words: Sequence[str]) -> Target:
    """Return what a user names by a pid or by files; by nothing, the job that runs or began last.

    No other host is asked. Raises UsageMistake.
    """
    if not words:
        return _newest()
    first = words[0]
    # A folder may have a number for its name, as torchrun's attempts and Slurm's jobs do: then it
    # is meant.
    if re.fullmatch("[0-9]+", first) and not files.exists(Path(first)):
        if len(words) > 1:
            raise UsageMistake("Name one pid, or files of one job.")
        if len(first) > 18:  # the kernel has none of so many digits
            raise UsageMistake(f"There is no process {first[:18]}… here.")
        return _of_pid(int(first))
    if first.startswith(OF_SLURM) and (number := first.removeprefix(OF_SLURM)).isdecimal():
        return _of_slurm(number)
    if is_elsewhere(first):
        raise UsageMistake(
            f"{plain(first)}: this is for jobs on this host only. In a shell: ddp-notebook why "
            f"{plain(first)}"
        )
    return Left([named_file(word) for word in words])


ELSEWHERE = re.compile(r"([^\s/:]+):(\d{1,18})", re.ASCII)


def is_elsewhere(word: str) -> bool:
    """True of HOST:PID that is no file here."""
    return bool(ELSEWHERE.fullmatch(word)) and not files.exists(Path(word))


def ranks_of(target: Target, words: str | None) -> Ranks | None:
    """Return the ranks that a user names; None for all. Raises UsageMistake for unknown ones."""
    try:
        return None if words is None else parse_ranks(words, target.world_size)
    except ValueError as error:
        raise UsageMistake(str(error)) from None


def _of_slurm(number: str) -> Target:
    """Return the ranks here of a job of Slurm's, of those that run the ones that began last."""

    def is_its(told: Mapping[str, str] | None) -> bool:
        return (told or {}).get(job_folder.SLURM_JOB) == number

    jobs = [job for job in records.jobs() if is_its(job.first.told)]
    if alive := [job for job in jobs if job.alive]:
        return Prepared(alive[0], alive[0].first.pid)
    for ranks in outside.jobs(records.pids()):
        first = next(iter(ranks.values()))
        if is_its(first.told):
            return Unprepared(ranks, first.pid)
    if jobs:
        return Prepared(jobs[0], jobs[0].first.pid)
    raise UsageMistake(f"Slurm job {number} has no rank with torch on this host.")


def _of_pid(pid: int) -> Target:
    """Return the job of a rank or a launcher, prepared or not. Raises UsageMistake."""
    try:
        return Prepared(find.job_of(pid), pid)
    except UsageMistake as mistake:
        not_prepared = mistake
    if (ranks := outside.job_of(pid, records.pids())) is not None:
        return Unprepared(ranks, pid)
    # mp.spawn tells its children no rank: the process that was named has none, but those that it
    # started may be known by their own records.
    started = {}
    for child in outside.untold(pid):
        with contextlib.suppress(UsageMistake):
            started[child] = _of_pid(child)
    if len(started) > 1:
        pids = ", ".join(map(str, started))
        raise UsageMistake(f"Process {pid} started several jobs. Name one by its pid: {pids}")
    for target in started.values():
        return target
    raise not_prepared


def _newest() -> Target:
    """Return the job that runs, else the one that began last. Raises UsageMistake without any."""
    jobs = records.jobs()
    alive = [job for job in jobs if job.alive]
    if len(alive) > 1:
        pids = ", ".join(f"{job.first.pid} ({job.title})" for job in alive)
        raise UsageMistake(f"Several jobs are running. Name one by its pid: {pids}")
    others = find.others(jobs)
    if len(others) == 1 and not alive:
        first = next(iter(others[0].values()))
        if not jobs or first.began_s > jobs[0].first.wall_s:
            return Unprepared(others[0], first.pid)
    if not jobs:
        raise UsageMistake(
            f"There is no prepared job of yours on this host ({find.looked_in()}). "
            f"{find.HOW_TO_PREPARE}"
        )
    job = (alive or jobs)[0]
    return Prepared(job, job.first.pid)
