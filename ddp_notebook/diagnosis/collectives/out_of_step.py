"""Rules: mismatched collectives, ranks that diverge, stop short, are late, or skip a reduction.

Two things are proof. Mismatched records in one slot are a mistake, whatever their outcome. And
ranks that wait for what can no longer arrive are stuck: then the sequences of all ranks show which
diverged from which, and where. Ranks that are merely at different lines prove neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ddp_notebook.diagnosis.collectives import wait_graph
from ddp_notebook.diagnosis.collectives.alignment import (
    Alignment,
    Difference,
    MissingBuckets,
    RankSequence,
    call_site,
)
from ddp_notebook.diagnosis.collectives.describe import fact, lacking, named, nothing_after, side
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
    GROUP_OF_EACH_THREAD,
    decision,
    explain,
    left_by_exit,
    threads_of,
    turn_of,
)
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.deaths import deaths
from ddp_notebook.diagnosis.progress import evidence_of, of_each, stands_still, where_busy, works
from ddp_notebook.diagnosis.setup import torch_errors
from ddp_notebook.diagnosis.source_code.singled_out import singled_out
from ddp_notebook.diagnosis.training.replicas import some
from ddp_notebook.model import (
    DEFAULT_GROUP,
    Activity,
    Category,
    Collective,
    Finding,
    Part,
    Phase,
    RankReport,
    Ranks,
    ReplicaCounts,
    Side,
    agree,
    counted,
    format_ranks,
    in_brackets,
    name_ranks,
    them,
    verb,
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
    limit, remedy = "", "Give monitored_barrier a timeout= longer than the slowest rank needs."
    if first.operation != "monitored_barrier":  # which has a timeout of its own
        maker = "init_process_group" if first.group == DEFAULT_GROUP else "new_group"
        limit = f" of {first.call.limit_s:g} s" if first.call.limit_s else ""
        remedy = (
            f"Give {maker} a timeout= longer than the slowest rank needs, or do the slow part "
            f"before {maker}."
        )
    called_it, when = "called", "only after"
    if absent.intersection(late):
        called_it, when = verb(late, "has not called", "have not called"), "before"
    facts = []
    for rank in late:
        own = records.get(rank)
        if own is None:
            doing = where_busy(context.reports[rank])
            facts.append(f"rank {rank} has not called it yet: it is busy{doing}")
            continue
        seconds = (own.issued_ns - first.issued_ns) / 1e9
        before = [record for record in context.collectives.of[rank] if record.number < own.number]
        after = f", and had called {named(before[-1])} before" if before else ""
        facts.append(f"rank {rank} called it {seconds:.1f} s after rank {first.rank}{after}")
    yield Finding(
        Category.STRAGGLER,
        late,
        f"{called_it} {named(first)} {when} {name_ranks(others)} gave it up: the timeout{limit} "
        "was over",
        remedy,
        others,
        tuple(facts),
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
        still = stands_still(e) or not e.path
        doings[e.rank] = f"busy{where_busy(e) if still else f' at {e.path[-1]}'}"
    commands: tuple[str, ...] = ()
    remedy = f"Wait for {them(ranks)}, or interrupt the cell."
    if reports[0].activity is Activity.HELD:
        remedy = f"%ddp_step --ranks {format_ranks(ranks)}"
        doings, commands = dict.fromkeys(ranks, "paused"), (remedy,)
    doing = f"{agree(ranks, 'it is', 'they are')} {doings[ranks[0]]}"
    if len(set(doings.values())) > 1:
        doing = "; ".join(f"rank {rank} is {own}" for rank, own in doings.items())
    return Finding(
        Category.STRAGGLER,
        ranks,
        f"{verb(ranks, 'has', 'have')} not called {what} yet: {doing}",
        remedy,
        context.case.waiting,
        of_each({report.rank: evidence_of(report) for report in reports}),
        passing=True,
        commands=commands,
    )


# -- stopped short -----------------------------------------------------------------------
# Rules about ranks that finished too early, or run nothing, while others wait.


LEAVE_TOGETHER = (
    "Let every rank finish before one leaves: dist.barrier() before destroy_process_group()."
)


def group_destroyed(context: Context, ranks: Ranks, waiters: str, evidence: str) -> Finding:
    """Make the finding of ranks that left their group while others wait for them in a call."""
    return Finding(
        Category.MISSING_DESTROY,
        ranks,
        f"{name_ranks(ranks)} destroyed the group, or ended, while {waiters}",
        LEAVE_TOGETHER,
        context.victims,
        (evidence, f"{name_ranks(ranks)}: no process group any more"),
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
            does = verb(ranks, "does", "do")
            yield Finding(
                Category.MISSING_RANK,
                ranks,
                f"{does} not run this code; {context.standing(context.graph.stuck)}",
                "Run it on every rank of the group (%%ddp without --ranks), or use a group of the "
                "ranks that run it.",
                context.victims,
                tuple(f"rank {other} runs nothing" for other in ranks),
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
    are, have = verb(full.ranks, "is", "are"), verb(short.ranks, "has", "have")
    if turn.more_names:
        lack = verb(short.ranks, "does not have", "do not have")
        cause = f"{are} in {named(record)}, a name that {lack}: they have left the loop"
    elif not turn.is_left_out:
        cause = f"{have} left the loop; {are} once more in {named(record)}"
    elif outvoted:
        cause = (
            f"{are} once more in {named(record)} than the others, who have finished: it was "
            f"called again in some iteration{turn.because}"
        )
    elif turn.way and turn.way.leaves and not turn.skipped:
        cause = f"{have} left the loop{turn.because} and finished, while {are} in {named(record)}"
    else:
        cause = (
            f"{have} skipped {named(record)} in some iteration{turn.because} and finished, while "
            f"{are} there"
        )
    counts = []
    for rank in sorted((*full.ranks[:2], *short.ranks[:2])):
        sequence = alignment.sequences.get(rank)
        sites = map(call_site, sequence.records if sequence is not None else ())
        counts.append(f"rank {rank}: {counted([*sites].count(call_site(record)), 'time')} there")
    return Finding(
        turn.category,
        culprits,
        cause,
        turn.remedy,
        context.victims,
        (fact(full.ranks, record), *counts, *turn.facts),
        sides=(side(full.ranks, record), side(short.ranks, None)),
        decides=decision(turn.way),
    )


def _left_early(
    context: Context, short: Ranks, ahead: Ranks, record: Collective, way: tuple[str, ...] = ()
) -> Finding:
    """They left with something still to do, on which no condition stands; `way` is an `except`."""
    waiters = f"{verb(ahead, 'is', 'are')} in {named(record)}"
    dead = [context.reports[rank] for rank in short if context.reports[rank].end.code is not None]
    if len(dead) == len(short):
        (finding,) = deaths(
            context.case,
            dead,
            context.victims,
            meanwhile=f" while {waiters}",
            facts=(fact(ahead, record),),
        )
        return finding
    by_exit = left_by_exit(context, short, ahead, record)
    if by_exit is not None:
        return by_exit
    if all(context.destroyed(rank) for rank in short):
        return group_destroyed(context, short, waiters, fact(ahead, record))
    return Finding(
        Category.EARLY_EXIT,
        short,
        f"{verb(short, 'has', 'have')} finished, while {waiters}",
        "Every rank must take part in every collective: see where the others wait.",
        context.victims,
        (fact(ahead, record), nothing_after(short, record.slot - 1), *way),
        sides=(side(ahead, record), side(short, None)),
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
                    f"rank {rank}: {c.forwards} forwards through the wrapper, {c.no_sync_forwards} "
                    f"of them under no_sync, {c.bypasses} around it, {c.steps} steps"
                    for rank, c in ((e.rank, mine), (first.rank, theirs[mine.key]))
                )
                break
    no_sync = {reason: of for reason, of in same.items() if reason[0] is Category.NO_SYNC_MISUSE}
    facts = {rank: lines for of in no_sync.values() for rank, lines in of.items()}
    others = tuple(sorted(facts))
    culprits, cause = _whose_no_sync(context, first, waiting, others)
    if culprits:
        category, _, remedy = next(iter(no_sync))
        yield Finding(category, culprits, cause, remedy, waiting, facts[others[0]])
        return
    for (category, cause, remedy), of in same.items():
        lines = dict.fromkeys(line for lines in of.values() for line in lines)
        yield Finding(category, tuple(of), cause, remedy, waiting, tuple(lines))


def _whose_no_sync(
    context: Context, e: RankReport, waiting: Ranks, under: Ranks
) -> tuple[Ranks, str]:
    """Return culprits and cause where not simply those `under` no_sync are wrong; else no rank.

    Where most ranks are under it, those that wait reduce in other steps than most. As many ranks
    on both sides leave it open, unless the code, or a step made with gradients of no_sync, tells.
    """
    at = f" at {e.path[-1]}" if e.path else ""
    if len(under) > len(waiting):
        return waiting, (
            f"{verb(waiting, 'reduces', 'reduce')} gradients in a backward{at} that "
            f"{name_ranks(under)} ran under no_sync"
        )
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
    if not even or under == singled_out(context.sources, ("no_sync",), ranks):
        return (), ""
    return ranks, (
        f"differ in a backward{at}: {name_ranks(waiting)} {verb(waiting, 'reduces', 'reduce')} "
        f"gradients, {name_ranks(under)} {verb(under, 'runs', 'run')} it under no_sync; which of "
        "them is meant cannot be told"
    )


_Reason = tuple[Category, str, str]
"""Why a rank does not reduce what others reduce: the mistake, the cause, the remedy."""


def _difference(mine: ReplicaCounts, theirs: ReplicaCounts) -> _Reason | None:
    title = mine.name or f"the DistributedDataParallel of {mine.type}"
    if mine.unready_steps and not theirs.unready_steps:
        names = some(mine.unready or ("some parameters",))
        return (
            Category.UNUSED_PARAMS,
            f"{names} of {title} got no gradient there, so a bucket is not reduced that the "
            f"others reduce{in_brackets(mine.bad_place)}",
            "Use the parameters on every rank in every step, or give DistributedDataParallel "
            "find_unused_parameters=True.",
        )
    # Counters are of this moment, and a rank that is a step behind has less of everything: it is
    # late, and makes no mistake. So each story below needs that it has come as far as the other
    # rank: the backward is begun, after as many forwards, of which fewer are to be reduced.
    fewer = mine.forwards - mine.no_sync_forwards < theirs.forwards - theirs.no_sync_forwards
    if not fewer or mine.backwards < theirs.backwards:
        return None
    if mine.no_sync_forwards > theirs.no_sync_forwards and mine.forwards >= theirs.forwards:
        return (
            Category.NO_SYNC_MISUSE,
            f"a backward of {title} runs there under no_sync, in which the other ranks "
            f"reduce{in_brackets(mine.local_place)}",
            "Enter no_sync on all ranks in the same steps, or on none.",
        )
    if mine.bypasses > theirs.bypasses and mine.forwards + mine.bypasses >= theirs.forwards:
        return (
            Category.DDP_BYPASS,
            f"the forward there calls the module inside {title}, and the others' call the "
            f"wrapper{in_brackets(mine.bypass_place)}",
            "Call the DistributedDataParallel object itself on every rank.",
        )
    return None
