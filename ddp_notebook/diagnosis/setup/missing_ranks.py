"""Rules about ranks that others wait for: dead, stopped, finished, idle, late, without a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.deaths import deaths
from ddp_notebook.diagnosis.progress import (
    call_number,
    doing,
    evidence_of,
    in_setup,
    of_each,
    opens_store,
    stuck_workers,
    way_to_error,
    where_busy,
    works,
)
from ddp_notebook.diagnosis.setup import torch_errors
from ddp_notebook.diagnosis.source_code.names import Varies
from ddp_notebook.model import (
    OWN_STORE,
    Activity,
    Case,
    Collective,
    Finding,
    RankReport,
    Ranks,
    Worker,
    by_value,
)

_INIT = "init_process_group"


def raised(context: Context) -> Iterator[Finding]:
    """A rank's own error, by what it says."""
    yield from torch_errors.of_errors(context.case, invalid=False)


def dead_ranks(context: Context) -> Iterator[Finding]:
    """A process that ended while others wait for it."""
    case = context.case
    dead = [report for report in case.ranks if report.activity is Activity.DEAD]
    yield from deaths(case, dead, case.waiting)


def stopped_ranks(context: Context) -> Iterator[Finding]:
    """A process that was stopped, as by Ctrl-Z: it continues when it gets SIGCONT."""
    case = context.case
    for e in case.ranks:
        if e.activity is Activity.SILENT and e.process.state == "stopped":
            yield catalogue.finding(
                "straggler.stopped",
                (e.rank,),
                waiting=case.waiting,
                evidence=(e.doing,),
                pid=e.process.pid or "PID",
            )


def absent_ranks(context: Context) -> Iterator[Finding]:
    """A rank that has finished, or is idle, and did not call init_process_group."""
    case = context.case
    waiting = tuple(e for e in case.ranks if in_setup(e))
    if not waiting:
        return
    ended = [e for e in case.ranks if e.activity is Activity.IDLE or torch_errors.lacks_group(e)]
    if all(map(opens_store, waiting)):
        # They wait in a store of their own, whose host waits for as many as it was told.
        sizes = [e.arguments.world_size or 0 for e in waiting if e.arguments.hosts_store]
        absent = tuple(e.rank for e in ended if e.arguments.method != OWN_STORE)
        if absent and case.world_size - len(absent) < max(sizes, default=0):
            yield _absent(context, waiting, absent, "missing-rank.never-called", OWN_STORE)
        return
    call = max(call_number(e) for e in waiting)
    expected = max(e.arguments.world_size or case.world_size for e in waiting)
    never = tuple(e.rank for e in ended if not (e.entered or e.left or e.initialized))
    once = tuple(e.rank for e in ended if 0 < e.left < call)
    if case.world_size - len(never) - len(once) >= expected:
        return  # a group of some of the processes: the rest is not missing
    if never:
        yield _absent(context, waiting, never, "missing-rank.never-called")
    if once:
        yield _absent(context, waiting, once, "missing-rank.not-called-again")


def _absent(
    context: Context, waiting: Sequence[RankReport], ranks: Ranks, kind: str, called: str = _INIT
) -> Finding:
    """The finding of `ranks` that have not called `called`, in which the others wait."""
    here = tuple(e.rank for e in waiting)
    path = next((e.path for e in waiting if e.path), ())
    call = Collective(waiting[0].rank, 0, called, api=called, path=path)
    test = context.sources.condition(call, None, here, ranks)
    if test is not None and test.decides < Varies.BY_RANK:
        test = None
    advice = catalogue.words(
        "missing-rank.never-called.in-a-script"
        if context.case.script
        else "missing-rank.never-called.in-a-cell"
    )
    facts = [f"rank {rank}: {doing(context.reports[rank])}" for rank in ranks]
    if test is not None:
        facts.append(f"{test.place}: {test.place.text}")
        advice = ""
    return catalogue.finding(
        kind,
        ranks,
        waiting=context.case.waiting,
        evidence=tuple(facts),
        call=called,
        test=test and test.quoted.rstrip(":"),
        advice=advice,
    )


def early_exits(context: Context) -> Iterator[Finding]:
    """A rank that had a group and has finished, while others wait for it in a collective."""
    case = context.case
    if not any(
        e.activity is Activity.WAITING and e.inside in ("collective", "ddp") for e in case.ranks
    ):
        return
    left = tuple(e.rank for e in case.ranks if e.activity is Activity.IDLE and e.left)
    if left:
        yield catalogue.finding("early-exit.finished", left, waiting=case.waiting)


def came_too_late(context: Context) -> Iterator[Finding]:
    """Ranks that call init_process_group, if ever, only after others gave up waiting for them.

    Only where each rank has called it or is busy, and time alone explains all errors.
    """
    case = context.case
    failed = [e for e in case.ranks if e.activity is Activity.FAILED]
    # When ranks called it is on the clock of each host, which counts from its boot: of two hosts
    # nobody knows which rank was first.
    hosts = {e.network.host for e in case.ranks if e.entered}
    if not failed or not all(map(torch_errors.is_victim, failed)) or len(hosts) > 1:
        return
    ends = [
        (e.called_ns + round(e.arguments.timeout_s * 1e9), e.arguments.timeout_s)
        for e in failed
        if e.called_ns and e.arguments.timeout_s and torch_errors.TIMED_OUT.search(e.error.text)
    ]
    until_ns, limit_s = min(ends, default=(0, 0.0))
    absent = tuple(e for e in case.ranks if not e.entered)
    late = tuple(e.rank for e in case.ranks if e in absent or e.called_ns > until_ns)
    if not until_ns or not late or not all(map(works, absent)):
        return
    others = tuple(e.rank for e in case.callers if e.rank not in late)
    first_ns = min(context.reports[rank].called_ns for rank in others)
    yield catalogue.finding(
        "straggler.not-called-in-time" if absent else "straggler.called-too-late",
        late,
        waiting=others,
        evidence=tuple(
            catalogue.words(
                "straggler.not-called-in-time.fact", ranks=(e.rank,), where=where_busy(e)
            )
            if e in absent
            else catalogue.words(
                "straggler.called-too-late.fact",
                ranks=(e.rank,),
                late_s=(e.called_ns - first_ns) / 1e9,
            )
            for e in case.ranks
            if e.rank in late
        ),
        limit_s=limit_s,
    )


def polling_ranks(context: Context) -> Iterator[Finding]:
    """Find ranks that wait in a loop for a file that no rank that still runs will write."""
    case = context.case
    pollers = [e for e in case.ranks if e.activity is Activity.BUSY and e.awaits.file]
    working = case.where(Activity.BUSY, Activity.SILENT)  # who does not answer may write it, too
    # Pollers are busy, too, so they are counted among those that work. One more, and that one may
    # be about to write the file.
    if not pollers or len(working) > len(pollers):
        return
    for ranks, _ in by_value({e.rank: e.doing for e in pollers}):
        together = [context.reports[rank] for rank in ranks]
        yield _left_unwritten(context, ranks, together) or _for_a_file(case, ranks, together)


def _left_unwritten(
    context: Context, ranks: Ranks, pollers: Sequence[RankReport]
) -> Finding | None:
    """A rank that waits in a collective, and has not written a file for which all others wait.

    By the code these come to that loop alone: so that rank is to write it. Of several that do not
    wait for the file it is not known which was to write it, or whether the waiting rank itself was.
    """
    files = {e.awaits.file for e in pollers}
    rest = [e for e in context.case.ranks if e.rank not in ranks]
    path = pollers[0].path
    if [e.inside for e in rest] != ["collective"] or len(files) > 1 or not path:
        return None
    others = (rest[0].rank,)
    line = Collective(ranks[0], 0, "", path=path)
    test = context.sources.condition(line, None, ranks, others)
    if test is None or not test.on_rank:
        return None
    file = files.pop()
    return catalogue.finding(
        "filesystem.left-unwritten",
        others,
        waiting=context.case.waiting,
        evidence=(
            *(f"rank {e.rank}: at {e.doing}, for {file}" for e in pollers),
            f"{test.place}: {test.place.text}",
        ),
        name=PurePath(file).name,
        pollers=ranks,
    )


def _for_a_file(case: Case, ranks: Ranks, pollers: Sequence[RankReport]) -> Finding:
    """Ranks that wait on one line for a file; each may have made up another path for it."""
    paths = list(dict.fromkeys(e.awaits.file for e in pollers))
    facts = [f"rank {e.rank}: at {e.doing}, for {e.awaits.file}" for e in pollers]
    if len(paths) == 1:
        facts.append(f"{paths[0]} does not exist")
    return catalogue.finding(
        "filesystem.never-written" if len(paths) == 1 else "filesystem.own-paths",
        ranks,
        waiting=case.waiting,
        evidence=tuple(facts),
        name=PurePath(paths[0]).name,
        paths=len(paths),
    )


def late_ranks(context: Context) -> Iterator[Finding]:
    """A rank that the others wait for and that is busy, or paused by the user: not a hang."""
    case = context.case
    # Where each that waits does so in a collective, `out_of_step.stragglers` says for whom, and
    # what is lacking: two findings of one thing would be one too many.
    if context.graph.at.keys() >= {
        e.rank for e in case.ranks if e.activity is Activity.WAITING and not e.awaits.key
    }:
        return
    for ranks, where in by_value({e.rank: where_busy(e) for e in case.ranks if works(e)}):
        yield catalogue.finding(
            "straggler.busy",
            ranks,
            waiting=case.waiting,
            evidence=of_each({rank: evidence_of(context.reports[rank]) for rank in ranks}),
            passing=True,
            where=where,
        )
    paused = case.where(Activity.HELD)
    if paused:
        yield catalogue.finding("straggler.paused", paused, waiting=case.waiting, passing=True)


# -- data workers ------------------------------------------------------------------------
# The rule for ranks that wait for a batch of a stuck DataLoader worker.


def stuck_data_workers(context: Context) -> Iterator[Finding]:
    """Ranks whose next batch never comes; those with the same cause at one line together."""
    same: dict[tuple[bool, bool, str], list[tuple[int, Worker]]] = {}
    for e in context.case.ranks:
        stuck = stuck_workers(e)
        if stuck:
            due = next(worker for worker in stuck if worker.due)
            key = due.stopped, due.forked, str(due.place or "")
            same.setdefault(key, []).extend((e.rank, worker) for worker in stuck)
    for of in same.values():
        yield _no_batch(of, context.case.waiting)


def _no_batch(of: Sequence[tuple[int, Worker]], waiting: Ranks) -> Finding:
    due, more = next(worker for _, worker in of if worker.due), []
    kind, fact = "dataloader-deadlock.locked", "dataloader-deadlock.locked.fact"
    if due.stopped:
        kind, fact = "dataloader-deadlock.stopped", "dataloader-deadlock.stopped.fact"
    elif due.place is not None:
        more.append(way_to_error((due.place,)))
    if due.forked and not due.stopped:
        more.append(catalogue.words("dataloader-deadlock.locked.forked"))
    facts = (
        catalogue.words(fact, ranks=(rank,), pid=worker.pid, still_s=worker.still_s)
        for rank, worker in of
    )
    return catalogue.finding(
        kind,
        tuple(dict(of)),
        waiting=waiting,
        evidence=(*facts, *more),
        workers=tuple(str(worker.pid) for _, worker in of),
        pids=" ".join(str(worker.pid) for _, worker in of if worker.stopped),
    )
