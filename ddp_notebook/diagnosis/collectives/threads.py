"""The rule for threads of one rank that use one group at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddp_notebook.diagnosis.collectives.describe import called, named, verb
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.progress import works
from ddp_notebook.model import Activity, Category, Collective, Finding, Phase, Ranks, name_ranks

_ABORTED = (-6, 134)
"""SIGABRT: gloo ends a process whose buffer is smaller than the message that it gets."""
REMEDY = (
    "Give each thread a group of its own (dist.new_group, called on every rank in one order), or "
    "call all collectives in one thread."
)


def concurrent_use(context: Context) -> Iterator[Finding]:
    """A rank began a collective of a group while it was in another one, and it went wrong there.

    One thread cannot do that: it waits for the end of the first.
    """
    for group in sorted(_went_wrong(context)):
        pairs = {
            rank: pair
            for rank, records in sorted(context.collectives.of.items())
            if (pair := _at_once(each for each in records if each.group == group)) is not None
        }
        if pairs:
            yield _finding(context, several(context, group), pairs)


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
    groups |= {each.group for rank, each in graph.at.items() if still or rank in graph.stuck}
    aborted = [e.rank for e in reports if e.exit_code in _ABORTED]
    return groups | {
        context.collectives.of[r][-1].group for r in aborted if context.collectives.of.get(r)
    }


def _at_once(records: Iterable[Collective]) -> tuple[Collective, Collective] | None:
    """The first two of a rank's collectives that were under way at the same time."""
    last: Collective | None = None
    for record in sorted(records, key=lambda each: each.issued_ns):
        if record.is_point_to_point or not record.waited or record.phase is Phase.REFUSED:
            continue
        threads_differ = last is not None and last.thread != record.thread
        if last and threads_differ and (not last.over or record.issued_ns < last.done_ns):
            return last, record
        last = record
    return None


def several(context: Context, group: str) -> Ranks:
    """The ranks that call collectives of `group` in more than one thread."""
    threads: dict[int, set[int]] = {}
    for rank, records in context.collectives.of.items():
        for each in records:
            if each.group == group and not each.is_point_to_point:
                threads.setdefault(rank, set()).add(each.thread)
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
