"""Rules about ranks that finished too early, or run nothing, while others wait."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_notebook.diagnosis.collectives.alignment import Alignment, RankSequence, call_site
from ddp_notebook.diagnosis.collectives.buckets import MissingBuckets
from ddp_notebook.diagnosis.collectives.describe import fact, named, nothing_after, side
from ddp_notebook.diagnosis.collectives.divergence import (
    Branch,
    Classified,
    Kind,
    is_rebuild,
    missing_from,
)
from ddp_notebook.diagnosis.collectives.explain import (
    SAME_CLOSURE,
    SAME_NAMES,
    TOGETHER,
    UNEVEN_REMEDY,
    explain,
    has_begun_turn,
    has_more_names,
    left_by_exit,
    skipped_backward,
)
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.deaths import deaths
from ddp_notebook.diagnosis.source_code.sources import Condition
from ddp_notebook.model import (
    Activity,
    Category,
    Collective,
    Finding,
    Part,
    Phase,
    Ranks,
    Side,
    counted,
    name_ranks,
    verb,
)

LEAVE_TOGETHER = (
    "Let every rank finish before one leaves: dist.barrier() before destroy_process_group()."
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
        absent = tuple(r for r in context.graph.waits[rank] if _has_nothing(context, r, record))
        runs_nothing = tuple(r for r in absent if _runs_nothing(context, r))
        if runs_nothing:
            yield _does_not_run(context, runs_nothing)
        short = tuple(r for r in absent if context.finished(r))
        if short:
            yield _stopped(context, short, record)


def _has_nothing(context: Context, rank: int, record: Collective) -> bool:
    """True when a rank ended before `record`; one with another collective there did not."""
    alignment = context.alignments.get(record.group)
    sequence = alignment.sequences.get(rank) if alignment else None
    return sequence is None or sequence.end <= record.slot


def _runs_nothing(context: Context, rank: int) -> bool:
    report = context.reports.get(rank)
    return report is not None and report.activity is Activity.IDLE and report.run != context.run


def _does_not_run(context: Context, ranks: Ranks) -> Finding:
    return Finding(
        Category.MISSING_RANK,
        ranks,
        f"{verb(ranks, 'does', 'do')} not run this code; {context.standing(context.graph.stuck)}",
        "Run it on every rank of the group (%%ddp without --ranks), or use a group of the "
        "ranks that run it.",
        context.victims,
        tuple(f"rank {rank} runs nothing" for rank in ranks),
    )


def _stopped(context: Context, ranks: Ranks, record: Collective) -> Finding:
    """Finished ranks lack a collective that others are in: whose mistake is it?"""
    alignment = context.alignments[record.group]
    sequence = alignment.sequences.get(ranks[0]) or RankSequence(ranks[0], 0, (), ())
    # They wait in the last of several buckets, say: what lacks begins where the short one ends.
    record = alignment.sequences[record.rank].at(sequence.end) or record
    ahead = tuple(r for r, s in sorted(alignment.sequences.items()) if _issued(s, record))
    full = Branch(ahead, alignment.sequences[record.rank], record.slot)
    short = Branch(ranks, sequence, sequence.end)
    if all(context.reports[rank].activity is Activity.DEAD for rank in ranks):
        return _left_early(context, ranks, ahead, record)
    condition = context.sources.condition(record)
    in_step = _is_backward(context, record) or is_rebuild(full, record)
    if short.knows(record) or (condition is None and in_step):
        if missing_from(full, short) is MissingBuckets.SOME:
            return _of_kind(context, Kind.SOME_BUCKETS, ranks, full, short, record)
        return _one_step_less(context, alignment, full, short, record)
    always_reached = condition is None and context.sources.knows(record)
    outvoted = len(ranks) < len(ahead) or (len(ranks) == len(ahead) and always_reached)
    if outvoted and condition is None:
        return _left_early(context, ranks, ahead, record)
    culprits = ranks if outvoted else ahead
    return _of_kind(context, Kind.ONE_BRANCH_ONLY, culprits, full, short, record)


def _of_kind(
    context: Context, kind: Kind, culprits: Ranks, full: Branch, short: Branch, record: Collective
) -> Finding:
    return explain(context, Classified(kind, culprits, full, short, (full, short), (record,)))


def _is_backward(context: Context, record: Collective) -> bool:
    """True of a backward pass in a loop: an epoch may have none of it on a rank without data."""
    return record.part is Part.BACKWARD and context.sources.in_a_loop(record) is not False


def _issued(sequence: RankSequence, record: Collective) -> bool:
    """True when it has the same there: another collective in that place does not count."""
    own = sequence.at(record.slot)
    return own is not None and own.phase is not Phase.HELD and call_site(own) == call_site(record)


def _one_step_less(
    context: Context, alignment: Alignment, full: Branch, short: Branch, record: Collective
) -> Finding:
    """One iteration less of a loop: they have called it before."""
    some = sorted((*full.ranks[:2], *short.ranks[:2]))
    facts = (
        fact(full.ranks, record),
        *(
            f"rank {rank}: {counted(_count(alignment, rank, record), 'time')} there"
            for rank in some
        ),
    )
    sides = (side(full.ranks, record), side(short.ranks, None))
    again = context.sources.tries_again(record)
    outvoted = len(full.ranks) < len(short.ranks) or (again and len(full.ranks) == len(short.ranks))
    culprits = full.ranks if outvoted else short.ranks
    closure = context.sources.by_optimizer(record)
    way = again or closure or context.sources.way_around(record)
    begun = has_begun_turn(context, full, record)
    if begun and way is None:
        way = context.sources.condition(record, full.last)
    are, have = verb(full.ranks, "is", "are"), verb(short.ranks, "has", "have")
    names = has_more_names(full, short, record)
    skipped = skipped_backward(context, short, full, record)
    if names or not (way or skipped or begun):
        cause = f"{have} left the loop; {are} once more in {named(record)}"
        if names:
            lack = verb(short.ranks, "does not have", "do not have")
            cause = f"{are} in {named(record)}, a name that {lack}: they have left the loop"
        return Finding(
            Category.DIVERGENT_CONTROL_FLOW if names else Category.UNEVEN_INPUTS,
            culprits,
            cause,
            SAME_NAMES if names else UNEVEN_REMEDY,
            context.victims,
            facts,
            sides=sides,
        )
    why = f" ({way.quoted})" if way else ""
    cause = f"{have} skipped {named(record)} in some iteration{why} and finished, while {are} there"
    if way and way.leaves and not skipped:
        cause = f"{have} left the loop{why} and finished, while {are} in {named(record)}"
    if culprits == full.ranks:
        cause = (
            f"{are} once more in {named(record)} than the others, who have finished: it was "
            f"called again in some iteration{why}"
        )
    return Finding(
        Category.DIVERGENT_CONTROL_FLOW,
        culprits,
        cause,
        SAME_CLOSURE if closure else TOGETHER,
        context.victims,
        (*facts, *skipped, *((f"{way.place}: {way.place.text}",) if way else ())),
        sides=(sides[0], _shorter_side(short, culprits, way)),
    )


def _shorter_side(short: Branch, culprits: Ranks, way: Condition | None) -> Side:
    """What ranks called that ended earlier; if that is their mistake, also where they parted."""
    if way is None or culprits != short.ranks:
        return side(short.ranks, None)
    return side(short.ranks, None, way.place)


def _count(alignment: Alignment, rank: int, record: Collective) -> int:
    sequence = alignment.sequences.get(rank)
    if sequence is None:
        return 0
    return sum(call_site(other) == call_site(record) for other in sequence.records)


def _left_early(context: Context, short: Ranks, ahead: Ranks, record: Collective) -> Finding:
    """They left with something still to do, on which no condition stands."""
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
        return Finding(
            Category.MISSING_DESTROY,
            short,
            f"{name_ranks(short)} destroyed the group, or ended, while {waiters}",
            LEAVE_TOGETHER,
            context.victims,
            (fact(ahead, record), f"{name_ranks(short)}: no process group any more"),
        )
    return Finding(
        Category.EARLY_EXIT,
        short,
        f"{verb(short, 'has', 'have')} finished, while {waiters}",
        "Every rank must take part in every collective: see where the others wait.",
        context.victims,
        (fact(ahead, record), nothing_after(short, record.slot - 1)),
        sides=(side(ahead, record), side(short, None)),
    )
