"""Why ranks do not get on in a collective, or get on with wrong values: the rules, in order.

Two things are proof. What met in one slot and cannot be one collective is a mistake, whatever
became of it. And ranks that wait for what cannot come any more are stuck: then the lists of
all ranks, laid side by side, say who parted from whom, and where. Ranks that merely are at
different places are neither.

    fingerprint_rules.py  what met in a slot: shape, dtype, operation, root, name
    flow_rules.py         ranks out of step: too many, too few, other branch, other order
    stop_rules.py         ranks that finished, while others need more of them
    peer_rules.py         sends and receives; groups of some ranks
    fate_rules.py         ranks that died or raised
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ddp_notebook.diagnosis.collectives import (
    divergence_rules,
    mismatch_rules,
    p2p_rules,
    stop_rules,
)
from ddp_notebook.diagnosis.collectives.alignment import Alignment, Block, Deviation
from ddp_notebook.diagnosis.collectives.compare import Difference, reordered
from ddp_notebook.diagnosis.context import Judged, Picture, named
from ddp_notebook.diagnosis.progress import evidence_of, where_busy, works
from ddp_notebook.model import (
    Activity,
    Category,
    Collective,
    Finding,
    Ranks,
    format_ranks,
)

MOST_FINDINGS = 5
"""What goes wrong after so many mistakes follows from them."""


def conflicts(picture: Picture) -> list[Finding]:
    """What met in one slot and cannot be one collective, the first in time first."""
    found = [
        each
        for each in picture.judged
        if each.conflict is not None or reordered(each.deviation, each.fault)
    ]
    return _explained(picture, found)


def hurt(picture: Picture) -> Ranks:
    """The ranks whose end is explained by a slot in which the wrong things met."""
    ranks: set[int] = set()
    for each in picture.judged:
        if each.conflict is None or each.conflict[1] is Difference.LABEL:
            continue
        slot, tracks = each.conflict[0], each.alignment.tracks
        there = (rank for rank, track in tracks.items() if track.end > slot)
        ranks.update(rank for rank in there if picture.gone(rank))
    return tuple(sorted(ranks))


def out_of_step(picture: Picture) -> list[Finding]:
    """Where the lists part, once ranks are stuck in a collective of that group."""
    groups = {
        record.group for rank in picture.graph.stuck if (record := picture.graph.at.get(rank))
    }
    found = [
        each
        for each in picture.judged
        if each.alignment.group in groups
        and each.conflict is None
        and not reordered(each.deviation, each.fault)
    ]
    return _explained(picture, found)


def _explained(picture: Picture, found: list[Judged]) -> list[Finding]:
    """A finding for each deviation; ranks with the same mistake in one slot share one."""
    faults = [
        (_narrow(each.alignment, each.deviation, each.fault), each.fault)
        for each in found
        if each.fault is not None
    ]
    faults.sort(key=lambda each: _time(each[1]))
    merged: dict[tuple[Category, str, int], Finding] = {}
    for deviation, fault in faults:
        finding = divergence_rules.explain(picture, deviation, fault)
        if finding is None:
            continue
        key = finding.category, deviation.track.records[0].group, fault.other_at
        first = merged.get(key)
        merged[key] = finding if first is None else _merge(first, finding, deviation)
    return list(merged.values())[:MOST_FINDINGS]


def _narrow(alignment: Alignment, deviation: Deviation, fault: Block) -> Deviation:
    """Of the others only those that got as far as the fault: the rest is of no side yet."""
    far = tuple(r for r in deviation.others if alignment.tracks[r].end > fault.other_at)
    return replace(deviation, others=far or deviation.others)


def _merge(first: Finding, second: Finding, deviation: Deviation) -> Finding:
    ranks = {*first.ranks, *second.ranks}
    if not deviation.sure and not ranks & set(deviation.others):
        ranks |= set(deviation.others)  # no two agree: all carry the same mistake
    return replace(
        first,
        ranks=tuple(sorted(ranks)),
        evidence=tuple(dict.fromkeys((*first.evidence, *second.evidence))),
    )


def _time(fault: Block) -> tuple[int, int]:
    records = [*fault.own[:1], *fault.other[:1]]
    return min((each.issued_ns, each.number) for each in records)


def stragglers(picture: Picture) -> Iterator[Finding]:
    """Ranks that others wait for in collectives, and that are busy, or held: they will come."""
    late: dict[int, Collective] = {}
    for rank, record in sorted(picture.graph.at.items()):
        if picture.evidence[rank].activity is Activity.WAITING:
            for other in picture.graph.reach(rank):
                late.setdefault(other, record)
    for rank, record in sorted(late.items()):
        e = picture.evidence.get(rank)
        held = e is not None and e.activity is Activity.HELD
        if e is None or not (held or works(e)):
            continue
        where = f" at {e.path[-1]}" if e.path else where_busy(e)
        yield Finding(
            Category.STRAGGLER,
            (rank,),
            f"has not come to {named(record)} yet: it is "
            + ("held until stepped on" if held else f"busy{where}"),
            f"%ddp_step --ranks {format_ranks((rank,))}"
            if held
            else "Wait for it, or interrupt the cell.",
            picture.case.waiting,
            evidence_of(e),
            passing=True,
        )


def stuck_rules(picture: Picture) -> Iterator[Finding]:
    """All that only a stop proves."""
    yield from mismatch_rules.passed_over(picture)
    yield from out_of_step(picture)
    yield from stop_rules.stopped_short(picture)
    yield from p2p_rules.unmatched_messages(picture)
    yield from p2p_rules.new_group_not_by_all(picture)
    yield from p2p_rules.opposite_groups(picture)


def certain_rules(picture: Picture) -> Iterator[Finding]:
    """All that is a mistake whether ranks are stuck or not."""
    yield from p2p_rules.strangers(picture)
    yield from conflicts(picture)
    yield from p2p_rules.unequal_messages(picture)
