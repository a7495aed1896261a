"""Rules about a rank's threads: two that use one group at the same time, one that raised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ddp_notebook.diagnosis.collectives.alignment import call_site
from ddp_notebook.diagnosis.collectives.describe import called, named
from ddp_notebook.diagnosis.collectives.divergence import Branch, Classified, Kind
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.progress import left_alone, thread_words, way_to_error, works
from ddp_notebook.diagnosis.setup import torch_errors
from ddp_notebook.diagnosis.source_code.names import Varies
from ddp_notebook.diagnosis.source_code.sources import Condition
from ddp_notebook.model import (
    Activity,
    Blocked,
    Case,
    Category,
    Collective,
    Finding,
    Lacks,
    Phase,
    Place,
    RankReport,
    Ranks,
    ThreadError,
    name_ranks,
    verb,
)
from ddp_notebook.state.fold import MISMATCH

_ABORTED = (-6, 134)
"""SIGABRT: gloo ends a process whose buffer is smaller than the message that it gets."""
REMEDY = (
    "Give each thread a group of its own (dist.new_group, called on every rank in one order), or "
    "call all collectives in one thread."
)
_TO_MAIN_THREAD = (
    "Correct the error. To have it end the cell, pass it on to the main thread: run the code with "
    "concurrent.futures and call result()."
)
_PARTED = (
    Kind.ONE_BRANCH_ONLY,
    Kind.EITHER_OR,
    Kind.PAST_THE_LOOP,
    Kind.ANOTHER_WAY,
    Kind.OTHER_OBJECTS,
    Kind.MORE_OFTEN,
    Kind.NO_BUCKETS,
)
"""Ranks went different ways, for a reason of which the collectives say nothing."""


def concurrent_use(context: Context) -> Iterator[Finding]:
    """A rank began a collective of a group while another one was in progress, and it failed there.

    One thread cannot do that: it waits for the end of the first.
    """
    for group in sorted(_went_wrong(context)):
        pairs = {
            rank: pair
            for rank, records in sorted(context.collectives.of.items())
            if (pair := _at_once(record for record in records if record.group == group)) is not None
        }
        if pairs:
            yield _finding(context, several(context, group), pairs)


def raised_in_thread(context: Context) -> Iterator[Finding]:
    """A thread that raised, where its rank waits for it for ever, or others for what it ran.

    A thread that is not waited for may end in any way.
    """
    same: dict[tuple[str, tuple[Place, ...]], list[RankReport]] = {}
    for e in context.case.ranks:
        error = _missed(context, e)
        if error is not None:
            same.setdefault((thread_words(error), error.path), []).append(e)
    for (what, path), reports in same.items():
        ranks = tuple(e.rank for e in reports)
        alone = next((e for e in reports if left_alone(e)), None)
        waits = f"; the main thread waits for ever at {alone.doing}" if alone else ""
        everyone = len(ranks) == len(context.case.ranks)
        yield Finding(
            Category.EXCEPTION if everyone else Category.EXCEPTION_ON_ONE_RANK,
            ranks,
            f"{what}{waits}",
            _TO_MAIN_THREAD,
            context.victims,
            (f"{name_ranks(ranks)}: {way_to_error(path)}",) if path else (),
        )


def local_deadlocks(context: Context) -> Iterator[Finding]:
    """Ranks that wait for a lock, a queue, a child or a task, and none of their threads goes on."""
    same: dict[tuple[Lacks, str, tuple[Place, ...]], list[RankReport]] = {}
    for e, blocked in _blocked_alone(context.case):
        same.setdefault((blocked.lacks, blocked.what, e.path), []).append(e)
    for (lacks, what, path), reports in same.items():
        ranks = tuple(e.rank for e in reports)
        at = f" at {reports[0].path[-1]}" if path else ""
        one = len(ranks) == 1
        yield Finding(
            Category.LOCAL_DEADLOCK,
            ranks,
            f"{verb(ranks, 'waits', 'wait')} for ever{at}: {_lacking_words(lacks, what, one=one)}",
            _REMEDIES[lacks],
            context.victims,
            tuple(line for e in reports for line in _blocked_facts(e)),
        )


def _blocked_alone(case: Case) -> Iterator[tuple[RankReport, Blocked]]:
    for e in case.ranks:
        # The run of another one has ended while it was looked at.
        interrupted = e.activity is Activity.FAILED and e.error_type == "KeyboardInterrupt"
        blocked = e.blocked if e.activity is Activity.BUSY or interrupted else None
        if blocked is not None and blocked.lacks in _REMEDIES:
            yield e, blocked


def _lacking_words(lacks: Lacks, what: str, *, one: bool) -> str:
    its = "its" if one else "their"
    if lacks is Lacks.PIPE:
        return (
            f"for a process that {'it has' if one else 'they have'} started, which waits at a "
            f"pipe that {'this rank' if one else 'these ranks'} must read or write"
        )
    if lacks is Lacks.PROCESS_LOCK:
        return (
            "for a lock of multiprocessing's that no process can release any more: those that "
            f"{'it' if one else 'they'} started have ended, one perhaps while it had the lock"
        )
    if lacks is Lacks.EVENT:
        return (
            f"{its} event loop has no timer, no open connection and nothing left to run, so what "
            f"{its} tasks await never comes"
        )
    call = f"{what} needs" if what else "the lock there needs"
    return f"{call} another thread, and all of {its} threads wait for locks or have ended"


def _blocked_facts(e: RankReport) -> Iterator[str]:
    """Where it and its threads wait."""
    yield f"rank {e.rank}: {way_to_error(e.path)}" if e.path else f"rank {e.rank}: {e.doing}"
    if e.blocked is not None and e.blocked.holder:
        yield f"rank {e.rank}: it waits for process {e.blocked.holder}"
    for line in e.blocked.threads if e.blocked is not None else ():
        yield f"rank {e.rank}: {line}"


_HAVE_ENDED = (
    "Release the lock, or put what is waited for, on every way out of the thread that must do it: "
    "with lock: ..., or try: ... finally: queue.put(END). A time limit (timeout=) makes an error "
    "of such a wait."
)
_READ_BOTH = (
    "Read what it writes, and close its input, before or while you wait: communicate() does both; "
    "or give it stdin=subprocess.DEVNULL and a file as stdout."
)
_SET_EACH = (
    "Give each future a result or an exception on every way out of the task that must do it. A "
    "time limit (asyncio.wait_for) makes an error of such a wait."
)
_LEAVE_IT_FREE = (
    "See why the process ended, by its output: os._exit() and kill release no lock. Let it hold "
    "the lock (with lock: ...) only where it cannot end, and look whether it lives: is_alive()."
)
_REMEDIES = {
    Lacks.LOCK: _HAVE_ENDED,
    Lacks.PROCESS_LOCK: _LEAVE_IT_FREE,
    Lacks.PIPE: _READ_BOTH,
    Lacks.EVENT: _SET_EACH,
}
"""What to do about a wait that the rank alone could end."""


def or_raised(context: Context, classified: Classified, finding: Finding) -> Finding:
    """`finding` of ranks that parted, or that a thread of some raised, which is why they did.

    It is why where what the thread writes decides the way. A test of the rank, or a majority, is a
    better reason than a thread that may have nothing to do with it; without one it is open.
    """
    lost, rest = classified.sides
    if not _raised_alone(context, lost, rest):
        lost, rest = rest, lost
    if classified.kind not in _PARTED or not _raised_alone(context, lost, rest):
        return finding
    error = _errors(context.reports[lost.ranks[0]])[0]
    fact = f"{lost.named}: {thread_words(error)}"
    test = context.sources.condition(
        classified.record, classified.there, classified.full.ranks, classified.short.ranks
    )
    by_rank = _is_by_rank(test)
    if not by_rank and _is_why(context, error, classified.record, lost.here):
        return _by_thread(context, classified, finding, lost, error)
    if by_rank or finding.ranks == lost.ranks or len(lost.ranks) != len(rest.ranks):
        return replace(finding, evidence=(*finding.evidence, fact))
    first = f"{finding.sentence[0].lower()}{finding.sentence[1:]}"
    return replace(
        finding,
        category=Category.UNDECIDED,
        ranks=(),
        cause=f"{first}; {lost.named}, {thread_words(error)}; which of the two is the cause is not "
        "known",
        remedy=f"If the thread's error is the cause, correct it. If not: {finding.remedy}",
        waiting=context.victims,
        evidence=(*finding.evidence, fact),
    )


def _is_why(context: Context, error: ThreadError, *records: Collective | None) -> bool:
    return any(
        context.sources.hangs_on(record, error.path) for record in records if record is not None
    )


def _by_thread(
    context: Context, classified: Classified, finding: Finding, lost: Branch, error: ThreadError
) -> Finding:
    record = classified.record
    way = f"{called(record)} at {record.place}" if record.place else called(record)
    does = "left out" if lost.ranks == classified.short.ranks else "called"
    return replace(
        finding,
        category=Category.EXCEPTION_ON_ONE_RANK,
        ranks=lost.ranks,
        cause=f"{thread_words(error)}; {way}, which depends on what that thread writes, was {does} "
        "there",
        remedy=_TO_MAIN_THREAD,
        waiting=context.victims,
        evidence=(f"{lost.named}: {way_to_error(error.path)}", *finding.evidence),
    )


def _raised_alone(context: Context, lost: Branch, rest: Branch) -> bool:
    """True when a thread of each of these ranks raised, and none of the others'."""

    def raised(rank: int) -> bool:
        report = context.reports.get(rank)
        return report is not None and bool(_errors(report))

    return all(map(raised, lost.ranks)) and not any(map(raised, rest.ranks))


def _errors(e: RankReport) -> list[ThreadError]:
    """The errors that ended its threads, without those that other ranks caused."""
    return [
        error
        for error in e.in_threads
        if error.path and error.type != MISMATCH and not torch_errors.is_of_others(error.text)
    ]


def _missed(context: Context, e: RankReport) -> ThreadError | None:
    """The error of a thread that is waited for."""
    if left_alone(e):
        return e.in_threads[0]
    lacking = [record for record in _lacking(context, e) if record.path]
    wanted = {(record.path[0].file, record.path[0].function) for record in lacking}
    for error in e.in_threads:
        if error.path and (error.path[0].file, error.path[0].function) in wanted:
            return error
    pairs = ((error, record) for error in _errors(e) for record in lacking)
    return next((error for error, at in pairs if _parted(context, e.rank, error, at)), None)


def _parted(context: Context, rank: int, error: ThreadError, record: Collective) -> bool:
    """True when what `error` left undone kept `rank` from `record`, in which others wait."""
    if _errors(context.reports[record.rank]):
        return False
    test = context.sources.condition(record, None, (record.rank,), (rank,))
    return not _is_by_rank(test) and _is_why(context, error, record)


def _is_by_rank(condition: Condition | None) -> bool:
    return condition is not None and condition.decides >= Varies.BY_RANK


def _lacking(context: Context, e: RankReport) -> Iterator[Collective]:
    """What ranks that are stuck wait for it in, and what they have called and it has not."""
    if not e.in_threads:
        return
    own = {call_site(record) for record in context.collectives.of.get(e.rank, ())}
    for rank in context.graph.stuck:
        if e.rank in context.graph.waits[rank]:
            at = context.graph.at.get(rank)
            for record in context.collectives.of.get(rank, ()):
                if record is at or call_site(record) not in own:
                    yield record


def _went_wrong(context: Context) -> set[str]:
    """The groups in which ranks diverge, are stuck, or were ended by gloo.

    Also those in which all have come to what they wait in, and nothing moves: the order in which
    two threads write down what they call need not be that in which torch is called.
    """
    graph, reports = context.graph, context.case.ranks
    if not context.case.where(Activity.WAITING, Activity.FAILED, Activity.DEAD):
        return set()
    groups = {divergence.alignment.group for divergence in context.divergences}
    still = not any(e.runnable or works(e) for e in reports)
    groups |= {record.group for rank, record in graph.at.items() if still or rank in graph.stuck}
    aborted = [e.rank for e in reports if e.exit_code in _ABORTED]
    return groups | {
        context.collectives.of[r][-1].group for r in aborted if context.collectives.of.get(r)
    }


def _at_once(records: Iterable[Collective]) -> tuple[Collective, Collective] | None:
    """The first two collectives of a rank that ran at the same time."""
    last: Collective | None = None
    for record in sorted(filter(_is_waited, records), key=lambda each: each.issued_ns):
        threads_differ = last is not None and last.thread != record.thread
        if last and threads_differ and (not last.over or record.issued_ns < last.done_ns):
            return last, record
        if record.phase is not Phase.REFUSED:  # what is refused is over at once
            last = record
    return None


def _is_waited(record: Collective) -> bool:
    return not record.is_point_to_point and (record.waited or record.phase is Phase.REFUSED)


def several(context: Context, group: str) -> Ranks:
    """The ranks that call collectives of `group` in more than one thread."""
    threads: dict[int, set[int]] = {}
    for rank, records in context.collectives.of.items():
        for record in records:
            if record.group == group and not record.is_point_to_point:
                threads.setdefault(rank, set()).add(record.thread)
    return tuple(sorted(rank for rank, those in threads.items() if len(those) > 1))


def _finding(
    context: Context, ranks: Ranks, pairs: dict[int, tuple[Collective, Collective]]
) -> Finding:
    first, second = pairs[min(pairs)]
    return Finding(
        Category.MISMATCHED_ORDER,
        ranks,
        f"two threads of {verb(ranks, 'use', 'each use')} one group at the same time, so it is "
        f"left to chance which collectives meet: {named(first)}; {named(second)}",
        REMEDY,
        context.victims,
        tuple(
            f"{name_ranks((rank,))}: {called(later)} of collective {later.slot} began while "
            f"{called(sooner)} of collective {sooner.slot} was under way"
            for rank, (sooner, later) in pairs.items()
        ),
    )
