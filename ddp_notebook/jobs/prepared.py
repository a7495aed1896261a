"""Prepared jobs (DDP_NOTEBOOK=1), running or ended: asked for their state, and judged.

Read-only: ranks are asked for their state, and their records are read. Nothing is sent that could
change what they do.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ddp_notebook import files
from ddp_notebook.cluster.questions import ask, with_reach
from ddp_notebook.diagnosis import catalogue, diagnose_run, diagnose_training, failures
from ddp_notebook.jobs import records
from ddp_notebook.jobs.records import CRASHES, DAMAGED, ORPHANED, Job, Process
from ddp_notebook.jobs.verdict import AT_REST, Verdict, for_others, own_errors, raised_in_last
from ddp_notebook.model import (
    Activity,
    Case,
    Collectives,
    Diagnosis,
    Finding,
    Phase,
    ProcessEnd,
    ProcessFacts,
    RankReport,
    collective_log,
    name_ranks,
    verb,
)
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import CannotAnswer, answered
from ddp_notebook.rank.prepared import processes

ASK_TIMEOUT_S = 2.0
_AGAIN_S = 0.4
"""Between two checks of a running job: a finding must hold in both."""


def why(job: Job) -> Verdict:
    """Return what is wrong with a job."""
    return judged(job)[1]


def judged(job: Job) -> tuple[Case, Verdict]:
    """Return what is known of a job, and what is wrong with it.

    Of one that runs, what is so in two looks at it.
    """
    alive = job.alive
    before = case = case_of(job)
    diagnosis = _diagnosed(job, case)
    # Ranks run on while they are asked: rank 0 may report that it waits for rank 1, which has
    # arrived by the time it is asked itself. A hang is still there a moment later, with the same
    # ranks.
    if job.alive and diagnosis.findings:
        time.sleep(_AGAIN_S)
        case = case_of(job)
        diagnosis = _with_rest(in_both(diagnosis, _diagnosed(job, case)), before, case)
    # A rank that ended between the looks has left more than it could answer, and the others lost
    # their connection to it: both looks are void. Ranks of a job only ever end, so this comes to
    # rest.
    if job.alive != alive:  # who ended meanwhile may have written how
        return judged(job)
    notes: tuple[str, ...] = ()
    if job.alive and job.absent:  # ranks of a running job may be on other hosts
        notes = (
            f"{verb(job.absent, 'was', 'were')} not found on this host: not started, or on another "
            f"one. Then look at all of the job: ddp-notebook why {job.first.pid} HOST:PID",
        )
    answered = set(job.alive).difference(case.where(Activity.SILENT))
    ended = job.processes.keys() - set(job.alive)
    parts = [f"the answers of {name_ranks(answered)}"] if answered else []
    parts += [f"what {name_ranks(ended)} left"] if ended else []
    basis = f"{' and '.join(parts)}, and their {_RECORDS}" if parts else f"{_RECORDS} alone"
    return case, for_others(diagnosis, basis, notes)


_RECORDS = "records of collectives"


def in_both(first: Diagnosis, second: Diagnosis) -> Diagnosis:
    """Return the second of two looks, with those findings alone that the first one had as well."""
    same = {(finding.category, finding.ranks) for finding in first.findings}
    both = tuple(f for f in second.findings if (f.category, f.ranks) in same)
    changed = "" if both or not second.wrong else _CHANGES
    return replace(second, findings=both, unsure=second.unsure or changed)


def _with_rest(diagnosis: Diagnosis, before: Case, now: Case) -> Diagnosis:
    """Add which of the ranks that others wait for did nothing at all between two looks."""
    pairs = zip(before.ranks, now.ranks, strict=True)
    # The system counts CPU time in ticks of 10 ms: less than one is none.
    still = {
        b.rank
        for a, b in pairs
        if b.process.main_cpu_s and b.process.main_cpu_s - a.process.main_cpu_s < 0.01
    }
    findings = []
    for finding in diagnosis.findings:
        ranks = tuple(rank for rank in finding.ranks if rank in still)
        if finding.passing and ranks:
            fact = f"{name_ranks(ranks)} used no CPU time for the last {_AGAIN_S:g} s: {AT_REST}"
            finding = replace(finding, evidence=(*finding.evidence, fact))
        findings.append(finding)
    return replace(diagnosis, findings=tuple(findings))


_CHANGES = "Two looks at it, shortly one after the other, found different things: ask again."


def case_of(job: Job) -> Case:
    """Return all that is known of a job now."""
    sockets = sockets_of(job)
    answers = ask(sockets, calls.REPORT, calls.Nothing(), ASK_TIMEOUT_S)
    first, alive = job.first, bool(job.alive)
    reports = tuple(
        _report(rank, job.processes.get(rank), answers.get(rank), alive)
        for rank in range(job.world_size)
    )
    reports = with_reach(
        reports,
        lambda ranks, targets: ask(
            {r: sockets[r] for r in ranks if r in sockets}, calls.REACH, targets, ASK_TIMEOUT_S
        ),
    )
    return Case(
        _with_splits(job, reports if alive else _ended_by_others(reports)),
        dict(first.told or {}),
        None if first.agents_store else 0,
        collectives=collectives_of(job),
        sources=files.sources(Path(first.script), first.wall_s),
    )


def _with_splits(job: Job, reports: tuple[RankReport, ...]) -> tuple[RankReport, ...]:
    """Add to reports what each rank brought to the all_to_all to which the last one came.

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


def sockets_of(job: Job) -> dict[int, Path]:
    """Return where ranks can be asked: those that run, without the ones that were stopped."""
    running = {rank: job.processes[rank] for rank in job.alive}
    return {r: p.folder / "ask" for r, p in running.items() if _state(p.about.pid) != _STOPPED}


def _report(
    rank: int,
    process: Process | None,
    answer: RankReport | CannotAnswer | None,
    others_run: bool,
) -> RankReport:
    """Return a rank's answer; without one, what it wrote."""
    if process is None:
        return RankReport(rank, doing="no process of it was prepared on this host")
    if isinstance(answer, RankReport):
        return replace(answer, rank=rank)
    if process.about.alive:
        pid = process.about.pid
        why_not = f": {answer.why}" if isinstance(answer, CannotAnswer) else ""
        if not why_not and (user := processes.other_user(pid)) is not None:
            why_not = f" as user {user}, and answers no other user"
        state = _state(pid)
        does = "is stopped" if state == _STOPPED else f"runs{why_not}"
        return RankReport(
            rank, doing=f"process {pid} {does}", process=ProcessFacts(state=state, pid=pid)
        )
    return process.last_report(rank, others_run)


_LOST = re.compile("Connection (closed|reset)|Broken pipe|Socket closed|remote process exited")


def _ended_by_others(reports: tuple[RankReport, ...]) -> tuple[RankReport, ...]:
    """Show processes of a job that is over, and that wrote no end, as ended by others.

    A launcher ends the rest when one has failed. Only where a connection was lost before, and no
    rank has left it by ending normally, the process may have been the first to end.
    """
    # Which process ended first is what matters, and nothing that they left says when it was. That
    # torchrun sent SIGTERM to the rest says nothing of these. SIGKILL and os._exit() leave no
    # trace: such a process may be the cause (out of memory), or a scheduler may have ended it last.
    # What decides is whether others lost their connection to it before anything ended them.
    lost = any(map(_lost_connection, reports))
    may_be_first = lost and not any(report.activity is Activity.IDLE for report in reports)
    by_itself = (*CRASHES, *((None, _ABORTED) if may_be_first else ()))
    shown = []
    for report in reports:
        code, path = report.end.code, report.path
        if report.activity is Activity.DEAD and code not in by_itself:
            if code is None:
                how = f"ended without a record of how: {_NO_RECORD}"
            elif code == _ABORTED:
                how = f"ended by {_BY_ABORT}"
            else:
                how = "was ended from outside, by a signal"
            at = f"it was at {path[-1]}" if path else "what it did then is not recorded"
            report = RankReport(
                report.rank, doing=f"it {how}; {at}", path=path, end=ProcessEnd(code=code)
            )
        shown.append(report)
    return tuple(shown)


def _lost_connection(report: RankReport) -> bool:
    return report.activity is Activity.FAILED and bool(_LOST.search(report.error.text))


_ABORTED, _TERMINATED = -signal.SIGABRT.value, -signal.SIGTERM.value
_NO_RECORD = "a signal, a crash or os._exit()"
"""The ends that leave Python no time to write."""
_BY_ABORT = "SIGABRT, which C++ code raises on an error"


def _state(pid: int) -> str:
    """Return the state of a process, in the words of a report."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""
    letter = status.partition("State:")[2].strip()[:1]
    return {"T": _STOPPED, "t": _STOPPED, "R": "running"}.get(letter, "sleeping")


_STOPPED = "stopped"


def written(job: Job) -> tuple[tuple[int, int], ...]:
    """Return how many collectives each process has recorded; cheap to read."""
    return tuple((p.about.pid, p.written(rank)) for rank, p in job.processes.items())


def ended(job: Job, *, failed: bool) -> Diagnosis:
    """Return what was wrong with a job of which nothing runs any more.

    Where what started it has not `failed`, and no rank raised, that ranks were ended is no fault.
    """
    case = case_of(job)
    if failed or case.where(Activity.FAILED):
        return _diagnosed(job, case)
    diagnosis = Diagnosis(world_size=len(case.ranks))
    ended = all(report.activity is Activity.IDLE for report in case.ranks)
    return _trained(job, case, diagnosis) if ended else diagnosis


def collectives_of(job: Job) -> Collectives:
    """Return the last records of each rank."""
    logs = {rank: process.log(rank, 2000) for rank, process in job.processes.items()}
    known = {rank: log for rank, log in logs.items() if log.run}
    return collective_log.joined(known, tuple(range(job.world_size)))


def _diagnosed(job: Job, case: Case) -> Diagnosis:
    """Return the diagnosis, also of the training; without a finding, why that proves nothing."""
    diagnosis = by_rules(case, all_seen=not job.absent)
    if twice := tuple(_claimed_twice(job)) if job.absent else ():
        return replace(diagnosis, findings=twice, unsure="")
    if diagnosis.wrong:
        return diagnosis
    if len(case.where(Activity.IDLE)) == len(case.ranks):
        return _trained(job, case, diagnosis)
    waiting, silent, why = case.waiting, case.where(Activity.SILENT), diagnosis.unsure
    if not job.alive:
        why = _unsure_of_ended(job, case) or why
    elif silent:
        known = f"{verb(waiting, 'waits', 'wait')}; " if waiting else ""
        why = f"No problem found so far: {known}{verb(silent, 'does', 'do')} not answer."
    else:
        why = why or f"No problem found so far: {name_ranks(job.alive)} still run."
    return replace(diagnosis, unsure=why)


_PORT_HELD = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)


def _claimed_twice(job: Job) -> Iterator[Finding]:
    """Return ranks of a job that lacks others, of which a second process was started.

    Both run; or one has ended because the other holds the address of the rendezvous.
    """
    for other in records.jobs():
        first, theirs = job.first, other.first
        same = (first.meets, first.script, job.world_size)
        if same != (theirs.meets, theirs.script, other.world_size) or first.meets.endswith(":"):
            continue
        for rank in sorted(job.processes.keys() & other.processes.keys()):
            pair = (job.processes[rank], other.processes[rank])
            pids = sorted({process.about.pid for process in pair})
            ended = [process for process in pair if not process.about.alive]
            errors = [str((process.error or {}).get("text", "")) for process in ended]
            # Two jobs of one script at one address may be of two days. They are one mistake only if
            # both run, or if the one that ended did so because the other held the port.
            if len(pids) == 2 and len(ended) < 2 and all(map(_PORT_HELD.search, errors)):
                yield catalogue.finding(
                    "duplicate-rank.started-twice",
                    (rank,),
                    evidence=(f"both meet at {first.meets}",),
                    pids=tuple(map(str, pids)),
                    missing=job.absent,
                    last=job.world_size - 1,
                )


def by_rules(case: Case, all_seen: bool = True) -> Diagnosis:
    """Return what the rules find; without that, what ranks raised, or who waits for long.

    Unless all ranks are seen, the rest may be what these wait for.
    """
    diagnosis = diagnose_run(case)
    if diagnosis.wrong:
        return diagnosis
    # A rank that left the loop early has no error itself. The others fail at once, when they lose
    # their connection to it, and these errors would hide that they were waiting for it.
    before = diagnose_run(_before_ends(case))
    if before.wrong:
        return replace(before, doing=diagnosis.doing)
    more: tuple[Finding, ...] = own_errors(case)
    # How long each rank has been in its collective; long enough in a job that has ended.
    issued, now_ns = case.collectives.of, time.monotonic_ns()
    waited_s = {r: (now_ns - issued[r][-1].issued_ns) / 1e9 for r in case.waiting if issued.get(r)}
    if not more and all_seen and (finding := failures.unexplained(case, waited_s)):
        more = (finding,)
    return (
        replace(diagnosis, findings=(*more, *diagnosis.findings), unsure="") if more else diagnosis
    )


def _before_ends(case: Case) -> Case:
    """Put ranks back in the collectives in which they lost connections to ranks that ended well.

    torch raises an error there as soon as a process of the group is gone; until then they waited.
    """
    if not any(report.activity is Activity.IDLE for report in case.ranks):
        return case
    of = dict(case.collectives.of)
    ranks = []
    for report in case.ranks:
        issued = of.get(report.rank, ())
        # gloo's is done even where it raised the error.
        if _lost_connection(report) and raised_in_last(report.error, issued):
            of[report.rank] = (*issued[:-1], replace(issued[-1], phase=Phase.ISSUED))
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


def _trained(job: Job, case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """Add the post-run checks of a job that ended without an error on all ranks."""
    known = {rank: process.facts for rank, process in job.processes.items()}
    facts = {rank: fact for rank, fact in known.items() if fact is not None}
    left = {rank: at for rank, at in sockets_of(job).items() if rank not in facts}
    answers = ask(left, calls.RUN_FACTS, calls.Nothing(), ASK_TIMEOUT_S)
    facts |= answered(answers)
    if not any(fact.backwards for fact in facts.values()):
        return replace(diagnosis, unsure="")
    if len(facts) < len(case.ranks):
        return replace(diagnosis, unsure=_NOT_COMPARED)
    trained = diagnose_training(facts, case.collectives)
    return replace(diagnosis, findings=trained.findings, notes=trained.notes, unsure="")


_NOT_COMPARED = "All ranks ended without an error; what they trained could not be compared."


def _unsure_of_ended(job: Job, case: Case) -> str:
    """Say how the ranks of an ended job ended; empty where all ended by themselves."""
    failed, waited = case.where(Activity.FAILED), case.where(Activity.WAITING)
    by_end: dict[int | str, list[int]] = {}
    for rank in case.where(Activity.SILENT):
        process = job.processes.get(rank)
        if process is None:
            unknown = _NOTHING
        else:
            unknown = DAMAGED if process.end_is_damaged else f"ended by {_NO_RECORD}"
        by_end.setdefault(case.ranks[rank].end.code or unknown, []).append(rank)
    if waited:
        by_end[f"{_end_by(_TERMINATED, job, waited)} while waiting"] = [*waited]
    parts = [f"{name_ranks(ranks)} {_end_by(end, job, ranks)}" for end, ranks in by_end.items()]
    begins = "No problem is seen; "
    if by_end.keys() - {_NOTHING}:
        begins = "Undecided: "
        parts.append("by whom and why is not recorded")
    if failed:
        begins = f"{name_ranks(failed).capitalize()} failed, and the cause is not known; "
    return f"{begins}{'; '.join(parts)}." if parts else ""


_NOTHING = "left nothing on this host"


def _end_by(code: int | str, job: Job, ranks: Sequence[int]) -> str:
    """Say how ranks ended."""
    if isinstance(code, str):
        return code
    if code == _ABORTED:
        return f"ended by {_BY_ABORT}"
    if code != _TERMINATED:
        return f"ended: {ORPHANED}"
    were = "was" if len(ranks) == 1 else "were"
    times = [job.processes[rank].signalled_s for rank in ranks if rank in job.processes]
    at = min(filter(None, times), default=0.0)
    when = time.strftime(" at %H:%M:%S", time.localtime(at)) if at else ""
    return f"{were} ended from outside, by a signal{when}"
