"""Rules about groups of some of the ranks: ranks that make others, or use them in another order."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.collectives import wait_graph
from ddp_notebook.diagnosis.collectives.alignment import CallSite, align_programs, call_site
from ddp_notebook.diagnosis.collectives.describe import named, numbered, short_name
from ddp_notebook.diagnosis.collectives.divergence import Divergence, classify, divergences
from ddp_notebook.diagnosis.collectives.explain import explain, how_to_move
from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks, outvoted
from ddp_notebook.model import (
    Collective,
    Finding,
    GroupMade,
    Ranks,
    at_place,
    by_value,
    format_ranks,
    name_ranks,
)

_MOST_SHOWN = 8
"""Groups of a rank in a line of evidence."""


def other_groups(context: Context) -> Iterator[Finding]:
    """Ranks whose calls of `new_group` of one number have other members: torch counts calls."""
    reports = context.case.ranks
    if all(e.groups_made == reports[0].groups_made for e in reports):
        return  # 10,000 ranks make 1,000 groups each
    calls: dict[int, dict[int, GroupMade]] = {}
    for e in reports:
        for made in e.groups_made:
            calls.setdefault(made.number, {})[e.rank] = made
    other = (n for n in sorted(calls) if len(set(map(_what, calls[n].values()))) > 1)
    number = next(other, None)  # later groups are counted wrongly for the same reason
    if number is None:
        return
    there = calls[number]
    members = {rank: _what(made) for rank, made in there.items()}
    sides = sorted(by_value(members), key=lambda side: len(side[0]))
    # A rank that has not made this call yet may be of either side. So a majority is one only if all
    # of these together could not turn it.
    most, second = (len(ranks) for ranks, _ in reversed(sides[-2:]))
    unseen = len(reports) - len(there)
    culprits = outvoted(members) if most > second + unseen else tuple(there)
    if len(culprits) == len(there):  # else those that a test of the rank lets through
        records = (Collective(r, 0, "new_group", path=made.path) for r, made in there.items())
        tests = ((record.rank, context.sources.condition(record)) for record in records)
        on_rank = tuple(rank for rank, test in tests if test is not None and test.on_rank)
        culprits = on_rank if 0 < len(on_rank) < len(there) else culprits
    gave: dict[int, str] = {}
    lists: dict[int, str] = {}  # that a rank gave to new_group, in order
    for maker, made in there.items():
        name = f" ({made.called})" if made.called else ""
        gave[maker] = f"{name_ranks(_ranks(context, made.members))}{name}"
        groups = [group.members for group in context.reports[maker].groups_made]
        shown = [f"[{format_ranks(_ranks(context, group))}]" for group in groups[:_MOST_SHOWN]]
        more = ", …" if len(groups) > _MOST_SHOWN else ""
        place = at_place(made.path[-1] if made.path else None)
        lists[maker] = f"`new_group` of {', '.join(shown)}{more}; group {number}{place}"
    mesh = all(made.of_mesh for made in there.values())
    fewest, largest = sides[0][0], sides[-1][0]
    yield catalogue.finding(
        "mesh-mismatch.other-meshes" if mesh else "subgroup-misuse.other-lists",
        culprits,
        waiting=tuple(rank for rank in context.reports if rank not in culprits),
        evidence=by_ranks(lists),
        number=number,
        first=fewest,
        members=gave[fewest[0]],
        second=largest,
        others=gave[largest[0]],
    )


def _what(made: GroupMade) -> tuple[Ranks, str]:
    """The arguments that all ranks must share; a group's description may be each rank's own."""
    return made.members, made.called if made.of_mesh else ""


def _ranks(context: Context, members: Ranks) -> Ranks:
    """Ranks of the default group as ranks of the session."""
    ranks = tuple(e.rank for e in context.case.ranks)
    return tuple(ranks[member] for member in members if member < len(ranks))


def new_group_not_by_all(context: Context) -> Iterator[Finding]:
    """Find ranks that wait in `new_group` for ranks that will not call it.

    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.new_group asks for all.
    """
    inside = tuple(e.rank for e in context.case.ranks if wait_graph.in_new_group(e))
    stuck = tuple(rank for rank in inside if rank in context.graph.stuck)
    # The store's file is gone, or lists differ: then no rank has left out a call.
    lost = any(e.file.lost for e in context.case.ranks)
    if not stuck or lost or next(other_groups(context), None) is not None:
        return
    absent = context.graph.waits[stuck[0]]
    elsewhere = tuple(r for r in absent if r in context.graph.stuck or context.finished(r))
    if not elsewhere:
        return
    place = next((e.path[-1] for e in context.case.ranks if e.rank in stuck and e.path), None)
    # Where more ranks left it out than call it, the call is what only some do.
    few = len(elsewhere) <= len(inside)
    yield catalogue.finding(
        "subgroup-misuse.not-by-all" if few else "subgroup-misuse.only-by-some",
        elsewhere if few else inside,
        waiting=context.victims,
        evidence=(
            f"{name_ranks(inside)}: `new_group`{at_place(place)}",
            context.standing(elsewhere),
        ),
        callers=inside,
        standing=context.briefly(elsewhere),
    )


def parted_over_groups(context: Context) -> Iterator[Finding]:
    """Ranks that went another way than most through all groups, where one group alone hides it.

    In a group of two either rank may be right, and a rank that left a call out meets the next one
    there, until another group lacks it. The ranks that run the same program in other groups of
    the kind show which way is the usual one. Only where ranks are stuck in several groups.
    """
    # In a mesh of 2 x 2 every group has two ranks, so no group has a majority; and who leaves out
    # a call over one dimension meets its peer's next call there, which looks fine. But all ranks
    # run one program: laid side by side over all groups, where equal kinds of groups count as
    # equal, three of four ranks agree.
    at, graph = context.graph.at, context.graph
    if context.interrupted or len({at[rank].group for rank in graph.stuck if rank in at}) < 2:
        return
    unbalanced = _unbalanced(context)
    programs = align_programs(context.collectives)
    for divergence in divergences(programs):
        records = (*divergence.fault.own, *divergence.fault.other)
        named = any(call_site(record) in unbalanced for record in records)
        meant = _may_all_call(context, divergence)
        if divergence.deviation.sure and named and meant:
            classified = classify(divergence, context.sources)
            if classified is not None:
                yield explain(context, classified)
                return


def _may_all_call(context: Context, divergence: Divergence) -> bool:
    """True when the ranks of each branch have a group in which to call what the other calls.

    That is the same group, or another of the same size: groups of one kind share no rank.
    """
    groups = context.collectives.groups.values()
    for branch, others in ((divergence.own, divergence.other), (divergence.other, divergence.own)):
        own = branch.here
        if own is None:
            continue
        members = set(wait_graph.members(context.case, own.group))
        alike = [members, *(set(g) for g in groups if len(g) == len(members))]
        kind = [group for group in alike if group == members or not group & members]
        if not all(any(rank in group for group in kind) for rank in others.ranks):
            return False
    return True


def _unbalanced(context: Context) -> set[CallSite]:
    """Return the call sites of groups in which one member has called less than another."""
    found: set[CallSite] = set()
    for group, alignment in context.alignments.items():
        ends = {
            alignment.sequences[rank].end if rank in alignment.sequences else 0
            for rank in wait_graph.members(context.case, group)
        }
        if len(ends) > 1 or any(d.alignment.group == group for d in context.divergences):
            for sequence in alignment.sequences.values():
                found.update(sequence.call_sites)
    return found


def opposite_groups(context: Context) -> Iterator[Finding]:
    """Ranks that wait for each other in collectives of different groups: a ring."""
    at = context.graph.at
    for ring in context.graph.cycles:
        records = [at[r] for r in ring if r in at and not at[r].is_point_to_point]
        if len(records) < len(ring) or len({record.group for record in records}) < 2:
            continue
        # A ring is how it ends. Ranks that came the same way through all groups, until one called
        # something else, wait for each other in just such a ring; where they parted says more.
        if next(parted_over_groups(context), None) is not None:
            return  # that one of them left the common way explains the ring
        finding = _only_some(context, records) or _one_side_more(context, records)
        yield finding or _ring_of_groups(context, ring, records)


def _one_side_more(context: Context, records: list[Collective]) -> Finding | None:
    """Find a group in which one rank calls one more, at lines where its peer never is.

    So do a sender and a receiver, each with a loop of its own. Which loop is wrong is not known.
    """
    for record in records:
        sequences = context.alignments[record.group].sequences
        for peer in context.graph.waits[record.rank]:
            there = sequences.get(peer)
            if there is None or there.end != record.slot:
                continue
            if {*sequences[record.rank].call_sites}.isdisjoint(there.call_sites):
                last = there.records[-1]
                return catalogue.finding(
                    "divergent-control-flow.one-side-more",
                    tuple(sorted((record.rank, peer))),
                    waiting=context.victims,
                    evidence=(
                        f"rank {record.rank}: {numbered(record)}",
                        f"rank {peer}: {numbered(last)}",
                        context.standing((peer,)),
                    ),
                    here=(record.rank,),
                    call=short_name(record),
                    peer=(peer,),
                )
    return None


def _only_some(context: Context, records: list[Collective]) -> Finding | None:
    """A ring in which some are behind a condition, in a call to which the others never came.

    And they have been where the others are now: it is no matter of the order.
    """
    at = context.graph.at
    calls = {rank: set(map(call_site, of)) for rank, of in context.collectives.of.items()}
    ways = [(record, call_site(record)) for record in records]
    for record, site in ways:
        here = tuple(sorted(rank for rank, own in at.items() if call_site(own) == site))
        there = [(other, elsewhere) for other, elsewhere in ways if elsewhere != site]
        apart = all(site not in calls[other.rank] for other, _ in there)
        passed = all(elsewhere in calls[rank] for _, elsewhere in there for rank in here)
        if not there or not apart or not passed:
            continue
        condition = context.sources.condition(record, there[0][0], here, (there[0][0].rank,))
        if condition is not None:
            others = tuple(rank for rank in at if rank not in here)
            facts = (f"rank {rank}: in {named(at[rank])}" for rank in here)
            return catalogue.finding(
                "conditional-collective.called-by-some",
                here,
                waiting=context.victims,
                evidence=(*facts, context.standing(others), condition.line),
                full=here,
                call=short_name(record),
                elsewhere=context.briefly(others),
                **how_to_move(record, condition),
            )
    return None


def _outvoted_in(context: Context, ring: Ranks, records: list[Collective]) -> Ranks:
    """Return the minority of a ring; every rank that waits from the same line has a vote.

    Also in another group, such as another row of the mesh; unless all are at one line.
    """
    one_line = len({call_site(record) for record in records}) == 1
    places = {
        rank: (at.group, at.slot) if one_line else call_site(at)
        for rank, at in context.graph.at.items()
    }
    of_ring = {places[record.rank] for record in records}
    waiting = [ranks for ranks, place in by_value(places) if place in of_ring]
    most = max(map(len, waiting))
    outvoted = {rank for ranks in waiting if len(ranks) < most for rank in ranks}
    return tuple(sorted(outvoted.intersection(ring)))


def _ring_of_groups(context: Context, ring: Ranks, records: list[Collective]) -> Finding:
    records = sorted(records, key=lambda each: each.rank)
    culprits = _outvoted_in(context, ring, records)
    if not culprits:
        # Those that are where they never were, while the others do what they did before.
        of = context.collectives.of
        new = tuple(
            record.rank
            for record in records
            if [*map(call_site, of[record.rank])].count(call_site(record)) < 2
        )
        culprits = new if 0 < len(new) < len(records) else ring
    barriers = all(record.operation == "barrier" for record in records)
    return catalogue.finding(
        "barrier-misuse.groups" if barriers else "mismatched-order.groups",
        culprits,
        waiting=context.victims,
        evidence=tuple(
            f"rank {record.rank} is waiting in group {record.called or record.group} for "
            f"{name_ranks(context.graph.waits[record.rank])} ({numbered(record)})"
            for record in records
        ),
        ring=ring,
    )
