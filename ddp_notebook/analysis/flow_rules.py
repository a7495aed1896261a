"""Rules about ranks out of step: one collective too many or too few, another branch or order.

What a rank has too much, or lacks, says by itself only that two sides differ. Who is right is
told by the most ranks; among two, by what each has done before, and by the code where it is
known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from ddp_notebook.analysis import fingerprint_rules
from ddp_notebook.analysis.alignment import Block, Deviation, Track, site
from ddp_notebook.analysis.backwards import Lack, lack
from ddp_notebook.analysis.fingerprints import Difference, difference, labels_are_shared, moved
from ddp_notebook.analysis.picture import Picture, called, fact, in_slot, named
from ddp_notebook.model import Category, Collective, Finding, Ranks, name_ranks


def explain(picture: Picture, deviation: Deviation, fault: Block) -> Finding | None:
    """What the first fault of ranks that part from the others is."""
    own, other = fault.own[:1], fault.other[:1]
    if moved(deviation, fault):
        return _order(picture, deviation, fault)
    names = _other_names(deviation, fault)
    if names is not None:
        return fingerprint_rules.mismatch(picture, deviation, names)
    if own and other:
        if _meant_to_meet(picture, deviation, fault):
            return fingerprint_rules.mismatch(picture, deviation, fault)
        return _crossed(picture, deviation, fault)
    return _one_sided(picture, deviation, fault)


def _other_names(deviation: Deviation, fault: Block) -> Block | None:
    """The slot of the fault, if both sides have the same call there under another name."""
    own, other = deviation.track.at(fault.own_at), deviation.reference.at(fault.other_at)
    if own is None or other is None or not fault.in_step:
        return None
    if difference(own, other) is not Difference.LABEL or not labels_are_shared(deviation, own):
        return None
    return replace(fault, own=(own,), other=(other,))


# -- the sides ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """The ranks on one side of a fault, and their track; `at` is their slot there."""

    ranks: Ranks
    track: Track
    at: int

    def knows(self, record: Collective) -> bool:
        """True when they have called the same at the same lines, before or after."""
        return site(record) in self.track.sites

    def knew(self, record: Collective) -> bool:
        """True when they had called it before the fault."""
        return self.track.sites.get(site(record), self.at) < self.at


def _sides(deviation: Deviation, fault: Block) -> tuple[Side, Side]:
    return (
        Side(deviation.ranks, deviation.track, fault.own_at),
        Side(deviation.others, deviation.reference, fault.other_at),
    )


def _meant_to_meet(picture: Picture, deviation: Deviation, fault: Block) -> bool:
    """True when both sides are at the same call, and only what they bring differs."""
    own, other = fault.own[0], fault.other[0]
    if own.path == other.path and own.path:
        if difference(own, other) is Difference.LABEL:
            return True
        # In a loop the same line brings several shapes: then it is a matter of which comes next.
        keys = _earlier_keys(deviation, fault)
        return not (_key(deviation.track, own) in keys and _key(deviation.reference, other) in keys)
    if own.operation != other.operation or own.operation == "barrier":
        return False
    mine, theirs = _sides(deviation, fault)
    if mine.knows(other) or theirs.knows(own):
        return False
    known = picture.sources.knows(own) and picture.sources.knows(other)
    return picture.sources.alternatives(own, other) if known else True


def _earlier_keys(deviation: Deviation, fault: Block) -> set[int]:
    return {
        *deviation.track.keys[: fault.own_at - deviation.track.first],
        *deviation.reference.keys[: fault.other_at - deviation.reference.first],
    }


def _key(track: Track, record: Collective) -> int:
    return track.keys[record.slot - track.first]


# -- another order -----------------------------------------------------------------------


def _order(picture: Picture, deviation: Deviation, fault: Block) -> Finding:
    culprits = deviation.ranks
    if not deviation.sure:
        culprits = tuple(sorted({*deviation.ranks, *deviation.others}))
    own = deviation.track.at(fault.own_at)
    other = deviation.reference.at(fault.other_at)
    assert own is not None and other is not None
    return Finding(
        Category.MISMATCHED_ORDER,
        culprits,
        f"the same collectives in another order: {name_ranks(deviation.ranks)} "
        f"{'begins' if len(deviation.ranks) == 1 else 'begin'} with {named(own)}, "
        f"{name_ranks(deviation.others)} with {named(other)}",
        "Call them in one order on every rank: sort what you go through.",
        picture.victims,
        (fact(deviation.ranks, own), fact(deviation.others, other)),
    )


# -- both sides have something else ------------------------------------------------------


def _crossed(picture: Picture, deviation: Deviation, fault: Block) -> Finding | None:
    own, other = fault.own[0], fault.other[0]
    mine, theirs = _sides(deviation, fault)
    if picture.sources.swapped(own, other):
        return _order(picture, deviation, fault)
    for full, short, record in ((theirs, mine, other), (mine, theirs, own)):
        found = _buckets(picture, deviation, full, short, record, 1)
        if found is not None:
            return found
    new_to_them, new_to_me = not theirs.knew(own), not mine.knew(other)
    if new_to_them and new_to_me:
        return _both_new(picture, deviation, fault)
    if new_to_them != new_to_me:
        extra, lacking, record, there = (
            (mine, theirs, own, other) if new_to_them else (theirs, mine, other, own)
        )
        if picture.sources.in_one_loop(record, there) is False:
            return _left_the_loop(picture, deviation, extra, lacking, there)
        return _only_here(picture, deviation, extra, lacking, record, there)
    return _skipped(picture, deviation, fault)


def _both_new(picture: Picture, deviation: Deviation, fault: Block) -> Finding:
    own, other = fault.own[0], fault.other[0]
    mine, theirs = _sides(deviation, fault)
    if picture.sources.alternatives(own, other):
        culprits = mine.ranks if deviation.sure else _all(deviation)
        return _finding(
            picture,
            Category.DIVERGENT_CONTROL_FLOW,
            culprits,
            f"the ranks take different branches: {_sides_said(deviation, own, other)}",
            "Decide the branch from what all ranks share (all_reduce the decision first).",
            deviation,
            own,
            other,
        )
    first = _comes_first(picture, own, other)
    if first is own:
        return _only_here(picture, deviation, mine, theirs, own, other)
    return _only_here(picture, deviation, theirs, mine, other, own)


def _comes_first(picture: Picture, own: Collective, other: Collective) -> Collective:
    """Which of two calls the other side left out: the conditional one, else the earlier line.

    Who is at the later line has passed the earlier one without calling it.
    """
    conditions = [picture.sources.condition(each) for each in (own, other)]
    asks = [each is not None and each.on_rank for each in conditions]
    if asks[0] != asks[1]:
        return own if asks[0] else other
    for a, b in zip(own.path, other.path, strict=False):
        if (a.file, a.line) != (b.file, b.line):
            return other if a.file == b.file and b.line < a.line else own
    return own


def _skipped(picture: Picture, deviation: Deviation, fault: Block) -> Finding:
    """Both have done both before: one of them left out a step of the loop."""
    own, other = fault.own[0], fault.other[0]
    culprits = deviation.ranks if deviation.sure else _against_habit(deviation, fault)
    return _finding(
        picture,
        Category.DIVERGENT_CONTROL_FLOW,
        culprits,
        f"{name_ranks(culprits)} took another way through the loop: "
        f"{_sides_said(deviation, own, other)}",
        _TOGETHER,
        deviation,
        own,
        other,
    )


_TOGETHER = (
    "Let all ranks decide together whether to skip a step: all_reduce a flag, then branch on it."
)


def _against_habit(deviation: Deviation, fault: Block) -> Ranks:
    """Of two sides, the one that does not do what always came next until then."""
    track = deviation.track
    at = fault.own_at - track.first
    keys = track.keys[:at]
    mine = track.keys[at] if at < len(track.keys) else None
    index = fault.other_at - deviation.reference.first
    theirs = deviation.reference.keys[index] if index < len(deviation.reference.keys) else None
    if keys:
        after: list[int | None] = [b for a, b in pairwise(keys) if a == keys[-1]]
        own_votes, other_votes = after.count(mine), after.count(theirs)
        if own_votes != other_votes:
            return deviation.ranks if own_votes < other_votes else deviation.others
    return _all(deviation)


def _left_the_loop(
    picture: Picture, deviation: Deviation, past: Side, inside: Side, there: Collective
) -> Finding:
    """One side is past the loop in which the other still is."""
    way = picture.sources.way_around(there)
    category = Category.DIVERGENT_CONTROL_FLOW if way else Category.UNEVEN_INPUTS
    culprits = deviation.ranks if deviation.sure else past.ranks
    beyond = past.track.at(past.at)
    said = f"{name_ranks(past.ranks)} {_are(past.ranks)} past the loop"
    said += f", in {named(beyond)}" if beyond else ""
    return _finding(
        picture,
        category,
        culprits,
        f"{said}, while {name_ranks(inside.ranks)} {_are(inside.ranks)} in {named(there)}",
        UNEVEN_REMEDY if way is None else _TOGETHER,
        deviation,
        past.track.at(past.at) or there,
        there,
        (f"{way.place}: {way.place.text}",) if way else (),
    )


UNEVEN_REMEDY = (
    "Give every rank the same number of batches (DistributedSampler, drop_last=True), or use Join."
)


# -- one side has more -------------------------------------------------------------------


def _one_sided(picture: Picture, deviation: Deviation, fault: Block) -> Finding | None:
    mine, theirs = _sides(deviation, fault)
    full, short = (mine, theirs) if fault.own else (theirs, mine)
    records = fault.own or fault.other
    found = _buckets(picture, deviation, full, short, records[0], len(records))
    if found is not None:
        return found
    there = short.track.at(short.at)
    if any(not short.knows(record) for record in records):
        record = next(record for record in records if not short.knows(record))
        return _only_here(picture, deviation, full, short, record, there)
    culprits = deviation.ranks if deviation.sure else _against_habit(deviation, fault)
    extra = culprits == full.ranks
    times = "once more" if len(records) == 1 else f"{len(records)} collectives more"
    fewer = "once less" if len(records) == 1 else f"{len(records)} collectives less"
    said = (
        f"{name_ranks(full.ranks)} called {named(records[0])} {times} than "
        f"{name_ranks(short.ranks)}"
        if extra
        else f"{name_ranks(short.ranks)} called {named(records[0])} {fewer} than "
        f"{name_ranks(full.ranks)}"
    )
    return Finding(
        Category.DIVERGENT_CONTROL_FLOW,
        culprits,
        said,
        _TOGETHER,
        picture.victims,
        tuple(_evidence(full, short, records[0], there)),
    )


def _only_here(
    picture: Picture,
    deviation: Deviation,
    extra: Side,
    lacking: Side,
    record: Collective,
    there: Collective | None,
) -> Finding:
    """A collective that one side issues and the other never does."""
    culprits = deviation.ranks if deviation.sure else extra.ranks
    return only_here(picture, culprits, extra, lacking, record, there)


def only_here(
    picture: Picture,
    culprits: Ranks,
    extra: Side,
    lacking: Side,
    record: Collective,
    there: Collective | None,
) -> Finding:
    """A collective that one side issues and the other never does, whoever is right."""
    condition = picture.sources.condition(record)
    others = picture.standing(lacking.ranks)
    if there is not None:
        others = f"{name_ranks(lacking.ranks)} in {named(there)}"
    category = Category.CONDITIONAL_COLLECTIVE
    remedy = f"Call {called(record)} on every rank of its group: move it out of the condition."
    subgroup = _is_a_group(picture, extra.ranks, record)
    if record.operation == "barrier" and subgroup:
        category = Category.BARRIER_MISUSE
        remedy = f"Only members of group {subgroup} come here: dist.barrier(group=...) for them."
        culprits = extra.ranks
    elif record.operation == "barrier" and culprits == lacking.ranks and not condition:
        category = Category.BARRIER_MISUSE
        remedy = f"Let {name_ranks(lacking.ranks)} reach the barrier too."
    facts = list(_evidence(extra, lacking, record, there))
    if condition:
        facts.append(f"{condition.place}: {condition.place.text}")
    return Finding(
        category,
        culprits,
        f"only {name_ranks(extra.ranks)} {'calls' if len(extra.ranks) == 1 else 'call'} "
        f"{named(record)}{f' ({condition.place.text})' if condition else ''}; {others}",
        remedy,
        picture.victims,
        tuple(facts),
    )


def _is_a_group(picture: Picture, ranks: Ranks, record: Collective) -> str:
    """The name of the smaller group whose members are just these ranks, or ""."""
    groups = picture.case.collectives.groups
    return next((g for g, those in groups.items() if g != record.group and those == ranks), "")


def _buckets(
    picture: Picture,
    deviation: Deviation,
    full: Side,
    short: Side,
    record: Collective,
    count: int,
) -> Finding | None:
    """A backward pass of DDP in which one side reduced less."""
    what = lack(full.track, full.at, short.track, short.at, count)
    if what is None or what is Lack.ALL:
        return None
    culprits = short.ranks
    if deviation.sure and culprits != deviation.ranks:
        return None  # most ranks reduce less there: it is the others who do too much
    those = name_ranks(short.ranks)
    after = f"; {name_ranks(full.ranks)} {_have(full.ranks)} {in_slot(record)}"
    if what is Lack.SOME_BUCKETS:
        return Finding(
            Category.UNUSED_PARAMS,
            culprits,
            f"{those} did not reduce all buckets of gradients in {named(record)}: "
            "a parameter got no gradient there",
            "Use every parameter on every rank, or DistributedDataParallel("
            "find_unused_parameters=True).",
            picture.victims,
            tuple(_evidence(full, short, record, short.track.at(short.at))),
        )
    if not deviation.sure and not short.knows(record):
        return None
    category, said = Category.NO_SYNC_MISUSE, "no_sync() is on there, or backward was not called"
    if picture.sources.knows(record) and not picture.sources.mentions(record, "no_sync"):
        category, said = Category.DIVERGENT_CONTROL_FLOW, "backward was not called"
    return Finding(
        category,
        culprits,
        f"{those} went through forward and reduced no gradients ({said}){after}",
        "Let no_sync() and backward() be the same on all ranks in every iteration.",
        picture.victims,
        tuple(_evidence(full, short, record, short.track.at(short.at))),
    )


# -- words -------------------------------------------------------------------------------


def _evidence(full: Side, short: Side, record: Collective, there: Collective | None) -> list[str]:
    facts = [fact(full.ranks, record)]
    if there is not None:
        facts.append(fact(short.ranks, there))
    else:
        facts.append(f"{name_ranks(short.ranks)}: nothing after slot {short.track.end - 1}")
    return facts


def _finding(
    picture: Picture,
    category: Category,
    culprits: Ranks,
    cause: str,
    remedy: str,
    deviation: Deviation,
    own: Collective,
    other: Collective,
    facts: tuple[str, ...] = (),
) -> Finding:
    evidence = (fact(deviation.ranks, own), fact(deviation.others, other), *facts)
    return Finding(category, culprits, cause, remedy, picture.victims, evidence)


def _sides_said(deviation: Deviation, own: Collective, other: Collective) -> str:
    ranks, others = deviation.ranks, deviation.others
    return (
        f"{name_ranks(ranks)} {_are(ranks)} in {named(own)}, {name_ranks(others)} in {named(other)}"
    )


def _all(deviation: Deviation) -> Ranks:
    return tuple(sorted({*deviation.ranks, *deviation.others}))


def _are(ranks: Ranks) -> str:
    return "is" if len(ranks) == 1 else "are"


def _have(ranks: Ranks) -> str:
    return "has" if len(ranks) == 1 else "have"
