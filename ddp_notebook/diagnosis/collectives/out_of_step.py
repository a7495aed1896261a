"""Rules: mismatched collectives, ranks that diverge, stop short, are late, or skip a reduction.

Two things are proof. Mismatched records in one slot are a mistake, whatever their outcome. And
ranks that wait for what can no longer arrive are stuck: then the sequences of all ranks show which
diverged from which, and where. Ranks that are merely at different lines prove neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.collectives import wait_graph
from ddp_notebook.diagnosis.collectives.alignment import (
    Alignment,
    Difference,
    MissingBuckets,
    RankSequence,
    call_site,
)
from ddp_notebook.diagnosis.collectives.describe import (
    code,
    fact,
    function_of,
    in_call,
    lacking,
    named,
    nothing_after,
    short_name,
    side,
)
from ddp_notebook.diagnosis.collectives.divergence import (
    Branch,
    Classified,
    Divergence,
    Kind,
    classify,
    is_rebuild,
    missing_from,
)
from ddp_notebook.diagnosis.collectives.explain import (
    decision,
    explain,
    fewer_turns,
    left_by_exit,
    threads_of,
    turn_of,
)
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.deaths import deaths
from ddp_notebook.diagnosis.progress import evidence_of, of_each, stands_still, where_busy, works
from ddp_notebook.diagnosis.setup import torch_errors
from ddp_notebook.diagnosis.source_code.singled_out import singled_out
from ddp_notebook.model import (
    DEFAULT_GROUP,
    Activity,
    Category,
    Collective,
    Finding,
    Part,
    Phase,
    Place,
    RankReport,
    Ranks,
    ReplicaCounts,
    Side,
    by_value,
    format_ranks,
    name_ranks,
)


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
            yield catalogue.finding(
                "mismatched-order.threads", ranks, waiting=context.victims, evidence=facts
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
        if first is not None:
            sides: dict[Side, set[int]] = {}  # ranks that called the same are one side
            for seen in (*first.sides, *finding.sides):
                sides.setdefault(replace(seen, ranks=()), set()).update(seen.ranks)
            ranks, others = {*first.ranks, *finding.ranks}, divergence.deviation.others
            if not divergence.deviation.sure and (len(others) == 1 or ranks.isdisjoint(others)):
                ranks.update(*sides.values())  # none agree: all are wrong
            finding = replace(
                first,
                ranks=tuple(sorted(ranks)),
                sides=tuple(replace(seen, ranks=tuple(sorted(r))) for seen, r in sides.items()),
                evidence=tuple(dict.fromkeys((*first.evidence, *finding.evidence))),
            )
        merged[key] = finding
    return list(merged.values())[:5]  # after so many mistakes, further ones are consequences


def _in_each_group(
    context: Context, divergences: list[Divergence]
) -> list[tuple[Divergence, Classified]]:
    """Classify each divergence; the same one in several groups of one name (dp) is one."""
    found: dict[object, tuple[Divergence, Classified]] = {}
    for divergence in sorted(divergences, key=lambda d: d.issued):
        classified = classify(divergence, context.sources)
        if classified is None:
            continue
        here = classified.full.here, classified.short.here
        alone: object = (len(found),)
        key = alone
        if all(record is None or record.called for record in here):  # else a group is by itself
            key = classified.kind, *(r and (r.called, call_site(r)) for r in here)
        if key not in found:
            found[key] = divergence, classified
        elif both := _of_two_groups(found[key][1], classified):
            found[key] = found[key][0], both
        else:
            found[alone] = divergence, classified
    return list(found.values())


def _of_two_groups(one: Classified, other: Classified) -> Classified | None:
    """Return one mistake that was made in two groups; None where a rank is in both of them."""
    mine, theirs = ({*mistake.full.ranks, *mistake.short.ranks} for mistake in (one, other))
    if mine & theirs:
        return None
    full, short = (
        replace(branch, ranks=tuple(sorted((*branch.ranks, *further.ranks))))
        for branch, further in ((one.full, other.full), (one.short, other.short))
    )
    return replace(
        one,
        culprits=tuple(sorted({*one.culprits, *other.culprits})),
        full=full,
        short=short,
        sides=(full, short) if one.sides[0].ranks == one.full.ranks else (short, full),
    )


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


# -- late ranks --------------------------------------------------------------------------


def came_too_late(context: Context) -> Iterator[Finding]:
    """Ranks that call a collective only after it has timed out on others.

    Not if a rank failed for another reason, called something else, or left: then time alone does
    not explain it.
    """
    failed = [e for e in context.case.ranks if e.activity is Activity.FAILED]
    if not all(map(torch_errors.is_victim, failed)):
        return
    out_of_time = [e for e in failed if torch_errors.TIMED_OUT.search(e.error.text)]
    ends = [context.graph.at[e.rank] for e in out_of_time if e.rank in context.graph.at]
    waited = [end for end in ends if not end.is_point_to_point and not end.call.freed]
    if not waited:
        return
    first = min(waited, key=lambda each: each.issued_ns)
    # A monitored_barrier has a timeout of its own, which may be shorter than its group's.
    limit_ns = first.issued_ns + round(first.call.limit_s * 1e9)
    until_ns = min((ns for ns in (first.done_ns, limit_ns) if ns > first.issued_ns), default=0)
    members = wait_graph.members(context.case, first.group)
    records = wait_graph.all_at_slot(context.collectives, first)
    absent = set(members) - records.keys()
    late = tuple(r for r in members if r in absent or records[r].issued_ns > until_ns)
    busy = {e.rank for e in context.case.ranks if works(e)}
    # Time must explain it alone: who has come called the same, and who has not is busy, so that it
    # may still come. A rank that left, or called something else, would not have come in any time.
    is_same = {record.operation for record in records.values()} == {first.operation}
    if not (is_same and late and absent <= busy and until_ns):
        return
    others = tuple(rank for rank in records if rank not in late)
    maker, limit_s = "monitored_barrier", 0.0
    if first.operation != "monitored_barrier":  # which has a timeout of its own
        maker = "init_process_group" if first.group == DEFAULT_GROUP else "new_group"
        limit_s = first.call.limit_s
    facts = []
    for rank in late:
        own = records.get(rank)
        if own is None:
            where = where_busy(context.reports[rank])
            facts.append(
                catalogue.words("straggler.not-called-in-time.fact", ranks=(rank,), where=where)
            )
            continue
        before = [record for record in context.collectives.of[rank] if record.number < own.number]
        facts.append(
            catalogue.words(
                "straggler.collective-too-late.fact",
                ranks=(rank,),
                late_s=(own.issued_ns - first.issued_ns) / 1e9,
                first=(first.rank,),
                before=named(before[-1]) if before else "",
            )
        )
    yield catalogue.finding(
        "straggler.collective-not-in-time"
        if absent.intersection(late)
        else "straggler.collective-too-late",
        late,
        waiting=others,
        evidence=(f"{name_ranks((first.rank,))}: {named(first)}", *facts),
        call=short_name(first),
        limit_s=limit_s,
        maker=maker,
    )


def stragglers(context: Context) -> Iterator[Finding]:
    """Ranks that others wait for in collectives, and that are busy, or paused: no mistake."""
    late: dict[int, Collective] = {}
    graph = context.graph
    # Ranks that wait for it directly show what is missing; indirect waiters only if there are none.
    for others in (graph.waits.__getitem__, graph.reach):
        seen: set[int] = set()
        for rank, record in sorted(graph.at.items()):
            those = others(rank)
            # Many ranks wait for the same ones, which are one object of the graph's.
            if context.reports[rank].activity is Activity.WAITING and id(those) not in seen:
                seen.add(id(those))
                for other in those:
                    late.setdefault(other, record)
    same: dict[tuple[str, bool], list[RankReport]] = {}
    for rank in sorted(late.keys() & context.reports.keys()):
        report = context.reports[rank]
        paused = report.activity is Activity.HELD
        if paused or works(report):
            same.setdefault((lacking(late[rank]), paused), []).append(report)
    for (what, _), reports in same.items():
        yield _late(context, what, reports)


def _late(context: Context, what: str, reports: list[RankReport]) -> Finding:
    """The finding of ranks that all are paused, or all are busy, before `what`."""
    ranks = tuple(report.rank for report in reports)
    doings: dict[int, str] = {}
    for e in reports:
        where = where_busy(e) if not e.path else f" at {e.path[-1]}"
        doings[e.rank] = f"busy{', but uses no CPU time' if stands_still(e) else where}"
    evidence = of_each({report.rank: evidence_of(report) for report in reports})
    if reports[0].activity is Activity.HELD:
        return catalogue.finding(
            "straggler.paused-before",
            ranks,
            waiting=context.case.waiting,
            evidence=evidence,
            passing=True,
            what=what,
            set_of_ranks=format_ranks(ranks),
        )
    if len(set(doings.values())) > 1:
        evidence = (*(f"rank {rank}: {doing}" for rank, doing in doings.items()), *evidence)
        doings = {ranks[0]: "busy"}
    return catalogue.finding(
        "straggler.not-called-yet",
        ranks,
        waiting=context.case.waiting,
        evidence=evidence,
        passing=True,
        what=what,
        doing=doings[ranks[0]],
    )


# -- stopped short -----------------------------------------------------------------------
# Rules about ranks that finished too early, or run nothing, while others wait.


def group_destroyed(
    context: Context, ranks: Ranks, ahead: Ranks, record: Collective, evidence: str
) -> Finding:
    """Make the finding of ranks that left their group while others wait for them in a call."""
    return catalogue.finding(
        "missing-destroy.destroyed",
        ranks,
        waiting=context.victims,
        evidence=(evidence, catalogue.words("missing-destroy.destroyed.fact", ranks=ranks)),
        inside=in_call(ahead, short_name(record), context.reports),
        missing=lacking(record),
    )


def stopped_short(context: Context) -> Iterator[Finding]:
    """Ranks that have finished, or run nothing, while others wait for them in a collective."""
    seen: set[tuple[str, int]] = set()
    diverged = {divergence.alignment.group for divergence in context.divergences}
    for rank in context.graph.stuck:
        record = context.graph.at.get(rank)
        if record is None or record.is_point_to_point:
            continue
        # Who diverged from whom before explains who is missing now.
        if record.group in diverged or (record.group, record.slot) in seen:
            continue
        seen.add((record.group, record.slot))
        # A rank that has another collective in that place did not end before it.
        sequences = context.alignments[record.group].sequences
        absent = tuple(
            other
            for other in context.graph.waits[rank]
            if other not in sequences or sequences[other].end <= record.slot
        )
        reports = [context.reports[other] for other in absent if other in context.reports]
        idle = [e for e in reports if e.activity is Activity.IDLE and e.run != context.run]
        if ranks := tuple(e.rank for e in idle):
            yield catalogue.finding(
                "missing-rank.idle",
                ranks,
                waiting=context.victims,
                evidence=(
                    catalogue.words("missing-rank.idle.fact", ranks=ranks),
                    context.standing(context.graph.stuck),
                ),
                standing=context.briefly(context.graph.stuck),
            )
        if short := tuple(other for other in absent if context.finished(other)):
            yield _stopped(context, short, record)


def _stopped(context: Context, ranks: Ranks, record: Collective) -> Finding:
    """Finished ranks lack a collective that others are in: whose mistake is it?"""
    alignment, sources = context.alignments[record.group], context.sources
    sequence = alignment.sequences.get(ranks[0]) or RankSequence(ranks[0], 0, (), ())
    # They wait in the last of several buckets, say: what lacks begins where the short one ends.
    record = alignment.sequences[record.rank].at(sequence.end) or record
    # Ahead are those that have the same there: another collective in that place does not count.
    there = ((rank, s.at(record.slot)) for rank, s in sorted(alignment.sequences.items()))
    site = call_site(record)
    ahead = tuple(r for r, e in there if e and e.phase is not Phase.HELD and call_site(e) == site)
    full = Branch(ahead, alignment.sequences[record.rank], record.slot)
    short = Branch(ranks, sequence, sequence.end)
    if all(context.reports[rank].activity is Activity.DEAD for rank in ranks):
        return _left_early(context, ranks, ahead, record)
    condition = sources.condition(record)
    # Of a loop's backward pass: an epoch may have none of it on a rank without data.
    in_step = record.part is Part.BACKWARD and sources.in_a_loop(record) is not False
    culprits, kind = ranks, Kind.SOME_BUCKETS
    if short.knows(record) or (condition is None and (in_step or is_rebuild(full, record))):
        if missing_from(full, short) is not MissingBuckets.SOME:
            return _one_step_less(context, alignment, full, short, record)
    else:
        # Fewer that left than wait: those that left are wrong. As many: also they, if the code
        # brings every rank to the call and no test stands on the way. Else the call itself is
        # conditional, and who made it came alone; an `except` is no such test, for nobody writes it
        # to choose ranks.
        untested = condition is None or condition.handles
        always_reached = untested and sources.knows(record)
        outvoted = len(ranks) < len(ahead) or (len(ranks) == len(ahead) and always_reached)
        if outvoted and untested:
            way = (condition.line,) if condition is not None else ()
            return _left_early(context, ranks, ahead, record, way)
        culprits, kind = ranks if outvoted else ahead, Kind.ONE_BRANCH_ONLY
    return explain(context, Classified(kind, culprits, full, short, (full, short), (record,)))


def _one_step_less(
    context: Context, alignment: Alignment, full: Branch, short: Branch, record: Collective
) -> Finding:
    """One iteration less of a loop: they have called it before."""
    again = context.sources.tries_again(record)
    turn = turn_of(context, full, short, record, again)
    # Of two equal sides the one that has gone round once less is wrong: loops end where data end,
    # and nobody makes up a batch. Not where the code calls again after an error: then the side with
    # one call more is the one that had the error.
    outvoted = len(full.ranks) < len(short.ranks) or (again and len(full.ranks) == len(short.ranks))
    culprits = full.ranks if outvoted else short.ranks
    counts = {}
    for rank in sorted((*full.ranks[:2], *short.ranks[:2])):
        sequence = alignment.sequences.get(rank)
        sites = map(call_site, sequence.records if sequence is not None else ())
        counts[rank] = [*sites].count(call_site(record))
    called = (
        catalogue.words(
            "uneven-inputs.left-loop.times", ranks=ranks, call=function_of(record), count=count
        )
        for ranks, count in by_value(counts)
    )
    left = turn.way is not None and turn.way.leaves and not turn.skipped and not outvoted
    finding = fewer_turns(context, turn, full, short, record, culprits=culprits, left=bool(left))
    return replace(
        finding,
        evidence=(fact(full.ranks, record), *called, *finding.evidence),
        sides=(side(full.ranks, record), side(short.ranks, None)),
        decides=decision(turn.way),
    )


def _left_early(
    context: Context, short: Ranks, ahead: Ranks, record: Collective, way: tuple[str, ...] = ()
) -> Finding:
    """They left with something still to do, on which no condition stands; `way` is an `except`."""
    dead = [context.reports[rank] for rank in short if context.reports[rank].end.code is not None]
    if len(dead) == len(short):
        (finding,) = deaths(
            context.case,
            dead,
            context.victims,
            meanwhile=f" while {in_call(ahead, named(record), context.reports)}",
            facts=(fact(ahead, record),),
        )
        return finding
    by_exit = left_by_exit(context, short, ahead, record)
    if by_exit is not None:
        return by_exit
    if all(context.destroyed(rank) for rank in short):
        return group_destroyed(context, short, ahead, record, fact(ahead, record))
    return catalogue.finding(
        "early-exit.before-call",
        short,
        waiting=context.victims,
        evidence=(fact(ahead, record), nothing_after(short, record.slot - 1), *way),
        sides=(side(ahead, record), side(short, None)),
        inside=in_call(ahead, short_name(record), context.reports),
        function=function_of(record),
    )


# -- unreduced gradients ----------------------------------------------------------------
# Gradients that some ranks reduce and another rank does not.


def unreduced_gradients(context: Context) -> Iterator[Finding]:
    """A rank skips the reduction of a backward in which the others wait, or were refused.

    The counters of its DistributedDataParallel objects tell why.
    """
    inside = []  # ranks that wait in a forward or backward pass of DDP, or were refused there
    for e in context.case.ranks:
        records = context.collectives.pending(e.rank) if e.activity is Activity.WAITING else ()
        if e.activity is Activity.FAILED:
            last = context.collectives.of.get(e.rank, ())[-1:]
            records = tuple(record for record in last if record.phase is Phase.REFUSED)
        if any(record.part in (Part.BACKWARD, Part.FORWARD) for record in records):
            inside.append(e)
    if not inside:
        return
    first, waiting = inside[0], tuple(e.rank for e in inside)
    theirs = {replica.key: replica for replica in first.parts.replicas}
    same: dict[_Reason, dict[int, tuple[str, ...]]] = {}
    for e in context.case.ranks:
        own = [replica for replica in e.parts.replicas if replica.key in theirs]
        for mine in own if e.rank not in waiting else ():
            reason = _difference(mine, theirs[mine.key])
            if reason is not None:
                same.setdefault(reason, {})[e.rank] = tuple(
                    f"rank {rank}: {c.forwards} forwards through {reason.model}, "
                    f"{c.no_sync_forwards} of them under `no_sync()`, {c.bypasses} around it, "
                    f"{c.steps} steps"
                    for rank, c in ((e.rank, mine), (first.rank, theirs[mine.key]))
                )
                break
    at = (f"backward: {first.path[-1]}",) if first.path else ()
    facts = {r: f for why, of in same.items() if why.category is _NO_SYNC for r, f in of.items()}
    under = tuple(sorted(facts))
    culprits = _whose_no_sync(context, waiting, under)
    if culprits:
        yield catalogue.finding(
            "no-sync-misuse.off-some" if culprits == waiting else "no-sync-misuse.either",
            culprits,
            waiting=waiting,
            evidence=(*at, *facts[under[0]]),
            under=under,
            reducing=waiting,
        )
        return
    for why, of in same.items():
        lines = dict.fromkeys(line for lines in of.values() for line in lines)
        place = (f"{why.place}: {why.place.text}",) if why.place is not None else ()
        yield catalogue.finding(
            {
                Category.UNUSED_PARAMS: "unused-params.unready",
                Category.NO_SYNC_MISUSE: "no-sync-misuse.on-some",
                Category.DDP_BYPASS: "ddp-bypass.on-some",
            }[why.category],
            tuple(of),
            waiting=waiting,
            evidence=(*place, *lines),
            model=why.model,
            names=why.names,
        )


def _whose_no_sync(context: Context, waiting: Ranks, under: Ranks) -> Ranks:
    """Return the culprits where not simply those `under` no_sync are wrong; else no rank.

    Where most ranks are under it, those that wait reduce in other steps than most. As many ranks
    on both sides leave it open, unless the code, or a step made with gradients of no_sync, tells.
    """
    if len(under) > len(waiting):
        return waiting
    # A tie is decided where a rank has made a step with gradients that were not reduced: then its
    # no_sync covered one backward too many, and the side that reduces is right.
    stepped = any(
        replica.local_steps
        for report in context.case.ranks
        if report.rank not in waiting
        for replica in report.parts.replicas
    )
    ranks = tuple(sorted((*waiting, *under)))
    even = len(under) == len(waiting) and not stepped
    return ranks if even and under != singled_out(context.sources, ("no_sync",), ranks) else ()


_NO_SYNC = Category.NO_SYNC_MISUSE


@dataclass(frozen=True)
class _Reason:
    """Why a rank does not reduce what others reduce."""

    category: Category
    model: str
    place: Place | None
    names: tuple[str, ...] = ()
    """The parameters without a gradient."""


def _difference(mine: ReplicaCounts, theirs: ReplicaCounts) -> _Reason | None:
    model = code(mine.name) if mine.name else f"the DDP model of {code(mine.type)}"
    if mine.unready_steps and not theirs.unready_steps:
        names = [*map(code, mine.unready)] or ["some parameters"]
        if len(names) > 4:
            names = [*names[:3], f"{len(names) - 3} more"]
        return _Reason(Category.UNUSED_PARAMS, model, mine.bad_place, tuple(names))
    # Counters are of this moment, and a rank that is a step behind has less of everything: it is
    # late, and makes no mistake. So each story below needs that it has come as far as the other
    # rank: the backward is begun, after as many forwards, of which fewer are to be reduced.
    fewer = mine.forwards - mine.no_sync_forwards < theirs.forwards - theirs.no_sync_forwards
    if not fewer or mine.backwards < theirs.backwards:
        return None
    if mine.no_sync_forwards > theirs.no_sync_forwards and mine.forwards >= theirs.forwards:
        return _Reason(_NO_SYNC, model, mine.local_place)
    if mine.bypasses > theirs.bypasses and mine.forwards + mine.bypasses >= theirs.forwards:
        return _Reason(Category.DDP_BYPASS, model, mine.bypass_place)
    return None
