"""Asks the ranks: for reports, which make a case; after a run, for what it computed.

A dead rank's report comes from the record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from ddp_notebook.cluster.questions import with_reach
from ddp_notebook.diagnosis import diagnose_training
from ddp_notebook.diagnosis.training.ledger import ledger
from ddp_notebook.diagnosis.training.slow import slow_ranks
from ddp_notebook.launch.host_facts import ProcessState
from ddp_notebook.model import (
    Activity,
    Case,
    CellFinished,
    Collective,
    Collectives,
    Diagnosis,
    Ledger,
    Phase,
    ProcessEnd,
    RankError,
    RankReport,
    Ranks,
    RankState,
    Remark,
    Snapshot,
    Status,
)
from ddp_notebook.rank import calls
from ddp_notebook.rank.calls import CannotAnswer, answered
from ddp_notebook.session.unresponsive import silent
from ddp_notebook.views.board_rows import describe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddp_notebook.cluster.rank_cluster import RankCluster
    from ddp_notebook.session.collective_logs import CollectiveLogs
    from ddp_notebook.session.runs.run_events import RunEvents

_ASK_TIMEOUT_S = 1.0
_HALF_A_TICK_S = 0.005
"""Half a tick of the clock by which the system counts the CPU time of a thread."""


@dataclass(frozen=True)
class LaunchParameters:
    """The launch parameters of the ranks: rendezvous variables, and which rank hosts the store.

    `store_host` None: no rank hosts it, a process of the session does.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    store_host: int | None = None
    store_alive: Callable[[], bool] = lambda: True
    script: bool = False
    """The ranks are a script's own processes."""


def gather(
    cluster: RankCluster,
    snapshot: Snapshot,
    launch: LaunchParameters,
    ranks_of_run: Ranks | None = None,
    asked: Callable[[], Ranks] = tuple,
    collectives: Callable[[], Collectives] = Collectives,
    sources: Mapping[str, str] = MappingProxyType({}),
    finished: Mapping[int, CellFinished] = MappingProxyType({}),
) -> Case:
    """Ask the ranks (all by default) for reports; those of dead and silent ones are the record's.

    `asked` are the ranks that have been given work: an idle rank has not begun yet, and would
    report an earlier setup. Of `finished` ranks the record has how they ended, where they cannot
    say it themselves.
    """
    states = [s for s in snapshot.ranks if ranks_of_run is None or s.rank in ranks_of_run]
    alive = tuple(state.rank for state in states if state.status is not Status.DEAD)
    answers = cluster.ask(alive, calls.REPORT, calls.Nothing(), _ASK_TIMEOUT_S)
    # After the answers: a rank that has finished meanwhile is not taken for one about to begin.
    to_do, issued = asked(), collectives()

    def report(state: RankState) -> RankReport:
        answer = answers.get(state.rank)
        process = ProcessState()
        if state.status is not Status.DEAD and not isinstance(answer, RankReport):
            process = cluster.process(state.pid)
        made = _report(state, answer, process, has_something_to_do=state.rank in to_do)
        if state.rank in alive and state.rank not in answers and not cluster.can_ask(state.rank):
            made = _by_records(made, describe(state), issued.of.get(state.rank, ()))
        return _as_recorded(made, finished.get(state.rank))

    reports = [report(state) for state in states]
    return Case(
        with_reach(
            reports,
            lambda ranks, targets: cluster.ask(ranks, calls.REACH, targets, _ASK_TIMEOUT_S),
        ),
        dict(launch.values),
        launch.store_host,
        store_alive=launch.store_alive(),
        collectives=issued,
        sources=sources,
        script=launch.script,
    )


def without_earlier_failures(case: Case, run: int) -> Case:
    """Return `case` with ranks idle that have failed before `run` began, and are not in it.

    A rank keeps the error of its last cell until it gets another one. Whoever waits for it in a
    later cell waits because it does not run that cell, not because of an error that is past. One
    that failed in a run which began later may be the cause, and stays.
    """

    def now(report: RankReport) -> RankReport:
        if report.activity is not Activity.FAILED or report.inside or report.run >= run:
            return report
        return replace(report, activity=Activity.IDLE, doing="", error=RankError())

    return replace(case, ranks=tuple(map(now, case.ranks)))


def with_sources_in_use(case: Case, earlier: Mapping[str, str]) -> Case:
    """Add to `case` the sources of those earlier cells in whose functions ranks were seen.

    Others may have functions of the same names that are no longer used.
    """
    seen = case.files_seen
    used = {name: text for name, text in earlier.items() if name in seen}
    return replace(case, sources={**used, **case.sources}) if used else case


def still_waiting(case: Case, stuck: Case) -> Case:
    """Restore in `case` ranks that waited when they were found `stuck` and have not moved since.

    What a look sees may be of that moment alone: on a busy machine a rank misses the time to
    answer, or a thread of torch's waits for a core as if it computed.
    """
    before = {e.rank: e for e in stuck.ranks if e.activity is Activity.WAITING}
    unmoved = {
        e.rank
        for e in case.ranks
        if e.rank in before and _may_still_wait(e, before[e.rank])
        if _not_done(case, e.rank) == _not_done(stuck, e.rank) != ()
    }
    return replace(
        case, ranks=tuple(before[e.rank] if e.rank in unmoved else e for e in case.ranks)
    )


def _may_still_wait(now: RankReport, before: RankReport) -> bool:
    """Return whether a process that seems to do something else has not run its main thread."""
    there = now.process.state in ("sleeping", "running")
    there = there and not (now.process.cannot_answer or now.process.program)
    silent = now.activity is Activity.SILENT and there
    busy = now.activity is Activity.BUSY and now.process.runnable and now.path == before.path
    rested = now.process.main_cpu_s - before.process.main_cpu_s < _HALF_A_TICK_S
    return (silent or busy) and now.process.pid == before.process.pid and rested


def _not_done(case: Case, rank: int) -> tuple[int, ...]:
    """Return the numbers of a rank's last collective and of those not done; none if all are."""
    records, pending = case.collectives.of.get(rank, ()), case.collectives.pending(rank)
    return (records[-1].number, *(record.number for record in pending)) if pending else ()


def _report(
    state: RankState,
    answer: RankReport | CannotAnswer | None,
    process: ProcessState,
    *,
    has_something_to_do: bool,
) -> RankReport:
    """Return a rank's answer; if it is dead, silent or failed to answer, what the record has."""
    if state.status is Status.DEAD:
        return RankReport(
            state.rank,
            Activity.DEAD,
            end=ProcessEnd(
                code=state.exit_code,
                last_words=state.last_words,
                peak_bytes=state.peak_bytes,
                oom_kills=state.oom_kills,
            ),
        )
    if answer is None:
        return silent(state, process)
    if isinstance(answer, CannotAnswer):
        unheard = silent(state, process)
        facts = replace(unheard.process, cannot_answer=answer.why)
        return replace(unheard, doing=f"its observer failed: {answer.why}", process=facts)
    if has_something_to_do and answer.activity in (Activity.IDLE, Activity.FAILED):
        return RankReport(state.rank, Activity.BUSY, doing="about to begin")
    return answer


def _by_records(report: RankReport, doing: str, records: Sequence[Collective]) -> RankReport:
    """Show that a rank which cannot be asked waits in a call, where its records say so."""
    process = replace(report.process, unreachable=True)
    # The log needs no answer: the rank writes it before and after each call, in memory that is
    # shared. A call of its main thread that it was to wait for, and that is not over, is where it
    # is.
    last = next((each for each in reversed(records) if each.call.thread == 0), None)
    waits = last is not None and last.phase is Phase.ISSUED and last.call.waited
    if last is None or not waits or process.state == "stopped" or process.program:
        return replace(report, process=process)
    return RankReport(
        report.rank,
        Activity.WAITING,
        inside="collective",
        doing=doing,
        path=last.path,
        initialized=True,
        process=process,
        waits_for=last.number,
    )


def _as_recorded(report: RankReport, ended: CellFinished | None) -> RankReport:
    """Correct `report` by how the rank ended: its code may have replaced what reports need."""
    if ended is None or report.process.state == "stopped":
        return report
    failed = ended.outcome == "error"
    left_at = ended.path if ended.outcome == "ok" else ()
    if report.activity is not Activity.SILENT and not (failed and report.activity is Activity.IDLE):
        return replace(report, end=replace(report.end, left_at=left_at))
    return replace(
        report,
        activity=Activity.FAILED if failed else Activity.IDLE,
        run=report.run or ended.cell,
        doing="",
        process=replace(report.process, state=""),
        error=replace(
            report.error, type=ended.ename, text=ended.evalue, at=() if left_at else ended.path
        ),
        end=replace(report.end, left_at=left_at),
    )


def examine_results(
    events: RunEvents, cluster: RankCluster, logs: CollectiveLogs, sources: Mapping[str, str]
) -> Diagnosis | None:
    """Diagnose a run that every rank has finished; None if no problem is found.

    Asks only after training, or if a collective was not waited for: other cells stay fast.
    """
    ends = {(end.outcome, end.trained) for end in events.finished.values()}
    if len(events.ranks) < 2 or len(events.finished) < len(events.ranks):
        return None
    if not {("ok", True)} <= ends <= {("ok", True), ("ok", False)}:
        return None
    answers = cluster.ask(events.ranks, calls.RUN_FACTS, calls.Nothing(), 2.0)
    # Only ranks that took part have a training report of this run.
    facts = {rank: facts for rank, facts in answered(answers).items() if facts.run == events.cell}
    if set(facts) != set(events.ranks):
        return None  # of some ranks alone little can be compared
    diagnosis = diagnose_training(facts, Collectives(), sources)
    # What ranks averaged by hand is no mistake. Not always: records are read slowly.
    if diagnosis.findings:
        collectives = logs.read(events.ranks, events.cell)
        diagnosis = diagnose_training(facts, collectives, sources)
    return diagnosis if diagnosis.findings or diagnosis.notes else None


def ledger_of(events: RunEvents, cluster: RankCluster, asked: int) -> Ledger:
    """Return the ledger of a training step of a run that is over, without ranks that are gone."""
    # That of a large model is some megabytes.
    answers = cluster.ask(events.ranks, calls.LEDGER, calls.Nothing(), 20.0)
    # Ranks of a script count from 0.
    number = {rank: at if events.script else rank for at, rank in enumerate(events.ranks)}
    of = {number[rank]: each for rank, each in answered(answers).items() if each.run == events.cell}
    return ledger(of, asked)


def remarks_on(events: RunEvents, cluster: RankCluster) -> tuple[Remark, ...]:
    """Return remarks on a run without a problem: whether a rank is slow."""
    answers = cluster.ask(events.ranks, calls.STEP_TIMES, calls.Nothing(), 2.0)
    times = {rank: times for rank, times in answered(answers).items() if times.run == events.cell}
    # A pause at a line is the user's time, and stands in the rank's own.
    known = set(times) == set(events.ranks) and not events.pauses
    return slow_ranks(times) if known else ()
