"""Rules: mismatched collectives, ranks that diverge, refusals, late ranks.

Two things are proof. Mismatched records in one slot are a mistake, whatever their outcome. And
ranks that wait for what can no longer arrive are stuck: then the sequences of all ranks show which
diverged from which, and where. Ranks that are merely at different lines prove neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ddp_notebook.diagnosis.collectives import wait_graph
from ddp_notebook.diagnosis.collectives.alignment import call_site
from ddp_notebook.diagnosis.collectives.compare import Difference
from ddp_notebook.diagnosis.collectives.describe import named
from ddp_notebook.diagnosis.collectives.divergence import (
    Branch,
    Classified,
    Divergence,
    classify,
)
from ddp_notebook.diagnosis.collectives.explain import (
    GROUP_OF_EACH_THREAD,
    explain,
    threads_of,
)
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.progress import evidence_of, of_each, stands_still, where_busy, works
from ddp_notebook.diagnosis.setup import torch_errors
from ddp_notebook.model import (
    Activity,
    Category,
    Collective,
    Finding,
    RankReport,
    Ranks,
    Side,
    agree,
    format_ranks,
    name_ranks,
    them,
    verb,
)

MOST_FINDINGS = 5
"""After this many mistakes, further ones are taken to be consequences."""


def conflicts(context: Context) -> Iterator[Finding]:
    """Find mismatched collectives, the earliest first.

    Without any, two threads that use one group at the same time, where nothing moves any more: the
    order in which they write down what they call need not be that in which torch is called.
    """
    explained = _explained(context, [d for d in context.divergences if d.proven])
    yield from explained
    moves = any(report.process.runnable or works(report) for report in context.case.ranks)
    if explained or moves or not context.case.where(Activity.WAITING):
        return
    for group in sorted({record.group for record in context.graph.at.values()}):
        ranks, facts = threads_of(context, group)
        if facts:
            yield Finding(
                Category.MISMATCHED_ORDER,
                ranks,
                f"two threads of {verb(ranks, 'use', 'each use')} one group at the same time, so "
                "it is left to chance which collectives meet",
                GROUP_OF_EACH_THREAD,
                context.victims,
                facts,
            )


def out_of_step(context: Context) -> Iterator[Finding]:
    """Where sequences diverge, once ranks are stuck in a collective of that group."""
    graph = context.graph
    groups = {graph.at[rank].group for rank in graph.stuck if rank in graph.at}
    yield from _explained(
        context,
        [d for d in context.divergences if not d.proven and d.alignment.group in groups],
    )


def _explained(context: Context, divergences: list[Divergence]) -> list[Finding]:
    """A finding for each divergence; ranks with the same mistake in one place share one."""
    merged: dict[tuple[Category, str, int], Finding] = {}
    for divergence, classified in _in_each_group(context, divergences):
        finding = explain(context, classified)
        key = finding.category, divergence.alignment.group, divergence.fault.other_at
        first = merged.get(key)
        merged[key] = finding if first is None else _merge(first, finding, divergence)
    return list(merged.values())[:MOST_FINDINGS]


def _in_each_group(
    context: Context, divergences: list[Divergence]
) -> list[tuple[Divergence, Classified]]:
    """What each divergence is; the same one in several groups of one name (dp) is one."""
    found: dict[object, tuple[Divergence, Classified]] = {}
    for divergence in sorted(divergences, key=lambda d: d.issued):
        classified = classify(divergence, context.sources)
        if classified is None:
            continue
        key: object = _at_lines(classified) or (len(found),)
        first = found.get(key)
        if first is not None and _is_elsewhere(first[1], classified):
            found[key] = first[0], _joined_groups(first[1], classified)
        else:
            found[key if first is None else (len(found),)] = divergence, classified
    return list(found.values())


def _at_lines(classified: Classified) -> object:
    """The kind of mistake, and the two calls; None in a group without a name."""
    here = [branch.here for branch in (classified.full, classified.short)]
    if any(record is None or not record.called for record in here) or not classified.records:
        return None
    return (classified.kind, *(r and (r.called, call_site(r)) for r in here))


def _is_elsewhere(one: Classified, other: Classified) -> bool:
    """True where no rank is in both."""
    ranks = ({r for side in classified.sides for r in side.ranks} for classified in (one, other))
    return set.isdisjoint(*ranks)


def _joined_groups(one: Classified, other: Classified) -> Classified:
    def both(mine: Branch, theirs: Branch) -> Branch:
        return replace(mine, ranks=tuple(sorted({*mine.ranks, *theirs.ranks})))

    full, short = both(one.full, other.full), both(one.short, other.short)
    return replace(
        one,
        culprits=tuple(sorted({*one.culprits, *other.culprits})),
        full=full,
        short=short,
        sides=(full, short) if one.sides[0].ranks == one.full.ranks else (short, full),
    )


def _merge(first: Finding, second: Finding, divergence: Divergence) -> Finding:
    ranks = {*first.ranks, *second.ranks}
    sides, others = _joined(first.sides, second.sides), divergence.deviation.others
    if not divergence.deviation.sure and (len(others) == 1 or ranks.isdisjoint(others)):
        ranks.update(rank for one in sides for rank in one.ranks)  # none agree: all are wrong
    return replace(
        first,
        ranks=tuple(sorted(ranks)),
        sides=sides,
        evidence=tuple(dict.fromkeys((*first.evidence, *second.evidence))),
    )


def _joined(first: tuple[Side, ...], second: tuple[Side, ...]) -> tuple[Side, ...]:
    """The sides of two divergences in one place: ranks that called the same are one side."""
    ranks: dict[Side, set[int]] = {}
    for seen in (*first, *second):
        ranks.setdefault(replace(seen, ranks=()), set()).update(seen.ranks)
    return tuple(replace(seen, ranks=tuple(sorted(those))) for seen, those in ranks.items())


def ended_by_conflicts(context: Context) -> Ranks:
    """The ranks whose end is explained by a mismatched collective."""
    ranks: set[int] = set()
    for divergence in context.divergences:
        if divergence.conflict is None or divergence.conflict[1] is Difference.LABEL:
            continue
        slot, sequences = divergence.conflict[0], divergence.alignment.sequences
        there = (rank for rank, sequence in sequences.items() if sequence.end > slot)
        ranks.update(rank for rank in there if context.gone(rank))
    return tuple(sorted(ranks))


# -- refused collectives -----------------------------------------------------------------


# -- late ranks --------------------------------------------------------------------------


def came_too_late(context: Context) -> Iterator[Finding]:
    """Ranks that call a collective only after it has timed out on others.

    Not if a rank failed for another reason, called something else, or left: then time alone does
    not explain it.
    """
    failed = [e for e in context.case.ranks if e.activity is Activity.FAILED]
    if not all(map(torch_errors.is_victim, failed)):
        return
    ends = (context.graph.at.get(e.rank) for e in failed if _timed_out(e))
    waited = [
        record for record in ends if record and not (record.is_point_to_point or record.freed)
    ]
    if not waited:
        return
    first = min(waited, key=lambda each: each.issued_ns)
    # A monitored_barrier has a timeout of its own, which may be shorter than its group's.
    ends_ns = (first.done_ns, first.issued_ns + round(first.limit_s * 1e9) * bool(first.limit_s))
    until_ns = min((ns for ns in ends_ns if ns > first.issued_ns), default=0)
    members = wait_graph.members(context.case, first.group)
    there = {r: wait_graph.at_slot(context.collectives, r, first) for r in members}
    records = {rank: record for rank, record in there.items() if record is not None}
    absent = {rank for rank in members if rank not in records}
    late = tuple(r for r in members if r in absent or records[r].issued_ns > until_ns)
    busy = {e.rank for e in context.case.ranks if works(e)}
    is_same = {record.operation for record in records.values()} == {first.operation}
    if is_same and late and absent <= busy and until_ns:
        yield _too_late(context, first, late, records)


def _timed_out(e: RankReport) -> bool:
    return torch_errors.TIMED_OUT.search(e.error.text) is not None


def _too_late(
    context: Context, first: Collective, late: Ranks, records: Mapping[int, Collective]
) -> Finding:
    others = tuple(rank for rank in records if rank not in late)
    own = first.operation == "monitored_barrier"
    limit = f" of {first.limit_s:g} s" if first.limit_s and not own else ""
    before = set(late) <= set(records)
    called_it = "called" if before else verb(late, "has not called", "have not called")
    return Finding(
        Category.STRAGGLER,
        late,
        f"{called_it} {named(first)} {'only after' if before else 'before'} {name_ranks(others)} "
        f"gave it up: the timeout{limit} was over",
        f"Give {'monitored_barrier' if own else 'init_process_group'} a timeout= longer than the "
        f"slowest rank needs{'' if own else ', or do the slow part before init_process_group'}.",
        others,
        tuple(_call_of(context, first, rank, records.get(rank)) for rank in late),
    )


def _call_of(context: Context, first: Collective, rank: int, own: Collective | None) -> str:
    """When a late rank called it, after what; where it is if it has not called it."""
    if own is None:
        return f"rank {rank} has not called it yet: it is busy{where_busy(context.reports[rank])}"
    before = [record for record in context.collectives.of[rank] if record.number < own.number]
    seconds = (own.issued_ns - first.issued_ns) / 1e9
    after = f", and had called {named(before[-1])} before" if before else ""
    return f"rank {rank} called it {seconds:.1f} s after rank {first.rank}{after}"


def stragglers(context: Context) -> Iterator[Finding]:
    """Ranks that others wait for in collectives, and that are busy, or paused: no mistake."""
    late: dict[int, Collective] = {}
    graph = context.graph
    # Ranks that wait for it directly show what is missing; indirect waiters only if there are none.
    for others in (graph.waits.get, graph.reach):
        seen: set[int] = set()
        for rank, record in sorted(graph.at.items()):
            those = others(rank) or ()
            # Many ranks wait for the same ones, which are one object of the graph's.
            if context.reports[rank].activity is Activity.WAITING and id(those) not in seen:
                seen.add(id(those))
                for other in those:
                    late.setdefault(other, record)
    same: dict[tuple[str, bool], list[RankReport]] = {}
    for rank, record in sorted(late.items()):
        report = context.reports.get(rank)
        paused = report is not None and report.activity is Activity.HELD
        if report is not None and (paused or works(report)):
            same.setdefault((_lacking(record), paused), []).append(report)
    for (what, paused), reports in same.items():
        yield _late(context, reports, what, paused=paused)


def _lacking(record: Collective) -> str:
    """What the rank of `record` waits for."""
    if not record.is_point_to_point:
        return named(record)
    lacks = "recv" if record.operation == "send" else "send"
    return f"the {lacks} that rank {record.rank} waits for in {named(record)}"


def _late(context: Context, reports: list[RankReport], what: str, *, paused: bool) -> Finding:
    ranks = tuple(report.rank for report in reports)
    doings = {_doing(report, paused=paused) for report in reports}
    doing = f"{agree(ranks, 'it is', 'they are')} {min(doings)}"
    if len(doings) > 1:
        doing = "; ".join(f"rank {e.rank} is {_doing(e, paused=paused)}" for e in reports)
    step = f"%ddp_step --ranks {format_ranks(ranks)}"
    return Finding(
        Category.STRAGGLER,
        ranks,
        f"{verb(ranks, 'has', 'have')} not called {what} yet: {doing}",
        step if paused else f"Wait for {them(ranks)}, or interrupt the cell.",
        context.case.waiting,
        of_each({report.rank: evidence_of(report) for report in reports}),
        passing=True,
        commands=(step,) if paused else (),
    )


def _doing(report: RankReport, *, paused: bool) -> str:
    if paused:
        return "paused"
    still = stands_still(report) or not report.path
    at = where_busy(report) if still else f" at {report.path[-1]}"
    return f"busy{at}"
