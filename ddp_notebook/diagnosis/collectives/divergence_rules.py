"""Rules about ranks out of step: which kind of mistake the first fault of a rank is.

What a rank has too much, or lacks, says by itself only that two sides differ. Who is right is
told by the most ranks; among two, by what each has done before, and by the code where it is
known.
"""

from __future__ import annotations

from dataclasses import replace

from ddp_notebook.diagnosis.collectives import extra_rules, loop_rules, mismatch_rules
from ddp_notebook.diagnosis.collectives.alignment import Block, Deviation
from ddp_notebook.diagnosis.collectives.compare import (
    Difference,
    difference,
    labels_are_shared,
    moved,
)
from ddp_notebook.diagnosis.collectives.divergence import Parting
from ddp_notebook.diagnosis.context import Picture, named
from ddp_notebook.model import Category, Collective, Finding


def explain(picture: Picture, deviation: Deviation, fault: Block) -> Finding | None:
    """What the first fault of ranks that part from the others is."""
    parting = Parting(picture, deviation, fault)
    if moved(deviation, fault):
        return _order(parting)
    names = _other_names(deviation, fault)
    if names is not None:
        return mismatch_rules.mismatch(picture, deviation, names)
    if not fault.own or not fault.other:
        return extra_rules.one_sided(parting)
    if _meant_to_meet(parting):
        return mismatch_rules.mismatch(picture, deviation, fault)
    return _crossed(parting)


def _other_names(deviation: Deviation, fault: Block) -> Block | None:
    """The slot of the fault, if both sides have the same call there under another name."""
    own, other = deviation.track.at(fault.own_at), deviation.reference.at(fault.other_at)
    if own is None or other is None or not fault.in_step:
        return None
    if difference(own, other) is not Difference.LABEL or not labels_are_shared(deviation, own):
        return None
    return replace(fault, own=(own,), other=(other,))


def _meant_to_meet(parting: Parting) -> bool:
    """True when both sides are at the same call, and only what they bring differs."""
    own, other = parting.fault.own[0], parting.fault.other[0]
    if own.path == other.path and own.path:
        if difference(own, other) is Difference.LABEL:
            return True
        # In a loop one line may bring several shapes: then it is a matter of which comes next.
        return not _both_are_usual(parting, own, other)
    if own.operation != other.operation or own.operation == "barrier":
        return False
    if parting.mine.knows(other) or parting.theirs.knows(own):
        return False
    sources = parting.picture.sources
    known = sources.knows(own) and sources.knows(other)
    return sources.alternatives(own, other) if known else True


def _both_are_usual(parting: Parting, own: Collective, other: Collective) -> bool:
    mine, theirs = parting.mine, parting.theirs
    earlier = {
        *mine.track.keys[: mine.at - mine.track.first],
        *theirs.track.keys[: theirs.at - theirs.track.first],
    }
    keys = (
        mine.track.keys[own.slot - mine.track.first],
        theirs.track.keys[other.slot - theirs.track.first],
    )
    return earlier.issuperset(keys)


def _order(parting: Parting) -> Finding:
    own, other = parting.mine.here, parting.theirs.here
    assert own is not None and other is not None
    return parting.finding(
        Category.MISMATCHED_ORDER,
        parting.culprits(None),
        f"the same collectives in another order: {parting.mine.named} "
        f"{parting.mine.verb('begins', 'begin')} with {named(own)}, "
        f"{parting.theirs.named} with {named(other)}",
        "Call them in one order on every rank: sort what you go through.",
    )


# -- both sides have something else ------------------------------------------------------


def _crossed(parting: Parting) -> Finding:
    own, other = parting.fault.own[0], parting.fault.other[0]
    mine, theirs = parting.mine, parting.theirs
    if parting.picture.sources.swapped(own, other):
        return _order(parting)
    new_to_them, new_to_me = not theirs.knew(own), not mine.knew(other)
    first = _comes_first(parting, own, other)
    for full, short, records, passed in (
        (theirs, mine, parting.fault.other, first is other or not new_to_them),
        (mine, theirs, parting.fault.own, first is own or not new_to_me),
    ):
        found = extra_rules.buckets(parting, full, short, records, passed)
        if found is not None:
            return found
    if new_to_them and new_to_me:
        return _both_new(parting)
    if not new_to_them and not new_to_me:
        return loop_rules.skipped(parting)
    extra, lacking, record, there = (
        (mine, theirs, own, other) if new_to_them else (theirs, mine, other, own)
    )
    sources = parting.picture.sources
    if sources.in_one_loop(record, there) is False and not _for_some_ranks(parting, record, there):
        return loop_rules.past_the_loop(parting, extra, lacking, there)
    culprits = parting.culprits(extra)
    return extra_rules.only_here(parting.picture, culprits, extra, lacking, record, there)


def _for_some_ranks(parting: Parting, record: Collective, there: Collective) -> bool:
    """True when the code asks for the rank before `record`, and not so before `there`."""
    sources = parting.picture.sources
    condition, other = sources.condition(record), sources.condition(there)
    return condition is not None and condition.on_rank and condition != other


def _both_new(parting: Parting) -> Finding:
    own, other = parting.fault.own[0], parting.fault.other[0]
    mine, theirs = parting.mine, parting.theirs
    if parting.picture.sources.alternatives(own, other):
        return parting.finding(
            Category.DIVERGENT_CONTROL_FLOW,
            parting.culprits(None),
            f"the ranks take different branches: {parting.side_by_side()}",
            "Decide the branch from what all ranks share (all_reduce the decision first).",
        )
    extra, lacking, record, there = mine, theirs, own, other
    if _comes_first(parting, own, other) is other:
        extra, lacking, record, there = theirs, mine, other, own
    culprits = parting.culprits(extra)
    return extra_rules.only_here(parting.picture, culprits, extra, lacking, record, there)


def _comes_first(parting: Parting, own: Collective, other: Collective) -> Collective:
    """Which of two calls the other side left out: the conditional one, else the earlier line.

    Who is at the later line has passed the earlier one without calling it.
    """
    conditions = [parting.picture.sources.condition(each) for each in (own, other)]
    asks = [each is not None and each.on_rank for each in conditions]
    if asks[0] != asks[1]:
        return own if asks[0] else other
    for a, b in zip(own.path, other.path, strict=False):
        if (a.file, a.line) != (b.file, b.line):
            return other if a.file == b.file and b.line < a.line else own
    return own
