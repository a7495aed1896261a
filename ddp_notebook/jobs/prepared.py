"""Finds, queries and diagnoses jobs whose ranks were prepared (DDP_NOTEBOOK=1), running or ended.

Read-only: ranks are asked for their state, and their records are read. Nothing is sent that could
change what they do; that is `acting/`'s.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ddp_notebook import files
from ddp_notebook.cluster.questions import ask
from ddp_notebook.diagnosis import diagnose_run, diagnose_training, failures
from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import unprepared
from ddp_notebook.jobs.outside import system
from ddp_notebook.jobs.records import CRASHES, DAMAGED, ORPHANED, Process
from ddp_notebook.jobs.unprepared import elsewhere, how_to_see, stopped, untold, was_set
from ddp_notebook.jobs.verdict import AT_REST, Verdict, for_others, own_errors
from ddp_notebook.launch.session_folder import is_private
from ddp_notebook.model import (
    Activity,
    Case,
    Category,
    Collective,
    Collectives,
    Diagnosis,
    Finding,
    Phase,
    Place,
    RankReport,
    Ranks,
    codec,
    collective_log,
    name_ranks,
    verb,
)
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import CannotAnswer, answered
from ddp_notebook.rank.prepared import job_folder, processes
from ddp_notebook.rank.prepared.job_folder import About
from ddp_notebook.rank.prepared.processes import has_torch
from ddp_notebook.views.ansi import plain

READ_LAST = 2000
"""Records of each rank that a diagnosis looks at."""
_ASK_TIMEOUT_S = 2.0
_AGAIN_S = 0.4
"""Between two checks of a running job: a finding must hold in both."""


@dataclass(frozen=True)
class Job:
    """The prepared ranks of one job on this host, by rank."""

    processes: Mapping[int, Process]

    @property
    def alive(self) -> tuple[int, ...]:
        """The ranks whose processes run."""
        return tuple(r for r, process in self.processes.items() if process.about.alive)

    @property
    def first(self) -> About:
        """What the lowest rank says of itself."""
        return self.processes[min(self.processes)].about

    @property
    def world_size(self) -> int:
        """How many ranks there should be, as the ranks were told; at least those that are there."""
        sizes = [process.about.world_size or 0 for process in self.processes.values()]
        size = max(set(sizes), key=sizes.count)
        return min(max(size, max(self.processes) + 1), _MOST_RANKS)

    @property
    def absent(self) -> Ranks:
        """The ranks of which no process was prepared on this host."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.processes)

    @property
    def in_another_container(self) -> bool:
        """Whether it runs where pids mean other processes: it cannot be asked from here."""
        known = self.processes.values()
        return any(job_folder.in_another_container(each.about, each.folder) for each in known)

    @property
    def title(self) -> str:
        """Its script."""
        return plain(Path(self.first.script).name) or "python"

    @property
    def ranks_words(self) -> str:
        """``ranks 0-3 of 4``: those that are on this host, and how many there should be."""
        return f"{name_ranks(self.processes)} of {self.world_size}"


_MOST_RANKS = 4096


def jobs(folder: Path | None = None) -> list[Job]:
    """The prepared jobs in `folder`, by default this user's on this host; the newest first."""
    known = job_folder.processes(folder)
    folders = {(about.pid, about.began): folder for about, folder in known}
    found = job_folder.by_job(About(**codec.readable(asdict(told))) for told, _ in known)
    return [
        Job({rank: Process(of[rank], folders[of[rank].pid, of[rank].began]) for rank in sorted(of)})
        for of in reversed(found)
    ]


def pids(among: Sequence[Job] | None = None) -> frozenset[int]:
    """The processes of these jobs (None: this user's prepared ones), those that ended as well."""
    here = job_folder.namespace()
    known_jobs = jobs() if among is None else among
    abouts = (process.about for job in known_jobs for process in job.processes.values())
    return frozenset(about.pid for about in abouts if about.pids == here)


def others(among: Sequence[Job]) -> list[dict[int, unprepared.Seen]]:
    """The jobs that run and are none of these: they were not prepared."""
    found = unprepared.jobs(pids(among))
    return [ranks for ranks in found if not any(known(r.pid, among) for r in ranks.values())]


def job_of(pid: int) -> Job:
    """The job of which a process is a rank, or the launcher. Raises UsageMistake."""
    everything = jobs()
    job = known(pid, everything)
    if job is None:
        job = next((job for job in everything if pid in _pids(job)), None)  # another container's
    if job is None:
        raise UsageMistake(_not_prepared(pid, everything))
    return job


def known(pid: int, among: Sequence[Job]) -> Job | None:
    """The job of a process, which may run in another container; None where it has no record."""
    names = [(pid, job_folder.namespace())]
    with contextlib.suppress(OSError):
        names.append(processes.in_its_container(pid))
    found = (job for job in among for own, where in names if own in _pids(job, where))
    return next(found, None)


def _pids(job: Job, namespace: str | None = None) -> set[int]:
    """Its ranks and its launcher, by their numbers in `namespace`, by default in their own."""
    abouts = [process.about for process in job.processes.values()]
    abouts = [about for about in abouts if namespace in (None, about.pids)]
    return {about.pid for about in abouts} | {about.parent for about in abouts}


def newest() -> Job:
    """The job that runs, else the newest that ran. Raises UsageMistake where there is none."""
    everything = jobs()
    alive = [job for job in everything if job.alive]
    if len(alive) > 1:
        pids = ", ".join(f"{job.first.pid} ({job.title})" for job in alive)
        raise UsageMistake(f"Several jobs run: name one by its pid: {pids}")
    if not everything:
        raise UsageMistake(
            f"There is no prepared job of yours on this host ({looked_in()}). {HOW_TO_PREPARE}"
        )
    return (alive or everything)[0]


HOW_TO_PREPARE = (
    "Start one with DDP_NOTEBOOK=1 in its environment, as in: DDP_NOTEBOOK=1 torchrun …"
)


def looked_in() -> str:
    """Where prepared jobs are looked for: one that was told another folder is not seen."""
    folder = job_folder.root()
    named = f", of {job_folder.FOLDER_VARIABLE}" if job_folder.FOLDER_VARIABLE in os.environ else ""
    if os.path.lexists(folder) and not is_private(folder):
        named += "; no rank is prepared there until it is a folder of yours of mode 0700: others"
        named += " can enter it, or it is theirs"
    return f"looked for in {plain(str(folder))}{named}"


def _gone(pid: int, everything: Sequence[Job]) -> str:
    known = ", ".join(str(job.first.pid) for job in everything if job.alive)
    parent = job_folder.waited_for_by(pid)
    ended = f"Process {pid} has ended, and process {parent} has not asked yet how."
    gone = ended if parent else f"There is no process {pid} here."
    return gone + (f" Prepared jobs: {known}." if known else "")


def _not_prepared(pid: int, everything: Sequence[Job]) -> str:
    if not job_folder.began(pid):
        return _gone(pid, everything)
    if processes.other_user(pid) is not None:
        return f"Process {pid} is another user's: only that user can ask it."
    if told := _of_a_launcher(pid):
        return told
    if not was_set(pid) and not has_torch(pid):
        return (
            f"Process {pid} has not loaded torch, and is neither a rank nor the launcher of one. "
            "Your jobs: ddp-notebook jobs"
        )
    how = (elsewhere(pid) or _WAS_SET) if was_set(pid) else HOW_TO_PREPARE
    return (
        f"Process {pid} is not prepared, and cannot be asked. {how} Its stacks, if it "
        f"runs Python and py-spy is installed: {how_to_see(pid)}"
    )


def _of_a_launcher(pid: int) -> str:
    """What a process that starts ranks waits for, or has started; empty of another one."""
    if system.is_torchrun(pid) and processes.children(pid) == ():
        return (
            f"Process {pid} is torchrun, and has started no rank yet: it has just begun, or waits "
            "for its other nodes (--nnodes, --rdzv-endpoint). Then start torchrun on each of them, "
            "with the same address; and ask again."
        )
    if (started := untold(pid)) and not was_set(pid):
        pids = ", ".join(map(str, started[:8]))
        return (
            f"Process {pid} started processes with torch ({pids}) and told them no RANK when they "
            "began, as mp.spawn does: which rank each one is cannot be seen from outside. "
            f"{HOW_TO_PREPARE} The stack of one now: {how_to_see(started[0])}"
        )
    return ""


_WAS_SET = (
    "It has DDP_NOTEBOOK=1 in its environment: perhaps it has not yet imported torch; then ask "
    "again. Or torch did not call this package: it is older than 2.5, "
    "TORCH_DEVICE_BACKEND_AUTOLOAD is 0, or its Python has no ddp_notebook installed. Then start "
    "it so: torchrun … -m ddp_notebook.run train.py"
)


# -- asked and judged ------------------------------------------------------------------------


def why(job: Job) -> Verdict:
    """What is wrong with a job. Of one that runs, what is so in two looks at it."""
    alive = job.alive
    before = case = case_of(job)
    diagnosis = _diagnosed(job, case)
    if job.alive and diagnosis.findings:
        time.sleep(_AGAIN_S)
        case = case_of(job)
        diagnosis = _with_rest(in_both(diagnosis, _diagnosed(job, case)), before, case)
    if job.alive != alive:  # who ended meanwhile may have written how
        return why(job)
    return for_others(diagnosis, _basis(job, case), _elsewhere(job))


def in_both(first: Diagnosis, second: Diagnosis) -> Diagnosis:
    """The second of two looks, with those findings alone that the first one had as well."""
    same = {(finding.category, finding.ranks) for finding in first.findings}
    both = tuple(f for f in second.findings if (f.category, f.ranks) in same)
    changed = "" if both or not second.wrong else _CHANGES
    return replace(second, findings=both, unsure=second.unsure or changed)


def _with_rest(diagnosis: Diagnosis, before: Case, now: Case) -> Diagnosis:
    """With which of the ranks that others wait for did nothing at all between two looks."""
    pairs = zip(before.ranks, now.ranks, strict=True)
    still = {b.rank for a, b in pairs if b.main_cpu_s and b.main_cpu_s - a.main_cpu_s < _A_TICK_S}
    findings = []
    for finding in diagnosis.findings:
        ranks = tuple(rank for rank in finding.ranks if rank in still)
        if finding.passing and ranks:
            fact = f"{name_ranks(ranks)} used no CPU time for the last {_AGAIN_S:g} s: {AT_REST}"
            finding = replace(finding, evidence=(*finding.evidence, fact))
        findings.append(finding)
    return replace(diagnosis, findings=tuple(findings))


_A_TICK_S = 0.01
"""The system counts CPU time in ticks."""
_CHANGES = "Two looks at it, shortly one after the other, found different things: ask again."


def where(job: Job) -> dict[int, tuple[Place, ...]]:
    """Where each rank is in the user's code, the outermost line first, or was last."""
    paths = {report.rank: report.path or report.error_at for report in case_of(job).ranks}
    return {rank: path for rank, path in paths.items() if path}


def case_of(job: Job) -> Case:
    """All that is known of a job now."""
    answers = ask(sockets_of(job), calls.REPORT, calls.Nothing(), _ASK_TIMEOUT_S)
    first, alive = job.first, bool(job.alive)
    halted = stopped_early(job)
    reports = tuple(
        _stopped(rank, halted[rank])
        if rank in halted
        else _report(rank, job.processes.get(rank), answers.get(rank), alive)
        for rank in range(job.world_size)
    )
    return Case(
        _with_splits(job, reports if alive else _ended_by_others(reports)),
        dict(first.told or {}),
        None if first.agents_store else 0,
        collectives=collectives_of(job),
        sources=files.sources(Path(first.script), first.wall_s),
    )


def _with_splits(job: Job, reports: tuple[RankReport, ...]) -> tuple[RankReport, ...]:
    """`reports` with what each rank brought to the all_to_all to which the last one came.

    gloo may end a process in an all_to_all which the others have left.
    """
    noted = {rank: process.splits for rank, process in job.processes.items()}
    latest = [splits[-1] for splits in noted.values() if splits]
    if not latest:
        return reports
    last = min(latest, key=lambda each: each.slot)
    meets = {
        rank: split
        for rank, splits in noted.items()
        for split in splits
        if (split.group, split.slot) == (last.group, last.slot)
    }
    return tuple(replace(e, splits=meets[e.rank]) if e.rank in meets else e for e in reports)


def stopped_early(job: Job) -> dict[int, int]:
    """The processes of ranks of a running job that were stopped before they were prepared."""
    return stopped(job.first.parent, job.absent, pids()) if job.alive and job.absent else {}


def sockets_of(job: Job) -> dict[int, Path]:
    """Where ranks can be asked: those that run, without the ones that were stopped."""
    running = {rank: job.processes[rank] for rank in job.alive}
    return {r: p.folder / "ask" for r, p in running.items() if _state(p.about.pid) != _STOPPED}


def _report(
    rank: int,
    process: Process | None,
    answer: RankReport | CannotAnswer | None,
    others_run: bool,
) -> RankReport:
    """A rank's answer; without one, what it wrote."""
    if process is None:
        return RankReport(rank, doing="no process of it was prepared on this host")
    if isinstance(answer, RankReport):
        return replace(answer, rank=rank)
    if process.about.alive:
        pid = process.about.pid
        why_not = f": {answer.why}" if isinstance(answer, CannotAnswer) else _of_another_user(pid)
        if (state := _state(pid)) == _STOPPED:
            return _stopped(rank, pid)
        return RankReport(rank, doing=f"process {pid} runs{why_not}", process=state, pid=pid)
    return process.last_report(rank, others_run)


def _of_another_user(pid: int) -> str:
    """That a process has become another user's, whom alone it answers; empty if it has not."""
    user = processes.other_user(pid)
    return "" if user is None else f" as user {user}, and answers no other user"


def _stopped(rank: int, pid: int) -> RankReport:
    return RankReport(rank, doing=f"process {pid} is stopped", process=_STOPPED, pid=pid)


_LOST = re.compile("Connection (closed|reset)|Broken pipe|Socket closed|remote process exited")


def _ended_by_others(reports: tuple[RankReport, ...]) -> tuple[RankReport, ...]:
    """Of a job that is over, processes that wrote no end as ended by others.

    A launcher ends the rest when one has failed. Only where a connection was lost before, and no
    rank has left it by ending normally, the process may have been the first to end.
    """
    lost = any(map(_lost_connection, reports))
    first = lost and not any(report.activity is Activity.IDLE for report in reports)
    return tuple(
        RankReport(
            report.rank,
            doing=_ended_at(report),
            path=report.path,
            exit_code=report.exit_code,
        )
        if report.activity is Activity.DEAD and not _ended_by_itself(report, first)
        else report
        for report in reports
    )


def _ended_by_itself(report: RankReport, first: bool) -> bool:
    """True of a process that crashed; and of the `first` to end, where that is not known."""
    return report.exit_code in CRASHES or (first and report.exit_code in (None, _ABORTED))


def _lost_connection(report: RankReport) -> bool:
    return report.activity is Activity.FAILED and bool(_LOST.search(report.error_text))


def _ended_at(report: RankReport) -> str:
    path = report.path
    where = f"; it was at {path[-1]}" if path else "; what it did then is not recorded"
    if report.exit_code is None:
        return f"it ended without a record of how: {_NO_RECORD}{where}"
    if report.exit_code == _ABORTED:
        return f"it ended by SIGABRT, which C++ code raises on an error{where}"
    return f"it was ended from outside, by a signal{where}"


_ABORTED, _TERMINATED = -signal.SIGABRT.value, -signal.SIGTERM.value
_NO_RECORD = "a signal, a crash or os._exit()"
"""What ends a process before Python can write anything."""


def _state(pid: int) -> str:
    """The state of a process, in the words of a report."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""
    letter = status.partition("State:")[2].strip()[:1]
    return {"T": _STOPPED, "t": _STOPPED, "R": "running"}.get(letter, "sleeping")


_STOPPED = "stopped"


def written(job: Job) -> tuple[tuple[int, int], ...]:
    """How many collectives each process has recorded; cheap to read."""
    return tuple((p.about.pid, p.written(rank)) for rank, p in job.processes.items())


def ended(job: Job, *, failed: bool) -> Diagnosis:
    """What was wrong with a job of which nothing runs any more.

    Where what started it has not `failed`, and no rank raised, that ranks were ended is no fault.
    """
    case = case_of(job)
    if failed or case.where(Activity.FAILED):
        return _diagnosed(job, case)
    diagnosis = Diagnosis(world_size=len(case.ranks))
    ended = all(report.activity is Activity.IDLE for report in case.ranks)
    return _trained(job, case, diagnosis) if ended else diagnosis


def collectives_of(job: Job) -> Collectives:
    """The last records of each rank."""
    logs = {rank: process.log(rank, READ_LAST) for rank, process in job.processes.items()}
    known = {rank: log for rank, log in logs.items() if log.run}
    return collective_log.joined(known, tuple(range(job.world_size)))


def _diagnosed(job: Job, case: Case) -> Diagnosis:
    """Also by what was trained; without a finding, why that proves nothing."""
    diagnosis = by_rules(case, all_seen=not job.absent)
    if twice := tuple(_claimed_twice(job)) if job.absent else ():
        return replace(diagnosis, findings=twice, unsure="")
    if diagnosis.wrong:
        return diagnosis
    if all(report.activity is Activity.IDLE for report in case.ranks):
        return _trained(job, case, diagnosis)
    return replace(diagnosis, unsure=_unsure(job, case, diagnosis.unsure))


def _claimed_twice(job: Job) -> Iterator[Finding]:
    """A rank of a job that lacks ranks, and a process that was started as the same rank of it.

    Both run; or one has ended because the other holds the address of the rendezvous.
    """
    for other in jobs():
        first, theirs = job.first, other.first
        same = (first.meets, first.script, job.world_size)
        if same != (theirs.meets, theirs.script, other.world_size) or first.meets.endswith(":"):
            continue
        for rank in sorted(job.processes.keys() & other.processes.keys()):
            pair = (job.processes[rank], other.processes[rank])
            pids = sorted({process.about.pid for process in pair})
            ended = [process for process in pair if not process.about.alive]
            if len(pids) == 2 and len(ended) < 2 and all(map(_found_port_held, ended)):
                yield Finding(
                    Category.DUPLICATE_RANK,
                    (rank,),
                    f"processes {pids[0]} and {pids[1]} were both started as rank {rank} of "
                    f"{job.world_size} at {first.meets}; {verb(job.absent, 'is', 'are')} missing",
                    "Give each process a RANK of its own, from 0 to "
                    f"{job.world_size - 1}; or end the one that is of an earlier run.",
                )


def _found_port_held(process: Process) -> bool:
    return bool(_HELD.search(str((process.error or {}).get("text", ""))))


_HELD = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)


def by_rules(case: Case, all_seen: bool = True) -> Diagnosis:
    """By the rules; where they find nothing, what ranks raised, or who waits for long.

    Unless all ranks are seen, the rest may be what these wait for.
    """
    diagnosis = diagnose_run(case)
    if diagnosis.wrong:
        return diagnosis
    before = diagnose_run(_before_ends(case))
    if before.wrong:
        return replace(before, doing=diagnosis.doing)
    more: tuple[Finding, ...] = own_errors(case)
    if not more and all_seen and (finding := failures.unexplained(case, _waited_s(case))):
        more = (finding,)
    return (
        replace(diagnosis, findings=(*more, *diagnosis.findings), unsure="") if more else diagnosis
    )


def _before_ends(case: Case) -> Case:
    """With ranks in the collectives in which they lost connections to ranks that ended normally.

    torch raises an error there as soon as a process of the group is gone; until then they waited.
    """
    if not any(report.activity is Activity.IDLE for report in case.ranks):
        return case
    of = dict(case.collectives.of)
    ranks = []
    for report in case.ranks:
        records = of.get(report.rank, ())
        if _lost_connection(report) and _raised_in_last(report, records):
            of[report.rank] = (*records[:-1], replace(records[-1], phase=Phase.ISSUED))
            report = replace(
                report,
                activity=Activity.WAITING,
                inside="collective",
                entered=1,
                left=1,
                initialized=True,
            )
        ranks.append(report)
    return replace(case, ranks=tuple(ranks), collectives=replace(case.collectives, of=of))


def _raised_in_last(report: RankReport, records: Sequence[Collective]) -> bool:
    """True where the line of the last collective raised the error; gloo's is done even then."""
    last, line = (records[-1].place if records else None), report.error_at[-1:]
    return last is not None and (last.file, last.line) in [(at.file, at.line) for at in line]


def _trained(job: Job, case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """Post-run checks of a job that ended without an error on all ranks."""
    known = {rank: process.facts for rank, process in job.processes.items()}
    facts = {rank: fact for rank, fact in known.items() if fact is not None}
    left = {rank: at for rank, at in sockets_of(job).items() if rank not in facts}
    answers = ask(left, calls.RUN_FACTS, calls.Nothing(), _ASK_TIMEOUT_S)
    facts |= answered(answers)
    if not any(fact.backwards for fact in facts.values()):
        return replace(diagnosis, unsure="")
    if len(facts) < len(case.ranks):
        return replace(diagnosis, unsure=_NOT_COMPARED)
    trained = diagnose_training(facts, case.collectives)
    return replace(diagnosis, findings=trained.findings, notes=trained.notes, unsure="")


_NOT_COMPARED = "All ranks ended without an error; what they trained could not be compared."


def _waited_s(case: Case) -> dict[int, float]:
    """For how long each rank has been in its collective; of a job that has ended, long enough."""
    now_ns = time.monotonic_ns()
    waited = {}
    for report in case.ranks:
        issued = case.collectives.of.get(report.rank)
        if report.activity is Activity.WAITING and issued:
            waited[report.rank] = (now_ns - issued[-1].issued_ns) / 1e9
    return waited


def _unsure(job: Job, case: Case, why: str) -> str:
    """Why the absence of findings proves nothing; `why` is the rules' own reason."""
    silent = case.where(Activity.SILENT)
    if not job.alive:
        return _unsure_of_ended(job, case) or why
    if silent:
        waiting = case.waiting
        known = f"{verb(waiting, 'waits', 'wait')}; " if waiting else ""
        return f"No problem found so far: {known}{verb(silent, 'does', 'do')} not answer."
    return why or f"No problem found so far: {name_ranks(job.alive)} still run."


def _unsure_of_ended(job: Job, case: Case) -> str:
    """The same of a job of which no rank runs; empty where all ended by themselves."""
    failed, waited = case.where(Activity.FAILED), case.where(Activity.WAITING)
    parts = []
    by_end: dict[int | str, list[int]] = {}
    for report in case.ranks:
        if report.activity is Activity.SILENT:
            end = report.exit_code or _without_code(job, report.rank)
            by_end.setdefault(end, []).append(report.rank)
    for end, ranks in by_end.items():
        parts.append(f"{name_ranks(ranks)} {_end_by(end, job, ranks)}")
    if waited:
        parts.append(f"{name_ranks(waited)} {_end_by(_TERMINATED, job, waited)} while waiting")
    begins = "No problem is seen; "
    if waited or by_end.keys() - {_NOTHING}:
        begins = "Undecided: "
        parts.append("by whom and why is not recorded")
    if failed:
        begins = f"{name_ranks(failed).capitalize()} failed, and the cause is not known; "
    return f"{begins}{'; '.join(parts)}." if parts else ""


def _elsewhere(job: Job) -> Iterator[str]:
    """That ranks of a job that runs may be on other hosts, and which hosts its store connects."""
    if not (job.alive and job.absent):
        return
    port = (job.first.told or {}).get("MASTER_PORT", "")
    pid = job.processes[job.alive[0]].about.pid
    others = sorted(system.connected_hosts(pid, int(port))) if port.isdecimal() else []
    where = (
        f", perhaps {' or '.join(others[:8])}, which its store is connected with" if others else ""
    )
    there = others[0] if others else "HOST"
    yield (
        f"{verb(job.absent, 'was', 'were')} not found on this host: not started, or on another one"
        f"{where}. Then look at all of the job: ddp-notebook why {job.first.pid} {there}:PID"
    )


_NOTHING = "left nothing on this host"


def _without_code(job: Job, rank: int) -> str:
    """What is known of the end of a rank of which neither an exit code nor a signal is."""
    process = job.processes.get(rank)
    if process is None:
        return _NOTHING
    return DAMAGED if process.end_is_damaged else f"ended by {_NO_RECORD}"


def _end_by(code: int | str, job: Job, ranks: Sequence[int]) -> str:
    """How ranks ended, in words."""
    if isinstance(code, str):
        return code
    if code == _ABORTED:
        return "ended by SIGABRT, which C++ code raises on an error"
    if code != _TERMINATED:
        return f"ended: {ORPHANED}"
    were = "was" if len(ranks) == 1 else "were"
    times = [job.processes[rank].signalled_s for rank in ranks if rank in job.processes]
    at = min(filter(None, times), default=0.0)
    when = time.strftime(" at %H:%M:%S", time.localtime(at)) if at else ""
    return f"{were} ended from outside, by a signal{when}"


def _basis(job: Job, case: Case) -> str:
    silent = case.where(Activity.SILENT)
    answered = tuple(rank for rank in job.alive if rank not in silent)
    ended = tuple(rank for rank in job.processes if rank not in job.alive)
    parts = [f"the answers of {name_ranks(answered)}"] if answered else []
    parts += [f"what {name_ranks(ended)} left"] if ended else []
    records = "records of collectives"
    return f"{' and '.join(parts)}, and their {records}" if parts else f"{records} alone"
